"""Minimum-norm least squares below full rank without an SVD: a complete orthogonal decomposition, measured.

A basis Z of the row space of the part of B that counts is all it takes. However it was found, with
``W = B Z = Q R`` and ``F = B (I - Z Z^H)``

    sigma_min(R) <= sigma_r(B),      sigma_(r+1)(B) <= ||F||,

since W is B on a space of dimension r, and ``B Z Z^H`` a matrix of rank r. If the threshold lies between the
two, r is the rank. And the spaces of Q and Z are those of the leading singular vectors up to the angle
``||B^H Q - Z R^H|| / (sigma_min(R) - ||F||)`` (Wedin, "Perturbation bounds in connection with singular value
decomposition", BIT 12, 1972): the truncated problem is solved, which singular values define, and not one that
pivots define.

Pivoted QR finds a basis Q of the columns; ``B^H Q`` then spans the rows, with an angle of second order in
what is dropped (Fierro and Bunch, "Bounding the subspaces from rank revealing two-sided orthogonal
decompositions", SIAM J. Matrix Anal. Appl. 16, 1995). Where that is more than rounding errors, a few steps of
subspace iteration do the rest: each multiplies the angle by ``(sigma_(r+1) / sigma_r)^2``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from neula.algorithms.krylov.batched_lstsq import MARGIN, probes
from neula.algorithms.orthogonal.cholesky_qr import upper_cholesky
from neula.algorithms.orthogonal.pivots import column_basis, gram_noise
from neula.algorithms.orthogonal.r_only import lower_gram
from neula.algorithms.orthogonal.reorthogonalize import refine_qr
from neula.algorithms.scaled_problems import ScaledProblems
from neula.algorithms.spectra.rank_revealing import MinimumNorm, RowSpace, Spectrum
from neula.certificates.forward_error import SURE
from neula.certificates.rank import rank_doubt
from neula.certificates.residuals import goes_on
from neula.engines import FP64, Engine
from neula.kernels.cholesky.pivoted_cholesky import pivoted_cholesky
from neula.kernels.magnitudes import two_norms
from neula.kernels.polar.svd import converged_eigvalsh
from neula.kernels.small_problems.refining import over
from neula.kernels.triangular_inverse import triangular_inverse

SEPARATED = 1e3
"""Factor between what columns that depend on others leave of the diagonal of a Gram matrix, and what others
do."""

STEPS = 4  # of subspace iteration at most. With a gap of ten they leave 1e-8 of the angle

NEAR = 30.0
"""Singular values that are larger or smaller than the threshold by such a factor have no part in those that
are near it."""

GRADUAL = 3.0
"""Factor between diagonal elements on both sides of the threshold, below which there hardly is a gap."""

UNWANTED = 3.0
"""Factor below the threshold at which columns, as far as they are not in the span of others, do not count."""

BROKEN_DOWN = "a factorization broke down"

POWERS = 3
"""Steps of the power method from :data:`~neula.algorithms.krylov.batched_lstsq.PROBES` vectors: what they say
is taken :data:`~neula.algorithms.krylov.batched_lstsq.MARGIN` times."""

REFINEMENTS = 2  # of the coefficients, with true residuals: Q is orthonormal to a few unit roundoffs


@dataclass(frozen=True)
class Subspaces:
    """``B Z = Q R``, and what was measured."""

    z: torch.Tensor  # shape (n, rank): orthonormal columns
    q: torch.Tensor  # shape (m, rank): orthonormal columns
    # r, inverse, shape (rank, rank): upper triangular, and its inverse.
    r: torch.Tensor
    inverse: torch.Tensor
    # largest, smallest: bounds from below and above on ||B||_2, and on sigma_rank(B) from below.
    largest: tuple[float, float]
    smallest: float
    dropped: float  # ||B (I - Z Z^H)|| from above
    residual: float  # ||B^H Q - Z R^H||_F

    @property
    def rank(self) -> int:
        return self.z.shape[1]


def complete_orthogonal(
    problem: ScaledProblems, rcond: float, engine: Engine, width: int, *, gram: torch.Tensor | None = None
) -> MinimumNorm | str:
    """Solution of ``min ||A x - b||`` with the smallest ``||x||``, its rank decided in ``B = A D^-1``.

    Returns the solution of a single problem, D being the norms of its columns, or why there is a doubt that
    only an SVD can settle. Singular values of B below ``rcond`` times the largest count as zero. The engine
    multiplies in float64; blocks of pivots have ``width`` columns. ``gram`` is the lower triangle of the Gram
    matrix of A, or of A with columns in other units, where it is known.
    """
    b_matrix = problem.a[0] / problem.norms[0]
    separated = _separated_rows(b_matrix, gram)
    found = None if separated is None else _subspaces(b_matrix, *separated)
    basis_of = partial(column_basis, engine=engine, width=width)
    if found is not None and not _doubt(found, b_matrix.shape, rcond):
        return _beyond_doubt(problem, b_matrix, found, basis_of)
    # The norm of the remainder of all n columns is then below the threshold.
    basis = basis_of(b_matrix, rcond / (UNWANTED * b_matrix.shape[1] ** 0.5))
    z, t = _graded_qr(b_matrix.mH @ basis)
    count = basis.shape[1]
    del basis
    sizes = t.diagonal().abs()
    rank = int((sizes > rcond * sizes.amax()).sum()) if count else 0
    if rank in (0, min(b_matrix.shape)):
        return f"the rank seems to be {rank}"
    gradual = rank < count and bool(sizes[rank] * GRADUAL > sizes[rank - 1])
    without = _without_gap(problem, b_matrix, z, rcond) if gradual else None
    if without is not None:
        return without
    found = _subspaces(b_matrix, z[:, :rank])
    if found is None:
        return BROKEN_DOWN
    doubt = _doubt(found, b_matrix.shape, rcond)
    if not doubt:
        return _beyond_doubt(problem, b_matrix, found, basis_of)
    return (None if gradual else _without_gap(problem, b_matrix, z, rcond)) or doubt


def _separated_rows(
    b_matrix: torch.Tensor, gram: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Basis Z of the row space, and R of B Z, where a Gram matrix tells which columns depend on others.

    Its Cholesky factorization squares singular values. With pivots, columns that depend on those before leave
    rounding errors on its diagonal. Where all before leave much more, their rows of R span the row space.
    None where there is no such gap.

    Rounding errors turn them. A step of subspace iteration with the Gram matrix leaves ``u cond(B Z)^2``.
    """
    m, n = b_matrix.shape
    if m < n:
        return None
    if gram is None:
        gram = lower_gram(b_matrix[None])[0]
    else:
        units = gram.diagonal().real.sqrt()
        units = torch.where(units > 0, units, 1.0)
        gram = gram / units / units[:, None]
    gram = gram.tril() + gram.tril(-1).mH
    noise = gram_noise(m, float(torch.linalg.matrix_norm(gram)))
    r, pivots, left = pivoted_cholesky(gram.clone(), noise)
    if not len(r):
        return None
    sizes = r.gather(1, pivots[:, None])[:, 0].abs().square()
    following = torch.cat([sizes[1:], sizes.new_full((1,), max(left, FP64.u * noise))])
    gap, place = (sizes / following).max(0)
    wide = (gap > SEPARATED) & (sizes[place] > SEPARATED * noise)
    usable, last = torch.stack([wide, place]).tolist()
    if not usable or last + 1 == n:
        return None
    z = _graded_qr(r[: last + 1].mH)[0]
    rows = gram @ z
    square = upper_cholesky(z.mH @ rows)[0]
    # Nearly orthonormal, so that what makes it so changes R by as little.
    return refine_qr(torch.cholesky_solve(rows.mH, square, upper=True).mH)[0], square


