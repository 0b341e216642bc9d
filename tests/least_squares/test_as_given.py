"""Single problems whose first steps are asynchronous, with the chain of a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from tests.matrices import normal

import neula
from campaign.oracle import LeastSquares
from gram_problems import M, N, U, accepted, problem, solved
from neula.algorithms.krylov.batched_lstsq import Overdetermined
from neula.algorithms.krylov.doubled_refinement import (
    Refinement,
)
from neula.algorithms.orthogonal.r_only import cholesky_r
from neula.certificates.bounds import lstsq_bound
from neula.engines import FP64, CpuEngine
from neula.engines.shipped import cuda_tuning
from neula.problems.least_squares.problem import LeastSquaresSolutions, PreparedProblem
from scaled_errors import scaled_errors

GRAM, SHIFTED = "cholesky fp64 + seminormal", "shifted cholesky fp64 + seminormal"
DEFICIENT = "complete orthogonal fp64"


class Queued(CpuEngine):
    """A GPU's choices for problems that are too large to be replayed, on a CPU."""

    tuning = replace(
        cuda_tuning((9, 0), corrected=False, tournament_width=0),
        chunk_elements=1 << 22,
        svd=0,
        batched_elements=0,
    )


def with_condition(condition: float) -> torch.Tensor:
    u, _, vh = torch.linalg.svd(normal(120, 12), full_matrices=False)
    return u * torch.logspace(0, -1, 12, base=condition, dtype=torch.float64) @ vh


def rows(a: torch.Tensor) -> torch.Tensor:
    a[::30] *= 1e10
    return a


def twice(a: torch.Tensor, noise: float = 0.0) -> torch.Tensor:
    """With a column that nearly, or exactly, is another one."""
    a[:, 9] = a[:, 3] + noise * a[:, 9]
    return a


FULL = {
    "normal": (lambda: normal(120, 12), [GRAM]),
    "columns": (lambda: normal(120, 12) * torch.logspace(-30, 30, 12, dtype=torch.float64), [GRAM]),
    "far columns": (lambda: normal(120, 12) * torch.logspace(-250, 0, 12, dtype=torch.float64), [GRAM]),
    "condition 1e5": (lambda: with_condition(1e5), [GRAM]),
    "condition 1e9": (lambda: with_condition(1e9), [GRAM, SHIFTED]),
    "rows": (lambda: rows(normal(120, 12)), [GRAM, SHIFTED]),
    "nearly twice": (lambda: twice(normal(120, 12), 1e-9), [GRAM, SHIFTED]),
}


@pytest.mark.parametrize("name", FULL)
def test_every_digit_is_certified(name: str) -> None:
    make, attempts = FULL[name]
    a, b = make(), normal(120, 3, seed=1)
    for right in (b, b[:, :1]):
        result = neula.lstsq(a, right, engine=Queued("cpu"))
        assert result.converged
        assert [attempt.method for attempt in result.attempts] == attempts
        errors = LeastSquares(a.numpy(), right.numpy(), rcond=120 * 2.0**-52).errors(result.x.numpy(), 12)
        assert (errors <= np.asarray(result.forward_errors)).all()
        assert result.forward_error <= 1e-14


@pytest.mark.parametrize(
    "matrix",
    [
        lambda: twice(normal(120, 12)),
        lambda: normal(120, 8) @ normal(8, 12, seed=2),
        lambda: normal(120, 12).index_fill(1, torch.tensor([4]), 0.0),
    ],
)
def test_what_lacks_full_rank_comes_to_its_minimum_norm(matrix) -> None:
    a, b = matrix(), normal(120, 2, seed=1)
    result = neula.lstsq(a, b, engine=Queued("cpu"))
    assert result.converged
    assert [attempt.method for attempt in result.attempts] == [GRAM, SHIFTED, DEFICIENT]
    assert result.rank == int(torch.linalg.matrix_rank(a))
    judge = LeastSquares(a.numpy(), b.numpy(), rcond=1e-11)
    errors = judge.errors(result.x.numpy(), result.rank)
    assert (errors <= np.asarray(result.forward_errors)).all()
    assert result.forward_error <= 1e-9


