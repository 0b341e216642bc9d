"""Least squares with square matrices on a CPU: linear systems, if these certainly have full rank.

LU takes half of the operations of a Gram matrix and its factor, or of a QR factorization.
"""

from __future__ import annotations

import numpy as np

from neula.algorithms.krylov.passes import residual_and_gradient
from neula.certificates.backward_error import Norms
from neula.engines import FORMATS
from neula.engines.formats import in_double
from neula.kernels.magnitudes import two_norms
from neula.kernels.small_problems.refining import over
from neula.pipeline.chain import Answer, Declined
from neula.problems.least_squares.problem import (
    LeastSquaresAnswer,
    LeastSquaresOptions,
    LeastSquaresProblems,
    LeastSquaresSolutions,
)
from neula.problems.systems import ways
from neula.problems.systems.problem import Systems, SystemsOptions, SystemsSolutions


def as_system(options: LeastSquaresOptions) -> SystemsOptions:
    """Options of the linear system that a square problem without weights and damping is."""
    return SystemsOptions(
        engine=options.engine,
        target=options.target,
        dtype=options.dtype,
        max_iterations=options.max_iterations,
        forward=options.forward,
        may_wait=options.may_wait,
        progress=options.progress,
        positive=False,
        pivot=None,
        compute=None,
    )


def suits(m: int, n: int, options: LeastSquaresOptions) -> bool:
    """Whether problems of a shape are square, without weights and damping, and for LU of the library."""
    square = m == n and options.weights is None and not (options.damp or options.named)
    return square and ways.is_for_core(n, system := as_system(options)) and not ways.is_small(n, system)


def by_lu(
    problems: LeastSquaresProblems, before: LeastSquaresAnswer | None, *, label: str, format: str
) -> LeastSquaresAnswer:
    """Solve all problems as ``solve`` does, and measure them as least squares."""
    ((a, b),) = problems.chunks(len(problems))
    system = as_system(problems.options)
    if not system.engine.tuning[ways.CoreTuning].fits(*b.shape[1:]):
        raise Declined
    found = ways.by_core(Systems(a, b, system), None, label=label, format=FORMATS[format])
    (a, b), x = map(in_double, (a, b)), found.values.x
    residual, gradient = residual_and_gradient(a, x, b)
    sizes, (left, of_b) = two_norms(a, 1)[..., None], (two_norms(y, 1) for y in (residual, b))
    # Any residual is in the range of a regular A, whose norm, with columns of norm 1, is at least 1.
    of_gradient, image = two_norms(gradient / sizes, 1), two_norms(sizes * x, 1)
    norm = over(of_gradient, left).clamp_min(1.0)
    measures = Norms(left, of_gradient, left, norm * image, of_b).measures(norm)
    error, optimality = (y.amax(1).numpy() for y in (measures.backward_error, measures.optimality))
    assert isinstance(found.measured, np.ndarray)
    known = dict(zip(SystemsSolutions.names, found.measured, strict=True))
    rank = np.full_like(error, a.shape[2])
    known |= {"refined_error": error, "backward_error": error, "optimality": optimality, "rank": rank}
    known["zero"] = 1.0 * ~x.flatten(1).any(1).numpy()
    numbers = np.stack([known[name] for name in LeastSquaresSolutions.names])
    values = LeastSquaresSolutions.from_numbers(
        x, numbers, forward_error=found.values.forward_error, residual_norm=left
    )
    return Answer(values, label, iterations=found.iterations, measured=numbers)
