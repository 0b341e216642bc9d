"""Polar decomposition: check the input, run the chain, give back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack, overload

import numpy as np
import torch

from neula.algorithms.scaling import binary_exponents
from neula.certificates.bounds import Accuracy
from neula.engines import Arithmetic, Engine
from neula.errors import check_name
from neula.kernels.magnitudes import largest_magnitude
from neula.kernels.shift import shift
from neula.pipeline.call import Call
from neula.pipeline.chain import Run, run_chain
from neula.pipeline.compilation import eager
from neula.pipeline.inputs import check_finite, check_matrices
from neula.pipeline.lists import over_lists
from neula.pipeline.polar_gradients import attach_polar
from neula.pipeline.progress import Progress
from neula.pipeline.result import Attempt, PolarResult
from neula.problems.polar.chain import PolarJudge, chain
from neula.problems.polar.problem import Matrices, Options, PolarValues
from neula.problems.signatures import Kind, PolarKeywords

SIDES = ("right", "left")


@overload
def polar(A: Kind, **keywords: Unpack[PolarKeywords]) -> PolarResult[Kind]: ...
@overload
def polar(A: Any, **keywords: Unpack[PolarKeywords]) -> PolarResult[Any]: ...
@eager
@over_lists(PolarResult.member)
def polar(
    A: Any,
    *,
    side: str | None = None,
    rcond: float | None = None,
    completion: bool = False,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | None = None,
) -> PolarResult:
    """Polar decomposition ``A = U H`` on matrix units, certified to the accuracy asked for.

    U is the matrix with orthonormal columns (or rows, if there are fewer) that is nearest to A: what Muon and
    other optimizers replace a gradient by. On a GPU polynomials of A whose products fill matrix units take
    all singular values to 1, and what misses its accuracy goes on to the singular value decomposition; on a
    CPU, where LAPACK's is faster, that comes first.

    Parameters
    ----------
    A : array_like, shape (..., m, n)
        NumPy array, torch tensor or DLPack object, float16 to float64; integers are taken as float64. Not
        modified. Leading dimensions are a batch; any dimension may be zero. Of a list of torch matrices, as
        optimizers hold them, those of one shape are decomposed together, and a list of results comes back.
    side : {"right", "left"}, optional
        Which symmetric factor is wanted, too: of ``A = U H`` or of ``A = H U``. By default none.
    rcond : float, optional
        Singular values of A of at most ``rcond`` times the largest become 0, not 1. By default those that
        the working precision (float32, or float64 for that accuracy) cannot tell from zero do; with the
        accuracy of bf16 those below 1e-3 may end anywhere between 0 and 1.
    completion : bool, optional
        Let all singular values of U be 1, also where those of A are zero: what U has there is orthonormal
        to the rest, and not unique.
    accuracy : {"fp16", "bf16", "tf32", "fp32", "fp64"}, dtype or float, optional
        Accuracy of the result; by default that of A's dtype. ``"bf16"`` is for optimizers: singular values
        within ``2**-7`` of 1, made for those of A of at least 1e-3 times the largest.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine, optional
        What multiplies. ``"auto"`` goes by the device of A.
    strict : bool, optional
        Raise an :class:`~neula.pipeline.result.AccuracyError` where there would be a warning, and refuse NaN
        and Inf in batches, too.
    progress : callable or bool, optional
        Called with the name of the stage and the part of it that is done; True shows a bar.

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
        For complex, sparse or masked input.
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
    The polynomials are a composition as in [1]_, kept from bringing large singular values down to the size
    of small ones, where rounding errors would take their vectors [2]_: five for condition numbers up to 1e3
    at the accuracy of bf16, evaluated in fp16.

    Three things are measured: ``||A - U H||`` along random vectors, the extreme singular values of U by a few
    Lanczos steps, and that H is positive along vectors near those of the largest singular values.

    U and H of a torch tensor of full rank that requires a gradient have one, of first and higher order, also
    where singular values coincide: it depends on their sums alone.

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
    a = call.first.tensor
    check_matrices(a, "A")
    check_name("side", side, SIDES, optional=True)
    if rcond is not None and not 0 <= rcond < 1:
        raise ValueError(f"rcond must be at least 0 and below 1, got {rcond}")
    return polar_result(call, Options(call.target, call.engine, rcond, completion, progress), side)


def polar_result(call: Call, options: Options, side: str | None = None) -> PolarResult:
    """The decomposition of what a call was given.

    Parameters
    ----------
    call : Call
    options : Options
    side : {"right", "left"}, optional
    """
    a = call.first.tensor
    with call.computing():
        found = decompose(call.matrices(), options)
        if not found.run.accepted.all() and a.ndim == 2:
            check_finite(a, largest_magnitude(a, 0), "A")
    return _collect(call, found, side)


