"""Output of the command line: summaries and tables for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    import numpy as np

    from neula.pipeline.result import Attempt, LUFactors

SHORT = 20  # answers of at most so many numbers are shown on a terminal when no output file is given

Facts = dict[str, Any]
Labelled = dict[str, str]  # a result as a JSON object, and as lines of a summary
Verdict = tuple[str, str]  # words for a result, and their style
DONE: Verdict = ("done", "bold")  # verdict of results without a certificate

SOLUTION = ("iterations", "backward_error", "tolerance", "condition", "forward_error", "digits")
FACTS = {
    "LstsqResult": (*SOLUTION, "factorization", "optimality", "residual_norm", "rank", "history", "passes"),
    "NNLSResult": (*SOLUTION, "residual_norm", "active_mask"),
    "LsqLinearResult": (*SOLUTION, "residual_norm", "active_mask"),
    "SolveResult": (*SOLUTION, "method", "growth", "history"),
    "QRResult": ("certificate",),
    "CholeskyResult": ("upper", "residual", "bound"),
    "EighResult": (
        *("eigenvalues", "errors", "evidence", "clusters", "gaps", "vector_errors"),
        *("residual", "residual_bound", "orthogonality", "orthogonality_bound"),
    ),
    "SVDResult": ("certificate", "relative_error", "s", "errors", "evidence"),
}
"""For programs, what a result has besides its verdict, engine and attempts."""

LEFT_OUT = ("x", "Q", "R", "L", "U", "Vh", "eigenvectors", "method", "digits", "time")
"""Rows of a printed result that are arrays, or that a summary shows otherwise."""


def certified(result: Any) -> tuple[Facts, Labelled, str | None]:
    """A result as a JSON object and as labelled lines; the accuracy that was reached, unless certified."""
    names = ("converged", "accuracy", "engine", *FACTS[type(result).__name__], "attempts")
    facts = facts_of(result, *names)
    rows = {"engine": result.engine, "tried": attempts(result.attempts)}
    rows |= {name: text for name, text in result._rows() if name not in LEFT_OUT}
    if "digits" in facts:
        from neula.certificates.forward_error import SURE
        from neula.pipeline.result import shown

        correct = shown.correct(result.digits) if result.forward_error <= SURE else "none is guaranteed"
        rows["digits of x"] = correct
    if hasattr(result, "full_rank"):
        rows["rank"] = f"{result.rank} of {result.full_rank}{rows['rank'].removeprefix(str(result.rank))}"
    if facts.get("clusters") is not None and (count := result.clusters.shape[-1]):
        apart = int((result.clusters.max(-1) + 1).min(initial=count))
        rows["clusters"] = f"{apart} of {count} eigenvalues"
    if "s" in rows:
        rows["singular values"] = rows.pop("s")
        if result.accepted is None:  # else all singular values, whatever the rank of A
            facts["rank"] = result.s.shape[-1]
            rows["rank"] = str(facts["rank"])
    return facts, rows, None if result.converged else _reached(result)


def _reached(result: Any) -> str:
    if hasattr(result, "backward_error"):
        return f"backward error {result.backward_error:.1e}, tolerance {result.tolerance:.1e}"
    if hasattr(result, "certificate"):
        found = result.certificate  # one, or those of a batch
        return "; ".join(map(str, found)) if isinstance(found, (tuple, list)) else str(found)
    bound = result.bound if hasattr(result, "bound") else result.residual_bound
    return f"residual {result.residual:.1e}, bound {bound:.1e}"


def facts_of(result: Any, *names: str) -> Facts:
    return {name: getattr(result, name) for name in names}


def lu(factors: LUFactors, rows: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> tuple[Facts, Labelled]:
    """LU factors as a JSON object and as lines; ``rows`` are those of A, permuted."""
    import numpy as np

    # Along one random vector: a product of the factors would take as long as they did.
    x = np.random.default_rng(0).standard_normal(rows.shape[-1])
    rows, lower, upper = (one.astype(np.result_type(one, np.float64)) for one in (rows, lower, upper))
    given = rows @ x
    lost = given - lower @ (upper @ x)
    part, whole = (np.atleast_1d(np.linalg.norm(one, axis=-1)) for one in (lost, given))
    residual = float(np.max(np.divide(part, whole, out=part, where=whole > 0), initial=0.0))
    facts = facts_of(factors, "variant", "compute", "storage", "engine", "growth", "storage_bytes")
    return facts | {"residual": residual}, {
        "engine": factors.engine,
        "formats": f"products in {factors.compute}, factors in {factors.storage}",
        "residual": f"{residual:.1e}",
        "growth": numbers(np.atleast_1d(factors.growth)),
    }


def attempts(tried: Sequence[Attempt]) -> str:
    verdicts = ("rejected", "accepted")
    return "\n".join(f"{one.method}: {verdicts[one.accepted]}, {one.reason}" for one in tried)


def numbers(values: np.ndarray, most: int = 8) -> str:
    flat = values.reshape(-1)
    return " ".join(f"{value:.4g}" for value in flat[:most]) + (" ..." if flat.size > most else "")


def estimates(
    names: Sequence[str], values: Any, errors: Any, lower: Any, upper: Any, level: float
) -> Labelled:
    """A line for each coefficient, with its standard error and, unless it is complex, confidence interval."""
    intervals = [""] * len(names)
    if lower is not None:
        ends = zip(lower, upper, strict=True)
        intervals = [f"   ({level:.0%}: {low:.6g} to {high:.6g})" for low, high in ends]
    lines = zip(names, values, errors, intervals, strict=True)
    return {name: f"{value:.8g} +- {error:.2g}{interval}" for name, value, error, interval in lines}


def is_table(array: Any) -> bool:
    """Whether an array is a vector or matrix, which text can hold."""
    return getattr(array, "values", array).ndim <= 2


def is_short(answer: Mapping[str, Any], *, on_terminal: bool) -> bool:
    """Whether an answer goes to the standard output by default."""
    arrays = [getattr(one, "values", one) for one in answer.values()]
    return len(arrays) == 1 and not (on_terminal and (arrays[0].size > SHORT or arrays[0].ndim > 2))


KEYWORDS = (
    "accuracy|algorithm|assume_a|compute|damp|engine|mode|panel|pivot|rcond|storage|tol|variant|weights"
)


def at_shell(message: str) -> str:
    """A message of a function, one line, with options and commands in place of keywords and functions."""

    def option(match: re.Match[str]) -> str:
        return f"--{match[1].replace('_', '-')} {match[2]}".rstrip()

    text = re.sub(rf"\b({KEYWORDS})='?([\w.-]*\w|)'?", option, " ".join(message.split()))
    text = re.sub(rf"^({KEYWORDS}|rank) must", r"--\1 must", text.replace(", or pass jitter='auto'", ""))
    return re.sub(r"\bneula\.(lstsq|solve|qr|svd)\b", r"'neula \1'", text)


def not_kept(answer: Mapping[str, Any]) -> str:
    """A note that an answer was not written to a file, and how to write it."""
    *first, last = answer
    if first:
        what, where = f"{', '.join(first)} and {last} were", "an .npz file"
    else:
        size = getattr(answer[last], "values", answer[last]).size
        what, where = f"{last}, of {size} numbers, was", "a file"
    return f"{what} not kept: give -o with the name of {where}, or send the answer through a pipe with -o -"


def verdict(*, certified: bool) -> Verdict:
    """The words for a measured result, and their style."""
    return ("certified", "bold green") if certified else ("NOT certified", "bold yellow")


def print_summary(console: Console, command: str, rows: Labelled, verdict: Verdict) -> None:
    """The verdict, and a labelled line for everything else."""
    console.print(Text.assemble((f"neula {command}", "bold"), ": ", verdict))
    console.print(grid(rows))


def plain_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """A console that prints texts as they are: names of files may look like markup."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)


