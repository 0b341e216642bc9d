"""Linear systems: check the input, choose, factorize, refine, certify."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, Unpack, overload

import numpy as np
import torch

from neula.algorithms.elimination import compiled
from neula.certificates.bounds import Accuracy, solve_bound
from neula.certificates.forward_error import SURE
from neula.certificates.verdict import Evidence
from neula.engines import FP64, Engine, format_named
from neula.errors import check_name, of_batch, whole_number
from neula.kernels.core import core
from neula.kernels.magnitudes import two_norms
from neula.pipeline.batches import SingularMember
from neula.pipeline.call import Call, HostTuning
from neula.pipeline.chain import Answer, Run, Unanswered, first_answer, run_chain, run_each
from neula.pipeline.gradients import attach_system
from neula.pipeline.inputs import check_finite
from neula.pipeline.operators import engine_for, with_operator
from neula.pipeline.plans import (
    Extremes,
    Given,
    LaunchedPlan,
    Plan,
    Plans,
    accepted_solution,
    solved_by_plan,
)
from neula.pipeline.progress import Progress
from neula.pipeline.result import SolveResult
from neula.pipeline.shapes import BatchedProblem, broadcast_system
from neula.pipeline.solutions import (
    Report,
    attached,
    by_parts,
    does_not_fit,
    has_parts,
    nothing_to_do,
    rounded_away,
    unread,
)
from neula.problems.operators.solutions import traced_solve
from neula.problems.signatures import ArrayLike, Kind, SolveKeywords
from neula.problems.systems.links import CHOLESKY, PIVOTED, chain_alone, chain_together
from neula.problems.systems.problem import (
    QueuedTuning,
    Systems,
    SystemsOptions,
    SystemsSolutions,
    asymmetry,
    in_words,
)
from neula.problems.systems.system import EquilibratedSystem, SystemsJudge
from neula.problems.systems.together import SOURCES
from neula.problems.systems.ways import is_for_core, suits, takes, takes_small

UPDATES = len(SystemsSolutions.names)  # where the core says how many updates there were; the history follows


class SystemsPlan:
    def __init__(self, n: int, k: int, options: SystemsOptions) -> None:
        kernels = core()
        assert kernels is not None
        self.options, self._n, self._k = options, n, k
        self._solve, self._count = kernels.solve_systems, compiled.count_of(kernels)
        self._asked = options.positive, options.dtype.to_real() == torch.float32, 1
        self._setting = compiled.setting_for(kernels, n, options.digits)
        self._dtype = compiled.DTYPES[options.dtype.is_complex]
        self._limits = options.limits(n)
        self._label = (CHOLESKY if options.positive else PIVOTED).format(FP64.name)

    def __call__(self, given: Given) -> SolveResult[Any] | None:
        (a, b), k, limits = given.arrays, self._k, self._limits
        x, errors = np.empty((self._n, k), self._dtype), np.empty((1, k))
        numbers = np.empty((self._count, 1))
        b = b[:, None] if b.ndim == 1 else b
        if not self._solve(a, b, self._setting, x, errors, numbers, *self._asked):
            return None
        of = numbers.ravel().tolist()
        _, _, refined, backward, forward, _, condition, largest, growth = of[:UPDATES]
        if not (limits.accept(Evidence.from_numbers(of)) and math.isfinite(largest)):
            return None
        updates, bound = int(of[UPDATES]), limits.backward_error
        fields = {
            "backward_error": backward,
            "forward_error": forward,
            "condition": condition,
            "iterations": updates,
            "tolerance": bound,
            "history": (*of[UPDATES + 1 : UPDATES + 1 + updates], refined),
            "growth": growth,
            "method": self._label,
        }
        acceptance = self._label, lambda: in_words(refined, bound, forward, updates, growth)
        return accepted_solution(SolveResult, given, self.options, acceptance, fields, x, errors[0].tolist())


class LaunchedSystemsPlan(LaunchedPlan[Systems, SystemsSolutions, SolveResult[Any]]):
    """A plan for systems whose first link launches its work, and for larger ones and batches of the core."""

    result, problems = SolveResult, Systems
    judge: SystemsJudge
    options: SystemsOptions

    def reason(self, found: Answer[Any], of: Extremes) -> str:
        error, forward, growth = (of[name][1] for name in ("refined_error", "forward_error", "growth"))
        words = in_words(error, self.judge.limits.backward_error, forward, found.iterations, growth)
        return of_batch(words, 0, len(found.values), "systems")

    def fields(
        self, given: Given, shapes: BatchedProblem, found: Answer[SystemsSolutions], of: Extremes
    ) -> dict[str, Any]:
        bound, growth = self.judge.limits.backward_error, of["growth"][1]
        return {"tolerance": bound, "growth": growth, "method": found.label}


def plan_for(shapes: BatchedProblem, options: SystemsOptions) -> SystemsPlan | LaunchedSystemsPlan | None:
    """Systems on the host where the core takes them, or one that is launched on a device."""
    a, b = shapes.a, shapes.b
    n = a.shape[-1]
    in_core = is_for_core(n, options) and takes(a, b, options)
    if in_core and not shapes.batch and takes_small(a, b, options):
        return SystemsPlan(n, b.shape[-1], options)
    if 0 in (a.numel(), b.numel()) or options.progress is not None or shapes.copies > 1:
        return None
    links = chain_together(len(shapes.matrices), n, options)
    source = SOURCES.get(links[0].label) if links else None
    launches = not shapes.batch and source is not None and not source.synchronizes
    if not links or not (in_core or launches):
        return None
    return LaunchedSystemsPlan(links[0], SystemsJudge.for_shape(n, options, improves=False), options)


STRUCTURES = ("gen", "pos")
PIVOTING = ("none", "rbt", "partial")
CERTIFIED = ("backward", "forward")


@overload
def solve(A: Kind, b: Any, **keywords: Unpack[SolveKeywords]) -> SolveResult[Kind]: ...
@overload
def solve(A: Any, b: Any, **keywords: Unpack[SolveKeywords]) -> SolveResult[Any]: ...
@with_operator(
    traced_solve,
    Plans(
        lambda A, b, **keywords: _plan(A, b, **keywords),
        go_on=lambda begun, *args, **keywords: _finished(*_asked(*args, **keywords), begun),
    ),
)
def solve(
    A: ArrayLike,
    b: ArrayLike,
    *,
    assume_a: str = "gen",
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    pivot: str | None = None,
    compute: str | None = None,
    max_iterations: int = 100,
    certify: str = "backward",
    strict: bool = False,
    progress: Progress | None = None,
    wait: bool = True,
) -> SolveResult:
    """Solve ``A x = b`` for square A to the requested accuracy.

    Returns x with a bound on its error, which guarantees its number of correct digits.

    Parameters
    ----------
    A : array_like, shape (..., n, n)
        NumPy array, torch tensor or DLPack object, float16 to float64, complex64, complex128; integers are
        taken as float64. Not modified. Leading dimensions are a batch. Every dimension may be zero.
    b : array_like, shape (n,) or (..., n, k)
        One vector, the same for every matrix of A, or a matrix of right-hand sides; leading dimensions of A
        and b are broadcast as in NumPy. Complex b with a real A count as twice as many real ones.
    assume_a : {"gen", "pos"}
        ``"pos"`` for a symmetric (of complex numbers: Hermitian) positive definite A, both of whose triangles
        must be there: Cholesky factorization takes half the time of LU.
    accuracy : {"fp16", "bf16", "tf32", "fp32", "fp64"}, dtype or float, optional
        Accuracy of the result; by default that of the dtype. A number is the largest acceptable backward
        error; the cheapest sufficient format is used.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine, optional
        The engine that multiplies matrices. ``"auto"`` chooses it by the device of A; one small matrix of a
        GPU goes to the CPU.
    pivot : {"none", "rbt", "partial"}, optional
        Force this LU, without a fallback: unpivoted, unpivoted after a random butterfly transform, with
        partial pivoting. By default the chain in the Notes.
    compute : str, optional
        Format of the products in the first factorizations; the engine's preference by default.
    max_iterations : int, optional
        Solves with the factors in each attempt.
    certify : {"backward", "forward"}, optional
        The error that refinement reduces to the level of the accuracy: the backward error, or the forward
        error of x. The latter takes residuals in twice the working precision, and a condition number well
        below the reciprocal of the unit roundoff; otherwise the solution is not accepted. Small systems (with
        few right-hand sides, on a GPU up to 64) are refined that far in any case, and so are most systems of
        thousands of unknowns.
    strict : bool, optional
        Raise an :class:`~neula.pipeline.result.AccuracyError` instead of a warning.
    progress : callable or bool, optional
        Called with the name of the stage and the completed fraction; True shows a progress bar.
    wait : bool, optional
        False returns once the first link of the chain is launched, without waiting for the device.
        ``accepted`` is then an array on the device, and :func:`neula.finish` runs the rest of the chain. If
        the first link waits for the device (on a CPU, and for large systems), the answer is complete.

    Returns
    -------
    SolveResult
        The solution ``x`` with its evidence: ``converged``, ``backward_error``, ``condition``,
        ``forward_error`` and ``digits``, ``iterations``, ``growth``; for a batch also ``accepted``,
        ``backward_errors``, ``conditions`` and ``forward_errors``.

    Raises
    ------
    numpy.linalg.LinAlgError
        If A is exactly singular (the message has the index of the pivot), or not positive definite with
        ``assume_a="pos"``; of a batch the message says which matrix.
    ValueError
        For shapes that do not fit, NaN or Inf (anywhere in a batch), and unknown names; if b requires a
        gradient and A is no torch tensor.
    TypeError
        For sparse input.
    ArithmeticError
        If a named variant breaks down without an answer, or the answer overflows the dtype.
    AccuracyError
        If the accuracy was not reached and ``strict`` is set.

    Warns
    -----
    AccuracyWarning
        If the accuracy was not reached; the result has the error that was reached.
    IllConditionedWarning
        If A is singular, or so ill-conditioned that no digit of x is guaranteed. A subclass of
        AccuracyWarning.

    See Also
    --------
    lstsq : for matrices that are not square, or singular.
    scipy.linalg.solve, torch.linalg.solve : LU in double precision, for small systems just as good.

    Notes
    -----
    LU factors (or Cholesky factors) in low precision update the solution until its backward error, computed
    from the true residual in double precision, is small enough: by classical refinement or, if that does not
    converge, as the preconditioner of GMRES. If the solution is still rejected, more accurate factors follow,
    except those that are slow on the engine: unpivoted if the matrix allows it, of the matrix mixed by random
    butterflies, with partial pivoting, in single precision, and finally in double precision. On a GPU that is
    fast in double precision, single systems up to order 18000 take LU of the mixed matrix before other
    factors in double precision.

    Refinement follows [1]_; rows and columns are scaled by powers of two before A is rounded, as in [2]_;
    butterflies are those of [3]_, of depth 2, with fixed seeds. The backward error is the normwise one in the
    infinity norm, ``||b - A x|| / (||A|| ||x|| + ||b||)``. If A is badly scaled it is also measured in the
    scaled system, and the larger one counts: equations in small units count as much as others.

    The forward error bounds ``||D (x - x*)|| / ||D x*||``. D holds the column norms of A, and x* is the exact
    solution for A and b as stored. Rows are scaled before, which changes no solution, so that it may be small
    even if the condition number of the given A is large.

    ``x`` is differentiable with respect to A and b, to any order.

    References
    ----------
    .. [1] E. Carson, N. J. Higham, "Accelerating the Solution of Linear Systems by Iterative Refinement in
       Three Precisions", SIAM J. Sci. Comput. 40, 2018, algorithm 1.1.
    .. [2] N. J. Higham, S. Pranesh, M. Zounon, "Squeezing a Matrix into Half Precision, with an Application
       to Solving Linear Systems", SIAM J. Sci. Comput. 41, 2019.
    .. [3] M. Baboulin, J. Dongarra, J. Herrmann, S. Tomov, "Accelerating Linear System Solutions Using
       Randomization Techniques", ACM Trans. Math. Softw. 39, 2013.

    Examples
    --------
    >>> import numpy as np, neula
    >>> result = neula.solve(np.array([[2.0, 1.0], [1.0, 3.0]]), np.array([4.0, 7.0]))
    >>> result.x.round(12), result.converged
    (array([1., 2.]), True)
    """
    asked = (assume_a, accuracy, engine, pivot, compute, max_iterations, certify, strict, progress, wait)
    call, shapes, options = _asked(A, b, *asked)
    if has_parts(shapes.a, options.dtype):
        names = ("assume_a", "accuracy", "engine", "pivot", "compute", "max_iterations", "certify", "strict")
        keywords: Any = dict(zip((*names, "progress", "wait"), asked, strict=True))
        return by_parts(call, shapes, partial(solve, **keywords))
    if not wait and (pending := _begun(call, shapes, options)) is not None:
        return pending
    return _finished(call, shapes, options)


def _asked(
    A: Any,
    b: Any,
    assume_a: str = "gen",
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    pivot: str | None = None,
    compute: str | None = None,
    max_iterations: int = 100,
    certify: str = "backward",
    strict: bool = False,
    progress: Progress | None = None,
    wait: bool = True,
) -> tuple[Call, BatchedProblem, SystemsOptions]:
    check_name("structure assume_a", assume_a, STRUCTURES)
    check_name("pivot", pivot, PIVOTING, optional=True)
    if pivot is not None and assume_a == "pos":
        raise ValueError(f"pivot={pivot!r} is for LU, and assume_a='pos' asks for Cholesky: leave one out")
    check_name("certify", certify, CERTIFIED)
    call = Call.begin(
        {"A": A, "b": b},
        engine=engine,
        accuracy=accuracy,
        bound=lambda target, shape: solve_bound(target, max(shape, default=1)),
        strict=strict,
        gradients=True,
    )
    if wait and pivot is None and compute is None:
        call = _by_host(call, engine, positive=assume_a == "pos")
    given = call.first.tensor
    if given.ndim >= 2 and given.shape[-1] != given.shape[-2]:
        m, n = given.shape[-2:]
        raise ValueError(f"A must be square, got {m} x {n}; use neula.lstsq for other shapes")
    shapes = broadcast_system(*call.tensors)
    options = SystemsOptions(
        engine=call.engine,
        target=call.target,
        dtype=call.dtype,
        positive=assume_a == "pos",
        pivot=pivot,
        compute=None if compute is None else format_named(compute),
        max_iterations=whole_number("max_iterations", max_iterations),
        forward=certify == "forward",
        progress=progress,
        by_host=engine == "auto",
    )
    return call, shapes, options


def _plan(A: Any, b: Any, *, wait: bool = True, **keywords: Any) -> Plan | None:
    _, shapes, options = _asked(A, b, wait=wait, **keywords)
    plan = None if has_parts(shapes.a, options.dtype) else plan_for(shapes, options)
    launches = wait and not options.dtype.is_complex  # plans of launches were tried for real ones alone
    return plan if launches or isinstance(plan, SystemsPlan) else None


def _by_host(call: Call, engine: str | Engine, *, positive: bool) -> Call:
    (a, b), tuning = call.tensors, call.engine.tuning
    orders, most = tuning[QueuedTuning], 3 * tuning[HostTuning].by_host_kernel  # of a third of the operations
    queued = orders.queued_definite if positive else orders.queued  # which takes less time than LAPACK

    def has_kernel(m: int, n: int) -> bool:
        k = 1 if b.ndim == 1 else b.shape[-1]
        return m == n and suits(n, k, (a.dtype, b.dtype, call.dtype))

    return call.by_host(engine, has_kernel=has_kernel, most=most, library=not queued or call.dtype.is_complex)


def _begun(call: Call, shapes: BatchedProblem, options: SystemsOptions) -> SolveResult | None:
    """The result of the first link, before anything is read; None if that link synchronizes."""
    matrices, columns = _here(call, shapes)
    n = matrices.shape[-1]
    if 0 in (matrices.numel(), columns.numel()):
        return None
    with call.computing():
        systems = Systems(matrices, columns, replace(options, may_wait=False))
        begun = first_answer(chain_together(len(matrices), n, systems.options), systems)
        if begun is None:
            return None
    result: SolveResult[Any] = SolveResult(
        **unread(call, shapes, begun, options.limits(n), options),
        growth=math.nan,
        method=begun.label,
        _pending=lambda: _finished(call, shapes, options, begun),
    )
    return _attached(call, shapes, options, result)


def _finished(
    call: Call, shapes: BatchedProblem, options: SystemsOptions, begun: Answer[SystemsSolutions] | None = None
) -> SolveResult:
    if begun is None:
        soon = solved_by_plan(plan_for(shapes, options), call, shapes)
        if isinstance(soon, SolveResult):
            return _attached(call, shapes, options, soon)
        begun = soon
    matrices, columns = _here(call, shapes)
    if 0 in (matrices.numel(), columns.numel()):
        n, k = columns.shape[1:]
        zero = SystemsSolutions.full(0.0, len(matrices), n, k, columns.device, options.dtype)
        run = nothing_to_do(replace(zero, growth=zero.growth + 1), matrices)
    else:
        with call.computing():
            run = _solve(Systems(matrices, columns, options), call, begun)
    report = Report(call, shapes, options, run)
    result = collect(report)
    if not result.converged:
        call.report_missed(
            f"the system is not certified to be solved to {result.accuracy} accuracy",
            why(result, options, run) + (asymmetry(matrices) if options.positive else ""),
            result,
            report.missed(),
            no_digits=not result.forward_error <= SURE,
        )
    return _attached(call, shapes, options, result)


def _here(call: Call, shapes: BatchedProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices and right-hand sides on the engine's device, both real or both complex."""
    a, b = call.here(shapes.matrices), call.here(shapes.columns)
    return a, b if b.is_complex() or not a.is_complex() else b.to(b.dtype.to_complex())


