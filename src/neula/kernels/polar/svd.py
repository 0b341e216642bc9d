"""The library's singular values and eigenvalues, as accurate on a GPU as LAPACK's, and always found."""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from neula.kernels import scipy_linalg
from neula.kernels.precision import exact_matmul
from neula.kernels.spectra.small_eigh import small_eigh

AT_ONCE = 1 << 15
"""Matrices of a batch that cuSOLVER takes, which fails for 100,000."""

TOGETHER = 32
"""Rows and columns up to which cuSOLVER takes a batch together, by Jacobi's method."""

Factors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def svd(a: torch.Tensor) -> Factors:
    """The reduced singular value decomposition, as accurate on a GPU as LAPACK's.

    Jacobi's method, which torch takes by default there, errs by hundreds of unit roundoffs in float64 (order
    500 on an H200: 27 ms). Its approximate one does not, in a sixth of the time, unless A is ill-conditioned,
    which shows in its factors; and QR iterations never do, in twice the time.

    Parameters
    ----------
    a : Tensor, shape (..., m, n)

    Returns
    -------
    u, s, vh : Tensor
        Shapes (..., m, k), (..., k) and (..., k, n) with ``k = min(m, n)``.

    Examples
    --------
    >>> svd(torch.tensor([[2.0, 0.0], [0.0, 3.0]], dtype=torch.float64))[1]
    tensor([3., 2.], dtype=torch.float64)
    """
    if not a.is_cuda:
        return converged_svd(a)
    if a.ndim == 3 and len(a) > AT_ONCE:
        u, s, vh = map(torch.cat, zip(*map(svd, a.split(AT_ONCE)), strict=True))
        return u, s, vh
    if a.shape[-2] < a.shape[-1]:
        v, s, uh = svd(a.mT)
        return uh.mT, s, v.mT
    # In batches of small matrices all are together in the first, which errs by little there.
    together = a.ndim == 3 and len(a) > 1 and max(a.shape[1:]) <= TOGETHER
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
    matrices, shape = a.reshape(-1, *a.shape[-2:]).to(_doubled(a)).numpy(), a.shape[:-2]
    each = [scipy_linalg.svd(x, full_matrices=False, lapack_driver="gesvd") for x in matrices]
    u, s, vh = (torch.from_numpy(np.stack(x)) for x in zip(*each, strict=True))
    u, s, vh = u.to(a.dtype), s.to(a.dtype.to_real()), vh.to(a.dtype)
    return u.view(*shape, *u.shape[1:]), s.view(*shape, -1), vh.view(*shape, *vh.shape[1:])


def converged_eigh(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues and eigenvectors of symmetric or Hermitian matrices, shape (..., n, n), likewise.

    Examples
    --------
    >>> converged_eigh(torch.tensor([[2.0, 0.0], [0.0, 3.0]], dtype=torch.float64))[0]
    tensor([2., 3.], dtype=torch.float64)
    """
    if a.is_cuda and a.ndim == 3 and len(a) > AT_ONCE and not small_eigh.takes(a):
        values, vectors = map(torch.cat, zip(*map(converged_eigh, a.split(AT_ONCE)), strict=True))
        return values, vectors
    try:
        return small_eigh(a)
    except torch.linalg.LinAlgError:
        if not bool(a.isfinite().all()):
            raise
    matrices = a.reshape(-1, *a.shape[-2:]).to(_doubled(a)).cpu().numpy()
    each = [scipy_linalg.eigh(x, driver="ev") for x in matrices]
    values, vectors = (torch.from_numpy(np.stack(x)).to(a.device) for x in zip(*each, strict=True))
    return values.to(a.dtype.to_real()).view(a.shape[:-1]), vectors.to(a.dtype).view(a.shape)


def converged_eigvalsh(a: torch.Tensor) -> torch.Tensor:
    """The eigenvalues alone."""
    if a.is_cuda and a.ndim == 3 and len(a) > AT_ONCE:
        return torch.cat([converged_eigvalsh(part) for part in a.split(AT_ONCE)])
    try:
        values: torch.Tensor = torch.linalg.eigvalsh(a)
        return values
    except torch.linalg.LinAlgError:
        return converged_eigh(a)[0]


def singular_values(a: torch.Tensor) -> torch.Tensor:
    """Singular values without vectors, as accurate on a GPU as LAPACK's.

    In single precision they are roots of the eigenvalues of ``A^H A`` in double precision, which err by
    ``sqrt(n u64)`` at most, relative to the largest: Jacobi's method, which torch takes there, errs by 5e-4
    and takes ten times as long (order 4096 on an H200).

    Parameters
    ----------
    a : Tensor, shape (..., m, n), m >= n

    Examples
    --------
    >>> singular_values(torch.tensor([[2.0, 0.0], [0.0, 3.0]], dtype=torch.float64))
    tensor([3., 2.], dtype=torch.float64)
    """
    if not a.is_cuda or a.dtype.to_real() == torch.float64:
        values: torch.Tensor = torch.linalg.svdvals(a)
        return values
    return _roots_of_gram(a)


def _roots_of_gram(a: torch.Tensor) -> torch.Tensor:
    wide = a.to(_doubled(a))
    squares = converged_eigvalsh(exact_matmul(wide.mH, wide)).clamp_min(0)
    return squares.sqrt().flip(-1).to(a.dtype.to_real())


def _doubled(a: torch.Tensor) -> torch.dtype:
    """Dtype of A in double precision."""
    return torch.promote_types(a.dtype, torch.float64)


def _by(a: torch.Tensor, driver: str | None) -> Factors:
    u, s, vh = torch.linalg.svd(a, full_matrices=False, driver=driver)
    return u, s, vh


def _accurate(a: torch.Tensor, u: torch.Tensor, s: torch.Tensor, vh: torch.Tensor) -> bool:
    """Whether factors are as LAPACK's would be, to ``8 k u``."""
    k, norm = s.shape[-1], torch.linalg.matrix_norm
    identity = torch.eye(k, dtype=a.dtype, device=a.device)
    bound = 4 * k * torch.finfo(a.dtype).eps
    errors = [norm(exact_matmul(x.mH, x) - identity) for x in (u, vh.mH)]
    residual = norm(a - exact_matmul(u * s[..., None, :], vh)) / norm(a).clamp_min(torch.finfo(a.dtype).tiny)
    return bool((torch.stack([*errors, residual]) <= bound).all())
