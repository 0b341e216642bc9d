"""Cholesky factorization: check the input, run the chain, give back."""

from __future__ import annotations

from typing import Any, Unpack, overload

import numpy as np
import torch

from neula.certificates.bounds import Accuracy
from neula.certificates.cholesky import cholesky_bound
from neula.engines import Engine
from neula.pipeline.call import Call
from neula.pipeline.chain import Run, run_chain
from neula.pipeline.compilation import with_operator
from neula.pipeline.gradients import attach_cholesky
from neula.pipeline.inputs import check_finite, check_matrices
from neula.pipeline.progress import Progress
from neula.pipeline.result import Attempt, CholeskyResult
from neula.problems.definite.chain import CholeskyJudge, chain, residuals
from neula.problems.definite.problem import CholeskyValues, NotDefiniteMember, Options, Symmetric
from neula.problems.operators.factorizations import traced_cholesky
from neula.problems.signatures import CholeskyKeywords, Kind


@overload
def cholesky(A: Kind, **keywords: Unpack[CholeskyKeywords]) -> CholeskyResult[Kind]: ...
@overload
def cholesky(A: Any, **keywords: Unpack[CholeskyKeywords]) -> CholeskyResult[Any]: ...
@with_operator(traced_cholesky)
def cholesky(
    A: Any,
    *,
    upper: bool = False,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | None = None,
) -> CholeskyResult:
    """Cholesky factorization ``A = L L^T`` on matrix units, certified to the accuracy asked for.

    On a GPU large matrices are factorized by a recursion whose products are as accurate as the accuracy asked
    for, in half precision with error correction for float32; batches of small ones all together. Elsewhere,
    and for float64, the library's factorization is the fastest, and has the same certificate. What misses its
    accuracy is factorized in double precision.

    Parameters
    ----------
    A : array_like, shape (..., n, n)
        Symmetric positive definite: NumPy array, torch tensor or DLPack object, float16 to float64; integers
        are taken as float64. Not modified. Only the lower triangle is read, or the upper one with
        ``upper=True``, as in torch. Leading dimensions are a batch; any dimension may be zero.
    upper : bool, optional
        Whether to give back ``U`` with ``A = U^T U`` in place of L, as in torch; ``scipy.linalg.cholesky``
        does so by default.
    accuracy : {"fp16", "bf16", "tf32", "fp32", "fp64"}, dtype or float, optional
        Accuracy of the result; by default that of A's dtype. A number is the largest residual, relative to A,
        that will do: the cheapest format with which it is certified is taken.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine, optional
        What multiplies. ``"auto"`` goes by the device of A.
    strict : bool, optional
        Raise an :class:`~neula.pipeline.result.AccuracyError` where there would be a warning.
    progress : callable or bool, optional
        Called with the name of the stage and the part of it that is done; True shows a bar.

    Returns
    -------
    CholeskyResult
        The factor as ``L`` (and, transposed, as ``U``), with its residual.

    Raises
    ------
    numpy.linalg.LinAlgError
        If A is not positive definite as far as double precision can tell: the message has the order of the
        first leading minor that is not positive, and of a batch says which matrix.
    ValueError
        If A is not square, or the triangle that is read has NaN or Inf; for unknown names.
    TypeError
        For complex or sparse input.
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
    Rows and columns are scaled alike, by powers of two, to a diagonal near one; that rounds nothing, and the
    residual is measured so. Of a matrix that is nearly singular rounding errors decide whether it counts as
    positive definite, as in LAPACK.

    L of a torch tensor that requires a gradient has one, of first and higher order; like that of torch it is
    symmetric.

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
    """
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
        raise ValueError(f"A must be square, got {given.shape[-2]} x {n}: neula.qr factorizes any matrix")
    options = Options(call.target, call.engine, progress)
    with call.computing():
        matrices = call.matrices()
        run = _factorize(matrices.mT if upper else matrices, given, options, upper=upper)
    return _collect(call, options, run, upper=upper)


def _factorize(
    lower: torch.Tensor, given: torch.Tensor, options: Options, *, upper: bool
) -> Run[CholeskyValues]:
    n = lower.shape[-1]
    if 0 in lower.shape:
        return _nothing_to_do(lower)
    try:
        judge = CholeskyJudge.of(n, options)
        run = run_chain(chain(len(lower), n, options), Symmetric.of(lower, options), judge)
    except NotDefiniteMember as error:
        _check_triangle(given, upper=upper)
        where = np.unravel_index(error.place, given.shape[:-2])
        which = f"A[{', '.join(map(str, where))}] of the batch" if given.ndim > 2 else "A"
        raise np.linalg.LinAlgError(f"{which} is not positive definite: {error}") from None
    if not run.accepted.all():
        _check_triangle(given, upper=upper)
    return run


def _check_triangle(given: torch.Tensor, *, upper: bool) -> None:
    """Refuse NaN and Inf in what is read."""
    read = given.triu() if upper else given.tril()
    check_finite(read, read, "A")


def _nothing_to_do(lower: torch.Tensor) -> Run[CholeskyValues]:
    """No matrices, or matrices without elements."""
    count = len(lower)
    measures = torch.zeros(count, 2, dtype=torch.float64, device=lower.device)
    run = Run.begin(count, CholeskyValues(lower.clone(), measures[:, 0].int(), measures))
    run.numbers, run.accepted[:] = np.zeros((3, count)), True
    run.attempts.append(Attempt("nothing to do", True, f"A is {tuple(lower.shape[1:])}, {count} times"))
    return run


def _collect(call: Call, options: Options, run: Run[CholeskyValues], *, upper: bool) -> CholeskyResult:
    """What the user gets, attached to the graph of A; says so where the accuracy was not reached."""
    given = call.first.tensor
    batch, n = given.shape[:-2], given.shape[-1]
    lower = run.found.lower.reshape(given.shape)
    if call.differentiable:
        graph = call.first.graph
        lower = attach_cholesky(graph.mT if upper else graph, lower)
    found = residuals(run.numbers)
    worst = found.max(initial=0.0)

    def of_members(x: np.ndarray) -> Any:
        known = torch.from_numpy(np.ascontiguousarray(x)).reshape(batch)
        return call.give_back(known, known.dtype)

    result = CholeskyResult(
        factor=call.give_back(lower.mT if upper else lower),
        upper=upper,
        converged=bool(run.accepted.all()),
        residual=float(worst),
        bound=CholeskyJudge.of(max(n, 1), options).bound,
        residuals=of_members(found),
        accepted=of_members(run.accepted),
        attempts=tuple(run.attempts),
        engine=str(options.engine),
        accuracy=options.target.name,
        seconds=call.seconds,
    )
    if not result.converged:
        missed = np.argwhere(~run.accepted.reshape(batch)).tolist()
        call.report_missed(
            f"the Cholesky factorization is not certified to {result.accuracy} accuracy",
            f"residual {result.residual:.1e}, asked for {result.bound:.1e} ({run.label})",
            result,
            missed,
        )
    return result
