"""Cholesky QR by the kernel for the host: against theory, and against the kernel that only measures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from neula.certificates.orthogonality import gaussian_probes
from neula.engines.formats import in_double
from neula.io.matrices import random_matrix
from neula.kernels.few_vectors.probes_host import reflected_errors
from neula.kernels.qr import cholesky_qr_host
from neula.kernels.qr.cholesky_qr_host import cholesky_qr

CPU = torch.device("cpu")
U = 2.0**-53


SHAPES = [
    (1, 1, 1),
    (3, 5, 1),
    (2, 9, 9),
    (1, 64, 32),
    (4, 37, 6),
    (2, 130, 64),
    (1, 301, 100),
    (1, 700, 128),
]


def matrices(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


REAL, COMPLEX = (torch.float64, torch.float32), (torch.complex128, torch.complex64)


def probes(n: int, dtype: torch.dtype = torch.float64) -> np.ndarray:
    return gaussian_probes(2 * n if dtype.is_complex else n, CPU).numpy()


def factorized(
    a: torch.Tensor, g: np.ndarray, enough: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    found = cholesky_qr(a, g, enough)
    assert found is not None
    return found


def orthogonality(q: torch.Tensor) -> float:
    wide = in_double(q)
    n = q.shape[-1]
    loss = torch.linalg.matrix_norm(wide.mH @ wide - torch.eye(n, dtype=torch.float64))
    return float(loss.max()) / n**0.5


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX])
def test_factors(dtype: torch.dtype) -> None:
    """As accurate as reflections: two passes lose no orthogonality but by rounding."""
    for shape in SHAPES:
        a, n = matrices(*shape, dtype=dtype), shape[2]
        q, r, found = factorized(a, probes(n, dtype))
        u, (wide_q, wide_r) = torch.finfo(dtype).eps / 2, (in_double(q), in_double(r))
        assert (r.tril(-1) == 0).all()
        assert (r.diagonal(dim1=1, dim2=2).real > 0).all()
        assert not dtype.is_complex or (r.diagonal(dim1=1, dim2=2).imag == 0).all()
        residual = torch.linalg.matrix_norm(a - wide_q @ wide_r) / torch.linalg.matrix_norm(a)
        assert residual.max() <= 4 * n * u
        assert orthogonality(q) <= 8 * n * u
        exact = torch.linalg.matrix_norm(wide_q.mH @ wide_q - torch.eye(n), 2).numpy()
        assert (found[3] >= exact / 2 - 8 * n * 2.0**-53).all()
        sizes = torch.linalg.vector_norm(wide_r, dim=1)
        assert np.allclose(found[4:], [sizes.amin(1), sizes.amax(1)], rtol=1e-12)
        if not dtype.is_complex:
            again = reflected_errors(a, q.clone(), r.clone(), probes(n))
            assert again is not None
            if n <= 8:  # the norm is that of the Gram matrix, where this is smaller
                loss = torch.linalg.matrix_norm(wide_q.mH @ wide_q - torch.eye(n)).numpy()
                assert np.allclose(found[3], np.minimum(loss, again[3]), rtol=1e-10, atol=shape[1] * 2.0**-53)
                found[3] = again[3]
            assert np.allclose(found, again, rtol=1e-10, atol=1e-16 * sum(shape))


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("n", [1, 2, 3, 20])
@pytest.mark.parametrize("double", [True, False])
def test_errors_of_complex_factors(n: int, double: bool) -> None:
    """Measures along random vectors are near the norms of errors."""
    a = matrices(6, 40, n, dtype=torch.complex128)
    a = a if double else a.to(torch.complex64)
    scale = 2.0 ** torch.arange(n)
    q, r, found = factorized(a * scale, probes(n, a.dtype))
    q, r, a = (in_double(x) for x in (q, r, a))
    d = torch.linalg.vector_norm(r, dim=1)
    expected = [torch.linalg.matrix_norm(x / d[:, None]) * 2 for x in (a * scale - q @ r, a * scale)]
    expected.append(torch.linalg.matrix_norm(q.mH @ q - torch.eye(n)) * 2)
    noise = 16 * n * U
    for measured, true in zip(found, expected, strict=False):
        assert (measured <= 4 * true.numpy() + noise).all()
        assert (measured >= true.numpy() / 4 - noise).all()


def test_one_pass_where_that_is_enough() -> None:
    """Of a matrix with orthogonal columns a pass loses n u; where less is asked for, there is another one."""
    q = torch.linalg.qr(matrices(500, 60))[0]
    a, g = q * 2.0 ** torch.arange(-30, 30), probes(60)
    once, twice = (factorized(a, g, enough)[0] for enough in (1e-10, 0.0))
    assert not torch.equal(once, twice)
    assert orthogonality(once) <= 60 * U
    assert orthogonality(twice) <= 60 * U


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ill_conditioned(condition: float, dtype: torch.dtype) -> None:
    """The second pass restores what the first has lost."""
    a = random_matrix("geometric", 300, 20, cond=condition, seed=1).to(dtype)
    q, r, found = factorized(a, probes(20), 1e-15 if dtype == torch.float64 else 1e-6)
    u = torch.finfo(dtype).eps / 2
    assert orthogonality(q) <= max(1e-15, 8 * 20 * u)
    assert torch.linalg.matrix_norm(a - q.double() @ r.double()) <= 80 * u * torch.linalg.matrix_norm(a)
    assert np.isfinite(found).all()


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("condition", [1e7, 1e8, 1e9, 1e11, 1e13, 1e15, np.inf])
@pytest.mark.parametrize("shape", [(40, 16, 6), (40, 20, 20), (10, 64, 32), (2, 300, 100)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_columns_that_are_too_dependent(
    condition: float, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """They are made orthogonal as often as it takes, each pass as exact as substitution."""
    count, m, n = shape
    cond = 1e3 if condition == np.inf else condition
    if dtype.is_complex:
        u, _, vh = torch.linalg.svd(matrices(*shape, dtype=dtype), full_matrices=False)
        a = (u * torch.logspace(0, -math.log10(cond), n, dtype=torch.float64)) @ vh
    else:
        a = torch.stack([random_matrix("geometric", m, n, cond=cond, seed=i) for i in range(count)])
    if condition == np.inf:
        a[:, :, n - 1] = a[:, :, 1] - a[:, :, 2]
    for enough in (0.0, n * U):
        q, r, found = factorized(a, probes(n, dtype), enough)
        assert np.isfinite(found).all()
        assert orthogonality(q) <= 8 * n * U
        norms = torch.linalg.matrix_norm(a)
        assert (torch.linalg.matrix_norm(a - q @ r) <= 8 * n * U * norms).all()
        assert not r.tril(-1).any()


@pytest.mark.parametrize("kind", ["zero column", "zeros", "nan", "inf", "inf at last", "huge"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_no_factors(kind: str, dtype: torch.dtype) -> None:
    """Of a batch only those are left out."""
    a = matrices(3, 20, 6, dtype=dtype)
    if kind == "zero column":
        a[1, :, 2] = 0
    elif kind == "zeros":
        a[1] = 0
    elif kind == "huge":  # squares overflow
        a[1, :, 2] *= 1e200
    elif kind == "inf at last":
        a[1, 3, 5] = np.inf
    else:
        a[1, 3, 2] = float(kind)
    q, _, found = factorized(a, probes(6, dtype))
    assert np.isnan(found[:, 1]).all()
    assert np.isfinite(found[:, [0, 2]]).all()
    assert orthogonality(q[[0, 2]]) <= 1e-15


@pytest.mark.parametrize("scale", [1e-120, 1e120])
def test_any_scale_of_columns(scale: float) -> None:
    """Nothing is compared but within a column."""
    a = matrices(50, 8)
    a[:, ::3] *= scale
    q, r, _ = factorized(a, probes(8))
    assert orthogonality(q) <= 1e-15
    norms = torch.linalg.vector_norm(a, dim=0)
    assert (torch.linalg.vector_norm(a - q @ r, dim=0) <= 1e-14 * norms).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_several_threads(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same up to rounding, whatever rows each has."""
    a, g = matrices(1001, 24, dtype=dtype), probes(24, dtype)
    q, r, found = factorized(a, g)
    monkeypatch.setattr(cholesky_qr_host, "EACH", 24 * 24 * 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    others = factorized(a, g)
    assert torch.allclose(q, others[0], rtol=0, atol=1e-14)
    assert torch.allclose(r, others[1], rtol=0, atol=1e-12)
    assert np.allclose(found[1:2], others[2][1:2], rtol=1e-12)
    assert (others[2][[0, 2]] <= 1e-14 * found[1]).all()


def test_long_sums() -> None:
    """Sums of sums: rounding errors of a Gram matrix of many rows stay below what certificates see."""
    a = matrices(200_000, 3)
    q, _, found = factorized(a, probes(3), 1.0)
    assert orthogonality(q) <= 1e-14
    assert found[2, 0] <= 1e-14 * np.linalg.norm(probes(3))
