"""Least squares and pseudoinverses with ranks as the peers count them: by the singular values of A."""

from __future__ import annotations

import numpy as np
import torch

import neula
from neula.compat.drop_in import need
from neula.pipeline.inputs import take


def singular_values(a: np.ndarray) -> np.ndarray:
    """Those of matrices, by torch: threads of another library would hold up those of what comes next.

    Parameters
    ----------
    a : ndarray, shape (..., m, n)
        float32 or float64.

    Returns
    -------
    ndarray, shape (..., min(m, n))

    Raises
    ------
    RuntimeError
        If they are not found, for NaN as well.
    """
    found: np.ndarray = torch.linalg.svdvals(take(a, "a").tensor).numpy()
    return found


def full_rank_solution(
    a: np.ndarray, b: np.ndarray, s: np.ndarray, rcond: float
) -> tuple[np.ndarray, np.ndarray]:
    """The solution of a problem of full rank, and the squares of its residuals.

    Parameters
    ----------
    a : ndarray, shape (m, n)
    b : ndarray, shape (m,) or (m, k)
    s : ndarray, shape (min(m, n),)
        Singular values of a.
    rcond : float
        Those of at most ``rcond`` times the largest count as zero.

    Returns
    -------
    x : ndarray, shape (n,) or (n, k)
    squares : ndarray, shape (k,) or (1,)

    Raises
    ------
    Unsuited
        If the rank is not full: neula's cutoff is for A with normalized columns, and solutions of a smaller
        rank would differ.
    """
    need(a.ndim == 2 and b.ndim in (1, 2) and a.size > 0 and b.size > 0)
    need(bool(s[-1] > rcond * s[0]))
    # Of full rank, as has just been decided: nothing is to be cut off.
    result = neula.lstsq(a, b, rcond=0.0)
    return result.x, np.square(np.atleast_1d(result.residual_norm))


def full_rank_pinv(a: np.ndarray, s: np.ndarray, cut: float | np.ndarray) -> np.ndarray:
    """The pseudoinverse of matrices of full rank.

    Parameters
    ----------
    a : ndarray, shape (..., m, n)
    s : ndarray, shape (..., min(m, n))
        Singular values of a.
    cut : float or ndarray, shape (...)
        Those that are at most so large count as zero.

    Raises
    ------
    Unsuited
        If the rank of one is not full.
    """
    need(bool(np.all(s[..., -1] > cut)))
    return neula.pinv(a, 0.0)
