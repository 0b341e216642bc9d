"""The table of links for leading singular triplets.

A part of the singular values comes from iterations where these cost less than the Gram matrix and its
eigenvectors, from the Gram matrix otherwise; all of them, and what neither finds, from QR and the SVD of R,
or for small matrices, unless their rows are distributed over processes, from the library's SVD.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from neula.engines import FP16, FP16_COR, FP64, Tuning
from neula.pipeline.chain import Link
from neula.pipeline.table import Case, Chain, Row, Rule, Table, way
from neula.problems.low_rank import ways
from neula.problems.low_rank.problem import SVDOptions, SVDValues, TallMatrix

SVDLink = Link[TallMatrix, SVDValues]

OVERSAMPLING = 4
"""A block has a column for each triplet that is wanted, and more for each so many of them."""

MULTIPLE = 8
"""Columns of a block come in such numbers, so that products fill the matrix units."""

FEWEST = 6
"""Products by ``A^T A`` that must be worth it before iterations are tried: four do where there is a gap."""

LIMIT = 1000
"""Largest number of products by ``A^T A`` if iterations are requested by name."""


@dataclass(frozen=True)
class SVDTuning:
    """Prices of the ways to singular triplets."""

    gram_part: float  # part of all triplets up to which the leading ones are computed by themselves
    eigenvectors: float  # price of a symmetric eigenproblem, in operations in float32 for each n^3
    iteration: float  # price of a product by A^T A beside its operations, in operations in float32
    block: float  # price of that product for each element of A and column of the block, in the same unit
    direct_svd: int  # m n^2 up to which the library's SVD takes no longer


@dataclass(frozen=True)
class SVDCase(Case):
    """A tall matrix without numbers."""

    m: int
    n: int
    options: SVDOptions

    @property
    def rank(self) -> int:
        """How many triplets are wanted; all of them where none is named."""
        return self.n if self.options.rank is None else self.options.rank

    @property
    def small(self) -> bool:
        """Whether the library's SVD takes no longer than what looks for a part of it."""
        engine = self.options.engine
        return self.m * self.n * self.n <= self.tuning[SVDTuning].direct_svd and not engine.over_rows.spread

    @property
    def partial(self) -> bool:
        """Whether the leading triplets are computed by themselves."""
        options = self.options
        few = options.rank is not None and self.rank <= self.tuning[SVDTuning].gram_part * self.n
        return options.algorithm is None and few and not self.small


def chain(m: int, n: int, options: SVDOptions) -> Sequence[SVDLink]:
    """Links for a tall matrix."""
    return Chain(TABLE, SVDCase(m, n, options))


def block_width(n: int, rank: int) -> int:
    """Columns of the block that iterations work on."""
    beyond = max(MULTIPLE, rank // OVERSAMPLING)
    return min(n, -(-(rank + beyond) // MULTIPLE) * MULTIPLE)


def worth(m: int, n: int, rank: int, tuning: Tuning) -> int:
    """Products of a block by ``A^T A`` for the price of the Gram matrix with its eigenvectors."""
    operations = (m + tuning[SVDTuning].eigenvectors * n) * n * n
    product = tuning[SVDTuning].block * m * n * block_width(n, rank) + tuning[SVDTuning].iteration
    return int(operations / product)


def _iteration(case: SVDCase, label: str, name: str) -> SVDLink:
    most = LIMIT if case.options.algorithm is not None else _worth(case)
    width = block_width(case.n, case.rank)
    return Link(label, partial(ways.by_iteration, width=width, most=most, label=label))


def _worth(case: SVDCase) -> int:
    return worth(case.m, case.n, case.rank, case.tuning)


def _gram(case: SVDCase, label: str, name: str) -> SVDLink:
    return Link(label, partial(ways.by_gram, compute=name))


def _gram_arithmetic(options: SVDOptions) -> str:
    if options.work is FP64:
        return "fp64"
    if not options.engine.tuning.corrected:
        return "fp32"
    return "fp16" if options.part is None and options.target.u >= FP16.u else FP16_COR


_when = Rule[SVDCase, bool]
_formats = Rule[SVDCase, Sequence[str]]

_small = _when("small matrices on a CPU", lambda case: case.options.algorithm is None and case.small)

_iterates = _when(
    "a rank up to n / 4 where six products by A^T A cost less than its eigenvectors, and by name",
    lambda case: case.options.algorithm == "iteration" or (case.partial and _worth(case) >= FEWEST),
)

_part = _when(
    "a rank up to n / 4, and by name", lambda case: case.options.algorithm == "gram-svd" or case.partial
)

_default = _when("by default, and by name", lambda case: case.options.algorithm in (None, "qr-svd"))

_work = _formats("fp32, fp64", lambda case: [case.options.work.name])

_low = _formats("that of products by A", lambda case: [str(case.options.low)])

_of_gram = _formats("fp16, fp16_cor, fp64; fp32 on a CPU", lambda case: [_gram_arithmetic(case.options)])

TABLE: Table[SVDCase] = (
    Row("svd {}", way(ways.by_svd), (_small,), arithmetics=_work),
    Row("subspace iteration {}", _iteration, (_iterates,), arithmetics=_low),
    Row("gram-svd {}", _gram, (_part,), arithmetics=_of_gram),
    Row("qr-svd", way(ways.by_qr), (_default,)),
)
"""Cheapest first."""
