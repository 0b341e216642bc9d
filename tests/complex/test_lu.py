"""LU factors of complex matrices, and systems with A, its transpose and its adjoint."""

from __future__ import annotations

import numpy as np
import pytest
from tests.campaign import ratios
from tests.matrices import complex_array as drawn

import neula

U = {np.complex64: 2.0**-24, np.complex128: 2.0**-53}

VARIANTS = [
    {},
    {"pivot": "none"},
    {"pivot": "rbt"},
    {"variant": "5.2/5.1", "panel": 16, "inner_panel": 4},
    {"variant": "5.2/3.1-fp32", "panel": 16, "inner_panel": 4},
    {"variant": "5.1", "panel": 8},
    {"variant": "4.1", "panel": 8},
    {"variant": "3.1", "panel": 8},
    {"variant": "2.1", "panel": 8},
    {"variant": "2.2", "panel": 8},
]


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("how", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", U)
def test_lu_factors(dtype: type, how: dict[str, object], engine: str) -> None:
    n = 41
    a, b = drawn(n, n).astype(dtype), drawn(n, 2, seed=1).astype(dtype)
    a += (2 * n * np.eye(n)).astype(dtype) if how.get("pivot") == "none" else 0
    factors = neula.lu_factor(a, engine=engine, **how)
    u = max(U[dtype], 2.0**-10 if engine == "emulated" else 0)
    if how.get("pivot") != "rbt":
        lower, upper = factors.L.astype(np.clongdouble), factors.U.astype(np.clongdouble)
        assert np.array_equal(lower, np.tril(lower))
        assert np.array_equal(upper, np.triu(upper))
        # Partial pivoting by |re| + |im| leaves elements of L of at most sqrt(2).
        assert np.abs(lower).max() < 1.5
        assert ratios.residual_ratio(a[factors.permutation], factors.L, factors.U, u) < ratios.THRESHOLD
    for trans, matrix in enumerate((a, a.T, a.conj().T)):
        exact = np.linalg.solve(matrix.astype(complex), b.astype(complex))
        kappa = np.linalg.cond(matrix)
        for refine in (None, False):
            x = neula.lu_solve(factors, b, trans=trans, refine=refine)
            assert x.dtype == dtype
            lost = np.linalg.norm(x - exact) / np.linalg.norm(exact)
            growth = max(1.0, factors.growth)
            assert lost < (10 * n**0.5 * U[dtype] * kappa if refine is None else 10 * n * u * kappa * growth)


def test_lu_of_batches_and_mixed_right_hand_sides() -> None:
    a, b = drawn(3, 10, 10), drawn(10, 2, seed=1)
    factors = neula.lu_factor(a)
    matrices = a, a.swapaxes(1, 2), a.conj().swapaxes(1, 2)
    for trans, matrix in enumerate(matrices):
        assert np.allclose(neula.lu_solve(factors, b, trans=trans), np.linalg.solve(matrix, b), rtol=1e-11)
    for matrix, right in ((a[0].real, b), (a[0].real, b[:, 0]), (a[0].real, b.real), (a[0], b.real)):
        factors = neula.lu_factor(matrix)
        for trans, given in enumerate((matrix, matrix.T, matrix.conj().T)):
            exact = np.linalg.solve(given, right)
            assert np.allclose(neula.lu_solve(factors, right, trans=trans), exact, rtol=1e-11)
    for scale in (1e-300, 1e290):
        x = neula.lu_solve(neula.lu_factor(a[0] * scale), b, trans=2)
        assert np.allclose(x * scale, np.linalg.solve(matrices[2][0], b), rtol=1e-10)