def exact_measures(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> tuple[mpmath.mpf, ...]:
    """``||r||``, ``||D^-1 A^T r||`` and ``||P r||`` of ``r = b - A x``."""
    with mpmath.workdps(60):
        given, right, found = (mpmath.matrix(y.tolist()) for y in (a, b, x))
        r = right - given * found
        gradient = given.T * r
        projected = given * mpmath.cholesky_solve(given.T * given, gradient)
        sizes = torch.linalg.vector_norm(a, dim=0).tolist()
        scaled = mpmath.matrix([g / size for g, size in zip(gradient, sizes, strict=True)])
        return tuple(mpmath.norm(y) for y in (r, scaled, projected))


@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_what_is_settled_takes_no_other_residual(condition: float, size: float) -> None:
    """Measures are bounds, and the norm of the residual is that of the solution."""
    a, b = with_condition(condition), normal(120, 1, seed=1)
    b = a @ torch.ones(12, 1, dtype=a.dtype) + size * b
    system = Overdetermined(a[None], cholesky_r(a[None]))
    refinement = Refinement(system, b[None], 2.0**-54)
    refinement.advance(3, 3)
    found, other = refinement.solution(system.settled), refinement.solution()
    r, gradient, projected = exact_measures(a, b, found.x[0])
    norm = float(torch.linalg.matrix_norm(a / torch.linalg.vector_norm(a, dim=0), 2))
    image = norm * float(torch.linalg.vector_norm(a * found.x[0].T))
    measures = found.measures
    assert math.isfinite(measures.optimality.item())
    assert gradient / (norm * r) <= measures.optimality.item()
    least = min(gradient / (norm * r), r / (image + torch.linalg.vector_norm(b).item()), projected / image)
    assert least <= measures.backward_error.item()
    assert abs(torch.linalg.vector_norm(found.residual).item() / r - 1) <= 120 * 2.0**-53
    assert other.residual is not found.residual


@pytest.mark.parametrize(("noise", "wrong"), [(0.0, 1.0), (1.0, 2.0)])
def test_what_is_not_settled_is_measured(noise: float, wrong: float) -> None:
    """A residual as small as an update changes with it; and an R may be no good."""
    a = with_condition(10.0)
    b = a @ torch.ones(12, 1, dtype=a.dtype) + noise * normal(120, 1, seed=1)
    system = Overdetermined(a[None], wrong * cholesky_r(a[None]))
    refinement = Refinement(system, b[None], 2.0**-54)
    refinement.advance(1)
    assert refinement.solution(system.settled).measures.backward_error.item() == math.inf
    assert refinement.solution().measures.backward_error.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "columns", "rows", "nearly parallel"])
def test_many_right_hand_sides_are_as_sure_as_one(kind: str) -> None:
    """Their doubled products are computed on matrix units, where there are such; those of one are not."""
    generator = torch.Generator("cuda").manual_seed(1)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64, device="cuda")
    a, b = draw(12000, 500), draw(12000, 12)
    if kind == "columns":
        a *= torch.logspace(-8, 8, 500, dtype=a.dtype, device=a.device)[torch.arange(500) * 7 % 500]
    elif kind == "rows":
        a[::100] *= 1e10
    elif kind == "nearly parallel":
        a += 1e4
    many = neula.lstsq(a, b)
    assert many.converged
    sizes = torch.linalg.vector_norm(a, dim=0)
    errors = torch.as_tensor(many.forward_errors).flatten().tolist()
    for i in (0, 5, 11):
        one = neula.lstsq(a, b[:, i])
        apart = torch.linalg.vector_norm(sizes * (many.x[:, i] - one.x))
        bound = (errors[i] + one.forward_error) * torch.linalg.vector_norm(sizes * one.x)
        assert apart <= 1.01 * bound


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("asked", [{}, {"damp": 2.0}, {"weights": torch.linspace(0.5, 1.5, 1700)}])
def test_large_matrices_in_single_precision_are_solved_as_they_are(
    by_columns: bool, asked: dict[str, Any]
) -> None:
    """Products widen them as they read them; what is left is rounding x."""
    a, b = single(1700, 170), single(1700, 2)
    a = a.mT.contiguous().mT if by_columns else a
    found = neula.lstsq(a, b, **asked)
    exact = neula.lstsq(a.double(), b.double(), certify="forward", **asked)
    assert found.converged
    errors = scaled_errors(asked.get("weights", torch.ones(1700))[:, None] * a, found.x, exact.x)
    assert (errors <= (found.forward_errors + exact.forward_errors).numpy()).all()
    assert found.forward_error <= 2.0**-23


