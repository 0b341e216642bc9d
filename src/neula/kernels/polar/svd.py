"""The library's singular values and eigenvalues, as accurate on a GPU as LAPACK's, and always found.

That of a small matrix stays where a GPU has it: the host would be asked for a problem that takes it
milliseconds, in between two products that take a part of that, and a pool of threads on a host that others
use as well makes dozens of it. A library's SVD on the device takes longer still.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from neula.kernels import scipy_linalg
from neula.kernels.cuda_source import compiled
from neula.kernels.dispatch import kernel, trial
from neula.kernels.precision import exact_matmul
from neula.kernels.spectra.small_eigh import small_eigh

Factors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def svd(a: torch.Tensor) -> Factors:
    """The reduced singular value decomposition ``U, s, V^H``, as accurate on a GPU as LAPACK's.

    Jacobi's method, which torch takes by default there, errs by hundreds of unit roundoffs in float64 (order
    500 on an H200: 27 ms). Its approximate one does not, in a sixth of the time, unless A is ill-conditioned,
    which shows in its factors; and QR iterations never do, in twice the time.
    """
    if not a.is_cuda:
        return converged_svd(a)
    if a.shape[-2] < a.shape[-1]:
        v, s, uh = svd(a.mT)
        return uh.mT, s, v.mT
    # Up to that order cuSOLVER takes batches together by Jacobi's method, which errs by little there.
    together = a.ndim == 3 and len(a) > 1 and max(a.shape[1:]) <= 32
    with contextlib.suppress(torch.linalg.LinAlgError):  # it may not converge
        found = _by(a, "gesvdj" if together else "gesvda")
        if _accurate(a, *found):
            return found
    return _by(a, "gesvd")


def converged_svd(a: torch.Tensor) -> Factors:
    """The library's own choice, of matrices on a host by QR iterations where divide and conquer does not
    converge: it may not where most singular values are rounding errors.
    """
    try:
        return _by(a, None)
    except torch.linalg.LinAlgError:
        if a.is_cuda or not bool(a.isfinite().all()):
            raise
    matrices, shape = a.reshape(-1, *a.shape[-2:]).to(_doubled(a)).resolve_conj().numpy(), a.shape[:-2]
    each = [scipy_linalg.svd(x, full_matrices=False, lapack_driver="gesvd") for x in matrices]
    u, s, vh = (torch.from_numpy(np.stack(x)) for x in zip(*each, strict=True))
    u, s, vh = u.to(a.dtype), s.to(a.dtype.to_real()), vh.to(a.dtype)
    return u.view(*shape, *u.shape[1:]), s.view(*shape, -1), vh.view(*shape, *vh.shape[1:])


def converged_eigh(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues and eigenvectors of symmetric or Hermitian matrices, shape (..., n, n), likewise; both
    triangles are read.
    """
    try:
        if small_eigh.takes(a):
            return small_eigh(a)
        values, vectors = in_parts(torch.linalg.eigh, a)
        return values, vectors
    except torch.linalg.LinAlgError:
        if not bool(a.isfinite().all()):
            raise
    matrices = a.reshape(-1, *a.shape[-2:]).to(_doubled(a)).resolve_conj().cpu().numpy()
    each = [scipy_linalg.eigh(x, driver="ev") for x in matrices]
    values, vectors = (torch.from_numpy(np.stack(x)).to(a.device) for x in zip(*each, strict=True))
    return values.to(a.dtype.to_real()).view(a.shape[:-1]), vectors.to(a.dtype).view(a.shape)


def converged_eigvalsh(a: torch.Tensor) -> torch.Tensor:
    """The eigenvalues alone."""
    try:
        if small_eigh.takes(a):
            return small_eigh(a)[0]
        return in_parts(lambda part: (torch.linalg.eigvalsh(part),), a)[0]
    except torch.linalg.LinAlgError:
        return converged_eigh(a)[0]


def singular_values(a: torch.Tensor) -> torch.Tensor:
    """Singular values without vectors of A (..., m, n), m >= n, as accurate on a GPU as LAPACK's.

    In single precision they are roots of the eigenvalues of ``A^H A`` in double precision, which err by
    ``sqrt(n u64)`` at most, relative to the largest: Jacobi's method, which torch takes there, errs by 5e-4
    and takes ten times as long (order 4096 on an H200).
    """
    if not a.is_cuda or a.dtype.to_real() == torch.float64:
        return in_parts(lambda part: (torch.linalg.svdvals(part),), a)[0]
    return _roots_of_gram(a)


