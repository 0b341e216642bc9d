"""Matrices without elements: shapes and dtypes of NumPy and torch, nothing to warn about."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import scipy.linalg
import torch
from tests.peers import of_new_peers

import neula

SINGLE = [(0, 3), (3, 0), (0, 0), (1, 0)]
BATCHES = [(0, 3, 2), (0, 2, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0), (0, 0, 0), (2, 0, 4, 3), (2, 3, 0, 4)]
DTYPES = [np.float32, np.float64, np.int64]

SHAPES = SINGLE + BATCHES
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_engine = pytest.mark.parametrize("engine", ["cpu", "emulated"])


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def same(found, expected) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert (found == expected).all()


@each_engine
@each_dtype
@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
def test_qr(dtype, mode, engine):
    for shape in SHAPES:
        a = np.zeros(shape, dtype)
        result = neula.qr(a, mode, engine=engine, strict=True)
        if mode == "r":
            assert result.Q is None
            same(result.R, np.linalg.qr(a, "r"))
        else:
            for found, expected in zip(result, np.linalg.qr(a, mode), strict=True):
                same(found, expected)
        assert result.converged
        certificates = [result.certificate] if len(shape) == 2 else result.certificate
        assert len(certificates) == int(np.prod(shape[:-2]))
        assert all(c.accepted and c.residual == c.orthogonality == 0 for c in certificates)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["reduced", "complete"])
def test_qr_of_tensors(dtype, mode):
    for shape in SHAPES:
        a = torch.zeros(shape, dtype=dtype)
        for found, wide in zip(neula.qr(a, mode), torch.linalg.qr(a.float(), mode), strict=True):
            same(found, wide.to(dtype))


@each_shape
def test_options_of_qr_change_nothing(shape):
    a = np.zeros(shape, np.float32, order="F")
    for options in ({"algorithm": "householder"}, {"overwrite_a": True}, {"accuracy": "fp16"}):
        same(neula.qr(a, **options).Q, np.linalg.qr(a)[0])


@each_dtype
@pytest.mark.parametrize("compute", ["auto", "fp32_notc"])
def test_tsqr(dtype, compute):
    for shape in SHAPES:
        a = np.zeros(shape, dtype)
        result = neula.tsqr(a, compute=compute)
        for found, expected in zip(result, np.linalg.qr(a), strict=True):
            same(found, expected)
        assert result.converged
        same(neula.tsqr(a, "r").R, np.linalg.qr(a, "r"))


@of_new_peers
@each_engine
@each_dtype
@pytest.mark.parametrize("rcond", [None, 0.1])
def test_orth(dtype, rcond, engine):
    for shape in SHAPES:
        a = np.zeros(shape, dtype)
        found = neula.orth(a, rcond, engine=engine)
        if 0 in shape[:-2]:  # which SciPy does not take
            same(found, np.linalg.qr(a)[0])
        else:
            same(found, scipy.linalg.orth(a, rcond))


@each_engine
@each_dtype
@pytest.mark.parametrize("shape", SINGLE)
@pytest.mark.parametrize("options", [{}, {"rank": 0}, {"tol": 0.1}])
def test_svd_lowrank(shape, dtype, options, engine):
    a = np.zeros(shape, dtype)
    result = neula.svd_lowrank(a, engine=engine, **options)
    for found, expected in zip(result, np.linalg.svd(a, full_matrices=False), strict=True):
        same(found, expected)
    assert result.relative_error == 0
    assert result.qr.converged


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
@pytest.mark.parametrize("leading", [(), (2,)])
def test_without_columns_b_is_the_residual(leading, scale):
    """Weighted as the problem is, and without overflow."""
    b = np.array([3.0, 4.0]) * scale
    result = neula.lstsq(np.zeros((*leading, 2, 0)), b)
    np.testing.assert_allclose(result.residual_norm, np.full(leading, 5 * scale), rtol=1e-15)
    result = neula.lstsq(np.zeros((*leading, 2, 0)), b, weights=np.array([0.0, 2.0]))
    np.testing.assert_allclose(result.residual_norm, np.full(leading, 8 * scale), rtol=1e-15)


def test_without_columns_b_must_be_finite():
    with pytest.raises(ValueError, match=r"b\[1\] is nan"):
        neula.lstsq(np.zeros((2, 0)), np.array([1.0, np.nan]))


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("k", [None, 0, 2])
@each_shape
def test_constraints_and_covariances(shape, k, dtype):
    m, n = shape[-2:]
    a, b = np.zeros(shape, dtype), np.zeros((*shape[:-2], m, k or 0) if k is not None else m, dtype)
    x = (*shape[:-2], n) if k is None else (*shape[:-2], n, k)
    for covariance in (np.ones(m), np.eye(m)):
        assert neula.lstsq(a, b, covariance=covariance, strict=True).x.shape == x
    assert neula.lstsq(a, b, covariance_factor=np.eye(m), strict=True).x.shape == x
    for c, d, more in [
        (np.zeros((0, n)), np.zeros(0), {}),
        (np.zeros((1, n)), np.zeros(1), {"damp": 1.0}),
        (np.ones((1, n)), np.full(1, float(n)), {"weights": np.ones(m)}),
    ]:
        result = neula.lstsq(a, b, constraints=(c, d), strict=True, **more)
        assert (result.x.shape, result.x.dtype) == (x, dtype)
        np.testing.assert_allclose(result.x, np.full(x, d.sum() / max(n, 1)), rtol=1e-15)
        assert result.coefficients.keys() == {f"x{i + 1}" for i in range(n)}


def test_damping_has_the_rank_of_its_rows():
    assert neula.lstsq(np.zeros((0, 3)), np.zeros(0), damp=0.1).rank == 3
    assert neula.lstsq(np.zeros((0, 3)), np.zeros(0)).rank == 0


@pytest.mark.parametrize("shape", [(5, 2), (2, 5), (3, 5, 2)])
def test_a_matrix_has_a_rank_without_right_hand_sides(shape):
    a = np.ones(shape)
    result = neula.lstsq(a, np.zeros((shape[-2], 0)))
    assert result.rank == 1
    assert result.x.shape == (*shape[:-2], shape[-1], 0)
    assert result.forward_errors.shape == (*shape[:-2], 0)
    if a.ndim == 2:
        x, _, rank, _ = np.linalg.lstsq(a, np.zeros((shape[0], 0)), rcond=None)
        assert rank == result.rank
        same(result.x, x)


def test_svd_lowrank_has_no_triplets_to_give():
    with pytest.raises(ValueError, match=r"from 0 to min\(m, n\) = 0, got 1"):
        neula.svd_lowrank(np.zeros((3, 0)), 1)


@each_shape
def test_gradients(shape):
    a = torch.zeros(shape, requires_grad=True)
    for answers in (neula.qr(a), neula.tsqr(a), [neula.orth(a)]):
        total = sum(answer.sum() for answer in answers)
        same(torch.autograd.grad(total, a)[0], torch.zeros(shape))


@pytest.mark.gpu
@each_shape
def test_on_a_gpu(shape):
    a = torch.zeros(shape, device="cuda")
    for mode in ("reduced", "complete"):
        for found, expected in zip(neula.qr(a, mode), torch.linalg.qr(a, mode), strict=True):
            same(found, expected)
    same(neula.tsqr(a).R, torch.linalg.qr(a).R)
    same(neula.matmul(a, a.mT), a @ a.mT)
    for rcond in (None, 0.1):
        same(neula.orth(a, rcond), torch.linalg.qr(a).Q)


@each_dtype
def test_svd(dtype):
    for shape in SHAPES:
        a = np.zeros(shape, dtype)
        result = neula.svd(a)
        for found, expected in zip(result, np.linalg.svd(a), strict=True):
            same(found, expected)
        assert result.errors.shape == result.s.shape
        certificates = [result.certificate] if len(shape) == 2 else result.certificate
        assert all(c.accepted for c in certificates)
        if shape[-1] == shape[-2]:
            assert [x.shape for x in neula.eigh(a)] == [x.shape for x in np.linalg.eigh(a)]
