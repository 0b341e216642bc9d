"""The table of links for polar factors.

Polynomials for condition numbers up to 1e3, for any, and the SVD. For the accuracy of bf16 they are evaluated
in fp16: bf16 would bury small singular values. Where LAPACK is fast its SVD comes first: polynomials in
float32 take up to 6 times as long for small matrices, and 1.3 to 2 times for 1024 x 1024 and 512 x 2048, on
one core of an AMD EPYC. A threshold that the caller names is for the SVD in double precision to decide.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from neula.algorithms.polar.iteration import isometry, polar_factor, taken_on
from neula.algorithms.polar.polynomials import OddPolynomial, composition, image
from neula.certificates.polar import polar_measures
from neula.engines import BF16, FP16, FP32, FP64, Arithmetic, Format
from neula.pipeline.chain import Answer, Chain, Declined, Link, Row, Rule, Table, answered, formatted
from neula.pipeline.inputs import finite_members
from neula.problems.polar.problem import PolarMatrices, PolarOptions, PolarValues

Solution = Answer[PolarValues]
PolarLink = Link[PolarMatrices, PolarValues]


def polynomials(
    label: str, arithmetic: Arithmetic, steps: Sequence[OddPolynomial], *, on: bool = False
) -> PolarLink:
    """A composition of polynomials; ``on`` says that it takes on what the link before has found."""

    def answer(matrices: PolarMatrices, before: Solution | None) -> Solution:
        options = matrices.options
        engine = options.engine.using(arithmetic)

        def factorized(a: torch.Tensor, *found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            parts = engine.parts(options.laid_down(a), *options.scales(a))
            if found:
                x = taken_on(engine.parts(options.laid_down(found[0])), steps, engine)
            else:
                x, _ = polar_factor(parts, steps, engine)
            exactly = arithmetic.format in (FP32, FP64)
            asked = {"exactly": exactly, "weighted": not options.small_too, "whole": options.completion}
            return x, polar_measures(parts, x, engine, within=False, **asked)

        a, known = matrices.a, () if before is None else (before.values.u,)
        key = label, options.target.name, options.small_too, options.completion
        x, measures = options.engine.replay(factorized, (a, *known), key)
        u, unknown = engine.joined(x), torch.full((len(a),), -1, device=a.device)
        return _answer(options, label, u if options.lie_down(a.shape) else u.mH, unknown, measures)

    return Link(label, answer, inherits=on, launches_only=not on)


def by_svd(matrices: PolarMatrices, before: Solution | None, *, label: str, format: Format) -> Solution:
    """The singular value decomposition, which knows the rank, in float32 or float64."""
    options = matrices.options
    engine = options.engine.using(options.work)
    usable = finite_members(matrices.a)
    scales, factor = options.scales(matrices.a)
    wide = (options.laid_down(matrices.a) * scales[:, None, None]) * factor
    wide = wide.to(options.engine.using(format).storage)
    wide = torch.where(usable[:, None, None], wide, 0.0)
    cutoff, unknown = options.cutoff(matrices.a.shape), 0.0
    if format is FP32 and options.small_too:
        unknown = 8 * format.u * max(options.shape_of(matrices.a.shape)) ** 0.5  # errors of this SVD
    x, rank, doubtful = isometry(
        wide, cutoff, unknown=unknown, completion=options.completion, over_rows=options.over_rows
    )
    if bool(doubtful.any()):
        raise Declined("singular values that float32 does not tell from zero")
    within = not options.completion
    measures = polar_measures(engine.parts(wide), engine.parts(x), engine, exactly=True, within=within)
    x = torch.where(usable[:, None, None], x, torch.nan)
    measures = torch.where(usable, measures, torch.nan)
    u = x.to(engine.storage)
    return _answer(options, label, u if options.lie_down(matrices.a.shape) else u.mH, rank, measures)


def _answer(
    options: PolarOptions, label: str, u: torch.Tensor, rank: torch.Tensor, measures: torch.Tensor
) -> Solution:
    return answered(PolarValues(u, rank, measures.T), label, options.progress)


SMALLEST = 7e-4
"""Singular values that the first polynomials are made for, relative to the bound on the norm, which is up to
1.4 times the largest one: of condition numbers up to 1e3."""

ERROR = 5.5e-3
"""Error of the polynomials at the accuracy of bf16; the rest of ``2^-7`` is for rounding errors."""

MARGIN = {"fp16": 2.0**-6, "fp16_cor": 2.0**-9, "fp32": 2.0**-9, "fp64": 2.0**-9}
"""By how much numbers stay below 1 between two polynomials: several times what rounding errors add."""


def chain(options: PolarOptions) -> Sequence[PolarLink]:
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


_when = Rule[PolarOptions, bool]
_formats = Rule[PolarOptions, Sequence[str]]
_no_threshold = _when("without ``rcond=``", lambda options: options.rcond is None)

_lapack = _when(
    "on a CPU, accuracies below fp64",
    lambda options: options.engine.tuning.lapack and options.work is not FP64,
)

_products = _when("on a GPU", lambda options: not options.engine.tuning.lapack)
_first = _formats("fp16, fp16_cor, fp64", lambda options: [_cheapest(options, first=True).name])
_fine = _formats("fp16_cor, fp64", lambda options: [_cheapest(options, first=False).name])
_work = _formats("fp32", lambda options: [options.work.name])

TABLE: Table[PolarOptions] = (
    Row("svd {}", formatted(by_svd), (_no_threshold, _lapack), arithmetics=_work),
    Row("polynomials {}", _polynomials, (_no_threshold, _products), arithmetics=_first),
    Row("more polynomials {}", _polynomials, (_no_threshold, _products), arithmetics=_fine),
    Row("svd {}", formatted(by_svd), ()),
)
"""Cheapest first."""
