"""The table of links for least squares.

All problems of a call are solved together where they are small, each step one launch, by R and the corrected
seminormal equations (``seminormal``). Unsolved and large problems go one by one through the rest of the
table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from neula.algorithms.krylov.batched_lstsq import lengths
from neula.algorithms.krylov.doubled_refinement import SYNCHRONOUS, DoubledSolution, LaunchTuning, Pace
from neula.algorithms.orthogonal.pivots import PivotTuning
from neula.algorithms.scaled_problems import ScaledProblems
from neula.algorithms.spectra.complete_orthogonal import complete_orthogonal
from neula.algorithms.spectra.gram import GramTuning
from neula.algorithms.spectra.rank_revealing import MinimumNorm, minimum_norm
from neula.certificates.backward_error import Measures, Scale, norms_of
from neula.certificates.forward_error import SURE
from neula.engines import FP16_COR, FP64
from neula.engines.formats import double_of
from neula.kernels.magnitudes import two_norms
from neula.pipeline.call import HostTuning
from neula.pipeline.chain import (
    CORE,
    HOST,
    Answer,
    Case,
    Chain,
    Declined,
    Link,
    Row,
    Rule,
    Table,
    computed,
    formatted,
    labelled,
    ruled,
)
from neula.pipeline.progress import stage
from neula.problems.least_squares import by_core, square
from neula.problems.least_squares.problem import (
    NO_GAP,
    LeastSquaresAnswer,
    LeastSquaresOptions,
    LeastSquaresProblems,
    LeastSquaresSolutions,
    LeastSquaresTuning,
)
from neula.problems.least_squares.refined import LIMITS, by_fast_r, by_gram, by_householder, unrefined
from neula.problems.least_squares.together import SOURCES, RSource, certified, solve_together


def by_svd(
    problems: LeastSquaresProblems, before: LeastSquaresAnswer | None, *, label: str
) -> LeastSquaresAnswer:
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
    problems: LeastSquaresProblems, before: LeastSquaresAnswer | None, *, label: str
) -> LeastSquaresAnswer:
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
    """The only problem in numbers near 1."""
    # The unknown of a zero column is zero whatever its damping. The damping becomes as large as other
    # columns, since errors of the row space are multiplied by the ratio of column norms.
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
    measures = replace(of_scaled, gradient=two_norms(along, 0)).measures(scale.norm)
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


LeastSquaresLink = Link[LeastSquaresProblems, LeastSquaresSolutions]


@dataclass(frozen=True)
class LeastSquaresCase(Case):
    """Problems of one shape, without numbers."""

    count: int
    m: int
    n: int
    options: LeastSquaresOptions
    together: bool  # whether all are solved at once; else it is one of them that is left
    # Solves problems on the host of a GPU, by_host(problems, before, passes=...).
    by_host: Callable[..., LeastSquaresAnswer] | None = None

    @cached_property
    def rows(self) -> int:
        """Number of rows of A, with damping stacked below it."""
        return self.options.rows(self.m, self.n)

    @cached_property
    def work(self) -> int:
        """Operations of a factorization, ``m n^2`` of the tall shape."""
        return max(self.rows, self.n) * min(self.rows, self.n) ** 2

    @cached_property
    def size(self) -> int:
        """Bytes of A in double precision."""
        return (16 if self.options.dtype.is_complex else 8) * self.rows * self.n

    @cached_property
    def spread(self) -> bool:
        """Whether rows are distributed over processes."""
        return self.options.over_rows.spread

    @cached_property
    def small(self) -> bool:
        """Whether problems take each step together: the time of a single one is that of launches, or, of all
        that are not wide on a CPU, that of a Gram matrix. Weighted, damped and wide ones whatever their size
        if their forward errors are to be refined.
        """
        tuning, options = self.tuning, self.options
        exotic = options.is_wide(self.m, self.n) or bool(options.damp) or options.weights is not None
        few = self.rows * self.n <= tuning.batched_elements and self.count > 1
        tall = tuning.lapack and self.rows >= self.n and not self.spread
        exact = options.forward and exotic
        sliced = tuning.lapack and options.is_wide(self.m, self.n) and self.m * self.n > by_core.DOUBLED
        low = self.work <= tuning[LeastSquaresTuning].together and not sliced
        return not options.named and bool(few or low or tall or exact)

    @cached_property
    def core(self) -> bool:
        """Whether the compiled core takes them: of a batch not weighted ones, whose rounding costs digits."""
        taken = by_core.takes(self.m, self.n, self.options)
        return taken and (self.count == 1 or self.options.weights is None)

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Sources of R for the seminormal equations; only the last one for problems that the core left."""
        names, options = self.tuning[LeastSquaresTuning].small_r, self.options
        if self.core:
            return names[-1:]
        low = options.target is not FP64 and not options.refines_doubled(self.m, self.n)
        return ("cholesky fp32", *names) if self.tuning.lapack and low else names

    @cached_property
    def gram(self) -> str:
        """Arithmetic of the Gram matrix of a tall matrix as given; empty where none pays."""
        # A GPU that is fast in fp64 reads A for the seminormal equations as often as iterations would (262144
        # x 1024 on an H200: 14.0 ms, and 16.4 in the same run by CGLS with the same R). Over processes
        # problems of up to ``gram_columns`` columns take this way, too, in plain fp16: the host looks twice,
        # not once an iteration, where a process that launches late keeps all others waiting. Their matrices
        # are not copied in double precision.
        options, tuning = self.options, self.tuning
        plain = options.weights is None and not options.damp and not options.named
        fast = tuning.corrected and tuning.fast_fp64
        large = self.m >= self.n and self.size > tuning.replayed_bytes
        if self.small:  # complex products in fp64 take four times as many operations
            long = 4 * self.work >= tuning[LeastSquaresTuning].together
            large = large and long and options.dtype.is_complex
        copied = self.spread and options.dtype != double_of(options.dtype)
        if copied or not (plain and fast and large and options.refines_doubled(self.m, self.n)):
            return ""
        if self.n <= tuning[GramTuning].fp16_gram_columns:
            return FP16_COR
        return "fp16" if self.n <= tuning[GramTuning].gram_columns and self.spread else ""

    @cached_property
    def preconditioners(self) -> list[tuple[str, str]]:
        """Sources of an R of low precision for iterations: method and arithmetic, cheapest first."""
        # An R in half precision with error correction is as good as one in single precision. It takes the
        # place of that, and stands before one in double precision, which takes three times as long (on an
        # H200). A QR in fp16 is no better than the Gram matrix with error correction, where that is cheaper.
        options, tuning = self.options, self.tuning
        if options.compute is not None:
            return [("rgsqrf", options.compute)]
        formats = tuning.preconditioners
        if options.algorithm is not None:
            return [("rgsqrf", formats[0])]
        if not tuning.corrected:
            return [("rgsqrf", format) for format in formats]
        columns = self.m if options.is_wide(self.m, self.n) else self.n
        # Of complex columns a Gram matrix is one real product of their parts, and a QR hundreds of three.
        gram = tuning[GramTuning]
        most = math.inf if options.dtype.is_complex else tuning[GramTuning].gram_columns
        low = [("cholesky", "fp16")] if gram.fp16_gram_columns < columns <= most else []
        low.append(("cholesky", FP16_COR) if columns <= most else ("rgsqrf", "fp16"))
        better = [("rgsqrf", format) for format in formats[1:] if format != "fp32"]
        return [*low, ("rgsqrf", FP16_COR), *better]


