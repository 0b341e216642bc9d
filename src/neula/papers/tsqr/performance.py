"""The figures "Evaluation performance": time of one tall matrix, and of a batch of 256 x 128."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from neula.papers.data import Measurements, Row, span
from neula.papers.drawing import Canvas, curves
from neula.papers.figure import Figure, Setting
from neula.papers.measuring import householder_flops, median_seconds
from neula.papers.tsqr import modes
from neula.papers.verdicts import Claim, ClaimCheck, claim, within

GEQRF = "torch.geqrf"
"""Householder QR without Q: of cuSOLVER on a GPU, and for a batch of cuBLAS (cublasSgeqrfBatched)."""
COPY = "copy of A"
"""What it takes to read one matrix and write another: no QR with Q is faster."""

BATCH_ROWS = 256
RATES = {"ms": ("time [ms]", ""), "tflops": ("TFLOP/s", "")}
WANTED_BATCH, WANTED_MS = 1024, 1.0
FASTER = (1.0, math.inf)
EXTRA_OPERATIONS = 3.0
"""Products that a corrected product is made of."""


def measure_performance(setting: Setting, exponents: range | None = None) -> Iterator[Row]:
    """Times for matrices of 2^e rows."""
    powers = exponents or setting.pick(small=range(10, 13), paper=range(10, 23))
    shapes = setting.fitting([(2**power, modes.COLUMNS) for power in powers], modes.BYTES)
    for m, n in setting.track(shapes, lambda shape: f"{shape[0]} rows"):
        yield from _times(_uniform(setting, m, n), setting)


def measure_batches(setting: Setting, exponents: range | None = None) -> Iterator[Row]:
    """Times for 2^e matrices at once."""
    powers = exponents or setting.pick(small=range(5), paper=range(14))
    for batch in setting.track([2**power for power in powers], lambda batch: f"{batch} matrices"):
        stacked = _uniform(setting, batch * BATCH_ROWS, modes.COLUMNS)
        yield from _times(stacked.view(batch, BATCH_ROWS, modes.COLUMNS), setting)


def _uniform(setting: Setting, m: int, n: int) -> torch.Tensor:
    return setting.random("uniform", m, n, dtype=torch.float32, seed=m)


def _times(a: torch.Tensor, setting: Setting) -> Iterator[Row]:
    """All methods side by side; LAPACK gets the matrix as it wants it, so that it need not transpose."""
    column_major = a.mT.contiguous().mT
    every = (*modes.MODES, modes.AUTO)
    methods: dict[str, Callable[[], Any]] = {mode: partial(modes.tsqr, a, mode, setting) for mode in every}
    methods |= {modes.HOUSEHOLDER: partial(torch.linalg.qr, column_major)}
    methods |= {GEQRF: partial(torch.geqrf, column_major), COPY: a.clone}
    for name, method in methods.items():
        seconds = median_seconds(method, repeats=3)
        rate = None if name == COPY else 1e-12 * _flops(a.shape, forms_q=name != GEQRF) / seconds
        size = {"m": a.shape[-2], "batch": a.shape[:-2].numel()}
        yield size | {"method": name, "ms": 1e3 * seconds, "tflops": rate}


def _flops(shape: torch.Size, *, forms_q: bool) -> float:
    """Operations of Householder QR, whatever the method; forming Q takes as many again."""
    return shape[:-2].numel() * householder_flops(*shape[-2:]) * (2 if forms_q else 1)


def draw_performance(rows: Measurements, canvas: Canvas) -> None:
    """Time and rate against m."""
    curves(rows, canvas, "m", "m", RATES, "method", ncols=4)


def draw_batches(rows: Measurements, canvas: Canvas) -> None:
    """Time and rate against the number of matrices."""
    curves(rows, canvas, "batch", "matrices of 256 x 128", RATES, "method", ncols=4)


# --- claims -----------------------------------------------------------------------------------------------


def _speedups(rows: Measurements, method: str, peer: str) -> list[float]:
    """How many times as fast as its peer a method is, for each size."""
    return rows.ratios("ms", peer, method)


def _faster(method: str, peer: str, *, everywhere: bool) -> Callable[[Measurements], ClaimCheck]:
    """The claim that a method beats another one, for every size or for the largest."""

    def judge(rows: Measurements) -> ClaimCheck:
        speedups = _speedups(rows, method, peer)
        text = f"{method} is {span(speedups)} times as fast as {peer}, "
        text += f"{speedups[-1]:.2f} times for the largest"
        return within(speedups if everywhere else speedups[-1:], FASTER, text)

    return judge


@claim("error correction needs three times the operations: at most three times as long", timed=True)
def _cost_of_correction(rows: Measurements) -> ClaimCheck:
    ratios = _speedups(rows, modes.FP16_NOCOR, modes.FP16_COR)
    text = f"{modes.FP16_COR} takes {span(ratios)} times as long as {modes.FP16_NOCOR}"
    return within(ratios, (0.0, EXTRA_OPERATIONS), text)


@claim("(neula) the default is faster than the modes that are as accurate", timed=True)
def _default_fastest(rows: Measurements) -> ClaimCheck:
    """For the largest size, among the modes of the same accuracy."""
    speedups = {mode: _speedups(rows, modes.AUTO, mode)[-1] for mode in modes.ACCURATE}
    text = ", ".join(f"{speedup:.2f} times as fast as {mode}" for mode, speedup in speedups.items())
    return within(speedups.values(), FASTER, f"for the largest {text}")


@claim(f"(neula) {WANTED_BATCH} matrices take at most {WANTED_MS:g} ms, in single precision", timed=True)
def _thousand_in_a_millisecond(rows: Measurements) -> ClaimCheck:
    """The time of so many is extrapolated from fewer, where fewer are measured."""
    batch = min(WANTED_BATCH, max(rows.column("batch")))
    times: dict[str, float] = {
        mode: rows.where(batch=batch, method=mode)[0]["ms"] * WANTED_BATCH / batch
        for mode in (*modes.ACCURATE, modes.AUTO)
    }
    best = min(times, key=lambda mode: times[mode])
    text = f"{times[best]:.2f} ms with {best}" + ("" if batch == WANTED_BATCH else f", from {batch} matrices")
    return within([times[best]], (0.0, WANTED_MS), text)


# item: T one matrix; T 3x operations
PERFORMANCE = Figure(
    name="performance",
    title="Evaluation of performance: time and rate against m",
    shows="`neula.tsqr` of float32 uniform (-1, 1) matrices of 128 columns in the paper's five modes and by "
    "default (auto), beside Householder QR of torch with and without Q (cuSOLVER on a GPU, LAPACK on a CPU) "
    "and a copy of A. TFLOP/s count 4mn^2 - 4n^3/3 operations for all, and half of that without Q.",
    scaled_down="2^10 to 2^12 rows instead of 2^10 to 2^22; tensor cores are emulated, which is slow",
    measure=measure_performance,
    draw=draw_performance,
    claims=(
        Claim(
            "TSQR with error correction is faster than cuSOLVER",
            _faster(modes.FP16_COR, modes.HOUSEHOLDER, everywhere=True),
            timed=True,
        ),
        Claim(
            "tensor cores with correction are faster than fp32 without them, for large m",
            _faster(modes.FP16_COR, modes.FP32_NOTC, everywhere=False),
            timed=True,
        ),
        _cost_of_correction,
        _default_fastest,
    ),
    size=(12, 6),
    emulated_times=True,
)

# item: T batch
BATCHED = Figure(
    name="batched",
    title="Evaluation of performance: batches of 256 x 128",
    shows="`neula.tsqr` of batches of float32 uniform (-1, 1) matrices in the paper's five modes and by "
    "default (auto: block Gram-Schmidt, as `neula.qr` has it for batches), beside torch's batched "
    "Householder QR with Q and without (cublasSgeqrfBatched on a GPU, from 16 matrices on) and a copy of A. "
    "TFLOP/s count as for one matrix.",
    scaled_down="1 to 16 matrices instead of 1 to 8192; tensor cores are emulated, which is slow",
    measure=measure_batches,
    draw=draw_batches,
    claims=(
        Claim(
            "many matrices are factorized faster than by cublasSgeqrfBatched, which forms no Q",
            _faster(modes.FP16_COR, GEQRF, everywhere=False),
            timed=True,
        ),
        _cost_of_correction,
        _thousand_in_a_millisecond,
        _default_fastest,
    ),
    size=(12, 6),
    emulated_times=True,
)