def _roots_of_gram(a: torch.Tensor) -> torch.Tensor:
    wide = a.to(_doubled(a))
    squares = converged_eigvalsh(exact_matmul(wide.mH, wide)).clamp_min(0)
    return squares.sqrt().flip(-1).to(a.dtype.to_real())


def _doubled(a: torch.Tensor) -> torch.dtype:
    """Dtype of A in double precision."""
    return torch.promote_types(a.dtype, torch.float64)


def _by(a: torch.Tensor, driver: str | None) -> Factors:
    u, s, vh = in_parts(partial(torch.linalg.svd, full_matrices=False, driver=driver), a)
    return u, s, vh


def in_parts(
    decompose: Callable[[torch.Tensor], Sequence[torch.Tensor]], a: torch.Tensor
) -> Sequence[torch.Tensor]:
    """Results of a batch, of a huge one on a GPU in parts: cuSOLVER fails for 100,000 matrices."""
    many = 1 << 15
    if not a.is_cuda or a.ndim != 3 or len(a) <= many:
        return decompose(a)
    return [torch.cat(parts) for parts in zip(*map(decompose, a.split(many)), strict=True)]


def _accurate(a: torch.Tensor, u: torch.Tensor, s: torch.Tensor, vh: torch.Tensor) -> bool:
    """Whether factors are as LAPACK's would be, to ``8 k u``."""
    k, norm = s.shape[-1], torch.linalg.matrix_norm
    identity = torch.eye(k, dtype=a.dtype, device=a.device)
    bound = 4 * k * torch.finfo(a.dtype).eps
    errors = [norm(exact_matmul(x.mH, x) - identity) for x in (u, vh.mH)]
    residual = norm(a - exact_matmul(u * s[..., None, :], vh)) / norm(a).clamp_min(torch.finfo(a.dtype).tiny)
    return bool((torch.stack([*errors, residual]) <= bound).all())


MAX_ORDER = 128
"""Shared memory of the kernel."""


@trial("The kernel for small singular value decompositions", "the host computes them")
def _tried(device: torch.device) -> None:
    small_svd.kernel(torch.eye(1, dtype=torch.float64, device=device))


@kernel("small_svd_cuda", trial=_tried, when=lambda r: 0 < len(r) <= MAX_ORDER and r.dtype == torch.float64)
def small_svd(r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``R = W diag(s) X^H``, s descending, for R (n, n) in double precision; on a GPU by a kernel, elsewhere
    by LAPACK.

    All NaN where R has NaN or Inf. The kernel computes ``W = R X diag(s)^-1``, whose columns err by ``u s_1 /
    s_i``: where s vanishes they are none.
    """
    on_host = r.cpu()
    if not bool(on_host.isfinite().all()):
        nan = torch.full_like(r, math.nan)
        return nan, nan[0].real, nan
    w, s, xh = converged_svd(on_host)
    return w.to(r.device), s.to(r.device), xh.mH.to(r.device)


LANES = 16
"""Threads for each pair of columns."""

MOST_THREADS = 1024


def shared_bytes(n: int) -> int:
    """Memory of n columns that are filled up to a multiple of the lanes, and of their norms."""
    return 8 * n * (-(-n // LANES) * LANES + 1)


def threads_for(n: int) -> int:
    """Threads for n columns: half a warp for each pair of them, or for the last one alone; whole warps."""
    return min(MOST_THREADS, -(-(n + 1) // 4) * 2 * LANES)


def small_svd_cuda(r):
    n = len(r)
    x, s = torch.empty_like(r, memory_format=torch.contiguous_format), r.new_empty(n)
    kernel = compiled("small_svd", "small_svd", r.device, shared_bytes=shared_bytes(MAX_ORDER))
    kernel((1, 1, 1), (threads_for(n), 1, 1), [r, x, s, n, *r.stride()], shared_bytes(n))
    return (r @ x.mT).div_(s), s, x.mT
