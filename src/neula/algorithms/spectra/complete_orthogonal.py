"""Minimum-norm least squares below full rank without an SVD: a complete orthogonal decomposition, measured.

A basis Z of the row space of the part of B that counts is all it takes. However it was found, with
``W = B Z = Q R`` and ``F = B (I - Z Z^T)``

    sigma_min(R) <= sigma_r(B),      sigma_(r+1)(B) <= ||F||,

since W is B on a space of dimension r, and ``B Z Z^T`` a matrix of rank r. If the threshold lies between the
two, r is the rank. And the spaces of Q and Z are those of the leading singular vectors up to the angle
``||B^T Q - Z R^T|| / (sigma_min(R) - ||F||)`` (Wedin, "Perturbation bounds in connection with singular value
decomposition", BIT 12, 1972): the truncated problem is solved, which singular values define, and not one that
pivots define.

Pivoted QR finds a basis Q of the columns; ``B^T Q`` then spans the rows, with an angle of second order in
what is dropped (Fierro and Bunch, "Bounding the subspaces from rank revealing two-sided orthogonal
decompositions", SIAM J. Matrix Anal. Appl. 16, 1995). Where that is more than rounding errors, a few steps of
subspace iteration do the rest: each multiplies the angle by ``(sigma_(r+1) / sigma_r)^2``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.algorithms.krylov.batched_lstsq import MARGIN, probes
from neula.algorithms.orthogonal.pivots import sketched_pivots
from neula.algorithms.orthogonal.reorthogonalize import refine_qr
from neula.algorithms.spectra.rank_revealing import Deficient, MinimumNorm, RowSpace, Spectrum
from neula.certificates.backward_error import over
from neula.engines import Engine
from neula.kernels.triangular_inverse import triangular_inverse

STEPS = 4
"""Of subspace iteration at most. With a gap of ten they leave 1e-8 of the angle."""

POWERS = 3
"""Steps of the power method from :data:`~neula.algorithms.krylov.batched_lstsq.PROBES` vectors: what they say
is taken :data:`~neula.algorithms.krylov.batched_lstsq.MARGIN` times."""

REFINEMENTS = 2
"""Of the coefficients, with true residuals: Q is orthonormal to a few unit roundoffs."""


@dataclass(frozen=True)
class Subspaces:
    """``B Z = Q R``, and what was measured.

    Attributes
    ----------
    z : Tensor, shape (n, rank)
        Orthonormal columns.
    q : Tensor, shape (m, rank)
        Orthonormal columns.
    r, inverse : Tensor, shape (rank, rank)
        Upper triangular, and its inverse.
    largest, smallest : tuple of float
        Bounds from below and above on ``||B||_2``, and on ``sigma_rank(B)`` from below.
    dropped : float
        ``||B (I - Z Z^T)||`` from above.
    residual : float
        ``||B^T Q - Z R^T||_F``.
    """

    z: torch.Tensor
    q: torch.Tensor
    r: torch.Tensor
    inverse: torch.Tensor
    largest: tuple[float, float]
    smallest: float
    dropped: float
    residual: float

    @property
    def rank(self) -> int:
        """Dimension."""
        return self.z.shape[1]


def complete_orthogonal(problem: Deficient, rcond: float, engine: Engine, width: int) -> MinimumNorm | str:
    """Solution of ``min ||A x - b||`` with the smallest ``||x||``, its rank decided in ``B = A D^-1``.

    Parameters
    ----------
    problem : Deficient
    rcond : float
        Singular values of B below ``rcond`` times the largest count as zero.
    engine : Engine
        Multiplies, in float64.
    width : int
        Columns of a block of pivots.

    Returns
    -------
    MinimumNorm or str
        Or why there is a doubt that only an SVD can settle.
    """
    b_matrix = problem.a / problem.norms
    work = engine.empty(*b_matrix.shape).copy_(b_matrix)
    count = sketched_pivots(work, engine, width)[1]
    found = _subspaces(b_matrix, work[:, :count], rcond)
    del work
    if isinstance(found, str):
        return found
    return _decided(found, b_matrix.shape, rcond) or _solution(problem, b_matrix, found)


def _subspaces(b_matrix: torch.Tensor, q: torch.Tensor, rcond: float) -> Subspaces | str:
    """Spaces of as many dimensions as singular values seem to count, which are then improved."""
    m, n = b_matrix.shape
    rows = b_matrix.T @ q
    z, t = torch.linalg.qr(rows)
    sizes = t.diagonal().abs()
    rank = int((sizes > rcond * sizes.amax()).sum()) if len(sizes) else 0
    if rank in (0, min(m, n)):
        return f"the rank seems to be {rank}"
    z, r = z[:, :rank], torch.linalg.qr(t[:rank, :rank].T, mode="r")[1]
    eps, found = Spectrum.rounding(m + n), None
    for _ in range(STEPS):
        q, r = refine_qr(b_matrix @ z, r)
        if not bool(r.diagonal().isfinite().all()):
            return "a factorization broke down"
        rows = b_matrix.T @ q
        before, found = found, _measured(b_matrix, z, q, r, rows)
        enough = found.residual <= eps * found.largest[1]
        if enough or (before is not None and not found.residual < 0.5 * before.residual):
            break
        # Nearly orthonormal: B^T Q = Z R^T but for the residual.
        z = refine_qr(rows @ found.inverse.T, torch.eye(rank, dtype=z.dtype, device=z.device))[0]
    assert found is not None
    return found if before is None or found.residual <= before.residual else before


def _measured(
    b_matrix: torch.Tensor, z: torch.Tensor, q: torch.Tensor, r: torch.Tensor, rows: torch.Tensor
) -> Subspaces:
    inverse = triangular_inverse(r[None], upper=True)[0]
    numbers = [
        *norm_bounds(r),
        norm_bounds(inverse)[1].reciprocal(),
        MARGIN * _norm_beside(b_matrix, z),
        torch.linalg.matrix_norm(rows - z @ (z.T @ rows)),
    ]
    low, high, smallest, dropped, residual = torch.stack(numbers).tolist()
    return Subspaces(z, q, r, inverse, (low, high + dropped), smallest, dropped, residual)


def norm_bounds(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``||A||_2`` from below and from above, within ``n^(1/8)``: from Schatten norms, by two products."""
    norm = torch.linalg.matrix_norm
    size = norm(a)
    gram = (a.T / size) @ (a / size)
    square = norm(gram @ gram)
    return size * (square / norm(gram)).sqrt(), size * square.sqrt().sqrt()


