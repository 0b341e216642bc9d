"""The exact answers, beside mpmath's singular value decomposition and answers known by heart."""

from __future__ import annotations

from fractions import Fraction

import mpmath
import numpy as np
import pytest
from flint import arb, arb_mat, ctx

from .exact import embedded, parts
from .matrices import ComplexRandom
from .oracle import LeastSquares, System
from .shortest import sensitivity

U = 2.0**-53
DIGITS = 200
"""Norms from 1e-30 to 1e30 make the reference's last system as ill-conditioned as 1e120."""


def reference(a: np.ndarray, b: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """x* and the relative singular values of B, by mpmath's SVD with many digits."""
    mpmath.mp.dps = DIGITS
    exact = mpmath.matrix(a.tolist())
    m, n = a.shape
    norms = [mpmath.norm(exact[:, j]) or mpmath.mpf(1) for j in range(n)]
    scaled = mpmath.matrix(m, n)
    for i in range(m):
        for j in range(n):
            scaled[i, j] = exact[i, j] / norms[j]
    u, s, vh = (mpmath.svd_c if np.iscomplexobj(a) else mpmath.svd_r)(scaled)
    wanted = mpmath.matrix([(u[:, i].H * mpmath.matrix(b.tolist()))[0] / s[i] for i in range(rank)])
    directions = mpmath.matrix(n, rank)
    for j in range(n):
        for i in range(rank):
            directions[j, i] = norms[j] * mpmath.conj(vh[i, j])
    x = directions * mpmath.lu_solve(directions.H * directions, wanted)
    return np.array(x.tolist())[:, 0].astype(a.dtype), np.array([float(v / s[0]) for v in s])


@pytest.mark.parametrize("scalars", ["real", "complex"])
@pytest.mark.parametrize("shape", [(5, 4), (4, 6), (4, 4), (7, 2)])
@pytest.mark.parametrize("kind", ["full", "dependent", "rounded", "scaled"])
def test_agrees_with_mpmath(
    shape: tuple[int, int], kind: str, scalars: str, rng: np.random.Generator
) -> None:
    m, n = shape
    numbers = ComplexRandom(rng) if scalars == "complex" else rng
    a, b = numbers.standard_normal(shape), numbers.standard_normal(m)
    if kind == "dependent":
        a[:, -1] = 2 * a[:, 0]
    if kind == "rounded":
        a[:, -1] = np.pi * a[:, 0]
        a[-1] = 1.7 * a[0] + a[1] / 3
    if kind == "scaled":
        a *= 10.0 ** rng.integers(-30, 31, n)
    truth = LeastSquares(a, b[:, None], rcond=max(m, n) * 2 * U)
    (rank,) = truth.ranks
    x, singular_values = reference(a, b, rank)
    np.testing.assert_allclose(truth.singular_values[:rank], singular_values[:rank], rtol=1e-6)
    assert (singular_values[rank:] < truth.rcond).all()
    # Both are exact but for the rounding of the result to double precision.
    np.testing.assert_allclose(truth.rounded_solution(rank)[:, 0], x, rtol=4 * U)
    assert truth.errors(x[:, None], rank).max() <= 2 * U


def test_rational_solution_by_heart() -> None:
    """A line through (0, 1), (1, 3), (2, 4): 7/6 + 3/2 t."""
    a, b = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]), np.array([[1.0], [3.0], [4.0]])
    truth = LeastSquares(a, b, rcond=1e-15)
    assert truth.ranks == (2,)
    np.testing.assert_array_equal(truth.rounded_solution(2)[:, 0], [float(Fraction(7, 6)), 1.5])
    assert truth.errors(np.array([[0.0], [0.0]]), 2) == pytest.approx([1.0])


@pytest.mark.parametrize(
    ("a", "singular"),
    [
        (np.arange(1.0, 10).reshape(3, 3), True),
        ((np.eye(3) + 1) * [[1.0], [1.0], [1e-30]], False),  # scaling rows by powers decides the rank
    ],
)
def test_ranks_by_heart(a: np.ndarray, singular: bool) -> None:
    truth = LeastSquares(a, np.ones((3, 1)), rcond=3 * 2 * U)
    assert truth.ranks == (2,)
    expected = np.linalg.pinv(a, rcond=1e-15) @ np.ones(3)
    assert not singular or np.allclose(truth.rounded_solution(2)[:, 0], expected, rtol=0, atol=1e-14)
    assert System(a, np.ones((3, 1))).singular == singular


def test_rank_on_the_threshold_is_either() -> None:
    a = np.diag([1.0, 1.0])
    a[0, 1] = np.sqrt(1 - 1e-6)
    a[1, 1] = 1e-3
    s = LeastSquares(a, np.ones((2, 1)), rcond=0.0).singular_values
    for rcond, ranks in ((s[1], (1, 2)), (s[1] * 1.01, (1,)), (s[1] / 1.01, (2,))):
        assert LeastSquares(a, np.ones((2, 1)), rcond=float(rcond)).ranks == ranks


