"""Backward errors of least squares with bounds: how far from the conditions of Karush, Kuhn and Tucker.

A point within the bounds is a solution where the gradient ``A^T r`` vanishes for variables between their
bounds, and pushes the others against theirs. The remainder w of the gradient has to be explained. As without
bounds, each explanation is a perturbation of the data with which the point is an exact solution, and the
smallest counts. D are the norms of the columns of A, ``B = A D^-1``, and errors are relative to B and b.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Generic

from neula.certificates.forward_error import NOISE, least_squares_error, residual_ratio, rounded_error, where
from neula.certificates.residuals import X, quotient
from neula.engines import FP64


@dataclass(frozen=True)
class KKTNorms(Generic[X]):
    """Norms of a problem, or of each of many, from which bounds on its errors follow."""

    residual: X  # ||r||
    wrong: X  # ||D^-1 w||
    # ||P r||, P the projector on the range of the columns whose gradient should vanish; infinite where that
    # is not known.
    projected: X
    rest: X  # ||D^-1 w|| of the residual r - P r
    image: X  # ||D x||, which is at most ||B|| ||D x||
    b: X

    @cached_property
    def backward_error(self) -> X:
        """The smallest of three perturbations that make x a solution.

        ``-r w^T / ||r||^2`` takes w away and leaves the direction of the residual as it is (Stewart 1977,
        applied to w). Without a residual there is no gradient at all. And where r is nearly orthogonal to the
        columns that it should be orthogonal to, a change of b by ``P r`` makes it so, and what w is left goes
        as in the first.

        >>> KKTNorms(1.0, 1e-9, 1e-12, 0.0, 1.0, 1.0).backward_error
        5e-13
        """
        size, longer = self.image + self.b, self.projected < self.residual
        square = (self.residual - self.projected) * (self.residual + self.projected)
        orthogonal = where(longer, square, 0.0) ** 0.5
        found = (
            quotient(self.wrong, self.residual),
            quotient(self.residual, size),
            quotient(self.projected, size) + quotient(self.rest, orthogonal),
        )
        known = (where(x >= 0, x, math.inf) for x in found)  # NaN is no bound
        return reduce(lambda x, y: where(x <= y, x, y), known)

    def noise(self, shape: Sequence[int], terms: X) -> X:
        """Bound on the rounding error of a component of ``B^T r``; ``terms``: magnitudes of ``D x``."""
        return (sum(shape) + 4) * FP64.u * (self.residual + self.b + terms)

    def moved(self, norm: X, inverse_norm: X) -> X:
        """Bound on the error of components of ``B^T r``, by norms of the columns
        for which they vanish and of their pseudoinverse.
        """
        error = self.backward_error + NOISE * FP64.u
        return error * (self.image * norm + self.b + self.residual * inverse_norm)

    def forward_error(self, condition: X, norm: X, rounding: X, corner: Any) -> X:
        """Wedin's bound on ``||D (x - x*)|| / ||D x*||``, and what x loses by ``rounding``.

        It holds with bounds, too: a projection on a convex set brings points no further apart. The condition
        number, from above, and the norm, from below, are those of the columns in which x and x* may differ.
        At a corner gradients push all variables against their bounds by more than their rounding errors: no
        other point is a solution.
        """
        ratio = residual_ratio(self.residual, norm, self.image)
        error = least_squares_error(condition, self.backward_error, ratio)
        return where(corner, rounding, rounded_error(error, rounding))
