"""Cholesky factorization: check the input, run the chain, return."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Unpack, overload

import numpy as np
import torch

from neula.algorithms.elimination.cholesky import library_cholesky
from neula.algorithms.elimination.jitter import least_jitter
from neula.certificates.bounds import Accuracy
from neula.certificates.cholesky import cholesky_bound
from neula.certificates.orthogonality import gaussian_probes
from neula.engines import FP64, Engine
from neula.engines.formats import in_double
from neula.errors import check_name, of_batch
from neula.kernels import scipy_linalg
from neula.kernels.phases import adjoint
from neula.kernels.precision import plain_arithmetic
from neula.pipeline.batches import SingularMember
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer, Link, MemoryGuard, Run, first_answer, run_chain
from neula.pipeline.factors import CholeskyMethods
from neula.pipeline.gradients import attach_cholesky
from neula.pipeline.inputs import check_finite, check_matrices, flattened
from neula.pipeline.operators import with_operator
from neula.pipeline.plans import Given, Plan, Plans, accepted_result
from neula.pipeline.progress import Progress
from neula.pipeline.result import CholeskyResult
from neula.pipeline.result.shown import Later
from neula.problems.definite.links import SAFE_EXPONENT, chain
from neula.problems.definite.problem import (
    CholeskyJudge,
    CholeskyOptions,
    CholeskyValues,
    Symmetric,
)
from neula.problems.operators.factorizations import traced_cholesky
from neula.problems.signatures import ArrayLike, CholeskyKeywords, Kind

LARGEST = 255  # order up to which NumPy multiplies by a few vectors in one thread, and leaves torch its cores
BY_SCIPY = 95  # order up to which SciPy factorizes in one thread


class CholeskyPlan:
    """A plan for single matrices of order n. ``upper``: whether U is requested, of the upper triangle."""

    def __init__(self, n: int, options: CholeskyOptions, dtype: torch.dtype, *, upper: bool) -> None:
        self.options, self._upper, self._bound = options, upper, CholeskyJudge.for_shape(n, options).bound
        self._double = options.low.format is FP64
        routine = ("cpotrf", "zpotrf") if dtype.is_complex else ("spotrf", "dpotrf")
        by_scipy = getattr(scipy_linalg.lapack, routine[self._double])
        self._factorize = by_scipy if n <= BY_SCIPY else _by_torch
        self._label = f"cholesky {options.low.name}"
        self._vectors = gaussian_probes(n, torch.device("cpu"), dtype).numpy()

    def __call__(self, given: Given) -> CholeskyResult[Any] | None:
        (a,), upper = given.arrays, self._upper
        with np.errstate(all="ignore"):  # not accepted unless finite
            diagonal, most = a.diagonal().real, 2.0**SAFE_EXPONENT
            if self._double and not (diagonal.min() >= 1 / most and diagonal.max() <= most):
                return None
            # Rows of A are columns of what LAPACK sees.
            columns, failed = self._factorize(a.T, lower=upper, clean=1)
            if failed:
                return None
            factor = columns.T.astype(a.dtype, copy=False)
            residual = self._residual(a.T if upper else a, factor.T if upper else factor)
        if not residual <= self._bound:
            return None
        wrap, bound = given.wrap, self._bound
        known = wrap(factor), residual, wrap(np.array(residual)), lambda: wrap(np.array(True))
        reason = lambda: f"residual {residual:.1e} (bound {bound:.1e})"  # noqa: E731
        return _accepted(given, self.options, self._label, reason, *known, bound, upper)

    def _residual(self, a: np.ndarray, factor: np.ndarray) -> float:
        """As :func:`neula.certificates.cholesky.residuals_of_triangles`, for the lower triangle of A."""
        diagonal = a.diagonal().real.astype(np.float64)
        scales = np.ldexp(1.0, -(np.frexp(diagonal)[1] // 2))[:, None]
        below = in_double(torch.from_numpy(a).tril(-1)).numpy()  # in a part of the time of NumPy's
        lower = factor.astype(below.dtype, copy=False)
        vectors = self._vectors * scales
        image = below @ vectors + adjoint(below) @ vectors + diagonal[:, None] * vectors
        size = np.linalg.norm(image * scales)
        return float(np.linalg.norm((image - lower @ (adjoint(lower) @ vectors)) * scales) / size)


def _by_torch(a: np.ndarray, *, lower: bool, clean: int) -> tuple[np.ndarray, int]:
    """Factorize like SciPy's ``potrf``, with zeros in the other triangle."""
    factor, failed = torch.linalg.cholesky_ex(torch.from_numpy(a), upper=not lower)
    return factor.numpy(), int(failed)


