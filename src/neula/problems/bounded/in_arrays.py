"""What is known of one solution within bounds: :mod:`neula.problems.bounded.evidence` for arrays of NumPy.

Norms of the free columns come from their Gram matrix and its factor: bounds where those of batches are
estimates.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from neula.algorithms.krylov.doubled_refinement import MAX_RATE
from neula.algorithms.lapack.bounded import Face, Found, Normal
from neula.algorithms.lapack.refinement import length
from neula.certificates.forward_error import NOISE, rounded_error
from neula.certificates.kkt import backward_error_of
from neula.engines import FP64


class Evidence(NamedTuple):
    """A solution with its evidence.

    Attributes
    ----------
    x : array, shape (n,)
        Rounded to the dtype of the result.
    at : array of int, shape (n,)
        -1 at the lower bound, 1 at the upper one, 0 between them.
    wrong : array, shape (n,)
        What of the gradient no bound forbids to follow, of columns of norm 1; the signs do not count.
    residual_norm, backward_error, forward_error, condition : float
    sets : int
        Sets of free variables that were tried.
    """

    x: np.ndarray
    at: np.ndarray
    wrong: np.ndarray
    residual_norm: float
    backward_error: float
    forward_error: float
    condition: float
    sets: int


class _Norms(NamedTuple):
    """Of some columns: their norm from below and from above, that of their pseudoinverse from above, and the
    condition number, estimated.
    """

    least: float
    most: float
    inverse: float
    condition: float

    @classmethod
    def of(cls, face: Face) -> _Norms:
        width = len(face.free)
        if not width:  # no column can be ill-conditioned
            return cls(1.0, 1.0, 1.0, 1.0)
        most, inverse = face.norm_bound, face.inverse_norm
        least = max(1.0, most / width**0.25)  # columns have norm 1
        return cls(least, most, inverse, max(1.0, least * inverse / face.margin))


def evidence_of(problem: Normal, found: Found, dtype: Any, bound: float) -> Evidence | None:
    """Measure a solution, rounded to the dtype of the result; None where the factor is no good.

    Parameters
    ----------
    problem : Normal
    found : Found
    dtype : dtype of NumPy
    bound : float
        Largest backward error.
    """
    at, face, point, sets = found
    if not face.rate <= MAX_RATE:
        return None
    x, norms, push = problem.x(point.z, at), _Norms.of(face), at * point.left
    given = problem.within(x).astype(dtype).astype(np.float64, copy=False)
    image, lost, residual = length(point.z), length(problem.sizes * (given - x)), length(point.residual)
    rounding = lost / image if lost else 0.0
    wrong = np.where(at == 0, point.gradient, np.minimum(at * point.gradient, 0.0))
    backward_error = backward_error_of(
        residual=residual,
        wrong=length(wrong),
        projected=point.projected / (1 - face.rate),
        rest=length(np.minimum(push, 0.0)),
        image=image,
        b=problem.b_norm,
    )
    # Rounding errors of the residual, and of products with it.
    noise = (sum(problem.shape) + 4) * FP64.u * (residual + problem.b_norm + float(np.abs(point.z).sum()))
    pushed = float(push[at != 0].min(initial=math.inf)) - noise
    if not len(face.free) and pushed > 0 and backward_error + rounding <= bound:
        forward_error = rounding  # a corner, and there it stays
    else:
        error = _forward_error(problem, norms, backward_error, residual, image, pushed)
        forward_error = rounded_error(error, rounding)
    known = residual, backward_error + rounding, forward_error, norms.condition
    return Evidence(given, at, wrong, *known, sets)


def _forward_error(
    problem: Normal, norms: _Norms, backward_error: float, residual: float, image: float, pushed: float
) -> float:
    """Bound on ``||D (x - x*)|| / ||D x*||``, by the columns that count."""
    error = backward_error + NOISE * FP64.u
    moved = error * (image * norms.most + problem.b_norm + residual * norms.inverse)
    condition = norms.most * norms.inverse
    if not moved < pushed:
        of_all = _Norms.of(problem.whole)
        condition = of_all.most * of_all.inverse
    if not image:
        return math.inf
    return condition * error * (2 + (condition + 1) * residual / (norms.least * image))
