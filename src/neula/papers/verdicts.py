"""Verdicts on claims: the interval that the paper claims for a number, and the measured numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from neula.papers.data import Measurements, span

Interval = tuple[float, float]

MORE: Interval = (1.0, math.inf)  # interval for a claim that a ratio exceeds 1
EVERY: Interval = (1.0, 1.0)  # interval for counted cases: 1 if a statement is true, else 0
HALF_AN_ORDER = 10**0.5  # how far from "about an order of magnitude" a factor may be, up and down
MOST = 0.5  # part of the cases in which a claim, or its weaker form, must be true to hold in part
ASSUMED_NOISE = 1.1  # factor that a time may be off where the noise of a run was not measured


class Outcome(StrEnum):
    holds = "holds"
    in_part = "in part"
    fails = "does not hold"
    unknown = "not enough data"
    noisy = "too noisy"


@dataclass(frozen=True)
class ClaimCheck:
    """Our numbers and the interval that a paper claims for them."""

    # a number for each case, NaN where a method failed; none where nothing was measured.
    values: tuple[float, ...]
    claimed: Interval  # the interval of the claim, both ends included
    measured: str  # the numbers in words
    # The interval of a weaker claim, as "faster at all" for "six times faster": if the numbers lie in it, the
    # claim holds in part.
    weaker: Interval | None = None
    least: float = 1.0  # part of the values that must lie in the claimed interval

    def outcome(self, noise: float = 1.0) -> Outcome:
        """The verdict; *too noisy* if it is another one for values that are this factor larger or smaller,
        and none where the factor is NaN: the values are not those of the hardware.
        """
        if not self.values or math.isnan(noise):
            return Outcome.unknown
        factors = (1.0,) if self.claimed == EVERY else (1 / noise, 1.0, noise)
        found = {self._compared([factor * value for value in self.values]) for factor in factors}
        return found.pop() if len(found) == 1 else Outcome.noisy

    def _compared(self, values: list[float]) -> Outcome:
        if _part(values, self.claimed) >= self.least:
            return Outcome.holds
        weaker = self.claimed if self.weaker is None else self.weaker
        partly = max(_part(values, self.claimed), _part(values, weaker)) >= MOST
        return Outcome.in_part if partly else Outcome.fails

    @property
    def holds(self) -> bool:
        """Whether the claim holds, if the numbers are exact."""
        return self.outcome() is Outcome.holds

    @property
    def ours(self) -> str:
        """The interval of our values, or how many cases agree."""
        finite = sorted(value for value in self.values if not math.isnan(value))
        if self.claimed == EVERY:
            return f"{sum(value == 1.0 for value in self.values)} of {len(self.values)}"
        lost = len(self.values) - len(finite)
        ends = list(dict.fromkeys(_short(finite[k]) for k in (0, -1))) if finite else []
        return ", ".join([" to ".join(ends)] * bool(ends) + [f"{lost} failed"] * bool(lost)) or "none"

    @property
    def wanted(self) -> str:
        """The claimed interval."""
        low, high = self.claimed
        if self.claimed == EVERY:
            text = "all"
        elif high == math.inf:
            text = f"at least {_short(low)}"
        else:
            text = f"at most {_short(high)}" if low <= 0 else f"{_short(low)} to {_short(high)}"
        return text if self.least == 1.0 else f"{text}, in {self.least:.0%}"


def _short(value: float) -> str:
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e5 else f"{value:.3g}"


def _part(values: list[float], interval: Interval) -> float:
    low, high = interval
    return sum(low <= value <= high for value in values) / len(values)


@dataclass(frozen=True)
class Claim:
    """A statement of the paper and the test that it is put to."""

    text: str
    judge: Callable[[Measurements], ClaimCheck]
    timed: bool = False  # whether it compares times, which the noise of the run blurs


def within(
    values: Iterable[float | None],
    claimed: Interval,
    measured: str,
    *,
    weaker: Interval | None = None,
    least: float = 1.0,
) -> ClaimCheck:
    """Values, None or NaN where a method failed, compared with the claimed interval."""
    numbers = tuple(math.nan if value is None else float(value) for value in values)
    return ClaimCheck(numbers, claimed, measured, weaker, least)


def cases(found: Iterable[bool], measured: str, *, least: float = 1.0) -> ClaimCheck:
    """Cases, each of which agrees with the claim or does not."""
    return within(map(float, found), EVERY, measured, least=least)


def ratio(
    rows: Measurements,
    field: str,
    ours: str,
    theirs: str,
    claimed: Interval,
    *,
    by: str = "method",
    last: bool = False,
    weaker: Interval | None = None,
) -> ClaimCheck:
    """How many times a field of one series is that of another one, in every case or the last.

    The field ``by`` distinguishes series. One that was not measured leaves the claim without a verdict.
    """
    missing = [name for name in (ours, theirs) if not rows.where(**{by: name})]
    if missing:
        return within([], claimed, f"0 cases of {' and '.join(missing)}")
    found = rows.ratios(field, ours, theirs, by)
    words = f"{field} of {ours} over {theirs}: {span(found)}" + f", {found[-1]:.2f} for the largest" * last
    return within(found[-1:] if last else found, claimed, words, weaker=weaker)


def about(number: float, factor: float = 1.5) -> Interval:
    """The interval of "about this number"."""
    return number / factor, number * factor
