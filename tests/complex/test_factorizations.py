"""Cholesky and LU factors of complex matrices, and what is computed with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from tests.complex.test_systems import DTYPES, U, definite, drawn

import neula
from neula.algorithms.elimination.cholesky import cholesky
from neula.engines import EmulatedEngine
from neula.engines.complex import over

ENGINES = ["cpu", "emulated"]


def ratio(a: np.ndarray, product: np.ndarray, u: float) -> float:
    """LAPACK's ``||A - L U||_1 / (n u ||A||_1)``, accepted below 30."""
    wide = a.astype(np.clongdouble)
    return float(np.abs(wide - product).sum(0).max() / (len(a) * u * np.abs(wide).sum(0).max() + 1e-300))


# ---------------------------------------------------------------- Cholesky


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("n", [1, 2, 31, 130])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cholesky_factors(dtype: type, n: int, upper: bool, engine: str) -> None:
    a = definite(n).astype(dtype)
    found = neula.cholesky(a, upper=upper, engine=engine)
    assert found.converged
    lower = found.L
    assert lower.dtype == dtype
    assert np.array_equal(lower, np.tril(lower))
    assert (lower.diagonal().imag == 0).all()
    assert (lower.diagonal().real > 0).all()
    assert np.array_equal(found.U, lower.conj().T)
    wide = lower.astype(np.clongdouble)
    assert ratio(a, wide @ wide.conj().T, U[dtype]) < 30
    true = np.linalg.norm(a - wide @ wide.conj().T) / np.linalg.norm(a)
    assert true <= 10 * found.residual + 3 * n**0.5 * U[np.complex128]


@pytest.mark.parametrize("accuracy", ["fp16", "bf16", "fp32"])
def test_cholesky_in_low_precision(accuracy: str) -> None:
    """By recursion with small leaves, so that products are in the format."""
    n = 150
    a = torch.from_numpy(definite(n)).to(torch.complex64)
    engine = over(EmulatedEngine(format=accuracy), torch.complex64)
    size = a.abs().amax().item()
    for block in (16, 64):
        factors = cholesky(a[None] / size, engine, leaf=8, block=block)
        lower = factors.lower[0].tril().to(torch.complex128) * size**0.5
        assert int(factors.order) == 0
        lost = torch.linalg.matrix_norm(a - lower @ lower.mH) / torch.linalg.matrix_norm(a)
        u = engine.format.u
        assert u / 100 < lost < 3 * u * (2 + np.log2(n))
    assert neula.cholesky(a, accuracy=accuracy, engine="emulated").converged


def test_only_one_triangle_is_read() -> None:
    a = definite(20)
    spoilt = np.tril(a) + np.triu(np.full((20, 20), np.nan + 1j), 1) + 5j * np.eye(20)
    lower, upper = neula.cholesky(a).L, neula.cholesky(a, upper=True).U
    # The library that factorizes may be another the second time: its errors are rounding errors.
    assert np.allclose(neula.cholesky(spoilt).L, lower, rtol=0, atol=1e-14)
    assert np.allclose(neula.cholesky(spoilt.conj().T, upper=True).U, upper, rtol=0, atol=1e-14)


