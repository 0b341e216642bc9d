"""The table of links for least squares with bounds.

Block pivoting takes a few exchanges, but columns have to be independent, and those of a wide matrix are not.
The active-set method always ends. Parts of a Gram matrix do for condition numbers up to 1e5.
"""

from __future__ import annotations

from collections.abc import Sequence

from neula.algorithms.bounded.free_sets import by_cholesky, by_householder
from neula.pipeline.chain import Link
from neula.pipeline.table import Chain, Row, Rule, Table, labelled
from neula.problems.bounded import ways
from neula.problems.bounded.problem import BoundedProblems, BoundedValues

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
    Row("block pivoting cholesky", labelled(ways.by_block_pivoting), (_tall,)),
    Row("active set cholesky", labelled(ways.by_active_set, factorize=by_cholesky), (_wide, _unconstrained)),
    Row("active set householder", labelled(ways.by_active_set, improves=True, factorize=by_householder), ()),
)
"""Cheapest first."""
