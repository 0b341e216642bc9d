"""Figure 6: rates against n, and the times that the figures of accuracy show beside the errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from neula.engines import FP16
from neula.io.matrices import hpl_ai_matrix
from neula.papers.data import Measurements, Row
from neula.papers.drawing import Axes, Canvas, lines, log_log
from neula.papers.figure import Figure, Setting
from neula.papers.lu import algorithms as lu
from neula.papers.measuring import median_seconds, timed
from neula.papers.verdicts import Claim, ClaimCheck, claim, within

LIBRARY, LIBRARY_UNPIVOTED = "library", "library, no pivoting"
"""fp32 LU of cuSOLVER on a GPU and of LAPACK on a CPU; only cuSOLVER has one without pivoting."""
SERIES = (*lu.ALGORITHMS, LIBRARY, LIBRARY_UNPIVOTED)
"""All that is drawn, in colours and marks that are the same in all figures."""
BYTES = 24
"""Memory of an entry: A, the factors, the library's copy of A in column-major order, and its factors."""
ALIKE = 1.25
"""How far a ratio of rates may be from the paper's to be about the same: it depends on the machine."""
LONG = 1.0
"""Seconds from which on one run is measured: what warms up takes milliseconds."""


def measure_performance(setting: Setting, orders: Sequence[int] | None = None) -> Iterator[Row]:
    """Rates of the algorithms of section 6 and of the library."""
    sizes = orders or setting.pick(small=(512, 1024, 2048, 3072), paper=[2**k for k in range(12, 17)])
    shapes = setting.fitting([(n, n) for n in sizes], BYTES)
    for n, _ in setting.track(shapes, lambda shape: f"n = {shape[0]}"):
        yield from times(dominant(setting, n), lu.COMPARED, setting)


def dominant(setting: Setting, n: int) -> torch.Tensor:
    """The matrix of the HPL-AI benchmark, or the user's, for times and most errors."""
    make = partial(hpl_ai_matrix, n, dtype=torch.float32, device=setting.device, seed=n)
    a = setting.given_or(make, torch.float32)
    # Its diagonal is n. A power of two changes no error.
    return a if n < FP16.largest else a.div_(2)


def times(a: torch.Tensor, names: Sequence[str], setting: Setting) -> Iterator[Row]:
    """Time of the algorithms, with the panels that suit the engine, and of the library."""
    n = len(a)
    methods: dict[str, Callable[[], Any]] = {
        name: partial(lu.factorize, a, name, setting.speed, lu.Widths()) for name in names
    }
    column_major = setting.speed.empty(n, n).copy_(a)
    methods[LIBRARY] = partial(torch.linalg.lu_factor_ex, column_major)
    if a.is_cuda:
        methods[LIBRARY_UNPIVOTED] = partial(torch.linalg.lu_factor_ex, column_major, pivot=False)
    for name, method in methods.items():
        seconds = _seconds(method)
        yield {"n": n, "algorithm": name, "ms": 1e3 * seconds, "tflops": 1e-12 * operations(n) / seconds}


def operations(n: int) -> float:
    """Operations of an LU factorization."""
    return 2 * n**3 / 3


def _seconds(run: Callable[[], Any]) -> float:
    """Median of three runs after one to warm up, which is enough where it takes long; NaN if it fails."""
    result, first = timed(run)
    if result is None:
        return math.nan
    return first if first >= LONG else median_seconds(run, repeats=3, warmup=0)


def draw_performance(rows: Measurements, canvas: Canvas) -> None:
    """TFLOP/s against n."""
    axes = canvas.subplots()
    draw_rates(axes, rows, lu.COMPARED)
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=10)


def draw_rates(axes: Axes, rows: Measurements, names: Sequence[str]) -> None:
    """Rates of algorithms and of the library."""
    shown = (*names, LIBRARY, LIBRARY_UNPIVOTED)
    part = Measurements(row for name in shown for row in rows.where(algorithm=name))
    lines(axes, part, "n", "tflops", "algorithm", SERIES)
    log_log(axes, "n", "TFLOP/s, of $2n^3/3$ operations", "rate")
    axes.set_xscale("log", base=2)


# --- claims -----------------------------------------------------------------------------------------------


def rates(rows: Measurements, name: str) -> dict[int, float]:
    """TFLOP/s for each n at which it was timed; NaN where it failed."""
    part = Measurements(row for row in rows.where(algorithm=name) if "tflops" in row)
    return dict(zip(part.column("n"), part.numbers("tflops"), strict=True))


def faster(text: str, name: str, *peers: str, paper: float | None = None) -> Claim:
    """The claim that an algorithm is faster than others for the largest n, about as much as in the paper."""
    claimed = (1.0, math.inf) if paper is None else (max(1.0, paper / ALIKE), paper * ALIKE)

    def judge(rows: Measurements) -> ClaimCheck:
        ours = rates(rows, name)
        largest = max(ours)
        found = {peer: {n: ours[n] / rate for n, rate in rates(rows, peer).items()} for peer in peers}
        told = ", ".join(
            f"{ratios[largest]:.2f} times {peer} (up to {max(ratios.values()):.2f} for all n)"
            for peer, ratios in found.items()
        )
        return within(
            [ratios[largest] for ratios in found.values()],
            claimed,
            f"{name} at n = {largest}: {ours[largest]:.3g} TFLOP/s, {told}",
            tendency=(1.0, math.inf),
        )

    return Claim(text, judge, timed=True)


@claim("(neula) 5.2/5.1, the default, is faster than the library's LU in fp32", timed=True)
def _ours_beats_library(rows: Measurements) -> ClaimCheck:
    peer = LIBRARY_UNPIVOTED if rates(rows, LIBRARY_UNPIVOTED) else LIBRARY
    return faster("", lu.DOUBLY_WIDE, peer).judge(rows)


# item: L Figure 6
FIGURE_6 = Figure(
    name="figure6",
    title="Figure 6: performance of the four algorithms",
    shows="TFLOP/s, counting `2n^3/3` operations for all, of `neula.lu_factor` without pivoting on HPL-AI "
    "matrices, with the panels that suit the engine, and of the library's LU in fp32 (cuSOLVER on a GPU, "
    "with and without pivoting; LAPACK on a CPU, with). The paper has an A100, and kernels of its own for "
    "panels.",
    scaled_down="n from 512 to 3072 on this CPU instead of 4096 to 65536 on a GPU, in its low format instead "
    "of fp16",
    measure=measure_performance,
    draw=draw_performance,
    claims=(
        faster(
            "3.1 is faster with an fp16 matrix than with an fp32 one (92 and 52 TFLOP/s)",
            lu.HALF,
            lu.SINGLE,
            paper=92 / 52,
        ),
        faster(
            "5.2/5.1 is much faster than 3.1 with an fp32 matrix (140 and 52)",
            lu.DOUBLY_WIDE,
            lu.SINGLE,
            paper=140 / 52,
        ),
        faster(
            "5.2/5.1 is faster than 3.1 with an fp16 matrix (140 and 92)",
            lu.DOUBLY_WIDE,
            lu.HALF,
            paper=140 / 92,
        ),
        faster("5.2/4.1 is the fastest (170)", lu.DOUBLY_LOW, lu.SINGLE, lu.HALF, lu.DOUBLY_WIDE),
        _ours_beats_library,
    ),
    size=(8.5, 5),
)
