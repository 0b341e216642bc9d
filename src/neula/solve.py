"""Linear systems: check the input, choose, factorize, refine, certify."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from neula.accuracy import solve_bound, target_format
from neula.algorithms.butterfly import Butterflied, TwoSided, padded
from neula.algorithms.cholesky import PANEL, CholeskyFactor, NotPositiveDefiniteError, cholesky
from neula.algorithms.equilibrate import Equilibrated, Equilibration, equilibrate, equilibrate_symmetric
from neula.algorithms.factorization import Factorization, SingularMatrixError, library_lu, mixed_lu
from neula.algorithms.iterative_refinement import (
    Correction,
    Refined,
    Scaling,
    classical,
    gmres_refinement,
    refine,
)
from neula.algorithms.refinement import STAGNATION
from neula.algorithms.scaling import power_of_two_scales
from neula.compilation import eager
from neula.engines import FORMATS, FP64, Engine, Format, format_named, format_of, select_engine
from neula.engines.precision import plain_arithmetic
from neula.errors import unknown_name
from neula.gradients import attach_system
from neula.inputs import Taken, check_finite, check_matrix, check_right_hand_side, gradient_wanted, take
from neula.progress import Progress, digits_done, stage
from neula.result import Attempt, SolveResult, report_missed

STRUCTURES = ("gen", "pos")
PIVOTING = ("none", "rbt", "partial")
Pivoting = Literal["none", "rbt", "partial"]

LEADING = 256
"""Order of the leading block in which elimination without pivoting is tried before all of A."""

HARMLESS = 8.0
"""Growth in the leading block up to which A is taken for one that needs no pivoting, such as diagonally
dominant matrices (growth at most 2). Random matrices grow by hundreds there."""

SINGULAR = 0.01
"""A solution so large that the condition number must exceed this multiple of 1/u64 is left to the library's
LU in double precision: A may be singular, which factors of low precision cannot tell."""


SLOW = 0.1
"""A step of classical refinement that leaves more than this part of the error is followed by GMRES."""


@eager
def solve(
    A: Any,
    b: Any,
    *,
    assume_a: str = "gen",
    accuracy: str | None = None,
    engine: str | Engine = "auto",
    pivot: str | None = None,
    compute: str | None = None,
    max_iterations: int = 100,
    strict: bool = False,
    progress: Progress | None = None,
) -> SolveResult:
    """Solve ``A x = b``: a fast LU (or Cholesky) in low precision, refined to the accuracy asked for.

    The factors correct the solution until its backward error, computed from the true residual in double
    precision, is small enough: by themselves (classical refinement) or, where that does not converge, as the
    preconditioner of GMRES. If it is still not small enough, better factors are made: without pivoting where
    the matrix allows it, of the matrix mixed by random butterflies, with partial pivoting, in single
    precision, and at last in double precision; what an engine is slow at is left out.

    Parameters
    ----------
    A : array_like, shape (..., n, n)
        NumPy array, torch tensor or DLPack object, float16 to float64; integers are taken as float64. Not
        modified. Leading dimensions are a batch.
    b : array_like, shape (..., n) or (..., n, k)
        One or several right-hand sides.
    assume_a : {"gen", "pos"}
        ``"pos"`` for a symmetric positive definite A, both of whose triangles must be there: Cholesky
        factorization takes half the time of LU.
    accuracy : {"fp16", "bf16", "tf32", "fp32", "fp64"}, optional
        Accuracy of the result; by default that of the dtype.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine, optional
        What multiplies. ``"auto"`` goes by the device of A.
    pivot : {"none", "rbt", "partial"}, optional
        Exactly this LU, accepted or not: unpivoted, unpivoted after a random butterfly transform, with
        partial pivoting. By default the chain above.
    compute : str, optional
        Format of the products in the first factorizations; the engine's preference by default.
    max_iterations : int, optional
        Solves with the factors in each attempt.
    strict : bool, optional
        Raise an :class:`~neula.result.AccuracyError` where there would be a warning.
    progress : callable, optional
        Called with the name of the stage and the part of it that is done.

    Returns
    -------
    SolveResult
        The solution ``x`` with its evidence: ``converged``, ``backward_error``, ``iterations``, ``growth``;
        that of each system of a batch is in ``accepted`` and ``backward_errors``.

    Raises
    ------
    numpy.linalg.LinAlgError
        If A is exactly singular (the message has the index of the pivot), or not positive definite with
        ``assume_a="pos"``; of a batch the message says which matrix.
    ValueError
        For shapes that do not fit, empty matrices, NaN or Inf, and unknown names; if b requires a gradient
        and A is no torch tensor.
    TypeError
        For complex or sparse input.
    ArithmeticError
        If a named variant breaks down without an answer, or the answer overflows the dtype.
    AccuracyError
        If the accuracy was not reached and ``strict`` is set.

    Warns
    -----
    AccuracyWarning
        If the accuracy was not reached; the result says how far it got.

    See Also
    --------
    lstsq : for matrices that are not square, or singular.
    scipy.linalg.solve, torch.linalg.solve : LU in double precision, for small systems just as good.

    Notes
    -----
    Refinement follows [1]_; rows and columns are scaled by powers of two before A is rounded, as in [2]_;
    butterflies are those of [3]_, of depth 2, with fixed seeds. The backward error is the normwise one in the
    infinity norm, ``||b - A x|| / (||A|| ||x|| + ||b||)``. Where A is badly scaled it is measured in the
    scaled system as well, and the larger one counts: equations in small units count as much as others.

    ``x`` can be differentiated with respect to A and b, see the page on gradients.

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
    a, rhs = (take(x, name, differentiable=True) for x, name in ((A, "A"), (b, "b")))
    differentiable = gradient_wanted(a, rhs)
    check_matrix(a.tensor, "A")
    _check_square(a.tensor)
    is_vector = check_right_hand_side(a.tensor, rhs.tensor)
    if assume_a not in STRUCTURES:
        raise unknown_name("structure assume_a", assume_a, STRUCTURES)
    if pivot is not None and pivot not in PIVOTING:
        raise unknown_name("pivot", pivot, PIVOTING)
    if pivot is not None and assume_a == "pos":
        raise ValueError(f"pivot={pivot!r} is for LU, and assume_a='pos' asks for Cholesky: leave one out")
    if max_iterations < 1:
        raise ValueError(f"max_iterations must be at least 1, got {max_iterations}")
    dtype = torch.promote_types(a.tensor.dtype, rhs.tensor.dtype)
    chosen = select_engine(engine, a.tensor.device)
    options = _Options(
        engine=chosen,
        target=target_format(accuracy, dtype),
        positive=assume_a == "pos",
        pivot=pivot,
        compute=None if compute is None else format_named(compute),
        max_iterations=max_iterations,
        progress=progress,
    )

    batch, n = a.tensor.shape[:-2], a.tensor.shape[-1]
    matrices = a.tensor.reshape(-1, n, n).to(chosen.device)
    k = 1 if is_vector else rhs.tensor.shape[-1]
    columns = rhs.tensor.reshape(len(matrices), n, k).to(chosen.device)
    with plain_arithmetic(chosen.device):
        if len(matrices):
            check_finite(rhs.tensor, chosen.column_max(columns.reshape(-1, k)), "b")
            if batch:
                check_finite(a.tensor, chosen.column_max(matrices.reshape(-1, n)), "A")
        solutions = _solve_each(matrices, columns, batch, options)
    result = _collect(solutions, a, dtype, tuple(rhs.tensor.shape), options)
    if not result.converged:
        report_missed(
            f"the system is not certified to be solved to {result.accuracy} accuracy",
            f"backward error {result.backward_error:.1e}, asked for {result.tolerance:.1e} ({result.method})",
            result,
            [index for index, s in zip(np.ndindex(batch), solutions, strict=True) if not s.accepted],
            strict=strict,
        )
    if not differentiable:
        return result
    again = partial(
        solve,
        assume_a=assume_a,
        engine=chosen,
        pivot=pivot,
        compute=compute,
        max_iterations=max_iterations,
        strict=strict,
    )
    return _differentiable(result, a, rhs, again)


