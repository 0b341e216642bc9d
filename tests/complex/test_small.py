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
