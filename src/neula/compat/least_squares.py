"""Least squares and pseudoinverses with ranks as the peers count them: by the singular values of A."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import neula
from neula.certificates.probes import PROBES, gaussian_probes
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


def is_pseudoinverse(a: Any, x: Any) -> bool:
    """Whether half of the digits, or more, of all rows of pseudoinverses are measured to be correct.

    For a tall A of full rank and ``S = A X - (A X)^T``, the error ``X - A^+`` is
    ``(X A - I) A^+ + A^+ S (I - A A^+)``. Five products with random vectors estimate the norms of S and of
    ``D (X A X - X)``, where D divides rows of X by their norms. Below full rank, which the peer decides, both
    vanish if X is the pseudoinverse of the part of A that it has kept.

    Parameters
    ----------
    a : ndarray or Tensor, shape (..., m, n)
    x : ndarray or Tensor, shape (..., n, m)
        In the same library.
    """
    if a.shape[-2] < a.shape[-1]:
        a, x = a.swapaxes(-1, -2), x.swapaxes(-1, -2)
    m, n = a.shape[-2:]
    of_torch = isinstance(x, torch.Tensor)
    # Vectors are rows: torch multiplies columns in three times the time.
    vectors: Any = gaussian_probes(m, x.device if of_torch else torch.device("cpu")).mT
    vectors = vectors.to(x.dtype) if of_torch else vectors.numpy().astype(x.dtype, copy=False)
    at, xt = a.swapaxes(-1, -2), x.swapaxes(-1, -2)
    with np.errstate(all="ignore"):  # NaN is not accepted
        norms = (x * x).sum(-1)[..., None, :] ** 0.5
        once = vectors @ xt
        image = once @ at
        twice, skew = (image @ xt - once) / norms, image - (vectors @ a) @ x
        errors = (twice * twice).sum((-2, -1)) / n + (skew * skew).sum((-2, -1))
        return bool((errors <= PROBES * (torch if of_torch else np).finfo(x.dtype).eps).all())
