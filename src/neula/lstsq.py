"""Least squares: check the input, choose, solve, refine, certify."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from neula.accuracy import lstsq_bound, target_format
from neula.algorithms.batched_lstsq import (
    MAX_STEPS,
    Overdetermined,
    Underdetermined,
    cholesky_r,
    gram_schmidt_r,
    householder_r,
    refine_batch,
)
from neula.algorithms.cgls import Stop, cgls
from neula.algorithms.condition import (
    expected_decay,
    extreme_singular_values,
    largest_singular_value,
    multiply_r,
    solve_r,
    solve_rt,
)
from neula.algorithms.craig import refine_minimum_norm
from neula.algorithms.direct import normal_equations, qr_solve
from neula.algorithms.gram import gram_r
from neula.algorithms.lsqr import lsqr
from neula.algorithms.operators import LeastSquaresOperator
from neula.algorithms.rank_revealing import minimum_norm
from neula.algorithms.refinement import (
    INNER_REDUCTION,
    InnerSolver,
    Measures,
    Refined,
    Scale,
    norms_of,
    refine,
)
from neula.algorithms.rgsqrf import rgsqrf
from neula.algorithms.scaling import power_of_two_scales
from neula.algorithms.triangular import BlockTriangular, Triangular
from neula.compilation import eager
from neula.engines import FORMATS, FP16, Engine, Format, format_of, select_engine
from neula.engines.corrected import FP16_COR, arithmetic, corrects
from neula.engines.precision import plain_arithmetic
from neula.errors import unknown_name
from neula.gradients import attach_solution, stacked_problem
from neula.inputs import (
    Taken,
    check_finite,
    check_matrix,
    check_right_hand_side,
    finite_members,
    gradient_wanted,
    refuse_gradient,
    take,
)
from neula.progress import Progress, digits_done, stage
from neula.qr import BATCHED_ELEMENTS, qr
from neula.result import Attempt, LstsqResult, report_missed

ALGORITHMS = ("cgls", "lsqr", "direct", "normal", "householder", "svd")

SMALL = 10_000_000
"""Below ``m n^2`` of this size Householder QR in double precision takes milliseconds: nothing to gain."""

PROBE_ERROR = 1e-5
"""Error in a problem with known solution above which A may lack full rank. A null direction of A loses its
random component, of size ``1/sqrt(n)``; a matrix of full rank is solved to ``u cond(A)``."""

GRAM_COLUMNS = 4096
"""Up to as many columns R comes from the Gram matrix where half precision is fast: half the operations of a
QR, and no panels. With error correction it is as good a preconditioner as a QR in fp16 up to a condition of
2500."""

FP16_GRAM_COLUMNS = 2048
"""From more columns on the Gram matrix is tried in fp16 before: its product saves more than what the two or
three more iterations read (131072 x 4096 on an H200: 33 ms and 40; 524288 x 1024: 25 and 24)."""

FP16_GRAM_CONDITION = 300.0
"""A larger condition number of its R says that the Gram matrix is too coarse in fp16. Its rounding errors are
random and much smaller than ``cond^2 u``, but one with error correction costs no more than a few iterations.
"""

FP16_DECAY = 128.0
"""A diagonal of R that will fall by more, ``1 / (16 u)``, gives a QR in fp16 up half-way. With a geometric
spectrum that is a condition number of 2000, and the forty iterations or so that it would need take as long as
a better R (on an H200)."""

DOUBTFUL_ITERATIONS = 12
"""What an R in fp16 with a condition number above ``1/u`` is given: its small singular values are mostly
rounding errors. A few of them cost a few iterations, many of them more than a better R takes."""

BLIND_STEPS = 3
"""Steps of a batch where nobody looks: one for the solution, one to refine it, and one more for an R in
float32. What needs more of them goes on to a better R."""

CHUNK = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Elements of a batch that are worked on together: 4 MB in double precision, which stay in a cache and hide
the time of calls, and half a GB, which fills a GPU."""


