"""Singular value decompositions that are more accurate than LAPACK's in double precision.

LAPACK takes elements beside the diagonal for zero up to 100 u (``TOLMUL`` of DBDSQR), and methods of
libraries on a GPU leave more. That shows where few columns leave few rounding errors.
"""

from __future__ import annotations

import torch

from neula.engines.formats import double_of
from neula.kernels.phases import phases
from neula.kernels.polar.svd import Factors, svd

LARGEST_CORRECTION = 2.0**-26
"""Of singular vectors: its square is a rounding error."""


def refined_svd(a: torch.Tensor) -> Factors:
    """The reduced SVD of a matrix that is not wide, refined once in double precision.

    A step of Ogita and Aishima, "Iterative refinement for singular value decomposition based on matrix
    multiplication", J. Comput. Appl. Math. 369, 2020. Singular vectors whose singular values are so close
    that a correction would be large keep their directions; only norms and angles are corrected.

    Parameters
    ----------
    a : Tensor, shape (m, n), m >= n

    Returns
    -------
    u, s, vh : Tensor, shapes (m, n), (n,) and (n, n)

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
