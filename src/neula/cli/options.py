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

FILES = "Files"  # the heading above the options about files

MatrixFile = Annotated[str, typer.Argument(metavar="A", help="File of the matrix; - is the standard input.")]
RightHandSideFile = Annotated[
    str, typer.Argument(metavar="b", help="File of one or several right-hand sides, or -.")
]


def output_option(what: str) -> Any:
    """``-o`` of a command, with what it writes."""
    text = f"File for {what}; - is the standard output."
    return typer.Option("--output", "-o", metavar="FILE", rich_help_panel=FILES, help=text)


def _file_option(name: str, what: str) -> Any:
    return typer.Option(name, metavar="FILE", rich_help_panel=FILES, help=f"File {what}.")


QFileOption = Annotated[str | None, _file_option("--q", "for Q alone")]
RFileOption = Annotated[str | None, _file_option("--r", "for R alone")]
WeightsOption = Annotated[str | None, _file_option("--weights", "of one weight per row")]
SigmaOption = Annotated[str | None, _file_option("--sigma", "of one standard deviation of b per row")]
AbsoluteSigmaOption = Annotated[
    bool,
    typer.Option(
        "--absolute-sigma",
        help="Take the standard deviations of --sigma as they are; by default they are scaled by the "
        "residuals.",
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
    typer.Option(
        "--accuracy",
        metavar="FORMAT|NUMBER",
        callback=_check_accuracy,
        autocompletion=_complete_accuracy,
        help="Accuracy of the answer: a format (fp16, bf16, tf32, fp32, fp64) or the largest acceptable "
        "backward error, such as 1e-6. The default is that of the input's dtype.",
    ),
]
CertifyOption = Annotated[
    Certify,
    typer.Option(
        "--certify",
        help="Error to refine to the accuracy: the backward error, or the forward error of x.",
    ),
]
RcondOption = Annotated[
    float | None, typer.Option("--rcond", help="Singular values below rcond times the largest count as zero.")
]
ValuesOnlyOption = Annotated[
    bool, typer.Option("--values-only", help="Compute no vectors, in less time; bounds are then a priori.")
]
EngineOption = Annotated[EngineName, typer.Option("--engine", help="Engine that multiplies matrices.")]
ModeOption = Annotated[Mode, typer.Option(help="Compute Q and R, or R alone.")]
DecimalOption = Annotated[
    Decimal,
    typer.Option("--decimal", rich_help_panel=FILES, help="Decimal separator of text files."),
]
HeaderOption = Annotated[
    bool | None,
    typer.Option(
        "--header/--no-header",
        rich_help_panel=FILES,
        help="Whether the first lines of text files name the columns; by default the table decides.",
    ),
]
MissingOption = Annotated[
    Missing,
    typer.Option(
        "--missing",
        rich_help_panel=FILES,
        help="Lines with empty fields, NA or NaN: refuse them, or leave them out.",
    ),
]
StreamOption = Annotated[
    bool,
    typer.Option(
        "--stream",
        rich_help_panel=FILES,
        help="Read A in blocks of rows, whatever its size: .npy, Parquet and HDF5 files.",
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        rich_help_panel=FILES,
        help="Memory to use, as 8G; if A does not fit, it is read in blocks. The default is the free memory.",
    ),
]
TraceOption = Annotated[
    bool,
    typer.Option("--trace", help="Show each panel, product and iteration of the low-precision algorithm."),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", rich_help_panel=FILES, help="Print one JSON object on stdout, with all facts."),
]
