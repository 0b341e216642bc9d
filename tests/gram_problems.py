"""Least squares whose R comes from a Gram matrix of low precision: problems, and what the link finds."""

from __future__ import annotations

import torch

from least_squares_options import options_of
from neula.certificates.bounds import lstsq_bound
from neula.certificates.forward_error import SURE
from neula.certificates.verdict import Limits
from neula.engines import FP64, EmulatedEngine, Engine
from neula.pipeline.chain import Answer
from neula.problems.least_squares import refined
from neula.problems.least_squares.problem import LeastSquaresProblems, LeastSquaresSolutions

M, N = 300, 40
U = 2.0**-53


def problem(condition: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of very different sizes, and a residual that is not small."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(M, n, generator=generator, dtype=torch.float64) for n in (N, 2))
    u, _, vh = torch.linalg.svd(a, full_matrices=False)
    s = torch.logspace(0, -1, N, base=condition, dtype=torch.float64) if condition else torch.arange(N)
    return (u * s) @ vh * torch.logspace(-8, 8, N, dtype=torch.float64), b


def problems_of(a: torch.Tensor, b: torch.Tensor, engine: Engine | None = None) -> LeastSquaresProblems:
    """A batch of them, in double precision, with rows that are here or spread over processes."""
    return LeastSquaresProblems(a, b, options_of(engine or EmulatedEngine(), rcond=M * 2 * U))


def accepted(found: LeastSquaresSolutions) -> bool:
    """The verdict, if one digit is asked for."""
    limits = Limits.for_shape((M, N), lstsq_bound(FP64, N), SURE, rcond=M * 2 * U)
    return bool(limits.accept(found.evidence))


def solved(
    a: torch.Tensor,
    b: torch.Tensor,
    engine: Engine | None = None,
    *,
    compute: str = "fp32",
) -> Answer[LeastSquaresSolutions]:
    """Answer of the link that solves by a Gram matrix."""
    problems = problems_of(a[None], b[None], engine)
    return refined.by_gram(problems, None, label="by gram", compute=compute)
