"""Least squares in complex numbers, compared with solutions in 300 bits."""

import warnings

import mpmath
import numpy as np
import pytest
import torch

import neula
from neula.algorithms.spectra.inverse_norm import schatten_bounds_of_gram
from neula.certificates.rank import rank_doubt

U = {np.complex64: 2.0**-24, np.complex128: 2.0**-53}


def normal(*shape, dtype=np.complex128, seed=0):
    rng = np.random.default_rng((seed, *shape))
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)


def integers(*shape, seed=0):
    rng = np.random.default_rng((seed, *shape))
    return rng.integers(-9, 10, shape) + 1j * rng.integers(-9, 10, shape)


def exact(x):
    return mpmath.matrix([[mpmath.mpc(complex(z)) for z in row] for row in np.asarray(x)])


def solution(a, b, rank_factors=None):
    """The minimum-norm solution in 300 bits, of a matrix of full rank or a product of two."""
    with mpmath.workprec(
        300 + 4 * int(np.log2(max(1.0, np.abs(b).max(initial=0) + np.abs(a).max(initial=0))))
    ):
        right = exact(b)
        left, rows = map(
            exact, rank_factors or ((a, np.eye(a.shape[1])) if len(a) >= a.shape[1] else (np.eye(len(a)), a))
        )
        y = mpmath.lu_solve(left.H * left, left.H * right)
        return rows.H * mpmath.lu_solve(rows * rows.H, y)


def error(a, x, wanted):
    """``||D (x - x*)|| / ||D x*||`` of the worst column, D being the norms of the columns of A."""
    with mpmath.workprec(300):
        x, of_a = exact(x), exact(a)
        sizes = [mpmath.norm(of_a[:, j]) for j in range(of_a.cols)]
        lost, size = (
            [d * z for d, z in zip(sizes, column, strict=True)]
            for column in ((x - wanted)[:, 0], wanted[:, 0])
        )
        return float(mpmath.norm(lost) / mpmath.norm(size)) if any(size) else float(mpmath.norm(lost) != 0)


def graded(m, n):
    return normal(m, n) * 10.0 ** np.linspace(-30, 30, n)


def conditioned(m, n, digits):
    q, v = np.linalg.qr(normal(m, n))[0], np.linalg.qr(normal(n, n))[0]
    return q * 10.0 ** -np.linspace(0, digits, n) @ v


FULL = {
    "tall": normal(30, 5),
    "square": normal(7, 7),
    "one column": normal(4, 1),
    "one number": normal(1, 1),
    "odd": normal(17, 3),
    "real numbers": normal(20, 4).real + 0j,
    "imaginary numbers": 1j * normal(20, 4).real,
    "graded columns": graded(20, 5),
    "condition 1e4": conditioned(30, 6, 4),
    "condition 1e10": conditioned(30, 6, 10),
    "wide": normal(4, 9),
    "one row": normal(1, 3),
    "huge": normal(12, 4) * 1e300,
    "tiny": normal(12, 4) * 1e-300,
}


