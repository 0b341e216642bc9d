"""Least squares with square matrices on a CPU: linear systems, if these certainly have full rank.

LU takes half of the operations of a Gram matrix and its factor, or of a QR factorization.
"""

from __future__ import annotations

import numpy as np

from neula.algorithms.elimination.compiled import EQUILIBRATED
from neula.algorithms.krylov.passes import residual_and_gradient
from neula.algorithms.scaling import binary_exponents
from neula.certificates.backward_error import Norms
from neula.engines import Format
from neula.engines.formats import in_double
from neula.kernels.magnitudes import two_norms
from neula.kernels.shift import shift
from neula.kernels.small_problems.refining import over
from neula.pipeline.chain import Answer, Declined
from neula.pipeline.progress import stage
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
        progress=None,  # one stage, which by_lu reports
        positive=False,
        pivot=None,
        compute=None,
    )


def suits(m: int, n: int, options: LeastSquaresOptions) -> bool:
    """Whether problems of a shape are square, without weights and damping, and for LU of the library."""
    square = m == n and options.weights is None and not (options.damp or options.named)
    return square and ways.is_for_core(n, system := as_system(options)) and not ways.is_small(n, system)


def by_lu(
    problems: LeastSquaresProblems, before: LeastSquaresAnswer | None, *, label: str, format: Format
) -> LeastSquaresAnswer:
    """Solve all problems as ``solve`` does, and measure them as least squares."""
    ((given, b),) = problems.chunks(len(problems))
    system = as_system(problems.options)
    if not system.engine.tuning[ways.CoreTuning].fits(*b.shape[1:]):
        raise Declined
    report = stage(problems.options.progress, label)
    a, exponents = in_double(given), None
    sizes = two_norms(a, 1)[..., None]
    if bool((sizes.amax(1) > EQUILIBRATED * sizes.amin(1)).any()):
        # The core doubts its evidence then; neither pivots nor errors in the norm of D depend on D.
        exponents = binary_exponents(sizes)
        given = a = shift(a, -exponents.mT)
        sizes = shift(sizes, -exponents)
    zero = ~b.any(1, keepdim=True)  # errors relative to b are those of another right-hand side
    systems = Systems(given, b.masked_fill(zero, 1.0), system)
    found = ways.by_core(systems, None, label=label, format=format)
    b, x = in_double(b), in_double(found.values.x).masked_fill(zero, 0.0)
    residual, gradient = residual_and_gradient(a, x, b)
    left, of_b, of_gradient, image = (two_norms(y, 1) for y in (residual, b, gradient / sizes, sizes * x))
    # Any residual is in the range of a regular A. A step of the power method bounds the norm of A from below;
    # it is at least 1, as columns have norm 1.
    norm = over(two_norms(a @ (gradient / sizes**2), 1), of_gradient).clamp_min(1.0)
    measures = Norms(left, of_gradient, left, norm * image, of_b).measures(norm)
    error, optimality = (y.amax(1).numpy() for y in (measures.backward_error, measures.optimality))
    assert isinstance(found.measured, np.ndarray)
    known = dict(zip(SystemsSolutions.names, found.measured, strict=True))
    rank = np.full_like(error, a.shape[2])
    known |= {"refined_error": error, "backward_error": error, "optimality": optimality, "rank": rank}
    forward_error = found.values.forward_error.masked_fill(zero.squeeze(1), 0.0)
    known["forward_error"] = forward_error.amax(1).numpy()
    known["zero"] = 1.0 * zero.flatten(1).any(1).numpy()
    if exponents is not None:
        y, x = x, shift(x, -exponents)
        if bool((shift(in_double(x.to(system.dtype)), exponents) != y).any()):
            raise Declined  # x overflows or underflows its dtype
    numbers = np.stack([known[name] for name in LeastSquaresSolutions.names])
    values = LeastSquaresSolutions.from_numbers(x, numbers, forward_error=forward_error, residual_norm=left)
    report(1.0)
    return Answer(values, label, iterations=found.iterations, measured=numbers)
