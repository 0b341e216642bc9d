"""Powers of Hermitian positive semidefinite matrices, by their eigenvalues."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, Unpack, overload

import numpy as np
import torch

from neula.algorithms.scaling import binary_exponents
from neula.certificates.bounds import Accuracy, measurement_error
from neula.certificates.forward_error import SURE
from neula.certificates.low_rank import SVDCertificate
from neula.certificates.spectra import changed
from neula.engines import FP64, Engine
from neula.engines.formats import in_double
from neula.errors import number
from neula.kernels.cholesky.symmetric import hermitian_from_lower
from neula.kernels.magnitudes import SQUARABLE, largest_magnitude, two_norms
from neula.kernels.precision import ONE_THREAD, exact_matmul, plain_arithmetic
from neula.kernels.shift import LIMIT, shift
from neula.pipeline.call import Call, restored
from neula.pipeline.gradients import attach_power
from neula.pipeline.inputs import over_lists
from neula.pipeline.operators import eager
from neula.pipeline.plans import Given, Plans, accepted_result, numbers_later
from neula.pipeline.progress import Progress
from neula.pipeline.result import PowerResult
from neula.problems.signatures import ArrayLike, Kind, PowerKeywords
from neula.problems.spectra.decompose import (
    Decomposed,
    SpectralPlan,
    decompose,
    worst,
)
from neula.problems.spectra.eigh import begin
from neula.problems.spectra.problem import SpectralOptions


@overload
def fractional_matrix_power(A: Kind, p: float, **keywords: Unpack[PowerKeywords]) -> PowerResult[Kind]: ...
@overload
def fractional_matrix_power(A: Any, p: float, **keywords: Unpack[PowerKeywords]) -> PowerResult[Any]: ...
@over_lists(PowerResult._member)
@partial(
    eager,
    plans=Plans(lambda A, **keywords: _plan(A, **keywords), operands=1, then=("p",)),
)
def fractional_matrix_power(
    A: ArrayLike,
    p: float,
    *,
    upper: bool = False,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | None = None,
) -> PowerResult:
    """The power ``A**p`` of a symmetric or Hermitian positive semidefinite matrix, with a bound on its error.

    Inverse roots precondition gradients (Shampoo) and whiten data.

    Parameters
    ----------
    A : array_like, shape (..., n, n)
        Symmetric or Hermitian positive semidefinite, definite if p is negative, as for :func:`eigh`; the
        lower triangle is read. Of a list of torch matrices, as optimizers hold them, those of one shape are
        computed together, and a list of results comes back.
    p : float
        Any real exponent.
    upper : bool, optional
        Whether the upper triangle is read.
    accuracy, engine, strict, progress : optional
        As for :func:`eigh`.

    Returns
    -------
    PowerResult
        ``X``, with a bound on its relative error and the eigenvalues of A.

    Raises
    ------
    numpy.linalg.LinAlgError
        If an eigenvalue of A is negative by more than the bound on its error, or as computed not positive for
        a negative p. The message names the smallest one.
    ValueError, TypeError, OverflowError, AccuracyError
        As :func:`eigh`.

    Warns
    -----
    AccuracyWarning
        If no attempt met the accuracy.
    IllConditionedWarning
        If no digit of a power is guaranteed: ``error`` is above 0.1.

    See Also
    --------
    sqrtm, inv_sqrt : for the exponents 1/2 and -1/2.
    scipy.linalg.fractional_matrix_power : of any matrix, by the Schur decomposition.

    Notes
    -----
    With the measured backward error ``||dA||_F`` of the eigenvalues and eigenvectors, X is the power of ``A +
    dA`` except for rounding errors. Matrix functions of Hermitian matrices change by at most the largest
    derivative of the scalar function times ``||dA||_F``, and powers between 0 and 1 by at most ``||dA||_2^p``
    ([1]_, theorem X.1.1).

    If no digit of a power is guaranteed in single precision, eigenvalues are computed again in double
    precision.

    A torch tensor has gradients, also where eigenvalues are equal; of any order for the exponents 1/2 and
    -1/2, of first order for others.

    References
    ----------
    .. [1] R. Bhatia, "Matrix Analysis", Springer, 1997.

    Examples
    --------
    >>> import numpy as np, neula
    >>> A = np.array([[5.0, 4.0], [4.0, 5.0]])
    >>> neula.fractional_matrix_power(A, -0.5).X.round(12)
    array([[ 0.66666667, -0.33333333],
           [-0.33333333,  0.66666667]])
    """
    power = number("p", p, "a finite number", math.isfinite)
    call = begin({"A": A}, accuracy=accuracy, engine=engine, strict=strict)
    options = SpectralOptions(call.target, call.engine, symmetric=True, progress=progress)
    with call.computing():
        matrices = call.matrices()
        lower = matrices.mH if upper else matrices
        found = decompose(call, lower, options, upper=upper)
        errors = _errors(found, power)
        if options.work is not FP64 and not bool((errors <= SURE)[found.usable].all()):
            begun = found.run.attempts
            found = decompose(call, lower, replace(options, target=FP64), upper=upper)
            found.run.attempts[:0] = begun
            errors = _errors(found, power)
    return _collect(call, found, lower, errors, power, upper=upper)


@overload
def sqrtm(A: Kind, **keywords: Unpack[PowerKeywords]) -> PowerResult[Kind]: ...
@overload
def sqrtm(A: Any, **keywords: Unpack[PowerKeywords]) -> PowerResult[Any]: ...
def sqrtm(
    A: ArrayLike,
    *,
    upper: bool = False,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | bool | None = None,
) -> PowerResult:
    """Square root of a symmetric or Hermitian positive semidefinite matrix: :func:`fractional_matrix_power`.

    Parameters
    ----------
    A : array_like, shape (..., n, n)
    upper, accuracy, engine, strict, progress : optional
        As for :func:`fractional_matrix_power`.

    Returns
    -------
    PowerResult
        Its residual is ``||X X - A||_F``, relative to ``||X||_F^2``.

    Raises
    ------
    numpy.linalg.LinAlgError, ValueError, TypeError, OverflowError, AccuracyError
        As :func:`fractional_matrix_power`.

    Examples
    --------
    >>> import numpy as np, neula
    >>> neula.sqrtm(np.array([[5.0, 4.0], [4.0, 5.0]])).X.round(12)
    array([[2., 1.],
           [1., 2.]])
    """
    asked: Any = {"upper": upper, "accuracy": accuracy, "engine": engine}
    return fractional_matrix_power(A, 0.5, **asked, strict=strict, progress=progress)


@overload
def inv_sqrt(A: Kind, **keywords: Unpack[PowerKeywords]) -> PowerResult[Kind]: ...
@overload
def inv_sqrt(A: Any, **keywords: Unpack[PowerKeywords]) -> PowerResult[Any]: ...
def inv_sqrt(
    A: ArrayLike,
    *,
    upper: bool = False,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | bool | None = None,
) -> PowerResult:
    """Inverse square root of a Hermitian positive definite matrix: :func:`fractional_matrix_power`.

    Parameters
    ----------
    A : array_like, shape (..., n, n)
    upper, accuracy, engine, strict, progress : optional
        As for :func:`fractional_matrix_power`.

    Returns
    -------
    PowerResult
        Its residual is ``||X A X - I||_F``, relative to ``||X||_F^2 ||A||_F``.

    Raises
    ------
    numpy.linalg.LinAlgError, ValueError, TypeError, OverflowError, AccuracyError
        As :func:`fractional_matrix_power`.

    Examples
    --------
    >>> import numpy as np, neula
    >>> neula.inv_sqrt(np.diag([4.0, 25.0])).X
    array([[0.5, 0. ],
           [0. , 0.2]])
    """
    asked: Any = {"upper": upper, "accuracy": accuracy, "engine": engine}
    return fractional_matrix_power(A, -0.5, **asked, strict=strict, progress=progress)


class PowerPlan:
    """A plan for a power of a single small matrix on a CPU."""

    def __init__(self, spectral: SpectralPlan, power: float) -> None:
        self.options, self._spectral, self._power = spectral.options, spectral, power

    @restored
    def __call__(self, given: Given) -> PowerResult[Any] | None:
        spectral, power = self._spectral, self._power
        with plain_arithmetic(self.options.engine.device), np.errstate(all="ignore"):
            found = spectral.decomposed(given.arrays[0])
            if found is None or found.v is None:
                return None
            w, (residual, lost) = in_double(found.s).numpy(), found.numbers
            backward = changed(math.sqrt(w @ w), residual * found.size, lost)
            if w[0] < -backward or (power < 0 and w[0] <= 0):
                return None
            exponent = math.frexp(float(largest_magnitude(found.a, (0, 1))))[1]
            (whole, factor), v = _in_two(power, exponent), in_double(found.v)
            near_one = torch.from_numpy(np.ldexp(np.maximum(w, 0.0), -exponent))
            # As of a batch, to the last bit.
            x = exact_matmul(v[None] * (near_one**power * factor), v.mH[None])[0].numpy()
            x = (x + x.conj().T) / 2 * np.ldexp(1.0, whole)
            kept, a = x.astype(given.arrays[0].dtype, copy=False), in_double(found.a).numpy()
            size, norm = np.linalg.norm(x), np.linalg.norm
            rounding = norm(x - kept) / norm(kept.astype(x.dtype, copy=False))
            error = power_errors(w, lost, backward, power)
            error = float(error * (1 + rounding) + rounding)
            if power == 0.5:
                residual = float(norm(x @ x - a) / size**2)
            elif power == -0.5:
                residual = float(norm(x @ a @ x - np.eye(len(x))) / (size**2 * found.size))
        bound = spectral.bounds.residual
        if not (1 / SQUARABLE < size < SQUARABLE and residual <= bound and error <= SURE):
            return None
        fields = {"X": given.wrap(kept), "power": power, "error": error, "residual": residual}
        fields |= {"residual_bound": bound, "converged": True}
        fields |= {"eigenvalues": given.give(found.s.clamp_min(0.0))}
        fields |= numbers_later(given, {"errors": error, "residuals": residual, "accepted": True})
        reason = partial(SVDCertificate, *found.numbers, 0.0, bound, spectral.bounds.orthogonality)
        return accepted_result(
            PowerResult, given, self.options, spectral.label, lambda: str(reason()), fields
        )


def _plan(A: Any, *, p: float, upper: bool = False, **asked: Any) -> PowerPlan | None:
    call, power = begin({"A": A}, **asked), number("p", p, "a finite number", math.isfinite)
    options = SpectralOptions(call.target, call.engine, symmetric=True)
    plan = SpectralPlan.for_matrix(call.first.tensor, options, upper=upper)
    return PowerPlan(plan, power) if plan is not None and len(A) ** 3 <= ONE_THREAD else None


def _collect(
    call: Call, found: Decomposed, lower: torch.Tensor, errors: torch.Tensor, power: float, *, upper: bool
) -> PowerResult:
    """The result with its gradient and warnings; of ``lower`` the lower triangles are read."""
    given, run = call.first.tensor, found.run
    batch, n = given.shape[:-2], given.shape[-1]
    w, v = found.values, in_double(found.v)
    _refuse_negative(found, power, batch)
    w = w.clamp_min(0.0)
    with call.computing():
        x = _power(in_double(run.found.s), found.exponents, v, power)
        if bool((~x.isfinite().flatten(1).all(1) & found.usable).any()):
            raise OverflowError(f"A**{power:g} does not fit torch.float64: scale A")
        a = hermitian_from_lower(in_double(lower))
        residuals = _residuals(a, x, power, torch.from_numpy(run.numbers[0]).to(x.device))
        errors = _rounded(errors, x, call.dtype)
    bound = found.judge.bounds.residual
    decomposed = bool(run.accepted.all())
    accurate = run.accepted & (residuals <= bound).cpu().numpy()
    run.accepted = accurate & (errors <= SURE).cpu().numpy()
    x, w, v = (y.reshape(*batch, *y.shape[1:]) for y in (x, w, v))
    if call.differentiable:
        graph = call.first.graph
        x = attach_power(graph.mH if upper else graph, x, w, v, power)

    result: PowerResult[Any] = PowerResult(
        X=call.give_back(x, call.dtype),
        power=power,
        error=worst(errors.cpu().numpy()),
        residual=worst(residuals.cpu().numpy()),
        residual_bound=bound,
        eigenvalues=call.give_back(w, call.dtype.to_real()),
        errors=call.of_members(errors),
        residuals=call.of_members(residuals),
        **found.common_fields(call),
    )
    if not result.converged:
        why = run.attempts[-1].reason
        if decomposed:
            why = f"residual {result.residual:.1e}, asked for {bound:.1e} ({run.label})"
        if no_digits := bool(accurate.all()):
            why = f"the bound on its error is {result.error:.1e} of its norm, so no digit is guaranteed"
        call.report_missed(
            f"the power of order {n} is not certified to {result.accuracy} accuracy",
            why,
            result,
            call.missed(run.accepted),
            no_digits=no_digits,
        )
    return result


def _refuse_negative(found: Decomposed, power: float, batch: tuple[int, ...]) -> None:
    """Refuse eigenvalues that have no power.

    Raises numpy.linalg.LinAlgError.
    """
    s, errors = in_double(found.run.found.s), found.backward_errors
    if not s.shape[1]:
        return
    least = s[:, 0]
    refused = (least < -errors if power >= 0 else least <= 0) & found.usable
    if not bool(refused.any()):
        return
    place = int(refused.nonzero()[0])
    where = ", ".join(map(str, np.unravel_index(place, batch))) if batch else ""
    which = f"A[{where}] of the batch" if batch else "A"
    wanted = "positive semidefinite" if power >= 0 else "positive definite"
    given, enough = shift(
        torch.stack([least, 2 * (errors - least)])[:, place], found.exponents[place]
    ).tolist()
    hint = f"; add {enough:.3g} to its diagonal" if enough else ""
    raise np.linalg.LinAlgError(f"{which} is not {wanted}: its smallest eigenvalue is {given:.3g}{hint}")


def _power(s: torch.Tensor, exponents: torch.Tensor, v: torch.Tensor, power: float) -> torch.Tensor:
    """``V diag(w^p) V^H``, Hermitian, of eigenvalues ``w = s 2^exponents``, by powers of s, near 1."""
    s = s.clamp_min(0.0)
    different, place = exponents.unique(return_inverse=True)
    parts = [_in_two(power, exponent) for exponent in different.tolist()]
    whole, factor = (
        torch.tensor([part[i] for part in parts], dtype=dtype, device=s.device)[place]
        for i, dtype in enumerate((torch.int64, torch.float64))
    )
    powers = (s**power if power else torch.ones_like(s)) * factor[:, None]
    x = exact_matmul(v * powers[:, None, :], v.mH)
    return shift((x + x.mH) / 2, whole[:, None, None])


def _in_two(power: float, exponent: int) -> tuple[int, float]:
    """``2^(power exponent)`` as a power of two and a number from 1 to 2."""
    whole, rest = divmod(Fraction(power) * exponent, 1)
    return min(max(whole, -LIMIT), LIMIT), 2.0 ** float(rest)


def _residuals(a: torch.Tensor, x: torch.Tensor, power: float, others: torch.Tensor) -> torch.Tensor:
    """Measured errors of square and inverse square roots, shape (batch,); else those of eigenvectors."""
    if power not in (0.5, -0.5) or not a.numel():
        return others
    of_x, of_a = (binary_exponents(largest_magnitude(y, (1, 2), keepdim=True)) for y in (x, a))
    y = shift(x, -of_x)  # no square overflows
    scale = two_norms(y, 1, 2)
    scale = torch.where(scale > 0, scale, 1.0)
    if power == 0.5:
        return two_norms(exact_matmul(y, y) - shift(a, -2 * of_x), 1, 2) / scale.square()
    b, eye = shift(a, -of_a), torch.eye(a.shape[1], dtype=a.dtype, device=a.device).expand_as(a)
    off = exact_matmul(exact_matmul(y, b), y) - shift(eye, -2 * of_x - of_a)
    return two_norms(off, 1, 2) / (scale.square() * two_norms(b, 1, 2))


def _errors(found: Decomposed, power: float) -> torch.Tensor:
    """:func:`power_errors` of each matrix, shape (batch,)."""
    run, device = found.run.found, found.usable.device
    numbers = (in_double(run.s), run.orthogonality, found.backward_errors)
    w, lost, backward = (x.cpu().numpy() for x in numbers)
    with np.errstate(all="ignore"):
        errors = np.where(lost < 1, power_errors(w, lost, backward, power), math.inf)
    usable = torch.where(run.size > 0, torch.from_numpy(errors).to(device), 0.0)  # A may be zero
    return torch.where(found.usable, usable, math.nan)


def power_errors(w: np.ndarray, lost: Any, backward: Any, power: float) -> Any:
    """Bounds on ``||X - A^p||_F / ||X||_F`` before X is rounded to a dtype, by eigenvalues w, (..., n).

    ``V diag(w^p) V^H`` is off by as much as ``V^H V`` is, where the backward error is that of orthonormal V.
    Eigenvalues are relative to the one with the largest power.
    """
    n = w.shape[-1]
    if not n:
        return np.zeros_like(backward)
    first = np.maximum(w[..., -1 if power > 0 else 0], 0.0)
    first = np.where(first > 0, first, 1.0)
    backward = backward / first
    w = np.maximum(w / first[..., None], 0.0)
    low, high = np.maximum(w[..., 0] - backward, 0.0), w[..., -1] + backward
    steepest = np.maximum(low ** (power - 1), high ** (power - 1))
    change = np.where(backward > 0, abs(power) * steepest * backward, 0.0) if power else 0 * backward
    if 0 < power < 1:
        change = np.minimum(change, n**0.5 * backward**power)
    powers = w**power
    size = np.sqrt((powers * powers).sum(-1))
    size = np.where(size > 0, size, 1.0) * (1 - lost)
    return change / size + 4 * measurement_error(n, torch.float64) + lost * (1 + lost)


def _rounded(errors: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Errors of X as it is returned, relative to its norm; infinite where it underflows to zero."""
    n = x.shape[1]
    if not x.numel():
        return errors
    kept = x.to(dtype).to(x.dtype)
    exponents = binary_exponents(largest_magnitude(x, (1, 2), keepdim=True))
    size, lost = (two_norms(shift(y, -exponents), 1, 2) for y in (kept, x - kept))
    tiny = torch.full_like(
        exponents, n * n, dtype=torch.float64
    )  # of the smallest number, of sums and powers
    lost = lost + shift(tiny, -1074 - exponents)[:, 0, 0]
    found = (errors * (size + lost) + lost) / size
    return torch.where(errors > 0, torch.where(size > 0, found, math.inf), errors)