single = partial(normal, dtype=torch.float32)


@pytest.fixture
def dtypes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Dtypes of matrices that are prepared."""
    found: list[torch.dtype] = []
    from_arrays = PreparedProblem.from_arrays

    def noted(a: torch.Tensor, *others: Any) -> PreparedProblem:
        found.append(a.dtype)
        return from_arrays(a, *others)

    monkeypatch.setattr(PreparedProblem, "from_arrays", noted)
    return found


@pytest.mark.parametrize("shape", [(150, 60), (64, 64)])
def test_the_solution_is_that_of_the_copy(shape: tuple[int, int], dtypes: list[torch.dtype]) -> None:
    a, b = single(*shape), single(shape[0], 2, seed=1)
    a[:, 0] *= 1e10
    a[:, 1] *= 1e-10
    found = neula.lstsq(a, b, engine="emulated", algorithm="cgls")
    assert dtypes == [torch.float32]
    wide = a.double()
    x = torch.linalg.lstsq(wide, b.double(), driver="gels").solution
    # Householder reflections do not depend on the units of columns.
    assert found.converged
    assert (scaled_errors(wide, found.x, x) <= found.forward_error + 1e-9).all()


@pytest.mark.parametrize("condition", [1.0, 10.0, 1e3])
def test_all_digits_are_sure(condition: float) -> None:
    a, b = problem(condition)
    found = solved(a, b).values
    assert accepted(found)
    assert (found.forward_error <= 4 * U).all()
    check_by_lapack(a, b, found)


def check_by_lapack(a: torch.Tensor, b: torch.Tensor, found: LeastSquaresSolutions) -> None:
    """Errors of x are those of another solution, and what is claimed."""
    sizes = torch.linalg.vector_norm(a, dim=0)[:, None]
    scaled = a / sizes.T
    expected = torch.linalg.lstsq(scaled, b, driver="gelsd").solution
    # Wedin's bound for the error of the other solution, with 10 n u for its backward error.
    error = torch.linalg.vector_norm(found.x[0] * sizes - expected, dim=0)
    rest = torch.linalg.vector_norm(b - scaled @ expected, dim=0)
    true_condition = float(torch.linalg.cond(scaled))
    length = torch.linalg.vector_norm(expected, dim=0)
    bound = 10 * N * U * true_condition * (2 * length + true_condition * rest)
    assert (error <= bound + found.forward_error[0] * length).all()


@pytest.mark.parametrize("condition", [1.0, 3.0])
def test_in_half_precision_with_plain_residuals(condition: float) -> None:
    """Backward errors are those of double precision; what is claimed of x is what they leave."""
    a, b = problem(condition)
    found = solved(a, b, compute="fp16").values
    assert accepted(found)
    assert (found.refined_error <= lstsq_bound(FP64, N)).all()
    # Residuals err by 2 (m + n)^0.5 u, times norms whose ratios are about 5, and the condition number.
    assert (found.forward_error <= 100 * (M + N) ** 0.5 * U * found.condition).all()
    check_by_lapack(a, b, found)


@pytest.mark.parametrize("condition", [1e5, 1e9, 0.0])
@pytest.mark.parametrize("given", [{}, {"compute": "fp16"}])
def test_an_r_that_is_no_good_is_noticed(condition: float, given: dict[str, Any]) -> None:
    """Rank-deficient matrices among them: no answer is accepted, whatever x is."""
    assert not accepted(solved(*problem(condition), **given).values)


@pytest.mark.parametrize(
    ("shape", "engine", "given"),
    [
        ((150, 60), "emulated", {"damp": 0.1}),
        ((150, 60), "emulated", {"weights": torch.linspace(1, 2, 150)}),
        ((40, 90), "emulated", {}),
        ((150, 60), "cpu", {}),
    ],
    ids=["damping", "weights", "wide", "LAPACK"],
)
def test_others_take_a_copy(
    shape: tuple[int, int], engine: str, given: dict[str, Any], dtypes: list[torch.dtype]
) -> None:
    b = single(shape[0], 1, seed=1)
    assert neula.lstsq(single(*shape), b, engine=engine, algorithm="cgls", **given).converged
    assert dtypes == [torch.float64]
