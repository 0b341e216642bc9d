"""Small complex problems, which the core solves as real ones of twice the size, called again and again."""

from __future__ import annotations

import numpy as np
import pytest

import neula
from neula.kernels.small_problems.embedding import embedded, of_stacked_parts, stacked_parts

U = {np.complex64: 2.0**-24, np.complex128: 2.0**-53}
DTYPES = list(U)


def numbers(*shape: int, dtype: type = np.complex128, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([*shape, seed])
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (2, 3), (4, 3, 2), (2, 0, 3), (3, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_matrices_stand_for_complex_ones(shape: tuple[int, ...], dtype: type) -> None:
    a, x = numbers(*shape, dtype=dtype), numbers(*shape[:-2], shape[-1], 2, dtype=dtype, seed=1)
    found, (m, n) = embedded(a), a.shape[-2:]
    assert found.dtype == a.real.dtype
    assert np.array_equal(found[..., :m, :n], a.real)
    assert np.array_equal(found[..., m:, n:], a.real)
    assert np.array_equal(found[..., m:, :n], a.imag)
    assert np.array_equal(found[..., :m, n:], -a.imag)
    assert np.array_equal(of_stacked_parts(stacked_parts(x).astype(np.float64)), x)
    product = of_stacked_parts((found @ stacked_parts(x)).astype(np.float64))
    assert np.allclose(product, a @ x, rtol=0, atol=64 * U[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [None, 1, 3])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (5, 5), (9, 4), (4, 9), (64, 32)])
def test_least_squares(m: int, n: int, k: int | None, dtype: type) -> None:
    for seed in range(4):
        a = numbers(m, n, dtype=dtype, seed=seed)
        b = numbers(m, *(() if k is None else (k,)), dtype=dtype, seed=seed + 10)
        result = neula.lstsq(a, b)
        wide = a.astype(np.complex128), b.astype(np.complex128)
        exact, _, rank, s = np.linalg.lstsq(*wide, rcond=None)
        assert result.converged
        assert result.x.dtype == dtype
        assert result.x.shape == exact.shape
        assert result.rank == rank == min(m, n)
        error = np.linalg.norm(result.x - exact) / np.linalg.norm(exact)
        # Rounded to its dtype; NumPy's errors grow with the square of the condition number (Wedin).
        assert error <= 2 * U[dtype] + 16 * n * (s[0] / s[-1]) ** 2 * U[np.complex128]
        rest = np.linalg.norm(wide[1] - wide[0] @ exact, axis=0)
        assert np.allclose(result.residual_norm, rest, rtol=64 * U[dtype], atol=64 * n * U[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(12, 6), (6, 12), (40, 8)])
def test_dependent_columns(shape: tuple[int, int], dtype: type) -> None:
    m, n = shape
    for seed in range(4):
        left = np.round(8 * numbers(m, 3, seed=seed))
        a, b = (left @ np.round(8 * numbers(3, n, seed=seed + 5))).astype(dtype), numbers(m, dtype=dtype)
        result = neula.lstsq(a, b)
        exact = np.linalg.pinv(a.astype(np.complex128), rcond=1e-6) @ b
        assert result.rank == 3
        assert np.linalg.norm(result.x - exact) <= 1e-4 * np.linalg.norm(exact)
        if dtype == np.complex128:
            assert np.linalg.norm(result.x - exact) <= 1e-11 * np.linalg.norm(exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("n", [1, 2, 7, 32, 100])
def test_systems(n: int, positive: bool, dtype: type) -> None:
    for seed in range(4):
        a = numbers(n, n, dtype=dtype, seed=seed)
        if positive:
            a = np.tril(a @ a.conj().T + n * np.eye(n, dtype=dtype))
            a = a + np.tril(a, -1).conj().T
            a[np.arange(n), np.arange(n)] = a.diagonal().real
        b = numbers(n, 2, dtype=dtype, seed=seed + 7)
        result = neula.solve(a, b, assume_a="pos" if positive else "gen")
        assert result.converged
        exact = np.linalg.solve(a.astype(np.complex128), b.astype(np.complex128))
        error = np.linalg.norm(result.x - exact) / np.linalg.norm(exact)
        assert error <= 2 * U[dtype] + 8 * n * np.linalg.cond(a.astype(np.complex128)) * U[np.complex128]
        # The backward error as it is said, in the infinity norm of the complex numbers.
        wide = a.astype(np.complex128), b.astype(np.complex128), result.x.astype(np.complex128)
        rest = np.abs(wide[1] - wide[0] @ wide[2]).max(0)
        size = np.abs(wide[0]).sum(1).max() * np.abs(wide[2]).max(0) + np.abs(wide[1]).max(0)
        assert (rest / size).max() <= result.backward_error + 4 * n * U[np.complex128]


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeated_calls_of_others(dtype: type) -> None:
    """Each by a plan from the second call on: factors are those of A, whatever came before."""
    for seed in range(3):
        a = numbers(20, 8, dtype=dtype, seed=seed)
        q, r = neula.qr(a)
        assert np.linalg.norm(q @ r - a) <= 200 * U[dtype] * np.linalg.norm(a)
        assert np.linalg.norm(q.conj().T @ q - np.eye(8)) <= 400 * U[dtype]
        assert np.array_equal(r.diagonal().imag, np.zeros(8))
        assert (r.diagonal().real > 0).all()
        basis = neula.orth(a, rcond=1e-6)
        assert np.linalg.norm(basis @ (basis.conj().T @ a) - a) <= 400 * U[dtype] * np.linalg.norm(a)
        gram = a.conj().T @ a
        for upper in (False, True):
            factor = neula.cholesky(gram, upper=upper).factor
            product = factor.conj().T @ factor if upper else factor @ factor.conj().T
            assert np.linalg.norm(product - gram) <= 200 * U[dtype] * np.linalg.norm(gram)
        square = a[:8]
        x = neula.lu_solve(neula.lu_factor(square), a[8:16, 0])
        condition = np.linalg.cond(square.astype(np.complex128))
        assert np.linalg.norm(square @ x - a[8:16, 0]) <= 100 * U[dtype] * condition * np.linalg.norm(x)
        inverse = neula.pinv(a)
        assert np.linalg.norm(inverse @ a - np.eye(8)) <= 200 * U[dtype] * np.linalg.cond(a)