@eager
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
    strict: bool = False,
    progress: Progress | None = None,
) -> LstsqResult:
    """Solve ``min ||A x - b||``: a fast QR in low precision, refined to the accuracy asked for.

    The R of a low-precision QR (on a GPU of a Gram matrix, for up to 4096 columns) preconditions CGLS in
    double precision. An answer is accepted when its
    backward error, computed from the true residual, is small enough and A is known to have full rank. If not,
    a better R is made: single precision, Householder reflections in double precision, and at last the SVD,
    which gives the minimum-norm solution where A lacks full rank.

    Parameters
    ----------
    A : array_like, shape (..., m, n)
        NumPy array, torch tensor or DLPack object, float16 to float64; integers are taken as float64. Not
        modified. Leading dimensions are a batch, which may be empty. With m < n the minimum-norm solution is
        computed.
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
        Format in which R (or the Gram matrix) is computed, or ``"fp16_cor"``, half precision with error
        correction on a GPU; the engine's preference by default.
    damp : float, optional
        Solve ``min ||A x - b||^2 + damp^2 ||x||^2`` (ridge regression, Tikhonov).
    weights : array_like, shape (m,), optional
        Factors of the rows: ``min ||diag(weights) (A x - b)||``, as in :func:`numpy.polyfit`.
    rcond : float, optional
        Singular values of the column-scaled A below ``rcond`` times the largest count as zero. By default
        ``max(m, n)`` times the precision of float64, or the precision of A's dtype if that is larger.
    max_iterations : int, optional
        Refinement iterations of each attempt.
    strict : bool, optional
        Raise an :class:`~neula.result.AccuracyError` where there would be a warning, and refuse NaN and Inf
        in batches, too.
    progress : callable, optional
        Called with the name of the stage and the part of it that is done.

    Returns
    -------
    LstsqResult
        The solution ``x`` with its evidence: ``converged``, ``backward_error``, ``iterations``, ``rank``;
        that of each problem of a batch is in ``accepted``, ``backward_errors`` and ``ranks``.

    Raises
    ------
    ValueError
        For shapes that do not fit, empty matrices, NaN or Inf, and unknown names; if b or the weights require
        a gradient and A is no torch tensor. Problems of a batch with NaN or Inf are no error unless
        ``strict``: their solutions are NaN, and are not accepted.
    TypeError
        For complex or sparse input.
    ArithmeticError
        If a named algorithm breaks down without an answer, or the answer overflows the dtype.
    AccuracyError
        If the accuracy was not reached and ``strict`` is set.

    Warns
    -----
    AccuracyWarning
        If the accuracy was not reached; the result says how far it got.

    See Also
    --------
    scipy.linalg.lstsq, torch.linalg.lstsq : direct solvers, for small problems just as good.

    Notes
    -----
    Where A, b or the weights are torch tensors that require a gradient, x has one, of the first and of higher
    orders. The backward pass factorizes A in double precision, and raises a ValueError where A lacks full
    rank (:func:`neula.gradients.attach_solution`).

    Algorithm 3 of [1]_ with a stopping rule, restarts on the true residual, several right-hand sides and
    column scaling. Damping and weights are applied without forming the stacked matrix but in the buffer that
    the factorization overwrites.

    Small problems of a batch are solved together, each step one launch for all of them, by the corrected
    seminormal equations [2]_ (:mod:`neula.algorithms.batched_lstsq`), unless an algorithm or its format is
    named. Each is measured by itself; those that miss their accuracy, or may lack full rank, go on to a
    better R and then one by one through the chain above. The attempts are those of the batch, then those of
    the worst problem that was solved alone.

    References
    ----------
    .. [1] S. Zhang, E. Baharlouei, P. Wu, "High Accuracy Matrix Computations on Neural Engines: A Study of QR
       Factorization and its Applications", HPDC 2020.
    .. [2] Å. Björck, "Stability analysis of the method of seminormal equations for linear least squares
       problems", Linear Algebra and its Applications 88/89, 1987.

    Examples
    --------
    >>> import numpy as np, neula
    >>> A = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    >>> result = neula.lstsq(A, np.array([1.0, 3.0, 5.0]))
    >>> result.x.round(12), result.converged, result.rank
    (array([1., 2.]), True, 2)
    """
    a, rhs = (take(x, name, differentiable=True) for x, name in ((A, "A"), (b, "b")))
    w = None if weights is None else take(weights, "weights", differentiable=True)
    differentiable = gradient_wanted(a, rhs, w)
    check_matrix(a.tensor, "A")
    is_vector = check_right_hand_side(a.tensor, rhs.tensor)
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
        compute=None if compute is None else _compute_named(compute),
        damp=_check_damp(damp),
        weights=None if w is None else _check_weights(w.tensor, m).to(chosen.device),
        rcond=_default_rcond(a.tensor) if rcond is None else rcond,
        max_iterations=max_iterations,
        progress=progress,
    )

    batch = a.tensor.shape[:-2]
    k = 1 if is_vector else rhs.tensor.shape[-1]
    matrices = a.tensor.reshape(-1, m, n).to(chosen.device)
    columns = rhs.tensor.reshape(len(matrices), m, k).to(chosen.device)
    with plain_arithmetic(chosen.device):
        if batch:
            found = _solve_batch(matrices, columns, options)
        else:
            check_finite(rhs.tensor, chosen.column_max(columns[0]), "b")
            found = _Found(_Members.missing(1, n, k, chosen.device))
            _solve_each(matrices, columns, [0], found, options)
    result = _collect(found, a, dtype, (*batch, n) if is_vector else (*batch, n, k), options)
    if not result.converged:
        if strict:
            check_finite(a.tensor, a.tensor, "A")
            check_finite(rhs.tensor, rhs.tensor, "b")
        error = (
            f"backward error {result.backward_error:.1e}, asked for {result.tolerance:.1e} ({found.method})"
        )
        report_missed(
            f"least squares is not certified to {result.accuracy} accuracy",
            found.attempts[-1].reason if batch else error,
            result,
            (~found.members.accepted).reshape(batch).nonzero().tolist(),
            strict=strict,
        )
    return _differentiable(result, a, rhs, w, options) if differentiable else result