def test_numbers_beyond_the_range_of_norms(rng: np.random.Generator) -> None:
    """Powers of two change nothing but the exponents."""
    a, b = rng.standard_normal((5, 3)), rng.standard_normal((5, 2))
    plain = LeastSquares(a, b, rcond=1e-15)
    scaled = LeastSquares(np.ldexp(a, 1000), np.ldexp(b, -60), rcond=1e-15)
    x = plain.rounded_solution(3)
    np.testing.assert_array_equal(scaled.rounded_solution(3), np.ldexp(x, -1060))
    np.testing.assert_allclose(scaled.bounds(3, U), plain.bounds(3, U))
    # x* is 2^-1060 or so, where numbers are 2^-1074 apart.
    assert 2.0**-17 < scaled.underflow(3, -1074).max() < 2.0**-12
    assert plain.largest_component(3) == pytest.approx(np.log2(np.abs(x).max(0)))


def test_weights_and_damping_are_rows(rng: np.random.Generator) -> None:
    a, b, w = rng.standard_normal((6, 3)), rng.standard_normal((6, 1)), 2.0 ** rng.integers(-40, 40, 6)
    given = LeastSquares(a, b, weights=w, damp=0.5, rcond=1e-15)
    rows, rhs = np.vstack([w[:, None] * a, 0.5 * np.eye(3)]), np.vstack([w[:, None] * b, np.zeros((3, 1))])
    stacked = LeastSquares(rows, rhs, rcond=1e-15)
    np.testing.assert_array_equal(given.rounded_solution(3), stacked.rounded_solution(3))
    np.testing.assert_array_equal(given.singular_values, stacked.singular_values)


def test_zero_solutions() -> None:
    a = np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    truth = LeastSquares(a, np.array([[0.0, 0.0], [0.0, 7.0], [0.0, 0.0]]), rcond=1e-15)
    assert truth.errors(np.zeros((2, 2)), 2).tolist() == [0.0, 0.0]
    assert truth.errors(np.full((2, 2), 1e-300), 2).tolist() == [np.inf, np.inf]
    assert truth.bounds(2, U)[1] == np.inf
    zero = LeastSquares(np.zeros((3, 2)), np.ones((3, 1)), rcond=1e-15)
    assert zero.ranks == (0,)
    assert zero.errors(np.zeros((2, 1)), 0).tolist() == [0.0]


def test_bound_has_the_residual_times_the_condition_squared() -> None:
    """It is kappa u (2 + (kappa + 1) ||r|| / (||B|| ||D x||)), for a matrix whose numbers are known."""
    eps = 2.0**-10
    a = np.array([[1.0, 1.0], [0.0, eps], [0.0, 0.0]])
    truth = LeastSquares(a, np.array([[1.0], [0.0], [1.0]]), rcond=1e-15)
    scaled = a / np.linalg.norm(a, axis=0)
    s = np.linalg.svd(scaled, compute_uv=False)
    kappa = s[0] / s[1]
    assert truth.condition(2) == pytest.approx(kappa)
    assert truth.bounds(2, U)[0] == pytest.approx(kappa * U * (2 + (kappa + 1) / s[0]))


def test_systems(rng: np.random.Generator) -> None:
    a, x = rng.integers(-9, 10, (5, 5)).astype(float), rng.integers(-9, 10, (5, 2)).astype(float)
    truth = System(a, a @ x)
    np.testing.assert_array_equal(truth.rounded_solution(5), x)
    assert not truth.singular
    assert truth.bounds(5, U) == pytest.approx(2 * truth.condition(5) * U)
    hilbert = 1 / (np.arange(12)[:, None] + np.arange(12) + 1)
    b = np.ones((12, 1))
    mpmath.mp.dps = DIGITS
    exact = mpmath.lu_solve(mpmath.matrix(hilbert.tolist()), mpmath.matrix(b.tolist()))
    x = np.array([[float(v)] for v in exact])
    # Rounding x moves every component by a part of u: D x by u ||D x|| at most.
    assert System(hilbert, b).errors(x, 12)[0] <= U
    assert System(hilbert, b).condition(12) > 1e15


DEFINITE = [([[2.0, 1], [1, 2]], True), ([[1.0, 2], [2, 1]], False), ([[1.0, 0.9j], [-0.9j, 1]], True)]


@pytest.mark.parametrize(("a", "definite"), [*DEFINITE, ([[1.0, 1 + 1j], [1 - 1j, 1.9]], False)])
def test_definite(a: list[list[complex]], definite: bool) -> None:
    assert System(np.array(a), np.ones((2, 1))).definite == definite


