"""The table of links for polar factors.

Polynomials for condition numbers up to 1e3, for any, and the SVD. For the accuracy of bf16 they are evaluated
in fp16: bf16 would bury small singular values. Where LAPACK is fast its SVD comes first: polynomials in
float32 take up to 6 times as long for small matrices, and 1.3 to 2 times for 1024 x 1024 and 512 x 2048, on
one core of an AMD EPYC. A threshold that the caller names is for the SVD in double precision to decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from neula.algorithms.polar.polynomials import OddPolynomial, composition, image
from neula.engines import BF16, FORMATS, FP16, FP64, Arithmetic
from neula.pipeline.chain import Link
from neula.pipeline.table import Chain, Row, Rule, Table
from neula.problems.polar.problem import PolarOptions
from neula.problems.polar.ways import PolarLink, by_svd, polynomials

SMALLEST = 7e-4
"""Singular values that the first polynomials are made for, relative to the bound on the norm, which is up to
1.4 times the largest one: of condition numbers up to 1e3."""

ERROR = 5.5e-3
"""Error of the polynomials at the accuracy of bf16; the rest of ``2^-7`` is for rounding errors."""

MARGIN = {"fp16": 2.0**-6, "fp16_cor": 2.0**-9, "fp32": 2.0**-9, "fp64": 2.0**-9}
"""By how much numbers stay below 1 between two polynomials: several times what rounding errors add."""


def chain(options: PolarOptions) -> Sequence[PolarLink]:
    """Links for polar factors."""
    return Chain(TABLE, options)


def _cheapest(options: PolarOptions, *, first: bool) -> Arithmetic:
    """Cheapest arithmetic of the first polynomials, and of later ones."""
    wanted = FP16 if first and options.target is BF16 else options.work
    return Arithmetic.named(options.engine.tuning.cheapest(wanted))


def _is_one(options: PolarOptions) -> bool:
    """Whether all polynomials are evaluated in one arithmetic, and so take on what those before have left."""
    return _cheapest(options, first=True) == _cheapest(options, first=False)


def _composed(options: PolarOptions, *, first: bool) -> Sequence[OddPolynomial]:
    """The first composition of polynomials, or the next one."""
    error = ERROR if options.target is BF16 else 2 * options.target.u
    begun = composition(SMALLEST, error, MARGIN[_cheapest(options, first=True).name])
    if first:
        return begun
    fine = _cheapest(options, first=False)
    # In another arithmetic what is small is lost in what the first have left.
    least = image(begun, fine.u / 2) if _is_one(options) else fine.u / 2
    return composition(least, error, MARGIN[fine.name])


def _polynomials(options: PolarOptions, label: str, name: str) -> PolarLink:
    first = not label.startswith("more")
    steps, on = _composed(options, first=first), not first and _is_one(options)
    return polynomials(label, Arithmetic.named(name), steps, on=on)


def _svd(options: PolarOptions, label: str, name: str) -> PolarLink:
    return Link(label, partial(by_svd, format=FORMATS[name]))


_when = Rule[PolarOptions, bool]
_formats = Rule[PolarOptions, Sequence[str]]

_no_threshold = _when("no ``rcond`` is named", lambda options: options.rcond is None)

_lapack = _when(
    "on a CPU, accuracies below fp64",
    lambda options: options.engine.tuning.lapack and options.work is not FP64,
)

_products = _when("on a GPU", lambda options: not options.engine.tuning.lapack)

_first = _formats("fp16, fp16_cor, fp64", lambda options: [_cheapest(options, first=True).name])

_fine = _formats("fp16_cor, fp64", lambda options: [_cheapest(options, first=False).name])

_work = _formats("fp32", lambda options: [options.work.name])

TABLE: Table[PolarOptions] = (
    Row("svd {}", _svd, (_no_threshold, _lapack), arithmetics=_work),
    Row("polynomials {}", _polynomials, (_no_threshold, _products), arithmetics=_first),
    Row("more polynomials {}", _polynomials, (_no_threshold, _products), arithmetics=_fine),
    Row("svd {}", _svd, ()),
)
"""Cheapest first."""