@dataclass(frozen=True)
class _Options:
    engine: Engine
    target: Format
    algorithm: str | None
    compute: str | None
    damp: float
    weights: torch.Tensor | None
    rcond: float
    max_iterations: int
    progress: Progress | None

    @property
    def looks(self) -> bool:
        """Whether to look after each step of a batch if all are done: a GPU would have to be waited for."""
        return self.engine.device.type != "cuda"


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
class _Members:
    """Solutions of a batch with the evidence of each.

    Attributes
    ----------
    x : Tensor, shape (batch, n, k)
    residual_norm : Tensor, shape (batch, k)
    backward_error, optimality, rank, accepted : Tensor, shape (batch,)
        The worst right-hand side counts.
    """

    x: torch.Tensor
    residual_norm: torch.Tensor
    backward_error: torch.Tensor
    optimality: torch.Tensor
    rank: torch.Tensor
    accepted: torch.Tensor

    @classmethod
    def missing(cls, count: int, n: int, k: int, device: torch.device) -> _Members:
        """Solutions that are not known yet, or do not exist."""

        def nan(*shape: int) -> torch.Tensor:
            return torch.full((count, *shape), math.nan, dtype=torch.float64, device=device)

        rank = torch.zeros(count, dtype=torch.int64, device=device)
        return cls(nan(n, k), nan(k), nan(), nan(), rank, rank.bool())

    def put(self, where: torch.Tensor, others: _Members) -> None:
        """Take ``others`` to the places ``where``."""
        for f in fields(self):
            getattr(self, f.name)[where] = getattr(others, f.name)

    @property
    def worst(self) -> int:
        """The one with the largest error: of those that were not accepted, if there are any."""
        accepted = self.accepted
        counts = accepted if bool(accepted.all()) else ~accepted
        errors = self.backward_error.nan_to_num(math.inf, math.inf)
        return int(torch.where(counts, errors, -1.0).argmax())


