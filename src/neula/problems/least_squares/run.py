"""The chains run for a batch of least-squares problems; what no link can settle: zeros, NaN, nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, cast

import numpy as np
import torch

from neula.algorithms.krylov.doubled_refinement import LaunchTuning, Pace
from neula.algorithms.scaled_problems import gradient_is_zero, gradient_vanishes, weighted_norms
from neula.certificates.bounds import lstsq_bound
from neula.certificates.forward_error import SURE
from neula.certificates.verdict import Evidence
from neula.kernels.core import DTYPES
from neula.kernels.small_problems import seminormal_host
from neula.kernels.small_problems.embedding import embedded, of_stacked_parts, stacked_parts
from neula.kernels.small_problems.seminormal_host import NUMBERS, SeminormalHostSolutions, SolutionMethod
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer, Declined, Link, Run, Unanswered, first_answer, run_chain, run_each
from neula.pipeline.distributed import in_step
from neula.pipeline.gradients import attach_solution, stacked_problem
from neula.pipeline.inputs import check_finite, finite_members
from neula.pipeline.plans import Extremes, Given, LaunchedPlan, accepted_solution, returned, solved_by_plan
from neula.pipeline.result import Attempt, LstsqResult
from neula.pipeline.result.shown import Later
from neula.pipeline.shapes import BatchedProblem
from neula.pipeline.solutions import (
    Report,
    attached,
    does_not_fit,
    host_for,
    no_digits,
    nothing_to_do,
    numbers_of,
    rounded_away,
    unread,
)
from neula.problems.least_squares.by_core import (
    LABEL,
    LABELS,
    count_rounded_weights,
    kernel_for,
    takes,
    takes_right,
)
from neula.problems.least_squares.links import LeastSquaresLink, chain_alone, chain_together
from neula.problems.least_squares.problem import (
    LeastSquaresAnswer,
    LeastSquaresJudge,
    LeastSquaresOptions,
    LeastSquaresProblems,
    LeastSquaresSolutions,
    in_words,
    norms_of,
)
from neula.problems.least_squares.regression import LinearFit, RegressionFit, fit_spread
from neula.problems.least_squares.together import in_one_launch, in_reach
from neula.problems.orthogonal.qr import qr

ZERO = LeastSquaresSolutions.names.index("zero")
"""Where a link says that a solution is zero, which the chain checks."""

FitOf = Callable[[Sequence[Any], torch.Tensor, torch.Tensor], RegressionFit | None]


class LeastSquaresPlan:
    """A plan for single problems with k right-hand sides; weights, where there are any, are an operand."""

    # ``fit_of`` makes a fit of the user's operands, x and norms of residuals.

    def __init__(
        self, m: int, n: int, k: int, options: LeastSquaresOptions, fit_of: FitOf = lambda *_: None
    ) -> None:
        self.options, self._shape, self._fit_of = options, (n, k), fit_of
        self._damping = options.damp * np.eye(n) if options.damp else None
        solve = kernel_for(options.rows(m, n), n, options)
        assert solve is not None
        self._solve = solve
        self._limits = options.limits((m, n), options.first_error(m, n))
        self._order = (1 + options.dtype.is_complex) * n  # of unknowns in the core
        self._size, self._full_rank = seminormal_host.size_of(1, self._order, k), options.full_rank(m, n)

    def solved(
        self, a: np.ndarray, b: np.ndarray, weights: np.ndarray | None = None
    ) -> tuple[np.ndarray, list[float]] | None:
        """X, shape (n, k), and what is known of it; None where it is not accepted."""
        (n, k), written = self._shape, np.empty(self._size)
        if weights is not None:
            factors = weights.astype(np.float64)[:, None]
            with np.errstate(over="ignore"):  # the core accepts no Inf, and the chain scales
                a, b = factors * a, factors * b
        if self._damping is not None:
            a, b = np.concatenate([a, self._damping]), np.concatenate([b, np.zeros((n, k))])
        if self._order > n:
            a, b = embedded(a), stacked_parts(b)
        if not self._solve(a, b, written):
            return None
        if weights is not None:
            count_rounded_weights(torch.from_numpy(a[None]), SeminormalHostSolutions(written, 1, n, k))
        x, numbers = written[: self._order * k].reshape(self._order, k), written[self._order * k :].tolist()
        if numbers[ZERO] or not self._limits.accept(Evidence.from_numbers(numbers)):
            return None
        if self._order > n:
            rank = NUMBERS.index("rank")
            x, numbers[rank] = of_stacked_parts(x), numbers[rank] / 2
            if numbers[rank] % 1:  # half of a complex direction counts
                return None
        return x, numbers

    def __call__(self, given: Given) -> LstsqResult[Any] | None:
        """The result; None where it is not accepted."""
        (a, b, *weights), k = given.arrays, self._shape[1]
        found = self.solved(a, b[:, None] if b.ndim == 1 else b, *weights)
        if found is None:
            return None
        x, numbers = found
        evidence, wrap = Evidence.from_numbers(numbers), given.wrap
        condition, _, optimality, rank, _, steps, way = numbers[len(Evidence._fields) : len(NUMBERS)]
        backward, forward, condition = evidence.backward_error, evidence.forward_error, max(1.0, condition)
        errors, norms = numbers[len(NUMBERS) : len(NUMBERS) + k], numbers[len(NUMBERS) + k :]
        label, bound = LABELS[SolutionMethod(int(way))], self._limits.backward_error

        def fit() -> RegressionFit | None:
            return self._fit_of(
                given.operands, torch.from_numpy(x[None]), torch.from_numpy(np.array([norms]))
            )

        fields = {
            "backward_error": backward,
            "forward_error": forward,
            "condition": condition,
            "iterations": int(steps),
            "tolerance": bound,
            "optimality": optimality,
            "residual_norm": norms if k > 1 else norms[0],
            "rank": int(rank),
            "full_rank": self._full_rank,
            "factorization": label,
            "ranks": Later(lambda: wrap(np.array(int(rank)))),
            "_fit": Later(fit),
        }
        acceptance = label, lambda: in_words(bound, backward, forward)
        return accepted_solution(LstsqResult, given, self.options, acceptance, fields, x, errors)


class LaunchedLeastSquaresPlan(LaunchedPlan[LeastSquaresProblems, LeastSquaresSolutions, LstsqResult[Any]]):
    """A plan for problems whose first link launches its work, and for batches of the core."""

    result, problems = LstsqResult, LeastSquaresProblems
    judge: LeastSquaresJudge
    options: LeastSquaresOptions

    def __init__(
        self,
        link: Link[LeastSquaresProblems, LeastSquaresSolutions],
        judge: LeastSquaresJudge,
        options: LeastSquaresOptions,
        fit_of: FitOf,
    ) -> None:
        super().__init__(link, judge, options)
        self._fit_of = fit_of

    def begin(self, problems: LeastSquaresProblems) -> LeastSquaresAnswer | None:
        if not in_reach(problems.a, problems.b.shape[2], self.options):
            return super().begin(problems)
        # Needs none of the solvers, which take half a second to load.
        steps = self.options.engine.tuning[LaunchTuning].prelaunched_steps
        return in_one_launch(problems, LABEL, Pace.prelaunched(steps))

    def reason(self, found: Answer[Any], of: Extremes) -> str:
        return self.judge.reason(of["backward_error"][1], of["forward_error"][1], len(found.values))

    def fields(
        self, given: Given, shapes: BatchedProblem, found: LeastSquaresAnswer, of: Extremes
    ) -> dict[str, Any]:
        values, layout = found.values, shapes.without_numbers()
        return {
            "tolerance": self.judge.limits.backward_error,
            "optimality": of["optimality"][1],
            "residual_norm": Later(partial(norms_of, values.residual_norm, layout)),
            "rank": int(of["rank"][0]),
            "full_rank": self.options.full_rank(*shapes.a.shape[-2:]),
            "factorization": found.label,
            "ranks": Later(lambda: given.give(layout.of_members(values.rank).contiguous())),
            "_fit": Later(lambda: self._fit_of(given.operands, values.x, values.residual_norm)),
        }


def plan_for(
    shapes: BatchedProblem, options: LeastSquaresOptions, fit_of: FitOf
) -> LeastSquaresPlan | LaunchedLeastSquaresPlan | None:
    """Problems on the host that the core takes, or others whose first link launches its work."""
    a, b = shapes.a, shapes.b
    (m, n), k = a.shape[-2:], b.shape[-1]
    here = all(x.is_cpu and x.dtype.to_real() in DTYPES for x in (a, b))
    weighted = options.weights is not None
    special = options.progress is not None or (weighted and options.dtype.is_complex)
    in_core = here and not special and takes(m, n, options) and k > 0 and takes_right(k, m, n, options)
    if in_core and not shapes.batch:
        return LeastSquaresPlan(m, n, k, options, fit_of)
    launches = options.engine.tuning[LaunchTuning].prelaunched_steps and not options.over_rows.spread
    if not (launches or (in_core and not weighted)) or shapes.copies > 1 or 0 in (a.numel(), b.numel()):
        return None
    if not (links := chain_together(len(shapes.matrices), m, n, options)):
        return None
    judge = LeastSquaresJudge.for_shape(m, n, options, together=True)
    return LaunchedLeastSquaresPlan(links[0], judge, options, fit_of)


class InversePlan:
    """A plan for pseudoinverses of single m x n matrices: solutions for the columns of an identity."""

    def __init__(self, m: int, n: int, options: LeastSquaresOptions) -> None:
        self.options, self._tall, (few, many) = options, m > n, sorted((m, n))
        self._plan, self._identity = LeastSquaresPlan(few, many, few, options), np.eye(few)

    def __call__(self, given: Given) -> Any | None:
        """The pseudoinverse; None where it is not accepted."""
        (a,) = given.arrays
        found = self._plan.solved(a.T if self._tall else a, self._identity)
        if found is None:
            return None
        return returned(given, np.ascontiguousarray(found[0].T) if self._tall else found[0], self.options)


def solve_problems(
    problems: LeastSquaresProblems,
    *,
    is_batch: bool,
    begun: LeastSquaresAnswer | None = None,
    together: Sequence[LeastSquaresLink] | None = None,
) -> Run[LeastSquaresSolutions]:
    """Solve small problems together, then each unsolved problem by itself."""
    # In a batch NaN and Inf are no error. ``begun``: by the first link.
    a, b, options = problems.a, problems.b, problems.options
    count, m, n = len(a), options.over_rows.count(a.shape[1]), a.shape[2]
    if a.numel() == 0:
        return _empty(problems, is_batch=is_batch)
    if b.numel() == 0:
        return _without_right_hand_sides(problems, is_batch=is_batch)
    if together is None:
        together = chain_together(count, m, n, options, partial(_by_host, is_batch=is_batch))
    together = in_step(together) if options.over_rows.spread else together
    judge = LeastSquaresJudge.for_shape(m, n, options, together=True)
    try:
        run = run_chain(together, problems, judge, begun=begun, settled=judge.settled)
    except Unanswered as why:
        run = Run.begin(count, _missing(problems, count))
        run.attempts += why.attempts
    if len(run.open):
        _go_on(run, problems, is_batch=is_batch)
    _reject_vanished(run, problems)
    return run


def _by_host(
    problems: LeastSquaresProblems, before: LeastSquaresAnswer | None, *, is_batch: bool, passes: float
) -> LeastSquaresAnswer:
    """Solve problems on the host by the whole chain, if so many passes over them are few enough."""
    options, here, (_, m, n) = problems.options, torch.device("cpu"), problems.a.shape
    work = m * n * (min(m, n) + problems.b.shape[2])
    host = host_for(options, len(problems), passes * work)
    if host is None:
        raise Declined
    ((a, b),) = problems.chunks(len(problems))
    weights = None if options.weights is None else options.weights.to(here)
    there = LeastSquaresProblems(a.to(here), b.to(here), replace(options, engine=host, weights=weights))
    # Kernels for batches take what is left of one as well.
    together = chain_together(max(2, len(a)), m, n, there.options)
    run = solve_problems(there, is_batch=is_batch, together=together)
    return Answer(run.found.to(problems.device), run.label, iterations=run.iterations, judged=True)


def _go_on(run: Run[LeastSquaresSolutions], problems: LeastSquaresProblems, *, is_batch: bool) -> None:
    """Each problem that is left alone; no solution of numbers that are not finite is accepted."""
    a, options = problems.a, problems.options
    m, n = options.over_rows.count(a.shape[1]), a.shape[2]
    unusable = run.open[:0]
    if is_batch:
        where = torch.from_numpy(run.open).to(problems.device)
        finite = finite_members(_some(a, where)) & finite_members(_some(problems.b, where))
        usable = finite.cpu().numpy()
        unusable, run.open = run.open[~usable], run.open[usable]
    else:
        problems.check_finite()
    alone = chain_alone(m, n, options, len(a))
    alone = in_step(alone) if options.over_rows.spread else alone
    judge = LeastSquaresJudge.for_shape(m, n, options, together=False)

    def solve_alone(place: int) -> Run[LeastSquaresSolutions]:
        known = run.found if len(a) == 1 else run.found.at(torch.tensor([place], device=a.device))
        try:
            return run_chain(alone, problems.one(place), judge, known)
        except Unanswered as why:
            raise ArithmeticError(str(why)) from None

    run_each(run, solve_alone)
    if len(unusable):
        _forget(run, problems, unusable)


def _missing(problems: LeastSquaresProblems, count: int) -> LeastSquaresSolutions:
    shape = problems.a.shape[2], problems.b.shape[2]
    return LeastSquaresSolutions.full(math.nan, count, *shape, problems.device, problems.a.dtype)


def _some(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Members at some places, which are in order; no copy of all of them."""
    return x if len(where) == len(x) else x[where]


