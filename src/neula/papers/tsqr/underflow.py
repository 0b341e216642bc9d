"""The figure "Underflow probability": what becomes of the remainder of an fp16 number in fp16."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from neula.algorithms.corrected import split
from neula.engines import FP16, FP32
from neula.kernels.products.parts import SCHEMES
from neula.papers.data import Measurements, Row
from neula.papers.drawing import Axes, Canvas
from neula.papers.figure import Figure, Setting
from neula.papers.verdicts import ClaimCheck, cases, claim, within

SMALLEST_NORMAL = -14
"""Exponent of the smallest normal number of fp16."""

SMALLEST = SMALLEST_NORMAL + 1 - FP16.significand
"""Exponent of the smallest number of fp16."""

PAPERS_SHIFT = 10
# item: T scale
SHIFTS = (0, PAPERS_SHIFT, SCHEMES["fp16_cor"].shift)
EXPONENTS = range(-40, FP16.max_exponent)
"""Of the numbers that are split: from where nothing is left to where none overflows yet."""

UNDERFLOW, SUBNORMAL = "underflow", "subnormal"
LEGEND = {UNDERFLOW: "underflow", SUBNORMAL: "underflow or gradual underflow"}

SIGMAS = 5
"""Standard deviations that a measured frequency may be off its probability."""


# --- the formula ------------------------------------------------------------------------------------------


# item: T underflow
@dataclass(frozen=True)
class Remainder:
    """The remainder ``a - fp16(a)`` of float32 numbers ``a = M 2^(e - 23)``, for uniform M in [2^23, 2^24).

    Rounding to fp16 drops the last ``dropped`` bits of M, to nearest: the remainder is ``+-j 2^(e - 23)``,
    where j is the distance from M to the nearest multiple of ``2^dropped``.
    """

    exponent: int

    @property
    def dropped(self) -> int:
        """13 bits, and one more for each binade below the normal numbers of fp16."""
        return FP32.significand - FP16.significand + max(0, SMALLEST_NORMAL - self.exponent)

    def at_most(self, limit: int) -> float:
        """Probability of ``1 <= j <= limit``."""
        whole, limit = 2 ** (FP32.significand - 1), max(0, limit)
        if self.dropped < FP32.significand:  # every distance occurs on both sides of a multiple
            period = 2**self.dropped
            return min(2 * limit, period - 1) / period
        if self.dropped == FP32.significand:  # M is rounded up to 2^24, and j is what it lacks
            return min(limit, whole) / whole
        return min(max(0, limit - whole + 1), whole) / whole  # fp16(a) is zero, and j is M

    def below(self, exponent: int, shift: int) -> float:
        """Probability that a remainder but zero, times ``2^shift``, is rounded to less than ``2^exponent``.

        Just below, and down to the smallest normal number, numbers of fp16 are ``2^SMALLEST`` apart.
        What is half of that or less away from ``2^exponent`` is rounded to it, since it is even; only the
        smallest number itself is odd, and its tie goes to zero.
        """
        unit = self.exponent - (FP32.significand - 1) + shift
        tie = 2.0 ** (exponent - unit) - 2.0 ** (SMALLEST - 1 - unit)
        return self.at_most(math.floor(tie) if exponent == SMALLEST else math.ceil(tie) - 1)


def probabilities(exponent: int, shift: int) -> dict[str, float]:
    """Of underflow to zero, and of that or a subnormal number, by the formula."""
    remainder = Remainder(exponent)
    return {UNDERFLOW: remainder.below(SMALLEST, shift), SUBNORMAL: remainder.below(SMALLEST_NORMAL, shift)}


# --- measured ---------------------------------------------------------------------------------------------


def measure_underflow(setting: Setting, samples: int | None = None) -> Iterator[Row]:
    """Frequencies of underflow for random mantissas, with the formula beside them."""
    count = samples or setting.pick(small=1 << 18, paper=1 << 22)
    generator = torch.Generator(setting.device).manual_seed(17)
    for exponent in setting.track(EXPONENTS, lambda exponent: f"numbers of 2^{exponent}"):
        significands = torch.randint(1 << 23, 1 << 24, (count,), generator=generator, device=setting.device)
        a = torch.ldexp(significands.float(), torch.tensor(exponent - 23, device=setting.device))
        for shift in SHIFTS:
            formula = probabilities(exponent, shift)
            yield {
                "shift": shift,
                "exponent": exponent,
                "samples": count,
                **_frequencies(a, shift),
                **{f"{name} (formula)": probability for name, probability in formula.items()},
            }


def _frequencies(a: torch.Tensor, shift: int) -> dict[str, float]:
    high, low = split(a, FP16, scale=2.0**shift)
    small = (low.abs() < 2.0**SMALLEST_NORMAL) & (a != high)
    return {UNDERFLOW: float((small & (low == 0)).double().mean()), SUBNORMAL: float(small.double().mean())}


def draw_underflow(rows: Measurements, canvas: Canvas) -> None:
    """Both probabilities against the exponent: lines for the formula, points for what is measured."""
    axes = canvas.subplots(1, 2, sharey=True)
    for place, quantity in zip(axes, LEGEND, strict=True):
        for number, (shift, part) in enumerate(rows.by("shift").items()):
            _draw_scale(place, part, quantity, f"C{number}", _scale_text(shift))
        place.set(xlabel="exponent e of a, in $[2^e, 2^{e+1})$", title=LEGEND[quantity])
        place.grid(alpha=0.3)
    axes[0].set(ylabel="probability", yscale="log", ylim=(1e-5, 2.0))
    axes[1].legend(title="remainder, scaled by", loc="lower left")


def _draw_scale(axes: Axes, rows: Measurements, quantity: str, color: str, label: str) -> None:
    exponents = rows.column("exponent")
    axes.plot(exponents, rows.column(f"{quantity} (formula)"), color=color, label=f"{label}, formula")
    axes.plot(exponents, rows.column(quantity), ".", color=color, label=f"{label}, measured")


def _scale_text(shift: object) -> str:
    return f"$2^{{{shift}}}$" if shift else "1 (not scaled)"


# --- claims -----------------------------------------------------------------------------------------------


@claim("without scaling, underflow can be observed")
def _underflows(rows: Measurements) -> ClaimCheck:
    """A number near 1 is no small one; all of its remainders should survive."""
    [one] = rows.where(shift=0, exponent=0)
    part = [row for row in rows.where(shift=0) if row["exponent"] <= 0]
    always = max(row["exponent"] for row in part if row[SUBNORMAL] > 0.99)
    text = f"of remainders of numbers in [1, 2), {one[SUBNORMAL]:.1%} are subnormal or zero"
    return within([one[SUBNORMAL]], (0.01, 1.0), f"{text}, of those below 2^{always + 1} all")


@claim("multiplying by 2^10 can prevent it")
def _scaling_prevents(rows: Measurements) -> ClaimCheck:
    """Wherever ``fp16(a)`` is a normal number; below, a itself has lost bits."""
    without, scaled = (
        max(row[UNDERFLOW] for row in rows.where(shift=shift) if row["exponent"] >= SMALLEST_NORMAL)
        for shift in (0, PAPERS_SHIFT)
    )
    text = f"numbers from 2^{SMALLEST_NORMAL} on: {without:.1%} of remainders vanish, and {scaled:.2%} scaled"
    return cases([without > 0.5, scaled < 2.0**-9], text)


@claim("(neula) measured frequencies are those of the formula")
def _as_the_formula(rows: Measurements) -> ClaimCheck:
    worst = max(_deviation(row, quantity) for row in rows for quantity in LEGEND)
    text = f"off by at most {worst:.1f} standard deviations in {len(LEGEND) * len(rows)} frequencies"
    return within([worst], (0.0, SIGMAS), text)


def _deviation(row: Row, quantity: str) -> float:
    """In standard deviations of the mean of that many samples; of one sample in place of none."""
    p, count = row[f"{quantity} (formula)"], row["samples"]
    return abs(row[quantity] - p) / math.sqrt(max(p * (1 - p), 1 / count) / count)


@claim("(neula) 2^11 leaves fewer subnormal than 2^10")
def _one_more_bit(rows: Measurements) -> ClaimCheck:
    """What neula scales by, against what the paper does."""
    ours = max(rows.column("shift"))
    losses = [
        [row[SUBNORMAL] for row in rows.where(shift=shift) if SMALLEST_NORMAL <= row["exponent"] < 0]
        for shift in (ours, PAPERS_SHIFT)
    ]
    better, worse = (sum(part) / len(part) for part in losses)
    text = f"2^{SMALLEST_NORMAL} to 1: {better:.1%} subnormal or zero with 2^{ours}, {worse:.1%} with 2^10"
    return within([better / worse if ours > PAPERS_SHIFT else math.nan], (0.0, 1.0), text)


UNDERFLOW_FIGURE = Figure(
    name="underflow",
    title="Underflow probability of the remainder",
    shows="How often the remainder `fp16((a - fp16(a)) s)` of random float32 numbers a in [2^e, 2^(e+1)) is "
    "zero though `a - fp16(a)` is not (underflow), and how often zero or subnormal (with gradual underflow), "
    "for s = 1, for the paper's 2^10, and for neula's 2^11. Lines: the formula for equally likely mantissas.",
    scaled_down="2^18 instead of 2^22 numbers for each exponent",
    measure=measure_underflow,
    draw=draw_underflow,
    claims=(_underflows, _scaling_prevents, _as_the_formula, _one_more_bit),
    size=(11, 5),
    takes_matrix=False,
)
