"""Low-rank approximation by QR and the SVD of R (HPDC 2020, section 3.4)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.engines.formats import FP32, double_gram, double_of, format_of, in_double
from neula.engines.reduction import HERE, Reduction
from neula.kernels.phases import phases
from neula.kernels.polar.svd import Factors, converged_eigh, svd
from neula.kernels.precision import exact_matmul

LARGEST_RATIO = 1e4  # of singular values that the Gram matrix may be asked for: ``1e4**2 u64 < u32``


def truncate(s: torch.Tensor, rank: int | None, tol: float | None) -> int:
    """Number of singular values to keep, of descending ones: ``rank``, or, if that is None, the fewest for
    which the rest is at most ``tol`` times the whole, in the Frobenius norm; of a batch as many as any needs.
    """
    if rank is not None:
        return min(rank, s.shape[-1])
    if tol is None:
        return s.shape[-1]
    tails = s.square().flip(-1).cumsum(-1).flip(-1).sqrt()
    return int((tails > tol * tails[..., :1]).sum(-1).max())


# item: Q QR-SVD
def qr_svd(
    q: torch.Tensor,
    r: torch.Tensor,
    *,
    rank: int | None = None,
    tol: float | None = None,
    over_rows: Reduction = HERE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``A = Q R``, ``R = U S V^H``, hence ``A = (Q U) S V^H``, truncated as :func:`truncate` says: U, s and
    ``V^H``.
    """
    u, s, vh, *_ = svd_of_r(r, rank=rank, tol=tol, over_rows=over_rows)
    return exact_matmul(q, u), s, vh


class SVDOfR(NamedTuple):
    """``R V = U diag(s)``, truncated, and how well that holds."""

    u: torch.Tensor  # shapes (n, k), (k,) and (k, n)
    s: torch.Tensor  # shapes (n, k), (k,) and (k, n)
    vh: torch.Tensor  # shapes (n, k), (k,) and (k, n)
    # ||R V - U diag(s)||_F of all triplets, or of those that are kept where no others were computed.
    left: float
    lost: float  # the larger of ||U^H U - I||_F / sqrt(l) and the same of V, l being the number of these


def svd_of_r(r: torch.Tensor, *, rank: int | None, tol: float | None, over_rows: Reduction = HERE) -> SVDOfR:
    """The singular value decomposition of a square matrix, truncated (:func:`truncate`) and measured.

    All processes of ``over_rows`` have the same R, and find the same.
    """
    found = None if over_rows.spread else _svd_from_gram(r, rank, tol)
    # Singular vectors are not unique: all processes take those of the first.
    u, s, vh = over_rows.agreed(*refined_svd(r)) if found is None else found
    k = truncate(s, rank, tol) if found is None else len(s)  # once: `tol` is relative to all of A
    wide, left, right = in_double(r), in_double(u), in_double(vh)
    gap = torch.linalg.matrix_norm(wide @ right.mH - left * s)
    measured = torch.stack([gap, torch.maximum(loss_of(left), loss_of(right.mH))])
    return SVDOfR(u[:, :k], s[:k], vh[:k], *over_rows.agree(measured).tolist())


def loss_of(v: torch.Tensor, over_rows: Reduction = HERE) -> torch.Tensor:
    """``||V^H V - I||_F / sqrt(k)``, in double precision."""
    gram = over_rows.total(double_gram(v))
    gram.diagonal().sub_(1)
    return torch.linalg.matrix_norm(gram) / max(1, v.shape[1]) ** 0.5


def _svd_from_gram(
    r: torch.Tensor, rank: int | None, tol: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """SVD of a matrix in single precision, what is kept of it, from the eigenvectors of ``R^H R`` in double
    precision.

    None where that is not as accurate: ``U = R V diag(s)^-1`` loses orthogonality with the square of the
    ratio of the singular values that are kept, times the unit roundoff of double precision.
    """
    if format_of(r.dtype) is not FP32:
        return None
    wide = in_double(r)
    theta, v = converged_eigh(wide.mH @ wide)
    s, v = theta.flip(0).clamp_min(0).sqrt(), v.flip(1)
    k = truncate(s, rank, tol)
    if k == 0 or not bool(s[k - 1] >= LARGEST_RATIO**-1 * s[0]) or not s[0] > 0:
        return None
    s, v = s[:k], v[:, :k]
    return (wide @ v / s).to(r.dtype), s.float(), v.mH.to(r.dtype)


LARGEST_CORRECTION = 2.0**-26  # of singular vectors: its square is a rounding error


def refined_svd(a: torch.Tensor) -> Factors:
    """The reduced SVD of a matrix that is not wide, refined once in double precision.

    LAPACK takes off-diagonal elements for zero up to 100 u (``TOLMUL`` of DBDSQR), and methods of
    libraries on a GPU leave more. That shows where few columns leave few rounding errors.

    A step of Ogita and Aishima, "Iterative refinement for singular value decomposition based on matrix
    multiplication", J. Comput. Appl. Math. 369, 2020. Singular vectors whose singular values are so close
    that a correction would be large keep their directions; only norms and angles are corrected.

    Shapes: a (m, n), m >= n. Returns u, s, vh.

    Examples
    --------
    >>> refined_svd(torch.tensor([[2.0, 0.0], [0.0, 3.0]], dtype=torch.float64))[1]
    tensor([3., 2.], dtype=torch.float64)
    """
    u, s, vh = svd(a)
    if a.dtype != double_of(a.dtype) or not len(s):
        return u, s, vh
    v, identity = vh.mH, torch.eye(len(s), dtype=s.dtype, device=s.device)
    of_u, of_v, t = identity - u.mH @ u, identity - vh @ v, u.mH @ (a @ v)
    if t.is_complex():  # u and v determine each other's phases
        turn = phases(t.diagonal())
        u, t = u * turn, turn.conj()[:, None] * t
        of_u = identity - u.mH @ u
    s = (t.diagonal().real / (1 - (of_u + of_v).diagonal().real / 2)).clamp_min(0)
    alpha, beta = t + of_u * s, t.mH + of_v * s
    apart = s * s - s[:, None] * s[:, None]
    left, right = (s * alpha + s[:, None] * beta) / apart, (s[:, None] * alpha + s * beta) / apart
    small = torch.maximum(left.abs(), right.abs()) <= LARGEST_CORRECTION  # not where it is NaN
    u = u + u @ torch.where(small, left, of_u / 2)
    v = v + v @ torch.where(small, right, of_v / 2)
    s, order = s.sort(descending=True)
    return u[:, order], s, v[:, order].mH
