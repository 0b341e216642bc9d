"""Problems with an R: what is refined with it, and solutions with their evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from neula.algorithms.krylov.batched_lstsq import Overdetermined, Triangles, are_solved, lengths
from neula.algorithms.krylov.doubled_refinement import DoubledSolution
from neula.algorithms.krylov.passes import times
from neula.algorithms.krylov.streamed_lstsq import SummedProblem
from neula.algorithms.orthogonal.r_only import (
    HALVED,
    cholesky32_r,
    cholesky_r,
    householder_r,
    shifted_cholesky3_r,
)
from neula.algorithms.scaled_problems import ScaledProblems
from neula.algorithms.scaling import ScaledUnknowns
from neula.certificates.backward_error import Measures
from neula.certificates.forward_error import least_squares_error, residual_ratio, rounded_error
from neula.engines.formats import in_double
from neula.kernels.small_problems.refining import over
from neula.problems.least_squares.problem import LeastSquaresOptions, LeastSquaresSolutions

Factor = Callable[..., torch.Tensor]
"""R of a batch of tall matrices, ``factor(a, over_rows=...)``."""


@dataclass(frozen=True)
class RSource:
    """A way to compute R."""

    factor: Factor
    # Whether it also takes the Gram matrix of a single A, which is computed once for all such sources.
    from_gram: bool = False
    backward_stable: bool = False  # whether no other source has a better R
    # Whether R comes from products of half-precision operands: the first steps then need no residuals in
    # twice the working precision, and few random vectors measure the rate of convergence.
    half_precision: bool = False
    narrow: bool = False  # whether A may have any dtype
    # Whether no step takes residuals in twice the working precision unless digits are requested.
    plain_residuals: bool = False

    @property
    def checked_first(self) -> bool:
        """Whether the host checks R before any step, and then launches two steps before it reads again.

        Problems that come to a backward stable R, the last one, often lack full rank, and then all steps are
        in vain; so are plain ones with an R that converges slowly.
        """
        return self.backward_stable or self.plain_residuals


SOURCES = {
    "cholesky fp32": RSource(cholesky32_r, narrow=True),
    "cholesky fp64": RSource(cholesky_r, from_gram=True),
    "shifted cholesky fp64": RSource(shifted_cholesky3_r, from_gram=True, backward_stable=True),
    "householder fp64": RSource(householder_r, backward_stable=True),
}


def refines_doubled_of(options: LeastSquaresOptions, a: torch.Tensor, source: RSource) -> bool:
    """Whether residuals are in twice the working precision."""
    m, n = options.over_rows.count(a.shape[1]), a.shape[2]
    return options.refines_doubled(m, n, plain=source.plain_residuals)


def system_of(
    problems: ScaledProblems,
    r: torch.Tensor,
    options: LeastSquaresOptions,
    source: RSource,
    gram: torch.Tensor | None = None,
    norms: torch.Tensor | None = None,
) -> Overdetermined:
    """A with its R, whose Gram matrix and norms of columns may be known."""
    doubled, over_rows = refines_doubled_of(options, problems.a, source), options.over_rows
    columns, triangles = None, None
    if are_solved(r) or problems.given or gram is not None:
        columns = (lengths(r) if norms is None else norms)[..., None]
    if are_solved(r):
        assert columns is not None
        triangles = Triangles.estimated(r, columns)
    elif columns is not None:
        # Dozens of launches that know nothing of A, which may be too large for a graph.
        inputs = (r, columns) if gram is None or gram.shape[1] < HALVED else (r, columns, gram)
        inverse, norm, bound, of_inverse = options.engine.alone.replay(_triangles, inputs, "triangles")
        triangles = Triangles(inverse, norm, bound, of_inverse)
    return Overdetermined(
        *(problems.a, r, problems.a_low, problems.b_low, columns, over_rows),
        doubled=doubled,
        triangles=triangles,
        rhs=problems.b if problems.given else None,
        half_precision=source.half_precision,
    )


def _triangles(*known: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return Triangles.from_factor(*known).tensors


def certified(
    problems: ScaledUnknowns,
    found: DoubledSolution,
    options: LeastSquaresOptions,
    *,
    size: Callable[[torch.Tensor], torch.Tensor],
    norms: Callable[[torch.Tensor | None], tuple[torch.Tensor, ...]],
    conditions: tuple[torch.Tensor, torch.Tensor],
    rank: int,
    doubtful: bool = False,
) -> LeastSquaresSolutions:
    """Solutions in the units and the dtype of the result, with their evidence.

    ``size`` is ``||D x||``. ``norms`` has those of residuals and right-hand sides in units of the scaled b,
    where rounding moves x by so much, if at all. ``conditions`` are estimates and bounds.
    """
    z, exact = found.x, problems.given and options.dtype == found.x.dtype
    x = z if exact else in_double(problems.unscale(z).to(options.dtype))
    lost = None if exact else z - problems.scale(x)
    rounding = torch.zeros_like(found.forward_error) if lost is None else over(size(lost), size(z))
    residual_norm, b_norm = norms(lost)
    # An error of x moves the projection of the residual by as much of ||A|| ||x||, and no more.
    of_data = torch.minimum(found.measures.backward_error, found.forward_error)
    backward_error = (of_data + rounding + found.rounding).amax(1)
    members = LeastSquaresSolutions(
        x=x,
        residual_norm=problems.residual_norm(residual_norm),
        forward_error=rounded_error(found.forward_error, rounding),
        backward_error=backward_error,
        refined_error=of_data.amax(1),
        residual=over(residual_norm, b_norm).amax(1),
        optimality=found.measures.optimality.amax(1),
        condition=conditions[0],
        condition_bound=conditions[1],
        rank=torch.full_like(backward_error, rank, dtype=torch.int64),
        doubtful=torch.full_like(backward_error, doubtful, dtype=torch.bool),
    )
    # Results and decisions are equal on all processes.
    return LeastSquaresSolutions(*options.over_rows.agreed(*members.tensors))


def measured_members(
    problems: ScaledProblems,
    system: Overdetermined,
    found: DoubledSolution,
    options: LeastSquaresOptions,
    rows: int,
    data_error: float = 0.0,
) -> LeastSquaresSolutions:
    """Solutions of tall problems with their evidence.

    Residuals in working precision do not show errors below their own, which Wedin's bound may. Backward
    errors include that of the data.
    """
    over_rows = options.over_rows
    if data_error:
        error, optimality = found.measures.backward_error, found.measures.optimality
        found = replace(found, measures=Measures(error + data_error, optimality))

    def norms(lost: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        residual = found.residual if lost is None else found.residual + times(problems.a, lost)
        return over_rows.norms(residual, problems.b, dim=1)

    if system.doubled is None:
        ratio = residual_ratio(norms(None)[0], system.norm, system.size(found.x))
        error = least_squares_error(system.condition_bound[:, None], found.measures.backward_error, ratio)
        error = torch.minimum(found.forward_error, error).where(found.forward_error < torch.inf, torch.inf)
        found = replace(found, forward_error=error)
    conditions = system.condition, system.condition_bound
    rank = options.full_rank(over_rows.count(rows), found.x.shape[1])
    return certified(
        problems, found, options, size=system.size, norms=norms, conditions=conditions, rank=rank
    )


def summed_members(
    problem: ScaledUnknowns, system: SummedProblem, found: DoubledSolution, options: LeastSquaresOptions
) -> LeastSquaresSolutions:
    """The solution of a problem of any rank whose rows are not in memory, with its evidence.

    In place of the residual ``found`` has its norm, and its forward error is that in the range of the
    coordinates.
    """
    of, size = system.coordinates, system.size(found.x)
    ratio = residual_ratio(found.residual, of.norm, size)
    errors = found.forward_error[0], found.measures.backward_error[0], ratio[0]

    def norms(lost: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        moved = found.rounding * size + (0.0 if lost is None else system.size(lost))
        return torch.hypot(found.residual, of.norm_bound * moved), system.found.b[None]

    return certified(
        problem,
        replace(found, forward_error=of.error(found.x[0], *errors)[None]),
        options,
        size=system.size,
        norms=norms,
        conditions=(size.new_tensor([max(1.0, of.condition)]), size.new_zeros(1)),
        rank=of.rank,
        doubtful=bool(of.doubt),
    )
