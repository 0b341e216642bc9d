"""The figures of accuracy, performance, underflow and products, in the paper's modes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

import neula
from neula.algorithms.corrected import corrected_product, scaled_product, split
from neula.certificates.bounds import orthogonality_bound, residual_bound
from neula.engines import FP16, FP32, UNITS, CudaEngine, EmulatedEngine, Engine
from neula.kernels.precision import exact_matmul
from neula.kernels.products.gemm import RUN, corrected_gemm
from neula.kernels.products.parts import SCHEMES
from neula.papers.data import Measurements, Row, span
from neula.papers.drawing import Canvas
from neula.papers.errors import backward_error, growth, orthogonality_defect, product_error
from neula.papers.figure import Setting
from neula.papers.measuring import householder_flops, steady_seconds
from neula.papers.verdicts import MORE, ClaimCheck, cases, within

CORRECTED = FP16_COR, TF32_COR = "fp16_cor", "tf32_cor"
UNCORRECTED = FP16_NOCOR, TF32_NOCOR = "fp16_nocor", "tf32_nocor"
FP32_NOTC = "fp32_notc"
# item: T modes
MODES = (FP16_COR, FP16_NOCOR, TF32_COR, TF32_NOCOR, FP32_NOTC)
ACCURATE = (*CORRECTED, FP32_NOTC)
AUTO = "auto"  # the default of ``neula.tsqr``
HOUSEHOLDER = "torch.linalg.qr"  # householder QR of cuSOLVER on a GPU, of LAPACK on a CPU

COLUMNS = 128
BYTES = 40  # memory of an entry: A, Q, and the copies that they are made from

TRUNCATING, NEAREST, SLIDES = "emulated", "to nearest", "as in the slides"
"""Emulated units: one that truncates as an A100 does, one that rounds to nearest, and the former with tiles,
scaling and reflections of the slides.
"""


def emulated(a: torch.Tensor, mode: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, Q and R in a corrected mode on each of the emulated units."""
    slides = mode.replace("_cor", "_slides")
    for name, unit, compute in (
        (TRUNCATING, "a100", mode),
        (NEAREST, "ideal", mode),
        (SLIDES, "a100", slides if a.shape[1] <= COLUMNS else mode),
    ):
        yield f"{mode}, {name}", *neula.tsqr(a, compute=compute, engine=EmulatedEngine(a.device, unit=unit))


QUANTITIES = {
    "residual": ("||A - QR||$_F$ / ||A||$_F$", "residual"),
    "orthogonality": ("||Q$^T$Q - I||$_F$ / $\\sqrt{n}$", "orthogonality"),
}
BOUNDS = {"residual": residual_bound, "orthogonality": orthogonality_bound}
MESSAGE = 1.5  # how many times the error of rounding to nearest shows that truncation is what costs accuracy
AS_GOOD = 3.0  # how many times the error of another mode counts as the same level
APART = 30.0  # the levels of fp16 and fp32 are a factor of 8192 apart


# item: T residual and orthogonality; T with correction; T 22 bits
def measure_accuracy(setting: Setting, exponents: range | None = None) -> Iterator[Row]:
    """Errors of the five modes, the default and Householder QR in float32, for matrices of 2^e rows."""
    powers = exponents or setting.pick(small=range(10, 13), paper=range(10, 23))
    emulated_up_to = setting.pick(small=1 << 10, paper=1 << 13)
    shapes = setting.fitting([(2**power, COLUMNS) for power in powers], BYTES)
    for m, n in setting.track(shapes, lambda shape: f"{shape[0]} rows"):
        a = setting.random("uniform", m, n, dtype=torch.float32, seed=m)
        for mode in (*MODES, AUTO):
            yield _row(a, mode, *neula.tsqr(a, compute=mode, engine=setting.numerics))
        for mode in CORRECTED if m <= emulated_up_to else ():
            for found in emulated(a, mode):
                yield _row(a, *found)
        yield _row(a, HOUSEHOLDER, *torch.linalg.qr(a))


def _row(a: torch.Tensor, method: str, q: torch.Tensor, r: torch.Tensor) -> Row:
    m, n = a.shape
    orthogonality = float(torch.linalg.matrix_norm(orthogonality_defect(q))) / math.sqrt(n)
    errors = {"residual": backward_error(a, q, r), "orthogonality": orthogonality}
    return {"m": m, "n": n, "method": method} | errors


def _ratios(rows: Measurements, methods: tuple[str, ...], peer: str) -> dict[str, list[float]]:
    """Errors of some methods over those of another, for each m, by method and quantity."""
    return {f"{x} {quantity}": rows.ratios(quantity, x, peer) for x in methods for quantity in QUANTITIES}


