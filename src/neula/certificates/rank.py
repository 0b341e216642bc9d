"""Whether a numerical rank below full is beyond doubt.

Singular values are those of ``B = A D^-1``, D being the norms of the columns of A. Two things make a rank
doubtful. Where the smallest singular value that is kept and the largest one that is dropped are close, a small
change of A changes the rank. And where a dropped direction carries the data, x lacks what b says: columns 1,
t, t^2 for t near 1e8 are dependent to 16 digits but for the curvature.

A direction of rounding errors carries nothing, whatever the residual has along it. If B has exactly dependent
columns, rounding their elements leaves ``||B v|| <= sqrt(n) u`` of a null vector v of length 1, and sums of
several columns leave a few times as much. Directions with more than :func:`rounding_of` are real.
"""

from __future__ import annotations

import torch

GAP = 10.0
"""Factor between the smallest singular value that is kept and the largest one that is dropped, below which the
rank is doubtful."""

FREEDOM = 3
"""Degrees of freedom that the residual needs for a test of what a direction explains."""

SIGNIFICANT = 1e-6
"""Probability below which what dropped directions explain of the residual is no chance."""


def rounding_of(n: int, u: float) -> float:
    """What rounding its elements may leave of a null vector of ``B``, from above.

    Parameters
    ----------
    n : int
        Columns.
    u : float
        Unit roundoff of the format in which A is stored.
    """
    return 2 * n * u


def rank_doubt(
    kept: float,
    dropped: torch.Tensor,
    along: torch.Tensor,
    length: torch.Tensor,
    *,
    rank: int,
    rows: int,
    rounding: float,
) -> str:
    """Why the rank of B is doubtful; empty if it is not.

    An F test compares what the real ones of the dropped directions explain of the residual with what is left.

    Parameters
    ----------
    kept : float
        The smallest singular value that counts.
    dropped : Tensor, shape (q,)
        Those that do not, in descending order, with a small relative error where they exceed ``rounding``.
    along : Tensor, shape (q, k)
        Components of the residuals along their left singular vectors.
    length : Tensor, shape (k,)
        Norms of the residuals.
    rank : int
    rows : int
        Of A.
    rounding : float
        Of :func:`rounding_of`.

    Examples
    --------
    >>> import torch
    >>> tiny, along, length = (torch.tensor(x, dtype=torch.float64) for x in ([1e-14], [[3.0]], [3.1]))
    >>> rank_doubt(1e-7, tiny, along, length, rank=2, rows=50, rounding=7e-16)[:67]
    'rank 2 is doubtful: directions that count as zero explain 94% of the'
    >>> rank_doubt(1e-7, tiny, along / 10, length, rank=2, rows=50, rounding=7e-16)
    ''
    """
    if not len(dropped):
        return ""
    if kept < GAP * float(dropped[0]):
        return (
            f"rank {rank} is doubtful: the smallest singular value that counts is only "
            f"{kept / float(dropped[0]):.1f} times the largest that does not: pass another rcond, or damp="
        )
    real = dropped > rounding
    count = int(real.sum())
    freedom = rows - rank - count
    if not count or freedom < FREEDOM:
        return ""
    from scipy.special import betainc

    total = length.square()
    left = (1 - along[real].square().sum(0) / total).where(total > 0, 1.0).clamp(0.0, 1.0)
    least = float(left.amin()) if len(left) else 1.0
    # Of noise, the part that the directions leave has a beta distribution.
    chance = float(betainc(freedom / 2, count / 2, least))
    if not chance < SIGNIFICANT:
        return ""
    return (
        f"rank {rank} is doubtful: directions that count as zero explain {1 - least:.0%} of the squared "
        f"residual, which noise does with probability {chance:.0e}: rescale or center the columns, or pass a "
        "smaller rcond"
    )