@pytest.mark.parametrize("wrap", [lambda x: x, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("shape", [(3, 3), (2, 3, 3), (260, 260)], ids=str)
def test_upper_factors_of_repeated_calls(shape: tuple[int, ...], wrap: Callable[[Any], Any]) -> None:
    """Later calls return arrays in memory as well, no lazily conjugated views."""
    a = np.broadcast_to(definite(shape[-1]), shape).copy()
    for _ in range(3):
        u = np.asarray(neula.cholesky(wrap(a), upper=True).U)
        assert np.abs(u.conj().swapaxes(-1, -2) @ u - a).max() <= shape[-1] * 2.0**-52 * np.abs(a).max()


def test_batches_scales_and_jitter() -> None:
    a = definite(8, 3)
    found = neula.cholesky(a)
    assert found.L.shape == (3, 8, 8)
    assert found.accepted.all()
    for scale in (1e-300, 1e290):
        assert neula.cholesky(a[0] * scale).converged
    d = 10.0 ** np.linspace(-30, 30, 8)
    scaled = a[0] * d * d[:, None]
    assert neula.cholesky(scaled).converged
    assert np.allclose(neula.cholesky(scaled).L / d[:, None], found.L[0], rtol=1e-12, atol=1e-12)
    a[1] -= 40 * np.eye(8)
    with pytest.raises(np.linalg.LinAlgError, match=r"A\[1\] of the batch is not positive definite"):
        neula.cholesky(a)
    shifted = neula.cholesky(a, jitter="auto")
    least = -np.linalg.eigvalsh(a[1])[0]
    assert shifted.jitter[0] == shifted.jitter[2] == 0
    assert least <= shifted.jitter[1] <= 3.4 * least
    assert neula.cholesky(np.zeros((0, 0), complex)).L.shape == (0, 0)
    with pytest.raises(ValueError, match=r"A\[2, 1\] is \(nan"):
        neula.cholesky(np.where(np.arange(25).reshape(5, 5) == 11, np.nan, definite(5)))


# ---------------------------------------------------------------- LU

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


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_lu_factors(dtype: type, how: dict[str, object], engine: str) -> None:
    n = 41
    a, b = drawn(n, n).astype(dtype), drawn(n, 2).astype(dtype)
    a += (2 * n * np.eye(n)).astype(dtype) if how.get("pivot") == "none" else 0
    factors = neula.lu_factor(a, engine=engine, **how)
    u = max(U[dtype], 2.0**-10 if engine == "emulated" else 0)
    if how.get("pivot") != "rbt":
        lower, upper = factors.L.astype(np.clongdouble), factors.U.astype(np.clongdouble)
        assert np.array_equal(lower, np.tril(lower))
        assert np.array_equal(upper, np.triu(upper))
        # Partial pivoting by |re| + |im| leaves elements of L of at most sqrt(2).
        assert np.abs(lower).max() < 1.5
        assert ratio(a[factors.permutation], lower @ upper, u) < 30
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
    a, b = drawn(3, 10, 10), drawn(10, 2)
    factors = neula.lu_factor(a)
    matrices = a, a.swapaxes(1, 2), a.conj().swapaxes(1, 2)
    for trans, matrix in enumerate(matrices):
        assert np.allclose(neula.lu_solve(factors, b, trans=trans), np.linalg.solve(matrix, b), rtol=1e-11)
    real = neula.lu_factor(a[0].real)
    for trans, matrix in enumerate((a[0].real, a[0].real.T, a[0].real.T)):
        exact = np.linalg.solve(matrix, b)
        assert np.allclose(neula.lu_solve(real, b, trans=trans), exact, rtol=1e-11)
        assert np.allclose(neula.lu_solve(real, b[:, 0], trans=trans), exact[:, 0], rtol=1e-11)
        assert np.allclose(neula.lu_solve(real, b.real, trans=trans), exact.real, rtol=1e-11)
    one = neula.lu_factor(a[0])
    assert np.allclose(neula.lu_solve(one, b.real), np.linalg.solve(a[0], b.real), rtol=1e-11)
    for scale in (1e-300, 1e290):
        x = neula.lu_solve(neula.lu_factor(a[0] * scale), b, trans=2)
        assert np.allclose(x * scale, np.linalg.solve(matrices[2][0], b), rtol=1e-10)


# ---------------------------------------------------------------- methods of factors


def methods(a: np.ndarray, h: np.ndarray) -> list[tuple[np.ndarray, object]]:
    spoilt = np.tril(h) + np.triu(np.full_like(h, np.nan), 1)
    if np.iscomplexobj(h):
        spoilt += 3j * np.eye(len(h))  # as LAPACK, neula reads the real part of the diagonal
    return [
        (a, neula.lu_factor(a)),
        (a, neula.lu_factor(a, engine="emulated")),
        (h, neula.cholesky(h)),
        (h, neula.cholesky(h, upper=True)),
        (h, neula.cholesky(spoilt)),
    ]


@pytest.mark.parametrize("n", [1, 2, 7, 40])
@pytest.mark.parametrize("dtype", [*DTYPES, np.float64])
def test_methods_of_factors(dtype: type, n: int) -> None:
    """Real factors take complex right-hand sides as well."""
    a, h = drawn(n, n), definite(n)
    a, h = (x.astype(dtype) if dtype != np.float64 else x.real.copy() for x in (a, h))
    for matrix, factors in methods(a, h):
        wide = matrix.astype(complex)
        inverse = np.linalg.inv(wide)
        noise = 1e-13 * np.linalg.cond(wide)
        for b in (drawn(n, 3), drawn(n), drawn(n, 2).real):
            exact = np.linalg.solve(wide, b)
            found = factors.solve(b)
            assert found.converged
            size = np.linalg.norm(wide, axis=0).reshape(n, *[1] * (b.ndim - 1))
            lost = np.linalg.norm(size * (found.x - exact)) / np.linalg.norm(size * exact)
            assert lost <= found.forward_error + noise
            form = (b.conj() * exact).sum(0)
            known = factors.inv_quad(b)
            assert (np.abs(known.value - form) <= known.error + noise * np.abs(form).max()).all()
            triangle = factors.L if hasattr(factors, "factor") else factors.U
            for transposed, t in ((False, triangle), (True, triangle.conj().T)):
                x = factors.solve_triangular(b, transposed=transposed).x
                assert np.allclose(t.astype(complex) @ x, b, atol=1e-12)
        diagonal = factors.diag_inverse()
        limit = diagonal.error + noise * np.abs(inverse).max()
        assert (np.abs(diagonal.value - inverse.diagonal()) <= limit).all()
        assert np.isrealobj(diagonal.value) == (matrix is h or dtype == np.float64)


@pytest.mark.parametrize("n", [1, 3, 12])
def test_determinants(n: int) -> None:
    a, h = drawn(n, n), definite(n)
    for matrix, factors in methods(a, h):
        with mpmath.workdps(60):
            exact = mpmath.det(mpmath.matrix(matrix.tolist()))
            phase, size = complex(exact / abs(exact)), float(mpmath.log(abs(exact)))
        sign, log = found = factors.slogdet()
        assert abs(log - size) <= found.error
        assert abs(sign - phase) <= found.error
        assert abs(abs(sign) - 1) < 1e-14
        assert np.isrealobj(log)
        assert factors.logdet().value == log


@pytest.mark.gpu
@pytest.mark.parametrize("n", [40, 700, 9000])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_cholesky_on_a_gpu(dtype: torch.dtype, n: int) -> None:
    a = torch.randn(
        n, n, dtype=torch.complex128, device="cuda", generator=torch.Generator("cuda").manual_seed(n)
    )
    a = (a @ a.mH / n + torch.eye(n, device="cuda")).to(dtype)
    for accuracy in ("fp16", None):
        found = neula.cholesky(a, accuracy=accuracy)
        assert found.converged
        wide, lower = a.to(torch.complex128), found.L.to(torch.complex128)
        assert (lower.diagonal().imag == 0).all()
        assert torch.equal(lower, lower.tril())
        norm = torch.linalg.matrix_norm
        assert norm(wide - lower @ lower.mH) / norm(wide) <= found.bound