def _in_words(ratios: dict[str, list[float]], peer: str) -> str:
    return f"times {peer}: " + ", ".join(f"{name} {span(part)}" for name, part in ratios.items())


def at_most(rows: Measurements, methods: tuple[str, ...], peer: str) -> ClaimCheck:
    """The errors of methods are of the level of another one, for every m."""
    found = _ratios(rows, methods, peer)
    return within(chain(*found.values()), (0.0, AS_GOOD), _in_words(found, peer))


def level_of_format(rows: Measurements) -> ClaimCheck:
    """Within the bounds of fp16, and far from those of fp32."""
    gaps = list(chain(*_ratios(rows, UNCORRECTED, FP32_NOTC).values()))
    shares = [
        error / bound(FP16, rows[0]["n"])
        for method in UNCORRECTED
        for quantity, bound in BOUNDS.items()
        for error in rows.where(method=method).numbers(quantity)
    ]
    text = f"at most {max(shares):.2f} of the bound of fp16, at least {min(gaps):.0f} times {FP32_NOTC}"
    return cases([share <= 1.0 for share in shares] + [gap > APART for gap in gaps], text)


def an_error_a_level(rows: Measurements) -> ClaimCheck:
    """A tree of ``log2(m / n)`` levels above its leaves, each of which multiplies Q by orthogonal tiles."""
    allowed = [1 + math.log2(row["m"] / row["n"]) for row in rows.where(method=FP32_NOTC)]
    ratios = _ratios(rows, (FP32_NOTC,), HOUSEHOLDER)
    kept = [x <= y for part in ratios.values() for x, y in zip(part, allowed, strict=True)]
    levels = f"to hold, 1 + log2(m / n), {min(allowed):g} to {max(allowed):g}"
    return cases(kept, f"{_in_words(ratios, HOUSEHOLDER)} ({levels})")


def some_loss(rows: Measurements) -> ClaimCheck:
    """On average over m, the geometric mean."""
    ratios = _ratios(rows, CORRECTED, FP32_NOTC)
    means = [statistics.geometric_mean(part) for part in ratios.values()]
    return within(means, MORE, f"on average {span(means)}; {_in_words(ratios, FP32_NOTC)}")


def truncation_is_why(rows: Measurements) -> ClaimCheck:
    """For each m that is emulated, on the unit of an A100 and on one that rounds to nearest."""
    found: list[bool] = []
    texts = []
    single = {row["m"]: row for row in rows.where(method=FP32_NOTC)}
    for mode in CORRECTED if rows.where(method=f"{FP16_COR}, {NEAREST}") else ():
        for quantity in QUANTITIES:
            cut, nearest, slides = (
                [row[quantity] / single[row["m"]][quantity] for row in rows.where(method=f"{mode}, {unit}")]
                for unit in (TRUNCATING, NEAREST, SLIDES)
            )
            found += [x > MESSAGE * y for x, y in zip(cut, nearest, strict=True)]
            found += [y <= AS_GOOD for y in nearest]
            texts.append(f"{mode} {quantity} {cut[0]:.1f} ({slides[0]:.1f} {SLIDES}), to nearest ")
            texts[-1] += f"{nearest[0]:.1f}"
    text = "; ".join(texts) or "0 sizes emulated"
    return cases(found, f"times {FP32_NOTC}, emulated, at the smallest m: {text}")


GEQRF = "torch.geqrf"
"""Householder QR without Q: of cuSOLVER on a GPU, and for a batch of cuBLAS (cublasSgeqrfBatched)."""
COPY = "copy of A"  # reads one matrix and writes another: no QR with Q is faster

BATCH_ROWS = 256
RATES = {"ms": ("time [ms]", ""), "tflops": ("TFLOP/s", "")}
WANTED_BATCH, WANTED_MS = 1024, 1.0


# item: T one matrix; T 3x operations
def measure_performance(setting: Setting, exponents: range | None = None) -> Iterator[Row]:
    powers = exponents or setting.pick(small=range(10, 12), paper=range(10, 23))
    shapes = setting.fitting([(2**power, COLUMNS) for power in powers], BYTES)
    for m, n in setting.track(shapes, lambda shape: f"{shape[0]} rows"):
        yield from _times(setting.random("uniform", m, n, dtype=torch.float32, seed=m), setting)