class LaunchedCholeskyPlan:
    """A plan for matrices whose first link only launches its work, or is LAPACK."""

    # ``upper``: whether U is requested, of the upper triangle.

    def __init__(
        self, link: Link[Symmetric, CholeskyValues], options: CholeskyOptions, *, upper: bool
    ) -> None:
        self.options, self._link, self._upper = options, link, upper

    def __call__(self, given: Given) -> CholeskyResult[Any] | Answer[CholeskyValues] | None:
        (a,) = given.arrays
        return self.solved(given, torch.from_numpy(a) if isinstance(a, np.ndarray) else a)

    def solved(
        self,
        given: Given,
        a: torch.Tensor,
        attached: Callable[[torch.Tensor], torch.Tensor] = lambda lower: lower,
    ) -> CholeskyResult[Any] | Answer[CholeskyValues] | None:
        """Factorize matrices of any shape; L, of the shape of A, may be attached to a graph."""
        device, options, upper, found = self.options.engine.device, self.options, self._upper, None
        matrices = flattened(a).to(device)
        problems = Symmetric(matrices.mH if upper else matrices, options)
        memory = MemoryGuard(device).attempt(self._link.label)
        with suppress(SingularMember), memory, plain_arithmetic(device):
            found = self._link.answer(problems, None)
        if found is None or found.measured is None:
            return found
        residual = float(found.measured[0].amax())  # NaN where there is no factor
        judge = CholeskyJudge.for_shape(a.shape[-1], options)
        if not judge.accept(residual):
            return found
        residuals = found.values.residual.reshape(a.shape[:-2])
        lower = attached(found.values.lower.reshape(a.shape))
        reason = of_batch(f"residual {residual:.1e} (bound {judge.bound:.1e})", 0, len(matrices), "matrices")
        factor = given.give((lower.mH if upper else lower).resolve_conj())
        known = factor, residual, given.give(residuals), lambda: given.give(judge.accept(residuals))
        return _accepted(given, options, found.label, lambda: reason, *known, judge.bound, upper)


def _accepted(
    given: Given,
    options: CholeskyOptions,
    label: str,
    reason: Callable[[], str],
    factor: Any,
    residual: float,
    residuals: Any,
    accepted: Callable[[], Any],
    bound: float,
    upper: bool,
) -> CholeskyResult[Any]:
    fields = {"factor": factor, "upper": upper, "converged": True, "residual": residual, "bound": bound}
    fields |= {"residuals": residuals, "accepted": Later(accepted)}
    fields["_factors"] = CholeskyMethods(given.arrays[0], factor, upper, bound)
    return accepted_result(CholeskyResult, given, options, label, reason, fields)


