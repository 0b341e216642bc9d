"""Tables of the page "Links of each function": links of the sources, and chains of typical shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from neula.engines import FORMATS, EmulatedEngine, Engine, Tuning
from neula.engines.shipped import cpu_tuning, cuda_tuning
from neula.pipeline.chain import Link, Row, Rule, Table
from neula.problems.bounded import links as bounded
from neula.problems.definite import links as definite
from neula.problems.definite.problem import CholeskyOptions
from neula.problems.least_squares import links as least_squares
from neula.problems.least_squares.problem import LeastSquaresOptions
from neula.problems.low_rank import links as low_rank
from neula.problems.orthogonal import links as orthogonal
from neula.problems.orthogonal import raw
from neula.problems.orthogonal.problem import QROptions
from neula.problems.polar import links as polar
from neula.problems.polar.problem import PolarOptions
from neula.problems.spectra import links as spectra
from neula.problems.spectra.problem import SpectralOptions
from neula.problems.systems import links as systems
from neula.problems.systems.problem import SystemsOptions

TABLES: dict[str, Table[Any]] = {
    "least-squares": least_squares.TABLE,
    "systems": systems.TABLE,
    "qr": orthogonal.TABLE,
    "householder": raw.TABLE,
    "cholesky": definite.TABLE,
    "polar": polar.TABLE,
    "spectra": spectra.TABLE,
    "svd": low_rank.TABLE,
    "bounds": bounded.TABLE,
}

MACHINES = {
    "CPU": cpu_tuning(("fp32", "fp64")),
    "H200": cuda_tuning((9, 0), replayed_bytes=290_000_000),
}


def rows_of(table: Table[Any]) -> Iterator[Row[Any]]:
    """All rows, those in tuples, too."""
    for rows in table:
        yield from rows if isinstance(rows, tuple) else (rows,)


def table_of(name: str) -> str:
    """The table of a problem in Markdown."""
    lines = ["| link | arithmetic | where | when |", "|---|---|---|---|"]
    for row in rows_of(TABLES[name]):
        end = row.refiner.words if isinstance(row.refiner, Rule) else row.refiner
        label = row.factorization.replace(" {}", "").replace("{} ", "") + (f" + {end}" if end else "")
        given = row.arithmetics
        formats = given.words if isinstance(given, Rule) else ", ".join(given)
        if "{}" not in row.factorization and not isinstance(given, Rule):
            formats = "" if formats == "fp64" else formats
        when = "; ".join(rule.words for rule in row.when) or "always"
        lines.append(f"| {label} | {formats} | {row.place} | {when} |".replace("``", "`"))
    return "\n".join([*lines, "", *_examples(name)])


def _examples(name: str) -> Iterator[str]:
    if name not in EXAMPLES:
        return
    cases, chain = EXAMPLES[name]
    yield "| | " + " | ".join(MACHINES) + " |"
    yield "|---|" + "---|" * len(MACHINES)
    for words, case in cases.items():
        found = [", ".join(_labels(chain(tuning, *case))) for tuning in MACHINES.values()]
        yield f"| {words} | " + " | ".join(found) + " |"


def _labels(links: Sequence[Link[Any, Any]]) -> Iterator[str]:
    """Each in backquotes, one that follows itself once."""
    labels = [link.label for link in links]
    for before, label in zip(["", *labels], labels, strict=False):
        if label != before:
            yield f"`{label}`"


def _engine(tuning: Tuning) -> Engine:
    engine = EmulatedEngine("cpu")
    engine.tuning = tuning
    return engine


_COMMON: dict[str, Any] = {"dtype": torch.float64, "max_iterations": 60, "forward": False, "progress": None}


def _least_squares(tuning: Tuning, count: int, m: int, n: int, accuracy: str) -> list[Link[Any, Any]]:
    options = LeastSquaresOptions(
        **_COMMON,
        engine=_engine(tuning),
        target=FORMATS[accuracy],
        algorithm=None,
        compute=None,
        damp=0.0,
        weights=None,
        rcond=1e-13,
    )
    alone = least_squares.chain_alone(m, n, options, count)
    return [*least_squares.chain_together(count, m, n, options), *alone]


def _systems(tuning: Tuning, count: int, n: int, accuracy: str, positive: bool) -> list[Link[Any, Any]]:
    options = SystemsOptions(
        **_COMMON,
        engine=_engine(tuning),
        target=FORMATS[accuracy],
        positive=positive,
        pivot=None,
        compute=None,
    )
    return [*systems.chain_together(count, n, options), *systems.chain_alone(n, options, count)]


def _qr(tuning: Tuning, count: int, m: int, n: int, accuracy: str) -> list[Link[Any, Any]]:
    options = QROptions(FORMATS[accuracy], _engine(tuning))
    if orthogonal.go_together(count, m, n, tuning):
        return orthogonal.chain_together(m, n, options)
    return orthogonal.chain_alone(orthogonal.MatrixLayout(m, n, options.target.dtype), options)


def _cholesky(tuning: Tuning, count: int, n: int, accuracy: str) -> list[Link[Any, Any]]:
    return definite.chain(count, n, CholeskyOptions(FORMATS[accuracy], _engine(tuning)))


def _polar(tuning: Tuning, accuracy: str) -> list[Link[Any, Any]]:
    return polar.chain(PolarOptions(FORMATS[accuracy], _engine(tuning)))


def _spectra(
    tuning: Tuning, count: int, n: int, accuracy: str, symmetric: bool, part: tuple[int, int] | None = None
) -> Sequence[Link[Any, Any]]:
    return spectra.chain(count, n, SpectralOptions(FORMATS[accuracy], _engine(tuning), symmetric, part=part))


Cases = dict[str, tuple[Any, ...]]

EXAMPLES: dict[str, tuple[Cases, Callable[..., Sequence[Link[Any, Any]]]]] = {
    "least-squares": (
        {
            "20 x 5": (1, 20, 5, "fp64"),
            "2000 x 100": (1, 2000, 100, "fp64"),
            "1000 of 64 x 32": (1000, 64, 32, "fp64"),
            "4000 x 1500": (1, 4000, 1500, "fp64"),
            "2000 x 8000": (1, 2000, 8000, "fp64"),
            "131072 x 1024": (1, 131072, 1024, "fp64"),
            "32768 x 16384": (1, 32768, 16384, "fp64"),
        },
        _least_squares,
    ),
    "systems": (
        {
            "order 100": (1, 100, "fp64", False),
            "order 1000, fp32": (1, 1000, "fp32", False),
            "100 of order 64": (100, 64, "fp64", False),
            "order 10000": (1, 10000, "fp64", False),
            "order 32768": (1, 32768, "fp64", False),
            "order 1000, definite": (1, 1000, "fp64", True),
            "order 20000, definite": (1, 20000, "fp64", True),
        },
        _systems,
    ),
    "qr": (
        {
            "20 x 5, fp64": (1, 20, 5, "fp64"),
            "1000 of 64 x 32, fp32": (1000, 64, 32, "fp32"),
            "1024 x 1024, fp32": (1, 1024, 1024, "fp32"),
            "1000000 x 128, fp32": (1, 1_000_000, 128, "fp32"),
            "32768 x 16384, fp16": (1, 32768, 16384, "fp16"),
            "32768 x 16384, fp32": (1, 32768, 16384, "fp32"),
            "32768 x 16384, fp64": (1, 32768, 16384, "fp64"),
        },
        _qr,
    ),
    "cholesky": (
        {
            "order 100, fp64": (1, 100, "fp64"),
            "100 of order 64, fp32": (100, 64, "fp32"),
            "order 16384, fp32": (1, 16384, "fp32"),
        },
        _cholesky,
    ),
    "spectra": (
        {
            "`eigh`, order 1000, fp64": (1, 1000, "fp64", True),
            "`eigh`, order 1000, ten eigenvalues": (1, 1000, "fp64", True, (0, 9)),
            "`eigh`, 100 of order 300, fp32": (100, 300, "fp32", True),
            "`eigh`, order 8192, fp32": (1, 8192, "fp32", True),
            "`svd`, 4096 x 4096, fp32": (1, 4096, "fp32", False),
            "`svd`, 100 of 64 x 32, fp32": (100, 32, "fp32", False),
        },
        _spectra,
    ),
    "polar": ({"bf16": ("bf16",), "fp32": ("fp32",), "fp64": ("fp64",)}, _polar),
}