@pytest.mark.parametrize("engine", ["auto", "emulated"])
@pytest.mark.parametrize("dtype", U, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("name", FULL)
def test_full_rank(name, dtype, engine):
    with np.errstate(over="ignore", under="ignore"):
        a = FULL[name].astype(dtype)
    if dtype == np.complex64 and name in ("graded columns", "condition 1e10", "huge", "tiny"):
        pytest.skip("not in the range of the dtype")
    b = (normal(len(a), 1) * np.abs(a).max()).astype(dtype)
    found = neula.lstsq(a, b[:, 0], engine=engine)
    assert found.converged
    assert found.x.dtype == dtype
    assert found.x.shape == a.shape[1:]
    assert found.rank == min(a.shape)
    lost = error(a, found.x[:, None], solution(a, b))
    assert lost <= found.forward_error * (1 + 1e-6)
    if "condition" not in name and dtype == np.complex128:
        assert lost <= 16 * U[dtype]


@pytest.mark.parametrize("algorithm", ["cgls", "lsqr", "householder", "svd"])
@pytest.mark.parametrize("keywords", [{}, {"damp": 0.5}, {"weights": np.linspace(0, 2, 40)}], ids=str)
def test_named_algorithms(algorithm, keywords):
    a, b = normal(40, 9), normal(40, 1)
    found = neula.lstsq(a, b, algorithm=algorithm, **keywords)
    assert found.converged
    w = keywords.get("weights", np.ones(40))[:, None]
    damping = keywords.get("damp", 0.0) * np.eye(9)
    a, b = np.concatenate([w * a, damping]), np.concatenate([w * b, np.zeros((9, 1))])
    # The products with weights are rounded here.
    assert error(a, found.x, solution(a, b)) <= found.forward_error + 64 * U[np.complex128]
    assert found.residual_norm == pytest.approx(np.linalg.norm(b - a @ found.x))


@pytest.mark.parametrize("algorithm", ["direct", "normal"])
def test_unrefined(algorithm):
    a, b = normal(40, 9), normal(40, 1)
    with pytest.warns(neula.AccuracyWarning):
        found = neula.lstsq(a, b, algorithm=algorithm)
    assert error(a, found.x, solution(a, b)) <= found.forward_error


@pytest.mark.parametrize("engine", ["auto", "emulated"])
@pytest.mark.parametrize("digits", [0, 20])
@pytest.mark.parametrize("shape", [(12, 7), (7, 12), (8, 8)], ids=str)
def test_dependent_columns(shape, digits, engine):
    (m, n), rank = shape, 4
    factors = integers(m, rank), integers(rank, n) * 2.0 ** np.linspace(-digits, digits, n).round()
    a, b = factors[0] @ factors[1], normal(m, 1)
    found = neula.lstsq(a, b, engine=engine)
    assert found.converged
    assert found.rank == rank
    assert error(a, found.x, solution(a, b, factors)) <= found.forward_error


def test_a_zero_column_and_multiples_by_i():
    a = normal(20, 5)
    a[:, 3], a[:, 4] = 0, 1j * a[:, 0]
    found = neula.lstsq(a, a @ np.ones(5))
    assert (found.rank, found.x[3]) == (3, 0)
    assert np.allclose(found.x[[0, 4]], [(1 + 1j) / 2, (1 - 1j) / 2], rtol=1e-13)


def test_large_problems_below_full_rank():
    a, x = normal(300, 160) @ normal(160, 230, seed=1), normal(230, 2)
    found = neula.lstsq(a, a @ x)
    wanted = np.linalg.lstsq(a, a @ x, rcond=1e-10)[0]
    assert (found.rank, found.converged) == (160, True)
    assert np.linalg.norm(found.x - wanted) <= 1e-10 * np.linalg.norm(wanted)


@pytest.mark.parametrize("damp", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(3, 20, 6), (3, 6, 20), (2, 300, 40)], ids=str)
def test_batches(shape, damp):
    a, b = normal(*shape), normal(*shape[:2], 2)
    found = neula.lstsq(a, b, damp=damp)
    alone = [neula.lstsq(matrix, right, damp=damp) for matrix, right in zip(a, b, strict=True)]
    assert found.converged
    assert found.ranks.tolist() == [one.rank for one in alone]
    for one, x, errors in zip(alone, found.x, found.forward_errors, strict=True):
        assert (np.linalg.norm(one.x - x, axis=0) <= 1e-13 * np.linalg.norm(x, axis=0)).all()
        assert (errors <= 1e-13).all()


@pytest.mark.parametrize("right", [(20,), (20, 3), (2, 20, 3)], ids=str)
def test_complex_right_hand_sides_of_a_real_matrix(right):
    a, b = normal(20, 4).real, normal(*right)
    found, parts = neula.lstsq(a, b), [neula.lstsq(a, np.ascontiguousarray(x)) for x in (b.real, b.imag)]
    assert np.array_equal(found.x, parts[0].x + 1j * parts[1].x)
    assert found.converged
    assert np.array_equal(found.forward_errors, np.maximum(*(x.forward_errors for x in parts)))
    norms = np.hypot(*(np.reshape(x.residual_norm, -1) for x in parts))
    assert np.reshape(found.residual_norm, -1) == pytest.approx(norms)


@pytest.mark.parametrize(
    "keywords", [{"intercept": True, "damp": 0.1}, {"weights": np.arange(20.0)}], ids=str
)
def test_options_with_a_real_matrix(keywords):
    a, b = normal(20, 4).real, normal(20)
    found, same = neula.lstsq(a, b, **keywords), neula.lstsq(a + 0j, b, **keywords)
    assert np.allclose(found.x, same.x, rtol=1e-13)