@dataclass
class _Found:
    """Solutions so far, and how they were found."""

    members: _Members
    attempts: list[Attempt] = field(default_factory=list)
    method: str = ""
    iterations: int = 0
    history: tuple[float, ...] = ()


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

    def preconditioner(self, method: str, compute: str, limit: _Limit | None) -> _Preconditioner:
        """R of the scaled matrix by ``"rgsqrf"`` or from the Gram matrix (``"cholesky"``).

        A GPU plays it back where A is small and nobody wants to hear of its progress. Otherwise it ends early
        with :class:`_GivenUp` where R will be worse than ``limit`` allows.
        """
        options, operator, n = self.options, self.operator, self.scales.numel()
        engine = arithmetic(options.engine, compute)
        report = stage(options.progress, f"factorizing in {compute}")
        size = 8 * math.prod(operator.shape)
        played_back = size <= options.engine.replayed_bytes and options.progress is None
        on_columns = None if options.progress is None else lambda k: report((k / n) ** 2)
        on_half = None if played_back or limit is None else partial(limit.check_decay, n)

        def factorized(
            a: torch.Tensor, scales: torch.Tensor, *weights: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            same = replace(operator, a=a, weights=weights[0] if weights else None)
            if method == "cholesky":
                r = gram_r(same.operand(engine, scales), engine)
            else:
                work = same.fill(engine, scales)
                r = rgsqrf(work, engine, overwrite_a=True, on_columns=on_columns, on_half=on_half)[1]
            triangle = BlockTriangular.of(r, options.engine.inverted)
            return r, triangle.inverses, extreme_singular_values(r, triangle)

        inputs = (operator.a, self.scales, *(() if operator.weights is None else (operator.weights,)))
        if played_back:
            key = ("lstsq", method, repr(engine), operator.damp)
            r, inverses, extremes = options.engine.replay(factorized, inputs, key)
        else:
            r, inverses, extremes = factorized(*inputs)
        report(1.0)
        return _Preconditioner(BlockTriangular(r, inverses), extremes)

    def householder(self) -> _Preconditioner:
        """R by Householder reflections in double precision."""
        report = stage(self.options.progress, "factorizing in fp64")
        r = torch.linalg.qr(self.dense(), mode="r")[1]
        report(1.0)
        # The library's substitution is as stable as can be, and several times slower on a GPU.
        return _Preconditioner(r, extreme_singular_values(r, r), stable=True)

    def dense(self) -> torch.Tensor:
        """The scaled matrix in double precision."""
        return self.operator.dense() * self.scales


@dataclass(frozen=True)
class _Preconditioner:
    """R of the scaled matrix, and what it says about its condition.

    Attributes
    ----------
    triangle : Triangular, shape (n, n)
    extremes : Tensor, shape (2,)
        Estimates of its largest and its smallest singular value.
    stable : bool
        Whether they are those of A (Householder, double precision); those of any other R are only if
        ``A R^-1`` is well conditioned, which a problem with known solution shows.
    """

    triangle: Triangular
    extremes: torch.Tensor
    stable: bool = False


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
        links = _preconditioners(problem)
        for link in links:
            method, compute = link
            last = algorithm is not None or link == links[-1]
            limit = None if last else _LIMITS.get(link)
            label = f"{method} {compute} + {name}"
            try:
                preconditioner = problem.preconditioner(method, compute, limit)
            except _GivenUp as given_up:
                yield _Outcome(label, None, n, str(given_up))
                continue
            yield _preconditioned(problem, label, preconditioner, bound, inner, limit=limit)
            del preconditioner
            if algorithm is not None:
                return
    if algorithm in (None, "householder"):
        yield _preconditioned(problem, f"householder fp64 + {name}", problem.householder(), bound, inner)
    if algorithm in (None, "svd"):
        yield _by_svd(problem)


def _preconditioners(problem: _Problem) -> list[tuple[str, str]]:
    """Where R comes from before Householder reflections, cheapest first: the method and its arithmetic.

    An R in half precision with error correction is as good as one in single precision. It takes the place of
    that, and stands before one in double precision, which takes three times as long (on an H200). A QR in
    fp16 is no better than the Gram matrix with error correction, where that is cheaper.
    """
    options = problem.options
    if options.compute is not None:
        return [("rgsqrf", options.compute)]
    formats = options.engine.preconditioners
    if options.algorithm is not None or not corrects(options.engine):
        return [("rgsqrf", format) for format in formats]
    n = problem.scales.numel()
    links = [("cholesky", "fp16")] if FP16_GRAM_COLUMNS < n <= GRAM_COLUMNS else []
    links.append(("cholesky", FP16_COR) if n <= GRAM_COLUMNS else ("rgsqrf", "fp16"))
    better = [("rgsqrf", format) for format in formats[1:] if format != "fp32"]
    return [*links, ("rgsqrf", FP16_COR), *better]


def _preconditioned(
    problem: _Problem,
    label: str,
    preconditioner: _Preconditioner,
    bound: float,
    inner: InnerSolver,
    *,
    limit: _Limit | None = None,
) -> _Outcome:
    """Refine with R as preconditioner, and find out whether A has full rank.

    An R whose condition number exceeds that of ``limit`` is not tried for longer than that says.
    """
    options, n = problem.options, problem.scales.numel()
    largest, smallest = preconditioner.extremes.tolist()
    if not (math.isfinite(largest) and smallest > 0):
        return _Outcome(label, None, n, "R is singular or not finite")
    if smallest <= options.rcond * largest:
        doubt = f"condition number about {largest / smallest:.1e}: not of full rank to {options.rcond:.1e}"
        return _Outcome(label, None, n, doubt)
    iterations = options.max_iterations
    if limit is not None and largest > limit.condition * smallest:
        iterations = min(iterations, limit.iterations)
    if iterations == 0:
        reason = f"condition number about {largest / smallest:.1e}: too large for an R in this precision"
        return _Outcome(label, None, n, reason)
    r = _unscale(preconditioner.triangle, problem.scales)
    target = bound / 3
    report = stage(options.progress, "refining")
    probed = _Probed() if preconditioner.stable else _probe(problem, r, largest, target, inner, iterations)
    doubt = ""
    if not probed.error <= PROBE_ERROR:
        doubt = f"a known solution comes back with error {probed.error:.1e}: R is poor, or A not of full rank"
    if doubt and options.algorithm is None:
        return _Outcome(label, None, n, doubt)
    scale = Scale(problem.scales, largest, probed.smallest if probed.smallest > 0 else 1.0)
    left = options.max_iterations - probed.iterations
    if problem.wide:
        b_matrix = problem.operator.a
        refined = refine_minimum_norm(
            b_matrix, r, problem.b, scale=scale, tolerance=target, max_iterations=left
        )
    else:
        refined = refine(
            problem.operator,
            r,
            problem.b,
            scale=scale,
            tolerance=target,
            max_iterations=left,
            start=probed.x,
            inner=inner,
            on_restart=lambda error: report(digits_done(error, target)),
        )
    refined.iterations += probed.iterations
    return _Outcome(label, refined, n, doubt)


def _unscale(r: Triangular, scales: torch.Tensor) -> Triangular:
    """R of the matrix as it was given."""
    return r.scaled(scales) if isinstance(r, BlockTriangular) else r / scales


class _GivenUp(Exception):
    """A factorization that was ended early, and why."""


@dataclass(frozen=True)
class _Limit:
    """Iterations of the first solve with an R of a larger condition number than this, and by how much its
    diagonal may fall.
    """

    condition: float
    iterations: int
    decay: float = math.inf

    def check_decay(self, n: int, diagonal: torch.Tensor) -> None:
        """Give an R of n columns up by the diagonal of its first ones."""
        decay = expected_decay(diagonal, n)
        if math.isnan(decay):
            raise _GivenUp("R is not finite")
        if decay > self.decay:
            raise _GivenUp(
                f"the diagonal of R will fall by a factor of about {decay:.1e}: "
                "A is too ill-conditioned for an R in this precision"
            )


_LIMITS = {
    ("cholesky", "fp16"): _Limit(FP16_GRAM_CONDITION, 0),
    ("rgsqrf", "fp16"): _Limit(1 / FP16.u, DOUBTFUL_ITERATIONS, FP16_DECAY),
}


@dataclass(frozen=True)
class _Probed:
    """A problem with known solution, solved together with the problem itself.

    Attributes
    ----------
    error : float
        Of the known solution.
    smallest : float
        Smallest singular value of ``A R^-1`` seen on the way.
    x : Tensor, shape (n, k), or None
        Solutions of the problem, to single precision; None where they are to be found in another way.
    iterations : int
        Those that x took.
    """

    error: float = 0.0
    smallest: float = 1.0
    x: torch.Tensor | None = None
    iterations: int = 0


def _probe(
    problem: _Problem,
    r: Triangular,
    norm_a: float,
    tolerance: float,
    inner: InnerSolver,
    max_iterations: int,
) -> _Probed:
    """Solve a random problem whose solution is known; the error is that in the variables ``R x``.

    It is one more right-hand side in the first solve by CGLS, whose products read A once for all of them.
    """
    generator = torch.Generator("cpu").manual_seed(1)
    n, scales = problem.scales.numel(), problem.scales
    z = torch.randn(n, 1, generator=generator, dtype=torch.float64, device="cpu").to(scales.device)
    known = solve_r(r, z)
    together = inner is cgls and not problem.wide
    if together:  # [A known, b] and its gradient in one pass over A
        b, k = problem.b, problem.b.shape[1]
        rhs, gradient = problem.operator.normal(functional.pad(-known, (0, k)), functional.pad(b, (1, 0)))
    else:
        b = problem.b[:, :0]
        rhs, gradient = problem.operator.normal(known)
    norm = torch.linalg.vector_norm
    size = norm(z, dim=0)
    stop = Stop(
        preconditioned=functional.pad(PROBE_ERROR / 10 * size, (0, b.shape[1])),
        gradient=functional.pad(0.5 * tolerance * norm_a * norm(b, dim=0), (1, 0)),
        scales=scales,
        reduction=INNER_REDUCTION,
    )
    found = cgls(problem.operator, r, rhs, stop=stop, max_iterations=max_iterations, gradient=gradient)
    error = float(norm(multiply_r(r, found.x[:, :1] - known)) / size)
    if not together:
        return _Probed(error, found.smallest)
    return _Probed(error, found.smallest, found.x[:, 1:], found.iterations)


def _unrefined(problem: _Problem, algorithm: str) -> _Outcome:
    """The comparators: the direct solver of the papers and the normal equations, in one format."""
    options, n = problem.options, problem.scales.numel()
    if problem.wide:
        raise ValueError(f"algorithm {algorithm!r} needs at least as many rows as columns: use 'cgls'")
    compute = options.compute or "fp32"
    engine = arithmetic(options.engine, compute)
    work = problem.operator.fill(engine, problem.scales)
    rhs = problem.b.to(engine.storage)
    if algorithm == "direct":
        q, r = rgsqrf(work, engine, overwrite_a=True)
        y = qr_solve(q, r, rhs)
    else:
        y, r = normal_equations(work, rhs, engine)
    label = f"{algorithm} {compute}"
    if not bool(torch.isfinite(y).all()):
        return _Outcome(label, None, n, "the factorization broke down: A is too ill-conditioned for it")
    x, r = y.double() * problem.scales[:, None], r.double()
    residual = problem.b - problem.operator.matmul(x)
    gradient = problem.operator.rmatmul(residual)
    scale = Scale(problem.scales, largest_singular_value(r))
    norms = norms_of(scale, problem.b, x, residual, gradient, solve_rt(r / problem.scales, gradient))
    return _Outcome(label, Refined(x, norms.measures(scale.norm), norms.residual), n)


def _by_svd(problem: _Problem) -> _Outcome:
    """The rank-revealing end of the chain."""
    options = problem.options
    a, scales = problem.operator.dense(), problem.scales
    if problem.wide:
        a = a.T
        scales = power_of_two_scales(options.engine.column_max(a))
    report = stage(options.progress, "SVD in fp64")
    found = minimum_norm(a, problem.b, scales, options.rcond)
    report(1.0)
    residual = problem.b - a @ found.x
    scale = Scale(scales, found.norm)
    projected = found.range_basis.T @ residual
    norms = norms_of(scale, problem.b, found.x, residual, a.T @ residual, projected)
    return _Outcome("svd fp64", Refined(found.x, norms.measures(scale.norm), norms.residual), found.rank)


def _default_rcond(a: torch.Tensor) -> float:
    """Rounding errors of the double-precision factorization, or of the data where those are larger."""
    return max(max(a.shape[-2:]) * 2.0**-52, 2 * format_of(a.dtype).u)


def _compute_named(name: str) -> str:
    if name not in (*FORMATS, FP16_COR):
        raise unknown_name("format", name, (*FORMATS, FP16_COR))
    return name


def _check_damp(damp: float) -> float:
    refuse_gradient(damp, "damp")
    if not (math.isfinite(damp) and damp >= 0):
        raise ValueError(f"damp must be finite and not negative, got {damp}")
    return float(damp)


def _check_weights(w: torch.Tensor, m: int) -> torch.Tensor:
    if w.shape != (m,):
        raise ValueError(f"weights must have shape ({m},), one for each row of A, got {tuple(w.shape)}")
    check_finite(w, w.abs().max().reshape(1), "weights")
    return w.double()


# --- a batch ---


def _solve_batch(a: torch.Tensor, b: torch.Tensor, options: _Options) -> _Found:
    """The chain for a batch: links for all that are left together, then the other chain for each alone."""
    found = _Found(_Members.missing(len(a), a.shape[2], b.shape[2], a.device))
    if len(a) == 0:
        found.attempts.append(Attempt("nothing to do", True, "an empty batch"))
        return found
    left = torch.arange(len(a), device=a.device)
    for label, factor in _batch_chain(options) if _go_together(a, options) else ():
        left = _solve_together(a, b, left, label, factor, found, options)
        if len(left) == 0:
            return found
    finite = finite_members(a[left]) & finite_members(b[left])
    _solve_each(a, b, left[finite].tolist(), found, options)
    if not bool(finite.all()):
        unusable = left[~finite]
        found.members.put(unusable, _Members.missing(len(unusable), a.shape[2], b.shape[2], a.device))
        reason = f"{len(unusable)} of {len(a)} problems hold NaN or Inf"
        found.attempts.append(Attempt("none", False, reason))
    return found


def _solve_each(
    a: torch.Tensor, b: torch.Tensor, places: list[int], found: _Found, options: _Options
) -> None:
    """One problem after the other; the attempts are those of the worst."""
    solutions = [_solve(a[i], b[i], options) for i in places]
    if not solutions:
        return
    parts = _Members(
        x=torch.stack([s.x for s in solutions]),
        residual_norm=torch.stack([s.residual_norm for s in solutions]),
        backward_error=torch.stack([s.measures.backward_error.max() for s in solutions]),
        optimality=torch.stack([s.measures.optimality.max() for s in solutions]),
        rank=torch.tensor([s.rank for s in solutions], device=a.device),
        accepted=torch.tensor([s.attempts[-1].accepted for s in solutions], device=a.device),
    )
    found.members.put(torch.tensor(places, device=a.device), parts)
    worst = solutions[parts.worst]
    found.attempts += worst.attempts
    found.method, found.history = worst.method, tuple(worst.history)
    found.iterations += sum(s.iterations for s in solutions)


# --- a batch, all problems together ---

_Factor = Callable[[torch.Tensor], torch.Tensor]


def _go_together(a: torch.Tensor, options: _Options) -> bool:
    """Whether each step is to be one launch for the whole batch: small matrices, nothing named."""
    named = options.algorithm is not None or options.compute is not None
    elements = _rows(a, options) * a.shape[2]
    return not named and elements <= BATCHED_ELEMENTS.get(options.engine.name, 0)


def _rows(a: torch.Tensor, options: _Options) -> int:
    """Rows of each matrix, damping stacked below it."""
    return a.shape[1] + (a.shape[2] if options.damp else 0)


def _batch_chain(options: _Options) -> list[tuple[str, _Factor]]:
    """Where R comes from, cheapest first.

    On a CPU the Gram matrix in double precision: 100 matrices of 256 x 32 take 2 ms, and 4.4 ms by LAPACK's
    QR. Like an R in float32 it does for condition numbers up to about 1e6.
    """
    if options.engine.name == "cpu":
        return [("cholesky fp64 + seminormal", cholesky_r), ("householder fp64 + seminormal", householder_r)]
    formats = (("fp32", torch.float32), ("fp64", torch.float64))
    return [(f"gram-schmidt {n} + seminormal", partial(gram_schmidt_r, dtype=d)) for n, d in formats]


def _solve_together(
    a: torch.Tensor,
    b: torch.Tensor,
    left: torch.Tensor,
    label: str,
    factor: _Factor,
    found: _Found,
    options: _Options,
) -> torch.Tensor:
    """One link of the chain for the problems ``left``; returns those that were not accepted."""
    report = stage(options.progress, label)
    m, n = _rows(a, options), a.shape[2]
    size = min(len(left), max(1, CHUNK[options.engine.name] // (m * max(n, b.shape[2]))))
    # One buffer for all chunks: on a CPU fresh memory takes longer than all passes over it.
    work = torch.empty(size, m, n, dtype=torch.float64) if options.looks else None
    weights = () if options.weights is None else (options.weights,)
    key = (label, options.damp, options.rcond, options.max_iterations, options.target.name)

    def refined(a: torch.Tensor, b: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        room = a.new_empty(len(a), m, n, dtype=torch.float64) if work is None else work[: len(a)]
        return _refined(a, b, room, factor, replace(options, weights=weights[0] if weights else None))

    steps = torch.zeros((), dtype=torch.int64, device=a.device)
    for start in range(0, len(left), size):
        where = left[start : start + size]
        # Slices of what is whole: indices copy.
        chunk = slice(start, start + size) if len(left) == len(a) else where
        *parts, taken = options.engine.replay(refined, (a[chunk], b[chunk], *weights), key)
        found.members.put(where, _Members(*parts))
        steps = torch.maximum(steps, taken)
        report(min(1.0, (start + size) / len(left)))
    missed = left[~found.members.accepted[left]]
    bound, errors = _bound(a, options), found.members.backward_error
    doubtful = int((errors[missed] <= bound).sum())
    reason = f"{len(missed)} of {len(left)} problems rejected, {doubtful} for doubts about their rank"
    worst = f"the worst: backward error {float(errors[left].max()):.1e} (bound {bound:.1e})"
    found.attempts.append(Attempt(label, len(missed) == 0, f"{reason}; {worst}"))
    found.method = label
    found.iterations += int(steps)
    return missed


def _refined(
    a: torch.Tensor, b: torch.Tensor, work: torch.Tensor, factor: _Factor, options: _Options
) -> tuple[torch.Tensor, ...]:
    """Scale, factorize, refine and measure some problems: the tensors of :class:`_Members`, and the steps."""
    # Powers of two, so that norms of b and x neither overflow nor underflow.
    b = b.mT.double()
    b_scales = power_of_two_scales(b.abs().amax(2))[..., None]
    b = b * b_scales
    if options.weights is not None:
        b = b * options.weights
    if options.damp:
        b = functional.pad(b, (0, a.shape[2]))
    wide = a.shape[1] < a.shape[2] and not options.damp
    _fill(work, a, options)
    # Sums of columns take a fraction of the time of their maxima, and scale as well.
    scales = power_of_two_scales(work.abs_().sum(2 if wide else 1))[:, None]
    _fill(work, a, options)
    scaled = (work.mT if wide else work).mul_(scales)
    system = (Underdetermined if wide else Overdetermined)(scaled, factor(scaled))
    bound = _bound(a, options)
    solved = refine_batch(
        system,
        b * scales if wide else b,
        unknowns=scaled.shape[2],
        tolerance=bound / 3,
        probe_tolerance=PROBE_ERROR,
        max_steps=min(MAX_STEPS if options.looks else BLIND_STEPS, options.max_iterations),
        look=options.looks,
    )
    residual = solved.residual / scales if wide else solved.residual
    backward_error = solved.measures.backward_error.amax(1)
    of_full_rank = (solved.probe_error <= PROBE_ERROR) & (system.condition * options.rcond < 1)
    members = _Members(
        x=((solved.x if wide else solved.x * scales) / b_scales).mT,
        residual_norm=torch.linalg.vector_norm(residual, dim=2) / b_scales[..., 0],
        backward_error=backward_error,
        optimality=solved.measures.optimality.amax(1),
        rank=torch.full_like(backward_error, scaled.shape[2], dtype=torch.int64),
        accepted=(backward_error <= bound) & of_full_rank,
    )
    steps = torch.full((), solved.steps, dtype=torch.int64, device=a.device)
    return *(getattr(members, f.name) for f in fields(members)), steps


def _fill(work: torch.Tensor, a: torch.Tensor, options: _Options) -> None:
    """The matrices with weights and damping, in double precision."""
    top, bottom = work.tensor_split([a.shape[1]], 1)
    if options.weights is None:
        top.copy_(a)
    else:
        torch.mul(a, options.weights[:, None], out=top)
    if options.damp:
        bottom.copy_(options.damp * torch.eye(a.shape[2], dtype=work.dtype, device=work.device))


def _bound(a: torch.Tensor, options: _Options) -> float:
    """What the backward error of a problem, or of each of a batch, may be."""
    return lstsq_bound(options.target, min(a.shape[-2:]))


# --- the result ---


def _collect(
    found: _Found, a: Taken, dtype: torch.dtype, shape: tuple[int, ...], options: _Options
) -> LstsqResult:
    """One result for the batch: the worst of its members speaks for all."""
    members, batch = found.members, a.tensor.shape[:-2]
    # Rounding x to its dtype is a relative change of the columns of A.
    rounding = 0.0 if dtype == torch.float64 else format_of(dtype).u
    errors = members.backward_error + rounding
    error, optimality, rank = 0.0, 0.0, min(a.tensor.shape[-2:])
    if len(errors) > 0:
        worst = members.worst
        error, optimality = float(errors[worst]), float(members.optimality[worst])
        rank = min(members.rank[~errors.isnan()].tolist(), default=0)
    norms = members.residual_norm.flatten().tolist()
    return LstsqResult(
        x=a.give_back(members.x.reshape(shape), dtype),
        converged=bool(members.accepted.all()),
        iterations=found.iterations,
        backward_error=error,
        optimality=optimality,
        tolerance=_bound(a.tensor, options),
        residual_norm=norms[0] if len(norms) == 1 else norms,
        rank=rank,
        history=found.history,
        factorization=found.method,
        attempts=tuple(found.attempts),
        engine=str(options.engine),
        accuracy=options.target.name,
        accepted=a.give_back(members.accepted.reshape(batch), torch.bool),
        backward_errors=a.give_back(errors.reshape(batch), torch.float64),
        ranks=a.give_back(members.rank.reshape(batch), torch.int64),
    )


def _differentiable(
    result: LstsqResult, a: Taken, b: Taken, weights: Taken | None, options: _Options
) -> LstsqResult:
    """The same result, its x attached to the graph of A, b and weights."""
    is_vector = b.graph.ndim < a.graph.ndim
    columns, x = (t.unsqueeze(-1) if is_vector else t for t in (b.graph.to(result.x.device), result.x))
    system = stacked_problem(a.graph, columns, None if weights is None else weights.graph, options.damp)
    factorize = partial(qr, accuracy="fp64", engine=options.engine)
    x = attach_solution(*system, x, ranks=result.ranks, factorize=factorize)
    return replace(result, x=x.squeeze(-1) if is_vector else x)
