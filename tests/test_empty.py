"""Matrices without elements: shapes and dtypes of NumPy and torch, nothing to warn about."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from tests.peers import of_new_peers

import neula

SINGLE = [(0, 3), (3, 0), (0, 0), (1, 0)]
BATCHES = [(0, 3, 2), (0, 2, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0), (0, 0, 0), (2, 0, 4, 3), (2, 3, 0, 4)]
SHAPES = SINGLE + BATCHES
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def same(found: Any, expected: Any) -> None:
    """Arrays, or tuples of these; None where there is none."""
    if isinstance(found, torch.Tensor | np.ndarray):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert (found == expected).all()
        return
    for x, y in zip(found, expected, strict=True):
        same(x, y)


def orth_of_peers(a: np.ndarray) -> np.ndarray:
    return np.linalg.qr(a)[0] if 0 in a.shape[:-2] else scipy.linalg.orth(a)  # which SciPy refuses


def reduced(a: np.ndarray) -> Any:
    return np.linalg.svd(a, full_matrices=False)


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "qr": (partial(neula.qr, strict=True), np.linalg.qr),
    "qr by reflections": (partial(neula.qr, algorithm="householder"), np.linalg.qr),
    "qr in place": (partial(neula.qr, overwrite_a=True), np.linalg.qr),
    "complete": (partial(neula.qr, mode="complete"), partial(np.linalg.qr, mode="complete")),
    "r": (lambda a, **how: neula.qr(a, "r", **how).R, partial(np.linalg.qr, mode="r")),
    "tsqr": (neula.tsqr, np.linalg.qr),
    "tsqr fp32": (partial(neula.tsqr, compute="fp32_notc"), np.linalg.qr),
    "r of tsqr": (lambda a, **how: neula.tsqr(a, "r", **how).R, partial(np.linalg.qr, mode="r")),
    "orth": (neula.orth, orth_of_peers),
    "orth with rcond": (partial(neula.orth, rcond=0.1), orth_of_peers),
    "svd": (neula.svd, np.linalg.svd),
    "svd_lowrank": (neula.svd_lowrank, reduced),
    "svd_lowrank of rank 0": (partial(neula.svd_lowrank, rank=0), reduced),
    "svd_lowrank to a tolerance": (partial(neula.svd_lowrank, tol=0.1), reduced),
}


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=of_new_peers if x.startswith("orth") else ()) for x in FUNCTIONS]
)
def test_as_numpy(name, dtype, engine):
    function, peer = FUNCTIONS[name]
    for shape in SINGLE if "svd_lowrank" in name else SHAPES:
        a = np.zeros(shape, dtype)
        result = function(a, engine=engine)
        same(result, peer(a))
        if name.startswith("svd_lowrank"):
            assert result.relative_error == 0
            assert result.qr.converged
        elif not isinstance(result, np.ndarray):
            assert result.converged
            certificates = [result.certificate] if len(shape) == 2 else result.certificate
            assert len(certificates) == int(np.prod(shape[:-2]))
            assert all(one.accepted for one in certificates)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["reduced", "complete"])
def test_tensors(dtype, mode):
    for shape in SHAPES:
        a = torch.zeros(shape, dtype=dtype)
        same(neula.qr(a, mode), [x.to(dtype) for x in torch.linalg.qr(a.float(), mode)])


def test_shapes_of_eigenvectors():
    for shape in ((0, 0), (2, 0, 0), (0, 0, 0)):
        a = np.zeros(shape)
        assert [x.shape for x in neula.eigh(a)] == [x.shape for x in np.linalg.eigh(a)]


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
@pytest.mark.parametrize("leading", [(), (2,)])
def test_without_columns_b_is_the_residual(leading, scale):
    """Weighted as the problem is, and without overflow."""
    b = np.array([3.0, 4.0]) * scale
    result = neula.lstsq(np.zeros((*leading, 2, 0)), b)
    np.testing.assert_allclose(result.residual_norm, np.full(leading, 5 * scale), rtol=1e-15)
    result = neula.lstsq(np.zeros((*leading, 2, 0)), b, weights=np.array([0.0, 2.0]))
    np.testing.assert_allclose(result.residual_norm, np.full(leading, 8 * scale), rtol=1e-15)


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


def test_ranks_and_refusals():
    assert neula.lstsq(np.zeros((0, 3)), np.zeros(0), damp=0.1).rank == 3
    assert neula.lstsq(np.zeros((0, 3)), np.zeros(0)).rank == 0
    with pytest.raises(ValueError, match=r"b\[1\] is nan"):
        neula.lstsq(np.zeros((2, 0)), np.array([1.0, np.nan]))
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
        same(neula.qr(a, mode), torch.linalg.qr(a, mode))
    same(neula.tsqr(a).R, torch.linalg.qr(a).R)
    same(neula.matmul(a, a.mT), a @ a.mT)
    for rcond in (None, 0.1):
        same(neula.orth(a, rcond), torch.linalg.qr(a).Q)
