"""The corrected seminormal equations for a batch: what they reach, and what their measurements say.

Exact solutions, and with them true errors, come from ball arithmetic (tests/campaign/oracle.py).
"""

from __future__ import annotations

import math
from functools import partial

import mpmath
import pytest
import torch
from tests.matrices import normal

from campaign.oracle import LeastSquares
from neula.algorithms.krylov.batched_lstsq import Overdetermined, Triangles, Underdetermined, lengths
from neula.algorithms.krylov.doubled_refinement import DoubledSolution, Refinement
from neula.algorithms.orthogonal.r_only import cholesky_r, householder_r
from neula.algorithms.spectra import inverse_norm
from neula.algorithms.spectra.inverse_norm import schatten_bounds
from neula.certificates.forward_error import COMPUTED, MAX_RATE, SURE
from neula.certificates.residuals import DOUBLED
from neula.io.matrices import random_matrix

noise = partial(normal, seed=3)

U64 = 2.0**-53
TOLERANCE = U64 / 2
FACTORS = {
    "cholesky": cholesky_r,
    "householder": householder_r,
    "householder fp32": lambda a: householder_r(a.float()).double(),
}
SHAPES = [(1, 1), (5, 1), (7, 7), (40, 12)]
ILL_CONDITIONED = [
    # With a rate of about cond^2 u64, cond u32 and cond u64.
    ("cholesky", 1e5),
    ("householder fp32", 1e4),
    ("householder", 1e8),
    ("householder", 1e10),
]


def matrices(batch: int, m: int, n: int, kind: str = "normal", cond: float = 1.0) -> torch.Tensor:
    """Elements at most 1 in magnitude, as solvers want them."""
    found = torch.stack([random_matrix(kind, m, n, cond=cond, seed=7 * n + i) for i in range(batch)])
    return found / found.abs().amax((1, 2), keepdim=True)


def solve(system: Overdetermined | Underdetermined, b: torch.Tensor) -> DoubledSolution:
    return Refinement(system, b, TOLERANCE).solved()


