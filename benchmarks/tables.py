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
from benchmarks.compared import FOLDER, Source, comparisons, milliseconds, shown
from benchmarks.drop_ins import of_drop_ins
from benchmarks.sweeps import of_hard_sweep, of_special_sweep, of_sweep

_TABLE = re.compile(
    r"(?P<mark><!-- table: (?P<name>[\w ]+) -->\n)(?P<old>.*?)(?P<end><!-- end of table -->)", re.S
)


@dataclass(frozen=True)
class Line:
    """A problem, its rows in the benchmark of sizes, and the sizes that are shown."""

    problem: str
    where: Mapping[str, str]
    sizes: Sequence[tuple[int, ...]]


SPEED = (
    Line("least squares", {"problem": "lstsq", "matrix": "normal"}, [(64, 32), (16384, 2048)]),
    Line("least squares, not of full rank", {"problem": "lstsq", "matrix": "kernel"}, [(8000, 4000)]),
    Line("linear system", {"problem": "solve", "matrix": "normal"}, [(3000,)]),
    Line("positive definite system", {"problem": "solve definite", "matrix": "definite"}, [(3000,)]),
    Line("QR, float32", {"problem": "qr", "matrix": "float32"}, [(16384, 16384)]),
)
"""Rows of the README's table: gains and losses, all from one run."""


def speed(folder: Path = FOLDER) -> Iterator[Sequence[str]]:
    """Times of neula and of torch."""
    yield "problem", "size", "neula, ms", "torch, ms", "times as fast"
    for line in SPEED:
        found = {one.size: one for one in comparisons(Source("sizes", line.where), folder)}
        for size in line.sizes:
            one = found[size]
            times = milliseconds(one.ms), milliseconds(one.peer_ms)
            yield line.problem, shown(size), *times, f"{one.ratio:.2g}"


TABLES: Mapping[str, Callable[[], Iterator[Sequence[str]]]] = {
    "speed": speed,
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