def _norm_beside(b_matrix: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """``||B (I - Z Z^T)||_2`` from below, by the power method from several vectors."""
    x = probes(len(z), z.device)
    for step in range(POWERS):
        for _ in range(3):  # rounding errors of one, made unit vectors, may lie along Z again
            x = x - z @ (z.T @ x)
            x = x / torch.linalg.vector_norm(x, dim=0).clamp_min(torch.finfo(x.dtype).tiny)
        image = b_matrix @ x
        if step + 1 < POWERS:
            x = b_matrix.T @ image
    return torch.linalg.vector_norm(image, dim=0).amax()


def _decided(found: Subspaces, shape: torch.Size, rcond: float) -> str:
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


def _solution(problem: Deficient, b_matrix: torch.Tensor, found: Subspaces) -> MinimumNorm:
    b, z, q = problem.b, found.z, found.q
    coefficients = torch.zeros(found.rank, b.shape[1], dtype=b.dtype, device=b.device)
    residual = b
    for _ in range(REFINEMENTS + 1):
        coefficients = coefficients + found.inverse @ (q.T @ residual)
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
    left = over(length(found.inverse @ (q.T @ residual), dim=0), size)
    error = left + spectrum.coefficient_error(over(length(residual, dim=0), found.largest[0] * size))
    row_space = RowSpace(z, problem.sizes)
    y = row_space.shortest(coefficients)
    return MinimumNorm(
        y=y,
        rank=found.rank,
        doubt="",
        range_basis=q,
        norm=found.largest[0],
        condition=spectrum.condition,
        forward_error=row_space.error(coefficients, y, error, spectrum.angle),
        residual=b - b_matrix @ y,
    )
