"""Eigenvalues and eigenvectors of Hermitian matrices: check the input, decompose, return."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, Unpack, overload

import torch

from neula.algorithms.scaling import power_of_two_scales
from neula.certificates.bounds import Accuracy
from neula.certificates.spectra import SpectralBounds, SpectralErrors
from neula.engines import Engine
from neula.engines.formats import in_double
from neula.errors import check_name
from neula.kernels.cholesky.symmetric import hermitian_from_lower
from neula.kernels.magnitudes import largest_magnitude
from neula.kernels.polar.svd import converged_eigvalsh
from neula.pipeline.call import Call
from neula.pipeline.gradients import attach_eigenvectors, attach_pencil
from neula.pipeline.inputs import check_matrices
from neula.pipeline.operators import with_operator
from neula.pipeline.plans import Plans
from neula.pipeline.progress import Progress
from neula.pipeline.result import EighResult
from neula.problems.operators.spectra import traced_eigh
from neula.problems.signatures import Array, ArrayLike, EighKeywords, EigvalshKeywords, Kind
from neula.problems.spectra.decompose import Decomposed, SpectralPlan, decompose, worst
from neula.problems.spectra.pencil import decompose_pencil
from neula.problems.spectra.problem import SpectralOptions

ALGORITHMS = ("divide",)
CERTIFIED = ("a priori", "measured")

Number = TypeVar("Number", int, float)


@overload
def eigh(A: Kind, B: Any = ..., **keywords: Unpack[EighKeywords]) -> EighResult[Kind]: ...
@overload
def eigh(A: Any, B: Any = ..., **keywords: Unpack[EighKeywords]) -> EighResult[Any]: ...
@with_operator(traced_eigh, Plans(lambda A, **keywords: _plan(A, **keywords), operands=1, copied=1 << 22))
def eigh(
    A: ArrayLike,
    B: ArrayLike | None = None,
    *,
    upper: bool = False,
    eigvals_only: bool = False,
    subset_by_index: tuple[int, int] | None = None,
    subset_by_value: tuple[float, float] | None = None,
    algorithm: str | None = None,
    certify: str | None = None,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | None = None,
) -> EighResult:
    """Eigenvalues and eigenvectors of a symmetric or Hermitian matrix, ``A V = V diag(w)``, with error
    bounds.

    Returns ascending eigenvalues with a bound on the error of each, orthonormal eigenvectors, and which of
    these are too close to be distinguished. With B the generalized problem ``A V = B V diag(w)`` is solved.

    Parameters
    ----------
    A : array_like, shape (..., n, n)
        Symmetric or Hermitian: NumPy array, torch tensor or DLPack object, float16 to float64, complex64,
        complex128; integers are taken as float64. Not modified. Only the lower triangle is read, or the upper
        one with ``upper=True``, and of the diagonal its real part. Leading dimensions are a batch; any
        dimension may be zero.
    B : array_like, shape (..., n, n), optional
        Hermitian positive definite, the same triangle of which is read. The eigenvectors are then orthonormal
        in its inner product, ``V^H B V = I``.
    upper : bool, optional
        Whether the upper triangles are read.
    eigvals_only : bool, optional
        Compute no eigenvectors, which takes less time. Bounds on errors are then *a priori*: they follow
        from the backward stability of the algorithm; that trace and norm of A agree is measured.
    subset_by_index : (int, int), optional
        Only the eigenvalues from the first to the second index, inclusive, as in SciPy.
    subset_by_value : (float, float), optional
        Only the eigenvalues in the half-open interval ``(lowest, highest]``, of a single matrix, as in SciPy.
    algorithm : {"divide"}, optional
        Force spectral divide and conquer by matrix products, without a fallback, of A without B.
    certify : {"a priori", "measured"}, optional
        ``"measured"`` computes eigenvectors for the bounds on errors even if ``eigvals_only``.
    accuracy : {"fp16", "bf16", "tf32", "fp32", "fp64"}, dtype or float, optional
        Accuracy of the result; by default that of A's dtype. A number is the largest acceptable residual,
        relative to A.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine, optional
        The engine that multiplies matrices. ``"auto"`` chooses it by the device of A.
    strict : bool, optional
        Raise an :class:`~neula.pipeline.result.AccuracyError` instead of a warning, and reject NaN and Inf in
        batches.
    progress : callable or bool, optional
        Called with the name of the stage and the completed fraction; True shows a progress bar.

    Returns
    -------
    EighResult
        Unpacks into ``eigenvalues, eigenvectors``; has ``errors``, ``clusters``, ``gaps`` and
        ``vector_errors``.

    Raises
    ------
    ValueError
        If A is not square, or a single matrix has NaN or Inf; for unknown names and subsets out of range.
        Matrices of a batch with NaN or Inf are no error unless ``strict`` or with B: their results are NaN,
        and not accepted.
    numpy.linalg.LinAlgError
        If B is not positive definite.
    TypeError
        For sparse or masked input.
    OverflowError
        If an eigenvalue overflows the dtype of A.
    AccuracyError
        If the accuracy was not reached and ``strict`` is set.

    Warns
    -----
    AccuracyWarning
        If no attempt met the accuracy.

    See Also
    --------
    eigvalsh : the eigenvalues as an array.
    svd : singular values of any matrix.
    fractional_matrix_power : powers of definite matrices.

    Notes
    -----
    Residual and orthogonality of the computed eigenvectors are measured. They bound the change of A whose
    exact eigenvalues these are, and by Weyl's theorem the error of each eigenvalue; where gaps allow, the
    theorem of Kato and Temple has a sharper bound. Sines of angles between subspaces are bounded as by Davis
    and Kahan ([1]_, chapter 11).

    On a GPU batches of matrices, and large ones, are divided into invariant subspaces by products in half
    precision ([2]_), and errors are squared by corrections until rounding errors alone are left ([3]_).

    Of a part of the spectrum the position of an eigenvalue rests on the backward stability of LAPACK's
    bisection: "a priori".

    A torch tensor has gradients, in both modes and of any order. Eigenvalues that are equal up to their
    errors have no eigenvectors of their own: there gradients are finite if the loss depends on their subspace
    alone and not on the eigenvalues (a projector), and NaN otherwise. :func:`fractional_matrix_power` has
    gradients everywhere.

    References
    ----------
    .. [1] B. N. Parlett, "The Symmetric Eigenvalue Problem", SIAM, 1998.
    .. [2] Y. Nakatsukasa, N. J. Higham, "Stable and efficient spectral divide and conquer algorithms for the
       symmetric eigenvalue decomposition and the SVD", SIAM J. Sci. Comput. 35, 2013.
    .. [3] T. Ogita, K. Aishima, "Iterative refinement for symmetric eigenvalue decomposition", Japan J.
       Indust. Appl. Math. 35, 2018.

    Examples
    --------
    >>> import numpy as np, neula
    >>> w, V = neula.eigh(np.array([[2.0, 1.0], [1.0, 2.0]]))
    >>> w.round(12)
    array([1., 3.])
    >>> result = neula.eigh(np.diag([1.0, 2.0, 2.0, 5.0]), subset_by_index=(1, 3))
    >>> result.clusters, result.gaps.round(12)
    (array([0, 0, 1]), array([1., 1., 3.]))
    >>> bool((result.errors < 1e-13).all())
    True
    """
    operands = {"A": A} if B is None else {"A": A, "B": B}
    call = begin(operands, accuracy=accuracy, engine=engine, strict=strict)
    given = call.first.tensor
    check_name("certify", certify, CERTIFIED, optional=True)
    check_name("algorithm", algorithm, ALGORITHMS, optional=True)
    n = given.shape[-1]
    if subset_by_index is not None and subset_by_value is not None:
        raise ValueError("give subset_by_index or subset_by_value, not both")
    if B is not None and algorithm is not None:
        raise ValueError(f"algorithm={algorithm!r} is for A without B")
    whole = algorithm is not None or call.differentiable
    vectors = not eigvals_only or certify == "measured" or whole
    wanted = indices(subset_by_index, n)
    interval = None if subset_by_value is None else _interval(subset_by_value, given)
    options = SpectralOptions(
        call.target, call.engine, symmetric=True, vectors=vectors, algorithm=algorithm, progress=progress
    )
    with call.computing():
        if B is None:
            matrices = call.matrices()
            matrices = matrices.mH if upper else matrices
            if interval is not None:
                wanted = _in_interval(matrices[0], *interval)
            part = _of_part(options, wanted, n, whole=whole)
            found = decompose(call, matrices, part, upper=upper)
        else:
            found = decompose_pencil(call, options, upper=upper)
            if interval is not None:
                wanted = _between(found.values[0], *interval)
    return _collect(call, found, wanted, upper=upper, keep=not eigvals_only)


@overload
def eigvalsh(A: Kind, B: Any = ..., **keywords: Unpack[EigvalshKeywords]) -> Kind: ...
@overload
def eigvalsh(A: Any, B: Any = ..., **keywords: Unpack[EigvalshKeywords]) -> Any: ...
def eigvalsh(
    A: ArrayLike,
    B: ArrayLike | None = None,
    *,
    upper: bool = False,
    subset_by_index: tuple[int, int] | None = None,
    subset_by_value: tuple[float, float] | None = None,
    certify: str | None = None,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | bool | None = None,
) -> Array:
    """Ascending eigenvalues of a symmetric or Hermitian matrix: ``eigh(..., eigvals_only=True)`` as an array.

    Parameters
    ----------
    A : array_like, shape (..., n, n)
    B : array_like, shape (..., n, n), optional
    upper, subset_by_index, subset_by_value, certify, accuracy, engine, strict, progress : optional
        As for :func:`eigh`, which also returns bounds on their errors.

    Returns
    -------
    array, shape (..., k)

    Raises
    ------
    ValueError, TypeError, numpy.linalg.LinAlgError, OverflowError, AccuracyError
        As :func:`eigh`.

    Examples
    --------
    >>> import numpy as np, neula
    >>> neula.eigvalsh(np.array([[2.0, 1.0], [1.0, 2.0]])).round(12)
    array([1., 3.])
    """
    asked: Any = {"upper": upper, "certify": certify, "accuracy": accuracy, "engine": engine}
    asked |= {"subset_by_index": subset_by_index, "subset_by_value": subset_by_value}
    asked |= {"strict": strict, "progress": progress}
    return eigh(*(A, B)[: 1 if B is None else 2], eigvals_only=True, **asked).eigenvalues


def _plan(
    A: Any,
    *,
    upper: bool = False,
    eigvals_only: bool = False,
    certify: str | None = None,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    **others: Any,
) -> SpectralPlan | None:
    """Plan for a single matrix on a CPU, all of whose eigenvalues are asked for."""
    if any(x is not None for x in others.values()):
        return None
    call = begin({"A": A}, accuracy=accuracy, engine=engine, gradients=False)
    check_name("certify", certify, CERTIFIED, optional=True)
    a, vectors = call.first.tensor, not eigvals_only
    if eigvals_only and certify == "measured":
        return None
    options = SpectralOptions(call.target, call.engine, symmetric=True, vectors=vectors)
    return SpectralPlan.for_matrix(a, options, upper=upper)


def begin(
    operands: Mapping[str, Any],
    *,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    gradients: bool = True,
) -> Call:
    """Begin a call with square matrices.

    Raises ValueError for other matrices.
    """
    call = Call.begin(
        operands, engine=engine, accuracy=accuracy, bound=_bound, strict=strict, gradients=gradients
    )
    for name, taken in call.operands.items():
        check_matrices(taken.tensor, name)
        m, n = taken.tensor.shape[-2:]
        if m != n:
            raise ValueError(f"{name} must be square, got {m} x {n}; use neula.svd for other shapes")
    return call.by_host(engine, gradients=False)


def _bound(target: Any, shape: tuple[int, ...]) -> float:
    return SpectralBounds.for_order(target, shape[-1] if shape else 1, symmetric=True).residual


def indices(subset: Any, n: int) -> tuple[int, int] | None:
    """Indices of the first and the last eigenvalue; None for all."""
    if subset is None:
        return None
    first, last = _pair("subset_by_index", subset, operator.index, "indices")
    if not 0 <= first <= last < n:
        raise ValueError(
            f"subset_by_index must be (first, last) with 0 <= first <= last < {n}, got ({first}, {last})"
        )
    return first, last


def _pair(name: str, subset: Any, read: Callable[[Any], Number], kind: str) -> tuple[Number, Number]:
    try:
        first, last = map(read, subset)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be two {kind}, (first, last), got {subset!r}") from None
    return first, last


def _interval(subset: Any, given: torch.Tensor) -> tuple[float, float]:
    low, high = _pair("subset_by_value", subset, float, "numbers")
    if given.ndim != 2:
        raise ValueError("subset_by_value is for a single matrix: use subset_by_index for a batch")
    if not low < high:
        raise ValueError(
            f"subset_by_value must be (lowest, highest), the first below the second, got {subset}"
        )
    return low, high


def _in_interval(matrix: torch.Tensor, low: float, high: float) -> tuple[int, int]:
    """Indices of the eigenvalues in an interval; the second is the smaller one if there are none."""
    read = hermitian_from_lower(matrix.to(torch.promote_types(matrix.dtype, torch.float32)))
    if not len(read) or not bool(read.isfinite().all()):
        return 0, len(read) - 1
    scale = power_of_two_scales(largest_magnitude(read, (0, 1)))
    return _between(in_double(converged_eigvalsh(read * scale)), low * float(scale), high * float(scale))


def _between(values: torch.Tensor, low: float, high: float) -> tuple[int, int]:
    below, within = (int((values <= end).sum()) for end in (low, high))
    return below, within - 1


def _of_part(
    options: SpectralOptions, wanted: tuple[int, int] | None, n: int, *, whole: bool
) -> SpectralOptions:
    """Options for the eigenvalues that are wanted and one more at each end, to which there are gaps."""
    if wanted is None or whole or wanted[0] > wanted[1]:
        return options
    return replace(options, part=(max(wanted[0] - 1, 0), min(wanted[1] + 1, n - 1)))


def _collect(
    call: Call, found: Decomposed, wanted: tuple[int, int] | None, *, upper: bool, keep: bool
) -> EighResult:
    """The result with its gradient and warnings."""
    given, run, options = call.first.tensor, found.run, found.options
    batch, dtype = given.shape[:-2], call.dtype.to_real()
    part = options.part
    kept = slice(None)
    if wanted is not None:
        computed = run.found.s.shape[1]
        begun = part[0] if part is not None and computed < given.shape[-1] else 0
        kept = slice(wanted[0] - begun, wanted[1] + 1 - begun)
    values, vectors = found.values, found.v if options.vectors else None
    values = values.reshape(*batch, values.shape[-1])
    if vectors is not None:
        vectors = vectors.reshape(*batch, *vectors.shape[1:])
    if call.differentiable:
        assert vectors is not None
        graphs = [x.graph.mH if upper else x.graph for x in call.operands.values()]
        bounds = found.errors(dtype).errors.reshape(values.shape)
        if len(graphs) == 1:
            values, vectors = attach_eigenvectors(graphs[0], values, vectors, errors=bounds)
        else:
            values, vectors = attach_pencil(graphs[0], graphs[1], values, vectors, errors=bounds)

    residuals, orthogonalities = run.numbers
    result: EighResult[Any] = EighResult(
        eigenvalues=call.give_back(values[..., kept], dtype),
        eigenvectors=call.give_back(vectors[..., kept], call.dtype) if keep and vectors is not None else None,
        evidence="measured" if options.vectors else "a priori",
        residual=worst(residuals),
        orthogonality=worst(orthogonalities),
        residual_bound=found.judge.bounds.residual,
        orthogonality_bound=found.judge.bounds.orthogonality,
        residuals=call.of_members(residuals),
        orthogonalities=call.of_members(orthogonalities),
        **found.error_fields(call, partial(_part_of, kept=kept)),
        **found.common_fields(call),
    )
    found.report(call, "the eigenvalues", result)
    return result


def _part_of(errors: SpectralErrors, kept: slice) -> SpectralErrors:
    """Errors of some eigenvalues; no subspace is determined of a cluster of which only a part is kept."""
    clusters = errors.clusters
    outside = torch.ones_like(clusters)
    outside[:, kept] = 0
    cut = torch.zeros_like(clusters).scatter_reduce(1, clusters, outside, "amax").gather(1, clusters) > 0
    bounds = SpectralErrors(*(x[:, kept] for x in errors))
    sines = errors.vector_errors.masked_fill(cut, 1.0)[:, kept]
    return bounds._replace(clusters=bounds.clusters - bounds.clusters[:, :1], vector_errors=sines)
