"""Tables in pages that are read as they are: what stands between two marks is written from the data.

``<!-- table: speed -->`` opens one of :data:`TABLES`, ``<!-- end of table -->`` closes it. Tables of all rows
of a benchmark are made with the site, by ``docs/benchmark_tables.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bounds import bounds, of_sizes
from benchmarks.compared import FOLDER, MACHINES, Comparison, Source, comparisons, milliseconds, shown
from benchmarks.drop_ins import of_drop_ins
from benchmarks.sweeps import of_hard_sweep, of_special_sweep, of_sweep
from neula.papers.data import ExperimentData

_TABLE = re.compile(
    r"(?P<mark><!-- table: (?P<name>[\w ]+) -->\n)(?P<old>.*?)(?P<end><!-- end of table -->)", re.S
)


@dataclass(frozen=True)
class Line:
    """A problem, where it was measured, and the sizes that are shown."""

    problem: str
    source: Source
    sizes: Sequence[tuple[int, ...]]


_ERRORS, _DIFFERENCE = ("error", "torch_error"), ("difference",)
_OPTIMALITY, _BACKWARD = ("optimality", "torch_optimality"), ("backward_error", "torch_backward_error")

SPEED = (
    Line(
        "least squares",
        Source("sizes", {"problem": "lstsq", "matrix": "normal"}, _DIFFERENCE),
        [(64, 32), (2000, 500), (16384, 2048)],
    ),
    Line("least squares", Source("bench-lstsq", errors=_ERRORS), [(131072, 4096), (32768, 16384)]),
    Line(
        "least squares, condition 1e5",
        Source("lstsq", {"matrix": "arithmetic"}, _OPTIMALITY),
        [(32768, 16384)],
    ),
    Line(
        "least squares, one large singular value",
        Source("lstsq", {"matrix": "cluster_large"}, _OPTIMALITY),
        [(32768, 16384)],
    ),
    Line(
        "linear system",
        Source("sizes", {"problem": "solve", "matrix": "normal"}, _DIFFERENCE),
        [(500,), (3000,), (8192,)],
    ),
    Line("linear system", Source("solve", {"matrix": "normal"}, _BACKWARD), [(32768,)]),
    Line(
        "positive definite system",
        Source("sizes", {"problem": "solve definite", "matrix": "definite"}, _DIFFERENCE),
        [(6000,)],
    ),
    Line("positive definite system", Source("solve", {"matrix": "definite"}, _BACKWARD), [(32768,)]),
    Line("QR", Source("bench-qr", {"accuracy": "fp32"}, _ERRORS), [(16384, 1024), (32768, 16384)]),
    Line("1024 QRs", Source("batched_qr", errors=("residual", "torch_residual")), [(1024, 256, 128)]),
    Line(
        "product",
        Source("matmul", {"compute": "fp16_cor", "entries": "uniform(-1, 1)"}, _ERRORS),
        [(1024, 1024, 1024), (16384, 16384, 16384)],
    ),
    Line("least squares", Source("lstsq", {"matrix": "normal"}, _OPTIMALITY, "CPU"), [(16384, 2048)]),
    Line("linear system", Source("solve", {"matrix": "normal"}, _BACKWARD, "CPU"), [(2048,)]),
)
"""What the README shows, from small to large, gains and losses."""


def speed(folder: Path = FOLDER) -> Iterator[Sequence[str]]:
    """Times of neula and of torch."""
    yield "", "size", "on", "neula, ms", "torch, ms", "times as fast", "errors of both, or difference of x"
    for line in SPEED:
        found = {one.size: one for one in comparisons(line.source, folder)}
        for size in line.sizes:
            if size in found:
                yield line.problem, shown(size), line.source.machine, *_times(found[size])


def _times(one: Comparison) -> tuple[str, str, str, str]:
    if len(one.errors) == 1:
        accuracy = f"difference {one.errors[0]:.0e}"
    else:
        accuracy = ", ".join(f"{error:.0e}" for error in one.errors)
    return milliseconds(one.ms), milliseconds(one.peer_ms), f"{one.ratio:.2g}", accuracy


def accuracy(folder: Path = FOLDER) -> Iterator[Sequence[str]]:
    """Correct digits of the coefficients that NIST has certified."""
    yield "data set", "condition", "neula", "SciPy", "torch"
    for row in ExperimentData.read(folder / f"nist-{MACHINES['CPU']}.json").rows:
        digits = (f"{row[name]:.1f}" for name in ("digits", "scipy_digits", "torch_digits"))
        yield row["set"], f"{row['condition']:.2g}".replace("e+0", "e"), *digits


TABLES: Mapping[str, Callable[[], Iterator[Sequence[str]]]] = {
    "speed": speed,
    "accuracy": accuracy,
    "bounds": bounds,
    "sizes": of_sizes,
    "sweep": of_sweep,
    "hard sweep": of_hard_sweep,
    "special sweep": of_special_sweep,
    "drop ins": of_drop_ins,
}


def filled(page: str) -> str:
    """A page with its tables as the data say."""

    def fill(found: re.Match[str]) -> str:
        old = [_cells(line) for line in found["old"].splitlines() if line.startswith("|")]
        rows = _with_notes([[*row] for row in TABLES[found["name"]]()], old)
        return f"{found['mark']}\n{_markdown(rows)}\n{found['end']}"

    return _TABLE.sub(fill, page)


def _with_notes(new: list[list[str]], old: list[list[str]]) -> list[list[str]]:
    """Columns that are written by hand stand at the end, and stay with what the first two cells say."""
    width = len(new[0])
    notes = {tuple(row[:2]): row[width:] for row in old}
    none = [""] * max((len(note) for note in notes.values()), default=0)
    return [row + notes.get(tuple(row[:2]), none) for row in new]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _markdown(rows: list[list[str]]) -> str:
    head, *body = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *body))
