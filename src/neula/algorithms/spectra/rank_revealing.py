"""Minimum-norm least squares for matrices without full rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from neula.algorithms.krylov.batched_lstsq import MARGIN, Overdetermined, probes
from neula.algorithms.krylov.doubled_refinement import Refinement
from neula.algorithms.orthogonal.r_only import householder_r
from neula.algorithms.orthogonal.reorthogonalize import refine_qr
from neula.algorithms.scaled_problems import ScaledProblems
from neula.algorithms.spectra.inverse_norm import schatten_bounds
from neula.certificates.forward_error import enlarged, wedin_factor
from neula.certificates.rank import rank_doubt
from neula.engines import FP64
from neula.kernels import scipy_linalg
from neula.kernels.magnitudes import two_norms
from neula.kernels.polar.svd import svd
from neula.kernels.small_problems.refining import over

SURVIVED = 1e6
"""Columns whose norms differ by less are orthonormal after Cholesky QR: its Gram matrix is definite."""


@dataclass(frozen=True)
class MinimumNorm:
    y: torch.Tensor  # shape (n, k): D x, the solution of min ||B y - b||
    rank: int
    doubt: str  # why the rank is not certain; empty if it is
    # Shape (n, rank): orthonormal basis V of the row space of the part of B that counts.
    row_basis: torch.Tensor
    # Shape (rank, n): B coordinates^H is an orthonormal basis of the numerical range of B, up to u condition.
    coordinates: torch.Tensor
    norm: float  # ||B||_2
    condition: float  # sigma_1 / sigma_rank
    # Shape (k,): bound on the relative error of y as the solution of the problem of exactly this rank.
    forward_error: torch.Tensor
    residual: torch.Tensor  # shape (m, k): b - B y


def minimum_norm(problem: ScaledProblems, rcond: float) -> MinimumNorm:
    """Solution of ``min ||A x - b||`` with the smallest ``||x||``, its rank decided in ``B = A D^-1``.

    Householder QR, then the SVD of R. The rank does not depend on the units of the columns; among the
    solutions the one with the smallest ``||x||`` (not ``||D x||``) is taken. Below full rank products in
    twice the working precision take out what the condition number makes of rounding errors.

    ``problem``: a single one of any shape, D being the norms of its columns. ``rcond``: singular values
    of B below ``rcond`` times the largest count as zero.
    """
    b_matrix, b, over_rows = problem.a[0] / problem.norms[0], problem.b[0], problem.over_rows
    m, n = over_rows.count(b.shape[0]), b_matrix.shape[1]
    if m >= n or over_rows.spread:
        q, r = over_rows.merged(b_matrix, torch.linalg.qr)
        # Singular vectors are not unique: all processes take those of the first.
        u, s, vh = over_rows.agreed(*svd(r))
        u = q @ u
    else:
        u, s, vh = svd(b_matrix)
    rank, doubt = _rank(s, rcond, max(m, n))
    u, v, others = u[:, :rank], vh[:rank].mH, vh[rank:].mH
    spectrum = Spectrum.from_singular_values(s, rank, m + n)
    along = over_rows.total(u.mH @ b)
    coefficients = along / s[:rank, None]
    left = over_rows.total(u.mH @ (b - b_matrix @ (v @ coefficients)))
    coefficients = coefficients + left / s[:rank, None]
    outside = over_rows.norms(b - u @ along)[0]
    error = spectrum.coefficient_error(over(outside, s[0] * _lengths(coefficients)))
    angle = spectrum.angle
    if rank > 0:
        refined, basis, left_over = _refined(problem, u, s[:rank])
        turned = spectrum.dropped * angle + 4 * rank**0.5 * FP64.u
        # Of these coefficients: the others may be rounding errors of b alone, and far larger.
        ratio = over(outside, s[0] * _lengths(refined))
        better = left_over + spectrum.dropped * turned * wedin_factor(spectrum.condition, ratio)
        if bool(over_rows.agree((better <= error).all())):
            coefficients, v, error, angle = refined, basis, better, turned
    if rank == n:
        y = v @ coefficients
    else:
        row_space = RowSpace(v, problem.sizes_below_one)
        y = row_space.shortest(coefficients)
        error = row_space.error(coefficients, y, error, angle)
        if rank > 0 and not doubt:
            doubt = _doubt(problem, u, others, float(s[rank - 1]), y)
        if doubt:
            error = torch.full_like(error, torch.inf)
    return MinimumNorm(
        y=y,
        rank=rank,
        doubt=doubt,
        row_basis=v,
        coordinates=vh[:rank] / s[:rank, None],
        norm=float(s[0]),
        condition=spectrum.condition,
        forward_error=error,
        residual=b - b_matrix @ y,
    )


def _rank(s: torch.Tensor, rcond: float, size: int) -> tuple[int, str]:
    """How many singular values count, and which one might as well not, by the rounding errors of the SVD."""
    relative = s / s[0] if s[0] > 0 else s
    rank = int((relative > rcond).sum())
    unclear = (relative - rcond).abs() <= size * FP64.u
    if rank == 0 or not bool(unclear.any()):
        return rank, ""
    value = float(relative[unclear][0])
    return rank, (
        f"a singular value is {value:.2e} times the largest, too close to rcond = {rcond:.2e} to say whether "
        "it counts: pass another rcond"
    )


@dataclass(frozen=True)
class Spectrum:
    """Singular values, and the bounds on errors of singular vectors that they imply.

    B is known to ``eps ||B||``: ``eps`` is the backward error of the SVD. The singular vectors turn by at
    most ``eps sigma_1 / (sigma_r - sigma_(r+1))`` (Wedin), and with them what the other singular values,
    which count as zero, add to the part of B that counts (Hansen, "The truncated SVD as a method for
    regularization", BIT 27, 1987). Spaces that are not quite those of singular vectors leave a residual.
    """

    condition: float  # sigma_1 / sigma_r
    dropped: float  # sigma_(r+1) / sigma_r from above: a tiny singular value is known to eps sigma_1 only
    eps: float
    residual: float = 0.0  # ||B^H U - V S|| / sigma_r where B V = U S

    @classmethod
    def from_singular_values(cls, s: torch.Tensor, rank: int, size: int) -> Spectrum:
        eps = cls.rounding(size)
        if rank == 0:
            return cls(1.0, 0.0, eps)
        smallest = float(s[rank - 1])
        dropped = float(s[rank] + eps * s[0]) if rank < len(s) else 0.0
        return cls(float(s[0]) / smallest, dropped / smallest, eps)

    @staticmethod
    def rounding(size: int) -> float:
        """``eps`` of a matrix with so many rows and columns in sum."""
        return 4 * math.sqrt(size) * FP64.u

    @property
    def angle(self) -> float:
        """Bound on the angle by which the space of the singular vectors has turned."""
        return enlarged(self.condition * self.eps + self.residual, self.dropped)

    def coefficient_error(self, ratio: torch.Tensor) -> torch.Tensor:
        """Relative error of the coefficients of y in the singular vectors, for ``||r|| / (||B|| ||y||)``."""
        turned = self.condition * self.eps + 2 * self.dropped * self.angle
        return turned * wedin_factor(self.condition, ratio)


def _doubt(
    problem: ScaledProblems, u: torch.Tensor, others: torch.Tensor, kept: float, y: torch.Tensor
) -> str:
    """Why the rank is ambiguous, by what A makes of the directions that it drops, the columns of ``others``.

    Singular vectors err along those that count. In doubled products, what A makes of that is in the space of
    ``u``; the rest has a small relative error however small it is.
    """
    over_rows, count = problem.over_rows, others.shape[1]
    vectors = torch.cat([others, y], 1) / problem.norms[0].T
    right = torch.cat([y.new_zeros(len(u), count), problem.b[0]], 1)
    rest = problem.doubled.residual(vectors[None], right[None])[0][0]
    if problem.a_low is not None:
        rest = rest - problem.a_low[0] @ vectors
    if problem.b_low is not None:
        rest[:, count:] += problem.b_low[0]
    for _ in range(2):
        rest = rest - u @ over_rows.total(u.mH @ rest)
    q, r = over_rows.merged(rest[:, :count], torch.linalg.qr)
    left, dropped, _ = over_rows.agreed(*svd(r))
    residual = rest[:, count:]
    along, length = over_rows.total_and_norms((q @ left).mH @ residual, residual)
    return rank_doubt(kept, dropped, along, length, u.shape[1], problem.used_rows, problem.rounding)


def _refined(
    problem: ScaledProblems, u: torch.Tensor, s: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coefficients of the solution and a basis of the row space once more, with products in twice the working
    precision, and a bound on the relative errors of the coefficients.

    Columns of ``B^H U`` lie in the row space of B, whatever the errors of U, except for dropped directions.
    In a basis of it there is a problem of full rank.
    """
    norms, over_rows, doubled = problem.norms[0].T, problem.over_rows, problem.doubled
    rows = over_rows.total_of_pairs(*doubled.transposed_pair(u[None], torch.zeros_like(u)[None]))[0]
    if problem.a_low is not None:
        rows = rows + over_rows.total(problem.a_low[0].mH @ u)
    v = over_rows.agree(torch.linalg.qr(rows / norms / s)[0])
    columns = v / norms
    zero = torch.zeros_like(u)
    image, low = (-part for part in doubled.residual(columns[None], zero[None]))
    if problem.a_low is not None:
        low = low + problem.a_low[0] @ columns
    # The columns are a basis as they are; rounding them has turned it by no more than a unit roundoff.
    one = torch.ones_like(s)[None, :, None]
    r = householder_r(image, over_rows)
    system = Overdetermined(image, r, one, over_rows, low=low, b_low=problem.b_low)
    found = Refinement(system, problem.b, FP64.u).solved()
    return found.x[0], v, found.forward_error[0] + 4 * FP64.u


class RowSpace:
    """The row space of the part of A that counts, of orthonormal basis v, shape (n, rank): where the
    minimum-norm x is.

    With ``M = D V`` it is ``x = M (M^H M)^-1 c`` for the coefficients c of ``D x`` in V. The diagonal of D
    are the ``sizes``, shape (n,), which differ by the factor ``spread``. Householder's QR with pivots, which
    as many guaranteed digits of x as possible take where sizes differ, is LAPACK's on the host, and takes
    longer than all the rest: if not ``pivoted``, it is left out.
    """

    def __init__(self, v: torch.Tensor, sizes: torch.Tensor, *, pivoted: bool = True) -> None:
        self.sizes = sizes[:, None]
        counting = sizes[sizes > 0]
        self.spread = float(counting.max() / counting.min()) if len(counting) else 1.0
        self._leading = LeadingRowSpace.from_basis(v, sizes) if pivoted and self.spread > ALIKE else None
        if self._leading is not None:
            return
        if self.spread <= (ALIKE if pivoted else SURVIVED):
            self.q, self.r = refine_qr(v * self.sizes)
            self.pivots = torch.arange(v.shape[1], device=v.device)
            return
        # Rows in order of size, and columns pivoted, without which Householder QR loses the small ones (Cox
        # and Higham, "Stability of Householder QR factorization for weighted least squares problems", 1998).
        order = sizes.argsort(descending=True)
        q, self.r, self.pivots = pivoted_qr((v * self.sizes)[order])
        self.q = torch.empty_like(q)
        self.q[order] = q

    def shortest(self, coefficients: torch.Tensor) -> torch.Tensor:
        """``D x`` for the minimum-norm x with these coefficients."""
        if self._leading is not None:
            return self._leading.shortest(coefficients)
        return self.sizes * (self.q @ self._half_solve(coefficients))

    def error(
        self, coefficients: torch.Tensor, y: torch.Tensor, relative: torch.Tensor, angle: float
    ) -> torch.Tensor:
        """Relative error of ``y = D x`` by those of the coefficients and of V, to first order.

        ``dx = (M^H)^+ (dc - dM^H x) + (I - M M^+) dM (M^H M)^-1 c`` with ``dM = D dV``.
        """
        if len(coefficients) == 0:
            return torch.zeros_like(relative)
        if self._leading is not None:
            # An error relative to zero is none.
            return torch.where(y.any(0), self._leading.error(relative, angle), relative / torch.inf)
        inverse = self._half_solve(torch.eye(self.r.shape[0], dtype=y.dtype, device=y.device))
        alike = self.spread <= ALIKE
        along = self.spread if alike else schatten_bounds((self.sizes * (self.q @ inverse))[None])[1][0]
        z = self.sizes * probes(len(self.sizes), y.device, dtype=y.dtype)
        across = MARGIN * torch.linalg.matrix_norm(self.sizes * (z - self.q @ (self.q.mH @ z)))
        half = self._half_solve(coefficients)
        weights = _lengths(torch.linalg.solve_triangular(self.r, half, upper=True))
        sizes = _lengths(y)
        # Rounding errors of the solution with this basis.
        angle, relative = angle + 4 * (self.spread if alike else 1.0) * FP64.u, relative + 4 * FP64.u
        change = along * (relative * _lengths(coefficients) + angle * sizes) + across * angle * weights
        # Beyond, errors of V along large columns of A hide what small ones contribute.
        first_order = angle * torch.linalg.matrix_norm(inverse) * self.sizes.amax() <= FIRST_ORDER
        # Zero is the solution for zero in any space.
        return torch.where(first_order | (change == 0), over(change, sizes), torch.inf)

    def _half_solve(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve_triangular(self.r.mH, x[self.pivots], upper=False)


def _lengths(x: torch.Tensor) -> torch.Tensor:
    return two_norms(x, 0)


FIRST_ORDER = 0.1  # relative change of a basis up to which its square does not matter
ALIKE = 16.0  # if column norms differ by less, Cholesky QR loses at most this factor of accuracy


@dataclass(frozen=True)
class LeadingRowSpace:
    """The row space by its largest columns, where as many as there are dimensions are independent.

    ``V^H D x = c`` is ``D1 x1 + F D2 x2 = V1^-H c`` with ``F = V1^-H V2^H``. Where no column of D2 is much
    larger than one of D1, ``G = D1^-1 F D2`` is small, the minimum-norm x is ``[I G]^+ D1^-1 V1^-H c``, and
    its errors do not depend on the units of the columns.
    """

    order: torch.Tensor  # int, shape (n,): the columns of D1, then the others
    first: torch.Tensor  # shape (rank, rank): V1^-H
    rest: torch.Tensor  # shape (rank, n - rank): F
    sizes: torch.Tensor  # shape (n, 1): the diagonal of D, in order

    @classmethod
    def from_basis(cls, v: torch.Tensor, sizes: torch.Tensor) -> LeadingRowSpace | None:
        """None where the largest columns are dependent."""
        rank = v.shape[1]
        if rank in (0, len(v)):
            return None
        order = pivoted_qr((v * sizes[:, None]).mH)[2]
        inverse, info = torch.linalg.inv_ex(v[order[:rank]].mH)
        if bool(info) or not bool(inverse.isfinite().all()):
            return None
        if not float(sizes[order[rank:]].amax()) <= ALIKE * float(sizes[order[:rank]].amin()):
            return None
        return cls(order, inverse, inverse @ v[order[rank:]].mH, sizes[order, None])

    def shortest(self, coefficients: torch.Tensor) -> torch.Tensor:
        """``D x``."""
        rank, along = len(self.first), self.first @ coefficients
        first, rest = self.sizes[:rank], self.sizes[rank:]
        one = torch.eye(rank, dtype=along.dtype, device=along.device)
        q, r = torch.linalg.qr(torch.cat([one, (self.rest / first * rest.T).mH]))
        x = q[rank:] @ torch.linalg.solve_triangular(r.mH, along / first, upper=False)
        y = torch.empty(len(self.order), along.shape[1], dtype=along.dtype, device=along.device)
        y[self.order] = torch.cat([along - self.rest @ (rest * x), rest * x])
        return y

    def error(self, relative: torch.Tensor, angle: float) -> torch.Tensor:
        """Relative error of ``D x`` by those of c and of V, to first order.

        ``D1 dx1 = V1^-H (dc - dV^H D x) - F D2 dx2`` and
        ``dx2 = (I + G^H G)^-1 (dG^H x1 + G^H (dh - dG x2))`` for ``h = D1^-1 V1^-H c``, with
        ``dG = D1^-1 V1^-H dV^H [-F I]^H D2`` and ``dh = D1^-1 V1^-H (dc - dV1^H D1 h)``, x not being longer
        than h.
        """
        norm, rank = torch.linalg.matrix_norm, len(self.first)
        first, rest = self.sizes[:rank], self.sizes[rank:]
        angle, relative, along = angle + 4 * FP64.u, relative + 4 * FP64.u, float(norm(self.first, 2))
        grows = float(norm(self.first / first) * torch.hypot(norm(self.rest * rest.T), norm(rest)))
        of_rest = grows * (1.12 * angle * grows + (relative + angle * along) / 2)
        change = along * (relative + angle) + of_rest
        return change if angle * max(along, grows) <= FIRST_ORDER else torch.full_like(change, math.inf)


def pivoted_qr(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``A[:, pivots] = Q R`` by LAPACK: torch has none."""
    q, r, pivots = scipy_linalg.qr(a.resolve_conj().cpu().numpy(), mode="economic", pivoting=True)
    return tuple(torch.from_numpy(x).to(a.device) for x in (q, r, pivots.astype(np.int64)))  # type: ignore[return-value]