@dataclass(frozen=True)
class _Options:
    engine: Engine
    target: Format
    positive: bool
    pivot: str | None
    compute: Format | None
    max_iterations: int
    progress: Progress | None

    @property
    def formats(self) -> list[Format]:
        """Formats of the factors to try before the library's in double precision, cheapest first."""
        if self.compute is not None:
            return [self.compute]
        formats = [FORMATS[name] for name in self.engine.preconditioners]
        if self.is_named:
            return formats[:1]
        # With the library's LU in double precision at the end, ours is not worth a try.
        return formats if self.positive else [format for format in formats if format is not FP64]

    @property
    def is_named(self) -> bool:
        """Whether there is one variant to compute, and no chain."""
        return self.pivot is not None


@dataclass(frozen=True)
class _Solution:
    x: torch.Tensor
    backward_error: float
    growth: float
    iterations: int
    history: list[float]
    method: str
    attempts: list[Attempt]

    @property
    def accepted(self) -> bool:
        return self.attempts[-1].accepted


@dataclass(frozen=True)
class _Outcome:
    """What one attempt came to; ``doubt`` says why its answer is not to be trusted."""

    label: str
    refined: Refined | None
    growth: float = math.nan
    doubt: str = ""

    @property
    def error(self) -> float:
        return math.inf if self.refined is None else float(self.refined.backward_error.max())