@dataclass(frozen=True)
class Found:
    """What a chain has come to, and by which judge."""

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


def decompose(matrices: torch.Tensor, options: Options) -> Found:
    """Orthogonal polar factors of a batch, on the engine's device.

    Parameters
    ----------
    matrices : Tensor, shape (batch, m, n)
    options : Options
    """
    count, m, n = matrices.shape
    judge = PolarJudge(options.bounds(max(m, 1), max(n, 1)), options, matrices)
    if matrices.numel() > 0:
        return Found(run_chain(chain(options), Matrices(matrices, options), judge), judge)
    nothing = torch.zeros(count, 9, dtype=torch.float64)
    run = Run.begin(count, PolarValues(matrices.to(options.work.dtype), nothing[:, 0].long(), nothing))
    run.numbers, run.accepted[:], run.open = np.zeros((10, count)), True, np.arange(0)
    run.attempts.append(Attempt("nothing to do", True, "no elements"))
    return Found(run, judge)


def symmetric_factor(a: torch.Tensor, u: torch.Tensor, side: str, options: Options) -> torch.Tensor:
    """``(U^T A + A^T U) / 2`` of a batch, or the same of rows, in working precision."""
    if a.numel() == 0:
        order = a.shape[2 if side == "right" else 1]
        return a.new_zeros(len(a), order, order)
    name = options.engine.tuning.cheapest(options.work)
    engine = options.engine.using(Arithmetic.named(name))
    a = a.to(torch.promote_types(a.dtype, torch.float32))
    exponents = binary_exponents(torch.linalg.vector_norm(a, torch.inf, dim=(1, 2), keepdim=True))
    near_one = shift(a, -exponents)
    left, right = (u.mT, near_one) if side == "right" else (near_one, u.mT)
    h = engine.joined(engine.product(engine.parts(left), engine.parts(right), symmetric=True))
    h = (h + h.mT) / 2
    return shift(h.double() if a.dtype == torch.float64 else h, exponents)


def _collect(call: Call, found: Found, side: str | None) -> PolarResult:
    """What the user gets, attached to the graph of A; says so where the accuracy was not reached."""
    given, run, judge = call.first.tensor, found.run, found.judge
    batch, options, bounds = given.shape[:-2], judge.options, judge.bounds
    measured, ranks = judge.numbers(run.numbers), judge.ranks(run.numbers)
    u, h = found.u.reshape(given.shape), None
    if call.differentiable:
        _refuse_deficient(given, ranks[run.accepted])
        u, h = attach_polar(call.first.graph, u, side)
    elif side is not None:
        with call.computing():
            h = symmetric_factor(call.matrices(), found.u, side, options)
            h = h.reshape(*batch, *h.shape[1:])

    def of_members(x: np.ndarray) -> Any:
        known = torch.from_numpy(np.ascontiguousarray(x)).reshape(batch)
        return call.give_back(known, known.dtype)

    def largest(x: np.ndarray) -> float:
        return float(np.where(np.isnan(x), np.inf, x).max(initial=0.0))

    result = PolarResult(
        U=call.give_back(u),
        H=None if h is None else call.give_back(h),
        side=side,
        converged=bool(run.accepted.all()),
        rank=int(ranks.min(initial=min(given.shape[-2:]))),
        residual=largest(measured.residual),
        orthogonality=largest(measured.orthogonality),
        residual_bound=bounds.residual,
        orthogonality_bound=bounds.orthogonality,
        ranks=of_members(ranks),
        residuals=of_members(measured.residual),
        orthogonalities=of_members(measured.orthogonality),
        accepted=of_members(run.accepted),
        attempts=tuple(run.attempts),
        engine=str(options.engine),
        accuracy=options.target.name,
        seconds=call.seconds,
    )
    if not result.converged:
        call.report_missed(
            f"the polar decomposition is not certified to {result.accuracy} accuracy",
            run.attempts[-1].reason,
            result,
            np.argwhere(~run.accepted.reshape(batch)).tolist(),
        )
    return result


def _refuse_deficient(given: torch.Tensor, ranks: np.ndarray) -> None:
    full = min(given.shape[-2:])
    if (ranks < full).any():
        raise ValueError(
            f"A of shape {tuple(given.shape)} requires a gradient, and its polar factor has none where the "
            f"rank ({int(ranks.min())}) is below {full}: pass A.detach()"
        )
