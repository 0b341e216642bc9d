"""``neula bench`` on several machines, beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.compared import FOLDER, milliseconds, shown, size_of
from neula.papers.data import ExperimentData, Row

SWEPT = {
    "EPYC": "amd-epyc",
    "EPYC, AVX2": "amd-epyc-avx2",
    "Xeon": "intel-xeon",
    "Xeon, AVX2": "intel-xeon-avx2",
}
"""Column headings of the machines, and the ends of the names of their files."""

DTYPES = ("float64", "float32")


HARD = "bench-sweep-1e09"
"""``neula bench --condition 1e9 --quick``."""


SPECIAL = "bench-sweep-special"
"""``neula bench --special``."""


def of_hard_sweep(folder: Path = FOLDER) -> Iterator[Sequence[str]]:
    """Times and errors where matrices have condition 1e9; in bold what is slower than it may be."""
    return _times_and_errors(folder / f"{HARD}-{SWEPT['EPYC']}.json")


def of_special_sweep(folder: Path = FOLDER) -> Iterator[Sequence[str]]:
    """The same of problems that are not plain."""
    return _times_and_errors(folder / f"{SPECIAL}-{SWEPT['EPYC']}.json")


def _times_and_errors(path: Path) -> Iterator[Sequence[str]]:
    yield "", "size", "neula, ms", "peer, ms", "forward error", "peer"
    for row in ExperimentData.read(path).rows:
        ms, known = milliseconds(row["ms"]), row["forward_error"]
        yield (
            f"`{row['problem']}`",
            shown(size_of(row)),
            ms if row["within"] else f"**{ms}**",
            milliseconds(row["peer_ms"]),
            "" if known is None else f"{known:.0e}",
            row["peer"],
        )


def of_sweep(folder: Path = FOLDER) -> Iterator[Sequence[str]]:
    """Neula's times relative to those of its peers; in bold what is slower than it may be."""
    paths = {name: folder / f"bench-sweep-{machine}.json" for name, machine in SWEPT.items()}
    found = {name: ExperimentData.read(path).rows for name, path in paths.items() if path.exists()}
    yield "", "size", *(f"{name}, {dtype}" for name in found for dtype in DTYPES)
    keys = dict.fromkeys((row["problem"], row["shape"]) for rows in found.values() for row in rows)
    for problem, shape in keys:
        known = {"problem": problem, "shape": shape}
        cells = [_cell(rows.where(**known, dtype=dtype)) for rows in found.values() for dtype in DTYPES]
        yield f"`{problem}`", shown(size_of(known)), *cells


def _cell(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    text = f"{rows[0]['ms'] / rows[0]['peer_ms']:.2g}"
    return text if rows[0]["within"] else f"**{text}**"