def test_residuals(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((6, 3)), rng.standard_normal((6, 1))
    x = np.linalg.lstsq(a, b)[0]
    expected = np.linalg.norm(b - a @ x) / np.linalg.norm(b)
    assert LeastSquares(a, b, rcond=1e-15).residual_ratios(x) == pytest.approx([expected])


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("spread", [0, 3, 12])
def test_what_the_shortest_solution_makes_of_angles(rank: int, spread: int, rng: np.random.Generator) -> None:
    """Against small turns of the space, in as many digits as they need."""
    n, angle = 5, 1e-60
    mpmath.mp.dps = DIGITS
    d = mpmath.diag([mpmath.mpf(10) ** p for p in rng.integers(0, spread + 1, n).tolist()])
    v = mpmath.qr(mpmath.matrix(rng.standard_normal((n, rank)).tolist()), mode="skinny")[0]
    c = mpmath.matrix(rng.standard_normal((rank, 1)).tolist())

    def shortest(basis: mpmath.matrix) -> mpmath.matrix:
        m = d * basis
        return d * m * mpmath.lu_solve(m.T * m, c)

    y = shortest(v)
    ctx.prec = 600
    given = [arb_mat([[arb(mpmath.nstr(x, 150)) for x in row] for row in z.tolist()]) for z in (v, y)]
    found = sensitivity(given[0], [arb(mpmath.nstr(d[i, i], 150)) for i in range(n)], given[1])
    turns = []
    for _ in range(20):
        turn = mpmath.matrix(rng.standard_normal((n, rank)).tolist())
        turn = turn - v * (v.T * turn)
        turned = mpmath.qr(v + angle / mpmath.norm(turn) * turn, mode="skinny")[0]
        turned = turned * mpmath.inverse(v.T * turned)  # so that coefficients stay those of V, to first order
        turns.append(float(mpmath.norm(shortest(turned) - y) / mpmath.norm(y) / angle))
    ctx.prec = 53
    bound = float(found.angle[0])
    assert max(turns) <= bound <= 100 * max(turns)


def test_rounding_errors_decide_below_their_size(rng: np.random.Generator) -> None:
    """Nobody can say the rank of columns that depend on others where all singular values are to count."""
    a = rng.standard_normal((6, 3)) @ rng.standard_normal((3, 4))
    b = rng.standard_normal((6, 1))
    assert np.isinf(LeastSquares(a, b, rcond=0.0).bounds(3, U)).all()
    assert (LeastSquares(a, b, rcond=1e-10).bounds(3, U) < 1e-10).all()


def test_a_complex_problem_by_heart() -> None:
    """``[1, i]^T x = [2, 0]^T`` has x = 1, and for ``[0, 2]^T`` it is -i."""
    a, b = np.array([[1.0], [1j]]), np.array([[2.0], [0.0]])
    truth = LeastSquares(a, b, rcond=1e-15)
    assert (truth.shape, truth.ranks, truth.condition(1)) == ((2, 1), (1,), 1.0)
    np.testing.assert_array_equal(truth.rounded_solution(1), [[1.0]])
    other = LeastSquares(a, np.array([[0.0], [2.0]]), rcond=1e-15)
    np.testing.assert_array_equal(other.rounded_solution(1), [[-1j]])
    assert other.errors(np.array([[1j]]), 1) == pytest.approx([2.0])


def test_gaussian_integers_have_exact_ranks(rng: np.random.Generator) -> None:
    numbers = ComplexRandom(rng)
    a = numbers.integers(-5, 6, (6, 2)) @ numbers.integers(-5, 6, (2, 4))
    truth = LeastSquares(a, np.ones((6, 1)), rcond=1e-15)
    assert truth.ranks == (2,)
    np.testing.assert_allclose(truth.rounded_solution(2)[:, 0], np.linalg.pinv(a) @ np.ones(6), rtol=1e-10)
    square = numbers.integers(-5, 6, (5, 2)) @ numbers.integers(-5, 6, (2, 5))
    assert System(square, np.ones((5, 1))).singular


@pytest.mark.parametrize("damp", [0.0, 0.5])
@pytest.mark.parametrize("mixed", ["A is real", "b is real", "neither"])
def test_complex_problems_are_those_of_their_parts(mixed: str, damp: float, rng: np.random.Generator) -> None:
    """With weights and damping, singular values once each; the bound is that of the complex problem."""
    numbers, w = ComplexRandom(rng), rng.uniform(0.5, 2.0, 6)
    a, b = numbers.standard_normal((6, 3)), numbers.standard_normal((6, 2))
    a, b = (a.real if mixed == "A is real" else a), (b.real if mixed == "b is real" else b)
    truth = LeastSquares(a, b, weights=w, damp=damp, rcond=1e-15)
    rows = np.vstack([w[:, None] * a, damp * np.eye(3)])
    rhs = np.vstack([w[:, None] * b, np.zeros((3, 2))])
    expected = np.linalg.lstsq(rows, rhs)[0]
    np.testing.assert_allclose(truth.rounded_solution(3), expected, rtol=1e-12)
    s = np.linalg.svd(rows / np.linalg.norm(rows, axis=0), compute_uv=False)
    np.testing.assert_allclose(truth.singular_values, s / s[0], rtol=1e-5)
    residual = np.linalg.norm(rhs - rows @ expected, axis=0) / np.linalg.norm(rhs, axis=0)
    assert truth.residual_ratios(expected) == pytest.approx(residual)
    assert truth.errors(expected, 3).max() < 100 * U
    of_parts = LeastSquares(embedded(a), parts(b), weights=np.tile(w, 2), damp=damp, rcond=1e-15)
    assert truth.bounds(3, U) == pytest.approx(of_parts.bounds(6, U))
