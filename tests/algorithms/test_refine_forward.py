"""Refinement of large solutions to the forward error of the format, with R in low precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from campaign.oracle import LeastSquares
from neula.algorithms.krylov.cgls import LeastSquaresOperator
from neula.algorithms.krylov.driver import Refined
from neula.algorithms.krylov.refinement import refine, refine_forward
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.scaled_problems import ScaledProblems
from neula.algorithms.scaling import power_of_two_scales
from neula.algorithms.spectra.condition import extreme_singular_values, solve_r
from neula.certificates.backward_error import Norms, Scale
from neula.engines import EmulatedEngine
from neula.io.matrices import random_matrix
from neula.kernels.shift import shift
from neula.pipeline.gradients import stacked_problem

U64 = 2.0**-53
M, N = 60, 20
TOLERANCE = U64 / 2


def low_precision_r(a: torch.Tensor, format: str) -> torch.Tensor:
    """R of the column-scaled matrix, in the units of A."""
    engine = EmulatedEngine(format=format)
    scales = power_of_two_scales(a.abs().amax(0))
    work = engine.fill(engine.empty(*a.shape), a, scales)
    return rgsqrf(work, engine)[1].double() / scales


def refined(
    operator: LeastSquaresOperator,
    r: torch.Tensor,
    problem: ScaledProblems,
    start: Refined | None = None,
) -> tuple[Refined, torch.Tensor]:
    """Refine as the chain does: reduce the backward error of x first, then its forward error."""
    sizes = torch.linalg.vector_norm(operator.a, dim=0)
    largest, smallest = extreme_singular_values(r / sizes, r / sizes).tolist()
    # By how much R may be wrong.
    w = torch.linalg.svdvals(solve_r(r, torch.eye(N, dtype=torch.float64)).T @ operator.a.T)
    scale = Scale(1 / sizes, largest * float(w[0]), min(1.0, float(w[-1])))
    b = problem.b[0]
    if start is None:
        start = refine(operator, r, b, scale=scale, tolerance=8 * U64, max_iterations=60)
    found = refine_forward(
        operator,
        r,
        problem,
        start,
        scale=scale,
        smallest=smallest * scale.smallest / 3,
        tolerance=TOLERANCE,
        max_iterations=60,
    )
    return found, sizes


def exact_problem(a: torch.Tensor, b: torch.Tensor, *given: Any) -> ScaledProblems:
    """A scaled to numbers near 1, and b as it is given."""
    found = ScaledProblems.from_arrays(a[None], b[None], *(given or (None, 0.0)))
    units, low = found.b_columns, found.b_low
    whole = {"b": shift(found.b, units), "b_low": None if low is None else shift(low, units)}
    return replace(found, **whole, b_columns=torch.zeros_like(units))


@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize(
    ("format", "cond"),
    [("fp16", 1e2), ("fp16", 1e3), ("fp32", 1e2), ("fp32", 1e5), ("fp64", 1e8), ("fp64", 1e10)],
)
def test_the_forward_error_is_that_of_the_format(format: str, cond: float, consistent: bool) -> None:
    """Whatever format R is in: each pass leaves 1e-8 of the error, or what cond u64 allows."""
    a = random_matrix("geometric", M, N, cond=cond, seed=1)
    rng = np.random.default_rng(int(cond))
    b = torch.from_numpy(rng.standard_normal((M, 2)))
    b = a @ torch.from_numpy(rng.standard_normal((N, 2))) if consistent else b
    found, _ = refined(LeastSquaresOperator(a), low_precision_r(a, format), exact_problem(a, b))
    assert found.forward_error is not None
    errors = LeastSquares(a.numpy(), b.numpy(), rcond=0.0).errors(found.x.numpy(), N)
    assert (torch.from_numpy(errors) <= found.forward_error).all()
    # Errors of the gradient in twice the working precision, through (B^T B)^-1: cond^2 2^-104, with the
    # norm of the residual relative to x, at most cond, and the factors of estimates.
    noise = 100 * 2.0**-104 * (M + N) ** 0.5 * cond ** (2 if not consistent else 1)
    assert (found.forward_error <= 1.1 * (U64 + TOLERANCE) + noise).all()


@pytest.mark.parametrize("exponent", [10, 60])
def test_columns_in_any_units(exponent: int) -> None:
    units = torch.exp2(torch.linspace(-exponent, exponent, N).round().double())
    a = random_matrix("geometric", M, N, cond=1e3, seed=1) * units
    b = torch.from_numpy(np.random.default_rng(1).standard_normal((M, 1)))
    found, _ = refined(LeastSquaresOperator(a), low_precision_r(a, "fp32"), exact_problem(a, b))
    assert found.forward_error is not None
    errors = LeastSquares(a.numpy(), b.numpy(), rcond=0.0).errors(found.x.numpy(), N)
    assert errors[0] <= float(found.forward_error) <= 1.1 * (U64 + TOLERANCE)


@pytest.mark.parametrize("wrong", [1.0, 16.0])
def test_the_bound_counts_what_r_hides(wrong: float) -> None:
    """An error along the smallest singular vector, and R that makes its projection so much too small."""
    a = random_matrix("geometric", M, N, cond=1e2, seed=1)
    a /= torch.linalg.vector_norm(a, dim=0)
    s, v = torch.linalg.svd(a, full_matrices=False)[1:]
    x = torch.ones(N, 1, dtype=torch.float64)
    start = Refined(x + 1e-3 * v[-1:].T, Norms(*torch.zeros(5, 1).double()).measures(1.0))
    r = wrong * torch.linalg.qr(a, mode="r")[1]
    scale = Scale(torch.ones(N, dtype=torch.float64), float(s[0]), 1 / wrong)
    found = refine_forward(
        LeastSquaresOperator(a), r, exact_problem(a, a @ x), start,
        scale=scale, smallest=float(s[-1]), tolerance=1.0, max_iterations=1,
    )  # fmt: skip
    error = 1e-3 / N**0.5
    assert error <= float(found.forward_error) <= 1.01 * error


@pytest.mark.parametrize("damp", [0.0, 1e-3])
def test_weighted_rows_lose_nothing(damp: float) -> None:
    a = random_matrix("geometric", M, N, cond=1e4, seed=1)
    rng = np.random.default_rng(2)
    b, weights = torch.from_numpy(rng.standard_normal((M, 1))), torch.from_numpy(rng.random(M) + 0.1)
    problem = exact_problem(a, b, weights, damp)
    operator = LeastSquaresOperator(stacked_problem(a, b, weights, damp)[0])
    assert problem.a_low is not None
    assert problem.b_low is not None
    found, _ = refined(operator, torch.linalg.qr(operator.a, mode="r")[1], problem)
    assert found.forward_error is not None
    judge = LeastSquares(a.numpy(), b.numpy(), weights=weights.numpy(), damp=damp, rcond=0.0)
    assert judge.errors(found.x.numpy(), N)[0] <= float(found.forward_error) <= 1.1 * (U64 + TOLERANCE)


def test_each_right_hand_side_keeps_its_best() -> None:
    """One starts at the solution: what is done for the other does it no harm."""
    a = random_matrix("geometric", M, N, cond=1e6, seed=1)
    b = torch.from_numpy(np.random.default_rng(3).standard_normal((M, 2)))
    b[:, 1] = 0
    found, _ = refined(LeastSquaresOperator(a), low_precision_r(a, "fp32"), exact_problem(a, b))
    assert found.forward_error is not None
    assert not found.x[:, 1].any()
    assert found.forward_error[1] == 0
    assert found.forward_error[0] <= 1.1 * (U64 + TOLERANCE)
