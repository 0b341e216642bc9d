"""The tree of Householder factorizations and Cholesky QR of tall matrices, by the definition of a QR."""

from __future__ import annotations

import math

import pytest
import torch
from qr_measures import U32, U64, batch_errors, check_triangular

from neula.algorithms.orthogonal.tsqr import cholesky_tsqr, cholesky_tsqr2, cholesky_tsqr32, tsqr
from neula.io.matrices import random_matrix
from neula.kernels.qr.householder import MAX_HEIGHT, WIDTH

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def matrices(kind: str, m: int, n: int, batch: int = 2, **options) -> torch.Tensor:
    return torch.stack([random_matrix(kind, m, n, seed=7 * n + i, **options) for i in range(batch)])


def levels(m: int, n: int, rows: int) -> int:
    """Of the tree: each stacks triangles of n rows for tiles of so many."""
    count = 1
    while m > rows:
        m, count = math.ceil(m / rows) * n, count + 1
    return count


def bound(m: int, n: int, tile_rows: int | None, product: float = 0.0, u: float = U32) -> float:
    """For each level what a tile errs by: ``4 (n + sqrt(m)) u``, as every QR, 4 roundings in a scale of a
    reflector, and for each block of columns its reflector on the way up and on the way down, three products
    with ``|V|^2 = 2``.
    """
    rows = tile_rows or max(MAX_HEIGHT, 2 * n)
    tile = 4 * (n + math.sqrt(min(m, rows)) + 4) * u + math.ceil(n / WIDTH) * 2 * 3 * 2 * product
    return levels(m, n, rows) * tile


def errors(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> tuple[float, ...]:
    """The worst of a batch."""
    return tuple(float(x.max()) for x in batch_errors(a, q, r))


# ---------------------------------------------------------------- the tree


def test_tiles_that_do_not_shrink() -> None:
    with pytest.raises(ValueError, match=r"tiles of 13 rows.*take tile_rows >= 14"):
        tsqr(matrices("uniform", 40, 7), torch.matmul, tile_rows=13)


@pytest.mark.gpu
@pytest.mark.parametrize("product", ["fp16_cor", "tf32_cor"])
def test_a_million_rows_on_a_gpu(product: str) -> None:
    a = matrices("uniform", 10**6, 128, batch=1, dtype=torch.float32, device="cuda")
    q, r = tsqr(a, product)
    check_triangular(r)
    one = 8 * U32 + 2 * MAX_HEIGHT / 16 * U32
    residual, orthogonality = errors(a, q, r)
    assert residual <= bound(10**6, 128, None, one)
    assert orthogonality <= math.sqrt(128) * bound(10**6, 128, None, one)


# ---------------------------------------------------------------- Cholesky QR


def cholesky_bounds(a: torch.Tensor, r: torch.Tensor, u: float, gram: float) -> tuple[float, float]:
    """Residual and orthogonality if the product errs by u beside ``|A| |R^-1|``, and the Gram matrix by
    ``gram`` beside the norms of the columns, which ``R^-T`` and ``R^-1`` multiply by ``n cond^2`` (Yamamoto,
    Nakatsukasa, Yanagisawa, Fukaya 2015).
    """
    size, cond = a.double().abs() @ torch.linalg.inv(r).abs(), float(torch.linalg.cond(a.double()))
    norm = torch.linalg.matrix_norm
    residual = u * float(norm(size @ r.abs()) / norm(a.double()))
    return residual, 2 * u * float(norm(size)) + a.shape[1] * gram * cond**2


def arithmetic(device: str, n: int) -> tuple[float, float]:
    """Errors of the product and of the Gram matrix: on a CPU a sum in float64, and one rounding; on a GPU
    float32 (:mod:`neula.kernels.qr.tall`).
    """
    return (2 * U32, U64) if device == "cpu" else ((12 + 2 * n / 16) * U32, 8 * U32)


@DEVICES
@pytest.mark.parametrize("cond", [2.0, 1e4, 1e6])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (20, 20), (300, 130)])
def test_cholesky_qr_once(m: int, n: int, cond: float, device: str) -> None:
    a = random_matrix("geometric", m, n, cond=cond).to(device, torch.float32)
    q, r = cholesky_tsqr(a)
    assert (q.shape, r.shape, q.dtype, r.dtype) == ((m, n), (n, n), torch.float32, torch.float64)
    if device == "cuda" and cond >= 1e4 and bool(r.isnan().all()):
        return  # a Gram matrix in float32 of such a condition may be indefinite
    check_triangular(r)
    limits = cholesky_bounds(a, r, *arithmetic(device, n))
    assert all(x <= y for x, y in zip(errors(a, q, r), limits, strict=True))


@DEVICES
def test_cholesky_qr_twice(device: str) -> None:
    """Up to the square root of 1/u of the Gram matrix; the second pass meets a condition of about 1."""
    for cond in (1e1, 1e2) if device == "cuda" else (1e2, 1e5, 1e7):
        a = random_matrix("geometric", 500, 30, cond=cond).to(device, torch.float32)
        q, r = cholesky_tsqr2(a)
        check_triangular(r)
        u, gram = arithmetic(device, 30)
        residual, orthogonality = errors(a, q, r)
        assert residual <= 2 * cholesky_bounds(a, r, u, gram)[0]
        # |Q| |R^-1| of a Q that is nearly orthonormal is n at most.
        assert orthogonality <= 2 * u * 30 + 30 * gram * 1.5


@DEVICES
@pytest.mark.parametrize("cond", [2.0, 50.0])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (20, 20), (300, 130)])
def test_cholesky_qr_in_float32(m: int, n: int, cond: float, device: str) -> None:
    """The inverse of R errs by ``n u cond``, and the Gram matrix by n u at most; twice makes up for both."""
    a = random_matrix("geometric", m, n, cond=cond).to(device, torch.float32)
    q, r = cholesky_tsqr32(a)
    assert (q.shape, r.shape, q.dtype, r.dtype) == ((m, n), (n, n), torch.float32, torch.float32)
    check_triangular(r)
    residual, orthogonality = errors(a, q, r)
    assert residual <= 4 * n * cond * U32
    assert orthogonality <= 4 * n * cond**2 * U32
    q, r = cholesky_tsqr2(a, cholesky_tsqr32)
    assert all(error <= 8 * (n + 4) * U32 for error in errors(a, q, r))


@DEVICES
def test_cholesky_qr_where_there_is_none(device: str) -> None:
    a = random_matrix("uniform", 200, 12, dtype=torch.float32, device=device)
    a[:, 7] = 0
    for method in (cholesky_tsqr, cholesky_tsqr2):
        q, r = method(a)
        assert q.isnan().all()
        assert r.isnan().all()
