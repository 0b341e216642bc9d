"""Whether a numerical rank below full is beyond doubt.

Singular values are those of ``B = A D^-1``, D being the norms of the columns of A. A rank is ambiguous in two
cases. Where the smallest singular value that is kept is close to the largest one that is dropped, a small
change of A changes the rank. Where a dropped direction is real and carries the data, x misses part of b: the
columns 1, t, t^2 near t = 1e8 are dependent to 14 digits, and the curvature of b is in the rest.

A direction is real where ``||B v||``, v of norm 1, exceeds :func:`rounding_of`. If columns are exactly
dependent, rounding their elements leaves at most ``sqrt(n) u`` of a null vector, and computing a column as a
sum of others a few times as much. Such a direction is one of rounding errors, and with few rows it may
explain half of the residual by chance.
"""

from __future__ import annotations

import torch

GAP = 10.0  # the rank is ambiguous if the singular values around the threshold are closer than this factor
FREEDOM = 3  # degrees of freedom of the residual that the F test needs
SIGNIFICANT = 1e-6  # level of the F test


def rounding_of(n: int, u: float) -> float:
    """``||B v||`` up to which rounding may have made a null vector v of B, which has n columns, a singular
    vector, if A is stored in a format of unit roundoff u.
    """
    return 2 * n * u


def rank_doubt(
    kept: float,
    dropped: torch.Tensor,
    along: torch.Tensor,
    length: torch.Tensor,
    rank: int,
    rows: int,
    rounding: float,
) -> str:
    """Say why the rank of B is ambiguous; empty if it is not. An F test rejects that the real ones of the
    dropped directions explain nothing of the residual.

    ``dropped``: singular values that do not count, descending, with a small relative error where they exceed
    ``rounding`` (:func:`rounding_of`). ``along``, ``length``: components of the residuals along their left
    singular vectors, and norms of the residuals. ``rows``: of A and b, without those that vanish.

    >>> tiny, along, length = (torch.tensor(x, dtype=torch.float64) for x in ([1e-14], [[3.0]], [3.1]))
    >>> [bool(rank_doubt(1e-7, tiny, part * along, length, 2, 50, 7e-16)) for part in (1, 0.1)]
    [True, False]
    """
    if not len(dropped):
        return ""
    if kept < GAP * float(dropped[0]):
        return (
            f"rank {rank} is ambiguous: the smallest singular value that counts is only "
            f"{kept / float(dropped[0]):.1f} times the largest that does not: pass another rcond, or damp="
        )
    real, parts = dropped > rounding, 1 + along.is_complex()
    count = parts * int(real.sum())
    freedom = parts * (rows - rank) - count
    if not count or freedom < FREEDOM:
        return ""
    from scipy.special import betainc

    left = (1 - (along[real] / length).abs().square().sum(0)).where(length > 0, 1.0).clamp(0.0, 1.0)
    least = float(left.amin()) if len(left) else 1.0
    # Of noise, the part that the directions leave has a beta distribution.
    chance = float(betainc(freedom / 2, count / 2, least))
    if not chance < SIGNIFICANT:
        return ""
    return (
        f"rank {rank} is ambiguous: directions that count as zero explain {1 - least:.0%} of the squared "
        "residual, more than noise does: center the columns, or pass a smaller rcond"
    )