def _attached(
    call: Call, shapes: BatchedProblem, options: SystemsOptions, result: SolveResult
) -> SolveResult:
    if not call.differentiable:
        return result
    compute = None if options.compute is None else options.compute.name
    how: Any = {"assume_a": "pos" if options.positive else "gen", "pivot": options.pivot, "compute": compute}
    how |= {"max_iterations": options.max_iterations, "strict": call.strict}

    def again(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return solve(a, b, engine=engine_for(call.engine, b), **how).x

    return attached(call, shapes, result, lambda a, b, x: attach_system(a, b, x, again))


def _solve(systems: Systems, call: Call, begun: Answer[SystemsSolutions] | None) -> Run[SystemsSolutions]:
    """Solve all systems together where the library's factors are cheapest; unsolved ones one by one."""
    a, b, options = systems.a, systems.b, systems.options
    count, n, k = b.shape
    batch = call.first.tensor.shape[:-2]
    together = chain_together(count, n, options)
    if begun is not None:  # by another than the first link where no number had to be read
        together = together[next((i for i, link in enumerate(together) if link.label == begun.label), 0) :]
    if together:
        try:
            judge = SystemsJudge.for_shape(n, options, improves=False)
            run = run_chain(together, systems, judge, begun=begun, settled=judge.settled)
        except SingularMember as error:
            _check_finite(systems, call)
            raise np.linalg.LinAlgError(_of_batch(error.why, error.place, batch)) from None
    else:
        run = Run.begin(count, SystemsSolutions.full(math.nan, count, n, k, a.device, options.dtype))
    if not len(run.open):  # no solution of numbers that are not finite is accepted
        return run
    if together:
        _check_finite(systems, call)
    alone = chain_alone(n, options, count)
    if not alone:
        return run

    def solve_alone(i: int) -> Run[SystemsSolutions] | None:
        try:
            system = EquilibratedSystem.from_arrays(a[i], b[i], options, lambda: _check_finite(systems, call))
            return run_chain(alone, system, SystemsJudge.for_shape(n, options))
        except (ArithmeticError, np.linalg.LinAlgError) as error:
            if isinstance(error, Unanswered) and together:  # no better than what there is
                return None
            _check_finite(systems, call)  # of a definite A one triangle may be all that has been read
            kind = np.linalg.LinAlgError if isinstance(error, np.linalg.LinAlgError) else ArithmeticError
            raise kind(_of_batch(str(error), i, batch)) from None

    run_each(run, solve_alone)
    return run


def _check_finite(systems: Systems, call: Call) -> None:
    """Say where NaN and Inf are, as the user counts."""
    a, b, (given_a, given_b) = systems.a, systems.b, call.tensors
    check_finite(given_b, systems.options.engine.column_max(b.flatten(0, 1)), "b")
    if not bool(two_norms(a, 2).isfinite().all()):  # or squares overflow
        check_finite(given_a, torch.linalg.vector_norm(a, torch.inf, dim=2), "A")


def _of_batch(why: str, place: int, batch: tuple[int, ...]) -> str:
    if not batch:
        return why
    return f"A[{', '.join(map(str, np.unravel_index(place, batch)))}] of the batch: {why}"


def why(result: SolveResult, options: SystemsOptions, run: Run[SystemsSolutions]) -> str:
    if not result.backward_error <= result.tolerance:
        asked = f"asked for {result.tolerance:.1e} ({result.method})"
        lost = rounded_away(run, result.tolerance, options.dtype)
        singular = "" if result.forward_error <= SURE else "; A is ill-conditioned or singular"
        return f"backward error {result.backward_error:.1e}, {asked}{lost}{singular}"
    if not result.forward_error <= SURE:
        return (
            f"A is ill-conditioned or singular, no digit of x is guaranteed: condition number "
            f"{result.condition:.1e}, forward error {result.forward_error:.1e} ({result.method})"
        )
    if not result.forward_error <= options.largest_error:
        return (
            f"forward error {result.forward_error:.1e}, asked for {options.largest_error:.1e}: "
            f"condition number {result.condition:.1e} ({result.method})"
        )
    return (
        f"A is so ill-conditioned that the residual of the rounded x exceeds b: condition number "
        f"{result.condition:.1e} ({result.method})"
    )


def collect(report: Report) -> SolveResult:
    """One result for the batch: the worst of its members speaks for all."""
    options = report.options
    if not math.isfinite(report.most("largest", 0.0)):
        raise does_not_fit(options.dtype)
    known = report.common()
    known["tolerance"] = solve_bound(options.target, report.shapes.a.shape[-1])
    known["growth"], known["method"] = report.most("growth", 0.0) or 1.0, report.run.label
    return SolveResult._from_fields(known)
