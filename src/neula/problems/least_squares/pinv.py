"""Pseudoinverses: least squares with the identity on the right-hand side."""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack, overload

import torch

from neula.certificates.bounds import Accuracy, lstsq_bound_of
from neula.engines import Engine
from neula.errors import part_of_one
from neula.pipeline.call import Call
from neula.pipeline.gradients import attach_solution
from neula.pipeline.inputs import check_finite, check_matrices
from neula.pipeline.operators import with_operator
from neula.pipeline.plans import Plans
from neula.pipeline.progress import Progress
from neula.pipeline.solutions import no_digits, numbers_of
from neula.problems.least_squares.by_core import takes, takes_right
from neula.problems.least_squares.problem import LeastSquaresOptions, LeastSquaresProblems
from neula.problems.least_squares.run import InversePlan, solve_problems, with_exact_zeros
from neula.problems.operators.solutions import traced_pinv
from neula.problems.orthogonal.qr import qr
from neula.problems.signatures import Array, ArrayLike, Common, Kind


@overload
def pinv(A: Kind, rcond: float | None = ..., **keywords: Unpack[Common]) -> Kind: ...
@overload
def pinv(A: Any, rcond: float | None = ..., **keywords: Unpack[Common]) -> Any: ...
@with_operator(traced_pinv, Plans(lambda A, **keywords: _plan(A, **keywords), operands=1))
def pinv(
    A: ArrayLike,
    rcond: float | None = None,
    *,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | None = None,
) -> Array:
    """Moore-Penrose pseudoinverse of A, certified as a least-squares solution for every column (row, if A is
    tall).

    Parameters
    ----------
    A : array_like, shape (..., m, n)
        NumPy array, torch tensor or DLPack object, float16 to float64, complex64 or complex128; integers
        are taken as float64. Not modified. Leading dimensions are a batch. Every dimension may be zero.
    rcond : float, optional
        Singular values of A below ``rcond`` times the largest count as zero, where the rows of a tall A, or
        the columns of any other, are first divided by their norms: the rank does not depend on their units.
        By default as for :func:`lstsq`.
    accuracy : {"fp16", "bf16", "tf32", "fp32", "fp64"}, dtype or float, optional
        Accuracy of the result; by default that of A's dtype. A number is the largest acceptable backward
        error; the cheapest sufficient format is used.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine, optional
        The engine that multiplies matrices. ``"auto"`` chooses it by the device of A.
    strict : bool, optional
        Raise an :class:`~neula.pipeline.result.AccuracyError` instead of a warning, and reject NaN and Inf in
        batches.
    progress : callable or bool, optional
        Called with the name of the stage and the completed fraction; True shows a progress bar.

    Returns
    -------
    array, shape (..., n, m)
        NaN where a matrix of a batch holds NaN or Inf.

    Raises
    ------
    ValueError
        For NaN or Inf in a single matrix, for an ``rcond`` that is out of range, for fewer than two
        dimensions, and for unknown names.
    TypeError
        For sparse or masked input.
    OverflowError
        If the result overflows the dtype of A.
    AccuracyError
        If the accuracy was not reached and ``strict`` is set; its ``result`` is the best that was found.

    Warns
    -----
    AccuracyWarning
        If the accuracy was not reached.
    IllConditionedWarning
        If no digit of a column (of a row, if A is tall) is guaranteed, or the rank is ambiguous.

    See Also
    --------
    lstsq : ``A^+ b`` without the pseudoinverse, in a fraction of the time.
    numpy.linalg.pinv, torch.linalg.pinv : by the SVD of A, with singular values of A as it is given.

    Notes
    -----
    For a wide or square A, X is the matrix of smallest norm that minimizes ``||A X - I||``; for a tall A, the
    transpose of the pseudoinverse of ``A^T``. X is differentiable if A is a torch tensor; the backward pass
    raises a ValueError if A lacks full rank, since the pseudoinverse is not continuous there ([1]_).

    References
    ----------
    .. [1] G. H. Golub, V. Pereyra, "The differentiation of pseudo-inverses and nonlinear least squares
       problems whose variables separate", SIAM J. Numer. Anal. 10, 1973.

    Examples
    --------
    >>> import numpy as np, neula
    >>> A = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    >>> X = neula.pinv(A)
    >>> bool(np.abs(X @ A - np.eye(2)).max() < 1e-14), bool(np.abs(A @ X - (A @ X).T).max() < 1e-14)
    (True, True)
    >>> neula.pinv(np.outer([1.0, 2.0], [1.0, 1.0])).round(12)
    array([[0.1, 0.2],
           [0.1, 0.2]])
    """
    call, options = _asked(A, rcond, accuracy=accuracy, engine=engine, strict=strict, progress=progress)
    a = call.first.tensor
    batch, tall = a.shape[:-2], a.shape[-2] > a.shape[-1]
    matrices = call.matrices()
    k = min(a.shape[-2:])
    identity = torch.eye(k, dtype=a.dtype, device=matrices.device).expand(len(matrices), k, k)
    with call.computing():
        if not batch and a.numel() > 0:
            check_finite(matrices[0], options.engine.column_max(matrices[0]), "A")
        problems = LeastSquaresProblems(matrices.mT if tall else matrices, identity, options)
        run = with_exact_zeros(solve_problems(problems, is_batch=bool(batch)), problems)
    if bool(torch.isinf(run.found.x).any()):
        raise OverflowError(f"the pseudoinverse does not fit {options.dtype}: scale A up")
    x = (run.found.x.mT if tall else run.found.x).reshape(*batch, a.shape[-1], a.shape[-2])
    answer = call.give_back(x.contiguous())
    if not run.accepted.all():
        call.report_missed(
            f"the pseudoinverse is not certified to {call.target.name} accuracy",
            run.attempts[-1].reason,
            answer,
            (~torch.from_numpy(run.accepted)).reshape(batch).nonzero().tolist(),
            no_digits=no_digits(run),
        )
    if not call.differentiable or a.numel() == 0:
        return answer
    ranks = torch.from_numpy(numbers_of(run)["rank"]).nan_to_num(0.0).long().reshape(batch)
    graph, eye = call.first.graph, identity.reshape(*batch, *identity.shape[-2:]).to(a.device)
    factorize = partial(qr, accuracy="fp64", engine=options.engine)
    attached = attach_solution(
        graph.mT if tall else graph, eye, answer.mT if tall else answer, ranks=ranks, factorize=factorize
    )
    return attached.mT if tall else attached


def _asked(
    A: Any, rcond: float | None = None, *, progress: Progress | None = None, **asked: Any
) -> tuple[Call, LeastSquaresOptions]:
    """Check the arguments of :func:`pinv`."""
    asked = {"engine": "auto", **asked}
    call = Call.begin({"A": A}, bound=lstsq_bound_of, gradients=True, **asked)
    a = call.first.tensor
    check_matrices(a, "A")
    call = call.by_host(asked["engine"], gradients=False)
    known = call, a.dtype, a.shape, part_of_one("rcond", rcond)
    options = LeastSquaresOptions.of_call(*known, max_iterations=60, progress=progress)
    return call, options


def _plan(A: Any, **keywords: Any) -> InversePlan | None:
    """Plan for one matrix of the core."""
    call, options = _asked(A, **keywords)
    if call.first.tensor.ndim != 2:
        return None
    m, n = call.first.tensor.shape
    few, many = sorted((m, n))
    by_core = few > 0 and takes_right(few, few, many, options) and takes(few, many, options)
    return InversePlan(m, n, options) if by_core else None
