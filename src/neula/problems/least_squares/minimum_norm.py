"""The rank-revealing last links of the chain, for one problem of any shape, in double precision.

A complete orthogonal decomposition where it leaves no doubt about the rank, else the SVD.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from neula.algorithms.krylov.batched_lstsq import lengths
from neula.algorithms.krylov.doubled_refinement import DoubledSolution
from neula.algorithms.orthogonal.pivots import PivotTuning
from neula.algorithms.scaled_problems import ScaledProblems
from neula.algorithms.spectra.complete_orthogonal import complete_orthogonal
from neula.algorithms.spectra.rank_revealing import MinimumNorm, minimum_norm
from neula.certificates.backward_error import Measures, Scale, norms_of
from neula.certificates.forward_error import SURE
from neula.engines import FP64
from neula.pipeline.chain import Answer, Declined
from neula.pipeline.progress import stage
from neula.problems.least_squares.problem import (
    NO_GAP,
    LeastSquaresOptions,
    LeastSquaresProblems,
    LeastSquaresSolutions,
)
from neula.problems.least_squares.together import certified


def by_svd(
    problems: LeastSquaresProblems, before: Answer[LeastSquaresSolutions] | None, *, label: str
) -> Answer[LeastSquaresSolutions]:
    """The minimum-norm solution of one problem, unless the best that was found before has more digits."""
    options = problems.options
    problems.cache.prepared = None  # which may be a copy
    report = stage(options.progress, "SVD in fp64")
    scaled, (m, n) = _scaled(problems), problems.a.shape[1:]
    shape = options.over_rows.count(m), n
    solution = minimum_norm(scaled, options.rcond)
    members = _members(scaled, solution, options)
    limits = options.limits(shape, SURE)
    full_rank = options.full_rank(*shape)
    report(1.0)
    # Refinement with residuals in double double has more digits where the rank is full after all.
    known = None if before is None or solution.rank < full_rank or solution.doubt else before.values
    if known is not None and bool((known.forward_error < members.forward_error).all()):
        known = replace(
            known, rank=members.rank, condition_bound=members.condition_bound, doubtful=members.doubtful
        )
        if bool(limits.accept(known.evidence)) or not bool(limits.accept(members.evidence)):
            members = known
    longer = not (solution.doubt or bool(members.residual <= limits.residual))
    doubt = f"rounding x to {options.dtype} makes the residual longer than b" if longer else solution.doubt
    return Answer(members, label, doubt)


def by_complete_orthogonal(
    problems: LeastSquaresProblems, before: Answer[LeastSquaresSolutions] | None, *, label: str
) -> Answer[LeastSquaresSolutions]:
    """The minimum-norm solution of one problem whose rank is certainly not full, without an SVD."""
    options, shape = problems.options, problems.a.shape[1:]
    certain = options.limits(shape).condition
    if before is not None and bool((before.values.condition_bound < certain).all()):
        raise Declined
    problems.cache.prepared = None  # which may be a copy
    report = stage(options.progress, "complete orthogonal decomposition in fp64")
    scaled = _scaled(problems)
    engine = options.engine.using(FP64)
    gram, problems.cache.gram = problems.cache.gram, None  # no later link needs it
    block = engine.tuning[PivotTuning].pivot_block
    solution = complete_orthogonal(scaled, options.rcond, engine, block, gram=gram)
    if isinstance(solution, str):
        raise Declined(solution)
    report(1.0)
    label = label + NO_GAP if solution.doubt else label
    return Answer(_members(scaled, solution, options), label, solution.doubt)


def _scaled(problems: LeastSquaresProblems) -> ScaledProblems:
    """The only problem in numbers near 1.

    The unknown of a zero column is zero whatever its damping. The damping becomes as large as other columns,
    since errors of the row space are multiplied by the ratio of column norms.
    """
    options, m = problems.options, problems.a.shape[1]
    scaled = ScaledProblems.from_arrays(
        problems.a, problems.b, options.weights, options.damp, options.over_rows
    )
    if options.damp:
        used = options.over_rows.largest((scaled.a[:, :m] != 0).any(1, keepdim=True))
        enlarged = torch.maximum(scaled.columns, scaled.units)
        scaled = replace(scaled, columns=torch.where(used, scaled.columns, enlarged))
    return replace(scaled, unit=options.unit)


def _members(
    problem: ScaledProblems, solution: MinimumNorm, options: LeastSquaresOptions
) -> LeastSquaresSolutions:
    """The solution with its evidence: singular values have decided its rank."""
    over_rows, norms = options.over_rows, problem.norms.mT
    z = solution.y / norms
    residual, gradient = (part[0] for part in problem.gradient(z))
    gradient = gradient / norms[0]
    # The gradient in the row space of what counts, and the residual in the range of it.
    along, projected = solution.row_basis.mH @ gradient, solution.coordinates @ gradient
    scale = Scale(torch.ones_like(norms[0, :, 0]), solution.norm)
    of_scaled = norms_of(scale, problem.b[0], solution.y, residual, gradient, projected, over_rows)
    measures = replace(of_scaled, gradient=torch.linalg.vector_norm(along, dim=0)).measures(scale.norm)
    of_data = (x[None] for x in (measures.backward_error, measures.optimality))

    def of_rows(lost: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        moved = residual[None] if lost is None else residual + problem.a @ lost
        return over_rows.norms(moved, problem.b, dim=1)

    return certified(
        problem,
        DoubledSolution(z, Measures(*of_data), residual[None], solution.forward_error[None]),
        options,
        size=lambda x: lengths(x * norms),
        norms=of_rows,
        conditions=(norms.new_tensor([solution.condition]), norms.new_zeros(1)),
        rank=solution.rank,
        doubtful=bool(solution.doubt),
    )
