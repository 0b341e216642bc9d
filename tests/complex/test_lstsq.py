"""Least squares in complex numbers, compared with exact solutions."""

import warnings

import numpy as np
import pytest
import torch
from tests.campaign.oracle import LeastSquares
from tests.matrices import complex_array as normal

import neula
from neula.algorithms.spectra.inverse_norm import schatten_bounds_of_gram
from neula.certificates.rank import rank_doubt

U = {np.complex64: 2.0**-24, np.complex128: 2.0**-53}
RANK = 4


def conditioned(m, n, digits):
    q, v = np.linalg.qr(normal(m, n))[0], np.linalg.qr(normal(n, n, seed=1))[0]
    return q * 10.0 ** -np.linspace(0, digits, n) @ v


def dependent(m, n, digits=0):
    """A product of small integers, with columns scaled by powers of two: exact in any dtype."""
    rng = np.random.default_rng(m)
    left, right = (rng.integers(-9, 10, (2, *shape)) for shape in ((m, RANK), (RANK, n)))
    scales = 2.0 ** np.linspace(-digits, digits, n).round()
    return (left[0] + 1j * left[1]) @ (right[0] + 1j * right[1]) * scales


def changed():
    a = normal(20, 6)
    a[:, 3], a[:, 4] = 0, 1j * a[:, 0]
    return a


FULL = {
    "tall": normal(30, 5),
    "square": normal(7, 7),
    "one column": normal(4, 1),
    "one number": normal(1, 1),
    "real numbers": normal(20, 4).real + 0j,
    "imaginary numbers": 1j * normal(20, 4).real,
    "graded columns": normal(20, 5) * 10.0 ** np.linspace(-30, 30, 5),
    "condition 1e4": conditioned(30, 6, 4),
    "condition 1e10": conditioned(30, 6, 10),
    "wide": normal(4, 9),
    "one row": normal(1, 3),
    "huge": normal(12, 4) * 1e300,
    "tiny": normal(12, 4) * 1e-300,
}
BELOW = {
    **{f"dependent {m} x {n}": dependent(m, n) for m, n in ((12, 7), (7, 12), (8, 8))},
    **{f"graded, dependent {m} x {n}": dependent(m, n, 20) for m, n in ((12, 7), (7, 12), (8, 8))},
    "a zero column and a multiple by i": changed(),
}
OUT_OF_RANGE = ("graded columns", "condition 1e10", "huge", "tiny")
"""Of complex64."""


def errors_within_bounds(found, a, b, **problem):
    truth = LeastSquares(a.astype(complex), b.astype(complex), rcond=0.0, **problem)
    errors = truth.errors(found.x.reshape(a.shape[1], -1), found.rank)
    assert (errors <= found.forward_errors * (1 + 1e-6)).all()
    return errors