@pytest.mark.parametrize(
    "keywords", [{"intercept": True}, {"intercept": True, "damp": 0.1}, {"damp": 0.1}], ids=str
)
def test_conjugates_that_are_not_formed(keywords):
    a, b = normal(20, 4), normal(20)
    views = (torch.from_numpy(x).conj() for x in (a, b))
    expected = neula.lstsq(a.conj(), b.conj(), **keywords).x
    assert np.allclose(neula.lstsq(*views, **keywords).x.numpy(), expected, rtol=1e-13)


def test_real_right_hand_sides_of_a_complex_matrix():
    a, b = normal(20, 4), normal(20).real
    assert np.array_equal(neula.lstsq(a, b).x, neula.lstsq(a, b + 0j).x)
    assert neula.lstsq(a.astype(np.complex64), b.astype(np.float16)).x.dtype == np.complex64


@pytest.mark.parametrize("shape", [(200, 30), (20, 60)], ids=str)
def test_forward_errors_at_the_level_of_the_format(shape):
    a, b = normal(*shape), normal(shape[0], 1)
    for keywords in ({}, {"weights": np.linspace(1, 2, shape[0])}):
        found = neula.lstsq(a, b, certify="forward", **keywords)
        assert found.forward_error <= 16 * U[np.complex128]


def test_solutions_of_zero():
    a = np.array([[1, 1j], [1j, 3], [1 + 1j, 0]])
    b = np.conj(np.cross(a[:, 0], a[:, 1]))  # orthogonal to both columns
    found = neula.lstsq(a, b)
    assert (found.converged, found.forward_error, found.x.any()) == (True, 0.0, False)
    other = neula.lstsq(a, np.stack([b, a[:, 0]], 1))
    assert np.allclose(other.x, [[0, 1], [0, 0]], atol=1e-15)
    assert other.converged


def test_ambiguous_ranks_are_no_answer():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = neula.lstsq(conditioned(40, 20, 15), normal(40))
    assert not found.converged
    assert any(issubclass(w.category, neula.IllConditionedWarning) for w in caught)


def test_weights_are_real():
    with pytest.raises(TypeError, match="weights is complex"):
        neula.lstsq(normal(5, 2), normal(5), weights=normal(5))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(64, 32), (600, 100), (40, 300), (100, 32, 8), (50, 20, 60), (20, 100, 60), (4000, 900), (9000, 2300)],
    ids=str,
)
def test_on_a_gpu(shape, dtype):
    generator = torch.Generator("cuda").manual_seed(1)
    a, b = (
        torch.randn(*shape[:-1], n, dtype=dtype, device="cuda", generator=generator) for n in (shape[-1], 2)
    )
    wanted = torch.linalg.pinv(a.to(torch.complex128)) @ b.to(torch.complex128)
    for _ in range(3):  # the later ones by plans and graphs
        found = neula.lstsq(a, b)
        assert found.converged
        assert (found.x.dtype, found.rank) == (dtype, min(shape[-2:]))
        lost = torch.linalg.vector_norm(found.x - wanted, dim=-2) / torch.linalg.vector_norm(wanted, dim=-2)
        u = torch.finfo(dtype).eps
        assert lost.max() <= 1e-12 + 16 * u
    pending = neula.finish(neula.lstsq(a, b, wait=False))
    assert torch.allclose(pending.x, found.x, rtol=1e3 * u, atol=1e3 * u)


@pytest.mark.gpu
@pytest.mark.parametrize("digits", [3, 6, 10])
def test_ill_conditioned_problems_on_a_gpu(digits):
    a = torch.from_numpy(conditioned(1500, 400, digits)).cuda()
    x = torch.ones(400, 1, dtype=a.dtype, device="cuda")
    found = neula.lstsq(a, a @ x)
    assert found.converged
    assert torch.linalg.vector_norm(found.x - x) <= 1e-14 * 10.0**digits * 20


def test_norms_of_gram_matrices():
    r = torch.linalg.qr(torch.randn(80, 80, dtype=torch.complex128))[1]
    r /= torch.linalg.matrix_norm(r, 2)
    low, high = schatten_bounds_of_gram((r.mH @ r)[None], torch.ones(1, 80, 1, dtype=torch.float64))
    assert low <= 1 + 1e-12 <= high + 1e-9


def test_complex_noise_has_twice_the_degrees_of_freedom():
    """Noise of real residuals explains more than that of as many complex ones."""
    tiny, along, length = (torch.tensor(x, dtype=torch.float64) for x in ([1e-14], [[0.55]], [1.0]))
    doubts = [bool(rank_doubt(1e-7, tiny, x, length, 2, 50, 7e-16)) for x in (along, along + 0j)]
    assert doubts == [False, True]
