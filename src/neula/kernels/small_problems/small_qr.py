"""QR of one small matrix in one launch, from the matrix to the certificate.

QR of small matrices by one thread block each, in CUDA C++.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import multiprocessors, shared_memory

MAX_COLUMNS = 64
"""Columns at most: elements of a Gram matrix of them are in the registers of one thread block."""

MOST = 3
"""Passes: two where the condition number is below 1e8, and the third is for those near that."""


class SmallQR(NamedTuple):
    """Factors with what is measured of them."""

    q: torch.Tensor  # shape (batch, m, n)
    # Shape (batch, n, n). Upper triangular, its diagonal positive. NaN where A is too ill-conditioned, or not
    # finite.
    r: torch.Tensor
    # Shape (batch, 3). ||(A - Q R) D^-1||_F / sqrt(n), D being the norms of the columns of A, ||E||_F /
    # sqrt(n) and ||E^2||_F^(1/2) for E = I - Q^T Q, of the factors as they are returned, in float64. The last
    # one is at least ||E||_2 and at most n^(1/4) times that.
    measures: torch.Tensor


@trial("The kernel of small QR factorizations", "LAPACK on the host takes its place")
def _tried(device: torch.device, itemsize: int) -> None:
    a = torch.ones(1, 1, 1, dtype=torch.float64 if itemsize == 8 else torch.float32, device=device)
    small_qr.kernel(a, 0.1)


@kernel(
    "small_qr_cuda",
    trial=_tried,
    when=lambda a, enough: fits(a),
    variant=lambda a, enough: a.dtype.itemsize,
)
def small_qr(a: torch.Tensor, enough: float) -> SmallQR:
    """Cholesky QR of A (batch, m, n), m >= n, in double precision, repeated until ``||I - Q^T Q||_F`` is
    ``enough``; factors are rounded to the dtype of A, float32 or float64.
    """
    q = given = a.double()
    n, passes = a.shape[2], 0
    r = identity = torch.eye(n, dtype=q.dtype, device=q.device).expand(len(a), n, n)
    norm = torch.linalg.matrix_norm
    while passes == 0 or (passes < MOST and bool((norm(identity - q.mT @ q) > enough).any())):
        lower, info = torch.linalg.cholesky_ex(q.mT @ q)
        upper = lower.mT.masked_fill(info[:, None, None] > 0, torch.nan)
        q, r = torch.linalg.solve_triangular(upper, q, upper=True, left=False), lower.mT @ r
        passes += 1
    q, r = q.to(a.dtype), r.to(a.dtype)
    missed = (given - q.double() @ r.double()) / torch.linalg.vector_norm(given, dim=1, keepdim=True)
    loss = identity - q.double().mT @ q.double()
    measures = norm(missed) / n**0.5, norm(loss) / n**0.5, norm(loss @ loss).sqrt()
    return SmallQR(q, r, torch.stack(measures, 1))


THREADS, SIDE = 256, 16


def shared_bytes(m: int, n: int) -> int:
    """Shared memory that a matrix takes, as ``Matrix`` in the kernel says."""
    pitch = MAX_COLUMNS + 1
    squares = (MAX_COLUMNS + max(3 * n, MAX_COLUMNS)) * pitch
    return 8 * (squares + 2 * MAX_COLUMNS + THREADS // 32 + (m + SIDE) * (n | 1) + SIDE)


def fits(a: torch.Tensor) -> bool:
    """Whether the kernel is made for matrices, and can hold all of them at a time."""
    (count, m, n), device = a.shape, a.device
    usual = a.dtype in (torch.float32, torch.float64) and max(a.stride()) < 1 << 31
    few = 0 < n <= min(m, MAX_COLUMNS) and shared_bytes(m, n) <= shared_memory(device)
    return usual and few and 0 < count <= multiprocessors(device)


def macros_of(dtype: torch.dtype) -> str:
    """Macros before the source, for matrices of a dtype."""
    return f"#define REAL {'double' if dtype == torch.float64 else 'float'}\n"


def small_qr_cuda(a, enough):
    (count, m, n), device = a.shape, a.device
    q, r = (torch.empty(count, rows, n, dtype=a.dtype, device=device) for rows in (m, n))
    measures = torch.empty(count, 3, dtype=torch.float64, device=device)
    most = shared_memory(device)
    kernel = compiled("small_qr", "small_qr", device, macros_of(a.dtype), shared_bytes=most)
    apart, row, column = a.stride()
    arguments = [a, q, r, measures, enough, MOST, m, n, row, column, apart if count > 1 else 0]
    kernel((count, 1, 1), (THREADS, 1, 1), arguments, shared_bytes(m, n))
    return SmallQR(q, r, measures)
