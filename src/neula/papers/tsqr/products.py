"""The figures "Underflow probability" and "Evaluation of matmul"."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from neula.algorithms.corrected import corrected_product, scaled_product, split
from neula.engines import FP16, FP32, UNITS, CudaEngine, EmulatedEngine, Engine
from neula.kernels.precision import exact_matmul
from neula.kernels.products.gemm import RUN, corrected_gemm
from neula.kernels.products.parts import SCHEMES
from neula.papers.data import Measurements, Row, span
from neula.papers.drawing import Canvas
from neula.papers.errors import growth, product_error
from neula.papers.figure import Setting, described
from neula.papers.verdicts import MORE, ClaimCheck, cases, within

SMALLEST_NORMAL = -14  # exponent of the smallest normal number of fp16
SMALLEST = SMALLEST_NORMAL + 1 - FP16.significand  # exponent of the smallest number of fp16

PAPERS_SHIFT = 10
# item: T scale
SHIFTS = (0, PAPERS_SHIFT, SCHEMES["fp16_cor"].shift)
EXPONENTS = range(-40, FP16.max_exponent)
"""Of the numbers that are split: from where nothing is left to where none overflows yet."""

UNDERFLOW, SUBNORMAL = "underflow", "subnormal"
LEGEND = {UNDERFLOW: "underflow", SUBNORMAL: "underflow or gradual underflow"}

SIGMAS = 5  # standard deviations that a measured frequency may be off its probability


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

        Just below, and down to the smallest normal number, numbers of fp16 are ``2^SMALLEST`` apart. Numbers
        at most half of that away from ``2^exponent`` are rounded to it, since it is even; only the smallest
        number itself is odd, and its tie goes to zero.
        """
        unit = self.exponent - (FP32.significand - 1) + shift
        tie = 2.0 ** (exponent - unit) - 2.0 ** (SMALLEST - 1 - unit)
        return self.at_most(math.floor(tie) if exponent == SMALLEST else math.ceil(tie) - 1)


def probabilities(exponent: int, shift: int) -> dict[str, float]:
    """Probabilities of underflow to zero, and to zero or a subnormal number, by the formula."""
    remainder = Remainder(exponent)
    return {UNDERFLOW: remainder.below(SMALLEST, shift), SUBNORMAL: remainder.below(SMALLEST_NORMAL, shift)}


# --- measured ---------------------------------------------------------------------------------------------


def measure_underflow(setting: Setting, samples: int | None = None) -> Iterator[Row]:
    """Frequencies of underflow for random mantissas or the user's numbers, with the formula beside them."""
    count = samples or setting.pick(small=1 << 16, paper=1 << 22)
    generator = torch.Generator(setting.device).manual_seed(17)
    for exponent in setting.track(EXPONENTS, lambda exponent: f"numbers of 2^{exponent}"):
        significands = torch.randint(1 << 23, 1 << 24, (count,), generator=generator, device=setting.device)
        random = torch.ldexp(significands.float(), torch.tensor(exponent - 23, device=setting.device))
        a = random
        if setting.matrix is not None:  # the numbers between 2^exponent and twice that
            sizes = setting.matrix.to(random).abs()
            a = setting.matrix.to(random)[(sizes >= 2.0**exponent) & (sizes < 2.0 ** (exponent + 1))]
        for shift in SHIFTS if a.numel() else ():
            formula = {f"{name} (formula)": p for name, p in probabilities(exponent, shift).items()}
            head = {"shift": shift, "exponent": exponent, "samples": a.numel()}
            yield head | _frequencies(a, shift) | formula


def _frequencies(a: torch.Tensor, shift: int) -> dict[str, float]:
    high, low = split(a, FP16, scale=2.0**shift)
    small = (low.abs() < 2.0**SMALLEST_NORMAL) & (a != high)
    return {UNDERFLOW: float((small & (low == 0)).double().mean()), SUBNORMAL: float(small.double().mean())}


