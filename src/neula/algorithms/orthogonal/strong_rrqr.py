"""Strong rank-revealing QR: an order of columns whose R hides no small singular value.

Pivots by norms nearly always separate the columns that span the numerical range from the others. Kahan's
matrix is the famous one where they do not: none of its columns is interchanged, and the smallest singular
value is far below all that R shows. The remedy uses R alone (Gu and Eisenstat, "Efficient algorithms for
computing a strong rank-revealing QR factorization", SIAM J. Sci. Comput. 17, 1996): with

    R = [R11 R12; 0 R22],   w_i = 1 / ||row i of R11^-1||,   c_j = ||column j of R22||,

interchanging columns i and k + j multiplies ``|det R11|`` by ``sqrt(|(R11^-1 R12)_ij|^2 + (c_j / w_i)^2)``.
When no interchange gains more than a factor f, then ``||R22|| <= sqrt(1 + f^2 k (n - k)) sigma_(k+1)``, and
``sigma_k <= sqrt(1 + f^2 k (n - k)) sigma_min(R11)``.

An interchange leaves R nearly triangular. The rotations that make it so again follow from row i of R11^-1, so
that it takes as many operations as R has elements; another QR of R takes ``n`` times as many.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.algorithms.scaling import power_of_two_scales
from neula.kernels.magnitudes import squares, two_norms
from neula.kernels.phases import phases
from neula.kernels.precision import exact_matmul
from neula.kernels.triangular_inverse import triangular_inverse

GAIN = 10.0
"""The f above. Random pivots, and LAPACK's, stay below 3 on random matrices and reach 1e4 to 1e12 where they
fail."""

MAX_INTERCHANGES = 100
"""Each multiplies the determinant by :data:`GAIN`, or makes the rank smaller by one R hides; a few do."""

LEAST = 2.0**-20  # part of the tolerance that is put in place of smaller pivots
BLOCK = 32  # rows whose squares are summed by one product

WEAK = 10.0
"""Times a pivot that columns which are left may be longer; of random matrices half of that at most."""


def first_weak(r: torch.Tensor, tolerance: float) -> int | None:
    """First pivot of an upper triangular R, shape (k, n) with k <= n, much shorter than a column which is
    left.

    Columns up to a part ``tolerance`` of the longest do not count. None where there is none, or R holds NaN.

    >>> r = torch.eye(64)
    >>> r[20, 20] = 0.01
    >>> first_weak(r, 1e-6)
    20
    """
    (k, n), r = r.shape, r.to(torch.promote_types(r.dtype, torch.float32))
    largest = torch.linalg.vector_norm(r, torch.inf)[None]
    rows = r.new_zeros(k + -k % BLOCK, n)
    torch.mul(r, power_of_two_scales(largest), out=rows[:k])
    pivots = rows.diagonal()[:k].abs()
    sums = squares(rows).unflatten(0, (-1, BLOCK))
    # Of no negative numbers, so that nothing cancels.
    sums = exact_matmul(torch.ones(BLOCK, BLOCK, dtype=sums.dtype, device=r.device).triu(), sums)
    sums[:-1] += sums[1:, :1].flip(0).cumsum(0).flip(0)
    left = sums.flatten(0, 1)[:k].amax(1).sqrt()
    weak = (left > WEAK * pivots) & (left > tolerance * left[0])
    found = weak.nonzero()[:1, 0].tolist()
    return found[0] if found else None


def strong_order(r: torch.Tensor, tolerance: float) -> torch.Tensor | None:
    """Interchanges that make a pivoted QR strong at its numerical rank: the new order of the columns of R, if
    any.

    R, shape (k, n) with k <= n, is upper triangular, in double precision, elements near 1 at most. Singular
    values of at most the tolerance count as zero.
    """
    order = torch.arange(r.shape[1], device=r.device)
    rank, found = _rank_at_most(r, tolerance), False
    for _ in range(MAX_INTERCHANGES):
        if rank == 0:
            break
        step = _interchange(r, rank, tolerance)
        if step is None:
            break
        found, rank = True, step.rank
        places, r = _interchanged(r, step)
        order = order[places]
    return order if found else None


class _Interchange(NamedTuple):
    """An interchange of a column of the leading block with one behind it."""

    i: int  # of the block, what leaves it
    j: int  # what takes its place, behind the block; the last column of the block for nothing
    # Shape (columns - i,): row i of the inverse of the triangle in the block, from its diagonal on.
    row: torch.Tensor
    rank: int  # columns of the leading block afterwards


def _rank_at_most(r: torch.Tensor, tolerance: float) -> int:
    """The first k for which ``||R22||_F`` is at most the tolerance."""
    sizes = two_norms(r.triu(), 1).square()
    trailing = sizes.flip(0).cumsum(0).flip(0).sqrt()
    return int((trailing > tolerance).sum())


def _interchange(r: torch.Tensor, rank: int, tolerance: float) -> _Interchange | None:
    """Columns to interchange, if any, of a leading block of at most so many columns."""
    inverse = _inverse(r[:rank, :rank], tolerance)
    # Of all leading blocks at once: the smallest distance of a column from the span of the others, and what
    # no singular value is below.
    sums = squares(inverse).cumsum_(1)
    nearest, least = sums.amax(0).rsqrt(), sums.sum(0).rsqrt()
    pivots = inverse.diagonal().abs().reciprocal()
    # A last column that is as near as any goes by itself.
    kept = ((least > tolerance) | (pivots > GAIN * nearest)).nonzero()[-1:, 0].tolist()
    if not kept:
        return None
    rank = kept[0] + 1
    inverse, distances = inverse[:rank, :rank], sums[:rank, rank - 1].rsqrt()
    if rank < r.shape[1]:
        sizes = two_norms(r[rank:, rank:], 0)
        # That of column k + j from the span of the leading ones without column i.
        others = torch.hypot(distances[:, None] * (inverse @ r[:rank, rank:]).abs(), sizes)
        gains = torch.where(others > tolerance, others / distances[:, None], 0.0)
        i, j = divmod(int(gains.argmax()), gains.shape[1])
        if float(gains[i, j]) > GAIN:
            return _Interchange(i, rank + j, inverse[i, i:], rank)
    if float(least[rank - 1]) <= tolerance:
        i = int(distances.argmin())
        return None if i == rank - 1 else _Interchange(i, rank - 1, inverse[i, i:], rank - 1)
    return None


def _interchanged(r: torch.Tensor, step: _Interchange) -> tuple[list[int], torch.Tensor]:
    """The new order of the columns of R, and an R for it, triangular as far as its leading block goes.

    Column i goes to the end of the block, and those behind it move up. A row of the inverse is orthogonal to
    all columns of the block but its own: rotations of neighbouring rows that collect what the rows have in
    that direction, from the first one down, leave zeros below the diagonal. Column j, which comes then, is
    reflected.
    """
    i, last = step.i, step.i + len(step.row) - 1
    places = [*range(i), *range(i + 1, last + 1), i, *range(last + 1, r.shape[1])]
    places[last], places[step.j] = step.j, i
    direction = (step.row / two_norms(step.row))[:, None]
    sizes = squares(direction).cumsum(0).sqrt()
    rows = r[i : last + 1, places]
    collected = (direction * rows).cumsum_(0) / sizes
    r = r[:, places]
    r[i:last] = (sizes[:-1] * rows[1:] - direction[1:].conj() * collected[:-1]) / sizes[1:]
    r[last] = collected[-1]
    r[: last + 1, : last + 1].triu_()
    if step.j > last:
        v = r[last:, last].clone()
        v[0] += phases(v[0]) * two_norms(v)
        v /= two_norms(v)
        r[last:, last:] -= 2 * v[:, None] * (v.conj() @ r[last:, last:])
        r[last + 1 :, last] = 0
    return places, r


def _inverse(r: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Inverse of a triangle whose diagonal has no zeros, but what is as good as zero."""
    least, r = tolerance * LEAST, r.clone()
    r.diagonal().copy_(torch.where(r.diagonal().abs() < least, least, r.diagonal()))
    return triangular_inverse(r[None], upper=True)[0]