@dataclass(frozen=True)
class _System:
    """A system in double precision.

    Attributes
    ----------
    a : Tensor, shape (n, n)
    b : Tensor, shape (n, k)
        With largest elements near 1.
    scales : Equilibration
    scalings : list of Scaling
        What backward errors are measured in.
    bound : float
        Largest backward error of an answer that is accepted.
    """

    a: torch.Tensor
    b: torch.Tensor
    scales: Equilibration
    scalings: list[Scaling]
    bound: float
    options: _Options

    def fill(self, engine: Engine) -> torch.Tensor:
        """The scaled matrix as the engine reads it."""
        return self.scales.fill(engine.empty(*self.a.shape, dtype=engine.operand_dtype), self.a, engine)


def _solve_each(
    a: torch.Tensor, b: torch.Tensor, batch: tuple[int, ...], options: _Options
) -> list[_Solution]:
    """One system after the other; what is wrong with one of a batch is said with its index."""
    solutions = []
    for index, matrix, columns in zip(np.ndindex(batch), a, b, strict=True):
        try:
            solutions.append(_solve(matrix, columns, options))
        except (np.linalg.LinAlgError, ArithmeticError) as error:
            if not batch:
                raise
            raise type(error)(f"A[{', '.join(map(str, index))}] of the batch: {error}") from None
    return solutions


def _solve(a: torch.Tensor, b: torch.Tensor, options: _Options) -> _Solution:
    """One system through the chain."""
    # Powers of two, so that norms neither overflow nor underflow.
    b_scales = power_of_two_scales(options.engine.column_max(b.double()))
    a, row_norms, a_scale = _measured(a.double())
    system = _prepare(a, row_norms, b.double() * b_scales, options)
    attempts: list[Attempt] = []
    iterations = 0
    best: _Outcome | None = None
    for outcome in _chain(system):
        if outcome.refined is None:
            attempts.append(Attempt(outcome.label, False, outcome.doubt))
            continue
        iterations += outcome.refined.iterations
        accepted = outcome.error <= system.bound and not outcome.doubt
        attempts.append(Attempt(outcome.label, accepted, _reason(outcome, system.bound)))
        if accepted or best is None or outcome.error < best.error:
            best = outcome
        if accepted:
            break
    if best is None or best.refined is None:
        raise ArithmeticError(f"no attempt gave a solution: {attempts[-1].reason}")
    return _Solution(
        x=best.refined.x * a_scale / b_scales,
        backward_error=best.error,
        growth=best.growth,
        iterations=iterations,
        history=best.refined.history,
        method=best.label,
        attempts=attempts,
    )


