"""Table 4: low-rank approximation by QR and the SVD of R."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

import neula
from neula.algorithms.orthogonal.householder import householder
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.spectra.qr_svd import qr_svd
from neula.engines import Engine
from neula.io.matrices import singular_values
from neula.papers.data import Measurements, Row, span
from neula.papers.figure import Figure, Setting
from neula.papers.measuring import median_seconds
from neula.papers.verdicts import ClaimCheck, about, claim, within

RANKS = [16, 64, 128, 256, 512]
COND = 1e6
RGSQRF_SVD, SGEQRF_SVD, NEULA = "RGSQRF-SVD", "SGEQRF-SVD", "neula.svd_lowrank"

LowRank = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def measure_low_rank(setting: Setting, shape: tuple[int, int] | None = None) -> Iterator[Row]:
    """Error and time of the approximation for each rank, beside the smallest error that there is."""
    m, n = shape or setting.shape(small=(8192, 1024), paper=(524288, 1024), bytes_an_entry=48)
    exact = setting.random("arithmetic", m, n, cond=COND, seed=9)
    a = setting.speed.empty(m, n).copy_(exact)
    values = (
        torch.linalg.svdvals(exact) if setting.matrix is not None else singular_values("arithmetic", n, COND)
    )
    squares = values.square()
    for rank in setting.track([rank for rank in RANKS if rank < n], lambda rank: f"rank {rank}"):
        for method, approximate in _methods(a, rank).items():
            seconds = median_seconds(partial(approximate, setting.speed), repeats=3)
            yield {
                "rank": rank,
                "method": method,
                "m": m,
                "n": n,
                "error": approximation_error(exact, approximate(setting.numerics)),
                "smallest": float((squares[rank:].sum() / squares.sum()).sqrt()),
                "ms": 1e3 * seconds,
            }


def _methods(a: torch.Tensor, rank: int) -> dict[str, Callable[[Engine], LowRank]]:
    """The paper's two, and what a user calls, certificate included."""
    return {
        RGSQRF_SVD: lambda engine: qr_svd(*rgsqrf(a, engine), rank=rank),
        SGEQRF_SVD: lambda engine: qr_svd(*householder(a), rank=rank),
        NEULA: lambda engine: tuple(neula.svd_lowrank(a, rank, accuracy="fp16", engine=engine)),
    }


def approximation_error(a: torch.Tensor, factors: LowRank) -> float:
    """``||A - U diag(s) V^T||_F / ||A||_F``, computed in double precision."""
    u, s, vh = (factor.double() for factor in factors)
    return float(torch.linalg.matrix_norm(a - (u * s) @ vh) / torch.linalg.matrix_norm(a))


@claim("the same quality as single-precision QR-SVD, since truncation dominates rounding")
def _optimal(rows: Measurements) -> ClaimCheck:
    """Whether three digits, which the paper prints, are those of the best approximation."""
    part = rows.where(method=RGSQRF_SVD)
    ratios = [math.inf if row["error"] is None else row["error"] / row["smallest"] for row in part]
    text = f"at most {max(ratios):.5f} times the smallest possible error"
    return within(ratios, (0.0, 1.005), text)


@claim("faster than SGEQRF-SVD (6.4 times)", timed=True)
def _faster(rows: Measurements) -> ClaimCheck:
    speedups = rows.ratios("ms", SGEQRF_SVD, RGSQRF_SVD)
    text = f"{span(speedups, '.1f')} times faster"
    return within(speedups, about(6.4), text, tendency=(1.0, math.inf))


# item: Q Table 4
TABLE_4 = Figure(
    name="table4",
    title="Table 4: low-rank approximation by QR-SVD",
    shows="`||A - Q U_r S_r V_r^T||_F / ||A||_F` of the rank-r approximation of a matrix with arithmetic "
    "spectrum and condition 1e6, by RGSQRF or SGEQRF and the SVD of R, without a second pass; `smallest` is "
    "the error of the exact truncated SVD.",
    scaled_down="8192 x 1024 instead of 524288 x 1024; errors with emulated tensor cores, times on this CPU",
    measure=measure_low_rank,
    draw=None,
    claims=(_optimal, _faster),
)
