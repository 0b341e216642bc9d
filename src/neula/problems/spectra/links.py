"""The table of links for eigenvalues and singular values: LAPACK or cuSOLVER, and products on a GPU.

There matrices are divided by products, and cuSOLVER's singular values take ten times as long as its
eigenvalues: the polar factor, which takes products alone, leaves eigenvalues to be computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from neula.engines import FORMATS, FP32
from neula.pipeline.chain import Link
from neula.pipeline.table import Case, Chain, Row, Rule, Table
from neula.problems.spectra.problem import (
    SpectralMatrices,
    SpectralOptions,
    SpectralTuning,
    SpectralValues,
)
from neula.problems.spectra.ways import (
    by_division,
    by_gram_matrix,
    by_library,
    by_more_corrections,
    by_polar_factor,
    part_by_lapack,
)

SpectralLink = Link[SpectralMatrices, SpectralValues]


@dataclass(frozen=True)
class SpectralCase(Case):
    """Matrices of one shape, without numbers."""

    count: int
    n: int  # the number of columns, of which there are no more than rows
    options: SpectralOptions

    @property
    def divided(self) -> bool:
        """Whether products divide the matrices."""
        options, tuning = self.options, self.tuning[SpectralTuning]
        if not (options.symmetric and options.vectors and self.n > options.leaf):
            return False
        times = tuning.divided_complex if options.engine.is_complex else 1.0
        times *= 1.0 if options.work is FP32 else tuning.divided_in_double
        return self.count >= times * tuning.divided_batch or self.count * self.n >= times * tuning.divided

    @property
    def partial(self) -> bool:
        """Whether LAPACK computes the part of the eigenvalues that is asked for."""
        part, lapack = self.options.part, self.tuning.lapack
        return part is not None and lapack and self.count == 1 and 2 * (part[1] - part[0]) < self.n


def chain(count: int, n: int, options: SpectralOptions) -> Sequence[SpectralLink]:
    """Links for ``count`` matrices of n columns together."""
    return Chain(TABLE, SpectralCase(count, n, options))


def _library(case: SpectralCase, label: str, name: str) -> SpectralLink:
    label = label if case.options.symmetric else label.replace("eigh", "svd")
    return Link(label, partial(by_library, label=label, format=FORMATS[name]))


def _part(case: SpectralCase, label: str, name: str) -> SpectralLink:
    return Link(label, partial(part_by_lapack, label=label, format=FORMATS[name]))


def _division(case: SpectralCase, label: str, name: str) -> SpectralLink:
    return Link(label, partial(by_division, label=label, format=FORMATS[name]))


def _corrected(case: SpectralCase, label: str, name: str) -> SpectralLink:
    return Link(label, partial(by_more_corrections, label=label, format=FORMATS[name]), inherits=True)


def _of_gram(case: SpectralCase, label: str, name: str) -> SpectralLink:
    return Link(label, partial(by_gram_matrix, label=label, format=FORMATS[name]))


def _polar(case: SpectralCase, label: str, name: str) -> SpectralLink:
    return Link(label, partial(by_polar_factor, label=label, format=FORMATS[name], links=chain))


_when = Rule[SpectralCase, bool]

_some = _when("up to half of the eigenvalues of one matrix on a CPU", lambda case: case.partial)

_singular = _when(
    "singular vectors, on a GPU",
    lambda case: (
        not case.options.symmetric
        and case.options.vectors
        and case.n >= case.tuning[SpectralTuning].polar_first
    ),
)

_divided = _when(
    "by name; eigenvectors of batches and of large matrices, beyond the orders of the kernel",
    lambda case: case.options.algorithm == "divide" or case.divided,
)

_gram = _when(
    "singular vectors of a batch of few columns, on a GPU",
    lambda case: (
        not case.options.symmetric
        and case.options.vectors
        and case.count > 1
        and case.options.work is FP32
        and not case.options.engine.is_complex
        and case.n <= case.tuning[SpectralTuning].gram
    ),
)

_default = _when("by default", lambda case: case.options.algorithm is None)

_below = _when("accuracies below fp64", lambda case: case.options.work is FP32)

_work = Rule[SpectralCase, Sequence[str]]("fp32, fp64", lambda case: [case.options.work.name])

TABLE: Table[SpectralCase] = (
    Row("some of eigh {}", _part, (_some,), arithmetics=_work),
    Row("divide and conquer {}", _division, (_divided,), arithmetics=_work),
    Row("corrected again {}", _corrected, (_divided,), arithmetics=_work),
    Row("Gram matrix {}", _of_gram, (_gram,), arithmetics=_work),
    Row("polar factor and eigh {}", _polar, (_singular,), arithmetics=_work),
    Row("eigh {}", _library, (_default, _below), arithmetics=("fp32",)),
    Row("eigh {}", _library, (_default,)),
)
"""Cheapest first; of singular values it is the library's SVD that ends the chain."""
