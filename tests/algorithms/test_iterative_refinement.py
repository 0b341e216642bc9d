"""Refinement of linear systems: what converges, how far, and when it stops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from tests.matrices import normal

from neula.algorithms.elimination.factorization import LibraryLU, library_lu
from neula.algorithms.krylov.driver import Refined
from neula.algorithms.krylov.iterative_refinement import (
    ConcurrentProbes,
    ProbeSystems,
    Requests,
    cg_refinement,
    classical,
    gmres_refinement,
    refine,
)
from neula.certificates.backward_error import Measures, Scaling, backward_error
from neula.engines import EmulatedEngine
from neula.io.matrices import random_matrix

drawn = partial(normal, seed=5)

U64 = 2.0**-53


def system(cond: float, n: int = 100, k: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    a = random_matrix("arithmetic", n, n, cond=cond)
    return a, torch.randn(n, k, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def rounded(a: torch.Tensor, u: float) -> LibraryLU:
    """Factors of a matrix with relative errors u in its elements: those of a format with roundoff u."""
    noise = 2 * torch.rand(a.shape, dtype=a.dtype, generator=torch.Generator().manual_seed(2)) - 1
    return library_lu(a * (1 + u * noise), EmulatedEngine())


def norm(a: torch.Tensor) -> Scaling:
    return Scaling(a.abs().sum(1).amax())


def measured(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> float:
    """Normwise backward error, computed here."""
    r = (b - a @ x).abs().amax(0)
    return float((r / (a.abs().sum(1).max() * x.abs().amax(0) + b.abs().amax(0))).max())


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("u", [2.0**-11, 2.0**-24])
def test_classical_refinement_reaches_the_working_precision(u: float, k: int) -> None:
    a, b = system(10.0, k=k)
    tolerance = 2 * U64
    found = refine(a, b, classical(rounded(a, u)), scalings=[norm(a)], tolerance=tolerance, max_iterations=30)
    assert found.backward_error.shape == (k,)
    assert found.backward_error.max() <= tolerance
    # Products of other columns may be summed in another order: a difference of n u64 at most.
    assert measured(a, b, found.x) <= tolerance + 100 * U64
    size = a.abs() @ found.x.abs() + b.abs()
    assert ((found.residual - (b - a @ found.x)).abs() <= 2 * 100 * U64 * size).all()
    # Each step gains the digits of the factors, but for what the condition number takes (Carson and Higham,
    # theorem 4.1, with the 2-norm of the errors, sqrt(n) u).
    rate = 10 * math.sqrt(100) * u * float(torch.linalg.cond(a))
    assert found.iterations <= 1 + math.log(tolerance) / math.log(rate)
    assert len(found.history) == found.iterations
    assert found.history == sorted(found.history, reverse=True)


@pytest.mark.parametrize(("k", "block"), [(2, 512), (7, 3)])
def test_gmres_converges_where_classical_refinement_does_not(
    k: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Condition number 1e5 and factors accurate to 5e-4: Carson and Higham, table 2.2."""
    monkeypatch.setattr("neula.algorithms.krylov.iterative_refinement.COLUMNS", block)
    a, b = system(1e5, k=k)
    factors, options = rounded(a, 2.0**-11), {"scalings": [norm(a)], "tolerance": 4 * U64}
    first = refine(a, b, classical(factors), **options, max_iterations=60)
    assert first.backward_error.max() > 1e-10
    before, steps = first.iterations, len(first.history)
    found = refine(a, b, gmres_refinement(a, factors), **options, max_iterations=60, start=first)
    assert found.backward_error.max() <= 4 * U64
    assert before < found.iterations <= 60
    assert steps < len(found.history) < steps + 4


def test_stops_when_it_stagnates() -> None:
    """A tolerance that rounding errors do not allow costs one step more, not all of them."""
    a, b = system(10.0)
    factors = rounded(a, 2.0**-24)
    found = refine(a, b, classical(factors), scalings=[norm(a)], tolerance=0.0, max_iterations=100)
    assert found.iterations <= 8
    assert found.backward_error.max() <= 2 * U64


