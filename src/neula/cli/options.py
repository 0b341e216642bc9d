"""Arguments and options that several commands have: a meaning, a name and a help text once each."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
ACCURACIES = ("fp16", "bf16", "tf32", "fp32", "fp64", *_DTYPES)
"""Names that an accuracy has, known here so that a wrong one is refused before anything is read."""

EngineName = StrEnum("EngineName", ["auto", "cpu", "emulated", "cuda"])
Missing = StrEnum("Missing", ["error", "drop"])
Mode = StrEnum("Mode", ["reduced", "r"])
Certify = StrEnum("Certify", ["backward", "forward"])
Decimal = StrEnum("Decimal", {"point": ".", "comma": ","})


def option(text: str, *names: str, **more: Any) -> Any:
    """An option with its help text; its name is that of the parameter unless others are given."""
    return typer.Option(*names, help=text, **more)


def file_option(text: str, *names: str, **more: Any) -> Any:
    return option(text, *names, rich_help_panel="Files", **more)


def argument(name: str, text: str, **more: Any) -> Any:
    return typer.Argument(metavar=name, help=text, **more)


MatrixFile = Annotated[str, argument("A", "File of the matrix; - is the standard input.")]
RightHandSideFile = Annotated[str, argument("b", "File of one or several right-hand sides, or -.")]


def output_option(what: str) -> Any:
    """``-o`` of a command, with what it writes."""
    text = f"File for {what}; - is the standard output."
    return file_option(text, "--output", "-o", metavar="FILE")


def _file_option(name: str, what: str) -> Any:
    return file_option(f"File {what}.", name, metavar="FILE")


QFileOption = Annotated[str | None, _file_option("--q", "for Q alone")]
RFileOption = Annotated[str | None, _file_option("--r", "for R alone")]
WeightsOption = Annotated[
    str | None, _file_option("--weights", "of one weight per row, a factor: 1 / standard deviation")
]
SigmaOption = Annotated[str | None, _file_option("--sigma", "of one standard deviation of b per row")]
AbsoluteSigmaOption = Annotated[
    bool,
    option(
        "Take the standard deviations of --sigma as they are; by default they are scaled by the residuals.",
        "--absolute-sigma",
    ),
]


def check_absolute_sigma(absolute: bool, sigma: str | None) -> None:
    """Raise where there are no standard deviations to be taken as they are."""
    if absolute and sigma is None:
        raise ValueError("--absolute-sigma needs standard deviations: name them by --sigma")


def check_traced(algorithm: str | None, known: tuple[str, ...], **others: object) -> None:
    """Raise if the steps that ``--trace`` shows are not those of what is computed."""
    shown = " or ".join(known)
    if algorithm is not None and algorithm not in known:
        raise ValueError(f"--trace shows the steps of {shown}, not of {algorithm}: leave out one of the two")
    for name, value in others.items():
        if value:
            raise ValueError(f"--trace shows the steps of {shown} without --{name}: leave out one of the two")


def _complete_accuracy(incomplete: str) -> list[str]:
    return [name for name in ACCURACIES if name.startswith(incomplete)]


def _check_accuracy(given: str | None) -> str | None:
    """Refuse what is neither a name nor a number; which numbers will do depends on the matrix."""
    if given is None or given in ACCURACIES:
        return given
    try:
        float(given)
    except ValueError:
        names = ", ".join(map(repr, ACCURACIES))
        message = f"{given!r} is neither a backward error, as 1e-6, nor one of {names}."
        raise typer.BadParameter(message) from None
    return given


AccuracyOption = Annotated[
    str | None,
    option(
        "Accuracy of the answer: a format (fp16, bf16, tf32, fp32, fp64) or the largest acceptable "
        "backward error, such as 1e-6. The default is that of the input's dtype.",
        "--accuracy",
        metavar="FORMAT|NUMBER",
        callback=_check_accuracy,
        autocompletion=_complete_accuracy,
    ),
]
CertifyOption = Annotated[
    Certify,
    option(
        "Refine until the backward error has the accuracy, or the forward error: all digits of x.",
        "--certify",
    ),
]
RcondOption = Annotated[
    float | None, option("Singular values below rcond times the largest count as zero.", "--rcond")
]
ValuesOnlyOption = Annotated[
    bool, option("Compute no vectors, in less time; bounds are then a priori.", "--values-only")
]
EngineOption = Annotated[
    EngineName,
    option(
        "Where to compute: cpu, cuda (an NVIDIA GPU), or emulated (tensor cores on a CPU); auto is cpu.",
        "--engine",
    ),
]
ModeOption = Annotated[Mode, option("Compute Q and R, or R alone.")]
DecimalOption = Annotated[Decimal, file_option("Decimal separator of text files.", "--decimal")]
HeaderOption = Annotated[
    bool | None,
    file_option(
        "Whether the first lines of text files name the columns; by default the table decides.",
        "--header/--no-header",
    ),
]
MissingOption = Annotated[
    Missing, file_option("Lines with empty fields, NA or NaN: refuse them, or leave them out.", "--missing")
]
StreamOption = Annotated[
    bool,
    file_option("Read A in blocks of rows, whatever its size: .npy, Parquet and HDF5 files.", "--stream"),
]
MemoryOption = Annotated[
    str | None,
    file_option(
        "Memory to use, as 8G; if A does not fit, it is read in blocks. The default is the free memory.",
        "--memory",
        metavar="SIZE",
    ),
]
TraceOption = Annotated[
    bool, option("Show each panel, product and iteration of the low-precision algorithm.", "--trace")
]
JsonOption = Annotated[bool, file_option("Print one JSON object on stdout, with all facts.", "--json")]