def chain_together(
    count: int,
    m: int,
    n: int,
    options: LeastSquaresOptions,
    by_host: Callable[..., LeastSquaresAnswer] | None = None,
) -> Sequence[LeastSquaresLink]:
    """Links for all of ``count`` problems together; none if they are solved one by one."""
    return Chain(TABLE, LeastSquaresCase(count, m, n, options, True, by_host))


def chain_alone(m: int, n: int, options: LeastSquaresOptions, count: int = 1) -> Sequence[LeastSquaresLink]:
    """Links for one of ``count`` problems that are still open."""
    return Chain(TABLE, LeastSquaresCase(count, m, n, options, False))


_when = Rule[LeastSquaresCase, bool]

_together = _when("whole batch", lambda case: case.together)

_one_left = _when("each problem by itself", lambda case: not case.together)

_small = _when("small; on a CPU all that are not wide", lambda case: case.small)

_large = _when("large", lambda case: not case.small)

_in_core = _when("on a CPU, up to 2^18 elements and 256 columns or rows", lambda case: case.core)
_is_system = _when(
    "square, on a CPU, larger than that, up to 32 right-hand sides",
    lambda case: not case.core and square.suits(case.m, case.n, case.options),
)

_svd_is_fast = _when(
    "an SVD takes no time: open problems more often lack full rank than nearly lack it",
    lambda case: case.work <= case.tuning[LeastSquaresTuning].svd,
)


