"""Batches of small systems on a CPU, by NumPy and LAPACK: all together, in a few passes over the batch.

That is for definite ones, and for all without the compiled core. Steps of the chain for batches are many
more passes. What is not accepted here is left to them.
"""

from __future__ import annotations

import numpy as np
import torch

from neula.algorithms.lapack.batches import ELEMENTS
from neula.algorithms.lapack.squares import Squares, cholesky, lu
from neula.certificates.forward_error import ESTIMATED
from neula.engines import FP64
from neula.pipeline.chain import Answer
from neula.pipeline.in_numpy import FEW, IN_NUMPY, array_of
from neula.problems.systems.problem import Systems, SystemsOptions, SystemsSolutions

LARGEST = 128
"""Order of the largest systems: others take no longer one after the other (20 of order 200 on one core of an
AMD EPYC: a tenth less)."""


def batch_by_lapack(systems: Systems) -> Answer[SystemsSolutions] | None:
    """Solutions of all systems, of which some may not be accepted; None where this is no way for them."""
    options, (a, b) = systems.options, (systems.a, systems.b)
    here = a.is_cpu and options.engine.tuning.lapack and options.dtype in IN_NUMPY
    n, k = b.shape[1:]
    if not (here and len(a) > 1 and n <= LARGEST and k <= FEW and options.progress is None):
        return None
    given, right, step = array_of(a), array_of(b), max(1, ELEMENTS // n**2)
    parts = [
        _solved(given[start : start + step], right[start : start + step], options)
        for start in range(0, len(given), step)
    ]
    members, errors = zip(*parts, strict=True)
    label = "cholesky fp64" if options.positive else "lu fp64 with pivoting"
    history = tuple(np.max(errors, 0).tolist())
    values = SystemsSolutions.joined(members)
    return Answer(values, label, "", len(history) - 1, history)


@np.errstate(all="ignore")  # what is not finite is not accepted
def _solved(
    a: np.ndarray, b: np.ndarray, options: SystemsOptions
) -> tuple[SystemsSolutions, tuple[float, float]]:
    """Solutions, and their largest backward errors before and after the update."""
    n, updates = a.shape[1], options.target is FP64
    doubled = updates and (options.forward or n <= options.engine.tuning.doubled_order)
    a, b = (x.astype(np.float64, copy=False) for x in (a, b))
    system = Squares(a, cholesky if options.positive else lu, slices=3 if doubled else 0, updates=updates)
    found = system.refined(b, IN_NUMPY[options.dtype])
    error, refined = found.backward_error, (found.left <= options.digits) | found.settled
    condition = found.condition[:, 0]
    known = {
        "x": found.x,
        "forward_error": found.forward_error,
        "doubtful": ~(found.good & refined).all(1),
        "residual": found.residual.max(1),
        "refined_error": error.max(1),
        "backward_error": (error + found.rounding + found.low).max(1),
        "condition_bound": ESTIMATED * condition,
        "condition": condition,
        "growth": system.growth,
    }
    members = SystemsSolutions(**{name: torch.from_numpy(x) for name, x in known.items()})
    accepted = options.limits(n).accept(members.evidence).numpy()
    errors = [float(x[accepted].max(initial=0.0)) for x in (found.first_error, error)]
    return members, (errors[0], errors[1])
