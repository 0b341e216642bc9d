"""What is known of one solution within bounds: :mod:`neula.problems.bounded.evidence` for numbers of Python.

Norms of the free columns come from their Gram matrix and its factor: bounds where those of batches are
estimates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from neula.certificates.forward_error import MAX_RATE, enlarged
from neula.certificates.kkt import KKTNorms
from neula.engines import FP64
from neula.kernels.bounded_host import Numbers


class BoundedEvidence(NamedTuple):
    """How good a solution is."""

    backward_error: float
    forward_error: float
    condition: float


def evidence_of(
    of: Numbers,
    shape: tuple[int, int],
    rounding: float,
    of_all: Callable[[], tuple[float, float]],
) -> BoundedEvidence | None:
    """What numbers say of a solution; None where the factor is no good.

    Parameters
    ----------
    of : Numbers
    shape : tuple of int
        Of A.
    rounding : float
        What x as it is given back differs by, relative to x.
    of_all : callable
        Norms of all columns and of their pseudoinverse, as of :class:`Numbers`.
    """
    rate = rate_of(shape, of.width, of.inverse_norm)
    if not rate <= MAX_RATE:
        return None
    # Without free variables nothing is projected, and no column can be ill-conditioned.
    norm, inverse_norm = (of.norm, enlarged(of.inverse_norm, rate)) if of.width else (1.0, 1.0)
    least = max(1.0, norm / max(1.0, of.width) ** 0.25)  # columns have norm 1
    kkt = KKTNorms(
        residual=of.residual,
        wrong=of.gradient,
        projected=enlarged(of.projected, rate),
        rest=of.rest,
        image=of.image,
        b=of.b,
    )
    pushed = of.pushed - kkt.noise(shape, of.sum)
    corner = not of.width and pushed > 0
    certain = corner or kkt.moved(norm, inverse_norm) < pushed
    condition = norm * inverse_norm if certain else _condition(shape, *of_all())
    return BoundedEvidence(
        kkt.backward_error + rounding,
        kkt.forward_error(condition, least, rounding, corner),
        max(1.0, least * inverse_norm / of.margin),
    )


def rate_of(shape: tuple[int, int], width: float, inverse_norm: float) -> float:
    """``||I - L^-1 B^T B L^-T||`` from above, for the factor L of so many columns of norm 1.

    The Gram matrix has sums of m products, divided twice, and the factorization errs by as many u as the
    matrix has columns.
    """
    return (sum(shape) + 4) * width * FP64.u * inverse_norm**2


def _condition(shape: tuple[int, int], norm: float, inverse_norm: float) -> float:
    rate = rate_of(shape, shape[1], inverse_norm)
    return enlarged(norm * inverse_norm, rate) if rate <= MAX_RATE else math.inf
