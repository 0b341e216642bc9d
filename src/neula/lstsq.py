"""Least squares: check the input, choose, solve, refine, certify."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from neula.accuracy import lstsq_bound, target_format
from neula.algorithms.cgls import Stop, cgls
from neula.algorithms.condition import largest_singular_value, smallest_singular_value, solve_rt
from neula.algorithms.craig import refine_minimum_norm
from neula.algorithms.direct import normal_equations, qr_solve
from neula.algorithms.lsqr import lsqr
from neula.algorithms.operators import LeastSquaresOperator
from neula.algorithms.rank_revealing import minimum_norm
from neula.algorithms.refinement import InnerSolver, Measures, Refined, Scale, norms_of, refine
from neula.algorithms.rgsqrf import rgsqrf
from neula.algorithms.scaling import power_of_two_scales
from neula.engines import FORMATS, Engine, Format, format_named, format_of, select_engine
from neula.engines.precision import plain_arithmetic
from neula.errors import unknown_name
from neula.inputs import Taken, check_finite, check_matrix, take
from neula.qr import Progress
from neula.result import AccuracyWarning, Attempt, LstsqResult

ALGORITHMS = ("cgls", "lsqr", "direct", "normal", "householder", "svd")

SMALL = 10_000_000
"""Below ``m n^2`` of this size Householder QR in double precision takes milliseconds: nothing to gain."""

PROBE_ERROR = 1e-5
"""Error in a problem with known solution above which A may lack full rank. A null direction of A loses its
random component, of size ``1/sqrt(n)``; a matrix of full rank is solved to ``u cond(A)``."""


def lstsq(
    A: Any,
    b: Any,
    *,
    accuracy: str | None = None,
    engine: str | Engine = "auto",
    algorithm: str | None = None,
    compute: str | None = None,
    damp: float = 0.0,
    weights: Any = None,
    rcond: float | None = None,
    max_iterations: int = 60,
    progress: Progress | None = None,
) -> LstsqResult:
    """Solve ``min ||A x - b||``: a fast QR in low precision, refined to the accuracy asked for.

    The R of a low-precision QR preconditions CGLS in double precision. An answer is accepted when its
    backward error, computed from the true residual, is small enough and A is known to have full rank. If not,
    a better R is made: single precision, Householder reflections in double precision, and at last the SVD,
    which gives the minimum-norm solution where A lacks full rank.

    Parameters
    ----------
    A : array_like, shape (..., m, n)
        NumPy array, torch tensor or DLPack object, float16 to float64; integers are taken as float64. Not
        modified. Leading dimensions are a batch. With m < n the minimum-norm solution is computed.
    b : array_like, shape (..., m) or (..., m, k)
        One or several right-hand sides.
    accuracy : {"fp16", "bf16", "tf32", "fp32", "fp64"}, optional
        Accuracy of the result; by default that of the dtype.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine, optional
        What multiplies. ``"auto"`` goes by the device of A.
    algorithm : {"cgls", "lsqr", "direct", "normal", "householder", "svd"}, optional
        Exactly this one, accepted or not: QR with CGLS or LSQR, ``R^-1 Q^T b`` without refinement, the normal
        equations, Householder QR in double precision with refinement, the SVD. By default the chain above.
    compute : str, optional
        Format in which R (or the Gram matrix) is computed; the engine's preference by default.
    damp : float, optional
        Solve ``min ||A x - b||^2 + damp^2 ||x||^2`` (ridge regression, Tikhonov).
    weights : array_like, shape (m,), optional
        Factors of the rows: ``min ||diag(weights) (A x - b)||``, as in :func:`numpy.polyfit`.
    rcond : float, optional
        Singular values of the column-scaled A below ``rcond`` times the largest count as zero. By default
        ``max(m, n)`` times the precision of float64, or the precision of A's dtype if that is larger.
    max_iterations : int, optional
        Refinement iterations of each attempt.
    progress : callable, optional
        Called with the name of the stage and the part of it that is done.

    Returns
    -------
    LstsqResult
        The solution ``x`` with its evidence: ``converged``, ``backward_error``, ``iterations``, ``rank``, ...

    Raises
    ------
    ValueError
        For shapes that do not fit, empty input, NaN or Inf, and unknown names.
    TypeError
        For complex or sparse input.
    ArithmeticError
        If a named algorithm breaks down without an answer, or the answer overflows the dtype.

    Warns
    -----
    AccuracyWarning
        If the accuracy was not reached; the result says how far it got.

    See Also
    --------
    scipy.linalg.lstsq, torch.linalg.lstsq : direct solvers, for small problems just as good.

    Notes
    -----
    Algorithm 3 of [1]_ with a stopping rule, restarts on the true residual, several right-hand sides and
    column scaling. Damping and weights are applied without forming the stacked matrix but in the buffer that
    the factorization overwrites.

    References
    ----------
    .. [1] S. Zhang, E. Baharlouei, P. Wu, "High Accuracy Matrix Computations on Neural Engines: A Study of QR
       Factorization and its Applications", HPDC 2020.

    Examples
    --------
    >>> import numpy as np, neula
    >>> A = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    >>> result = neula.lstsq(A, np.array([1.0, 3.0, 5.0]))
    >>> result.x.round(12), result.converged, result.rank
    (array([1., 2.]), True, 2)
    """
    a, rhs = take(A, "A"), take(b, "b")
    check_matrix(a.tensor, "A")
    is_vector = _check_right_hand_side(a.tensor, rhs.tensor)
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise unknown_name("algorithm", algorithm, ALGORITHMS)
    if max_iterations < 1:
        raise ValueError(f"max_iterations must be at least 1, got {max_iterations}")
    if rcond is not None and not 0 <= rcond < 1:
        raise ValueError(f"rcond must be at least 0 and below 1, got {rcond}")
    dtype = torch.promote_types(a.tensor.dtype, rhs.tensor.dtype)
    chosen = select_engine(engine, a.tensor.device)
    m, n = a.tensor.shape[-2:]
    options = _Options(
        engine=chosen,
        target=target_format(accuracy, dtype),
        algorithm=algorithm,
        compute=None if compute is None else format_named(compute),
        damp=_check_damp(damp),
        weights=None if weights is None else _check_weights(weights, m).to(chosen.device),
        rcond=_default_rcond(a.tensor) if rcond is None else rcond,
        max_iterations=max_iterations,
        progress=progress,
    )

    batch = a.tensor.shape[:-2]
    matrices = a.tensor.reshape(-1, m, n).to(chosen.device)
    columns = rhs.tensor.reshape(len(matrices), m, -1).to(chosen.device)
    check_finite(rhs.tensor, chosen.column_max(columns.reshape(-1, columns.shape[-1])), "b")
    if batch:
        check_finite(a.tensor, chosen.column_max(matrices.reshape(-1, n)), "A")
    with plain_arithmetic(chosen.device):
        solutions = [_solve(*pair, options) for pair in zip(matrices, columns, strict=True)]
    return _collect(solutions, a, dtype, (*batch, n) if is_vector else (*batch, n, -1), options)


@dataclass(frozen=True)
class _Options:
    engine: Engine
    target: Format
    algorithm: str | None
    compute: Format | None
    damp: float
    weights: torch.Tensor | None
    rcond: float
    max_iterations: int
    progress: Progress | None

    @property
    def formats(self) -> list[Format]:
        """Formats of R to try before Householder reflections, cheapest first."""
        if self.compute is not None:
            return [self.compute]
        return [FORMATS[name] for name in self.engine.preconditioners]


@dataclass(frozen=True)
class _Solution:
    x: torch.Tensor
    measures: Measures
    residual_norm: torch.Tensor
    rank: int
    iterations: int
    history: list[float]
    method: str
    attempts: list[Attempt]


@dataclass(frozen=True)
class _Outcome:
    """What one attempt came to; ``doubt`` says why its rank is not to be trusted."""

    label: str
    refined: Refined | None
    rank: int
    doubt: str = ""


def _solve(a: torch.Tensor, b: torch.Tensor, options: _Options) -> _Solution:
    """One problem through the chain."""
    # Powers of two, so that norms of b and x neither overflow nor underflow.
    b = b.double()
    b_scales = power_of_two_scales(options.engine.column_max(b))
    problem = _prepare(a.double(), b * b_scales, options)
    bound = lstsq_bound(options.target, min(problem.operator.shape))
    attempts: list[Attempt] = []
    iterations = 0
    best: tuple[tuple[bool, bool, float], _Outcome] | None = None
    for outcome in _chain(problem, bound):
        if outcome.refined is None:
            attempts.append(Attempt(outcome.label, False, outcome.doubt))
            continue
        error = float(outcome.refined.measures.backward_error.max())
        iterations += outcome.refined.iterations
        accepted = error <= bound and not outcome.doubt
        reason = f"backward error {error:.1e} (bound {bound:.1e}), {outcome.refined.iterations} iterations"
        attempts.append(Attempt(outcome.label, accepted, "; ".join(filter(None, (reason, outcome.doubt)))))
        # Of rejected answers, those without doubt about their rank come first, then the smaller error.
        merit = (not accepted, bool(outcome.doubt), error if math.isfinite(error) else math.inf)
        if best is None or merit < best[0]:
            best = (merit, outcome)
        if accepted:
            break
    if best is None:
        raise ArithmeticError(f"no attempt gave a solution: {attempts[-1].reason}")
    outcome = best[1]
    refined = outcome.refined
    assert refined is not None
    return _Solution(
        x=refined.x / b_scales,
        measures=refined.measures,
        residual_norm=refined.residual_norm / b_scales,
        rank=outcome.rank,
        iterations=iterations,
        history=refined.history,
        method=outcome.label,
        attempts=attempts,
    )


@dataclass(frozen=True)
class _Problem:
    """A problem in double precision.

    Attributes
    ----------
    operator : LeastSquaresOperator
        The tall matrix that is factorized: A with weights and damping, or the transpose of a wide A.
    b : Tensor, shape (rows, k)
    scales : Tensor, shape (n,)
        Powers of two for the columns of the operator.
    wide : bool
        Whether the operator is the transpose.
    """

    operator: LeastSquaresOperator
    b: torch.Tensor
    scales: torch.Tensor
    wide: bool
    options: _Options

    def factor(self, format: Format) -> torch.Tensor:
        """R of the scaled matrix, in double precision but accurate to ``format``."""
        engine = self.options.engine.using(format)
        n = self.scales.numel()
        report = _stage(self.options, f"factorizing in {format.name}")
        _, r = rgsqrf(
            self.operator.fill(engine, self.scales),
            engine,
            overwrite_a=True,
            on_columns=lambda columns: report((columns / n) ** 2),
        )
        return r.double()

    def dense(self) -> torch.Tensor:
        """The scaled matrix in double precision."""
        return self.operator.dense() * self.scales


def _prepare(a: torch.Tensor, b: torch.Tensor, options: _Options) -> _Problem:
    """Apply weights and damping, check the numbers, choose the scales."""
    wide = a.shape[0] < a.shape[1] and not options.damp
    weights = options.weights
    if wide:
        weighted = a if weights is None else a * weights[:, None]
        operator = LeastSquaresOperator(weighted.T)
        b = b if weights is None else b * weights[:, None]
    else:
        operator = LeastSquaresOperator(a, weights, options.damp)
        b = operator.right_hand_side(b)
    column_max = operator.column_max(options.engine)
    check_finite(a, column_max, "A")
    check_finite(b, options.engine.column_max(b), "b")
    return _Problem(operator, b, power_of_two_scales(column_max), wide, options)


def _chain(problem: _Problem, bound: float) -> Iterator[_Outcome]:
    """Attempts, cheapest first, each computed when it is asked for."""
    options = problem.options
    algorithm = options.algorithm
    if algorithm in ("direct", "normal"):
        yield _unrefined(problem, algorithm)
        return
    m, n = problem.operator.shape
    inner: InnerSolver = lsqr if algorithm == "lsqr" else cgls
    name = "craig" if problem.wide else "lsqr" if inner is lsqr else "cgls"
    if algorithm in ("cgls", "lsqr") or (algorithm is None and m * n * n > SMALL):
        for format in options.formats:
            r = problem.factor(format)
            yield _preconditioned(problem, f"rgsqrf {format.name} + {name}", r, bound, inner)
            del r
            if algorithm is not None:
                return
    if algorithm in (None, "householder"):
        report = _stage(options, "factorizing in fp64")
        r = torch.linalg.qr(problem.dense(), mode="r")[1]
        report(1.0)
        yield _preconditioned(problem, f"householder fp64 + {name}", r, bound, inner, stable=True)
    if algorithm in (None, "svd"):
        yield _by_svd(problem)


def _preconditioned(
    problem: _Problem,
    label: str,
    r_scaled: torch.Tensor,
    bound: float,
    inner: InnerSolver,
    *,
    stable: bool = False,
) -> _Outcome:
    """Refine with R as preconditioner, and find out whether A has full rank.

    The singular values of a ``stable`` R (Householder, double precision) are those of A; any other R says so
    only if ``A R^-1`` is well conditioned, which a problem with known solution shows.
    """
    options, n = problem.options, problem.scales.numel()
    largest = largest_singular_value(r_scaled)
    smallest = smallest_singular_value(r_scaled)
    if not (math.isfinite(largest) and smallest > 0):
        return _Outcome(label, None, n, "R is singular or not finite")
    if smallest <= options.rcond * largest:
        doubt = f"condition number about {largest / smallest:.1e}: not of full rank to {options.rcond:.1e}"
        return _Outcome(label, None, n, doubt)
    r = r_scaled / problem.scales
    probe = _Probe(0.0, 1.0) if stable else _probe(problem.operator, r, options.max_iterations)
    doubt = ""
    if not probe.error <= PROBE_ERROR:
        doubt = f"a known solution comes back with error {probe.error:.1e}: R is poor, or A not of full rank"
    if doubt and options.algorithm is None:
        return _Outcome(label, None, n, doubt)
    scale = Scale(problem.scales, largest, probe.smallest if probe.smallest > 0 else 1.0)
    target = bound / 3
    report = _stage(options, "refining")
    if problem.wide:
        b_matrix = problem.operator.a
        refined = refine_minimum_norm(
            b_matrix, r, problem.b, scale=scale, tolerance=target, max_iterations=options.max_iterations
        )
    else:
        refined = refine(
            problem.operator,
            r,
            problem.b,
            scale=scale,
            tolerance=target,
            max_iterations=options.max_iterations,
            inner=inner,
            on_restart=lambda error: report(_log_progress(error, target)),
        )
    return _Outcome(label, refined, n, doubt)


@dataclass(frozen=True)
class _Probe:
    """Error of a problem with known solution; smallest singular value of ``A R^-1`` seen on the way."""

    error: float
    smallest: float


def _probe(operator: LeastSquaresOperator, r: torch.Tensor, max_iterations: int) -> _Probe:
    """Solve a random problem whose solution is known; the error is that in the variables ``R x``."""
    generator = torch.Generator("cpu").manual_seed(1)
    known = torch.randn(r.shape[0], 1, generator=generator, dtype=r.dtype, device="cpu").to(r.device)
    b = operator.matmul(torch.linalg.solve_triangular(r, known, upper=True))
    norm = torch.linalg.vector_norm
    stop = Stop(PROBE_ERROR / 10 * norm(known, dim=0))
    found = cgls(operator, r, b, stop=stop, max_iterations=max_iterations)
    return _Probe(float(norm(r @ found.x - known) / norm(known)), found.smallest)


def _unrefined(problem: _Problem, algorithm: str) -> _Outcome:
    """The comparators: the direct solver of the papers and the normal equations, in one format."""
    options, n = problem.options, problem.scales.numel()
    if problem.wide:
        raise ValueError(f"algorithm {algorithm!r} needs at least as many rows as columns: use 'cgls'")
    engine = options.engine.using(options.compute or FORMATS["fp32"])
    work = problem.operator.fill(engine, problem.scales)
    rhs = problem.b.to(engine.storage)
    if algorithm == "direct":
        q, r = rgsqrf(work, engine, overwrite_a=True)
        y = qr_solve(q, r, rhs)
    else:
        y, r = normal_equations(work, rhs, engine)
    label = f"{algorithm} {engine.format.name}"
    if not bool(torch.isfinite(y).all()):
        return _Outcome(label, None, n, "the factorization broke down: A is too ill-conditioned for it")
    x, r = y.double() * problem.scales[:, None], r.double()
    residual = problem.b - problem.operator.matmul(x)
    gradient = problem.operator.rmatmul(residual)
    scale = Scale(problem.scales, largest_singular_value(r))
    norms = norms_of(scale, problem.b, x, residual, gradient, solve_rt(r / problem.scales, gradient))
    return _Outcome(label, Refined(x, norms.measures(scale), norms.residual), n)


def _by_svd(problem: _Problem) -> _Outcome:
    """The rank-revealing end of the chain."""
    options = problem.options
    a, scales = problem.operator.dense(), problem.scales
    if problem.wide:
        a = a.T
        scales = power_of_two_scales(options.engine.column_max(a))
    report = _stage(options, "SVD in fp64")
    found = minimum_norm(a, problem.b, scales, options.rcond)
    report(1.0)
    residual = problem.b - a @ found.x
    scale = Scale(scales, found.norm)
    projected = found.range_basis.T @ residual
    norms = norms_of(scale, problem.b, found.x, residual, a.T @ residual, projected)
    return _Outcome("svd fp64", Refined(found.x, norms.measures(scale), norms.residual), found.rank)


def _stage(options: _Options, name: str) -> Callable[[float], None]:
    progress = options.progress
    if progress is None:
        return lambda fraction: None
    progress(name, 0.0)
    return lambda fraction: progress(name, fraction)


def _log_progress(error: float, target: float) -> float:
    """Part of the way from 1 down to the target, in digits."""
    if not error > 0 or not math.isfinite(error):
        return 1.0
    return min(1.0, max(0.0, math.log(error) / math.log(target)))


def _default_rcond(a: torch.Tensor) -> float:
    """Rounding errors of the double-precision factorization, or of the data where those are larger."""
    return max(max(a.shape[-2:]) * 2.0**-52, 2 * format_of(a.dtype).u)


def _check_right_hand_side(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether b is one vector a matrix; a ValueError if it does not fit."""
    if b.shape == a.shape[:-1]:
        return True
    if b.ndim == a.ndim and b.shape[:-1] == a.shape[:-1] and b.shape[-1] > 0:
        return False
    m = a.shape[-2]
    batch = tuple(a.shape[:-2])
    raise ValueError(
        f"shapes of A and b do not fit: A is {tuple(a.shape)}, b is {tuple(b.shape)}; "
        f"b must have shape {(*batch, m)} or {(*batch, m, 'k')}".replace("'", "")
    )


