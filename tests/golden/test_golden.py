"""Some rows of the golden record again: equal, or sounder."""

from __future__ import annotations

import pytest

from .compare import Comparison
from .rows import FIRST_COMPLEX, FOLDER, Row, file_of, read, run, run_in_processes
from .ways import WAYS, Way, instructions

ROWS = 300
"""Of all ways together."""

COMPLEX_ROWS = 10
"""Of each way."""

ON_CPUS = {name: way for name, way in WAYS.items() if way.device == "cpu"}

ROUNDING = 3.0
"""By how much forward errors may differ from one machine to another in rows that are run again anywhere."""


def robust(name: str, way: Way) -> dict[int, Row]:
    """Rows that all ways and machines accept, or none: where rounding errors do not decide."""
    recorded = [read(path) for path in FOLDER.glob(file_of(name).name.split(".")[0] + "-*")]
    others = [read(path) for path in FOLDER.glob("*-avx*")]
    here = file_of(f"{name}, {instructions(way)}")
    base = read(here) if here.exists() else recorded[0]
    return {
        k: row
        for k, row in base.items()
        if all(_alike(row, other[k]) for other in recorded)
        and all(row.accepted == other[k].accepted for other in others if k in other)
    }


def _alike(one: Row, other: Row) -> bool:
    if (one.raised, one.accepted, len(one.members)) != (other.raised, other.accepted, len(other.members)):
        return False
    bounds = [(a[3], b[3]) for a, b in zip(one.members, other.members, strict=True)]
    return all(a == b or (None not in (a, b) and b / ROUNDING <= a <= ROUNDING * b) for a, b in bounds if a)


@pytest.mark.parametrize("name", ON_CPUS)
def test_rows(name: str) -> None:
    way = ON_CPUS[name]
    before = robust(name, way)
    of_complex = [number for number in before if number >= FIRST_COMPLEX][:COMPLEX_ROWS]
    numbers = [*list(before)[: ROWS // len(ON_CPUS) + 1], *of_complex]
    rows = run_in_processes(way, numbers, 1) if way.environment else run(way, numbers)
    comparison = Comparison()
    for row in rows:
        comparison.add(name, before[row.number], row)
    assert comparison.passed, str(comparison)


def row(**changes: object) -> Row:
    sound = {"number": 1, "checksum": 2, "problem": "lstsq", "findings": [], "raised": "", "ambiguous": False}
    return Row(**{**sound, "members": [[True, False, 3, 1e-15, 1e-16]], "seconds": 1.0, **changes})  # type: ignore[arg-type]


REFUSED = {"members": [[False, True, 3, 1.0, 1e-16]]}


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        (row(), row(), set()),
        (row(**REFUSED), row(), set()),
        (row(), row(checksum=3), {"another recipe"}),
        (row(), row(findings=["unsound: error"]), {"unsound"}),
        (row(), row(**REFUSED), {"not accepted any more"}),
        (row(), row(raised="LinAlgError", members=[]), {"not accepted any more"}),
        (row(), row(**REFUSED, ambiguous=True), {"excused"}),
        (row(members=[[True, False, 3, 1e-15, 5e-16]]), row(**REFUSED), {"excused"}),
        (row(), row(members=[[True, False, 3, 9e-15, 1e-16]]), set()),
        (row(), row(members=[[True, False, 3, 2e-14, 1e-16]]), {"larger forward errors"}),
    ],
)
def test_differences(before: Row, after: Row, kinds: set[str]) -> None:
    comparison = Comparison()
    comparison.add("a way", before, after)
    assert set(comparison.problems) == kinds
    # One excused row of one is more than a thousandth.
    assert comparison.passed == (not kinds)


def test_a_thousandth_is_excused() -> None:
    comparison = Comparison()
    comparison.add("a way", row(), row(**REFUSED, ambiguous=True))
    for _ in range(999):
        comparison.add("a way", row(), row())
    assert comparison.passed
    assert "equal or sounder" in str(comparison)
