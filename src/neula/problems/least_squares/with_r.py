"""Problems with an R: what is refined with it, and solutions with their evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from neula.algorithms.krylov.batched_lstsq import Overdetermined, lengths
from neula.algorithms.krylov.doubled_refinement import DoubledSolution
from neula.algorithms.krylov.passes import times
from neula.algorithms.krylov.streamed_lstsq import SummedProblem
from neula.algorithms.krylov.triangles import Triangles, are_solved
from neula.algorithms.orthogonal.r_only import (
    HALVED,
    cholesky32_r,
    cholesky_r,
    householder_r,
    shifted_cholesky3_r,
)
from neula.algorithms.scaled_problems import ScaledProblems
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


class ProblemUnits(Protocol):
    """Problems that are solved in other units than they were given in (:class:`ScaledProblems`)."""

    def unscale(self, y: torch.Tensor) -> torch.Tensor:
        """Solutions in the units that were given."""

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`unscale`."""

    def residual_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Norms of residuals in the units that were given."""


@dataclass(frozen=True)
class UnscaledSolutions:
    """Solutions of some problems in their own units."""

    found: DoubledSolution
    x: torch.Tensor  # shape (batch, n, k): rounded to the dtype of the result
    rounding: torch.Tensor  # shape (batch, k): what that lost, relative to x
    low: torch.Tensor  # shape (batch, k): what x lacks of the sum that was refined, relative to it
    # residual_norm, b_norm, shape (batch, k): in units of the scaled b, of x as it is returned.
    residual_norm: torch.Tensor
    b_norm: torch.Tensor
    condition: torch.Tensor  # shape (batch,)
    condition_bound: torch.Tensor  # shape (batch,)


def members_of(
    problems: ProblemUnits, solved: UnscaledSolutions, options: LeastSquaresOptions, rows: int
) -> LeastSquaresSolutions:
    """Solutions in the units that were given, with what was measured."""
    found, over_rows = solved.found, options.over_rows
    shape = (over_rows.count(rows), solved.x.shape[1])
    # An error of x moves the projection of the residual by as much of ||A|| ||x||, and no more.
    of_data = torch.minimum(found.measures.backward_error, found.forward_error)
    refined_error, backward_error = of_data.amax(1), (of_data + solved.rounding + solved.low).amax(1)
    forward_error = rounded_error(found.forward_error, solved.rounding)
    members = LeastSquaresSolutions(
        x=solved.x,
        residual_norm=problems.residual_norm(solved.residual_norm),
        forward_error=forward_error,
        backward_error=backward_error,
        refined_error=refined_error,
        residual=over(solved.residual_norm, solved.b_norm).amax(1),
        optimality=found.measures.optimality.amax(1),
        condition=solved.condition,
        condition_bound=solved.condition_bound,
        rank=torch.full_like(backward_error, min(options.rows(*shape), shape[1]), dtype=torch.int64),
        doubtful=torch.zeros_like(backward_error, dtype=torch.bool),
    )
    return LeastSquaresSolutions(*over_rows.agreed(*members.tensors))


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
    if problems.given and options.dtype == found.x.dtype:
        x, residual, rounding = found.x, found.residual, torch.zeros_like(found.forward_error)
    else:
        x = in_double(problems.unscale(found.x).to(options.dtype))
        lost = found.x - problems.scale(x)
        residual = found.residual + times(problems.a, lost)
        rounding = over(system.size(lost), system.size(found.x))
    residual_norm, b_norm = over_rows.norms(residual, problems.b, dim=1)
    if data_error:
        error, optimality = found.measures.backward_error, found.measures.optimality
        found = replace(found, measures=Measures(error + data_error, optimality))
    if system.doubled is None:
        ratio = residual_ratio(residual_norm, system.norm, system.size(found.x))
        error = least_squares_error(system.condition_bound[:, None], found.measures.backward_error, ratio)
        error = torch.minimum(found.forward_error, error).where(found.forward_error < torch.inf, torch.inf)
        found = replace(found, forward_error=error)
    solved = UnscaledSolutions(
        found=found,
        x=x,
        rounding=rounding,
        low=found.rounding,
        residual_norm=residual_norm,
        b_norm=b_norm,
        condition=system.condition,
        condition_bound=system.condition_bound,
    )
    return members_of(problems, solved, options, rows)


def summed_members(
    problem: ProblemUnits, system: SummedProblem, found: DoubledSolution, options: LeastSquaresOptions
) -> LeastSquaresSolutions:
    """The solution of a problem of any rank whose rows are not in memory, with its evidence.

    In place of the residual ``found`` has its norm, and its forward error is that in the range of the
    coordinates.
    """
    of, x = system.coordinates, in_double(problem.unscale(found.x).to(options.dtype))
    size, lost = of.length(found.x), of.length(found.x - problem.scale(x))
    ratio = residual_ratio(found.residual, of.norm, size)
    errors = found.forward_error[0], found.measures.backward_error[0], ratio[0]
    solved = UnscaledSolutions(
        found=replace(found, forward_error=of.error(found.x[0], *errors)[None]),
        x=x,
        rounding=over(lost, size),
        low=found.rounding,
        residual_norm=torch.hypot(found.residual, of.norm_bound * (lost + found.rounding * size)),
        b_norm=system.found.b[None],
        condition=size.new_tensor([max(1.0, of.condition)]),
        condition_bound=size.new_zeros(1),
    )
    members = members_of(problem, solved, options, max(of.inverse.shape))
    rank, doubt = torch.full_like(members.rank, of.rank), torch.full_like(members.doubtful, bool(of.doubt))
    return replace(members, rank=rank, doubtful=doubt)
