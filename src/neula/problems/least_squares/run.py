"""The chains run for a batch of least-squares problems; what no link can settle: zeros, NaN, nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from neula.algorithms.scaled_problems import gradient_is_zero, gradient_vanishes, weighted_norms
from neula.certificates.forward_error import SURE
from neula.certificates.verdict import Evidence
from neula.pipeline.chain import Answer, Declined, Run, Unanswered, first_answer, run_chain, run_each
from neula.pipeline.distributed import in_step
from neula.pipeline.inputs import check_finite, finite_members
from neula.pipeline.result import Attempt
from neula.pipeline.solutions import host_for, nothing_to_do, numbers_of
from neula.problems.least_squares.links import LeastSquaresLink, chain_alone, chain_together
from neula.problems.least_squares.prepared import LeastSquaresProblems
from neula.problems.least_squares.problem import LeastSquaresJudge, LeastSquaresSolutions

ZERO = LeastSquaresSolutions.names.index("zero")


def begin_problems(
    problems: LeastSquaresProblems,
) -> tuple[Answer[LeastSquaresSolutions], torch.Tensor] | None:
    """Answer of the first link, and which problems it solves; None if that link synchronizes."""
    count, (m, n), options = len(problems), problems.a.shape[1:], problems.options
    if 0 in (problems.a.numel(), problems.b.numel()):
        return None
    answer = first_answer(chain_together(count, m, n, options), problems)
    if answer is None or answer.measured is None:
        return None
    of = dict(zip(LeastSquaresSolutions.names, answer.measured, strict=True))
    exact = (of["zero"] == 0) & (of["largest"] <= torch.finfo(options.dtype).max)
    return answer, options.limits((m, n)).accept(Evidence.from_numbers(answer.measured)) & exact


def solve_problems(
    problems: LeastSquaresProblems,
    *,
    is_batch: bool,
    begun: Answer[LeastSquaresSolutions] | None = None,
    together: Sequence[LeastSquaresLink] | None = None,
) -> Run[LeastSquaresSolutions]:
    """Solve small problems together, then each unsolved problem by itself.

    ``is_batch``: whether NaN and Inf are no error. ``begun``: from :func:`begin_problems`. ``together``:
    links for all of them; by default those for their number.
    """
    a, b, options = problems.a, problems.b, problems.options
    count, m, n = len(a), options.over_rows.count(a.shape[1]), a.shape[2]
    if a.numel() == 0:
        return _empty(problems, is_batch=is_batch)
    if b.numel() == 0:
        return _without_right_hand_sides(problems, is_batch=is_batch)
    if together is None:
        together = chain_together(count, m, n, options, partial(_by_host, is_batch=is_batch))
    together = in_step(together) if options.over_rows.spread else together
    run = _run_together(together, problems, begun)
    if len(run.open):
        _go_on(run, problems, is_batch=is_batch)
    _reject_vanished(run, problems)
    return run


def _run_together(
    together: Sequence[LeastSquaresLink],
    problems: LeastSquaresProblems,
    begun: Answer[LeastSquaresSolutions] | None,
) -> Run[LeastSquaresSolutions]:
    """Run the links for all problems together; an empty run if there are none."""
    options, count = problems.options, len(problems)
    m, n = options.over_rows.count(problems.a.shape[1]), problems.a.shape[2]
    judge = LeastSquaresJudge.for_shape(m, n, options, together=True)
    try:
        return run_chain(together, problems, judge, begun=begun, settled=judge.settled)
    except Unanswered as why:
        run = Run.begin(count, _missing(problems, count))
        run.attempts += why.attempts
        return run


def _by_host(
    problems: LeastSquaresProblems,
    before: Answer[LeastSquaresSolutions] | None,
    *,
    is_batch: bool,
    passes: float,
) -> Answer[LeastSquaresSolutions]:
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
    unusable = np.empty(0, dtype=np.int64)
    if is_batch:
        unusable = _set_aside(run, problems)
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


def _set_aside(run: Run[LeastSquaresSolutions], problems: LeastSquaresProblems) -> np.ndarray:
    """Take problems with NaN or Inf from those that are open; returns where they are."""
    where = torch.from_numpy(run.open).to(problems.device)
    finite = finite_members(_some(problems.a, where)) & finite_members(_some(problems.b, where))
    usable = finite.cpu().numpy()
    unusable, run.open = run.open[~usable], run.open[usable]
    return unusable


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
    """Replace x by zero where b is orthogonal to the columns of A: no other x has a small error.

    Such right-hand sides look like uncertain ones. Others of the same matrix are solved again without them.
    """
    if run.accepted.all():
        return run
    a, b, weights, values = problems.a, problems.b, problems.options.weights, run.found
    over_rows = problems.options.over_rows
    places = np.flatnonzero(~run.accepted & ~(numbers_of(run)["forward_error"] <= SURE))
    if not len(places):
        return run
    where = torch.from_numpy(places).to(problems.device)
    unsure = ~(values.forward_error[where] <= SURE)
    zero = unsure & gradient_is_zero(_some(a, where), _some(b, where), weights, over_rows)
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