def draw_underflow(rows: Measurements, canvas: Canvas) -> None:
    """Both probabilities against the exponent: lines for the formula, points for what is measured."""
    axes = canvas.subplots(1, 2, sharey=True)
    for place, quantity in zip(axes, LEGEND, strict=True):
        for number, (shift, part) in enumerate(rows.by("shift").items()):
            exponents, label = part.column("exponent"), f"$2^{{{shift}}}$"
            formula, look = part.column(f"{quantity} (formula)"), {"color": f"C{number}"}
            place.plot(exponents, formula, label=f"{label}, formula", **look)
            place.plot(exponents, part.column(quantity), ".", label=f"{label}, measured", **look)
        place.set(xlabel="exponent e of a, in $[2^e, 2^{e+1})$", title=LEGEND[quantity])
        place.grid(alpha=0.3)
    axes[0].set(ylabel="probability", yscale="log", ylim=(1e-5, 2.0))
    axes[1].legend(title="remainder, scaled by", loc="lower left")


# --- claims -----------------------------------------------------------------------------------------------


def underflows(rows: Measurements) -> ClaimCheck:
    """A number near 1 is no small one; all of its remainders should survive."""
    [one] = rows.where(shift=0, exponent=0)
    part = [row for row in rows.where(shift=0) if row["exponent"] <= 0]
    always = max(row["exponent"] for row in part if row[SUBNORMAL] > 0.99)
    text = f"of remainders of numbers in [1, 2), {one[SUBNORMAL]:.1%} are subnormal or zero"
    return within([one[SUBNORMAL]], (0.01, 1.0), f"{text}, of those below 2^{always + 1} all")


def scaling_prevents(rows: Measurements) -> ClaimCheck:
    """Wherever ``fp16(a)`` is a normal number; below, a itself has lost bits."""
    without, scaled = (
        max(row[UNDERFLOW] for row in rows.where(shift=shift) if row["exponent"] >= SMALLEST_NORMAL)
        for shift in (0, PAPERS_SHIFT)
    )
    text = f"numbers from 2^{SMALLEST_NORMAL} on: {without:.1%} of remainders vanish, and {scaled:.2%} scaled"
    return cases([without > 0.5, scaled < 2.0**-9], text)


def as_the_formula(rows: Measurements) -> ClaimCheck:
    worst = max(_deviation(row, quantity) for row in rows for quantity in LEGEND)
    text = f"off by at most {worst:.1f} standard deviations in {len(LEGEND) * len(rows)} frequencies"
    return within([worst], (0.0, SIGMAS), text)


def _deviation(row: Row, quantity: str) -> float:
    """In standard deviations of the mean of that many samples; of one sample in place of none."""
    p, count = row[f"{quantity} (formula)"], row["samples"]
    return abs(row[quantity] - p) / math.sqrt(max(p * (1 - p), 1 / count) / count)


def one_more_bit(rows: Measurements) -> ClaimCheck:
    """Compares the scale of neula with that of the paper."""
    ours = max(rows.column("shift"))
    losses = [
        [row[SUBNORMAL] for row in rows.where(shift=shift) if SMALLEST_NORMAL <= row["exponent"] < 0]
        for shift in (ours, PAPERS_SHIFT)
    ]
    better, worse = (sum(part) / len(part) for part in losses)
    text = f"2^{SMALLEST_NORMAL} to 1: {better:.1%} subnormal or zero with 2^{ours}, {worse:.1%} with 2^10"
    return within([better / worse if ours > PAPERS_SHIFT else math.nan], (0.0, 1.0), text)


UNDERFLOW_FIGURE = described("tsqr-paper", "underflow", globals())


UNIT = UNITS["h100"]  # the emulated unit that truncates: that of the GPU on which the figure was measured
BLOCK = UNIT.block

FP32_PRODUCT = "fp32"
NEAREST, TOWARD_ZERO = "emulated, to nearest", "emulated, toward zero"
TOWARD_ZERO_RUNS = f"{TOWARD_ZERO}, runs of {RUN}"
HARDWARE, HARDWARE_RUNS, UNCORRECTED = "hardware", f"hardware, runs of {RUN}", "hardware, uncorrected"
EMULATED_UNCORRECTED = "emulated, uncorrected"

