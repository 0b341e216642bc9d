"""Least squares: check the input, choose, solve, refine, certify."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from neula.certificates.bounds import lstsq_bound, target_format
from neula.certificates.forward_error import SURE, digits_of
from neula.engines import Arithmetic, Engine, format_of, select_engine
from neula.errors import unknown_name
from neula.kernels.precision import plain_arithmetic
from neula.pipeline.compilation import eager
from neula.pipeline.gradients import attach_solution, stacked_problem
from neula.pipeline.inputs import Taken, check_finite, finite_members, gradient_wanted, refuse_gradient, take
from neula.pipeline.progress import Progress
from neula.pipeline.result import Attempt, LstsqResult, report_missed
from neula.pipeline.shapes import System, broadcast_system
from neula.pipeline.solutions import does_not_fit
from neula.problems.least_squares.chain import solve_alone
from neula.problems.least_squares.minimum_norm import solve_by_svd
from neula.problems.least_squares.problem import Found, Members, Options
from neula.problems.least_squares.scaled import gradient_is_zero, gradient_vanishes, weighted_norms
from neula.problems.least_squares.together import links, rows, solve_together
from neula.problems.orthogonal.qr import qr

ALGORITHMS = ("cgls", "lsqr", "direct", "normal", "householder", "svd")
CERTIFIED = ("backward", "forward")


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
    certify: str = "backward",
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
        modified. Leading dimensions are a batch. Every dimension may be zero. With m < n the minimum-norm
        solution is computed.
    b : array_like, shape (m,) or (..., m, k)
        One vector, the same for every matrix of A, or a matrix of right-hand sides; leading dimensions of A
        and b are broadcast as in NumPy.
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
        Singular values of A with normalized columns below ``rcond`` times the largest count as zero. By
        default ``max(m, n)`` times the precision of float64, or the precision of A's dtype if that is larger.
    max_iterations : int, optional
        Refinement iterations of each attempt.
    certify : {"backward", "forward"}, optional
        What is refined until it is at the level of the accuracy: the backward error, or the forward error of
        x, with residuals in twice the working precision, as long as the condition number times the unit
        roundoff is below one. Small problems get the latter in any case.
    strict : bool, optional
        Raise an :class:`~neula.pipeline.result.AccuracyError` where there would be a warning, and refuse NaN
        and Inf in batches, too.
    progress : callable, optional
        Called with the name of the stage and the part of it that is done.

    Returns
    -------
    LstsqResult
        The solution ``x`` with its evidence: ``converged``, ``backward_error``, ``condition``,
        ``forward_error`` and ``digits``, ``iterations``, ``rank``; that of each problem of a batch is in
        ``accepted``, ``backward_errors``, ``conditions``, ``forward_errors`` and ``ranks``.

    Raises
    ------
    ValueError
        For shapes that do not fit, NaN or Inf, and unknown names; if b or the weights require
        a gradient and A is no torch tensor. Problems of a batch with NaN or Inf are no error unless
        ``strict``: their solutions are NaN, and are not accepted; others are solved, those with the same
        matrix as well.
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
    IllConditionedWarning
        If A is so ill-conditioned that no digit of x is sure. It is an AccuracyWarning, too.

    See Also
    --------
    scipy.linalg.lstsq, torch.linalg.lstsq : direct solvers, for small problems just as good.

    Notes
    -----
    Where A, b or the weights are torch tensors that require a gradient, x has one, of the first and of higher
    orders. The backward pass factorizes A in double precision, and raises a ValueError where A lacks full
    rank (:func:`neula.pipeline.gradients.attach_solution`).

    Algorithm 3 of [1]_ with a stopping rule, restarts on the true residual, several right-hand sides and
    column scaling. Damping and weights are applied without forming the stacked matrix but in the buffer that
    the factorization overwrites.

    Small problems, alone or in a batch, are solved together, each step one launch for all of them, by the
    corrected seminormal equations [2]_ (:mod:`neula.algorithms.krylov.batched_lstsq`) with residuals in twice
    the working precision, unless an algorithm or its format is named. Each is measured by itself; those that
    miss their accuracy, or may lack full rank, go on to a better R and then one by one to the SVD. The
    attempts are those of the batch, then that of the worst problem that was solved alone.

    The forward error bounds ``||D (x - x*)|| / ||D x*||`` with the exact solution x* for A and b as they are
    stored and the norms D of the columns of A; below full rank that of the problem of the numerical rank.
    It is measured by the last correction where residuals are in twice the working precision, and follows
    from the condition number and the backward error elsewhere (:mod:`neula.certificates.forward_error`).

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
    shapes = broadcast_system(a.tensor, rhs.tensor)
    _check_names(algorithm, certify, max_iterations, rcond)
    dtype = torch.promote_types(a.tensor.dtype, rhs.tensor.dtype)
    chosen = select_engine(engine, a.tensor.device)
    options = Options(
        engine=chosen,
        target=target_format(accuracy, dtype),
        dtype=dtype,
        algorithm=algorithm,
        compute=None if compute is None else Arithmetic.named(compute).name,
        damp=_check_damp(damp),
        weights=None if w is None else _check_weights(w.tensor, a.tensor.shape[-2]).to(chosen.device),
        rcond=_default_rcond(a.tensor) if rcond is None else rcond,
        max_iterations=max_iterations,
        forward=certify == "forward",
        progress=progress,
    )
    matrices, columns = shapes.matrices.to(chosen.device), shapes.columns.to(chosen.device)
    with plain_arithmetic(chosen.device):
        spoilt = _spoilt(shapes, columns)
        if spoilt is not None:  # a column that is worked on with others would spoil them
            columns = columns.masked_fill(shapes.for_columns(spoilt)[:, None], 0.0)
        found = _solve(matrices, columns, options, is_batch=bool(shapes.batch))
        found = _with_exact_zeros(matrices, columns, found, options)
    if spoilt is not None:
        _put_nan(found, spoilt, shapes)
    result = _collect(found, a, shapes, options, spoilt)
    if not result.converged:
        if strict:
            check_finite(a.tensor, a.tensor, "A")
            check_finite(rhs.tensor, rhs.tensor, "b")
        report_missed(
            f"least squares is not certified to {result.accuracy} accuracy",
            _why(result, found, is_batch=bool(shapes.batch)),
            result,
            (~_accepted(found, shapes, spoilt)).nonzero().tolist(),
            strict=strict,
            unsure=bool(found.members.unsure.any()),
        )
    return _differentiable(result, a, rhs, w, options, shapes) if differentiable else result


def _spoilt(shapes: System, columns: torch.Tensor) -> torch.Tensor | None:
    """Right-hand sides with NaN or Inf that share a matrix with others, shape (P, copies), if any do."""
    if not shapes.shares:
        return None
    spoilt = ~shapes.finite.to(columns.device)
    return spoilt if bool(spoilt.any()) else None


def _put_nan(found: Found, spoilt: torch.Tensor, shapes: System) -> None:
    """Say that nothing is known of right-hand sides with NaN or Inf."""
    columns = shapes.for_columns(spoilt)
    for known in (found.members.forward_error, found.members.residual_norm):
        known.masked_fill_(columns, math.nan)
    found.members.x.masked_fill_(columns[:, None], math.nan)
    reason = f"{int(spoilt.sum())} of {spoilt.numel()} problems hold NaN or Inf"
    found.attempts.append(Attempt("none", False, reason))


def _accepted(found: Found, shapes: System, spoilt: torch.Tensor | None) -> torch.Tensor:
    """Which problems of the batch are solved, shape (*batch,)."""
    accepted = shapes.of_members(found.members.accepted)
    return accepted if spoilt is None else accepted & ~shapes.of_copies(spoilt)


def _check_names(algorithm: str | None, certify: str, max_iterations: int, rcond: float | None) -> None:
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise unknown_name("algorithm", algorithm, ALGORITHMS)
    if certify not in CERTIFIED:
        raise unknown_name("certify", certify, CERTIFIED)
    if max_iterations < 1:
        raise ValueError(f"max_iterations must be at least 1, got {max_iterations}")
    if rcond is not None and not 0 <= rcond < 1:
        raise ValueError(f"rcond must be at least 0 and below 1, got {rcond}")


def _solve(a: torch.Tensor, b: torch.Tensor, options: Options, *, is_batch: bool) -> Found:
    """Links for all that are left together where problems are small, then each alone."""
    found = Found(Members.missing(len(a), a.shape[2], b.shape[2], a.device))
    if a.numel() == 0:
        return _empty(a, b, found, options, is_batch=is_batch)
    if b.numel() == 0:
        return _without_right_hand_sides(a, b, options, is_batch=is_batch)
    together = _go_together(a, options)
    if not is_batch:
        if together:  # alone, it is looked at there
            check_finite(a[0], options.engine.column_max(a[0]), "A")
        check_finite(b[0].squeeze(-1), options.engine.column_max(b[0]), "b")
    left = torch.arange(len(a), device=a.device)
    for link in links(options) if together else ():
        left = solve_together(a, b, left, link, found, options)
        if len(left) == 0:
            return _without_vanished(a, b, found, options)
    finite = finite_members(a[left]) & finite_members(b[left]) if is_batch else torch.ones_like(left).bool()
    _solve_each(a, b, left[finite], solve_by_svd if together else solve_alone, found, options)
    if not bool(finite.all()):
        unusable = left[~finite]
        found.members.put(unusable, Members.missing(len(unusable), a.shape[2], b.shape[2], a.device))
        reason = f"{len(unusable)} of {len(a)} problems hold NaN or Inf"
        found.attempts.append(Attempt("none", False, reason))
    return _without_vanished(a, b, found, options)


def _without_vanished(a: torch.Tensor, b: torch.Tensor, found: Found, options: Options) -> Found:
    """Solutions of zero are exact where the gradient is zero; elsewhere they have underflowed."""
    members = found.members
    zero = ~members.x.any(1) & (members.forward_error == 0)
    places = zero.any(1).nonzero()[:, 0]
    if len(places):
        vanished = zero[places] & ~gradient_vanishes(a[places], b[places], options.weights)
        members.forward_error[places] = members.forward_error[places].masked_fill(vanished, math.inf)
        members.accepted[places] &= ~vanished.any(1)
    return found


def _with_exact_zeros(a: torch.Tensor, b: torch.Tensor, found: Found, options: Options) -> Found:
    """Where b is orthogonal to the columns of A, x = 0 is exact, and no relative error of another x is small.

    Such right-hand sides look like unsure ones. The others of the same matrix are solved again without them.
    """
    members = found.members
    doubtful = ~(members.forward_error <= SURE) & ~members.accepted[:, None]
    places = doubtful.any(1).nonzero()[:, 0]
    if len(places) == 0:
        return found
    zero = doubtful[places] & gradient_is_zero(a[places], b[places], options.weights)
    places, zero = places[zero.any(1)], zero[zero.any(1)]
    if len(places) == 0:
        return found
    rest = b[places].masked_fill(zero[:, None, :], 0.0)
    again = _solve(a[places], rest, options, is_batch=True)
    norms = torch.where(zero, weighted_norms(b[places], options.weights), again.members.residual_norm)
    members.put(places, replace(again.members, residual_norm=norms))
    found.attempts += again.attempts
    found.iterations += again.iterations
    found.method = again.method
    return found


def _solve_each(
    a: torch.Tensor,
    b: torch.Tensor,
    places: torch.Tensor,
    alone: Callable[[torch.Tensor, torch.Tensor, Members, Options], Found],
    found: Found,
    options: Options,
) -> None:
    """One problem after the other; the attempts are those of the worst."""
    worst: tuple[tuple[bool, float], Found] | None = None
    for place in places.tolist():
        where = places.new_tensor([place])
        alone_at = slice(place, place + 1)  # an index would copy A
        one = alone(a[alone_at], b[alone_at], found.members.at(where), options)
        found.members.put(where, one.members)
        found.iterations += one.iterations
        merit = (not bool(one.members.accepted), float(one.members.forward_error.amax()))
        if worst is None or merit > worst[0]:
            worst = (merit, one)
    if worst is not None:
        found.attempts += worst[1].attempts
        found.method, found.history = worst[1].method, worst[1].history


def _go_together(a: torch.Tensor, options: Options) -> bool:
    """Whether each step is to be one launch for all problems: small matrices, nothing named.

    Forward errors of weighted, damped and wide problems are refined so whatever their size.
    """
    if options.named:
        return False
    m, n = rows(a, options), a.shape[2]
    wide = m < n
    exotic = wide or options.damp or options.weights is not None
    tuning = options.engine.tuning
    few = m * n <= tuning.batched_elements and len(a) > 1
    return few or max(m, n) * min(m, n) ** 2 <= tuning.together or bool(options.forward and exotic)


def _empty(a: torch.Tensor, b: torch.Tensor, found: Found, options: Options, *, is_batch: bool) -> Found:
    """No rows, no columns or no matrices: without columns b is the residual."""
    found.as_empty(a)
    if options.damp:
        found.members.rank.fill_(a.shape[2])
    if b.numel() > 0 and a.shape[2] == 0:
        if not is_batch:
            check_finite(b[0].squeeze(-1), options.engine.column_max(b[0]), "b")
        found.members.residual_norm.copy_(weighted_norms(b, options.weights))
    return found


def _without_right_hand_sides(a: torch.Tensor, b: torch.Tensor, options: Options, *, is_batch: bool) -> Found:
    """Nothing is asked for but what A is like: its rank and condition, as NumPy gives them, too."""
    found = _solve(a, b.new_zeros(*b.shape[:2], 1), options, is_batch=is_batch)
    x, residual_norm, forward_error = (
        y[..., :0] for y in (found.members.x, found.members.residual_norm, found.members.forward_error)
    )
    found.members = replace(found.members, x=x, residual_norm=residual_norm, forward_error=forward_error)
    return found


def _why(result: LstsqResult, found: Found, *, is_batch: bool) -> str:
    accurate = result.backward_error <= result.tolerance
    unsure = bool(found.members.unsure.any())
    if is_batch or (accurate and not unsure):  # the rank is in doubt
        return found.attempts[-1].reason
    if accurate:
        return (
            f"A is ill-conditioned, no digit of x is sure: condition number {result.condition:.1e}, "
            f"forward error {result.forward_error:.1e} ({found.method})"
        )
    return f"backward error {result.backward_error:.1e}, asked for {result.tolerance:.1e} ({found.method})"


def _default_rcond(a: torch.Tensor) -> float:
    """Rounding errors of the double-precision factorization, or of the data where those are larger."""
    return max(max(a.shape[-2:]) * 2.0**-52, 2 * format_of(a.dtype).u)


def _check_damp(damp: float) -> float:
    refuse_gradient(damp, "damp")
    if not (math.isfinite(damp) and damp >= 0):
        raise ValueError(f"damp must be finite and not negative, got {damp}")
    return float(damp)


def _check_weights(w: torch.Tensor, m: int) -> torch.Tensor:
    if w.shape != (m,):
        raise ValueError(f"weights must have shape ({m},), one for each row of A, got {tuple(w.shape)}")
    if m > 0:
        check_finite(w, w.abs().max().reshape(1), "weights")
    return w.double()


def _collect(
    found: Found, a: Taken, shapes: System, options: Options, spoilt: torch.Tensor | None
) -> LstsqResult:
    """One result for the batch: the worst of its members speaks for all."""
    members = found.members
    if bool(members.x.isinf().any()):
        raise does_not_fit(options.dtype)
    error, optimality, rank = 0.0, 0.0, min(a.tensor.shape[-2:])
    condition, forward_error = 1.0, 0.0
    if len(members.rank) > 0:
        worst = members.worst
        error, optimality = float(members.backward_error[worst]), float(members.optimality[worst])
        usable = ~members.backward_error.isnan()
        rank = min(members.rank[usable].tolist(), default=0)
        condition = float(members.condition.amax())
        forward_error = float(members.forward_error.amax()) if members.forward_error.numel() else 0.0
    if spoilt is not None:
        error = optimality = condition = math.nan
    norms = shapes.of_columns(members.residual_norm).flatten().tolist()

    def of_members(x: torch.Tensor, missing: float = math.nan) -> Any:
        known = shapes.of_members(x)
        if spoilt is not None:
            known = known.masked_fill(shapes.of_copies(spoilt), missing)
        return a.give_back(known.contiguous(), x.dtype)

    return LstsqResult(
        x=a.give_back(shapes.solutions(members.x), options.dtype),
        converged=spoilt is None and bool(members.accepted.all()),
        iterations=found.iterations,
        backward_error=error,
        optimality=optimality,
        tolerance=lstsq_bound(options.target, max(1, min(a.tensor.shape[-2:]))),
        residual_norm=norms[0] if len(norms) == 1 else norms,
        rank=rank,
        condition=condition,
        forward_error=forward_error,
        digits=digits_of(forward_error),
        history=found.history,
        factorization=found.method,
        attempts=tuple(found.attempts),
        engine=str(options.engine),
        accuracy=options.target.name,
        accepted=of_members(members.accepted, False),
        backward_errors=of_members(members.backward_error),
        ranks=of_members(members.rank, 0),
        conditions=of_members(members.condition),
        forward_errors=a.give_back(shapes.of_columns(members.forward_error), torch.float64),
    )


def _differentiable(
    result: LstsqResult, a: Taken, b: Taken, weights: Taken | None, options: Options, shapes: System
) -> LstsqResult:
    """The same result, its x attached to the graph of A, b and weights."""
    x, columns = result.x, b.graph.to(result.x.device)
    if shapes.is_vector:
        x, columns = x.unsqueeze(-1), columns.unsqueeze(-1)
    matrices = a.graph.expand(*shapes.batch, *a.graph.shape[-2:])
    columns = columns.expand(*shapes.batch, *columns.shape[-2:])
    if x.numel() == 0 or matrices.numel() == 0:
        return replace(result, x=_zero_of(result.x, a.graph, b.graph))
    system = stacked_problem(matrices, columns, None if weights is None else weights.graph, options.damp)
    factorize = partial(qr, accuracy="fp64", engine=options.engine)
    x = attach_solution(*system, x, ranks=result.ranks, factorize=factorize)
    return replace(result, x=x.squeeze(-1) if shapes.is_vector else x)


def _zero_of(x: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
    """An x that does not depend on the numbers, attached to the graph of what it was made from."""
    return x + sum(0 * operand.sum() for operand in operands)
