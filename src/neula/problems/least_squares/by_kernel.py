"""Small least-squares problems on a CPU, alone or in batches: by one call of the compiled core.

What is accepted here is what the judge of the chain accepts; what is not goes on to other ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from neula.algorithms.krylov.batched_lstsq import FEW as FEW_PROBES
from neula.algorithms.krylov.batched_lstsq import MARGINS, PROBES, ROUNDING
from neula.algorithms.krylov.doubled_refinement import MAX_STEPS
from neula.algorithms.krylov.one_launch import limits_of
from neula.algorithms.lapack.vectors import probe_array
from neula.certificates.rank import rounding_of
from neula.certificates.verdict import Evidence
from neula.engines import FP64
from neula.kernels import seminormal_host
from neula.kernels.core import DTYPES
from neula.kernels.seminormal_host import NUMBERS, Probes, SeminormalHostSolutions, SolutionMethod
from neula.pipeline.chain import Answer
from neula.pipeline.in_numpy import FEW
from neula.pipeline.progress import stage
from neula.problems.least_squares.prepared import LeastSquaresProblems
from neula.problems.least_squares.prepared import Way as Step
from neula.problems.least_squares.problem import LeastSquaresOptions, LeastSquaresSolutions
from neula.problems.least_squares.report import SingleProblemSolution

LARGEST, WIDEST = 1 << 17, 128
"""Elements, and columns or rows, of matrices up to which its one thread takes less time than a library with
several; so many also has the Gram matrix of columns that may be dependent."""

RIGHT = 1 << 20
"""Elements of a matrix, times right-hand sides, up to which these are refined one by one. More of them the
library multiplies by together, in slices for twice the precision."""

NEAR = 1 << 14
"""Elements up to which more vectors show how fast refinement of dependent columns converges: passes take less
time than calls of Python."""

LABEL = "cholesky fp64 + seminormal"

SHIFTED = "shifted cholesky fp64 + seminormal"
"""Label of the core where columns are too dependent for the factor of their Gram matrix."""

DEPENDENT = "pivoted cholesky fp64 + seminormal"
"""Label of the core where columns are dependent."""

LABELS = {
    SolutionMethod.GRAM: LABEL,
    SolutionMethod.SHIFTED: SHIFTED,
    SolutionMethod.FEW_ROWS: LABEL,
    SolutionMethod.DEPENDENT: DEPENDENT,
}

ELEMENTS = 1 << 22
"""Of the matrices that are solved in one call, which nothing interrupts."""


def suits(m: int, n: int, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for plain problems of a shape."""
    small = 0 < min(m, n) <= WIDEST and m * n <= LARGEST
    return small and dtype in DTYPES and seminormal_host.available()


def most_right(m: int, n: int) -> int:
    """Right-hand sides of a problem up to which they are refined one by one."""
    return max(FEW, RIGHT // max(1, m * n))


def solve_by_kernel(
    a: torch.Tensor, b: torch.Tensor, options: LeastSquaresOptions
) -> tuple[SingleProblemSolution | None, bool]:
    """One problem, b having shape (m, k): the solution where it is accepted, and whether the
    rank of A is in doubt.
    """
    m, n = a.shape
    if not (suits(m, n, options.dtype) and b.shape[1] <= most_right(m, n)):
        return None, False
    found = _solved(a, b, options)
    if found is None:
        return None, False
    numbers, limits = found.numbers.tolist(), options.limits((m, n))
    evidence = Evidence.from_numbers(numbers)
    condition, _, optimality, rank, zero, steps, way = numbers[len(Evidence._fields) :]
    if zero or not replace(limits, forward_error=options.first_error(m, n)).accept(evidence):
        # Without a factor nothing is known: condition numbers are NaN.
        return None, condition >= limits.condition or rank < min(m, n)
    errors, norms, condition = found.forward_error.tolist(), found.residual_norm.tolist(), max(1.0, condition)
    label, x, steps, rank = LABELS[SolutionMethod(way)], found.x[0], int(steps), int(rank)
    backward = evidence.backward_error
    return SingleProblemSolution(label, x, steps, backward, condition, optimality, errors, norms, rank), False


def batch_by_kernel(
    problems: LeastSquaresProblems,
    before: Answer[LeastSquaresSolutions] | None,
    *,
    label: str,
    together: Step,
) -> Answer[LeastSquaresSolutions]:
    """All of a batch; many right-hand sides are better taken otherwise."""
    if problems.b.shape[2] > most_right(*problems.a.shape[1:]):
        return together(problems, before)
    report, parts, numbers, steps = stage(problems.options.progress, label), [], [], 0
    used = {SolutionMethod.GRAM}
    size = max(1, ELEMENTS // problems.a[0].numel())
    for a, b in problems.chunks(size):
        found = _solved(a, b, problems.options)
        if found is None:
            return together(problems, before)
        *known, taken, ways = torch.from_numpy(found.numbers).view(len(NUMBERS), -1)
        numbers.append(torch.stack(known))
        parts.append(_members(found, known))
        steps = max(steps, int(taken.max()))
        used.update(SolutionMethod(way) for way in ways[known[0] == 0].unique().tolist())  # of what is solved
        report(min(1.0, len(parts) * size / len(problems)))
    measured = numbers[0] if len(numbers) == 1 else torch.cat(numbers, 1)
    return Answer(LeastSquaresSolutions.joined(parts), LABELS[max(used)], iterations=steps, measured=measured)


def _members(found: SeminormalHostSolutions, numbers: Sequence[torch.Tensor]) -> LeastSquaresSolutions:
    of, x = dict(zip(LeastSquaresSolutions.names, numbers, strict=True)), torch.from_numpy(found.x)
    return LeastSquaresSolutions(
        x=x,
        forward_error=torch.from_numpy(found.forward_error).view(len(x), -1),
        residual_norm=torch.from_numpy(found.residual_norm).view(len(x), -1),
        rank=of["rank"].long(),
        doubtful=of["doubtful"] > 0,
        **{name: of[name] for name in LeastSquaresSolutions.of_matrices},
    )


def _solved(a: torch.Tensor, b: torch.Tensor, options: LeastSquaresOptions) -> SeminormalHostSolutions | None:
    a, b = (x if x.dtype in DTYPES else x.double() for x in (a, b))
    m, n = a.shape[-2:]
    limits, verdict = (
        limits_of(options.digits, min(MAX_STEPS, options.max_iterations)),
        options.limits((m, n)),
    )
    return seminormal_host.solved(
        *(a, b, options.dtype, limits, verdict.backward_error, verdict.condition),
        rcond=options.rcond,
        rounding=rounding_of(n, options.unit),
        probes=_probes(m, n) if n**2 <= LARGEST else None,
    )


@lru_cache(maxsize=64)
def _probes(m: int, n: int) -> Probes:
    count = PROBES if m * n <= NEAR else FEW_PROBES
    return Probes(probe_array(n, count), MARGINS[count], ROUNDING * FP64.u)