@pytest.mark.parametrize("engine", ["auto", "emulated"])
@pytest.mark.parametrize("dtype", U, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("name", [*FULL, *BELOW])
def test_solutions(name, dtype, engine):
    if dtype == np.complex64 and name in OUT_OF_RANGE:
        pytest.skip("not in the range of the dtype")
    a = (FULL | BELOW)[name].astype(dtype)
    b = (normal(len(a), 1, seed=2) * np.abs(a).max()).astype(dtype)
    found = neula.lstsq(a, b[:, 0], engine=engine)
    assert found.converged
    assert (found.x.dtype, found.x.shape) == (dtype, a.shape[1:])
    assert found.rank == (min(a.shape) if name in FULL else RANK)
    lost = errors_within_bounds(found, a, b)
    if name in FULL and "condition" not in name and dtype == np.complex128:
        assert lost <= 16 * U[dtype]


@pytest.mark.parametrize("algorithm", ["cgls", "lsqr", "householder", "svd", "direct", "normal"])
@pytest.mark.parametrize("keywords", [{}, {"damp": 0.5}, {"weights": np.linspace(0, 2, 40)}], ids=str)
def test_named_algorithms(algorithm, keywords):
    a, b, refined = normal(40, 9), normal(40, 1, seed=1), algorithm not in ("direct", "normal")
    with warnings.catch_warnings():
        warnings.simplefilter("error" if refined else "ignore")
        found = neula.lstsq(a, b, algorithm=algorithm, **keywords)
    assert found.converged == refined
    errors_within_bounds(found, a, b, **keywords)
    if refined:
        left = keywords.get("weights", np.ones(40)) * (b - a @ found.x)[:, 0]
        left = np.append(left, keywords.get("damp", 0.0) * found.x[:, 0])
        assert found.residual_norm == pytest.approx(np.linalg.norm(left))


def test_large_problems_below_full_rank():
    a, x = normal(300, 160) @ normal(160, 230, seed=1), normal(230, 2)
    found = neula.lstsq(a, a @ x)
    wanted = np.linalg.lstsq(a, a @ x, rcond=1e-10)[0]
    assert (found.rank, found.converged) == (160, True)
    assert np.linalg.norm(found.x - wanted) <= 1e-10 * np.linalg.norm(wanted)


@pytest.mark.parametrize("damp", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(3, 20, 6), (3, 6, 20), (2, 300, 40)], ids=str)
def test_batches(shape, damp):
    a, b = normal(*shape), normal(*shape[:2], 2, seed=1)
    found = neula.lstsq(a, b, damp=damp)
    alone = [neula.lstsq(matrix, right, damp=damp) for matrix, right in zip(a, b, strict=True)]
    assert found.converged
    assert found.ranks.tolist() == [one.rank for one in alone]
    for one, x, errors in zip(alone, found.x, found.forward_errors, strict=True):
        assert (np.linalg.norm(one.x - x, axis=0) <= 1e-13 * np.linalg.norm(x, axis=0)).all()
        assert (errors <= 1e-13).all()


SAME = {
    "real A": lambda a, b: ((a.real, b), (a.real + 0j, b)),
    "real b": lambda a, b: ((a, b.real), (a, b.real + 0j)),
    "conjugated views": lambda a, b: (
        (torch.from_numpy(a).conj(), torch.from_numpy(b).conj()),
        (a.conj(), b.conj()),
    ),
}


@pytest.mark.parametrize("case", SAME)
@pytest.mark.parametrize(
    "keywords",
    [{}, {"damp": 0.1}, {"intercept": True}, {"intercept": True, "damp": 0.1}, {"weights": np.arange(20.0)}],
    ids=str,
)
def test_other_arrays_of_the_same_numbers(case, keywords):
    found, expected = (neula.lstsq(*x, **keywords).x for x in SAME[case](normal(20, 4), normal(20, seed=1)))
    assert np.allclose(found, expected, rtol=1e-13)


@pytest.mark.parametrize("right", [(20,), (20, 3), (2, 20, 3)], ids=str)
def test_complex_right_hand_sides_of_a_real_matrix(right):
    a, b = normal(20, 4).real, normal(*right, seed=1)
    found, parts = neula.lstsq(a, b), [neula.lstsq(a, np.ascontiguousarray(x)) for x in (b.real, b.imag)]
    assert np.array_equal(found.x, parts[0].x + 1j * parts[1].x)
    assert found.converged
    assert np.array_equal(found.forward_errors, np.maximum(*(x.forward_errors for x in parts)))
    norms = np.hypot(*(np.reshape(x.residual_norm, -1) for x in parts))
    assert np.reshape(found.residual_norm, -1) == pytest.approx(norms)
    narrow = neula.lstsq(normal(20, 4).astype(np.complex64), b.real.astype(np.float16))
    assert narrow.x.dtype == np.complex64


@pytest.mark.parametrize("shape", [(200, 30), (20, 60)], ids=str)
def test_forward_errors_at_the_level_of_the_format(shape):
    a, b = normal(*shape), normal(shape[0], 1, seed=1)
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
    with pytest.warns(neula.IllConditionedWarning):
        assert not neula.lstsq(conditioned(40, 20, 15), normal(40)).converged


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
