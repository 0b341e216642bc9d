"""Certificates of eigenvalues and singular values: residuals, orthogonality, and the errors these allow.

Let ``R = A V - U diag(s)`` with ``||V^H V - I||_2 <= e_v < 1``, and ``||U^H U - I||_2 <= e_u`` (of a
Hermitian A, U is V and s its eigenvalues). The polar factors ``P = U (U^H U)^(-1/2)`` and ``Q`` of U and V
are orthonormal, and

    ``A Q - P diag(s) = R (V^H V)^(-1/2) + U (diag(s) (V^H V)^(-1/2) - (U^H U)^(-1/2) diag(s))``,

whose norm is at most ``||R|| / sqrt(1 - e_v) + sqrt(1 + e_u) max |s| (h(e_u) + h(e_v))`` with ``h(e) = (1 -
e)^(-1/2) - 1``. That is the *backward error*: s are exact eigenvalues (singular values) of a matrix that
differs from A by no more (Kahan; Parlett, "The Symmetric Eigenvalue Problem", 1998, theorem 11.5.1). By
Weyl's theorem no eigenvalue is off by more. By the theorem of Davis and Kahan the sine of the largest angle
between the computed and the exact invariant subspace of a cluster is at most the residual of the cluster
divided by its distance to all other eigenvalues. Singular values of A and their negatives are eigenvalues of
``[[0, A], [A^H, 0]]``, where those of a cluster may lie on both sides of others: there the sine is at most
pi/2 times the quotient (Bhatia, "Matrix Analysis", 1997, theorem VII.3.3).

An isolated eigenvalue has sharper bounds: exactly one eigenvalue is within ``||r|| / ||v||`` of it; and that
of Kato and Temple, ``|lambda - theta| <= ||r||^2 / (||v||^2 gap)`` for the Rayleigh quotient theta.

Rounding errors of the measurement are part of all bounds: as everywhere they are taken to grow with the root
of the number of terms (:func:`neula.certificates.bounds.measurement_error`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from neula.certificates.bounds import CONSTANT, measurement_error, orthogonality_2norm_bound
from neula.certificates.forward_error import where
from neula.certificates.orthogonality import COLUMNS, measured_again
from neula.engines import Format
from neula.engines.formats import in_double
from neula.kernels.magnitudes import two_norms
from neula.kernels.precision import ONE_THREAD, exact_matmul

SMALL_ANGLE = 0.1  # eigenvectors whose computed directions may be off by a larger sine belong to one cluster


DIRECT = 6 * COLUMNS
"""Columns up to which orthogonality is measured by ``V^H V``, and decompositions are replayed on a GPU. On a
CPU ``V^H V`` takes less time than products with vectors; on a GPU nothing waits for the host."""


@dataclass(frozen=True)
class SpectralBounds:
    """Largest accepted errors of a decomposition ``A V = U diag(s)``.

    ``||R||_F / ||A||_F`` may be ``30 sqrt(n) u``: the threshold of LAPACK's tests, 30, for n orthogonal
    transformations whose rounding errors are independent (Higham and Mary 2019). QR iterations for singular
    values also neglect elements of a bidiagonal matrix: LAPACK's ``bdsqr`` those up to ``u^(7/8)``, but at
    least 10 u and at most 100 u. Orthogonality is measured in the 2-norm
    (:func:`~neula.certificates.bounds.orthogonality_2norm_bound`).
    """

    residual: float
    orthogonality: float

    @classmethod
    def for_order(cls, target: Format, n: int, *, symmetric: bool) -> SpectralBounds:
        """Bounds for n eigenvalues, or else for singular values, to the accuracy of a format."""
        neglected = 0.0 if symmetric else min(max(target.u**-0.125, 10.0), 100.0)
        residual = (CONSTANT * max(n, 1) ** 0.5 + neglected) * target.u
        return cls(residual, orthogonality_2norm_bound(target, max(n, 1)))


def a_priori_error(u: float, n: int) -> float:
    """Bound on errors of eigenvalues without eigenvectors, relative to ``||A||_2``: ``30 n u``. Orthogonal
    reductions are backward stable with a modest multiple of ``n u`` (Wilkinson 1965; LAPACK's tests accept
    30).
    """
    return CONSTANT * max(n, 1) * u


class SpectralMeasures(NamedTuple):
    """Measured errors of batches of decompositions ``A V = U diag(s)``, in double precision."""

    residuals: torch.Tensor  # shape (batch, k): ||A v - s u|| of each column, with rounding errors
    # Shape (batch, k): |v^H (A v - s v)| / ||v||^2, likewise; for eigenvalues, whose U is V.
    quotients: torch.Tensor
    total: torch.Tensor  # shape (batch,): ||A V - U diag(s)||_F, likewise
    orthogonality: torch.Tensor  # shape (batch,): bound on ||V^H V - I||_2 and ||U^H U - I||_2
    size: torch.Tensor  # shape (batch,): ||A||_F

    @property
    def numbers(self) -> torch.Tensor:
        return torch.stack([self.total / torch.where(self.size > 0, self.size, 1.0), self.orthogonality])


def measured(
    a: torch.Tensor, u: torch.Tensor, s: torch.Tensor, v: torch.Tensor, size: torch.Tensor | None = None
) -> SpectralMeasures:
    """Measure decompositions in the precision of A, which is to be the wider one. Squares of A, shape
    (batch, m, n), neither overflow nor underflow. U may be V itself; s is monotone. ``size`` is ``||A||_F``.
    """
    unit = rounding_error(a.shape[2], a.dtype)
    size = in_double(two_norms(a, 1, 2)) if size is None else size
    right = v.to(a.dtype)
    left = right if u is v else u.to(a.dtype)
    # By rows of the transposes, which are contiguous where vectors come from LAPACK.
    rows = left.mT
    r = exact_matmul(right.mT, a.mT).addcmul_(rows, s.to(a.dtype)[:, :, None], value=-1.0)
    lengths = in_double(two_norms(r, 2))
    of_difference = 2 * measurement_error(1, a.dtype.to_real()) * size
    ends = s[:, :: max(s.shape[1] - 1, 1)].abs().amax(1)
    rounding = (unit * in_double(ends) + of_difference)[:, None]  # of each column
    lost = lost_orthogonality(right, a.dtype)
    quotients = lengths
    if u is v:
        quotients = torch.linalg.vecdot(rows, r).abs() / (1 - lost.clamp(max=0.5))[:, None] + rounding
    else:
        lost = torch.maximum(lost, lost_orthogonality(left, a.dtype))
    total = two_norms(lengths, 1) + unit * size + of_difference
    return SpectralMeasures(lengths + rounding, quotients, total, lost, size)


def measured_alone(
    a: np.ndarray, u: np.ndarray, s: np.ndarray, v: np.ndarray, size: float, dtype: torch.dtype
) -> tuple[float, float, Callable[[], SpectralMeasures]]:
    """Total and orthogonality, and later all measures, as :func:`measured` of one matrix on a CPU, in the
    dtype of A, which all have: NumPy starts in a fifth of the time.
    """
    unit, of_difference = rounding_error(a.shape[1], dtype), 2 * measurement_error(1, dtype.to_real()) * size
    # By rows of the transposes, which are contiguous where vectors come from LAPACK.
    right, left = v.T, u.T
    r = _product(right, a.T)
    r -= left * s[:, None]
    lengths = np.sqrt(_inner(r, r).real.astype(np.float64, copy=False))
    rounding = unit * float(max(abs(s[0]), abs(s[-1]))) + of_difference
    lost, quotients = lost_alone(right, dtype), lengths
    if u is v:
        quotients = np.abs(_inner(left, r)) / (1 - min(lost, 0.5)) + rounding
    else:
        lost = max(lost, lost_alone(left, dtype))
    total = math.sqrt(lengths @ lengths) + unit * size + of_difference

    def measures() -> SpectralMeasures:
        numbers = torch.from_numpy(np.array([[total], [lost], [size]]))
        columns = torch.from_numpy(np.stack([lengths + rounding, quotients]))[:, None]
        return SpectralMeasures(*columns, *numbers)

    return total, lost, measures


def _inner(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.einsum("ij,ij->i", x.conj(), y)


def _product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if x.size * y.shape[1] <= ONE_THREAD:
        return x @ y
    return torch.mm(torch.from_numpy(x), torch.from_numpy(y)).numpy()


def lost_alone(rows: np.ndarray, dtype: torch.dtype) -> float:
    """:func:`lost_orthogonality` of the columns of one ``Q^T``, which has that dtype."""
    k, n = rows.shape
    if k > DIRECT:
        return float(lost_orthogonality(torch.from_numpy(rows).mT[None], dtype))
    lost = _product(rows, rows.conj().T)
    lost.flat[:: k + 1] -= 1.0
    return math.sqrt(np.einsum("ij,ij->", lost.conj(), lost).real) + rounding_error(n, dtype)


def lost_orthogonality(q: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Bound on ``||Q^H Q - I||_2`` of each Q, shape (batch,), measured in a precision."""
    q = q.to(wide)
    if q.shape[2] <= DIRECT:
        lost = exact_matmul(q.mH, q)
        lost.diagonal(0, 1, 2).sub_(1.0)
        lost = two_norms(lost, 1, 2)
    else:
        lost = measured_again(q, 0.0)
    return in_double(lost) + rounding_error(q.shape[1], wide)


