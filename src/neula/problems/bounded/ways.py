"""Methods for least squares with bounds, for all problems together."""

from __future__ import annotations

from neula.algorithms.bounded.active_set import active_set
from neula.algorithms.bounded.block_pivoting import block_pivoting
from neula.algorithms.bounded.free_sets import Factorize
from neula.pipeline.chain import Answer
from neula.problems.bounded.evidence import values_of
from neula.problems.bounded.problem import BoundedProblems, BoundedValues

Solution = Answer[BoundedValues]

EXCHANGES = 100
"""Of block pivoting. Ten do on most problems; one that takes more is at the mercy of rounding errors, and
single exchanges may be as many as there are sets."""


def by_block_pivoting(
    problems: BoundedProblems, before: Solution | None, *, label: str, factorize: Factorize
) -> Solution:
    """All infeasible variables at once, beginning with the solution without bounds."""
    limit = problems.whole.options.max_iterations or EXCHANGES
    start = problems.whole.unbounded[problems.places]
    found = block_pivoting(problems.reduced, start, max_iterations=limit, factorize=factorize)
    return Answer(values_of(problems, found, factorize), label, iterations=int(found.iterations.sum()))


def by_active_set(
    problems: BoundedProblems, before: Solution | None, *, label: str, factorize: Factorize
) -> Solution:
    """One variable at a time, beginning with what was found before."""
    n = problems.reduced.n
    start = problems.whole.unbounded[problems.places] if before is None else before.values.x
    limit = problems.whole.options.max_iterations or max(10, 3 * n)
    found = active_set(problems.reduced, start, max_iterations=limit, factorize=factorize)
    return Answer(values_of(problems, found, factorize), label, iterations=int(found.iterations.sum()))