_in_core_if_dependent = _when(
    "on a CPU, columns that may be dependent, up to 512 of them",
    lambda case: by_core.takes_dependent(case.m, case.n, case.options) and not _svd_is_fast(case),
)


# A batch has no step together; each of its problems begins with it.
_has_gram = _when(
    "tall matrices beyond CUDA graphs, without weights and damping, on a GPU that is fast in fp64; real "
    "ones if large",
    lambda case: bool(case.gram) and case.together == (case.count == 1),
)


@ruled("on a GPU, a few problems that asynchronous links rejected")
def _may_go_to_host(case: LeastSquaresCase) -> bool:
    allowed = case.by_host is not None and case.options.by_host and not case.spread
    return bool(allowed and case.tuning[HostTuning].left_to_host)


@ruled("where LAPACK is not faster, ``algorithm='cgls'`` and ``'lsqr'``")
def _iterates(case: LeastSquaresCase) -> bool:
    options = case.options
    if options.named:
        return options.algorithm in (None, "cgls", "lsqr")
    return not options.engine.tuning.lapack_first(case.rows, case.n)


_reflects = _when(
    "by default, and ``algorithm='householder'``",
    lambda case: case.options.algorithm in (None, "householder"),
)


# It does not refine in twice the precision, nor look for pivots over processes.
_finds_rank = _when(
    "matrices that may lack full rank, from m n^2 = 1e7 on",
    lambda case: (
        case.options.algorithm is None and not (_svd_is_fast(case) or case.options.forward or case.spread)
    ),
)

_by_default = _when(
    "by default, and ``algorithm='svd'``", lambda case: case.options.algorithm in (None, "svd")
)


def _is_named(algorithm: str) -> Rule[LeastSquaresCase, bool]:
    return _when(f"only ``algorithm='{algorithm}'``", lambda case: case.options.algorithm == algorithm)


_formats = Rule[LeastSquaresCase, Sequence[str]]


def _of_small_r(factorization: str, words: str = "fp64") -> Rule[LeastSquaresCase, Sequence[str]]:
    return _formats(
        words,
        lambda case: [name.split()[-1] for name in case.sources if name.rpartition(" ")[0] == factorization],
    )


def _of_r(method: str, words: str) -> Rule[LeastSquaresCase, Sequence[str]]:
    return _formats(words, lambda case: [format for name, format in case.preconditioners if name == method])


_of_gram = _formats("fp16_cor; fp16 over processes", lambda case: [case.gram])

_of_lu = _formats(
    "fp64; from order 400 on after fp32, for accuracies up to fp32",
    lambda case: square.as_system(case.options).library_formats(case.n),
)

_named_format = _formats("fp32, or ``compute``", lambda case: [case.options.compute or "fp32"])


@ruled("cgls, craig for wide matrices, lsqr by its name")
def _krylov(case: LeastSquaresCase) -> str:
    if case.options.is_wide(case.m, case.n):
        return "craig"
    return "lsqr" if case.options.algorithm == "lsqr" else "cgls"


def _core(case: LeastSquaresCase, label: str, format: str) -> LeastSquaresLink:
    """Solve by the core; problems that it declines go to the link that would come first without it."""

    def otherwise(problems: LeastSquaresProblems, before: LeastSquaresAnswer | None) -> LeastSquaresAnswer:
        if not (case.together and case.small):
            raise Declined
        return _seminormal(case, by_core.LABEL, "fp64").answer(problems, before)

    return Link(label, partial(by_core.by_core, label=label, together=otherwise))