@lru_cache(maxsize=512)
def rounding_error(n: int, dtype: torch.dtype) -> float:
    """Of n products and their sum; either part of a complex product is two products."""
    terms, one = (4 * n, 4) if dtype.is_complex else (n, 1)
    return measurement_error(terms, dtype.to_real()) + measurement_error(one, dtype.to_real())


class SpectralErrors(NamedTuple):
    """Bounds on errors of eigenvalues or singular values, and of their vectors, shape (batch, k) each."""

    errors: torch.Tensor  # of the values
    gaps: torch.Tensor  # distance of the cluster of a value to all values outside of it
    clusters: torch.Tensor  # int64: number of the cluster
    # Sine of the largest angle between the computed and the exact subspace of the cluster.
    vector_errors: torch.Tensor


def consistency(a: torch.Tensor, s: torch.Tensor, *, symmetric: bool) -> torch.Tensor:
    """Lower bound on the relative backward error of all values, without vectors, shape (batch,): a change of
    A by ``d ||A||_F`` changes the sum of its eigenvalues by at most ``sqrt(n) d ||A||_F``, and the sum of
    the squares of eigenvalues or singular values by about ``2 d ||A||_F^2``.
    """
    trace = in_double(a.diagonal(0, 1, 2).real).sum(1) if symmetric else None
    return inconsistency(in_double(s), in_double(two_norms(a, 1, 2)), trace)