@pytest.mark.parametrize("solved", [0.0, 0.2])
def test_ends_where_only_the_solution_grows(solved: float) -> None:
    """Its backward error falls to nothing along a direction that A hardly sees, and solves little."""
    a = torch.diag(torch.tensor([1.0, 1.0, 1e-30], dtype=torch.float64))
    b, calls = torch.ones(3, 1, dtype=torch.float64), []

    def solver(residual: torch.Tensor, *_: object) -> tuple[torch.Tensor, int]:
        calls.append(residual)
        return torch.tensor([[solved], [solved], [100.0 ** len(calls)]], dtype=torch.float64), 1

    refined = refine(a, b, solver, scalings=[norm(a)], tolerance=1e-14, max_iterations=20)
    assert len(calls) == 1
    assert float(refined.backward_error) < 0.02


def test_divergence_keeps_the_best_solution() -> None:
    a, b = system(1e8)
    found = refine(a, b, classical(rounded(a, 0.5)), scalings=[norm(a)], tolerance=1e-15, max_iterations=100)
    assert found.iterations < 10
    assert torch.isfinite(found.x).all()
    assert found.backward_error.max() <= 1
    assert measured(a, b, found.x) == pytest.approx(float(found.backward_error.max()), rel=1e-6)


@dataclass
class Broken:
    value: float
    growth: float = 1.0
    narrow: bool = False
    symmetric: bool = False

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        return torch.full_like(b, self.value)

    def in_double(self) -> Broken:
        return self


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_factors_that_are_not_finite_leave_the_zero_vector(value: float) -> None:
    a, b = system(10.0)
    for correct in (classical(Broken(value)), gmres_refinement(a, Broken(value))):
        found = refine(a, b, correct, scalings=[norm(a)], tolerance=1e-15, max_iterations=20)
        assert (found.x == 0).all()
        assert (found.backward_error == 1).all()


def test_right_hand_sides_end_for_themselves() -> None:
    """One that is zero needs no step, and one that is easy no more than it would alone."""
    a, b = system(10.0, k=3)
    b[:, 1] = 0
    seen: list[int] = []
    factors = rounded(a, 2.0**-11)

    def correct(residual: torch.Tensor, *_: float) -> tuple[torch.Tensor, int]:
        seen.append(residual.shape[1])
        return factors.solve(residual), 1

    x, error = torch.zeros_like(b), torch.tensor([1e-9, 0.0, 1.0], dtype=torch.float64)
    x[:, 0] = torch.linalg.solve(a, b[:, 0])
    residual = b - a @ x
    start = Refined(x, Measures(error, error), residual=residual)
    found = refine(a, b, correct, scalings=[norm(a)], tolerance=1e-8, max_iterations=20, start=start)
    assert set(seen) == {1}
    assert (found.x[:, 1] == 0).all()
    assert found.backward_error[1] == 0
    assert found.backward_error[0] == 1e-9


def test_the_worst_scaling_counts() -> None:
    """An error in an equation in small units does not show in the norm of A, but in that of the scaled A."""
    a = torch.diag(torch.tensor([1.0, 1e-12], dtype=torch.float64))
    b = a.sum(1, keepdim=True)
    x = torch.tensor([[1.0], [1.5]], dtype=torch.float64)
    plain = norm(a)
    scaled = Scaling(
        torch.tensor(1.0, dtype=torch.float64),
        rows=torch.tensor([1.0, 1e12], dtype=torch.float64),
        columns=torch.ones(2, dtype=torch.float64),
    )
    residual = b - a @ x
    assert float(backward_error([plain], b, x, residual)) < 1e-12
    # |r| = 1/2, ||A|| ||x|| + ||b|| = 3/2 + 1.
    assert float(backward_error([plain, scaled], b, x, residual)) == pytest.approx(0.2)
    assert float(scaled.condition_at_least(b, x)) == pytest.approx(1.5)


