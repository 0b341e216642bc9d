"""The table of links for Cholesky factors.

The recursion, or tiles, where that takes less time than what the library does, else the library; the last
link is the library in double precision, which alone says that a matrix is not positive definite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from neula.algorithms.elimination.cholesky import CholeskyOrders
from neula.engines import FORMATS, FP64
from neula.pipeline.chain import Link
from neula.pipeline.table import LAUNCHED, Case, Chain, Row, Rule, Table, way
from neula.problems.definite.problem import CholeskyOptions, CholeskyValues, Symmetric
from neula.problems.definite.ways import by_library, in_double, recursive

CholeskyLink = Link[Symmetric, CholeskyValues]


@dataclass(frozen=True)
class CholeskyCase(Case):
    """Matrices of one order, without numbers."""

    count: int
    n: int
    options: CholeskyOptions
    wait: bool = True  # whether the first link may wait for the host

    @property
    def launches(self) -> bool:
        """Whether links before the last one only launch."""
        return not self.tuning.lapack

    @property
    def double(self) -> bool:
        """Whether products are in double precision."""
        return self.options.low.format is FP64

    @property
    def tiled(self) -> bool:
        """Whether tiles in double precision come first."""
        most = self.tuning[CholeskyOrders].tiled_cholesky
        return self.double and self.launches and self.count == 1 and self.n <= most

    @property
    def pays(self) -> bool:
        """Whether anything beats the library in single precision."""
        n, orders = self.n, self.tuning[CholeskyOrders]
        large = self.count > 1 or n <= orders.tiled_cholesky or n >= orders.cholesky
        return n >= orders.batched_cholesky and large


def chain(count: int, n: int, options: CholeskyOptions, *, wait: bool = True) -> Sequence[CholeskyLink]:
    """Links for ``count`` matrices of order n together, or for a single one."""
    return Chain(TABLE, CholeskyCase(count, n, options, wait))


def _recursive(case: CholeskyCase, label: str, name: str) -> CholeskyLink:
    return Link(label, partial(recursive, arithmetic=case.options.low), launches_only=case.launches)


def _library(case: CholeskyCase, label: str, name: str) -> CholeskyLink:
    launches = name == "fp32" and case.launches
    return Link(label, partial(by_library, format=FORMATS[name]), launches_only=launches)


_when = Rule[CholeskyCase, bool]

_not_waiting = _when(
    "``wait=False`` on a GPU where no tiles come first",
    lambda case: not case.wait and case.launches and case.double and not case.tiled,
)

_tiles = _when("one matrix on a GPU, up to order 8192", lambda case: case.tiled)

_pays = _when(
    "accuracies below fp64, batches on a GPU, one up to order 8192 or where products are fast",
    lambda case: not case.double and case.pays,
)

_low = _when("accuracies below fp64 elsewhere", lambda case: not (case.double or case.pays))

_products = Rule[CholeskyCase, Sequence[str]](
    "the cheapest that reaches the accuracy", lambda case: [case.options.low.name]
)

_unread = way(partial(by_library, format=FP64, may_wait=False), launches_only=True)
CHOLESKY = "cholesky {}"

TABLE: Table[CholeskyCase] = (
    Row(CHOLESKY, _unread, (_not_waiting,), place=LAUNCHED),
    Row(CHOLESKY, way(in_double, launches_only=True), (_tiles,), place=LAUNCHED),
    Row(CHOLESKY, _recursive, (_pays,), arithmetics=_products),
    Row(CHOLESKY, _library, (_low,), arithmetics=("fp32",)),
    Row(CHOLESKY, _library, ()),
)
"""Cheapest first."""