def inconsistency(s: Any, size: Any, trace: Any = None) -> Any:
    """:func:`consistency` from the norms and traces of matrices with values ``s``, shape (..., n)."""
    squares = size * size
    whole = where(squares > 0, squares, 1.0)
    off = abs((s * s).sum(-1) - squares) / (2 * whole)
    if trace is None:
        return off
    of_trace = abs(s.sum(-1) - trace) / (s.shape[-1] * whole) ** 0.5
    return where((off >= of_trace) | (off != off), off, of_trace)  # NaN where one of them is


def spectral_errors(
    s: torch.Tensor,
    found: SpectralMeasures,
    *,
    symmetric: bool,
    edges: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    a_priori: torch.Tensor | None = None,
    moved: torch.Tensor | None = None,
) -> SpectralErrors:
    """Errors that are possible, given what was measured.

    ``s``, shape (batch, k): monotone. ``symmetric``: whether s are eigenvalues. ``edges``, shape (batch,):
    what lies before the first and after the last value: others that were computed, or the zero of a
    rectangular matrix; by default nothing does. ``a_priori``, shape (batch,): if only a part of the
    eigenvalues was computed: bound on the errors of all of them, on which their positions rest. ``moved``,
    shape (batch, k): norms of changes of the computed vectors after the measurement.

    >>> a = torch.diag(torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64))[None]
    >>> v, s = torch.eye(3, dtype=torch.float64)[None], a.diagonal(0, 1, 2)
    >>> found = spectral_errors(s, measured(a, v, s, v), symmetric=True)
    >>> found.clusters.tolist(), found.gaps.tolist()
    ([[0, 1, 1]], [[1.0, 1.0, 1.0]])
    """
    s = in_double(s)
    if not s.numel():
        return SpectralErrors(s, s, s.long(), s)
    backward = backward_error(s, found)[:, None]
    columns = found.residuals / (1 - found.orthogonality.clamp(max=0.99))[:, None].sqrt()
    reach = columns if symmetric else backward.expand_as(s)
    steps = (s[:, 1:] - s[:, :-1]).abs()
    near = backward + torch.maximum(reach[:, 1:], reach[:, :-1]) / SMALL_ANGLE
    apart = ~(steps <= near)  # NaN stands alone
    clusters = torch.cat([apart.new_zeros(len(s), 1), apart], 1).long().cumsum(1)
    outer = [
        s.new_full((len(s), 1), torch.inf) if x is None else (s[:, [end]] - x[:, None]).abs()
        for x, end in zip(edges, (0, -1), strict=True)
    ]
    between = torch.where(apart, steps, torch.inf)
    gaps = torch.minimum(torch.cat([outer[0], between], 1), torch.cat([between, outer[1]], 1))
    gaps = _of_clusters(gaps, clusters, "amin", torch.inf)
    spread = _of_clusters(s, clusters, "amax", -torch.inf) - _of_clusters(s, clusters, "amin", torch.inf)
    errors = backward.expand_as(s) if a_priori is None else a_priori[:, None].expand_as(s)
    clear = (gaps - errors).clamp_min(0.0)
    if symmetric:
        off = _of_clusters(columns.square(), clusters, "sum", 0.0).sqrt()
        off = off + spread * _h(found.orthogonality)[:, None]
    else:
        off = math.pi / 2 * reach
    sines = off / clear
    if moved is not None:
        shortest = (1 - found.orthogonality.clamp(max=1.0)).sqrt()[:, None]
        sines = sines + _of_clusters(moved.square(), clusters, "sum", 0.0).sqrt() / shortest
    vector_errors = torch.where(gaps.isinf(), 0.0, sines.clamp(max=1.0).nan_to_num(1.0))
    if a_priori is not None:
        clear = (clear - errors).clamp_min(0.0)
    if symmetric:
        alone = (_of_clusters(torch.ones_like(s), clusters, "sum", 0.0) == 1) & (columns < clear)
        temple = found.quotients + columns.square() / (clear - found.quotients).clamp_min(0.0)
        sharper = torch.minimum(columns, temple.nan_to_num(torch.inf))
        errors = torch.where(alone, torch.minimum(errors, sharper), errors)
    return SpectralErrors(errors, gaps, clusters, vector_errors)