def _forget(run: Run[LeastSquaresSolutions], problems: LeastSquaresProblems, places: np.ndarray) -> None:
    """Say that problems with NaN or Inf have no solutions."""
    count = len(run.accepted)
    run.found.put(torch.from_numpy(places).to(problems.device), _missing(problems, len(places)))
    if not len(run.numbers):  # nothing was tried
        run.numbers = np.empty((len(LeastSquaresSolutions.names), count))
    run.numbers[:, places] = np.nan
    run.attempts.append(Attempt("none", False, f"{len(places)} of {count} problems hold NaN or Inf"))


def _reject_vanished(run: Run[LeastSquaresSolutions], problems: LeastSquaresProblems) -> None:
    """Solutions of zero are exact where the gradient is zero; elsewhere they have underflowed."""
    if not run.numbers[ZERO].any():
        return
    of, values = numbers_of(run), run.found
    places = np.flatnonzero(of["zero"] > 0)
    where = torch.from_numpy(places).to(problems.device)
    a, b = _some(problems.a, where), _some(problems.b, where)
    vanished = values.zeros[where] & ~gradient_vanishes(
        a, b, problems.options.weights, problems.options.over_rows
    )
    values.forward_error[where] = values.forward_error[where].masked_fill(vanished, math.inf)
    gone = places[vanished.any(1).cpu().numpy()]
    run.accepted[gone], of["forward_error"][gone] = False, np.inf


