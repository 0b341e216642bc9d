"""The figures "Evaluation of accuracy" and "Evaluation of performance", in the paper's modes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch

import neula
from neula.certificates.bounds import orthogonality_bound, residual_bound
from neula.engines import FP16, EmulatedEngine
from neula.papers.data import Measurements, Row, span
from neula.papers.drawing import Canvas, curves
from neula.papers.errors import backward_error, orthogonality_defect
from neula.papers.figure import Setting, described
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


QUANTITIES = {"residual": "||A - QR||$_F$ / ||A||$_F$", "orthogonality": "||Q$^T$Q - I||$_F$ / $\\sqrt{n}$"}
BOUNDS = {"residual": residual_bound, "orthogonality": orthogonality_bound}
MESSAGE = 1.5  # how many times the error of rounding to nearest shows that truncation is what costs accuracy
AS_GOOD = 3.0  # how many times the error of another mode counts as the same level
APART = 30.0  # the levels of fp16 and fp32 are a factor of 8192 apart


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


def draw_accuracy(rows: Measurements, canvas: Canvas) -> None:
    labels = {quantity: (label, quantity) for quantity, label in QUANTITIES.items()}
    curves(rows, canvas, "m", "m", labels, "method", ncols=3, sharey=True)


def _ratios(rows: Measurements, methods: tuple[str, ...], peer: str) -> dict[str, list[float]]:
    """Errors of some methods over those of another, for each m, by method and quantity."""
    return {f"{x} {quantity}": rows.ratios(quantity, x, peer) for x in methods for quantity in QUANTITIES}


def _told(ratios: dict[str, list[float]], peer: str) -> str:
    return f"times {peer}: " + ", ".join(f"{name} {span(part)}" for name, part in ratios.items())


def at_most(rows: Measurements, methods: tuple[str, ...], peer: str) -> ClaimCheck:
    """The errors of methods are of the level of another one, for every m."""
    found = _ratios(rows, methods, peer)
    return within(chain(*found.values()), (0.0, AS_GOOD), _told(found, peer))


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
    return cases(kept, f"{_told(ratios, HOUSEHOLDER)} ({levels})")


def some_loss(rows: Measurements) -> ClaimCheck:
    """On average over m, the geometric mean."""
    ratios = _ratios(rows, CORRECTED, FP32_NOTC)
    means = [statistics.geometric_mean(part) for part in ratios.values()]
    return within(means, MORE, f"on average {span(means)}; {_told(ratios, FP32_NOTC)}")


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


# item: T residual and orthogonality; T with correction; T 22 bits
ACCURACY = described("tsqr-paper", "accuracy", globals())


GEQRF = "torch.geqrf"
"""Householder QR without Q: of cuSOLVER on a GPU, and for a batch of cuBLAS (cublasSgeqrfBatched)."""
COPY = "copy of A"  # reads one matrix and writes another: no QR with Q is faster

BATCH_ROWS = 256
RATES = {"ms": ("time [ms]", ""), "tflops": ("TFLOP/s", "")}
WANTED_BATCH, WANTED_MS = 1024, 1.0
EXTRA_OPERATIONS = 3.0  # products that a corrected product is made of


def measure_performance(setting: Setting, exponents: range | None = None) -> Iterator[Row]:
    powers = exponents or setting.pick(small=range(10, 12), paper=range(10, 23))
    shapes = setting.fitting([(2**power, COLUMNS) for power in powers], BYTES)
    for m, n in setting.track(shapes, lambda shape: f"{shape[0]} rows"):
        yield from _times(setting.random("uniform", m, n, dtype=torch.float32, seed=m), setting)


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


# item: T one matrix; T 3x operations
PERFORMANCE = described("tsqr-paper", "performance", globals())

# item: T batch
BATCHED = described("tsqr-paper", "batched", globals())
