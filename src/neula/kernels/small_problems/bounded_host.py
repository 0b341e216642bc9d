"""One small least-squares problem with bounds on a CPU, with its evidence, by the compiled core.

Block principal pivoting, as :func:`neula.algorithms.bounded.active_set.block_pivoting`, which works on R.
Here A is not factorized: sets of free variables are tried with parts of the Gram matrix, and the last one is
solved for by corrected seminormal equations, with residuals of A itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from neula.kernels.core import core


class BoundedLimits(NamedTuple):
    """Thresholds of the algorithm."""

    # Norms, and bounds that are neither zero nor infinite, must be between this and its reciprocal.
    in_safe_range: float
    # Components of gradients, relative to what they are sums of, that normal equations say nothing of.
    rough: float
    settled: float  # length of the last update, relative to x
    steps: float  # updates at most
    patience: float  # exchanges of all infeasible variables that may fail to reduce their number
    sets: float  # sets of free variables that are tried


class Numbers(NamedTuple):
    """Measures of a solution, for columns of norm 1: of ``B = A D^-1`` and ``D x``."""

    sets: float  # of free variables that were tried
    width: float  # variables that are free
    # b, residual, image: ||b||, ||r|| and ||D x||.
    b: float
    residual: float
    gradient: float  # norm of what of B^T r no bound forbids to follow
    optimality: float  # the largest component of that, of A^T r
    # projected, rest: ||P r||, P being the projector on the free columns, and what gradient is for r - P r.
    projected: float
    rest: float
    image: float
    sum: float  # sum of the magnitudes of D x
    pushed: float  # by how much of its gradient all others are pushed against their bounds at least
    # norm, inverse_norm: of the free columns and of their pseudoinverse, from above: Schatten 4-norms, or
    # margin times an estimate.
    norm: float
    inverse_norm: float
    # norm_of_all, inverse_norm_of_all: the same of all columns; NaN where they were not asked for.
    norm_of_all: float
    inverse_norm_of_all: float
    margin: float


class BoundedMinimum(NamedTuple):
    """A solution."""

    numbers: Numbers
    x: np.ndarray  # shape (n,): bounds are what they are; other variables may be rounded beyond theirs
    # Shape (n,): -1.0 at the lower bound, 1.0 at the upper one, 0.0 where the variable is free.
    at: np.ndarray
    sizes: np.ndarray  # shape (n,): D
    unbounded: np.ndarray  # shape (n,): the solution without bounds, where it was requested


def minimum(
    a: torch.Tensor, b: torch.Tensor, bounds: np.ndarray, limits: BoundedLimits, *, of_all: bool
) -> BoundedMinimum | None:
    """Solve and measure a problem A (m, n), m >= n > 0, b (m, 1) with bounds (2, n); None without
    convergence, without the core, and for numbers outside the safe range.

    Norms of all columns and the solution without bounds are found if ``of_all``.

    Examples
    --------
    >>> import numpy as np, torch
    >>> a, b = torch.eye(2), torch.tensor([[2.0], [-3.0]])
    >>> bounds = np.array([[0.0, 0.0], [np.inf, np.inf]])
    >>> found = minimum(a, b, bounds, BoundedLimits(2.0**200, 1e-9, 1e-8, 4, 3, 100), of_all=False)
    >>> found is None or found.x.tolist()
    [2.0, 0.0]
    """
    compiled = core()
    if compiled is None:
        return None
    vectors = np.empty((4, a.shape[1]))
    found = compiled.bounded(a.numpy(), b.numpy(), bounds, vectors, limits, of_all)
    return None if found is None else BoundedMinimum(Numbers._make(found), *vectors)