def with_exact_zeros(
    run: Run[LeastSquaresSolutions], problems: LeastSquaresProblems
) -> Run[LeastSquaresSolutions]:
    """Replace x by zero where b is orthogonal to the columns of A: no other x has a small error."""
    # Such right-hand sides look like uncertain ones. Others of the same matrix are solved again without them.
    if run.accepted.all():
        return run
    a, b, weights, values = problems.a, problems.b, problems.options.weights, run.found
    over_rows = problems.options.over_rows
    places = np.flatnonzero(~run.accepted & ~(numbers_of(run)["forward_error"] <= SURE))
    if not len(places):
        return run
    where = torch.from_numpy(places).to(problems.device)
    no_digits = ~(values.forward_error[where] <= SURE)
    zero = no_digits & gradient_is_zero(_some(a, where), _some(b, where), weights, over_rows)
    some = zero.any(1)
    places, where, zero = places[some.cpu().numpy()], where[some], zero[some]
    if not len(places):
        return run
    rest = _some(b, where).masked_fill(zero[:, None, :], 0.0)
    again = solve_problems(LeastSquaresProblems(_some(a, where), rest, problems.options), is_batch=True)
    norms = torch.where(zero, weighted_norms(_some(b, where), weights, over_rows), again.found.residual_norm)
    values.put(where, replace(again.found, residual_norm=norms))
    run.numbers[:, places], run.accepted[places] = again.numbers, again.accepted
    run.attempts += again.attempts
    run.iterations += again.iterations
    run.label = again.label
    return run


