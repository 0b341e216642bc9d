"""Whether a run is equal to the record, or sounder."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from .rows import Row

EXCUSED = 1e-3
"""Part of the rows that need not be accepted any more, if their rank is ambiguous or their true error near
the bound."""

GROWTH = 10.0
"""By how much a forward error may grow."""

ROUNDOFF = 2.0**-50
"""A forward error below is as good as none."""

SHOWN = 10
"""Rows of a kind that are printed."""


@dataclass
class Comparison:
    """Rows of two runs, matched by recipe and way: what is wrong, and where."""

    rows: int = 0
    problems: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, way: str, before: Row, after: Row) -> None:
        """Compare two rows of the same recipe."""
        self.rows += 1
        for kind, text in differences(before, after):
            self.problems[kind].append(f"{way}, recipe {before.number} ({before.problem}): {text}")
        if min(before.seconds, after.seconds) > 0:
            for name in (way, before.problem, "all"):
                self.times[name].append(after.seconds / before.seconds)

    @property
    def passed(self) -> bool:
        """Whether the run is equal or sounder."""
        excused = len(self.problems.get("excused", []))
        return not (self.problems.keys() - {"excused"}) and excused <= EXCUSED * self.rows

    def __str__(self) -> str:
        lines = []
        for kind, found in sorted(self.problems.items()):
            lines += [f"{len(found)} {kind}:", *(f"  {text}" for text in found[:SHOWN])]
        lines.append("time of a call, beside the record's (median):")
        lines += [f"  {statistics.median(t):5.2f}  {name}" for name, t in sorted(self.times.items())]
        lines.append(f"{self.rows} rows: {'equal or sounder' if self.passed else 'NOT equal or sounder'}")
        return "\n".join(lines)


def differences(before: Row, after: Row) -> Iterable[tuple[str, str]]:
    """Kinds of what is worse, with the numbers."""
    if before.checksum != after.checksum:
        yield "another recipe", "the campaign draws differently: record anew on the commit before"
        return
    if after.findings:
        yield "unsound", "; ".join(after.findings)
    if before.accepted and not after.accepted:
        excused = after.ambiguous or before.nearly_missed
        yield "excused" if excused else "not accepted any more", after.raised or "with a warning"
    elif before.accepted:
        for one, other in zip(before.members, after.members, strict=True):
            bounds = one[3], other[3]
            if None not in bounds and not bounds[1] <= GROWTH * max(bounds[0], ROUNDOFF):
                yield "larger forward errors", "{:.1e} before, {:.1e} after".format(*bounds)
