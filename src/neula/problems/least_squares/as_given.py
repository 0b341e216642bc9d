"""Problems that are solved as given, without a scaled copy: in numbers near 1, which most are."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Self

import torch

from neula.algorithms.krylov.batched_lstsq import lengths
from neula.algorithms.krylov.doubled_refinement import MAX_STEPS, Refinement
from neula.algorithms.krylov.pace import Pace
from neula.algorithms.scaled_problems import ScaledProblems
from neula.certificates.bounds import lstsq_bound
from neula.certificates.forward_error import MAX_RATE
from neula.engines import FP64
from neula.engines.formats import in_double
from neula.kernels.doubled.doubled import cuts
from neula.kernels.few_vectors.one_pass_host import pays
from neula.kernels.magnitudes import MODERATE, largest_magnitude
from neula.pipeline.gradients import stacked_problem
from neula.problems.least_squares.problem import LeastSquaresOptions, LeastSquaresSolutions
from neula.problems.least_squares.with_r import RSource, measured_members, refines_doubled_of, system_of

REFINED_ERROR = LeastSquaresSolutions.names.index("refined_error")

ALIKE = 4.0
"""Columns whose norms differ by less are not scaled before their products are doubled."""


class PlainProblems(NamedTuple):
    """Tall problems, neither weighted nor damped."""

    a: torch.Tensor  # shape (batch, m, n)
    b: torch.Tensor  # shape (batch, m, k)
    options: LeastSquaresOptions  # without weights and damping
    # Backward error of rounding weighted elements: with columns of norm 1, what it changes of A has a
    # Frobenius norm of at most sqrt(n) u, and A a norm of at least 1.
    data_error: float = 0.0

    @classmethod
    def from_arrays(cls, a: torch.Tensor, b: torch.Tensor, options: LeastSquaresOptions) -> Self | None:
        """Weights and damping go into A, unless residuals are in twice the working precision; None for wide
        problems, and those.
        """
        m, n = options.over_rows.count(a.shape[1]), a.shape[2]
        weighted = options.weights is not None
        if options.is_wide(m, n):
            return None
        if not (weighted or options.damp):
            return cls(a, b, options)
        if options.over_rows.spread or options.refines_doubled(m, n):
            return None
        a, b = stacked_problem(a, b, options.weights, options.damp)
        plain = replace(options, weights=None, damp=0.0)
        return cls(a, b, plain, n**0.5 * FP64.u if weighted else 0.0)


def as_given(
    plain: PlainProblems, source: RSource, pace: Pace, gram: torch.Tensor | None
) -> tuple[LeastSquaresSolutions, int, torch.Tensor] | None:
    """Factorize, refine and measure problems in numbers near 1, which most are; None for others.

    The norms of the columns of R tell whether numbers are near 1. A synchronous host reads that before
    anything else. An asynchronous one has by then launched the steps, which follow a long product, and their
    evidence, and reads all numbers at once. If R is to be checked first, it also reads before the steps: with
    an R in half precision the rate of convergence, too.

    Returns solutions, how many steps they took, and their measured numbers, possibly on the host.
    """
    a, b, options, data_error = plain
    over_rows = options.over_rows
    doubled = refines_doubled_of(options, a, source)
    narrow = not doubled and len(a) == 1 and pays(a[0])
    problems = ScaledProblems.as_given(a, b, over_rows, narrow=narrow)
    known = {} if gram is None else {"gram": gram}
    r = source.factor(a if source.narrow else in_double(problems.a), over_rows=over_rows, **known)
    norms = lengths(r)
    usable = _moderate(norms, over_rows.largest(largest_magnitude(problems.b, 1)))
    if doubled and cuts(a.device):
        usable &= _alike(norms)
    read_first = source.checked_first or not pace.is_asynchronous
    if read_first and not source.half_precision and not bool(over_rows.agree(usable)):
        return _broken_down(problems, r)
    system = system_of(problems, r, options, source, gram, norms)
    if source.checked_first and source.half_precision:
        good = (system.rate <= MAX_RATE).any()
        near_one, fast_enough = over_rows.agree(torch.stack([usable, good])).tolist()
        if not near_one:
            return _broken_down(problems, r)
        if not fast_enough:
            return _missing(problems)
    refinement = Refinement(system, problems.b, options.digits, over_rows)
    most = min(MAX_STEPS, options.max_iterations)
    if pace.is_asynchronous:
        refinement.advance(min(pace.steps, most), pace.steps)
        settled = partial(system.settled, left=refinement.left + system.size(refinement.low))
        members = measured_members(
            problems, system, refinement.solution(settled), options, a.shape[1], data_error
        )
        promising = refinement.active.any() & (system.rate <= MAX_RATE).any()
        numbers = members.measured()
        read = over_rows.agree(torch.cat([numbers.flatten(), torch.stack([usable, promising])])).cpu()
        near_one, goes_on = read[-2:].tolist()
        if not near_one:
            return _broken_down(problems, r)
        numbers = read[:-2].reshape(numbers.shape)
        if not goes_on and bool((numbers[REFINED_ERROR] <= lstsq_bound(options.target, a.shape[2])).all()):
            return members, refinement.steps, numbers
        most = most if goes_on else refinement.steps
    refinement.advance(most, refinement.steps + 1)
    members = measured_members(problems, system, refinement.solution(), options, a.shape[1], data_error)
    return members, refinement.steps, members.measured()


def _broken_down(
    problems: ScaledProblems, r: torch.Tensor
) -> tuple[LeastSquaresSolutions, int, torch.Tensor] | None:
    """A single problem of which nothing is known where R broke down, and not because its numbers are far from
    1; None for others.
    """
    over_rows = problems.over_rows
    if len(r) > 1 or not bool(over_rows.agree(r.isnan().any())):
        return None
    (sizes,) = over_rows.norms(problems.a, dim=1)
    if not bool(over_rows.agree(_moderate(sizes, over_rows.largest(largest_magnitude(problems.b, 1))))):
        return None
    return _missing(problems)


def _missing(problems: ScaledProblems) -> tuple[LeastSquaresSolutions, int, torch.Tensor]:
    a, shape = problems.a, (len(problems.a), problems.a.shape[2], problems.b.shape[2])
    missing = LeastSquaresSolutions.full(math.nan, *shape, a.device, a.dtype)
    return missing, 0, missing.measured()


def _moderate(norms: torch.Tensor, size_of_b: torch.Tensor) -> torch.Tensor:
    """Whether squares neither overflow nor underflow; a right-hand side may be zero."""
    smallest, largest = norms.aminmax()
    of_b = torch.where(size_of_b == 0, 1.0, size_of_b).aminmax()
    enough = torch.minimum(smallest, of_b.min) >= 1 / MODERATE
    return enough & (torch.maximum(largest, of_b.max) <= MODERATE)


def _alike(norms: torch.Tensor) -> torch.Tensor:
    """Whether the columns of each matrix are of a size: where they are cut, it is at the same places."""
    return (norms.amax(1) <= ALIKE * norms.amin(1)).all()