def backward_error(s: torch.Tensor, found: SpectralMeasures, *, frobenius: bool = False) -> torch.Tensor:
    """Norm of the change of A whose exact eigenvalues or singular values are s, shape (batch,)."""
    if frobenius:
        norm = torch.linalg.vector_norm(s, dim=1)
    else:
        norm = s.abs().amax(1) if s.shape[1] else s.new_zeros(len(s))
    error = changed(norm, found.total, found.orthogonality)
    return torch.where(found.orthogonality < 1, error, torch.inf).nan_to_num(torch.inf, posinf=torch.inf)


def changed(norm: Any, total: Any, lost: Any) -> Any:
    """The backward error for a norm of the values, a total residual, and orthogonality lost, below 1."""
    return total / (1 - lost) ** 0.5 + 2 * (1 + lost) ** 0.5 * norm * ((1 - lost) ** -0.5 - 1)


def _h(lost: torch.Tensor) -> torch.Tensor:
    return torch.where(lost < 1, (1 - lost).rsqrt() - 1, torch.inf)


def _of_clusters(x: torch.Tensor, clusters: torch.Tensor, reduce: str, start: float) -> torch.Tensor:
    """A sum or an extreme over each cluster, at the place of each of its members."""
    total = torch.full_like(x, start).scatter_reduce(1, clusters, x, reduce)
    return total.gather(1, clusters)