def _empty(problems: LeastSquaresProblems, *, is_batch: bool) -> Run[LeastSquaresSolutions]:
    """No rows, no columns or no matrices: without columns b is the residual."""
    a, b, options = problems.a, problems.b, problems.options
    zero = LeastSquaresSolutions.full(0.0, len(a), a.shape[2], b.shape[2], a.device, a.dtype)
    if options.damp:
        zero.rank.fill_(a.shape[2])
    if b.numel() > 0 and a.shape[2] == 0:
        if not is_batch:
            check_finite(b[0].squeeze(-1), options.engine.column_max(b[0]), "b", options.over_rows)
        zero.residual_norm.copy_(weighted_norms(b, options.weights, options.over_rows))
    return nothing_to_do(zero, a)


def _without_right_hand_sides(
    problems: LeastSquaresProblems, *, is_batch: bool
) -> Run[LeastSquaresSolutions]:
    """Nothing is asked for but what A is like: its rank and condition, as NumPy gives them, too."""
    b = problems.b
    run = solve_problems(replace(problems, b=b.new_zeros(*b.shape[:2], 1)), is_batch=is_batch)
    values = run.found
    x, residual_norm, forward_error = (
        y[..., :0] for y in (values.x, values.residual_norm, values.forward_error)
    )
    run.values = replace(values, x=x, residual_norm=residual_norm, forward_error=forward_error)
    numbers_of(run)["forward_error"][:] = 0.0
    return run


