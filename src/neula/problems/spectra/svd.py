"""Singular value decomposition: check the input, decompose, return."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Unpack, overload

import numpy as np
import torch

from neula.certificates.bounds import Accuracy
from neula.certificates.low_rank import SVDCertificate
from neula.certificates.spectra import SpectralBounds, lost_orthogonality
from neula.engines import Engine
from neula.errors import check_name
from neula.io.sources import is_source
from neula.pipeline.call import Call
from neula.pipeline.gradients import attach_triplets
from neula.pipeline.inputs import check_matrices, is_spread
from neula.pipeline.operators import with_operator
from neula.pipeline.plans import Plans
from neula.pipeline.progress import Progress
from neula.pipeline.result import SVDResult
from neula.pipeline.result.shown import Later
from neula.problems.low_rank.svd import svd_lowrank
from neula.problems.operators.spectra import traced_svd
from neula.problems.signatures import Array, ArrayLike, FullSVDKeywords, Kind, SvdvalsKeywords
from neula.problems.spectra.decompose import Decomposed, SpectralPlan, completed, decompose, worst
from neula.problems.spectra.eigh import CERTIFIED
from neula.problems.spectra.problem import SpectralOptions


@overload
def svd(A: Kind, **keywords: Unpack[FullSVDKeywords]) -> SVDResult[Kind]: ...
@overload
def svd(A: Any, **keywords: Unpack[FullSVDKeywords]) -> SVDResult[Any]: ...
@with_operator(traced_svd, Plans(lambda A, **keywords: _plan(A, **keywords), operands=1, copied=1 << 22))
def svd(
    A: ArrayLike,
    *,
    full_matrices: bool = True,
    compute_uv: bool = True,
    certify: str | None = None,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | None = None,
) -> SVDResult:
    """Singular value decomposition ``A = U diag(s) Vh``, with error bounds.

    Returns all singular values, descending, with a bound on the error of each, orthonormal singular vectors,
    and which of these are too close to be distinguished.

    Parameters
    ----------
    A : array_like, shape (..., m, n)
        NumPy array, torch tensor or DLPack object, float16 to float64, complex64, complex128; integers are
        taken as float64. Not modified. Leading dimensions are a batch; any dimension may be zero. Or, with
        ``full_matrices=False``, a matrix whose rows are distributed over processes, or one that is larger
        than memory, as for :func:`svd_lowrank`, which then factorizes it.
    full_matrices : bool, optional
        Whether U and Vh are square, as in NumPy, SciPy and torch; otherwise they have ``min(m, n)`` columns
        and rows.
    compute_uv : bool, optional
        False computes singular values only, which takes less time. Bounds on errors are then *a
        priori*: they follow from the backward stability of the algorithm; that the norm of A agrees is
        measured.
    certify : {"a priori", "measured"}, optional
        ``"measured"`` computes vectors for the bounds on errors even without ``compute_uv``.
    accuracy, engine, strict, progress : optional
        As for :func:`eigh`.

    Returns
    -------
    SVDResult
        Unpacks into ``U, s, Vh``; has ``errors``, ``clusters``, ``gaps`` and ``vector_errors``.

    Raises
    ------
    ValueError
        If a single matrix has NaN or Inf; for unknown names; for a gradient with ``full_matrices`` of a
        matrix that is not square. Matrices of a batch with NaN or Inf are no error unless ``strict``: their
        results are NaN, and not accepted.
    TypeError
        For sparse or masked input.
    OverflowError
        If a singular value overflows the dtype of A.
    AccuracyError
        If the accuracy was not reached and ``strict`` is set.

    Warns
    -----
    AccuracyWarning
        If no attempt met the accuracy.

    See Also
    --------
    svdvals : the singular values as an array.
    svd_lowrank : the leading singular values and vectors, in less time.
    pinv, lstsq : what a decomposition is often computed for.

    Notes
    -----
    On a GPU the polar decomposition ``A = U H`` comes first, which takes products on matrix units alone, and
    the eigenvalues of H are computed ([1]_); of tall matrices those of R of a QR factorization. Residual and
    orthogonality of all vectors are measured, and bound errors as for :func:`eigh`; errors of small singular
    values are small relative to the norm of A, not relative to themselves.

    A torch tensor has gradients, in both modes and of any order, as for :func:`svd_lowrank`.

    References
    ----------
    .. [1] Y. Nakatsukasa, N. J. Higham, "Stable and efficient spectral divide and conquer algorithms for the
       symmetric eigenvalue decomposition and the SVD", SIAM J. Sci. Comput. 35, 2013.

    Examples
    --------
    >>> import numpy as np, neula
    >>> U, s, Vh = neula.svd(np.array([[0.0, 2.0], [3.0, 0.0], [0.0, 0.0]]))
    >>> U.shape, s.round(12), Vh.shape
    ((3, 3), array([3., 2.]), (2, 2))
    >>> result = neula.svd(np.diag([3.0, 1.0, 1.0]))
    >>> result.clusters, bool((result.errors < 1e-13).all())
    (array([0, 1, 1]), True)
    """
    check_name("certify", certify, CERTIFIED, optional=True)
    if is_source(A) or is_spread(A):
        if full_matrices and compute_uv:
            raise ValueError("A is in blocks or distributed over processes: pass full_matrices=False")
        asked: Any = {"accuracy": accuracy, "engine": engine, "strict": strict, "progress": progress}
        found: SVDResult[Any] = svd_lowrank(A, **asked)
        return found if compute_uv else replace(found, U=None, Vh=None)
    call = Call.begin({"A": A}, engine=engine, accuracy=accuracy, bound=_bound, strict=strict, gradients=True)
    a = call.first.tensor
    check_matrices(a, "A")
    wide = a.shape[-2] < a.shape[-1]
    if call.differentiable and full_matrices and compute_uv and a.shape[-2] != a.shape[-1]:
        raise ValueError(
            f"A of shape {tuple(a.shape)} requires a gradient, and vectors beyond its rank have none: pass "
            "full_matrices=False"
        )
    call = call.by_host(engine, gradients=False)
    vectors = compute_uv or certify == "measured" or call.differentiable
    options = SpectralOptions(call.target, call.engine, symmetric=False, vectors=vectors, progress=progress)
    with call.computing():
        matrices = call.matrices()
        decomposed = decompose(call, matrices.mH if wide else matrices, options)
    return _collect(call, decomposed, wide=wide, full=full_matrices, keep=compute_uv)


@overload
def svdvals(A: Kind, **keywords: Unpack[SvdvalsKeywords]) -> Kind: ...
@overload
def svdvals(A: Any, **keywords: Unpack[SvdvalsKeywords]) -> Any: ...
def svdvals(
    A: ArrayLike,
    *,
    certify: str | None = None,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | bool | None = None,
) -> Array:
    """Descending singular values: ``svd(..., compute_uv=False)`` as an array.

    Parameters
    ----------
    A : array_like, shape (..., m, n)
    certify, accuracy, engine, strict, progress : optional
        As for :func:`svd`, which also returns bounds on their errors.

    Returns
    -------
    array, shape (..., min(m, n))

    Raises
    ------
    ValueError, TypeError, OverflowError, AccuracyError
        As :func:`svd`.

    Examples
    --------
    >>> import numpy as np, neula
    >>> neula.svdvals(np.array([[0.0, 2.0], [3.0, 0.0]])).round(12)
    array([3., 2.])
    """
    asked: Any = {"certify": certify, "accuracy": accuracy, "engine": engine}
    return svd(A, compute_uv=False, **asked, strict=strict, progress=progress).s


def _plan(
    A: Any,
    *,
    full_matrices: bool = True,
    compute_uv: bool = True,
    certify: str | None = None,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
) -> SpectralPlan | None:
    """Plan for a single matrix on a CPU."""
    check_name("certify", certify, CERTIFIED, optional=True)
    call = Call.begin({"A": A}, engine=engine, accuracy=accuracy, bound=_bound).by_host(engine)
    a = call.first.tensor
    check_matrices(a, "A")
    if certify == "measured" and not compute_uv:
        return None
    options = SpectralOptions(call.target, call.engine, symmetric=False, vectors=compute_uv)
    return SpectralPlan.for_matrix(a, options, full=full_matrices and a.shape[0] != a.shape[-1])


def _bound(target: Any, shape: tuple[int, ...]) -> float:
    return SpectralBounds.for_order(target, min(shape[-2:], default=1), symmetric=False).residual


def _collect(call: Call, found: Decomposed, *, wide: bool, full: bool, keep: bool) -> SVDResult:
    """The result with its gradient and warnings."""
    given, run, options, bounds = call.first.tensor, found.run, found.options, found.judge.bounds
    batch, dtype = given.shape[:-2], call.dtype.to_real()

    def of_batch(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*batch, *x.shape[1:])

    s, u, v = of_batch(found.values), None, None
    if options.vectors:
        u, v = found.u, found.v
        if keep and full and not call.differentiable and u.shape[1] > u.shape[2]:
            with call.computing():
                u = completed(u)
                lost = lost_orthogonality(u, torch.promote_types(u.dtype, torch.float64)).cpu().numpy()
            limit = options.bounds(u.shape[1]).orthogonality
            run.numbers[1], run.accepted = np.maximum(run.numbers[1], lost), run.accepted & (lost <= limit)
        u, v = of_batch(u), of_batch(v)
    if call.differentiable:
        assert u is not None
        assert v is not None
        graph = call.first.graph
        bound = of_batch(found.errors(dtype).errors)
        u, s, v = attach_triplets(graph.mH if wide else graph, u, s, v, errors=bound)
    if wide:
        u, v = v, u

    def certificates() -> Any:
        numbers = zip(*run.numbers.tolist(), strict=True)
        made = [SVDCertificate(r, o, 0.0, bounds.residual, bounds.orthogonality) for r, o in numbers]
        return made[: math.prod(batch)] if batch else made[0]

    result: SVDResult[Any] = SVDResult(
        U=None if u is None or not keep else call.give_back(u, call.dtype),
        s=call.give_back(s, dtype),
        Vh=None if v is None or not keep else call.give_back(v.mH, call.dtype),
        relative_error=worst(run.numbers[0]),
        evidence="measured" if options.vectors else "a priori",
        certificate=Later(certificates),
        **found.error_fields(call),
        **found.common_fields(call),
    )
    found.report(call, "the singular values", result)
    return result
