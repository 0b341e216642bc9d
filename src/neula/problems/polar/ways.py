"""Methods for polar factors.

Links are measured where they are computed, so that a CUDA graph includes the measurement.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from neula.algorithms.polar.iteration import polar_factor, taken_on
from neula.algorithms.polar.polynomials import OddPolynomial
from neula.algorithms.polar.singular import isometry
from neula.certificates.polar import polar_measures
from neula.engines import FP32, FP64, Arithmetic, Format
from neula.pipeline.chain import Answer, Declined, Link, answered
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


def by_svd(matrices: PolarMatrices, before: Solution | None, format: Format) -> Solution:
    """The singular value decomposition, which knows the rank, in float32 or float64."""
    options, label = matrices.options, f"svd {format.name}"
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
