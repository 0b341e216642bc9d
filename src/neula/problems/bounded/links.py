"""The table of links for least squares with bounds.

Block pivoting takes a few exchanges, but columns have to be independent, and those of a wide matrix are not.
The active-set method always ends. Parts of a Gram matrix do for condition numbers up to 1e5.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from neula.algorithms.bounded.active_set import active_set, block_pivoting
from neula.algorithms.bounded.free_sets import SHARED, Factorize, by_cholesky, by_householder, minimize
from neula.pipeline.chain import Answer, Link
from neula.pipeline.table import Chain, Row, Rule, Table, labelled
from neula.problems.bounded.evidence import values_of
from neula.problems.bounded.problem import BoundedProblems, BoundedValues

Solution = Answer[BoundedValues]

EXCHANGES = 100
"""Most exchanges of block pivoting. Ten suffice for most problems. If rounding errors decide, more may not
terminate, and there may be as many single exchanges as sets."""


def by_block_pivoting(problems: BoundedProblems, before: Solution | None, *, label: str) -> Solution:
    """Exchange all infeasible variables at once, beginning with the unconstrained solution."""
    limit = problems.whole.options.max_iterations or EXCHANGES
    start, reduced = problems.whole.unbounded[problems.places], problems.reduced
    if reduced.equalities is not None:
        start = minimize(reduced, start, torch.ones_like(start, dtype=torch.bool), by_cholesky).x
    found = block_pivoting(reduced, start, max_iterations=limit, factorize=by_cholesky)
    return Answer(values_of(problems, found, by_cholesky), label, iterations=int(found.iterations.sum()))


def _start(problems: BoundedProblems, limit: int) -> torch.Tensor:
    """Solutions without bounds; SciPy's for a few problems on a CPU with lower bounds alone, if violated."""
    reduced, shortest = problems.reduced, problems.whole.unbounded[problems.places]
    lower, upper = (x.expand(len(reduced), -1) for x in (reduced.low, reduced.high))
    suited = len(reduced) < SHARED and lower.is_cpu and bool(lower.isfinite().all() & upper.isinf().all())
    if not suited or bool((shortest > lower).all()):
        return shortest
    from scipy.optimize import nnls

    found, right = lower.clone(), reduced.residual(lower)
    for i, owner in enumerate(reduced.owner.tolist()):
        try:
            found[i] += torch.from_numpy(nnls(reduced.r[owner].numpy(), right[i].numpy(), maxiter=limit)[0])
        except RuntimeError:  # too many steps
            return shortest
    return found


def by_active_set(
    problems: BoundedProblems, before: Solution | None, *, label: str, factorize: Factorize
) -> Solution:
    """One variable at a time, beginning with what was found before."""
    n = problems.reduced.n
    limit = problems.whole.options.max_iterations or max(10, 3 * n)
    start = _start(problems, limit) if before is None else before.values.x
    reduced = problems.reduced
    if reduced.equalities is None:
        found = active_set(reduced, start, max_iterations=limit, factorize=factorize)
    else:  # large weights show which variables are at bounds
        found = active_set(reduced.weighted(), start, max_iterations=limit, factorize=factorize)
        found = block_pivoting(reduced, found.x, max_iterations=limit, factorize=factorize)
    return Answer(values_of(problems, found, factorize), label, iterations=int(found.iterations.sum()))


BoundedLink = Link[BoundedProblems, BoundedValues]

Shape = tuple[int, int, int]
"""Rows, columns, and equality constraints."""


def chain(m: int, n: int, equalities: int = 0) -> Sequence[BoundedLink]:
    """Links for matrices of a shape, and for a number of equality constraints."""
    return Chain(TABLE, (m, n, equalities))


_when = Rule[Shape, bool]

_tall = _when(
    "at least as many rows as columns, or equality constraints",
    lambda case: case[0] >= case[1] or case[2] > 0,
)

_unconstrained = _when("no equality constraints", lambda case: not case[2])

_wide = _when("fewer rows than columns", lambda case: case[0] < case[1])

TABLE: Table[Shape] = (
    Row("block pivoting cholesky", labelled(by_block_pivoting), (_tall,)),
    Row("active set cholesky", labelled(by_active_set, factorize=by_cholesky), (_wide, _unconstrained)),
    Row("active set householder", labelled(by_active_set, improves=True, factorize=by_householder), ()),
)
"""Cheapest first."""
