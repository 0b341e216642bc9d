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
from neula.algorithms.krylov.batched_lstsq import Overdetermined
from neula.algorithms.krylov.doubled_refinement import (
    SYNCHRONOUS,
    DoubledSolution,
    Pace,
    Refinement,
)
from neula.algorithms.orthogonal.r_only import cholesky_r
from neula.engines import CpuEngine
from neula.engines.shipped import cuda_tuning

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
@pytest.mark.parametrize("k", [1, 3])
def test_every_digit_is_certified(name: str, k: int) -> None:
    make, attempts = FULL[name]
    a, b = make(), normal(120, k, seed=1)
    result = neula.lstsq(a, b, engine=Queued("cpu"))
    assert result.converged
    assert [attempt.method for attempt in result.attempts] == attempts
    judge = LeastSquares(a.numpy(), b.numpy(), rcond=120 * 2.0**-52)
    errors = judge.errors(result.x.numpy(), 12)
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


def test_what_is_not_finite_is_an_error() -> None:
    a, b = normal(120, 12), normal(120, 1)
    a[77, 5] = torch.nan
    with pytest.raises(ValueError, match=r"A\[77, 5\] is nan"):
        neula.lstsq(a, b, engine=Queued("cpu"))


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


@pytest.mark.parametrize(
    ("asked", "large", "paces"),
    [
        ({}, True, []),  # as it is given, without a scaled copy
        ({"damp": 0.1}, True, [SYNCHRONOUS]),
        ({"weights": torch.linspace(1, 2, 120, dtype=torch.float64)}, True, [SYNCHRONOUS]),
        ({"damp": 0.1}, False, [Pace.prelaunched(3)]),
    ],
)
def test_a_scaled_copy_is_refined_step_by_step(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], large: bool, paces: list[Pace]
) -> None:
    """Unless all steps are prelaunched: asynchronous steps are those of problems as they are given."""
    seen: list[Pace] = []

    solve = Refinement.solved

    def recorded(self: Refinement, max_steps: int, pace: Pace) -> DoubledSolution:
        seen.append(pace)
        return solve(self, max_steps, pace)

    monkeypatch.setattr(Refinement, "solved", recorded)
    monkeypatch.setattr(Queued, "tuning", replace(Queued.tuning, replayed_bytes=0 if large else 1 << 20))
    assert neula.lstsq(normal(120, 12), normal(120, 1, seed=1), engine=Queued("cpu"), **asked).converged
    assert seen == paces


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("asked", [{}, {"damp": 2.0}, {"weights": True}])
def test_large_matrices_in_single_precision_are_solved_as_they_are(
    by_columns: bool, asked: dict[str, Any]
) -> None:
    """Products widen them as they read them; what is left is rounding x."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1700, k, generator=generator) for k in (170, 2))
    a = a.mT.contiguous().mT if by_columns else a
    if asked.get("weights"):
        asked = {"weights": torch.rand(1700, generator=generator) + 0.5}
    found = neula.lstsq(a, b, **asked)
    exact = neula.lstsq(a.double(), b.double(), certify="forward", **asked)
    assert found.converged
    sizes = torch.linalg.vector_norm(a.double(), dim=0)[:, None]
    errors = torch.linalg.vector_norm(sizes * (found.x - exact.x), dim=0)
    errors = errors / torch.linalg.vector_norm(sizes * exact.x, dim=0)
    assert (errors <= found.forward_errors + exact.forward_errors).all()
    assert found.forward_error <= 2.0**-23