def _check_damp(damp: float) -> float:
    if not (math.isfinite(damp) and damp >= 0):
        raise ValueError(f"damp must be finite and not negative, got {damp}")
    return float(damp)


def _check_weights(weights: Any, m: int) -> torch.Tensor:
    w = take(weights, "weights").tensor
    if w.shape != (m,):
        raise ValueError(f"weights must have shape ({m},), one for each row of A, got {tuple(w.shape)}")
    check_finite(w, w.abs().max().reshape(1), "weights")
    return w.double()


def _collect(
    solutions: list[_Solution], a: Taken, dtype: torch.dtype, shape: tuple[int, ...], options: _Options
) -> LstsqResult:
    """One result for the batch: the worst of its members speaks for all."""
    n = min(a.tensor.shape[-2:])
    bound = lstsq_bound(options.target, n)
    # Rounding x to its dtype is a relative change of the columns of A.
    rounding = 0.0 if dtype == torch.float64 else format_of(dtype).u
    worst = max(
        solutions, key=lambda s: (not s.attempts[-1].accepted, float(s.measures.backward_error.max()))
    )
    x = torch.stack([s.x for s in solutions]).reshape(shape)
    converged = all(s.attempts[-1].accepted for s in solutions)
    error = float(worst.measures.backward_error.max()) + rounding
    if not converged:
        warnings.warn(
            f"least squares is not certified to {options.target.name} accuracy: backward error {error:.1e}, "
            f"asked for {bound:.1e} ({worst.method})",
            AccuracyWarning,
            stacklevel=3,
        )
    norms = torch.cat([s.residual_norm for s in solutions]).tolist()
    ranks = [s.rank for s in solutions]
    return LstsqResult(
        x=a.give_back(x, dtype),
        converged=converged,
        iterations=sum(s.iterations for s in solutions),
        backward_error=error,
        optimality=float(worst.measures.optimality.max()),
        tolerance=bound,
        residual_norm=norms[0] if len(norms) == 1 else norms,
        rank=min(ranks),
        history=tuple(worst.history),
        factorization=worst.method,
        attempts=tuple(worst.attempts),
        engine=str(options.engine),
        accuracy=options.target.name,
    )


def _like(a: Taken, x: torch.Tensor) -> Any:
    """X in the library and on the device of A, in its own dtype."""
    return a.give_back(x)