def begin_system(call: Call, shapes: BatchedProblem, options: LeastSquaresOptions) -> LstsqResult | None:
    """The result of the first link, before anything is read; None if that link synchronizes."""
    without_waits, (m, n) = replace(options, may_wait=False), shapes.a.shape[-2:]
    with call.computing():
        problems = LeastSquaresProblems(call.here(shapes.matrices), call.here(shapes.columns), without_waits)
        if 0 in (problems.a.numel(), problems.b.numel()):
            return None
        begun = first_answer(chain_together(len(problems), m, n, without_waits), problems)
        if begun is None:
            return None
    values, least = begun.values, cast(int, begun.values.rank.amin())
    result: LstsqResult[Any] = LstsqResult(
        **unread(call, shapes, begun, options.limits((m, n)), options),
        optimality=math.nan,
        residual_norm=math.nan,
        rank=least,
        factorization=begun.label,
        ranks=call.hand_back(shapes.of_members(values.rank), torch.int64),
        _pending=lambda: solve_system(call, shapes, options, begun).reported(call),
    )
    return _attached(call, shapes, options, result)


def solve_system(
    call: Call, shapes: BatchedProblem, options: LeastSquaresOptions, begun: LeastSquaresAnswer | None = None
) -> LeastSquaresOutcome:
    """Run or continue the chain, and attach the solution to the graphs of the operands and weights."""
    if begun is None:
        plan = plan_for(shapes, options, lambda _, *fit: RegressionFit(call, shapes, options, *fit))
        soon = solved_by_plan(plan, call, shapes, options.weights)
        if isinstance(soon, LstsqResult):
            return LeastSquaresOutcome(_attached(call, shapes, options, soon))
        begun = soon
    problems = LeastSquaresProblems(call.here(shapes.matrices), call.here(shapes.columns), options)
    is_batch = bool(shapes.batch)
    with call.computing():
        nonfinite = _nonfinite(shapes, problems.b)
        if nonfinite is not None:  # a column refined with others would overwrite them
            usable = problems.b.masked_fill(shapes.for_columns(nonfinite)[:, None], 0.0)
            problems, begun = replace(problems, b=usable), None
        run = with_exact_zeros(solve_problems(problems, is_batch=is_batch, begun=begun), problems)
    if nonfinite is not None:
        _put_nan(run, nonfinite, shapes)
    report = Report(call, shapes, options, run, nonfinite)
    fit: LinearFit | None = None
    if nonfinite is None:
        make = fit_spread if options.over_rows.spread else RegressionFit
        fit = make(call, shapes, options, run.found.x, run.found.residual_norm)
    result = _attached(call, shapes, options, collect(report, fit=fit))
    return LeastSquaresOutcome.from_report(result, report, is_batch=is_batch)


def _nonfinite(shapes: BatchedProblem, columns: torch.Tensor) -> torch.Tensor | None:
    """Right-hand sides with NaN or Inf that share a matrix with others, shape (P, copies), if any do."""
    if shapes.copies <= 1:
        return None
    nonfinite = ~shapes.finite.to(columns.device)
    return nonfinite if bool(nonfinite.any()) else None


def _put_nan(run: Run[LeastSquaresSolutions], nonfinite: torch.Tensor, shapes: BatchedProblem) -> None:
    """Say that nothing is known of right-hand sides with NaN or Inf."""
    values, columns = run.found, shapes.for_columns(nonfinite)
    for known in (values.forward_error, values.residual_norm):
        known.masked_fill_(columns, math.nan)
    values.x.masked_fill_(columns[:, None], math.nan)
    numbers_of(run)["forward_error"][0] = np.nan  # the largest of all is not known
    reason = f"{int(nonfinite.sum())} of {nonfinite.numel()} problems hold NaN or Inf"
    run.attempts.append(Attempt("none", False, reason))