def launched_plan(a: torch.Tensor, options: CholeskyOptions, *, upper: bool) -> LaunchedCholeskyPlan | None:
    """Plan for matrices like A; None if the first link reads their elements."""
    if a.numel() == 0 or options.progress is not None:
        return None
    n = a.shape[-1]
    link = chain(a.numel() // n**2, n, options)[0]
    fits = link.launches_only or options.tuning.lapack
    return LaunchedCholeskyPlan(link, options, upper=upper) if fits else None


@overload
def cholesky(A: Kind, **keywords: Unpack[CholeskyKeywords]) -> CholeskyResult[Kind]: ...
@overload
def cholesky(A: Any, **keywords: Unpack[CholeskyKeywords]) -> CholeskyResult[Any]: ...
@with_operator(
    traced_cholesky,
    Plans(
        lambda A, **keywords: _plan(A, **keywords),
        operands=1,
        go_on=lambda begun, A, **keywords: _gone_on(A, begun, **keywords),
    ),
)
def cholesky(
    A: ArrayLike,
    *,
    upper: bool = False,
    jitter: str | None = None,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | None = None,
    wait: bool = True,
) -> CholeskyResult:
    """Cholesky factorization ``A = L L^H``, certified to the requested accuracy.

    Returns L, or U with ``upper=True``, with its measured residual.

    Parameters
    ----------
    A : array_like, shape (..., n, n)
        Symmetric or Hermitian positive definite: NumPy array, torch tensor or DLPack object, float16 to
        float64, complex64, complex128; integers are taken as float64. Not modified. Only the lower triangle
        is read, or the upper one with ``upper=True``, as in torch, and of the diagonal its real part, as in
        LAPACK. Leading dimensions are a batch; any dimension may be zero.
    upper : bool, optional
        Whether to return ``U`` with ``A = U^H U`` in place of L, as in torch; ``scipy.linalg.cholesky`` does
        so by default.
    jitter : {"auto"}, optional
        Add to the diagonal of each matrix that is not positive definite the number that makes it so, at most
        3.4 times the least one; the result has it as ``jitter``. By default such a matrix is an error, which
        names the number.
    accuracy : {"fp16", "bf16", "tf32", "fp32", "fp64"}, dtype or float, optional
        Accuracy of the result; by default that of A's dtype. A number is the largest acceptable residual
        relative to A; the cheapest sufficient format is used.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine, optional
        The engine that multiplies matrices. ``"auto"`` chooses it by the device of A.
    strict : bool, optional
        Raise an :class:`~neula.pipeline.result.AccuracyError` instead of a warning.
    progress : callable or bool, optional
        Called with the name of the stage and the completed fraction; True shows a progress bar.
    wait : bool, optional
        False returns once the first link of the chain is launched, without waiting for the device. The result
        has the factors, their residuals, and which of them are accepted, as arrays on the device;
        :func:`neula.finish` completes it. On a CPU the call waits in any case.

    Returns
    -------
    CholeskyResult
        The factor as ``L`` (and, conjugate transposed, as ``U``), whose diagonal is real, with its residual;
        ``solve``, ``logdet``, ``inv_quad`` and others of :class:`~neula.pipeline.result.Factored` compute
        with it. It keeps A, by reference.

    Raises
    ------
    numpy.linalg.LinAlgError
        If A is not positive definite in double precision. The message has the order of the first leading
        minor that is not positive, a jitter that makes A definite and, for a batch, the index of the matrix.
    ValueError
        If A is not square, or the triangle that is read has NaN or Inf; for unknown names.
    TypeError
        For sparse input.
    AccuracyError
        If the accuracy was not reached and ``strict`` is set.

    Warns
    -----
    AccuracyWarning
        If no attempt met the accuracy.

    See Also
    --------
    solve : with ``assume_a="pos"``, to solve a system.
    torch.linalg.cholesky, scipy.linalg.cholesky : the same without a certificate.

    Notes
    -----
    On a GPU large matrices are factorized by a recursion whose products have the requested accuracy (in half
    precision with error correction for float32), and smaller matrices and batches by tiles, all matrices in
    one launch. On a CPU and for float64 the library's factorization is the fastest, and is certified as well.
    Rejected factors are computed again in double precision.

    Rows and columns are scaled symmetrically by powers of two, to a diagonal near one, which is exact; the
    residual is that of the scaled matrix. For nearly singular A, rounding errors decide whether it counts as
    positive definite, as in LAPACK.

    L of a torch tensor is differentiable, to any order; the gradient is Hermitian, as in torch.

    References
    ----------
    .. [1] N. J. Higham, "Accuracy and Stability of Numerical Algorithms", 2002, chapter 10.

    Examples
    --------
    >>> import numpy as np, neula
    >>> A = np.array([[4.0, 2.0], [2.0, 5.0]])
    >>> result = neula.cholesky(A)
    >>> result.L, result.converged
    (array([[2., 0.],
           [1., 2.]]), True)
    >>> neula.cholesky(A, upper=True).U
    array([[2., 1.],
           [0., 2.]])
    >>> result.logdet().value.round(6), result.inv_quad(np.array([4.0, 2.0])).value  # log 16
    (np.float64(2.772589), array(4.))
    """
    call, options = _asked(A, accuracy, engine, strict, progress, jitter)
    given, n = call.first.tensor, call.first.tensor.shape[-1]
    if not wait and given.numel() > 0:
        with call.computing():
            lower = _lower(call, upper=upper)
            links = chain(len(lower), n, options, wait=False)
            begun = first_answer(links, Symmetric(lower, options))
        if begun is not None:
            finish = partial(_finished, call, options, begun, upper=upper)
            return _result(call, options, begun.values, upper=upper, pending=finish)
    return _finished(call, options, upper=upper)


def _asked(
    A: Any,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | None = None,
    jitter: str | None = None,
) -> tuple[Call, CholeskyOptions]:
    check_name("jitter", jitter, ("auto",), optional=True)
    call = Call.begin(
        {"A": A},
        engine=engine,
        accuracy=accuracy,
        bound=lambda target, shape: cholesky_bound(target, max(1, *shape[-1:])),
        strict=strict,
        gradients=True,
    )
    given = call.first.tensor
    check_matrices(given, "A")
    n = given.shape[-1]
    if given.shape[-2] != n:
        raise ValueError(f"A must be square, got {given.shape[-2]} x {n}; use neula.qr for other shapes")
    return call, CholeskyOptions(call.target, call.engine, jitter is not None, progress=progress)


def _plan(A: Any, *, upper: bool = False, wait: bool = True, **keywords: Any) -> Plan | None:
    """Plan for one small matrix where LAPACK comes first, or for the first link of other matrices."""
    call, options = _asked(A, **keywords)
    a = call.first.tensor
    small = a.ndim == 2 and 0 < len(a) <= LARGEST and options.engine.device.type == "cpu"
    if small and options.tuning.lapack:
        return CholeskyPlan(len(a), options, a.dtype, upper=bool(upper))
    return launched_plan(a, options, upper=upper) if wait else None


def _gone_on(
    A: Any, begun: Answer[CholeskyValues], *, upper: bool = False, wait: bool = True, **keywords: Any
) -> CholeskyResult[Any]:
    return _finished(*_asked(A, **keywords), begun, upper=upper)


def _lower(call: Call, *, upper: bool) -> torch.Tensor:
    matrices = call.matrices()
    return matrices.mH if upper else matrices


def _finished(
    call: Call, options: CholeskyOptions, begun: Answer[CholeskyValues] | None = None, *, upper: bool
) -> CholeskyResult:
    given = call.first.tensor
    if begun is None and (plan := launched_plan(given, options, upper=upper)) is not None:
        soon = plan.solved(Given.of_call(call), given, partial(_attached, call, upper=upper))
        if isinstance(soon, CholeskyResult):
            return soon
        begun = soon
    try:
        with call.computing():
            run = _factorize(_lower(call, upper=upper), given, options, begun, upper=upper)
    except np.linalg.LinAlgError as error:
        if not options.jitter or "jitter" not in str(error):
            raise
        return _with_jitter(call, replace(options, jitter=False), upper=upper)
    return _collect(call, options, run, upper=upper)


def _with_jitter(call: Call, options: CholeskyOptions, *, upper: bool) -> CholeskyResult:
    """The factors of matrices with a multiple of the identity added to those that need it."""
    with call.computing():
        lower = _lower(call, upper=upper)
        orders = library_cholesky(in_double(lower)).order.tolist()
        added = [least_jitter(a) if order else 0.0 for a, order in zip(lower, orders, strict=True)]
    first, (*batch, n, _) = call.first, call.first.tensor.shape
    device = first.tensor.device
    jitter = torch.tensor(added, dtype=torch.float64, device=device).reshape(batch)
    shift = jitter[..., None, None] * torch.eye(n, dtype=torch.float64, device=device)
    graph = first.graph + shift.to(first.tensor)
    shifted = replace(first, tensor=graph.detach(), graph=graph)
    result = _finished(replace(call, operands={"A": shifted}), options, upper=upper)
    return replace(result, jitter=call.hand_back(jitter, jitter.dtype) if batch else added[0])


def _attached(call: Call, lower: torch.Tensor, *, upper: bool) -> torch.Tensor:
    lower = lower.reshape(call.first.tensor.shape)
    if not call.differentiable:
        return lower
    graph = call.first.graph
    return attach_cholesky(graph.mH if upper else graph, lower)


def _factorize(
    lower: torch.Tensor,
    given: torch.Tensor,
    options: CholeskyOptions,
    begun: Answer[CholeskyValues] | None,
    *,
    upper: bool,
) -> Run[CholeskyValues]:
    n = lower.shape[-1]
    if 0 in lower.shape:
        residual = torch.zeros(len(lower), dtype=torch.float64, device=lower.device)
        nothing = CholeskyValues(lower.clone(), residual)
        why = f"A is {tuple(lower.shape[1:])}, {len(lower)} times"
        return Run.nothing_to_do(nothing, np.zeros((2, len(lower))), why)
    try:
        links = chain(len(lower), n, options, wait=begun is None)
        judge = CholeskyJudge.for_shape(n, options)
        run = run_chain(links, Symmetric(lower, options), judge, begun=begun)
    except SingularMember as error:
        _check_triangle(given, upper=upper)
        where = np.unravel_index(error.place, given.shape[:-2])
        which = f"A[{', '.join(map(str, where))}] of the batch" if given.ndim > 2 else "A"
        enough = least_jitter(lower[error.place])
        advice = f"; add {enough:g} to its diagonal, or pass jitter='auto'"
        raise np.linalg.LinAlgError(
            f"{which} is not positive definite: {error}{advice * math.isfinite(enough)}"
        ) from None
    if not run.accepted.all():
        _check_triangle(given, upper=upper)
    return run


def _check_triangle(given: torch.Tensor, *, upper: bool) -> None:
    read = given.triu() if upper else given.tril()
    check_finite(read, read, "A")


def _collect(
    call: Call, options: CholeskyOptions, run: Run[CholeskyValues], *, upper: bool
) -> CholeskyResult:
    result = _result(call, options, run.found, run, upper=upper)
    if not result.converged:
        call.report_missed(
            f"the Cholesky factorization is not certified to {result.accuracy} accuracy",
            f"residual {result.residual:.1e}, asked for {result.bound:.1e} ({run.label})",
            result,
            call.missed(run.accepted),
        )
    return result


def _result(
    call: Call,
    options: CholeskyOptions,
    values: CholeskyValues,
    run: Run[CholeskyValues] | None = None,
    *,
    upper: bool,
    pending: Callable[[], CholeskyResult] | None = None,
) -> CholeskyResult:
    """The result with its gradient; without a run before anything is read from the device."""
    given = call.first.tensor
    judge = CholeskyJudge.for_shape(max(given.shape[-1], 1), options)
    found = values.residual.reshape(given.shape[:-2])  # a copy to the host takes longer than to compare again
    with call.computing():
        accepted = judge.accept(found)
    lower = _attached(call, values.lower, upper=upper)
    factor = lower.mH if upper else lower
    of_all: dict[str, Any]
    if run is None:
        of_all = {"converged": accepted.all(), "residual": found.amax()}
        of_all |= {"engine": str(call.engine), "accuracy": call.target.name}
        factor = call.hand_back(factor)
    else:
        of_all = {"converged": bool(run.accepted.all()), "residual": float(run.numbers[0].max(initial=0.0))}
        factor = call.give_back(factor)
        of_all |= call.diagnostics(run.attempts)
    return CholeskyResult(
        factor=factor,
        upper=upper,
        **of_all,
        bound=judge.bound,
        residuals=call.of_members(found),
        accepted=call.hand_back(accepted, accepted.dtype),
        _pending=pending,
        _factors=CholeskyMethods(call.first.graph, factor, upper, judge.bound),
    )