def test_companions_save_iterations_and_are_not_returned() -> None:
    """The space of several right-hand sides has what slows convergence down sooner."""
    n = 200
    a, b = random_matrix("geometric", n, n, cond=1e4), drawn(n, 1)
    factors, taken = rounded(a, 2.0**-8), []
    for count in (0, 6):
        probe = torch.ones(n, 2, dtype=torch.float64)
        probes = ProbeSystems(probe, 1e-4, drawn(n, count))
        x, iterations = gmres_refinement(a, factors, probes)(b, 1e-10, 100)
        assert x.shape == b.shape
        assert torch.linalg.vector_norm(b - a @ x) <= 1e-10 * torch.linalg.vector_norm(b)
        assert probes.x is not None
        left = torch.linalg.vector_norm(probe - a @ probes.x, dim=0)
        assert (left <= 1e-4 * torch.linalg.vector_norm(probe, dim=0)).all()
        taken.append(iterations)
    assert taken[1] < 0.8 * taken[0]


def test_cg_multiplies_and_solves_for_others_on_the_way() -> None:
    """Results of two solves with the factors join the right-hand sides."""
    n = 80
    g = drawn(n, n)
    a = g @ g.T / n + 0.1 * torch.eye(n, dtype=torch.float64)
    b, factors = drawn(n, 1), rounded(a, 2.0**-6)
    vectors, seen = drawn(n, 3), []

    def products() -> Requests:
        seen.append((yield vectors))

    def solves() -> Requests:
        found = yield vectors
        probes.b = (yield found)[:, :1]

    probes = ConcurrentProbes(b[:, :0], 1e-3, b[:, :0], products=products(), solves=solves())
    solve = cg_refinement(a, factors, probes)
    x, _ = solve(b, 1e-8, 100)
    assert torch.linalg.vector_norm(b - a @ x) <= 1e-8 * torch.linalg.vector_norm(b)
    bound = n * U64 * torch.linalg.matrix_norm(a) * torch.linalg.matrix_norm(vectors)
    assert torch.linalg.matrix_norm(seen[0] - a @ vectors) <= bound
    expected = factors.solve(factors.solve(vectors))[:, :1]
    assert torch.allclose(probes.b, expected, rtol=0, atol=n * 2.0**-44 * float(expected.abs().max()))
    assert probes.x is not None
    assert torch.linalg.vector_norm(probes.b - a @ probes.x) <= 1e-3 * torch.linalg.vector_norm(probes.b)
    again, _ = solve(b, 1e-8, 100)
    assert again.shape == b.shape


def test_residuals_read_the_matrix_for_others_once() -> None:
    n = 60
    a, b = drawn(n, n) + n**0.5 * torch.eye(n, dtype=torch.float64), drawn(n, 2)
    along = drawn(n, 3)
    probes = ProbeSystems(drawn(n, 1), 1e-3, drawn(n, 0), along)
    assert torch.equal(probes.multiplied(a, b), a @ b)
    assert probes.image is None  # there is no solution yet
    plain = Scaling(torch.linalg.matrix_norm(a, torch.inf))
    solver = gmres_refinement(a, rounded(a, 2.0**-8), probes)
    refined = refine(a, b, solver, scalings=[plain], tolerance=1e-14, max_iterations=60, probes=probes)
    bound = n * 2.0**-52
    for x, image in ((probes.x, probes.image), (along, probes.along_image)):
        assert x is not None
        assert image is not None
        assert ((image - a @ x).abs() <= bound * (a.abs() @ x.abs())).all()
    size = a.abs() @ refined.x.abs() + b.abs()
    assert ((refined.residual - (b - a @ refined.x)).abs() <= bound * size).all()
