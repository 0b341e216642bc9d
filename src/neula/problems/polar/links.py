"""What can be tried for polar factors.

Links are measured where they are computed, so that a CUDA graph plays back the measurement with the rest.
"""

from __future__ import annotations

import torch

from neula.algorithms.polar.iteration import polar_factor
from neula.algorithms.polar.polynomials import composition
from neula.algorithms.polar.singular import isometry
from neula.certificates.polar import polar_measures
from neula.engines import FP32, FP64, Arithmetic, Format
from neula.pipeline.chain import Answer, Link
from neula.pipeline.inputs import finite_members
from neula.problems.polar.problem import Matrices, Options, PolarValues, as_wide, is_wide, scaled

Solution = Answer[PolarValues]

PolarLink = Link[Matrices, PolarValues]

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

MARGIN = {"fp16": 2.0**-6, "fp16_cor": 2.0**-9, "fp32": 2.0**-9, "fp64": 2.0**-9}
"""By how much numbers stay below 1 between two polynomials: several times what rounding errors add."""


def polynomials(label: str, arithmetic: Arithmetic, smallest: float, error: float) -> PolarLink:
    """A composition of polynomials for singular values from ``smallest`` times a bound on the norm."""
    steps = composition(smallest, error, MARGIN[arithmetic.name])

    def answer(matrices: Matrices, before: Solution | None) -> Solution:
        options = matrices.options
        engine = options.engine.using(arithmetic)

        def factorized(a: torch.Tensor) -> Found:
            parts = engine.parts(scaled(as_wide(a), engine.storage))
            x, _ = polar_factor(parts, steps, engine)
            exactly = arithmetic.format in (FP32, FP64)
            measures = polar_measures(parts, x, engine, exactly=exactly, within=False)
            u = engine.joined(x)
            rank = torch.full((len(a),), -1, device=a.device)
            return u if is_wide(a) else u.mT, rank, measures

        found = options.engine.replay(factorized, (matrices.a,), (label, options.target.name))
        return _answer(options, label, *found)

    return Link(label, answer)


def by_svd(matrices: Matrices, before: Solution | None, format: Format) -> Solution:
    """The singular value decomposition, which knows the rank, in float32 or float64."""
    options, label = matrices.options, f"svd {format.name}"
    engine = options.engine.using(options.work)
    usable = finite_members(matrices.a)
    wide = scaled(matrices.wide, format.dtype)
    wide = torch.where(usable[:, None, None], wide, 0.0)
    x, rank = isometry(wide, options.cutoff, completion=options.completion)
    within = not options.completion
    measures = polar_measures(engine.parts(wide), engine.parts(x), engine, exactly=True, within=within)
    x = torch.where(usable[:, None, None], x, torch.nan)
    measures = torch.where(usable, measures, torch.nan)
    u = x.to(engine.storage)
    return _answer(options, label, u if is_wide(matrices.a) else u.mT, rank, measures)


def _answer(
    options: Options, label: str, u: torch.Tensor, rank: torch.Tensor, measures: torch.Tensor
) -> Solution:
    if options.progress is not None:
        options.progress(label, 1.0)
    return Answer(PolarValues(u, rank, measures.T), label)