AS_FP32 = 1.5  # how many times the error of the fp32 product counts as the same

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def measure_products(
    setting: Setting, size: int | None = None, exponents: range | None = None
) -> Iterator[Row]:
    """Errors of products (n x k) (k x n) against k; of the user's A, k columns times their transpose."""
    # On a GPU so large that cuBLAS does not cut k into parts, whose sums it would round to nearest.
    n = size or setting.pick(small=64, paper=1024)
    if setting.device.type == "cpu":
        setting.notes.append("no hardware: this machine has no GPU")
    powers = exponents or setting.pick(small=range(4, 15), paper=range(4, 18))
    columns = math.inf if setting.matrix is None else setting.matrix.shape[1]
    sizes = [2**power for power in powers if 2**power <= columns] or [int(columns)]
    for k in setting.track(sizes, lambda k: f"k = {k}"):
        a = setting.random("uniform", n, k, dtype=torch.float32, seed=2 * k)[:n, :k]
        b = setting.random("uniform", k, n, dtype=torch.float32, seed=2 * k + 1)
        b = b if setting.matrix is None else a.mT
        part = min(n, 64) if setting.device.type == "cpu" else n  # emulation takes its time there
        for name, product in (_on_the_device(setting.device) | _emulated(setting.device)).items():
            x, y = (a[:part], b[:, :part]) if name.startswith("emulated") else (a, b)
            yield {
                "k": k,
                "product": name,
                "m": len(x),
                "n": len(x),
                "error": product_error(product(x, y), x, y),
            }


def _on_the_device(device: torch.device) -> dict[str, Product]:
    """Products that are not emulated: in fp32, and on the tensor cores of a GPU."""
    if device.type == "cpu":
        return {FP32_PRODUCT: exact_matmul}
    engine = CudaEngine(device, "fp16")
    return {
        FP32_PRODUCT: exact_matmul,
        UNCORRECTED: partial(scaled_product, engine=engine),
        HARDWARE: _in_one_run(engine),
        HARDWARE_RUNS: corrected_gemm,
    }


def _emulated(device: torch.device) -> dict[str, Product]:
    nearest, truncating = (EmulatedEngine(device, "fp16", unit) for unit in ("ideal", UNIT))
    return {
        EMULATED_UNCORRECTED: partial(scaled_product, engine=truncating),
        NEAREST: _in_one_run(nearest),
        TOWARD_ZERO: _in_one_run(truncating),
        TOWARD_ZERO_RUNS: partial(corrected_product, engine=truncating),
    }


def _in_one_run(engine: Engine) -> Product:
    """The paper's product: the unit sums all of it."""
    return lambda a, b: corrected_product(a, b, engine, run=a.shape[1])


def limits(rows: Measurements) -> ClaimCheck:
    """On the unit that there is; on its emulation where there is none."""
    product = HARDWARE if rows.where(product=HARDWARE) else TOWARD_ZERO
    part = rows.where(product=product)
    long = Measurements(row for row in part if row["k"] >= 8 * BLOCK)
    power = growth(long, "error", "k")
    last = rows.ratios("error", product, FP32_PRODUCT, "product")[-1]
    text = f"{product}: the error grows as k^{power:.2f}, to {last:.1f} times that of fp32 at k = "
    grows = last if power > 0.3 else math.nan
    return within([grows], (2 * AS_FP32, math.inf), f"{text}{part[-1]['k']}", tendency=MORE)


def uncorrected(rows: Measurements) -> ClaimCheck:
    product = UNCORRECTED if rows.where(product=UNCORRECTED) else EMULATED_UNCORRECTED
    errors = [error / FP16.u for error in rows.where(product=product).numbers("error")]
    return within(errors, (0.1, 2.0), f"{product}: {span(errors)} u of fp16")


# item: T RZ; T pseudo_TC
PRODUCTS = described("tsqr-paper", "products", globals())