def _measured(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A with the 1-norms of its rows, times a power of two where these would overflow."""
    row_norms = torch.linalg.vector_norm(a, 1, dim=1)
    # NaN and Inf propagate into the norms: no pass of its own looks for them.
    if bool(torch.isfinite(row_norms).all()):
        return a, row_norms, 1.0
    check_finite(a, torch.linalg.vector_norm(a, math.inf, dim=0), "A")
    scale = 0.5 ** math.ceil(math.log2(2 * len(a)))
    a = a * scale
    return a, torch.linalg.vector_norm(a, 1, dim=1), scale


def _prepare(a: torch.Tensor, row_norms: torch.Tensor, b: torch.Tensor, options: _Options) -> _System:
    """Choose the scales, measure the norms."""
    if options.positive:
        scales = equilibrate_symmetric(_positive_diagonal(a))
    else:
        scales = equilibrate(a, row_norms, options.engine)
    scalings = [Scaling(row_norms.amax())]
    if not scales.trivial:
        scalings.append(Scaling(scales.norm(a), scales.rows, scales.columns))
    return _System(a, b, scales, scalings, solve_bound(options.target, len(a)), options)


def _chain(system: _System) -> Iterator[_Outcome]:
    """Attempts, cheapest first, each computed when it is asked for."""
    options = system.options
    engine = options.engine
    direct = engine.direct_definite if options.positive else engine.direct
    small = len(system.a) < direct and options.pivot is None and options.compute is None
    formats = [] if small else options.formats
    if options.positive:
        for format in dict.fromkeys([*formats, FP64]):
            yield _by_cholesky(system, format)
    else:
        for format in formats:
            if options.pivot in ("none", "rbt") or not (options.is_named or engine.swaps):
                yield from _without_pivoting(system, format)
            if options.pivot == "partial" or _pivots(system, format):
                yield _with_partial_pivoting(system, format)
    if not options.is_named:
        yield _by_library(system)
        # There are matrices whose elements grow exponentially with partial pivoting, and hardly when mixed.
        yield _mixed(system, FP64)


def _pivots(system: _System, format: Format) -> bool:
    """Whether LU with partial pivoting in this format belongs to the chain."""
    options = system.options
    large = len(system.a) >= options.engine.direct_pivoted or options.compute is not None
    # In double precision it is the library's.
    pivoted_lu = options.engine.using(format).pivoted_lu
    return pivoted_lu and large and format is not FP64 and not options.is_named


def _without_pivoting(system: _System, format: Format) -> Iterator[_Outcome]:
    """LU without interchanges: of A where its leading block allows it, else of A mixed by butterflies.

    Butterflies make any matrix like a random one, whose elements grow by about ``n^1.5`` without pivoting:
    in half precision that leaves nothing of a matrix of more than a hundred or two columns.
    """
    options = system.options
    engine = options.engine.using(format)
    if options.pivot == "none" or (options.pivot is None and _is_harmless(system, engine)):
        factors = _factorize(system, system.fill(engine), engine, "none")
        yield _refined(system, f"lu {format.name}", factors, format)
    elif options.pivot == "rbt" or len(system.a) ** 1.5 * format.u <= 1:
        yield _mixed(system, format)


def _mixed(system: _System, format: Format) -> _Outcome:
    """LU without interchanges of A mixed by butterflies."""
    engine, n = system.options.engine.using(format), len(system.a)
    transform = TwoSided.random(n, system.a.device)
    # Butterflies add and subtract: in the wider precision, before anything is rounded.
    work = engine.empty(padded(n), padded(n))
    system.scales.fill(work[:n, :n], system.a, engine)
    factors = Butterflied(_factorize(system, transform.apply_(work), engine, "none"), transform)
    return _refined(system, f"rbt + lu {format.name}", factors, format)


def _with_partial_pivoting(system: _System, format: Format) -> _Outcome:
    engine = system.options.engine.using(format)
    factors = _factorize(system, system.fill(engine), engine, "partial")
    return _refined(system, f"lu {format.name} with pivoting", factors, format)


def _by_library(system: _System) -> _Outcome:
    """LU with partial pivoting in double precision: the last resort."""
    report = stage(system.options.progress, "factorizing in fp64")
    scales = system.scales
    a = system.a if scales.trivial else system.fill(system.options.engine.using(FP64))
    try:
        lu = library_lu(a, system.options.engine)
    except SingularMatrixError as error:
        raise np.linalg.LinAlgError(
            f"A is singular: {error} (counted from 0); neula.lstsq gives the solution of minimum norm"
        ) from None
    report(1.0)
    factors = lu if scales.trivial else Equilibrated(lu, scales)
    return _refine(system, "lu fp64 with pivoting", factors)


def _by_cholesky(system: _System, format: Format) -> _Outcome:
    engine, label = system.options.engine.using(format), f"cholesky {format.name}"
    report = stage(system.options.progress, f"factorizing in {format.name}")
    try:
        # In double precision there are no products to gain from: one panel is what the library does.
        panel = len(system.a) if format is FP64 else PANEL
        factors: CholeskyFactor = cholesky(system.fill(engine), engine, panel=panel)
    except NotPositiveDefiniteError as error:
        if format is FP64:
            raise np.linalg.LinAlgError(
                f"A is not positive definite: {error}; solve it with assume_a='gen'"
            ) from None
        return _Outcome(label, None, doubt=str(error))
    report(1.0)
    return _refined(system, label, factors, format)


def _factorize(system: _System, work: torch.Tensor, engine: Engine, pivot: Pivoting) -> Factorization:
    """LU of a working matrix, which it overwrites."""
    report = stage(system.options.progress, f"factorizing in {engine.format.name}")
    n = len(work)
    return mixed_lu(work, engine, pivoting=pivot == "partial", on_columns=lambda done: report(done / n))


def _is_harmless(system: _System, engine: Engine) -> bool:
    """Whether A seems to be one that needs no pivoting, by its leading block."""
    m = min(len(system.a), LEADING)
    scales = replace(system.scales, rows=system.scales.rows[:m], columns=system.scales.columns[:m])
    leading = scales.fill(engine.empty(m, m), system.a[:m, :m], engine)
    return mixed_lu(leading, engine, pivoting=False).growth <= HARMLESS


def _refined(system: _System, label: str, factors: Factorization, format: Format) -> _Outcome:
    """Refine with factors of the scaled matrix, unless growth says that they are worthless."""
    growth = factors.growth
    if not math.isfinite(growth):
        return _Outcome(label, None, growth, f"a pivot vanishes, or elements overflow {format.name}")
    # Beyond 1/u, factors hold nothing but errors.
    if growth * format.u > 1 and not system.options.is_named:
        return _Outcome(label, None, growth, f"elements grow by {growth:.1e}")
    outcome = _refine(system, label, Equilibrated(factors, system.scales))
    if outcome.refined is None or format is FP64:
        return outcome
    condition = _condition_at_least(system, outcome.refined)
    if condition <= SINGULAR / FP64.u:
        return outcome
    doubt = f"condition number at least {condition:.1e}: A may be singular"
    return _Outcome(outcome.label, outcome.refined, growth, doubt)


def _refine(system: _System, label: str, factors: Factorization) -> _Outcome:
    """Classical refinement, and GMRES with the same factors where that does not do."""
    options = system.options
    # LAPACK's errors grow like the bound; a quarter of it is below them, and above those of the residual.
    target = system.bound / 4
    report = stage(options.progress, "refining")

    def run(correct: Correction, start: Refined | None, stagnation: float) -> Refined:
        return refine(
            system.a,
            system.b,
            correct,
            scalings=system.scalings,
            tolerance=target,
            max_iterations=options.max_iterations,
            stagnation=stagnation,
            start=start,
            on_step=lambda error: report(digits_done(error, target)),
        )

    refined = run(classical(factors), None, SLOW)
    if not bool((refined.backward_error <= system.bound).all()):
        label += " + gmres"
        refined = run(gmres_refinement(system.a, factors, options.engine), refined, STAGNATION)
    if not bool((refined.backward_error < 1).all()):
        return _Outcome(label, None, factors.growth, "refinement does not converge")
    return _Outcome(label, refined, factors.growth)


def _condition_at_least(system: _System, refined: Refined) -> float:
    """``||A|| ||x|| / ||b||``, a lower bound on the condition number, in the best of the scalings."""
    bounds = [scaling.condition_at_least(system.b, refined.x).max() for scaling in system.scalings]
    return float(torch.stack(bounds).min())


def _reason(outcome: _Outcome, bound: float) -> str:
    assert outcome.refined is not None
    parts = [
        f"backward error {outcome.error:.1e} (bound {bound:.1e})",
        f"{outcome.refined.iterations} iterations",
        f"growth {outcome.growth:.1e}",
        outcome.doubt,
    ]
    return ", ".join(filter(None, parts))


def _check_square(a: torch.Tensor) -> None:
    if a.shape[-1] != a.shape[-2]:
        raise ValueError(
            f"A must be square, got {a.shape[-2]} x {a.shape[-1]}: neula.lstsq solves systems that are not"
        )


def _positive_diagonal(a: torch.Tensor) -> torch.Tensor:
    diagonal = a.diagonal()
    bad = (diagonal <= 0).nonzero()[:, 0]
    if len(bad):
        i = int(bad[0])
        raise np.linalg.LinAlgError(
            f"A is not positive definite: A[{i}, {i}] is {float(diagonal[i])}; solve it with assume_a='gen'"
        )
    return diagonal


def _collect(
    solutions: list[_Solution], a: Taken, dtype: torch.dtype, shape: tuple[int, ...], options: _Options
) -> SolveResult:
    """One result for the batch: the worst of its members speaks for all."""
    batch, n = a.tensor.shape[:-2], a.tensor.shape[-1]
    # Rounding x to its dtype is a relative change of the columns of A.
    rounding = 0.0 if dtype == torch.float64 else format_of(dtype).u
    errors = torch.tensor([s.backward_error + rounding for s in solutions], dtype=torch.float64)
    accepted = torch.tensor([s.accepted for s in solutions], dtype=torch.bool)
    nothing = _Solution(a.tensor.new_empty(0, dtype=torch.float64), 0.0, math.nan, 0, [], "", [])
    worst = max(solutions, key=lambda s: (not s.accepted, s.backward_error), default=nothing)
    x = torch.cat([s.x.flatten() for s in solutions or [nothing]]).reshape(shape)
    if not bool(torch.isfinite(x).all()):
        raise OverflowError("the solution does not fit float64: scale b down")
    return SolveResult(
        x=a.give_back(x, dtype),
        converged=bool(accepted.all()),
        iterations=sum(s.iterations for s in solutions),
        backward_error=worst.backward_error + rounding,
        tolerance=solve_bound(options.target, n),
        growth=worst.growth,
        history=tuple(worst.history),
        method=worst.method,
        attempts=tuple(worst.attempts),
        engine=str(options.engine),
        accuracy=options.target.name,
        accepted=a.give_back(accepted.reshape(batch), torch.bool),
        backward_errors=a.give_back(errors.reshape(batch), torch.float64),
    )


def _differentiable(
    result: SolveResult, a: Taken, b: Taken, again: Callable[..., SolveResult]
) -> SolveResult:
    """The same result, its x attached to the graph of A and b."""
    is_vector = b.graph.ndim < a.graph.ndim
    columns, x = (t.unsqueeze(-1) if is_vector else t for t in (b.graph.to(result.x.device), result.x))
    x = attach_system(a.graph, columns, x, lambda a, b: again(a, b).x)
    return replace(result, x=x.squeeze(-1) if is_vector else x)