def _seminormal(case: LeastSquaresCase, label: str, format: str) -> LeastSquaresLink:
    """Corrected seminormal equations with an R from one source."""
    name = label.removesuffix(" + seminormal")
    source, options = SOURCES[name], case.options
    pace = _pace(source, case, later=name in case.tuning[LeastSquaresTuning].small_r[1:])
    if case.count == 1 and not pace.is_prelaunched and name == "shifted cholesky fp64":
        # It is spared its last passes for an A without full rank, which the host reads.
        source = replace(source, factor=partial(source.factor, rcond=options.certain_rcond((case.m, case.n))))
    answer = partial(solve_together, label=label, source=source, pace=pace)
    return Link(label, answer, launches_only=pace.is_prelaunched and not options.may_wait)


def _pace(source: RSource, case: LeastSquaresCase, *, later: bool) -> Pace:
    """When the host reads the first results."""
    # All steps of a batch are prelaunched, and of what a CUDA graph replays; four times as many with an R of
    # a later link, which is for ill-conditioned problems. A step of another single problem takes longer than
    # the host takes to read, which may save the next step.
    tuning, times = case.tuning, 4 if later else 1
    size = case.size
    launched = tuning[LaunchTuning]
    brief = size <= tuning.replayed_bytes and case.work <= launched.prelaunched_again
    many = case.count > 1 or not case.options.may_wait or brief or times * size <= tuning.replayed_bytes
    if many and launched.prelaunched_steps:
        return Pace.prelaunched(launched.prelaunched_steps * times)
    steps = launched.asynchronous_steps * (2 if source.checked_first else 1)
    return Pace.asynchronous(steps) if steps else SYNCHRONOUS


def _on_host(
    passes: Callable[[HostTuning], float],
) -> Callable[[LeastSquaresCase, str, str], LeastSquaresLink]:
    def make(case: LeastSquaresCase, label: str, format: str) -> LeastSquaresLink:
        assert case.by_host is not None
        return Link(label, partial(case.by_host, passes=passes(case.tuning[HostTuning])))

    return make


def _by_fast_r(case: LeastSquaresCase, label: str, format: str) -> LeastSquaresLink:
    """Refine with a fast R; all links except the last and named ones may give R up early."""
    method = label.split()[0]
    last = case.options.algorithm is not None or (method, format) == case.preconditioners[-1]
    limit = None if last else LIMITS.get((method, format))
    return Link(label, partial(by_fast_r, label=label, method=method, compute=format, limit=limit))


_SMALL = _together, _small


TABLE: Table[LeastSquaresCase] = (
    Row("cholesky {}", _core, (_together, _in_core), "seminormal", place=CORE),
    Row("lu {}", formatted(square.by_lu), (_together, _is_system), arithmetics=_of_lu, place=CORE),
    Row("cholesky {}", computed(by_gram), (_has_gram,), "seminormal", _of_gram),
    Row(
        "cholesky {}",
        _seminormal,
        _SMALL,
        "seminormal",
        _of_small_r("cholesky", "fp64, after fp32 for accuracies up to fp32"),
    ),
    Row("the host", _on_host(lambda to: to.passes), (_together, _small, _may_go_to_host), place=HOST),
    Row("shifted cholesky {}", _seminormal, _SMALL, "seminormal", _of_small_r("shifted cholesky")),
    Row("householder {}", _seminormal, _SMALL, "seminormal", _of_small_r("householder")),
    Row("the host", _on_host(lambda to: to.passes_left), (_together, _small, _may_go_to_host), place=HOST),
    Row("pivoted cholesky {}", _core, (_one_left, _small, _in_core_if_dependent), "seminormal", place=CORE),
    Row("direct {}", computed(unrefined), (_one_left, _is_named("direct")), arithmetics=_named_format),
    Row("normal {}", computed(unrefined), (_one_left, _is_named("normal")), arithmetics=_named_format),
    Row(
        "cholesky {}",
        _by_fast_r,
        (_one_left, _large, _iterates),
        _krylov,
        _of_r("cholesky", "fp16, fp16_cor"),
    ),
    Row(
        "rgsqrf {}",
        _by_fast_r,
        (_one_left, _large, _iterates),
        _krylov,
        _of_r("rgsqrf", "those of the machine from fp16 on, or ``compute``"),
    ),
    Row("householder {}", labelled(by_householder), (_one_left, _large, _reflects), _krylov),
    Row("complete orthogonal {}", labelled(by_complete_orthogonal, improves=True), (_one_left, _finds_rank)),
    Row("svd {}", labelled(by_svd, improves=True), (_one_left, _by_default)),
)
"""Cheapest first."""