def _graded_qr(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """QR of a matrix whose columns are in order of size, and apart from that not ill-conditioned: Cholesky QR
    with columns of norm 1. A library that reflects column by column takes ten times as long on a GPU.
    """
    sizes = two_norms(a, 0)
    sizes = torch.where(sizes > 0, sizes, 1.0)
    q, r = refine_qr(a / sizes)
    if not bool(r.diagonal().isfinite().all()):
        return torch.linalg.qr(a)
    return q, r * sizes


def _subspaces(b_matrix: torch.Tensor, z: torch.Tensor, r: torch.Tensor | None = None) -> Subspaces | None:
    """Improve a basis of the row space, whose vectors are in order of what B makes of them unless an R of
    B Z is known; None where that breaks down.
    """
    eps, found = Spectrum.rounding(sum(b_matrix.shape)), None
    for _ in range(STEPS):
        q, r = _graded_qr(b_matrix @ z) if r is None else refine_qr(b_matrix @ z, r)
        if not bool(r.diagonal().isfinite().all()):
            return None
        rows = b_matrix.mH @ q
        before, found = found, _measured(b_matrix, z, q, r, rows)
        last = math.inf if before is None else before.residual
        if found.dropped >= found.smallest or not goes_on(found.residual, last, eps * found.largest[1]):
            break
        # Nearly orthonormal: B^H Q = Z R^H up to the residual.
        z = refine_qr(rows @ found.inverse.mH)[0]
    assert found is not None
    return found if before is None or found.residual <= before.residual else before


def _measured(
    b_matrix: torch.Tensor, z: torch.Tensor, q: torch.Tensor, r: torch.Tensor, rows: torch.Tensor
) -> Subspaces:
    inverse = triangular_inverse(r[None], upper=True)[0]
    numbers = [
        *norm_bounds(r),
        norm_bounds(inverse)[1].reciprocal(),
        MARGIN * _norm_outside(b_matrix, z),
        torch.linalg.matrix_norm(rows - z @ (z.mH @ rows)),
    ]
    low, high, smallest, dropped, residual = torch.stack(numbers).tolist()
    return Subspaces(z, q, r, inverse, (low, high + dropped), smallest, dropped, residual)


def norm_bounds(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``||A||_2`` from below and from above, within ``n^(1/8)``: from Schatten norms, by two products."""
    norm = torch.linalg.matrix_norm
    size = norm(a)
    gram = (a.mH / size) @ (a / size)
    square = norm(gram @ gram)
    return size * (square / norm(gram)).sqrt(), size * square.sqrt().sqrt()


def _norm_outside(b_matrix: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """``||B (I - Z Z^H)||_2`` from below, by the power method from several vectors."""
    x = probes(len(z), z.device, dtype=z.dtype)
    for step in range(POWERS):
        # Rounding errors of a projection, made unit vectors, may lie along Z again.
        for _ in range(2):
            x = x - z @ (z.mH @ x)
            x = x / two_norms(x, 0).clamp_min(torch.finfo(x.dtype).tiny)
        image = b_matrix @ (x - z @ (z.mH @ x))
        if step + 1 < POWERS:
            x = b_matrix.mH @ image
    return two_norms(image, 0).amax()


def _beyond_doubt(
    problem: ScaledProblems,
    b_matrix: torch.Tensor,
    found: Subspaces,
    basis_of: Callable[[torch.Tensor, float], torch.Tensor],
) -> MinimumNorm | str:
    """The solution, or why its rank is ambiguous: by a basis of what is real of B beside Z."""
    solution, q, norm = _solution(problem, b_matrix, found), found.q, torch.linalg.vector_norm
    least, rows = problem.rounding, problem.used_rows
    real = q[:, :0]
    if found.dropped > least:
        rest = b_matrix - (b_matrix @ found.z) @ found.z.mH
        rest = rest - q @ (q.mH @ rest)
        real = basis_of(rest, least / float(norm(rest, dim=0).amax()))
    along, length = real.mH @ solution.residual, norm(solution.residual, dim=0)
    dropped = length.new_full((real.shape[1],), found.dropped)
    return rank_doubt(found.smallest, dropped, along, length, found.rank, rows, least) or solution


def _doubt(found: Subspaces, shape: torch.Size, rcond: float) -> str:
    """Empty if the threshold lies between what counts and what does not, rounding errors included."""
    eps = Spectrum.rounding(sum(shape))
    low, high = found.largest
    counts = found.smallest - eps * high > rcond * high
    drops = found.dropped + eps * high < rcond * low
    if counts and drops:
        return ""
    return (
        f"the singular values number {found.rank} and {found.rank + 1} are above {found.smallest / high:.1e} "
        f"and below {found.dropped / low:.1e} times the largest: too wide a range for rcond = {rcond:.1e}"
    )


def _without_gap(
    problem: ScaledProblems, b_matrix: torch.Tensor, z: torch.Tensor, rcond: float
) -> MinimumNorm | None:
    """A solution without a guaranteed digit where singular values fall through the threshold without a gap.

    Nothing has a digit to offer there: the singular vectors on both sides of the threshold are those of
    rounding errors. Singular values are only estimated, since all that they decide is that there is no need
    for an SVD. None if there may be a gap. Z, shape (n, k), is a basis of all rows, in order of what B makes
    of them.
    """
    q, r = _graded_qr(b_matrix @ z)
    if not bool(r.isfinite().all()):
        return None
    near = _near_threshold(r, rcond)
    if near is None:
        return None
    rank, above, below = near
    dropped, eps = below / above, Spectrum.rounding(sum(b_matrix.shape))
    # Remaining error after an SVD whose row space is refined once with doubled products.
    if dropped < 1 and not 2 * dropped**2 * eps / (above * (1 - dropped)) > 2 * SURE:
        return None
    q, z, r = q[:, :rank], z[:, :rank], r[:rank, :rank]
    found = _solution(problem, b_matrix, _measured(b_matrix, z, q, r, b_matrix.mH @ q), pivoted=False)
    doubt = (
        f"the singular values number {rank} and {rank + 1} are about {above:.2e} and {below:.2e} times the "
        f"largest, with no gap at rcond = {rcond:.2e}: pass another rcond, or damp="
    )
    return replace(found, doubt=doubt, forward_error=torch.full_like(found.forward_error, torch.inf))


def _near_threshold(r: torch.Tensor, rcond: float) -> tuple[int, float, float] | None:
    """The rank, and the singular values before and after the threshold, relative to the largest, estimated.

    Two steps of the QR algorithm without shifts bring the diagonal near the singular values (Stewart, "The
    QLP approximation to the singular value decomposition", SIAM J. Sci. Comput. 20, 1999). Those near the
    threshold are then the singular values of a block.
    """
    for _ in range(2):
        r = _graded_qr(r.mH)[1]
    sizes = r.diagonal().abs()
    relative = sizes / sizes.amax()
    first = int((relative > NEAR * rcond).sum())
    last = int((relative > rcond / NEAR).sum())
    if first == last:
        return None
    # Their squares differ by so little that those of the Gram matrix have the digits that are requested.
    block = r[first:last, first:last] / sizes.amax()
    near = converged_eigvalsh(block.mH @ block).flip(0).clamp_min(0).sqrt()
    counting = int((near > rcond).sum())
    if counting in (0, len(near)):
        return None
    return first + counting, float(near[counting - 1]), float(near[counting])


def _solution(
    problem: ScaledProblems, b_matrix: torch.Tensor, found: Subspaces, *, pivoted: bool = True
) -> MinimumNorm:
    b, z, q = problem.b[0], found.z, found.q
    coefficients = torch.zeros(found.rank, b.shape[1], dtype=b.dtype, device=b.device)
    residual = b
    for _ in range(REFINEMENTS + 1):
        coefficients = coefficients + found.inverse @ (q.mH @ residual)
        residual = b - b_matrix @ (z @ coefficients)
    length = torch.linalg.vector_norm
    high, smallest = found.largest[1], found.smallest
    eps = Spectrum.rounding(sum(b_matrix.shape))
    spectrum = Spectrum(
        condition=high / smallest,
        dropped=(found.dropped + eps * high) / smallest,
        eps=eps,
        residual=found.residual / smallest,
    )
    size = length(coefficients, dim=0)
    left = over(length(found.inverse @ (q.mH @ residual), dim=0), size)
    error = left + spectrum.coefficient_error(over(length(residual, dim=0), found.largest[0] * size))
    row_space = RowSpace(z, problem.sizes_below_one, pivoted=pivoted)
    y = row_space.shortest(coefficients)
    return MinimumNorm(
        y=y,
        rank=found.rank,
        doubt="",
        row_basis=z,
        coordinates=found.inverse.mH @ z.mH,
        norm=found.largest[0],
        condition=spectrum.condition,
        forward_error=row_space.error(coefficients, y, error, spectrum.angle),
        residual=b - b_matrix @ y,
    )