def true_errors(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``||D (x - x*)|| / ||D x*||``, shape (batch, k), for A of full rank."""
    rank = min(a.shape[1:])
    return torch.stack(
        [
            torch.from_numpy(LeastSquares(one.numpy(), rhs.numpy(), rcond=0.0).errors(y.numpy(), rank))
            for one, rhs, y in zip(a, b, x, strict=True)
        ]
    )


def normalized(a: torch.Tensor) -> torch.Tensor:
    """``B = A D^-1``."""
    return a / torch.linalg.vector_norm(a, dim=1, keepdim=True)


def condition(a: torch.Tensor) -> torch.Tensor:
    """Condition number of B, shape (batch, 1)."""
    return torch.linalg.cond(normalized(a))[:, None]


def doubled_noise(a: torch.Tensor, b: torch.Tensor, found: DoubledSolution) -> torch.Tensor:
    """Forward error due to rounding in doubled products: errors of the residual times ``B^+``, and those of
    the gradient times ``(B^T B)^-1``. Schatten norms exceed each norm by ``n^(1/4)`` at most.
    """
    m, n = a.shape[1:]
    size = torch.linalg.vector_norm(torch.linalg.vector_norm(a, dim=1)[..., None] * found.x, dim=1)
    rhs, residual = (torch.linalg.vector_norm(x, dim=1) for x in (b, found.residual))
    cond, norm = condition(a), torch.linalg.matrix_norm(normalized(a), 2)[:, None]
    part = norm * size + rhs + cond * residual
    return 1.01 * DOUBLED * (m + n) * n**0.75 * cond / norm * part / size


def problem(
    m: int, n: int, factor: str, cond: float = 1.0, *, kind: str = "tall", count: int = 2
) -> tuple[torch.Tensor, torch.Tensor, Overdetermined | Underdetermined]:
    """A and b of a tall, a consistent or a wide problem, and the system with R of m x n matrices."""
    t = matrices(count, m, n, "geometric" if cond > 1 else "normal", cond)
    r = FACTORS[factor](t)
    if kind == "wide":
        return t.mT, noise(count, n, 2), Underdetermined(t, r, lengths(t.mT)[..., None])
    return t, t @ noise(count, n, 2) if kind == "consistent" else noise(count, m, 2), Overdetermined(t, r)


WELL_CONDITIONED = [(*shape, factor, 1.0) for shape in SHAPES for factor in FACTORS]


@pytest.mark.parametrize("kind", ["tall", "consistent", "wide"])
@pytest.mark.parametrize(
    ("m", "n", "factor", "cond"), WELL_CONDITIONED + [(24, 8, *hard) for hard in ILL_CONDITIONED]
)
def test_solutions_and_their_bounds(m: int, n: int, factor: str, cond: float, kind: str) -> None:
    """The nearest floating-point numbers to x*, except for half a unit roundoff. The condition number costs
    nothing as long as its square, times the residual, is below 2^52.
    """
    a, b, system = problem(m, n, factor, cond, kind=kind)
    found = solve(system, b)
    assert (true_errors(a, b, found.x) <= found.forward_error).all()
    if kind == "wide":
        assert (found.forward_error <= (4 * U64 if cond > 1 else COMPUTED * (U64 + TOLERANCE))).all()
        assert cond > 1 or (found.measures.backward_error <= 2 * U64 * math.sqrt(m + n)).all()
        return
    allowed = COMPUTED * (U64 + torch.clamp_min(4 * doubled_noise(a, b, found), TOLERANCE))
    assert (found.forward_error <= allowed).all()
    torch.testing.assert_close(
        found.residual, b - a @ found.x, rtol=0, atol=m * U64 * float(b.norm() + a.norm() * found.x.norm())
    )


@pytest.mark.parametrize("cond", [1e12, 1e13])
def test_very_ill_conditioned(cond: float) -> None:
    """All that is left of a residual is noise: the bound says so. Without a residual each step still leaves
    no more than a hundredth of the error; a single step leaves an x of nothing but errors, a multiple of x*.
    """
    a, b, system = problem(24, 8, "householder", cond)
    found = solve(system, b)
    assert ((true_errors(a, b, found.x) <= found.forward_error) | (found.forward_error > SURE)).all()
    a, b, system = problem(24, 8, "householder", cond, kind="consistent", count=6)
    assert (system.rate <= MAX_RATE).all()
    assert (solve(system, b).forward_error <= 4 * U64).all()
    once = Refinement(system, b, TOLERANCE).solved(1)
    assert (true_errors(a, b, once.x) <= once.forward_error).all()


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("cond", [1e4, 1e13])
def test_the_rate_is_an_upper_bound(cond: float, factor: str) -> None:
    """Of ``||I - W^T W||_F`` for ``W = A R^-1`` without rounding errors, with few columns."""
    a = matrices(2, 15, 5, "geometric", cond)
    r = FACTORS[factor](a)
    rate = Overdetermined(a, r).rate
    for one, triangle, claimed in zip(a, r, rate.tolist(), strict=True):
        if not triangle.isfinite().all():  # no Cholesky factor
            assert math.isnan(claimed)
            continue
        with mpmath.workdps(60):
            w = mpmath.matrix(one.tolist()) * mpmath.inverse(mpmath.matrix(triangle.tolist()))
            true = mpmath.mnorm(mpmath.eye(5) - w.T * w, "f")
        assert true <= claimed or math.isnan(claimed)


@pytest.mark.parametrize("n", [3, 8, 9, 40])
@pytest.mark.parametrize("size", [1e-6, 0.1])
def test_the_rate_of_an_r_with_known_errors(n: int, size: float) -> None:
    """In all directions, or in one that random vectors may miss: it is no larger than the margin says."""
    a = matrices(20, 50, n)
    r = householder_r(a)
    everywhere = r + size * (noise(20, n, n) * r.abs()).triu()
    once = r.clone()
    once[:, n // 2] *= 1 + size
    for wrong in (everywhere, once):
        w = torch.linalg.solve_triangular(wrong, a, upper=True, left=False)
        change = torch.eye(n) - w.mT @ w
        rate = Overdetermined(a, wrong).rate
        assert (rate >= torch.linalg.matrix_norm(change, 2)).all()
        # The mean over 8 vectors of a form with chi-squared terms is below 5 times its expectation.
        rounding = 100 * n * U64 * torch.linalg.cond(a)
        assert (rate <= 3 * math.sqrt(5) * torch.linalg.matrix_norm(change) + rounding).all()


@pytest.mark.parametrize("factor", FACTORS)
def test_a_null_direction_is_not_trusted(factor: str) -> None:
    """Whatever R makes of it: rounding errors, zero or NaN."""
    a, b = matrices(50, 30, 6), noise(50, 30, 1)
    a[:, :, 3] = (a[:, :, :3] * noise(50, 1, 3)).sum(2)
    found = solve(Overdetermined(a, FACTORS[factor](a)), b)
    assert (found.forward_error == math.inf).all()


@pytest.mark.parametrize("wide", [False, True])
def test_what_is_done_does_not_depend_on_the_rest(wide: bool) -> None:
    a = matrices(6, 40, 8)
    b, one = noise(6, 8 if wide else 40, 3), torch.ones(6, 40, 1, dtype=torch.float64)

    def solved(a: torch.Tensor, r: torch.Tensor, b: torch.Tensor) -> DoubledSolution:
        return solve(Underdetermined(a, r, one) if wide else Overdetermined(a, r), b)

    r = FACTORS["householder fp32"](a)
    alone = solved(a, r, b)
    # One that takes more steps, one that is singular, one that is not finite, one right-hand side of NaN.
    r[1] *= 1.01
    r[2, 4, 4] = 0
    a[3, 0, 0] = torch.inf
    b[4, 5, 1] = torch.nan
    found = solved(a, r, b)
    assert found.steps > alone.steps
    # Not bit for bit: products may add in another order where the batch, or what is left of it, has another
    # shape. Both are within their bounds of the exact solution, in the norm that D gives.
    d = one if wide else torch.linalg.vector_norm(a, dim=1)[..., None]
    for i, columns in ((0, [0, 1, 2]), (5, [0, 1, 2]), (4, [0, 2])):
        size, change = (
            torch.linalg.vector_norm(d[i] * x[i][:, columns], dim=0) for x in (alone.x, found.x - alone.x)
        )
        both = (found.forward_error + alone.forward_error)[i, columns]
        assert (both <= 2 * COMPUTED * (U64 + TOLERANCE)).all()
        assert (change <= COMPUTED * both * size).all()
        for solution in (found, alone):
            assert (
                solution.measures.backward_error[i, columns] <= 2 * U64 * math.sqrt(sum(a.shape[1:]))
            ).all()
    assert (found.forward_error[1] <= COMPUTED * (U64 + TOLERANCE)).all()
    assert found.x[4][:, 1].isnan().all()
    assert found.x[2:4].isnan().any(1).all()
    assert (found.forward_error[2:4] == math.inf).all()
    assert found.forward_error[4, 1] == math.inf


@pytest.mark.parametrize("kind", ["geometric", "cluster_small", "cluster_large"])
@pytest.mark.parametrize("n", [1, 2, 40])
def test_schatten_bounds(n: int, kind: str) -> None:
    """Also for numbers whose fourth powers overflow or underflow."""
    a = matrices(5, 60, n, kind, 1e4)
    a = a * torch.tensor([1.0, 1e-120, 1e120, 1.0, 0.0], dtype=torch.float64)[:, None, None]
    norm = torch.linalg.matrix_norm(a, 2)
    lower, upper = (bound[:, 0] for bound in schatten_bounds(a))
    slack = 10 * n * U64
    assert (lower <= norm * (1 + slack)).all()
    assert (lower >= norm * (math.sqrt(2 / (1 + math.sqrt(n))) - slack)).all()
    assert (upper >= norm * (1 - slack)).all()
    assert (upper <= norm * n**0.25 * (1 + slack)).all()


@pytest.mark.parametrize("unit", [1.0, 1j])
@pytest.mark.parametrize("n", [1, 7, 40])
def test_schatten_bounds_of_triangles(monkeypatch: pytest.MonkeyPatch, n: int, unit: complex) -> None:
    """By blocks they are the same, and where each second row has another phase."""
    r = matrices(5, 60, n, "geometric", 1e4)[:, :n].triu()
    expected = schatten_bounds(r)
    monkeypatch.setattr(inverse_norm, "HALVED", 1)
    r = r * torch.tensor([1.0, unit]).repeat(n)[:n, None]
    for found in (schatten_bounds(r), schatten_bounds(r, upper=True)):
        assert torch.allclose(torch.stack(found), torch.stack(expected), rtol=10 * n * U64, atol=0)


@pytest.mark.parametrize("kind", ["geometric", "cluster_small", "cluster_large"])
@pytest.mark.parametrize("n", [1, 2, 40])
def test_norms_of_a_problem_are_bounds(n: int, kind: str) -> None:
    a = matrices(3, 60, n, kind, 1e4)
    system = Overdetermined(a, householder_r(a))
    norm, cond = torch.linalg.matrix_norm(normalized(a), 2), condition(a)[:, 0]
    slack = 1e-8  # the inverse of R errs by cond u
    assert (system.norm[:, 0] <= norm * (1 + slack)).all()
    assert (system.norm_bound[:, 0] >= norm * (1 - slack)).all()
    assert (system.inverse_norm[:, 0] >= cond / norm * (1 - slack)).all()
    assert (system.condition_bound >= cond * (1 - slack)).all()
    assert (system.condition <= math.sqrt(n) * cond * (1 + slack)).all()


@pytest.mark.parametrize("kind", ["geometric", "cluster_small", "cluster_large"])
@pytest.mark.parametrize("n", [70, 200])
def test_triangles_are_solved_with_where_they_are_not_inverted(n: int, kind: str) -> None:
    a = matrices(3, n + 20, n, kind, 1e4)
    b, r = noise(3, n + 20, 2), householder_r(a)
    columns = lengths(r)[..., None]
    known = Triangles.estimated(r, columns)
    norm, cond = torch.linalg.matrix_norm(normalized(a), 2), condition(a)[:, 0]
    assert (known.norm[:, 0] <= norm * (1 + 1e-8)).all()
    assert (known.norm_bound[:, 0] >= norm).all()
    assert (known.inverse_norm[:, 0] >= cond / norm).all()
    for doubled in (False, True):
        given = a, r, columns
        estimated, inverted = (Overdetermined(*given, doubled=doubled, triangles=x) for x in (known, None))
        assert (estimated.condition_bound >= cond).all()
        assert (estimated.condition <= cond * (1 + 1e-8)).all()
        assert (estimated.rate >= inverted.rate / 100).all()
        one, other = solve(estimated, b), solve(inverted, b)
        limit = COMPUTED * (one.forward_error + other.forward_error)[:, None]
        sizes = lengths(columns * one.x)[:, None]
        assert (lengths(columns * (one.x - other.x))[:, None] <= limit * sizes).all()


@pytest.mark.parametrize("cond", [1.0, 1e3, 1e6])
def test_plain_residuals_bound_the_error_they_leave(cond: float) -> None:
    """In working precision, columns in any units: the bound holds, and is not far from what theory allows."""
    generator = torch.Generator("cpu").manual_seed(4)
    a = random_matrix("geometric", 120, 12, cond=cond, seed=4).double()
    exact = torch.randint(-9, 9, (12, 1), generator=generator).double()
    for units in (0, 40):
        scales = 2.0 ** torch.linspace(-units, units, 12, dtype=torch.float64).round()
        t = (a * scales)[None]
        b = t @ (exact / scales[:, None])
        r = householder_r(t)
        found = solve(Overdetermined(t, r, columns=lengths(r)[..., None], doubled=False), b)
        sizes = lengths(t)[..., None]
        error = lengths(sizes * (found.x - exact / scales[:, None])) / lengths(sizes * found.x)
        # b is rounded itself: the exact solution for it differs by so much.
        assert bool(error <= found.forward_error + 4 * 2.0**-53 * cond)
        assert bool(found.forward_error <= 1e3 * 2.0**-53 * max(cond, 10.0))
        assert found.steps <= 3
