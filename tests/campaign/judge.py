"""Verdicts: what an answer of neula says about itself, beside what is true.

unsound
    No warning, and a true error above ``forward_error``, a wrong or a doubtful rank (``doubt.py``), a
    singular system that was solved, or a test ratio of LAPACK above 30. With a warning: a true error above a
    ``forward_error`` that promises a digit.
false alarm
    A warning, or a ``forward_error`` above 1,000 times the true error (or u), where the bound with the true
    condition and a backward error of u is below 0.01, and the rank is beyond doubt. Only the default chain is
    asked: who names an algorithm gets that one. With ``certify="forward"`` a warning that digits are missing
    is none where they are: where ``forward_error`` is not 1,000 times too large.
violation
    Another promise that was broken; see :func:`_promises`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neula.kernels.magnitudes import SQUARABLE

from .backward import judge_backward
from .calls import Answer, as_array
from .doubt import Dropped
from .factors import judge_factors
from .more import judge_bounded
from .oracle import LeastSquares, System
from .recipes import BOUNDED, LEAST_SQUARES, OFTEN, SOLVERS, Example, keywords
from .verdict import Finding, Verdict, is_default, limits_of, spacing_of, stored_unit, unit_roundoff

SLACK = 1 + 1e-9
"""For the rounding of ``forward_error`` itself."""

SOLVABLE = 0.01
"""With an expected error below nobody needs a warning."""

LOOSE = 1000.0
"""By how much ``forward_error`` may exceed the true error, or u."""

NO_DIGIT = 0.1
"""A ``forward_error`` from which on a warning for a batch is meant for this member of it."""

ESTIMATED_WITHIN = 10.0
"""Factor by which ``condition`` may differ from the true one."""


def judge(example: Example, answer: Answer) -> Verdict:
    """The verdict on an answer."""
    verdict = Verdict.on(answer)
    for warning in answer.stray:
        verdict.add("violation", "stray warning", warning)
    if example.recipe.problem in SOLVERS:
        _judge_solver(example, answer, verdict)
    elif example.recipe.problem in BOUNDED:
        judge_bounded(example, answer, verdict)
    else:
        judge_factors(example, answer, verdict)
    return verdict


def truths(example: Example) -> list[LeastSquares]:
    """The exact answer of each member."""
    recipe = example.recipe
    if recipe.problem not in LEAST_SQUARES:
        return [System(a, b) for a, b in zip(example.a, example.b, strict=True)]
    rcond = default_rcond(example) if recipe.rcond is None else recipe.rcond
    return [
        LeastSquares(a, b, weights=example.weights, damp=example.damp, rcond=rcond)
        for a, b in zip(example.a, example.b, strict=True)
    ]


def default_rcond(example: Example) -> float:
    """``max(m, n) 2^-52``, or twice the unit roundoff of the dtype of A if that is larger."""
    return max(max(example.a.shape[1:]) * 2.0**-52, 2 * _unit_of_matrix(example))


def _unit_of_matrix(example: Example) -> float:
    """Unit roundoff of the format in which A is stored."""
    if example.recipe.problem == "held":  # rows of all dtypes are held in double precision
        return 2.0**-53
    return stored_unit(example.a)


def _judge_solver(example: Example, answer: Answer, verdict: Verdict) -> None:
    exact = truths(example)
    if answer.error is not None:
        _judge_error(example, answer.error, exact, verdict)
        return
    result, count = answer.result, len(exact)
    x = as_array(result.x).reshape(count, example.a.shape[2], -1)
    claimed = as_array(result.forward_errors).reshape(count, -1)
    accepted = as_array(result.accepted).reshape(count).astype(bool)
    ranks = (
        as_array(result.ranks).reshape(count).astype(int) if example.recipe.problem in LEAST_SQUARES else None
    )
    worst = claimed.max() if not np.isnan(claimed).any() else math.nan
    if not np.array_equal(worst, float(result.forward_error), equal_nan=True):
        verdict.add("violation", "fields", f"forward_error {result.forward_error}, not {worst}")
    u = unit_roundoff(example, result.accuracy)
    for i, truth in enumerate(exact):
        doubted = not accepted[i] or not claimed[i].max() < NO_DIGIT
        member = _Judged(
            truth=truth,
            x=x[i],
            claimed=claimed[i],
            accepted=bool(accepted[i]),
            warned=answer.warned and (doubted or count == 1),
            exacting=dict(example.recipe.options).get("certify") == "forward",
            rank=None if ranks is None else int(ranks[i]),
            unit=_unit_of_matrix(example),
            u=u,
            spacing=spacing_of(example.a.dtype),
            keeps_rows=example.recipe.problem != "held",
            fair=is_default(example) and example.recipe.problem in OFTEN,
        )
        for finding in member.findings():
            verdict.findings.append(finding)
        if example.recipe.problem in ("lstsq", "streamed"):
            error = float(as_array(result.backward_errors).reshape(count)[i])
            asked = (error, float(result.tolerance))
            verdict.findings += judge_backward(truth, x[i], int(ranks[i]), *asked, accepted=bool(accepted[i]))
        verdict.numbers.append(member.numbers)
    if count == 1:
        _judge_condition(
            result, exact[0], verdict, estimated=is_default(example) and example.recipe.problem != "held"
        )


@dataclass
class _Judged:
    """One member's answer. ``claimed`` are its forward errors, ``rank`` is None for systems, ``unit`` the
    unit roundoff of the format in which A is stored, ``spacing`` ``log2`` of the smallest number of the
    result's dtype. ``exacting``: a warning may say that not all digits are guaranteed; ``keeps_rows``: A was
    there to measure the residual with; ``fair``: warnings can be false alarms.
    """

    truth: LeastSquares
    x: np.ndarray
    claimed: np.ndarray
    accepted: bool
    warned: bool
    exacting: bool
    rank: int | None
    unit: float
    u: float
    spacing: int
    keeps_rows: bool
    fair: bool
    numbers: dict[str, Any] = field(default_factory=dict)

    def findings(self) -> Iterator[Finding]:
        """All that is wrong."""
        if isinstance(self.truth, System) and self.truth.singular:
            # Elimination with rounding errors may find no pivot that is exactly zero: a warning will do.
            if not self.warned:
                yield Finding("unsound", "singular", "A is exactly singular: neither LinAlgError nor warning")
            return
        right = self.truth.ranks
        rank = right[0] if self.rank not in right else self.rank
        errors = self.truth.errors(self.x, rank)
        underflow = self.truth.underflow(rank, self.spacing)
        expected = self.truth.bounds(rank, self.u) + underflow
        self.numbers.update(
            errors=errors.tolist(),
            forward_errors=self.claimed.tolist(),
            expected=expected.tolist(),
            condition=self.truth.condition(rank),
            rank=self.rank,
            right=right,
            accepted=self.accepted,
            warned=self.warned,
        )
        if self.rank is not None and self.rank not in right:
            if not self.warned:
                yield Finding("unsound", "rank", f"rank {self.rank}, and {right} is right")
        elif not ((errors <= self.claimed * SLACK) | (self.warned & ~(self.claimed < NO_DIGIT))).all():
            yield Finding("unsound", "error", f"errors {errors}, and forward_errors {self.claimed}")
        dropped = None if self.rank is None else Dropped.of(self.truth, rank, self.unit)
        if dropped is not None and not self.warned and dropped.surely:
            yield Finding("unsound", "doubtful rank", f"rank {rank} is doubtful: {dropped}")
        if dropped is None or not dropped.perhaps:
            # What x loses by underflow is more than the tolerance.
            yield from self._alarms(errors, expected, spoilt=bool((underflow > self.u).any()))
        yield from self._promises(rank)

    def _alarms(self, errors: np.ndarray, expected: np.ndarray, *, spoilt: bool) -> Iterator[Finding]:
        if not self.fair:
            return
        tight = self.claimed <= LOOSE * np.maximum(errors, self.u)
        deserved = self.exacting and bool((tight & (self.claimed < NO_DIGIT)).all())
        if self.warned and not (deserved or spoilt) and (expected < SOLVABLE).all():
            yield Finding("false alarm", "warning", f"expected errors {expected}, found {errors}")
        loose = (expected < SOLVABLE) & ~tight
        if loose.any():
            yield Finding("false alarm", "bound", f"errors {errors}, and forward_errors {self.claimed}")

    def _promises(self, rank: int) -> Iterator[Finding]:
        """Accepted answers are finite, have a residual of at most ``||b||``, and a regular matrix."""
        if not self.accepted:
            return
        if not np.isfinite(self.x).all():
            yield Finding("violation", "not finite", f"accepted: {self.x}")
            return
        if not self.keeps_rows:
            return
        count, ratios_found = sum(self.truth.shape), self.truth.residual_ratios(self.x)
        if not (ratios_found <= 1 + count * self.u).all():  # the limit of the verdict
            yield Finding("violation", "residual", f"accepted, with ||b - A x|| / ||b|| = {ratios_found}")


def _judge_condition(result: Any, truth: LeastSquares, verdict: Verdict, *, estimated: bool) -> None:
    """``digits`` are those of ``forward_error`` that x can hold, and ``condition`` is right within
    a factor of 10.

    Factors in a low precision, of who names them, need not show the condition of A.
    """
    bound = float(result.forward_error)
    digits = -float(np.log10(np.maximum(bound, stored_unit(result.x))))
    if not np.isclose(float(result.digits), digits, atol=1e-6, equal_nan=True):
        verdict.add("violation", "digits", f"digits {result.digits} for a forward_error of {bound}")
    rank = getattr(result, "rank", None)
    rank = truth.ranks[0] if rank is None else int(rank)
    if rank not in truth.ranks or rank == 0 or (isinstance(truth, System) and truth.singular):
        return
    condition = truth.condition(rank)
    knowable = condition < 0.1 / (max(truth.shape) * 2.0**-53)
    quotient = float(result.condition) / condition
    if estimated and knowable and not 1 / ESTIMATED_WITHIN <= quotient <= ESTIMATED_WITHIN:
        text = f"condition {float(result.condition):.2e}, and {condition:.2e} is right"
        verdict.add("violation", "condition", text)


def _judge_error(example: Example, error: Exception, exact: list[LeastSquares], verdict: Verdict) -> None:
    """An error is a warning that nobody overlooks; some must come, some must not."""
    told = f"{type(error).__name__}: {error}"
    named, system = not is_default(example), example.recipe.problem not in LEAST_SQUARES
    singular = any(isinstance(t, System) and t.singular for t in exact)
    if singular or (example.recipe.problem == "pos" and not all(_is_definite(t) for t in exact)):
        if not (
            isinstance(error, np.linalg.LinAlgError | OverflowError)
            or (named and isinstance(error, ArithmeticError))
        ):
            verdict.add("violation", "raised", f"for a singular or indefinite A {told}")
        return
    overflow = isinstance(error, OverflowError)
    if overflow and any(_overflows(example, truth) for truth in exact):
        return
    if type(error) is ValueError and (_weighted_overflows(example) or _not_held(example)):
        return
    expected = (overflow or (system and isinstance(error, np.linalg.LinAlgError))) or (
        named and isinstance(error, ArithmeticError)
    )
    if not expected:
        verdict.add("violation", "raised", told)
        return
    u = unit_roundoff(example, keywords(example.recipe).get("accuracy"))
    spacing = spacing_of(example.a.dtype)
    bounds = np.concatenate([t.bounds(r, u) + t.underflow(r, spacing) for t in exact for r in t.ranks[:1]])
    if not named and (bounds < SOLVABLE).all():
        verdict.add("false alarm", "raised", f"{told} (expected errors {bounds})")


def _is_definite(truth: LeastSquares) -> bool:
    return isinstance(truth, System) and truth.definite


def _overflows(example: Example, truth: LeastSquares) -> bool:
    """Whether a component of x* is too large for the dtype of the result."""
    largest = np.log2(float(limits_of(example.a.dtype).max)) - 1e-3
    return any((truth.largest_component(rank) >= largest).any() for rank in truth.ranks)


def _not_held(example: Example) -> bool:
    """Whether sums of squares may exceed float64."""
    tops = (np.abs(as_array(x)).max(initial=0.0) for x in (example.a, example.b))
    return example.recipe.problem == "held" and max(tops) > SQUARABLE


def _weighted_overflows(example: Example) -> bool:
    """Whether weights take A or b out of float64's range."""
    if example.weights is None:
        return False
    with np.errstate(over="ignore"):
        weighted = [example.weights[:, None] * as_array(x) for x in (example.a, example.b)]
    return not all(np.isfinite(x).all() for x in weighted)