def print_on_stdout(*things: Any, width: int | None = None) -> None:
    """Print tables and texts as they are, without markup; by default as wide as the terminal."""
    console = plain_console(width=width)
    for thing in things:
        console.print(thing)


def inputs(given: Mapping[str, Mapping[str, Any]]) -> Labelled:
    """Shape, dtype and file of each argument."""
    return {
        name: f"{' x '.join(map(str, one['shape']))} {one['dtype']}  {one['file']}"
        for name, one in given.items()
    }


def times(seconds: Mapping[str, float], outputs: Mapping[str, Sequence[str]]) -> Labelled:
    """How long each step took, and what was saved where."""
    steps = (
        f"{name} {value:.3g} s" if value >= 0.1 else f"{name} {1000 * value:.2g} ms"
        for name, value in seconds.items()
    )
    saved = {
        ", ".join(names): "on the standard output" if path == "-" else f"saved to {path}"
        for path, names in outputs.items()
    }
    return {"time": ", ".join(steps), **saved}


def grid(rows: Labelled) -> Table:
    """Labels in one column, texts in the other."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(f"  {name}", value)
    return table


def versions() -> Labelled:
    """Versions of everything that computes."""
    import numpy as np
    import scipy
    import torch

    import neula
    from neula.kernels.core import description

    packages = {package.__name__: package.__version__ for package in (neula, torch, np, scipy)}
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    machine = {"python": platform.python_version(), "threads": threads}
    return {**packages, **machine, "compiled core": description()}


def engine_table(offers: Sequence[Mapping[str, Any]]) -> Table:
    """The engines, with the measured rates of their formats."""
    table = Table("engine", "device", "format", "rate", "note")
    table.columns[3].justify = "right"
    for engine in offers:
        device = engine["device"] if engine["available"] else "not available"
        table.add_row(engine["engine"], device, "", "", engine["note"], style="bold")
        for name, offer in engine["formats"].items():
            table.add_row("", "", name, _rate(offer["rate_gflops"]), offer["note"])
    return table


def _rate(gflops: float | None) -> str:
    if gflops is None:
        return ""
    return f"{gflops / 1000:.3g} TFLOP/s" if gflops >= 1000 else f"{gflops:.3g} GFLOP/s"


def print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(_plain(value), allow_nan=False))


def _plain(value: Any) -> Any:
    """Reduce a result to what JSON has: NaN and infinities become null, complex numbers pairs."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, complex):
        return [_plain(value.real), _plain(value.imag)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
