"""Ridge regression with many dampings from one factorization."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack, overload

import torch

from neula.certificates.bounds import Accuracy, lstsq_bound, lstsq_bound_of
from neula.certificates.forward_error import SURE, rounded_error
from neula.certificates.verdict import Evidence, Limits
from neula.engines import FP64, Engine
from neula.engines.formats import double_of, in_double
from neula.kernels.magnitudes import squares
from neula.kernels.shift import shift
from neula.pipeline.call import Call
from neula.pipeline.inputs import check_finite, take
from neula.pipeline.names import keeps_names
from neula.pipeline.operators import eager
from neula.pipeline.progress import Progress, stage
from neula.pipeline.result import RidgePath
from neula.pipeline.shapes import BatchedProblem, broadcast_system
from neula.problems.least_squares.problem import LeastSquaresOptions
from neula.problems.least_squares.ridge_solutions import (
    BoundedEstimate,
    Estimates,
    Path,
    ScaledRidgeProblem,
    norm,
)
from neula.problems.signatures import ArrayLike, Kind, RidgeKeywords

ANSWERS = "x", "residual_norms", "gcv", "leave_one_out"
"""Numbers that must each have a guaranteed digit."""


@overload
def ridge_path(A: Kind, b: Any, damps: Any, **keywords: Unpack[RidgeKeywords]) -> RidgePath[Kind]: ...
@overload
def ridge_path(A: Any, b: Any, damps: Any, **keywords: Unpack[RidgeKeywords]) -> RidgePath[Any]: ...
@eager
@keeps_names
def ridge_path(
    A: ArrayLike,
    b: ArrayLike,
    damps: ArrayLike,
    *,
    leverage: ArrayLike = 0.0,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | None = None,
) -> RidgePath:
    """Solve ``min ||A x - b||^2 + damp^2 ||x||^2`` for hundreds of dampings, with their cross-validation
    errors.

    Returns all solutions, and error bounds on them and on their cross-validation errors. A is factorized
    once.

    Parameters
    ----------
    A : array_like, shape (m, n)
        NumPy array, torch tensor or DLPack object, float16 to float64, complex64 or complex128; integers
        are taken as float64. Not modified. m < n is no error.
    b : array_like, shape (m,) or (m, k)
    damps : array_like, shape (p,)
        Not negative, in any order; 0 is plain least squares of minimum norm. scikit-learn's ``alpha`` is
        ``damp**2``.
    leverage : float or array_like, shape (m,), optional
        Leverages of directions removed from A and b before, which count in cross-validation: ``1 / m`` if
        means were subtracted.
    accuracy : {"fp16", "bf16", "tf32", "fp32", "fp64"}, dtype or float, optional
        Accuracy for which solutions are certified; by default that of the dtype. It does not change the
        arithmetic, which is double precision.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine, optional
        The engine that multiplies matrices. ``"auto"`` chooses it by the device of A.
    strict : bool, optional
        Raise an :class:`~neula.pipeline.result.AccuracyError` instead of a warning.
    progress : callable or bool, optional
        Called with the name of the stage and the completed fraction; True shows a progress bar.

    Returns
    -------
    RidgePath
        ``x`` for each damping, with ``effective_degrees_of_freedom``, ``gcv`` (generalized cross-validation),
        ``leave_one_out``, ``residual_norms`` and ``solution_norms``; ``best()`` says which damping predicts
        best. ``forward_errors``, ``residual_norm_errors``, ``gcv_errors`` and ``leave_one_out_errors`` bound
        the errors of these numbers.

    Raises
    ------
    ValueError
        For shapes that do not fit, batches, negative dampings, NaN or Inf, and input that requires a
        gradient.
    TypeError
        For sparse input.
    AccuracyError
        If the accuracy was not reached and ``strict`` is set.

    Warns
    -----
    AccuracyWarning
        If the accuracy was not reached for one of the dampings; see ``accepted``.
    IllConditionedWarning
        If no digit of a solution, or of its ``residual_norms``, ``gcv`` or ``leave_one_out``, is guaranteed;
        the last two are NaN then. A subclass of AccuracyWarning.

    See Also
    --------
    lstsq : for one damping, with its statistics.

    Notes
    -----
    With ``A = Q R`` and ``R = U S V^H`` the solution is ``V (S^2 + damp^2)^-1 S U^H Q^H b``, a few products
    with vectors for each damping; solutions and errors with few correct digits are refined. If a row is left
    out, its residual changes from r to ``r / (1 - h)``, where h is its leverage [1]_, so that no fit is
    repeated. Both are computed from ``damp^2 / (S^2 + damp^2)`` without differences: in a fit that
    interpolates b they vanish with the damping, but their quotient does not. Without damping ``gcv`` and
    ``leave_one_out`` are limits, the latter that of minimum-norm fits; a row with leverage 1 is left out
    exactly.

    References
    ----------
    .. [1] G. H. Golub, M. Heath, G. Wahba, "Generalized cross-validation as a method for choosing a good
       ridge parameter", Technometrics 21, 1979.

    Examples
    --------
    >>> import numpy as np, neula
    >>> t = np.linspace(0, 1, 40)
    >>> A = np.vander(t, 12)
    >>> path = neula.ridge_path(A, np.sin(6 * t) + 0.1 * np.cos(99 * t), np.logspace(-6, 1, 50))
    >>> path.x.shape, path.converged, bool(1e-6 < path.damps[path.best()] < 10)
    ((50, 12), True, True)
    """
    call = Call.begin({"A": A, "b": b}, engine=engine, accuracy=accuracy, bound=lstsq_bound_of, strict=strict)
    shapes = broadcast_system(*call.tensors)
    if shapes.batch:
        raise ValueError(
            f"A of shape {tuple(call.tensors[0].shape)} and b of shape {tuple(call.tensors[1].shape)} are a "
            "batch, and a path is that of one matrix: call ridge_path for each"
        )
    given = _checked(call.here(take(damps, "damps").tensor).double())
    a, b = (call.here(x)[0].to(double_of(call.dtype)) for x in (shapes.matrices, shapes.columns))
    before = _checked_leverage(call.here(take(leverage, "leverage").tensor).double(), len(a))
    for name, x in (("A", a), ("b", b.squeeze(-1) if shapes.is_vector else b)):
        check_finite(x, x, name)
    report, bound = stage(progress, "factorizing"), lstsq_bound(call.target, max(1, min(a.shape)))
    limits = Limits.for_shape(a.shape, bound, SURE)
    with call.computing():
        nonzero = a.any(0)
        path = Path.factorize(ScaledRidgeProblem.from_arrays(a[:, nonzero], b, given, before), call.engine)
        report(1.0)
        options = LeastSquaresOptions.of_call(call, a.dtype, a.shape, None, max_iterations=60)
        found = Estimates.from_path(path, limits, replace(options, dtype=a.dtype))
    result, why = _result(call, shapes, given, found, nonzero)
    if why:
        what = f"a ridge path is not certified to {result.accuracy} accuracy"
        call.report_missed(what, why, result, [()], no_digits="no digit" in why)
    return result


def _result(
    call: Call, shapes: BatchedProblem, damps: torch.Tensor, found: Estimates, nonzero: torch.Tensor
) -> tuple[RidgePath, str]:
    """The result, with zeros for columns of zeros, and the reason if it is not accepted."""
    path, scaled, solutions = found.path, found.path.scaled, found.x.value
    bound = found.limits.backward_error
    given = in_double(scaled.in_units(solutions).to(call.dtype))
    x = given.new_zeros(len(damps), len(nonzero), solutions.shape[2])
    x[:, nonzero] = given
    rounding = scaled.rounding(solutions, given)
    errors, forward = found.backward + rounding, rounded_error(found.x.error, rounding)
    tested = found.residual, found.gcv, found.leave_one_out
    sure = torch.stack([forward <= SURE, *map(found.known, tested)])
    doubtful = (~sure[1:].all(0)).double()
    accepted = found.limits.accept(Evidence.from_errors(errors, forward, doubtful))
    left_out = squares(shift(torch.where(sure[3][:, None], found.left_out.value, torch.nan), scaled.of_b))
    gcv = torch.where(sure[2], shift(found.gcv.value, scaled.of_b).square(), torch.nan)
    numbers = path.size * shift(found.residual.value, scaled.of_b), gcv, left_out.mean(1)
    claims = [
        _claimed(number, each, power, sum(scaled.a.shape) * FP64.u)
        for number, each, power in zip(numbers, tested, (1, 2, 2), strict=True)
    ]

    def of_columns(y: torch.Tensor) -> Any:
        """Return numbers of each damping and right-hand side, shape (p, k), or of rows or columns of A."""
        return call.give_back((y[..., 0] if shapes.is_vector else y).contiguous(), y.dtype)

    of_x = torch.promote_types(call.first.tensor.dtype, torch.complex64) if x.is_complex() else None
    result: RidgePath[Any] = RidgePath(
        damps=call.give_back(damps, torch.float64),
        x=call.give_back((x[..., 0] if shapes.is_vector else x).contiguous(), of_x),
        residual_norms=of_columns(numbers[0]),
        solution_norms=of_columns(shift(norm(solutions, dim=1), scaled.of_b - scaled.of_a)),
        effective_degrees_of_freedom=call.give_back(path.effective, torch.float64),
        gcv=of_columns(gcv),
        leave_one_out=of_columns(numbers[2]),
        squared_errors=of_columns(left_out),
        backward_errors=of_columns(errors),
        forward_errors=of_columns(forward),
        residual_norm_errors=of_columns(claims[0]),
        gcv_errors=of_columns(claims[1]),
        leave_one_out_errors=of_columns(claims[2]),
        accepted=of_columns(accepted),
        tolerance=bound,
        converged=bool(accepted.all()),
        attempts=path.attempts,
        engine=str(call.engine),
        accuracy=call.target.name,
        seconds=call.seconds,
    )
    if result.converged:
        return result, ""
    no_digits = [name for name, each in zip(ANSWERS, sure.all(2).all(1).tolist(), strict=True) if not each]
    why = f"no digit of {', '.join(no_digits)} is guaranteed" if no_digits else ""
    why = why or f"backward error {float(errors.max()):.1e}, asked for {bound:.1e}"
    return result, f"{int((~accepted).any(1).sum())} of {len(damps)} dampings: {why}"


def _claimed(number: torch.Tensor, found: BoundedEstimate, power: int, rounding: float) -> torch.Tensor:
    """Bound on the relative error of a power; infinite where that is not a normal number."""
    relative = found.relative
    relative = relative if power == 1 else relative * (2 + relative)
    normal = (number.abs() >= torch.finfo(number.dtype).tiny) & number.isfinite()
    return torch.where(normal | (found.value == 0), relative + rounding, torch.inf)


def _checked(damps: torch.Tensor) -> torch.Tensor:
    if damps.ndim != 1:
        raise ValueError(
            f"damps must be a vector, got shape {tuple(damps.shape)}: pass [damp] for a single one"
        )
    check_finite(damps, damps, "damps")
    if bool((damps < 0).any()):
        raise ValueError(f"damps must not be negative, got {float(damps.min())}")
    return damps


def _checked_leverage(leverage: torch.Tensor, m: int) -> torch.Tensor:
    """Leverages of the rows, shape (m, 1), given as an array or as one number."""
    if leverage.shape not in ((), (m,)):
        raise ValueError(f"leverage must be a number or have shape ({m},), got {tuple(leverage.shape)}")
    if not bool(((leverage >= 0) & (leverage <= 1)).all()):
        raise ValueError("leverage must be between 0 and 1")
    return leverage.expand(m)[:, None]