# item: T batch
def measure_batches(setting: Setting, exponents: range | None = None) -> Iterator[Row]:
    """Times for 2^e matrices at once: random ones, or copies of the user's."""
    powers = exponents or setting.pick(small=range(4), paper=range(14))
    for batch in setting.track([2**power for power in powers], lambda batch: f"{batch} matrices"):
        rows = batch * BATCH_ROWS
        a = setting.random("uniform", rows, COLUMNS, dtype=torch.float32, seed=rows)
        many = a.view(batch, BATCH_ROWS, -1) if setting.matrix is None else a.repeat(batch, 1, 1)
        yield from _times(many, setting)


def _times(a: torch.Tensor, setting: Setting) -> Iterator[Row]:
    """Times of all methods; LAPACK gets a column-major matrix, so that it need not transpose."""
    column_major = a.mT.contiguous().mT
    methods: dict[str, Callable[[], Any]] = {
        mode: partial(neula.tsqr, a, compute=mode, engine=setting.numerics) for mode in (*MODES, AUTO)
    }
    methods |= {HOUSEHOLDER: partial(torch.linalg.qr, column_major)}
    methods |= {GEQRF: partial(torch.geqrf, column_major), COPY: a.clone}
    for name, method in methods.items():
        seconds = steady_seconds(method, repeats=setting.pick(small=1, paper=3))
        rate = None if name == COPY else 1e-12 * _flops(a.shape, forms_q=name != GEQRF) / seconds
        size = {"m": a.shape[-2], "batch": a.shape[:-2].numel()}
        yield size | {"method": name, "ms": 1e3 * seconds, "tflops": rate}


def _flops(shape: torch.Size, *, forms_q: bool) -> float:
    """Operations of Householder QR, whatever the method; forming Q takes as many again."""
    return shape[:-2].numel() * householder_flops(*shape[-2:]) * (2 if forms_q else 1)


def default_fastest(rows: Measurements) -> ClaimCheck:
    """For the largest size, among the modes of the same accuracy."""
    speedups = {mode: rows.ratios("ms", mode, AUTO)[-1] for mode in ACCURATE}
    text = ", ".join(f"{speedup:.2f} times as fast as {mode}" for mode, speedup in speedups.items())
    return within(speedups.values(), MORE, f"for the largest {text}")


def thousand_in_a_millisecond(rows: Measurements) -> ClaimCheck:
    """The time of so many is extrapolated from fewer, where fewer are measured."""
    batch = min(WANTED_BATCH, max(rows.column("batch")))
    times: dict[str, float] = {
        mode: rows.where(batch=batch, method=mode)[0]["ms"] * WANTED_BATCH / batch
        for mode in (*ACCURATE, AUTO)
    }
    best = min(times, key=lambda mode: times[mode])
    text = f"{times[best]:.2f} ms with {best}" + ("" if batch == WANTED_BATCH else f", from {batch} matrices")
    return within([times[best]], (0.0, WANTED_MS), text)


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


def measure_underflow(setting: Setting, samples: int | None = None) -> Iterator[Row]:
    """Frequencies of underflow for random mantissas or the user's numbers, and by the formula."""
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


UNIT = UNITS["h100"]  # the emulated unit that truncates: that of the GPU on which the figure was measured
BLOCK = UNIT.block

FP32_PRODUCT = "fp32"
EMULATED_NEAREST, TOWARD_ZERO = "emulated, to nearest", "emulated, toward zero"
TOWARD_ZERO_RUNS = f"{TOWARD_ZERO}, runs of {RUN}"
HARDWARE, HARDWARE_UNCORRECTED = "hardware", "hardware, uncorrected"
HARDWARE_RUNS = f"{HARDWARE}, runs of {RUN}"
EMULATED_UNCORRECTED = "emulated, uncorrected"

AS_FP32 = 1.5  # how many times the error of the fp32 product counts as the same

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


# item: T RZ; T pseudo_TC
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
        HARDWARE_UNCORRECTED: partial(scaled_product, engine=engine),
        HARDWARE: _in_one_run(engine),
        HARDWARE_RUNS: corrected_gemm,
    }


def _emulated(device: torch.device) -> dict[str, Product]:
    nearest, truncating = (EmulatedEngine(device, "fp16", unit) for unit in ("ideal", UNIT))
    return {
        EMULATED_UNCORRECTED: partial(scaled_product, engine=truncating),
        EMULATED_NEAREST: _in_one_run(nearest),
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
    return within([grows], (2 * AS_FP32, math.inf), f"{text}{part[-1]['k']}", weaker=MORE)


def uncorrected(rows: Measurements) -> ClaimCheck:
    product = HARDWARE_UNCORRECTED if rows.where(product=HARDWARE_UNCORRECTED) else EMULATED_UNCORRECTED
    errors = [error / FP16.u for error in rows.where(product=product).numbers("error")]
    return within(errors, (0.1, 2.0), f"{product}: {span(errors)} u of fp16")
