"""Polar decomposition: check the input, run the chain, return."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack, overload

import numpy as np
import torch

from neula.algorithms.scaling import binary_exponents
from neula.certificates.bounds import Accuracy
from neula.certificates.polar import PolarBounds, PolarNumbers, measures_alone
from neula.engines import FP64, Arithmetic, Engine
from neula.errors import check_name, part_of_one
from neula.kernels.magnitudes import MODERATE, largest_magnitude
from neula.kernels.phases import adjoint
from neula.kernels.polar.svd import converged_svd
from neula.kernels.precision import ONE_THREAD, plain_arithmetic
from neula.kernels.shift import shift
from neula.pipeline.call import Call, restored
from neula.pipeline.chain import Answer, Run, first_answer, run_chain
from neula.pipeline.distributed import Give, OverProcesses, in_step
from neula.pipeline.gradients import attach_polar
from neula.pipeline.inputs import check_finite, check_matrices, over_lists
from neula.pipeline.operators import with_operator
from neula.pipeline.plans import Given, Plans, accepted_result, numbers_later
from neula.pipeline.progress import Progress
from neula.pipeline.result import PolarResult
from neula.problems.operators.factorizations import traced_polar
from neula.problems.polar.links import chain
from neula.problems.polar.problem import SIDES, PolarJudge, PolarMatrices, PolarOptions, PolarValues
from neula.problems.signatures import ArrayLike, Kind, PolarKeywords


def give_factors_back(result: PolarResult, tall: Give, replicated: Give) -> PolarResult:
    """Factors of a distributed matrix: U distributed like A, H on all processes."""
    return replace(result, U=tall(result.U), H=None if result.H is None else replicated(result.H))


@overload
def polar(A: Kind, **keywords: Unpack[PolarKeywords]) -> PolarResult[Kind]: ...
@overload
def polar(A: Any, **keywords: Unpack[PolarKeywords]) -> PolarResult[Any]: ...
@with_operator(traced_polar, Plans(lambda A, **keywords: _plan(A, **keywords), operands=1))
@OverProcesses(give_factors_back, refused={"side": ("left",), "wait": (False,)}, wide=lambda asked: True)
@over_lists(PolarResult._member)
def polar(
    A: ArrayLike,
    *,
    side: str | None = None,
    rcond: float | None = None,
    completion: bool = False,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | None = None,
    wait: bool = True,
) -> PolarResult:
    """Polar decomposition ``A = U H``, certified to the requested accuracy.

    U is the nearest matrix to A with orthonormal columns (rows, if there are fewer), by which Muon and other
    optimizers replace a gradient. H is symmetric (Hermitian if A is complex), positive semidefinite, and
    computed if ``side`` is given.

    Parameters
    ----------
    A : array_like, shape (..., m, n)
        NumPy array, torch tensor or DLPack object, float16 to float64, complex64, complex128; integers are
        taken as float64. Not modified. Leading dimensions are a batch; any dimension may be zero. Of a list
        of torch matrices, as optimizers hold them, those of one shape are decomposed together, and a list of
        results comes back.
    side : {"right", "left"}, optional
        The symmetric factor to compute as well: of ``A = U H`` or of ``A = H U``. By default none.
    rcond : float, optional
        Singular values of A of at most ``rcond`` times the largest become 0, not 1. By default ``2**-24``, by
        which a matrix may differ from its rounding to float32, and ``max(m, n) 2**-52`` for the accuracy of
        float64; with that of bf16 those below 1e-3 may end anywhere between 0 and 1.
    completion : bool, optional
        Make all singular values of U equal to 1, also if A has zero singular values: the corresponding
        vectors of U are then orthonormal but not unique.
    accuracy : {"fp16", "bf16", "tf32", "fp32", "fp64"}, dtype or float, optional
        Accuracy of the result; by default that of A's dtype. ``"bf16"`` is for optimizers: singular values
        within ``2**-7`` of 1, made for those of A of at least 1e-3 times the largest.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine, optional
        The engine that multiplies matrices. ``"auto"`` chooses it by the device of A.
    strict : bool, optional
        Raise an :class:`~neula.pipeline.result.AccuracyError` instead of a warning, and reject NaN and Inf in
        batches.
    progress : callable or bool, optional
        Called with the name of the stage and the completed fraction; True shows a progress bar.
    wait : bool, optional
        False returns once the first link of the chain is launched, without waiting for the device. The result
        has U, H, their ranks and residuals, and which of them are accepted, as arrays on the device;
        :func:`neula.finish` completes it. On a CPU the call waits in any case.

    Returns
    -------
    PolarResult
        Unpacks into ``U, H``; holds the rank, the measured errors and the attempts.

    Raises
    ------
    ValueError
        For a matrix that has NaN or Inf, or fewer than two dimensions, and for unknown names; if a matrix
        without full rank is to have a gradient. Matrices of a batch with NaN or Inf are no error unless
        ``strict``: their factors are NaN, and are not accepted.
    TypeError
        For sparse or masked input.
    OverflowError
        If H overflows the dtype of A.
    AccuracyError
        If the accuracy was not reached and ``strict`` is set.

    Warns
    -----
    AccuracyWarning
        If no attempt met the accuracy.

    See Also
    --------
    orth : with ``method="polar"`` U alone, completed.
    scipy.linalg.polar : by the singular value decomposition of one matrix.

    Notes
    -----
    On a GPU, odd polynomials of A, evaluated by products on matrix units, map all singular values to 1;
    rejected factors are computed again by the SVD. On a CPU LAPACK's SVD is faster and runs first. The
    polynomials are a composition as in [1]_, restricted so that large singular values never become as small
    as the small ones, where rounding errors would destroy their vectors [2]_: for the accuracy of bf16, five
    polynomials in fp16 suffice up to a condition number of 1e3.

    Three things are measured, before U and H are rounded to the dtype of A: ``||A - U H||`` along random
    vectors, the extreme singular values of U by a few Lanczos steps, and that H is positive along vectors
    near those of the largest singular values.

    U and H of a torch tensor of full rank are differentiable, to any order, also if singular values coincide:
    the derivative depends on their sums only.

    References
    ----------
    .. [1] N. Amsel, D. Persson, C. Musco, R. M. Gower, "The Polar Express: Optimal matrix sign methods and
       their application to the Muon algorithm", 2025.
    .. [2] Y. Nakatsukasa, N. J. Higham, "Backward stability of iterations for computing the polar
       decomposition", SIAM J. Matrix Anal. Appl. 33, 2012.

    Examples
    --------
    >>> import numpy as np, neula
    >>> A = np.array([[0.0, -3.0], [2.0, 0.0]])
    >>> U, H = neula.polar(A, side="right")
    >>> U.round(12) + 0.0, H.round(12) + 0.0
    (array([[ 0., -1.],
           [ 1.,  0.]]), array([[2., 0.],
           [0., 3.]]))
    >>> neula.polar(np.zeros((3, 2))).rank
    0
    """
    call = Call.begin({"A": A}, engine=engine, accuracy=accuracy, strict=strict, gradients=True)
    call = call.by_host(engine, gradients=False) if wait else call
    options = _options(call, side, rcond, completion, progress)
    return polar_result(call, options, side, wait=wait)


def _options(
    call: Call, side: str | None, rcond: float | None, completion: bool, progress: Progress | None
) -> PolarOptions:
    check_matrices(call.first.tensor, "A")
    check_name("side", side, SIDES, optional=True)
    return PolarOptions(call.target, call.engine, part_of_one("rcond", rcond), completion, progress=progress)


class PolarPlan:
    """A plan for small matrices of full rank on a CPU, shape (m, n), by their SVD as LAPACK returns it."""

    def __init__(self, given: torch.Tensor, options: PolarOptions, side: str | None) -> None:
        self.options, self._side, self._label = options, side, f"svd {options.work.name}"
        self._judge = PolarJudge.for_batch(given[None].to("meta"), options)
        # Below the errors of the SVD singular values may be zero or not.
        errors = 8 * options.work.u * max(given.shape) ** 0.5 if options.small_too else 0.0
        self._least, self._tiny = max(options.cutoff(given.shape), errors), torch.finfo(given.dtype).tiny

    @restored
    def __call__(self, given: Given) -> PolarResult[Any] | None:
        a, options, judge, bounds = given.arrays[0], self.options, self._judge, self._judge.bounds
        with plain_arithmetic(options.engine.device), np.errstate(all="ignore"):
            if not np.isfinite(a).all():
                return None
            # As of a batch: MKL's reflectors of subnormal columns in complex64 are NaN.
            work = a.astype(np.complex128) if a.dtype == np.complex64 else a
            u, s, vh = (x.numpy() for x in converged_svd(torch.from_numpy(work)))
            if not (self._least * s[0] < s[-1] < MODERATE and s[0] > self._tiny):
                return None
            u, rank = (u @ vh).astype(a.dtype, copy=False), len(s)
            wide = (a if options.lie_down(a.shape) else adjoint(a)) * 2.0 ** -math.frexp(s[0])[1]
            factor = u if options.lie_down(a.shape) else adjoint(u)
            found = PolarNumbers(*measures_alone(wide, factor, within=not options.completion))
            h = None if self._side is None else self._symmetric_factor(a, u)
        if not found.accepted_by(bounds) or not (h is None or np.isfinite(h).all()):
            return None
        fields = {"U": given.wrap(u), "H": None if h is None else given.wrap(h), "side": self._side}
        fields |= {"residual": found.residual, "residual_bound": bounds.residual, "rank": rank}
        fields |= {"orthogonality": found.orthogonality, "orthogonality_bound": bounds.orthogonality}
        known = {"ranks": rank, "residuals": found.residual, "orthogonalities": found.orthogonality}
        fields |= {"converged": True} | numbers_later(given, known | {"accepted": True})
        reason = partial(judge.reason, PolarNumbers(*([x] for x in found)), 0)
        return accepted_result(PolarResult, given, options, self._label, reason, fields)

    def _symmetric_factor(self, a: np.ndarray, u: np.ndarray) -> np.ndarray:
        wide = np.promote_types(a.dtype, np.float64)
        left, right = (adjoint(u), a) if self._side == "right" else (a, adjoint(u))
        h = left.astype(wide, copy=False) @ right.astype(wide, copy=False)
        return ((h + adjoint(h)) / 2).astype(a.dtype, copy=False)


def _plan(
    A: Any,
    *,
    side: str | None = None,
    rcond: float | None = None,
    completion: bool = False,
    strict: bool = False,
    wait: bool = True,
    engine: str | Engine = "auto",
    **asked: Any,
) -> PolarPlan | None:
    call = Call.begin({"A": A}, engine=engine, **asked)
    call = call.by_host(engine) if wait else call
    options, a = _options(call, side, rcond, completion, None), call.first.tensor
    alone = a.ndim == 2 and 0 < a.numel() * min(a.shape) <= ONE_THREAD
    here = a.is_cpu and options.engine.device.type == "cpu" and options.engine.tuning.lapack
    fits = alone and here and a.dtype.to_real() == options.work.dtype
    return PolarPlan(a, options, side) if fits else None


def polar_result(
    call: Call, options: PolarOptions, side: str | None = None, *, wait: bool = True
) -> PolarResult:
    if not wait and call.first.tensor.numel() > 0:
        with call.computing():
            a = call.matrices()
            begun = first_answer(chain(options), PolarMatrices(a, options))
        if begun is not None:
            return _pending(call, options, side, begun)
    return _finished(call, options, side)


def _pending(call: Call, options: PolarOptions, side: str | None, begun: Answer[PolarValues]) -> PolarResult:
    shape = call.first.tensor.shape
    bounds = options.bounds(shape)
    with call.computing():
        judge = PolarJudge.for_batch(call.matrices(), options)
        found = PolarNumbers(*(x.reshape(shape[:-2]) for x in begun.values.measures.T))
        accepted, ranks = found.accepted_by(bounds), found.ranks(bounds, judge.full).long()
    u, h = _factors(call, options, side, begun.values.u, ranks)
    if h is not None:
        fits = (h.to(call.dtype).isfinite() == h.isfinite()).flatten(len(shape) - 2).all(-1)
        accepted = accepted & fits
    of_all = {"converged": accepted.all(), "rank": ranks.amin()}
    of_all |= {"residual": found.residual.amax(), "orthogonality": found.orthogonality.amax()}
    of_all |= {"engine": str(options.engine), "accuracy": options.target.name}
    of_all |= {"U": call.hand_back(u), "H": None if h is None else call.hand_back(h), "side": side}
    fields = of_all | _measured(call, bounds, found, ranks, accepted)
    return PolarResult(**fields, _pending=lambda: _finished(call, options, side, begun))


def _measured(
    call: Call, bounds: PolarBounds, found: PolarNumbers, ranks: Any, accepted: Any
) -> dict[str, Any]:
    """Fields with what is known of each matrix, and the largest accepted errors."""
    each = {"ranks": ranks, "residuals": found.residual, "orthogonalities": found.orthogonality}
    each |= {"accepted": accepted}
    known = {name: call.of_members(x) for name, x in each.items()}
    return known | {"residual_bound": bounds.residual, "orthogonality_bound": bounds.orthogonality}


def _factors(
    call: Call, options: PolarOptions, side: str | None, u: torch.Tensor, ranks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    shape = call.first.tensor.shape
    if call.differentiable:
        return attach_polar(call.first.graph, u.reshape(shape), side, ranks=ranks)
    if side is None:
        return u.reshape(shape), None
    with call.computing():
        h = symmetric_factor(call.matrices(), u, side, options)
    return u.reshape(shape), h.reshape(*shape[:-2], *h.shape[1:])


def _finished(
    call: Call, options: PolarOptions, side: str | None, begun: Answer[PolarValues] | None = None
) -> PolarResult:
    a = call.first.tensor
    with call.computing():
        found = decompose(call.matrices(), options, begun)
        if not found.run.accepted.all() and a.ndim == 2:
            check_finite(a, largest_magnitude(a, 0), "A")
    return _collect(call, options, found, side)


@dataclass(frozen=True)
class PolarOutcome:
    run: Run[PolarValues]
    judge: PolarJudge

    @property
    def u(self) -> torch.Tensor:
        """The factors; NaN where a matrix holds NaN or Inf."""
        u, lost = self.run.found.u, ~self.run.accepted
        lost[self.run.open] = False
        if lost.any():
            u[torch.from_numpy(lost).to(u.device)] = torch.nan
        return u


def decompose(
    matrices: torch.Tensor, options: PolarOptions, begun: Answer[PolarValues] | None = None
) -> PolarOutcome:
    """Orthogonal polar factors of a batch, on the engine's device.

    Shapes: matrices (batch, m, n). ``begun``: answer of the first link.
    """
    count, over_rows = len(matrices), options.over_rows
    judge = PolarJudge.for_batch(matrices, options)
    if over_rows.spread:  # NaN on one process is an error on all of them
        check_finite(matrices[0], options.engine.column_max(matrices[0]), "A", over_rows)
        m, n = options.shape_of(matrices.shape)
        if m < n:
            return _gathered(matrices[0], options)
    if matrices.numel() > 0:
        links = in_step(chain(options)) if over_rows.spread else chain(options)
        return PolarOutcome(run_chain(links, PolarMatrices(matrices, options), judge, begun=begun), judge)
    nothing = torch.zeros(count, 5, dtype=torch.float64, device="cpu")
    u = matrices.to(options.engine.using(options.work).storage)
    values = PolarValues(u, nothing[:, 0].long(), nothing)
    return PolarOutcome(Run.nothing_to_do(values, np.zeros((6, count)), "no elements"), judge)


def _gathered(rows: torch.Tensor, options: PolarOptions) -> PolarOutcome:
    """Factorize one wide matrix, whose products contract over columns: each process takes all of it.

    The answer of the first process counts.
    """
    over_rows, device = options.over_rows, rows.device
    whole = over_rows.gathered(rows)
    found = decompose(whole[None], replace(options, engine=options.engine.alone))
    run = found.run
    u, numbers = over_rows.agree(found.u.contiguous()), torch.from_numpy(run.numbers).to(device)
    accepted = torch.from_numpy(run.accepted).to(device)
    run.numbers, run.accepted = (x.cpu().numpy() for x in over_rows.agreed(numbers, accepted))
    mine = u[:, over_rows.first : over_rows.first + over_rows.own(len(rows))]
    run.values = replace(run.found, u=mine if mine.shape[1] else rows.new_zeros(1, *rows.shape))
    return found


def symmetric_factor(a: torch.Tensor, u: torch.Tensor, side: str, options: PolarOptions) -> torch.Tensor:
    """``(U^H A + A^H U) / 2`` of a batch, or ``(U A^H + A U^H) / 2`` for ``side="left"``.

    The whole product is computed: ``U^H A`` is symmetric only up to the errors of U, and its lower triangle
    alone, mirrored, has a larger residual than the mean. On a CPU the product is summed in double precision.
    """
    if a.numel() == 0:
        order = a.shape[2 if side == "right" else 1]
        return a.new_zeros(len(a), order, order)
    tuning = options.engine.tuning
    name = FP64.name if options.engine.device.type == "cpu" else tuning.cheapest(options.work)
    engine = options.engine.using(Arithmetic.named(name))
    a = a.to(torch.promote_types(a.dtype, torch.float32))
    largest = largest_magnitude(a, (1, 2), keepdim=True)
    exponents = binary_exponents(options.over_rows.largest(largest))
    near_one = shift(a, -exponents)
    left, right = (u.mH, near_one) if side == "right" else (near_one, u.mH)
    h = options.over_rows.total(engine.wide(engine.parts(left), engine.parts(right)))
    h = (h + h.mH) / 2
    return shift(h.to(torch.promote_types(u.dtype, a.dtype)), exponents)


def _collect(call: Call, options: PolarOptions, found: PolarOutcome, side: str | None) -> PolarResult:
    given, run, judge = call.first.tensor, found.run, found.judge
    batch = given.shape[:-2]
    measured, ranks = judge.numbers(run.numbers), judge.ranks(run.numbers)
    if call.differentiable:
        _refuse_deficient(given, ranks[run.accepted])
    u, h = _factors(call, options, side, found.u, torch.from_numpy(ranks).reshape(batch))
    if h is not None and bool(h.detach().isinf().any()):
        raise OverflowError(f"H does not fit {h.dtype}: scale A down")

    def largest(x: np.ndarray) -> float:
        return float(np.where(np.isnan(x), np.inf, x).max(initial=0.0))

    result = PolarResult(
        U=call.give_back(u),
        H=None if h is None else call.give_back(h),
        side=side,
        converged=bool(run.accepted.all()),
        rank=int(ranks.min(initial=judge.full)),
        residual=largest(measured.residual),
        orthogonality=largest(measured.orthogonality),
        **_measured(call, judge.bounds, measured, ranks, run.accepted),
        **call.diagnostics(run.attempts),
    )
    if not result.converged:
        call.report_missed(
            f"the polar decomposition is not certified to {result.accuracy} accuracy",
            judge.reason(measured, run.worst(measured.residual)),
            result,
            call.missed(run.accepted),
        )
    return result


def _refuse_deficient(given: torch.Tensor, ranks: np.ndarray) -> None:
    full = min(given.shape[-2:])
    if (ranks < full).any():
        raise ValueError(
            f"A of shape {tuple(given.shape)} requires a gradient, and its polar factor has none where the "
            f"rank ({int(ranks.min())}) is below {full}: pass A.detach()"
        )
