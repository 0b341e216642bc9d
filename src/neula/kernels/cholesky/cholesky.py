"""The factor R of a small Gram matrix together with its inverse, as Cholesky QR needs them between two
products.

Libraries take one launch for the factor and others for the inverse, each far longer than its flops: a chain
of square roots and divisions. One thread block does both in a fifth of the time. CUDA rather than Triton:
square roots follow one another, each lane of a warp holds rows in registers, and other warps work meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.dispatch import kernel, trial
from neula.kernels.triangular_inverse import triangular_inverse

MAX_COLUMNS = 128
"""Shared memory of the kernel: the matrix and its inverse."""


class CholeskyFactors(NamedTuple):
    """Cholesky factors of a Gram matrix ``G = R^T R``, all float32."""

    # Shape (n, n). Upper triangular. Where G is not positive definite, NaN by the reference; the kernel takes
    # a pivot that is smaller than what it may owe to rounding errors, 2**-19 of the diagonal element, to be
    # that, and NaN comes of zero columns and of NaN.
    r: torch.Tensor
    inverse: torch.Tensor  # shape (n, n): R^-1
    norms: torch.Tensor  # shape (n,): norms of the columns whose inner products G holds


@trial("The kernel of Cholesky factors", "library calls take its place, several times slower")
def _tried(device: torch.device) -> None:
    # Three blocks, with other numbers everywhere: the second one goes through tensor cores.
    # Made and compared on the host: on a GPU the first call of each of torch's functions takes tens of ms.
    i = torch.arange(48, device="cpu")
    upper = (((7 * i[:, None] + 3 * i) % 5 - 2) / 16.0).double().triu(1) + torch.eye(
        48, dtype=torch.float64, device="cpu"
    )
    found = cholesky_inverse.kernel((upper.mT @ upper).to(device)).r
    if not torch.allclose(found.cpu().double(), upper, rtol=0.0, atol=2.0**-16):
        raise ArithmeticError("the factor of a well-conditioned matrix is another one")
    cholesky_lower.kernel(torch.ones(1, 1, 1, dtype=torch.float32, device=device))
    cholesky_apart.kernel(torch.ones(1, 1, 1, dtype=torch.float32, device=device))


@kernel("cholesky_inverse_cuda", trial=_tried, when=lambda gram, out=None: 0 < gram.shape[0] <= MAX_COLUMNS)
def cholesky_inverse(gram: torch.Tensor, out: torch.Tensor | None = None) -> CholeskyFactors:
    """Factor of a Gram matrix, float64, of which only the symmetric part counts, and the inverse of the
    factor.

    On a GPU by a kernel for up to 128 columns, elsewhere in float64. R is written to ``out``, float32, if
    given.
    """
    gram = gram.add(gram.mT).mul_(0.5)
    lower, info = torch.linalg.cholesky_ex(gram)
    lower = lower.masked_fill(info > 0, torch.nan)
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False).mT
    r = lower.mT.float().triu()
    r = r if out is None else out.copy_(r)
    return CholeskyFactors(r, inverse.float(), gram.diagonal().sqrt().float())


class LowerFactors(NamedTuple):
    """Cholesky factors of a batch of Hermitian matrices ``A = L L^H``."""

    inverse: torch.Tensor  # shape (batch, n, n): L^-H, upper triangular
    # Shape (batch,). int32: 0, or the order of the first leading minor that is not positive; by the kernel
    # also of one that may be so for all that rounding errors say, its pivot being less than 2**-19 of the
    # diagonal element. Then the factor means nothing.
    order: torch.Tensor


def _fits_kernel(a: torch.Tensor) -> bool:
    # The kernel counts what lies between two matrices in 32 bits.
    far = len(a) > 1 and a.stride(0) >= 2**31
    return a.dtype == torch.float32 and 0 < a.shape[1] <= MAX_COLUMNS and len(a) > 0 and not far


@kernel("cholesky_lower_cuda", trial=_tried, when=_fits_kernel)
def cholesky_lower(a: torch.Tensor) -> LowerFactors:
    """Cholesky factors of a batch (batch, n, n) in their place, and their inverses, without synchronizing.

    On a GPU float32 matrices of up to 128 columns take one launch, a thread block each. Lower triangles are
    read, and L takes their place; what is above the diagonal becomes zero.
    """
    lower, info = torch.linalg.cholesky_ex(a)
    if a.is_cuda and a.shape[1] > MAX_COLUMNS:  # substitution takes three times as long as doubling
        inverse = triangular_inverse(lower, upper=False).mH
    else:
        identity = torch.eye(a.shape[1], dtype=a.dtype, device=a.device).expand_as(a)
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False).mH
    a.copy_(lower)
    return LowerFactors(inverse, info)


@kernel("cholesky_apart_cuda", trial=_tried, when=_fits_kernel)
def cholesky_apart(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cholesky factors alone, row-major in memory of their own and zero above the diagonal, with the order as
    in :class:`LowerFactors`; only the lower triangles of A, float32, are read.
    """
    lower, order = torch.linalg.cholesky_ex(a)
    return lower.contiguous(), order


THREADS = 4
"""Threads for each column of the workspace."""

NARROWEST = 32
"""Smallest number of columns of the workspace."""


def shared_bytes(width: int) -> int:
    """For R and its inverse, their diagonal blocks of 16 columns, in rows of 4 more numbers, and vectors."""
    return 4 * ((width + 2 * 16) * (width + 4) + 3 * width)


SHARED_BYTES = shared_bytes(MAX_COLUMNS)


def cholesky_inverse_cuda(gram, out=None):
    n = len(gram)
    # One allocation for all of it: in a graph, and without one, they are what takes time here.
    room = torch.empty(2 * n + 1, n, dtype=torch.float32, device=gram.device)
    inverse, r, norms = room[:n], room[n:-1] if out is None else out, room[-1]
    arguments = [gram.contiguous(), r, inverse, norms, n, *r.stride()]
    kernel = compiled("cholesky", "cholesky_inverse", gram.device, shared_bytes=SHARED_BYTES)
    kernel((1, 1, 1), (THREADS * MAX_COLUMNS, 1, 1), arguments, SHARED_BYTES)
    return CholeskyFactors(r, inverse, norms)


def cholesky_lower_cuda(a):
    inverse = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    return LowerFactors(inverse, _factor(a, a, inverse, MAX_COLUMNS))


def cholesky_apart_cuda(a):
    lower, width = torch.empty(a.shape, dtype=torch.float32, device=a.device), NARROWEST
    while width < a.shape[1]:
        width *= 2
    return lower, _factor(a, lower, None, width)


def _factor(a: torch.Tensor, lower: torch.Tensor, inverse: torch.Tensor | None, width: int) -> torch.Tensor:
    """Launch with workspace for so many columns; returns the orders of minors that are not positive."""
    (count, n, _), strides = a.shape, []
    order = torch.empty(count, dtype=torch.int32, device=a.device)
    for x in (a, lower):
        strides += [x.stride(1), x.stride(2), x.stride(0) if count > 1 else 0]
    macros, nbytes = f"#define WIDTH {width}\n", shared_bytes(width)
    kernel = compiled("cholesky", "cholesky_lower", a.device, macros, shared_bytes=nbytes)
    room = lower if inverse is None else inverse
    arguments = [a, lower, room, order, n, *strides, int(inverse is not None)]
    kernel((count, 1, 1), (THREADS * width, 1, 1), arguments, nbytes)
    return order
