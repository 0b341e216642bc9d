"""One least-squares problem in arrays: the ways by NumPy and LAPACK, and when a solution is accepted.

What is accepted here is what the judge of the chain accepts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from neula.algorithms.krylov.doubled_refinement import MAX_STEPS
from neula.algorithms.lapack.dependent import Dependent, Plain, Precise
from neula.algorithms.lapack.refinement import RefinedVectorSolution, length, refine, refine_rows
from neula.algorithms.lapack.seminormal import SeminormalFactor, SeminormalProblem
from neula.algorithms.lapack.square import SquareSystem
from neula.algorithms.lapack.wide import Wide
from neula.certificates.bounds import lstsq_bound
from neula.certificates.forward_error import rounded_error
from neula.certificates.rank import rounding_of
from neula.certificates.residuals import no_longer
from neula.engines import FP32, FP64
from neula.kernels.magnitudes import MODERATE
from neula.pipeline.in_numpy import IN_NUMPY, is_large
from neula.problems.least_squares.problem import HALF, ROUNDED_RANK, LeastSquaresOptions

SINGLE = 3000
"""Order up to which LU in single precision comes first, where no more is asked for: it does up to condition
numbers of some 2e4, and that of a random matrix is some times its order. Of normal ones nine in ten are good
enough at order 2000, three in four at 3000, half at 4000; these take half the time, the others a quarter
more."""

SHORT = 1 << 17
"""Elements of matrices with fewer rows than columns up to which the calls here take less time than tensors
do: from there on cutting them into slices takes longer (500 x 2000 on an AMD EPYC: 50 ms, and 26)."""

DIGITS = 1 << 20
"""Elements up to which they are."""

System = SeminormalProblem | SquareSystem | Wide | Plain | Precise


class LeastSquaresColumn(NamedTuple):
    """What is known of one right-hand side."""

    x: np.ndarray
    residual_norm: float
    forward_error: float
    backward_error: float
    refined_error: float
    optimality: float
    steps: int


class ArraySolution(NamedTuple):
    """A problem that is solved.

    Attributes
    ----------
    label : str
        How.
    condition : float
    rank : int
    columns : list of LeastSquaresColumn
        Solutions.
    """

    label: str
    condition: float
    rank: int
    columns: list[LeastSquaresColumn]


def solved_in_arrays(
    a: np.ndarray, b: list[np.ndarray], options: LeastSquaresOptions, *, refused: bool
) -> ArraySolution | None:
    """One problem by the first way whose solutions are accepted.

    Parameters
    ----------
    a : array, shape (m, n)
    b : list of array, shape (m,)
        float64.
    options : LeastSquaresOptions
    refused : bool
        Whether it is known that the rank of A is in doubt.
    """
    if len(a) < a.shape[1] and a.size > SHORT:
        return None
    for label, system, largest_error in _ways(a, b, options, refused=refused):
        columns = _columns(system, b, options, largest_error)
        if columns is not None:
            rank = system.rank if isinstance(system, Dependent) else min(a.shape)
            return ArraySolution(label, system.condition, rank, columns)
    return _without_zeros(a, b, options)


def _without_zeros(a: np.ndarray, b: list[np.ndarray], options: LeastSquaresOptions) -> ArraySolution | None:
    """The problem without columns of zeros, if there are some: the shortest x is zero there."""
    counting = np.asarray(a.any(axis=0))
    if counting.all() or not counting.any():
        return None
    found = solved_in_arrays(a[:, counting], b, options, refused=False)
    if found is None:
        return None
    for i, column in enumerate(found.columns):
        x = np.zeros(len(counting))
        x[counting] = column.x
        found.columns[i] = column._replace(x=x)
    return found


_Ways = Iterator[tuple[str, System, float]]
"""Labels, systems, and what forward errors may be."""


def _ways(a: np.ndarray, b: list[np.ndarray], options: LeastSquaresOptions, *, refused: bool) -> _Ways:
    """Cheapest first, each factorized when it is its turn."""
    m, n = a.shape
    factors: list[SeminormalFactor] = []
    if m < n:
        yield from _wide(a, options)
    elif not refused:
        if m == n:
            yield from _square(a, b, options)
        yield from _tall(a, options, factors)
    yield from _dependent(a, options, factors)


def _square(a: np.ndarray, b: list[np.ndarray], options: LeastSquaresOptions) -> _Ways:
    """By half the operations of a QR; what did it comes first."""
    doubled, large = options.refines_doubled(*a.shape), is_large(a.size, options)
    single = options.target is not FP64 and not doubled and len(a) <= SINGLE
    for format in (FP32, FP64) if single else (FP64,):
        found = SquareSystem.factorize(
            a, b, positive=False, single=format is FP32, doubled=doubled, large=large
        )
        if found is not None:
            yield f"lu {format.name} with pivoting", found[0], options.largest_error


def _tall(a: np.ndarray, options: LeastSquaresOptions, refused: list[SeminormalFactor]) -> _Ways:
    doubled, large = options.refines_doubled(*a.shape), is_large(a.size, options)
    single = options.target is not FP64 and not doubled
    system = SeminormalProblem.factorize(a, doubled=doubled, single=single, large=large, refused=refused)
    if system is not None:
        yield f"{system.method} + seminormal", system, options.largest_error


def _wide(a: np.ndarray, options: LeastSquaresOptions) -> _Ways:
    system = Wide.factorize(a, lstsq_bound(options.target, len(a)), large=is_large(a.size, options))
    if system is not None:
        yield f"{system.method} + seminormal", system, options.first_error(*a.shape)


def _dependent(a: np.ndarray, options: LeastSquaresOptions, refused: list[SeminormalFactor]) -> _Ways:
    """In working precision where that leaves enough digits, unless more are asked for."""
    known = next((x for x in refused if x.method == "householder fp64"), None)
    large = is_large(a.size, options)
    precise = [options.refines_doubled(max(a.shape), min(a.shape))]
    if not precise[0] and a.size <= DIGITS:
        precise.append(True)
    for doubled in precise:
        rounding = rounding_of(a.shape[1], options.unit)
        system = Dependent.factorize(
            a, options.rcond, rounding=rounding, doubled=doubled, large=large, factor=known
        )
        if system is None:
            return
        error = options.largest_error if doubled or len(precise) == 1 else min(HALF, options.largest_error)
        yield f"{system.method} + seminormal", system, error


def _columns(
    system: System, b: list[np.ndarray], options: LeastSquaresOptions, largest_error: float
) -> list[LeastSquaresColumn] | None:
    """All solutions; None where one is not accepted, or the rank is in doubt."""
    if not isinstance(system, Dependent):
        least = ROUNDED_RANK * options.certain_rcond(system.shape)
        if isinstance(system, SeminormalProblem):
            least = options.counting_rcond(system.shape)
        if not system.condition_bound * least < 1:
            return None
    bound, columns = lstsq_bound(options.target, min(system.shape)), []
    known = system.first if isinstance(system, SquareSystem) else [None] * len(b)
    for right, first in zip(b, known, strict=True):
        found = _solved(system, right, first, options)
        if found is None or not (found.backward_error <= bound and found.forward_error <= largest_error):
            return None
        columns.append(found)
    return columns


def _refined(
    system: System, b: np.ndarray, first: np.ndarray | None, options: LeastSquaresOptions
) -> RefinedVectorSolution | None:
    steps = min(MAX_STEPS, options.max_iterations)
    if isinstance(system, Wide | Precise):
        return refine_rows(system, b, options.digits, steps)
    return refine(system, b, options.digits, steps, first)


def _solved(
    system: System, b: np.ndarray, first: np.ndarray | None, options: LeastSquaresOptions
) -> LeastSquaresColumn | None:
    """One solution with its evidence; None where the residual is longer than b, and where x is not finite."""
    b_norm = length(b)
    if not 1 / MODERATE <= b_norm <= MODERATE:
        return None
    found = _refined(system, b, first, options)
    if found is None:
        return None
    refined_error, optimality, forward_error = system.errors(b, found)
    # Residuals in working precision do not see what x lacks of the sum, unless that is all there is.
    lost = found.x_low if system.doubled or isinstance(system, SquareSystem) else None
    x, rounding = found.x if system.scales is None else found.x * system.scales, 0.0
    if options.dtype != torch.float64:
        x = x.astype(IN_NUMPY[options.dtype]).astype(np.float64)
        rest = found.x - (x if system.scales is None else x / system.scales)
        lost, rounding = rest if lost is None else lost + rest, system.size(rest) / found.size
    residual_norm = length(found.residual if lost is None else found.residual + system.change(lost))
    if not no_longer(residual_norm, b_norm, system.shape):
        return None
    return LeastSquaresColumn(
        x,
        residual_norm,
        rounded_error(forward_error, rounding),
        refined_error + rounding + found.low,
        refined_error,
        optimality,
        found.steps,
    )
