"""What is tried for least squares, cheapest first, and when a solution is accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from neula.algorithms.krylov.cgls import cgls
from neula.algorithms.krylov.lsqr import lsqr
from neula.algorithms.krylov.pace import SYNCHRONOUS, Pace
from neula.algorithms.krylov.refinement import InnerSolver
from neula.certificates.forward_error import SURE
from neula.certificates.verdict import Evidence, Limits
from neula.engines import FP16_COR, FP64
from neula.errors import counted
from neula.pipeline.chain import Answer, Link, Verdict
from neula.pipeline.refusals import Declined
from neula.problems.least_squares import by_kernel, links
from neula.problems.least_squares.by_kernel import LABEL
from neula.problems.least_squares.minimum_norm import NO_GAP, by_complete_orthogonal, by_svd
from neula.problems.least_squares.preconditioner import LIMITS
from neula.problems.least_squares.prepared import LeastSquaresProblems
from neula.problems.least_squares.problem import LeastSquaresOptions, LeastSquaresSolutions, in_words
from neula.problems.least_squares.r_source import SOURCES, RSource
from neula.problems.least_squares.together import solve_together

Chain = list[Link[LeastSquaresProblems, LeastSquaresSolutions]]

SVD = "svd fp64"

COMPLETE_ORTHOGONAL = "complete orthogonal fp64"

FIRST = "cholesky fp64"
"""Source of the R of the link that takes what the core does not."""

LATER = 4
"""Times as many steps are prelaunched with an R of a later link, which is for ill-conditioned problems."""


def chain_together(count: int, m: int, n: int, options: LeastSquaresOptions) -> Chain:
    """What is tried for all of ``count`` problems together, each step one launch; large ones are solved one
    by one, of batches on a CPU those that the core takes by the core first.

    Forward errors of weighted, damped and wide problems are refined so whatever their size.
    """
    tuning, small = options.engine.tuning, _are_small(count, m, n, options)
    # Rounded weights cost digits, which batches have time to keep.
    by_core = by_kernel.takes(m, n, options) and (count == 1 or options.weights is None)
    if not small:
        if by_core:
            return [_link(LABEL, by_kernel.by_core, together=_leave)]
        return _by_gram(m, n, options) if count == 1 else []
    names = tuning.small_r
    if tuning.lapack and options.target is not FP64 and not options.refines_doubled(m, n):
        names = ("cholesky fp32", *names)
    made = [partial(_seminormal, name, count, m, n, options, later=i > 0) for i, name in enumerate(names)]
    if not by_core:
        return [make() for make in made]
    together = partial(_tried, make=made[names.index(FIRST)])
    last = Link(f"{names[-1]} + seminormal", partial(_tried, make=made[-1]))
    return [_link(LABEL, by_kernel.by_core, together=together), last]


def _tried(
    problems: LeastSquaresProblems,
    before: Answer[LeastSquaresSolutions] | None,
    make: Callable[[], Link[LeastSquaresProblems, LeastSquaresSolutions]],
) -> Answer[LeastSquaresSolutions]:
    """By a link that is made when it is its turn: most problems are solved before."""
    return make().answer(problems, before)


def _leave(
    problems: LeastSquaresProblems, before: Answer[LeastSquaresSolutions] | None
) -> Answer[LeastSquaresSolutions]:
    """Nothing: each is solved alone."""
    raise Declined


def _seminormal(
    name: str, count: int, m: int, n: int, options: LeastSquaresOptions, *, later: bool
) -> Link[LeastSquaresProblems, LeastSquaresSolutions]:
    """Corrected seminormal equations with an R from one source."""
    source = SOURCES[name]
    pace = _pace(source, count, m, n, options, later=later)
    if count == 1 and not pace.is_prelaunched and name == "shifted cholesky fp64":
        # It is spared its last passes for an A without full rank, which the host reads.
        source = replace(source, factor=partial(source.factor, rcond=options.certain_rcond((m, n))))
    launches_only = pace.is_prelaunched and not options.may_wait
    label = f"{name} + seminormal"
    return _link(label, solve_together, source=source, pace=pace, launches_only=launches_only)


def _pace(source: RSource, count: int, m: int, n: int, options: LeastSquaresOptions, *, later: bool) -> Pace:
    """When the host reads the first results.

    All steps of a batch are prelaunched, and of what a CUDA graph replays. A step of another single problem
    takes longer than the host takes to read, which may save the next step.
    """
    tuning, rows, times = options.engine.tuning, options.rows(m, n), LATER if later else 1
    size = 8 * rows * n
    brief = size <= tuning.replayed_bytes and max(rows, n) * min(rows, n) ** 2 <= tuning.prelaunched_again
    many = count > 1 or not options.may_wait or brief or times * size <= tuning.replayed_bytes
    if many and tuning.prelaunched_steps:
        return Pace.prelaunched(tuning.prelaunched_steps * times)
    steps = tuning.asynchronous_steps * (2 if source.checked_first else 1)
    return Pace.asynchronous(steps) if steps else SYNCHRONOUS


def _is_exotic(m: int, n: int, options: LeastSquaresOptions) -> bool:
    """Whether problems are other than to shorten the residual of a matrix that is not wide."""
    return options.is_wide(m, n) or bool(options.damp) or options.weights is not None


def _are_small(count: int, m: int, n: int, options: LeastSquaresOptions) -> bool:
    """Whether problems take each step together: the time of a single one is that of launches, or, of all that
    are not wide on a CPU, that of a Gram matrix.
    """
    tuning, rows = options.engine.tuning, options.rows(m, n)
    few = rows * n <= tuning.batched_elements and count > 1
    small = max(rows, n) * min(rows, n) ** 2 <= tuning.together
    tall = tuning.lapack and rows >= n and not options.over_rows.spread
    exact = options.forward and _is_exotic(m, n, options)
    return not options.named and bool(few or small or tall or exact)


def chain_after_together(m: int, n: int, options: LeastSquaresOptions, count: int = 1) -> Chain:
    """What is tried for one of ``count`` that was left: an SVD at once where that takes no time.

    What is left is more often without full rank than nearly so. A large one goes on like any other.
    """
    if not _are_small(count, m, n, options):
        return chain_alone(m, n, options)[len(_by_gram(m, n, options)) :]
    rows = options.rows(m, n)
    if max(rows, n) * min(rows, n) ** 2 <= options.engine.tuning.svd:
        return [_svd()]
    *deficient, svd = _of_any_rank(m, n, options)
    if by_kernel.takes_dependent(m, n, options):
        deficient.insert(0, _link(by_kernel.DEPENDENT, by_kernel.by_core, together=_leave))
    if any(SOURCES[name].backward_stable for name in options.engine.tuning.small_r):
        return [*deficient, svd]
    return [*deficient, _by_householder(m, n, options), svd]


def _of_any_rank(m: int, n: int, options: LeastSquaresOptions) -> Chain:
    """What is tried for one problem whose matrix may lack full rank.

    Digits that were asked for are not those of the first: it does not refine in twice the precision. Nor
    does it look for pivots over processes.
    """
    rows = options.rows(m, n)
    small = max(rows, n) * min(rows, n) ** 2 <= options.engine.tuning.svd
    if small or options.forward or options.over_rows.spread:
        return [_svd()]
    return [_link(COMPLETE_ORTHOGONAL, by_complete_orthogonal, improves=True), _svd()]


def chain_alone(m: int, n: int, options: LeastSquaresOptions) -> Chain:
    """What is tried for one problem, where the chain above has nothing for it."""
    algorithm = options.algorithm
    if algorithm in ("direct", "normal"):
        compute = options.compute or "fp32"
        return [_link(f"{algorithm} {compute}", links.unrefined, algorithm=algorithm, compute=compute)]
    if algorithm == "svd":
        return [_svd()]
    if algorithm == "householder":
        return [_by_householder(m, n, options)]
    lapack = not options.named and options.engine.tuning.lapack_first(options.rows(m, n), n)
    fast = [] if lapack else [*_by_gram(m, n, options), *_with_fast_r(m, n, options)]
    if algorithm is not None:
        return fast[:1]
    return [*fast, _by_householder(m, n, options), *_of_any_rank(m, n, options)]


def _svd() -> Link[LeastSquaresProblems, LeastSquaresSolutions]:
    return _link(SVD, by_svd, improves=True)


def _by_gram(m: int, n: int, options: LeastSquaresOptions) -> Chain:
    """Corrected seminormal equations with an R of low precision, of tall matrices as they are given.

    A GPU that is fast in fp64 reads them as often as iterations would (262144 x 1024 on an H200: 14.0 ms, and
    16.4 in the same run by CGLS with the same R). Over processes, whose matrices are not copied in double
    precision, problems of up to ``gram_columns`` columns take this way, too, with a Gram matrix in plain
    fp16: the host looks twice, not once an iteration, where a process that launches late keeps all others
    waiting.
    """
    tuning, spread = options.engine.tuning, options.over_rows.spread
    plain = options.weights is None and not options.damp and not options.named
    fast = tuning.corrected and "fp64" in tuning.preconditioners
    large = m >= n and 8 * m * n > tuning.replayed_bytes
    copied = spread and options.dtype != torch.float64
    if copied or not (plain and fast and large and options.refines_doubled(m, n)):
        return []
    if n <= tuning.fp16_gram_columns:
        return [_link(f"cholesky {FP16_COR} + seminormal", links.by_gram, compute=FP16_COR)]
    if n <= tuning.gram_columns and spread:
        return [_link("cholesky fp16 + seminormal", links.by_gram, compute="fp16", plain_residuals=True)]
    return []


def _by_householder(
    m: int, n: int, options: LeastSquaresOptions
) -> Link[LeastSquaresProblems, LeastSquaresSolutions]:
    name, inner = _inner_solver(m, n, options)
    return _link(f"householder fp64 + {name}", links.by_householder, inner=inner)


def _inner_solver(m: int, n: int, options: LeastSquaresOptions) -> tuple[str, InnerSolver]:
    """What R preconditions, and its name; wide problems have one of their own."""
    inner, name = (lsqr, "lsqr") if options.algorithm == "lsqr" else (cgls, "cgls")
    return "craig" if options.is_wide(m, n) else name, inner


def _with_fast_r(m: int, n: int, options: LeastSquaresOptions) -> Chain:
    """Those with an R in low precision; all but the last may give it up early."""
    name, inner = _inner_solver(m, n, options)
    ways = preconditioners(m if options.is_wide(m, n) else n, options)
    tried = []
    for method, compute in ways:
        last = options.algorithm is not None or (method, compute) == ways[-1]
        limit = None if last else LIMITS.get((method, compute))
        answer = partial(links.by_fast_r, method=method, compute=compute, inner=inner, limit=limit)
        tried.append(_link(f"{method} {compute} + {name}", answer))
    return tried


def _link(
    label: str,
    answer: Callable[..., Answer[LeastSquaresSolutions]],
    *,
    improves: bool = False,
    launches_only: bool = False,
    **given: Any,
) -> Link[LeastSquaresProblems, LeastSquaresSolutions]:
    return Link(label, partial(answer, label=label, **given), improves=improves, launches_only=launches_only)


def preconditioners(n: int, options: LeastSquaresOptions) -> list[tuple[str, str]]:
    """Where R of n columns comes from before Householder reflections, cheapest first: method and arithmetic.

    An R in half precision with error correction is as good as one in single precision. It takes the place of
    that, and stands before one in double precision, which takes three times as long (on an H200). A QR in
    fp16 is no better than the Gram matrix with error correction, where that is cheaper.
    """
    if options.compute is not None:
        return [("rgsqrf", options.compute)]
    tuning = options.engine.tuning
    formats = tuning.preconditioners
    if options.algorithm is not None or not tuning.corrected:
        return [("rgsqrf", format) for format in formats]
    links = [("cholesky", "fp16")] if tuning.fp16_gram_columns < n <= tuning.gram_columns else []
    links.append(("cholesky", FP16_COR) if n <= tuning.gram_columns else ("rgsqrf", "fp16"))
    better = [("rgsqrf", format) for format in formats[1:] if format != "fp32"]
    return [*links, ("rgsqrf", FP16_COR), *better]


@dataclass(frozen=True)
class LeastSquaresJudge:
    """Solutions are accepted by their evidence; of links that found some, which one is best.

    Attributes
    ----------
    limits : Limits
    enough : float
        Forward error up to which no other link is tried, even if more digits were asked for.
    together : bool
        Whether problems were solved together.
    """

    limits: Limits
    enough: float
    together: bool

    @classmethod
    def for_shape(cls, m: int, n: int, options: LeastSquaresOptions, *, together: bool) -> LeastSquaresJudge:
        """The judge of problems of one shape."""
        # Links for one problem refine as far as can be.
        enough = options.first_error(m, n) if together else SURE
        return cls(options.limits((m, n)), enough, together)

    def measure(self, problems: object, answer: Answer[LeastSquaresSolutions]) -> torch.Tensor:
        """What :attr:`LeastSquaresSolutions.names` says, for each problem."""
        return answer.values.measured()

    def settled(self, largest: Sequence[float]) -> bool:
        """Whether all are accepted, and none is zero, from the largest of each number that was measured."""
        evidence, zero = Evidence.from_numbers(largest), largest[LeastSquaresSolutions.names.index("zero")]
        return bool(self.limits.accept(evidence) and evidence.forward_error <= self.enough and zero == 0)

    def verdict(self, answer: Answer[LeastSquaresSolutions], numbers: np.ndarray) -> Verdict:
        """Of solutions whose backward error is small enough the one with the most digits is best.

        The SVD improves what was found before, and has the last word.
        """
        of, evidence = (
            dict(zip(LeastSquaresSolutions.names, numbers, strict=True)),
            Evidence.from_numbers(numbers),
        )
        accepted = self.limits.accept(evidence) & (not answer.doubt)
        enough = replace(self.limits, forward_error=self.enough).accept(evidence) & (not answer.doubt)
        superseded = np.full_like(of["doubtful"], answer.label != SVD)
        error = np.maximum(of["refined_error"], self.limits.backward_error)
        penalty = np.array([~accepted, superseded, error, of["forward_error"]])
        reason = (
            self._of_batch(of, accepted, len(answer.values)) if self.together else self._of_one(of, answer)
        )
        settled = answer.judged or answer.label.endswith(NO_GAP)
        return Verdict(accepted, penalty, reason, enough | settled)

    def _of_batch(self, of: dict[str, np.ndarray], accepted: np.ndarray, count: int) -> str:
        error = of["backward_error"]
        missed, doubtful = int((~accepted).sum()), int((error[~accepted] <= self.limits.backward_error).sum())
        return self.reason(error.max(), of["forward_error"].max(), count, missed, doubtful)

    def reason(self, error: float, forward: float, count: int, missed: int = 0, doubtful: int = 0) -> str:
        """The largest backward and forward errors in words, of problems some of which may be rejected."""
        worst = in_words(self.limits.backward_error, error, forward)
        if count == 1:
            return worst + (", its rank or digits in doubt" if doubtful else "")
        doubts = f"{doubtful} for doubts about their rank or digits"
        return f"{missed} of {count} problems rejected, {doubts}; the worst: {worst}"

    def _of_one(self, of: dict[str, np.ndarray], answer: Answer[LeastSquaresSolutions]) -> str:
        forward = f"forward error {of['forward_error'][0]:.1e}"
        if answer.label == SVD:
            error, rank, condition = (of[name][0] for name in ("backward_error", "rank", "condition"))
            known = f"{forward}, rank {rank:.0f}, condition number {condition:.1e}"
            doubt = f", {answer.doubt}" if answer.doubt else ""
        else:
            error, known = of["refined_error"][0], f"{forward}, {counted(answer.iterations, 'iteration')}"
            doubt = f"; {answer.doubt}" if answer.doubt else ""
        return f"backward error {error:.1e} (bound {self.limits.backward_error:.1e}), {known}{doubt}"
