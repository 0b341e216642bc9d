"""Small least-squares problems on a CPU, from the matrix to the evidence, by the compiled core.

The arithmetic of one takes a few microseconds, as two calls of NumPy do. The matrices of a batch are solved
one after the other, each while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from neula.kernels.core import core
from neula.kernels.magnitudes import MODERATE
from neula.kernels.small_problems.seminormal import NAMES, RefinementLimits

NUMBERS = (*NAMES, "steps", "way")
"""Evidence of each problem, the number of updates, and the :class:`SolutionMethod`: ``SEMINORMAL_NUMBERS`` of
the core."""


class SolutionMethod(IntEnum):
    """How a problem is solved: by the factor of a Gram matrix; by shifted Cholesky QR where columns are too
    dependent for that; the minimum-norm solution by the factor of ``A A^T`` for few rows, and by pivoted
    Cholesky for dependent columns.
    """

    GRAM = 0
    SHIFTED = 1
    FEW_ROWS = 2
    DEPENDENT = 3


class Probes(NamedTuple):
    """Vectors along which the rate of convergence is measured where columns are dependent."""

    # Shape (n, p). Random, float64, with contiguous rows; norms of their images estimate a Frobenius norm. If
    # the rank is p or less, unit vectors take their place.
    vectors: np.ndarray
    margin: float  # by how much they may understate the rate
    rounding: float  # contribution of rounding errors to the rate, for each column and unit of ||R^-1||


class SeminormalHostSolutions:
    """Solutions with their evidence: NaN where numbers are not in the safe range, or no R is accurate enough.

    Views of memory of float64: x (batch, n, k), rounded to the dtype that was requested; numbers (numbers,
    batch), which are :data:`NUMBERS`; forward errors and norms of residuals (batch, k).
    """

    def __init__(self, written: np.ndarray, count: int, n: int, k: int) -> None:
        size = n * k * count
        end = size + len(NUMBERS) * count
        self.x = written[:size].reshape(count, n, k)
        self.numbers = written[size:end].reshape(len(NUMBERS), count)
        self.forward_error, self.residual_norm = written[end:].reshape(2, count, k)


def available() -> bool:
    """Whether the compiled core is there."""
    return core() is not None


def size_of(count: int, n: int, k: int) -> int:
    """Numbers that are written for problems of n unknowns with k right-hand sides."""
    return (len(NUMBERS) + (2 + n) * k) * count


def prepared(
    dtype: torch.dtype,
    limits: RefinementLimits,
    backward: float = np.inf,
    condition: float = np.inf,
    *,
    rcond: float = 0.0,
    rounding: float = np.inf,
    probes: Probes | None = None,
) -> Callable[[np.ndarray, np.ndarray, np.ndarray], bool] | None:
    """The kernel, which takes problems A (batch, m, n) or (m, n), B likewise, and the memory of
    :class:`SeminormalHostSolutions`, and says whether there is enough memory; None without the compiled core.

    ``backward`` and ``condition`` are limits of the verdict: problems with few rows are refined until they
    reach the first, and factors beyond the second are not used, unless columns are dependent. With columns of
    norm 1, singular values below ``rcond`` times the largest do not count; if that is in doubt, or dependent
    columns leave more than ``rounding`` of others, there is no solution. Without probes no columns are taken
    to be dependent.

    Examples
    --------
    >>> limits = RefinementLimits(2.0**-54, 3, 0.25, 8.0, 2.0**-104, 2.0, 0.5, 1.0)
    >>> solve, written = prepared(torch.float64, limits), np.empty(size_of(1, 1, 1))
    >>> solve is None or solve(np.array([[3.0], [4.0]]), np.array([[6.0], [8.0]]), written)
    True
    """
    compiled = core()
    if compiled is None:
        return None
    vectors, margin, of_probes = (None, 0.0, 0.0) if probes is None else probes
    numbers = astuple(replace(limits, rounding=rounding))
    return partial(
        compiled.seminormal,
        probes=vectors,
        limits=(*numbers, MODERATE, backward, condition, rcond, margin, of_probes),
        single=dtype == torch.float32,
    )