def _attached(
    call: Call, shapes: BatchedProblem, options: LeastSquaresOptions, result: LstsqResult[Any]
) -> LstsqResult[Any]:
    """A result, its x attached to the graphs of the operands and weights."""
    weights = None if call.weights is None else call.weights.graph

    def attach(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0 or a.numel() == 0:  # it does not depend on the numbers
            return x + 0 * a.sum() + 0 * b.sum()
        a, b = stacked_problem(a, b, weights, options.damp)
        factorize = partial(qr, accuracy="fp64", engine=options.engine)
        return attach_solution(a, b, x, ranks=result.ranks, factorize=factorize)

    return attached(call, shapes, result, attach)


@dataclass(frozen=True)
class LeastSquaresOutcome:
    """A result, and what is to be said where it is not converged."""

    result: LstsqResult
    why: str = ""
    missed: Sequence[list[int]] = ()  # where in the batch problems are that were not accepted
    no_digits: bool = False  # whether x of any problem has no guaranteed digit

    @classmethod
    def from_report(cls, result: LstsqResult, report: Report, *, is_batch: bool = False) -> Self:
        """The outcome of a run."""
        if result.converged:
            return cls(result)
        reason = why(result, report.run, cast(LeastSquaresOptions, report.options), is_batch=is_batch)
        return cls(result, reason, report.missed(), no_digits(report.run))

    def reported(self, call: Call) -> LstsqResult:
        """The result, after a warning where the accuracy was missed, or an error where the call is strict."""
        if not self.result.converged:
            what = f"least squares is not certified to {self.result.accuracy} accuracy"
            call.report_missed(what, self.why, self.result, self.missed, no_digits=self.no_digits)
        return self.result


def collect(report: Report, passes: int = 0, fit: Any = None) -> LstsqResult:
    """One result for the batch: the worst of its members speaks for all."""
    run, options = report.run, cast(LeastSquaresOptions, report.options)
    values, of = run.found, numbers_of(run)
    if np.isinf(of["largest"]).any():
        raise does_not_fit(options.dtype)
    m, n = options.over_rows.count(report.shapes.a.shape[-2]), report.shapes.a.shape[-1]
    full_rank = options.full_rank(m, n)
    ranks = of["rank"][~np.isnan(of["backward_error"])]
    return LstsqResult._from_fields(
        {
            **report.common(),
            "optimality": report.most("optimality", 0.0),
            "tolerance": lstsq_bound(options.target, max(1, full_rank)),
            "residual_norm": Later(lambda: norms_of(values.residual_norm, report.layout)),
            "rank": int(ranks.min(initial=full_rank)) if len(ranks) else min(m, n) * (not len(run.accepted)),
            "full_rank": full_rank,
            "factorization": run.label,
            "ranks": report.of_members(lambda: values.rank, 0),
            "passes": passes,
            "_fit": fit,
        }
    )


def why(
    result: LstsqResult, run: Run[LeastSquaresSolutions], options: LeastSquaresOptions, *, is_batch: bool
) -> str:
    """Why the accuracy was missed."""
    accurate = result.backward_error <= result.tolerance
    if is_batch:
        return run.attempts[-1].reason + rounded_away(run, result.tolerance, options.dtype)
    if accurate and SURE >= result.forward_error > options.largest_error:
        return (
            f"forward error {result.forward_error:.1e}, asked for {options.largest_error:.1e}: "
            f"condition number {result.condition:.1e} ({run.label})"
        )
    if accurate and run.doubt:
        return f"no digit of x is guaranteed: {run.doubt} ({run.label})"
    if accurate and not no_digits(run):
        return run.attempts[-1].reason
    if accurate:
        return (
            f"A is ill-conditioned, no digit of x is guaranteed: condition number {result.condition:.1e}, "
            f"forward error {result.forward_error:.1e} ({run.label})"
        )
    digits = ", no digit of x is guaranteed" if no_digits(run) else ""
    return (
        f"backward error {result.backward_error:.1e}, asked for {result.tolerance:.1e}{digits} ({run.label})"
        + rounded_away(run, result.tolerance, options.dtype)
    )
