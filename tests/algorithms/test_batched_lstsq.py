"""The corrected seminormal equations for a batch: what they reach, and what their measurements say."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from neula.algorithms.batched_lstsq import (
    MAX_STEPS,
    SMALLEST,
    BatchedSolution,
    Overdetermined,
    System,
    Underdetermined,
    cholesky_r,
    gram_schmidt_r,
    householder_r,
    refine_batch,
)
from neula.matrices import random_matrix

U64 = 2.0**-53
PROBE = 1e-5
FACTORS = {
    "cholesky": cholesky_r,
    "householder": householder_r,
    "gram-schmidt fp32": partial(gram_schmidt_r, dtype=torch.float32),
    "gram-schmidt fp64": partial(gram_schmidt_r, dtype=torch.float64),
}
SHAPES = [(1, 1), (5, 1), (7, 7), (40, 12), (90, 40), (300, 33)]


def matrices(batch: int, m: int, n: int, kind: str = "normal", cond: float = 1.0) -> torch.Tensor:
    return torch.stack([random_matrix(kind, m, n, cond=cond, seed=7 * n + i) for i in range(batch)])


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(3), dtype=torch.float64)


def tolerance(n: int) -> float:
    """A third of what :func:`neula.accuracy.lstsq_bound` allows."""
    return 8 * (1 + math.sqrt(n)) * U64 / 3


def solve(system: System, b: torch.Tensor, n: int, max_steps: int = MAX_STEPS) -> BatchedSolution:
    return refine_batch(
        system, b, unknowns=n, tolerance=tolerance(n), probe_tolerance=PROBE, max_steps=max_steps
    )


def smallest_perturbation(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> float:
    """The smallest ``||[E / ||A||, f / ||b||]||_F`` for which x solves ``min ||(A + E) x - (b + f)||``.

    The formula of Walden, Karlson, Sun (1995), with the singular values of an m x (n + m) matrix.
    """
    r, norm = b - a @ x, torch.linalg.vector_norm
    weight = torch.linalg.matrix_norm(a, 2) / norm(b) * norm(x)
    phi = weight / (1 + weight.square()).sqrt() * norm(r) / norm(x)
    projector = torch.eye(len(r), dtype=r.dtype) - torch.outer(r, r) / norm(r).square()
    smallest = torch.linalg.svdvals(torch.cat([a, phi * projector], 1))[-1]
    return float(min(phi, smallest) / torch.linalg.matrix_norm(a, 2))


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_overdetermined(m: int, n: int, factor: str) -> None:
    """The error of x is what its backward error allows, ``cond eta (1 + cond tan)``, whatever R came from."""
    a, b = matrices(3, m, n), noise(3, 2, m)
    found = solve(Overdetermined(a, FACTORS[factor](a)), b, n)
    assert (found.probe_error <= PROBE).all()
    assert (found.measures.backward_error <= 3 * tolerance(n)).all()
    reference = torch.linalg.lstsq(a, b.mT, driver="gelsd").solution.mT
    cond = torch.linalg.cond(a)[:, None]
    size = torch.linalg.vector_norm(reference, dim=2)
    residual = torch.linalg.vector_norm(b - reference @ a.mT, dim=2)
    growth = cond + cond**2 * residual / (torch.linalg.matrix_norm(a, 2)[:, None] * size)
    error = torch.linalg.vector_norm(found.x - reference, dim=2)
    assert (error <= 4 * 3 * tolerance(n) * growth * size).all()
    torch.testing.assert_close(found.residual, b - found.x @ a.mT, rtol=0, atol=m * U64 * float(b.norm()))


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_underdetermined(m: int, n: int, factor: str) -> None:
    """The minimum-norm solution: forward error ``cond eta``, and in the range of A by construction."""
    a, b = matrices(3, m, n), noise(3, 2, n)
    found = solve(Underdetermined(a, FACTORS[factor](a)), b, n)
    assert (found.probe_error <= PROBE).all()
    assert (found.measures.backward_error <= 3 * tolerance(n)).all()
    reference = b @ torch.linalg.pinv(a)
    error = torch.linalg.vector_norm(found.x - reference, dim=2)
    size = torch.linalg.vector_norm(reference, dim=2)
    assert (error <= 4 * 3 * tolerance(n) * torch.linalg.cond(a)[:, None] * size).all()


@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize("cond", [1e1, 1e3, 1e5])
def test_the_measure_is_an_upper_bound(cond: float, consistent: bool) -> None:
    """Each of the three perturbations has rank one and is as large in A as in b: ``sqrt(2)`` in both."""
    a, b = matrices(4, 50, 10, "geometric", cond), noise(4, 1, 50)
    b = noise(4, 1, 10) @ a.mT if consistent else b
    r = (torch.eye(10) + 0.02 * noise(4, 10, 10)).triu() @ cholesky_r(a)
    for steps in (1, 2, 3, 4):
        found = solve(Overdetermined(a, r), b, 10, max_steps=steps)
        for i in range(4):
            measured = float(found.measures.backward_error[i, 0])
            # The reference has rounding errors of its own, those of singular values.
            assert smallest_perturbation(a[i], b[i, 0], found.x[i, 0]) <= 2**0.5 * measured + 10 * U64


@pytest.mark.parametrize("kind", ["geometric", "cluster_small", "cluster_large"])
def test_norm_and_condition_are_bounds(kind: str) -> None:
    for n in (1, 2, 40):
        a = matrices(5, 60, n, kind, 1e4)
        system = Overdetermined(a, householder_r(a))
        norm, cond = torch.linalg.matrix_norm(a, 2), torch.linalg.cond(a)
        part = system.norm[:, 0] / norm
        assert (part <= 1 + n * U64 * 10).all()
        assert (part >= math.sqrt(2 / (1 + math.sqrt(n))) - n * U64 * 10).all()
        # The inverse of R errs by cond u.
        assert (system.condition >= cond * (1 - 1e-8)).all()
        assert (system.condition <= n * cond * (1 + 1e-8)).all()


@pytest.mark.parametrize("size", [0.1, 0.3])
def test_error_of_r_is_the_rate(size: float) -> None:
    """``R (1 + size)`` has ``I - W^T W = 1 - (1 + size)^-2``: so many steps to the tolerance of the probe."""
    a, b = matrices(2, 30, 8), noise(2, 1, 30)
    system = Overdetermined(a, householder_r(a) * (1 + size))
    rate = 1 - (1 + size) ** -2
    for steps in (1, 2, 5):
        found = solve(system, b, 8, max_steps=steps)
        assert found.steps == steps
        torch.testing.assert_close(
            found.probe_error, torch.full((2,), rate**steps).double(), rtol=1e-6, atol=0
        )


def test_an_accepted_probe_bounds_the_singular_values_of_w() -> None:
    """As the measure of the projected residual takes for granted."""
    accepted = 0
    for i, size in enumerate(torch.linspace(0.0, 1.0, 41).tolist()):
        a, b = matrices(1, 30, 8), noise(1, 1, 30)
        stretch = torch.ones(8, dtype=torch.float64)
        stretch[i % 8] = 1 + size
        r = stretch[:, None] * householder_r(a)
        found = solve(Overdetermined(a, r), b, 8)
        smallest = torch.linalg.svdvals(a @ torch.linalg.inv(r)).min()
        if float(found.probe_error) <= PROBE:
            accepted += 1
            assert smallest >= SMALLEST
        else:
            assert smallest < 0.85
    assert 5 <= accepted < 41


@pytest.mark.parametrize("factor", FACTORS)
def test_a_null_direction_is_lost_to_the_probe(factor: str) -> None:
    """Whatever R makes of it: rounding errors, zero or NaN."""
    a, b = matrices(50, 30, 6), noise(50, 1, 30)
    a[:, :, 3] = (a[:, :, :3] * noise(50, 1, 3)).sum(2)
    found = solve(Overdetermined(a, FACTORS[factor](a)), b, 6)
    assert not (found.probe_error <= PROBE).any()


def test_what_is_done_does_not_depend_on_the_rest() -> None:
    a, b = matrices(6, 40, 8), noise(6, 3, 40)
    r = gram_schmidt_r(a, torch.float32)
    alone = solve(Overdetermined(a, r), b, 8)
    # One that takes all steps, one that is singular, one that is not finite, one right-hand side of NaN.
    r[1] *= 1.4
    r[2, 4, 4] = 0
    a[3, 0, 0] = torch.inf
    b[4, 1, 5] = torch.nan
    found = solve(Overdetermined(a, r), b, 8)
    assert found.steps > alone.steps
    for i in (0, 5):
        assert torch.equal(found.x[i], alone.x[i])
        assert torch.equal(found.measures.backward_error[i], alone.measures.backward_error[i])
    assert torch.equal(found.x[4, ::2], alone.x[4, ::2])
    assert found.x[4, 1].isnan().all()
    assert found.x[2:4].isnan().any(2).all()
    assert found.measures.backward_error[2:4].isnan().all()


def test_zero_right_hand_sides_have_the_solution_zero() -> None:
    a, b = matrices(2, 20, 5), noise(2, 2, 20)
    b[0, 1] = 0
    found = solve(Overdetermined(a, cholesky_r(a)), b, 5)
    assert (found.x[0, 1] == 0).all()
    assert found.measures.backward_error[0, 1] == 0


def test_no_cholesky_factor_is_nan() -> None:
    a = matrices(3, 20, 5)
    a[1, :, 2] = 0
    r = cholesky_r(a)
    assert r[1].isnan().any()
    assert r[[0, 2]].isfinite().all()
    assert torch.equal(r[[0, 2]], r[[0, 2]].triu())
