"""Low-rank approximation: check the input, factorize, truncate, measure."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Unpack, overload

import numpy as np
import torch

from neula.algorithms.scaling import SAFE_NORMS
from neula.algorithms.spectra.qr_svd import truncate
from neula.certificates.bounds import Accuracy, measurement_error, target_format
from neula.certificates.low_rank import SVDCertificate, low_rank_error
from neula.engines import FP32, FP64, Engine, Format, format_of, select_engine
from neula.engines.complex import over
from neula.engines.formats import in_double, matching_dtype
from neula.engines.reduction import Reduction
from neula.errors import check_name, part_of_one
from neula.io.sources import is_source, row_blocks
from neula.kernels.magnitudes import largest_magnitude, two_norms
from neula.kernels.precision import exact_matmul, plain_arithmetic
from neula.kernels.shift import shift
from neula.pipeline.call import Call
from neula.pipeline.chain import Link, run_chain
from neula.pipeline.distributed import OverProcesses
from neula.pipeline.gradients import attach_triplets
from neula.pipeline.inputs import Taken, check_finite, check_matrices, flattened
from neula.pipeline.operators import eager
from neula.pipeline.progress import Progress
from neula.pipeline.result import Attempt, SVDResult
from neula.pipeline.result.shown import Later
from neula.pipeline.streaming import Reader, StreamTuning, torch_dtype
from neula.problems.low_rank.links import SVDTuning, chain
from neula.problems.low_rank.problem import SVDJudge, SVDOptions, SVDValues, TallMatrix
from neula.problems.low_rank.streamed import StreamedMatrix
from neula.problems.signatures import ArrayLike, Kind, SVDKeywords
from neula.problems.spectra.decompose import decompose, worst
from neula.problems.spectra.problem import SpectralOptions

ALGORITHMS = ("iteration", "gram-svd", "qr-svd")

CLEAR_REST = 1e-3
"""Part of ``||A||_F^2`` that is not approximated, above which it is known to three digits or more from the
norms of A and s: these err by ``sqrt(k) u`` or less."""

CLEAR_REMAINDER = 1e-5
"""Part of ``||A||_F`` above which an estimate in float32 does not consist of rounding errors."""

COARSE = 2.0**-14  # accuracies of this or more are reached in float32


@overload
def svd_lowrank(A: Kind, rank: int | None = ..., **keywords: Unpack[SVDKeywords]) -> SVDResult[Kind]: ...
@overload
def svd_lowrank(A: Any, rank: int | None = ..., **keywords: Unpack[SVDKeywords]) -> SVDResult[Any]: ...
@OverProcesses(
    lambda result, tall, replicated: replace(
        result,
        U=tall(result.U),
        s=replicated(result.s),
        Vh=replicated(result.Vh),
        errors=replicated(result.errors),
    )
)
@eager
def svd_lowrank(
    A: ArrayLike,
    rank: int | None = None,
    *,
    tol: float | None = None,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    algorithm: str | None = None,
    strict: bool = False,
    progress: Progress | None = None,
) -> SVDResult:
    """Best low-rank approximation ``A ~ U diag(s) Vh``: the leading singular values and vectors.

    Returns the triplets with bounds on the errors of the singular values. ``rank`` fixes their number,
    ``tol`` the error of the approximation.

    Parameters
    ----------
    A : array_like, shape (..., m, n)
        NumPy array, torch tensor or DLPack object, real or complex; not modified. Of a batch of small
        matrices all triplets are computed together, as in :func:`neula.svd`; larger ones are factorized one
        after another. Or a matrix whose rows are distributed over processes
        (:func:`neula.distributed.rows`), or one that is larger than memory, as for :func:`neula.lstsq`: it is
        read three times, and U, of as many rows, kept.
    rank : int, optional
        Number of singular triplets, from 1 to ``min(m, n)``; 0 of a matrix without elements.
    tol : float, optional
        Instead of ``rank``: the fewest for which ``||A - U diag(s) Vh||_F <= tol ||A||_F``. With neither,
        all of them. In a batch every matrix has as many as the one that needs most.
    accuracy : str, dtype or float, optional
        A format, as for :func:`neula.qr`: errors are small multiples of its unit roundoff,
        relative to ``||A||_F``. Or a number, the largest error of each singular value and its vectors as a
        part of that singular value, plus rounding errors relative to ``||A||_F``. ``1e-2`` leaves
        an approximation that is no worse than the best one in two or three digits, and takes a few products
        in half precision on a GPU.
    engine, strict, progress : optional
        As for :func:`neula.qr`.
    algorithm : {"iteration", "gram-svd", "qr-svd"}, optional
        Force this algorithm, without a fallback; the first two need a rank.

    Returns
    -------
    SVDResult
        Unpacks into ``U, s, Vh``. It holds bounds on the errors of the singular values (``errors``), the
        certificate, and the relative error of the approximation.

    Raises
    ------
    ValueError
        If both ``rank`` and ``tol`` are given, if one is out of range, for an accuracy that the dtype cannot
        hold, and as for :func:`neula.qr`.
    TypeError
        For sparse input.
    AccuracyError
        If the accuracy was not reached and ``strict`` is set.

    Warns
    -----
    AccuracyWarning
        If the accuracy was not reached.

    See Also
    --------
    torch.svd_lowrank : a given number of power iterations, without a check of the result.

    Notes
    -----
    Up to a quarter of the columns, ``rank`` triplets are computed by subspace iteration with a random block
    in the cheapest format: two products with A a step, four in total if there is a gap after the rank. It
    stops once the measured errors meet the accuracy. If this would take longer than the eigenvectors of the
    Gram matrix, these follow. All other cases, and triplets that neither method finds, take QR and the SVD of
    R.

    Subspace iteration begins as in [1]_ and continues with Chebyshev polynomials
    (:mod:`neula.algorithms.spectra.subspace_iteration`). It needs no copy of A except one in the low format.
    The triplets satisfy ``A V = U diag(s)``. They are accepted if the residual ``A^T U - V diag(s)`` is small
    enough and no larger singular value was missed, except with a probability of 1e-6: random vectors
    independent of the iteration bound the part of A outside the subspace
    (:func:`neula.certificates.low_rank.largest_beyond`). Singular values that do not decay near the rank take
    many products; a rank beyond the numerical rank costs no more than another.

    Gradients of a torch tensor, of any order and in both modes, are those of the exact triplets, not of the
    iterations. Those of U and Vh need singular values that differ from each other, and from the largest that
    is left out, by more than their errors, and are NaN elsewhere, also if the loss depends on the arbitrary
    phases of complex vectors; those of s always exist.

    The truncation error usually exceeds rounding errors by far; ``accuracy="fp16"``, or a number, then loses
    nothing ([2]_, table 4).

    References
    ----------
    .. [1] N. Halko, P. G. Martinsson, J. A. Tropp, "Finding structure with randomness: Probabilistic
       algorithms for constructing approximate matrix decompositions", SIAM Rev. 53, 2011.
    .. [2] S. Zhang, E. Baharlouei, P. Wu, "High Accuracy Matrix Computations on Neural Engines: A Study of QR
       Factorization and its Applications", HPDC 2020.

    Examples
    --------
    >>> import numpy as np, neula
    >>> A = np.outer(np.arange(1.0, 101.0), [3.0, 4.0, 0.0])
    >>> U, s, Vh = neula.svd_lowrank(A, tol=1e-8)
    >>> U.shape, bool(abs(s[0] - np.linalg.norm(A)) < 1e-9 * s[0])
    ((100, 1), True)
    >>> A = np.random.default_rng(0).standard_normal((500, 400)) * 0.9 ** np.arange(400)
    >>> result = neula.svd_lowrank(A, rank=5, accuracy=1e-2)
    >>> exact = np.linalg.svd(A, compute_uv=False)[:5]
    >>> result.converged, bool((abs(result.s - exact) <= result.errors).all())
    (True, True)
    >>> bool((result.errors < 0.01 * result.s).all())
    True
    """
    if is_source(A):
        return _of_source(A, rank, tol, accuracy, engine, algorithm, strict, progress)
    number = isinstance(accuracy, Real) and not isinstance(accuracy, bool)
    spread = isinstance(engine, Engine) and engine.over_rows.spread  # gradients would be sums over processes
    call = Call.begin(
        {"A": A}, engine=engine, accuracy=None if number else accuracy, strict=strict, gradients=not spread
    )
    check_matrices(call.first.tensor, "A")
    call = call.by_host(engine, gradients=False)
    a = call.first.tensor
    shape = (call.engine.over_rows.count(a.shape[-2]), a.shape[-1])
    _check_truncation(rank, tol, min(shape))
    check_name("algorithm", algorithm, ALGORITHMS, optional=True)
    if rank is None and algorithm not in (None, "qr-svd"):
        raise ValueError(f"algorithm={algorithm!r} needs a rank: give one, or take 'qr-svd'")
    options = _options(call, rank, tol, accuracy, algorithm, progress)
    if 0 in a.shape:
        return _of_nothing(call, options)
    with plain_arithmetic(a.device), call.computing():
        together = a.ndim > 2 and algorithm is None and not options.engine.over_rows.spread
        most = options.tuning[SVDTuning].triplets_together
        small = min(shape) <= most and max(shape) * min(shape) <= 3 * most**2
        found = _together(call, options) if together and small else _one_by_one(flattened(a), a, options)
    if bool((found.s > torch.finfo(a.dtype).max).any()):
        raise OverflowError(f"the singular values do not fit {a.dtype}: scale A down")
    return _result(call, options, found)


@dataclass(frozen=True)
class _Triplets:
    """Of all matrices of a batch, with what the judge reads of each."""

    u: torch.Tensor
    s: torch.Tensor
    v: torch.Tensor
    errors: torch.Tensor
    relative_error: float  # the largest
    numbers: np.ndarray
    judge: SVDJudge
    attempts: Sequence[Attempt]

    @classmethod
    def of_each(cls, found: Sequence[_Triplets]) -> _Triplets:
        """Those of single matrices together."""
        longest = max((each.attempts for each in found), key=len)
        u, s, v, errors = (
            torch.cat([getattr(each, name) for each in found]) for name in ("u", "s", "v", "errors")
        )
        error, numbers = max(each.relative_error for each in found), [each.numbers for each in found]
        return cls(u, s, v, errors, error, np.concatenate(numbers, 1), found[0].judge, longest)

    @property
    def accepted(self) -> np.ndarray:
        return self.judge.accept(self.numbers)

    def certificate(self, i: int) -> SVDCertificate:
        return self.judge.certificate(self.numbers[:, i : i + 1])


def _together(call: Call, options: SVDOptions) -> _Triplets:
    """The leading triplets of small matrices, of which all are computed at once."""
    given = call.matrices()
    wide = given.shape[1] < given.shape[2]
    tall = given.mH if wide else given
    asked = SpectralOptions(options.target, options.engine, symmetric=False, progress=options.progress)
    found = decompose(call, tall, asked)
    if not bool(found.usable.all()):
        check_finite(call.first.tensor, largest_magnitude(given, (1, 2)), "A")
    s, norms = in_double(found.run.found.s), in_double(found.run.found.size)
    k, units = truncate(s, options.rank, options.tol), torch.where(norms == 0, 1.0, norms)
    residual, lost = torch.from_numpy(found.run.numbers).to(norms)
    if k:
        weights = options.weights(s[:, :k], norms[:, None], *tall.shape[1:]) / units[:, None]
        residual = residual / weights.amin(1)
    numbers = torch.stack([residual, lost, torch.zeros_like(lost)]).cpu().numpy()
    errors = found.errors(torch.float64).errors
    u, s, v, errors = (x[..., :k].contiguous() for x in (found.u, found.values, found.v, errors))
    # The error of the approximation by U, s and V after they are rounded to the dtype of the result.
    kept = (in_double(x.to(matching_dtype(call.dtype.to_real(), x.dtype))) for x in (u, s, v))
    (left, sizes, right), scales = kept, -found.exponents[:, None, None]
    gap = shift(tall, scales) - exact_matmul(left * shift(sizes[:, None], scales), right.mH)
    error = worst((two_norms(gap, 1, 2) / units).cpu().numpy())
    judge = SVDJudge.for_shape(tall.shape[1], tall.shape[2], options)
    u, v = (v, u) if wide else (u, v)
    together = _Triplets(u, s, v, errors, error, numbers, judge, found.run.attempts)
    return _again(together, given, replace(options, rank=k, tol=None))


def _again(found: _Triplets, given: torch.Tensor, options: SVDOptions) -> _Triplets:
    """Triplets of matrices one by one where those of all were not accepted."""
    for place in np.flatnonzero(~found.accepted).tolist():
        alone = _of_matrix(given[place], given[place], options)
        if alone.accepted.all():
            for name in ("u", "s", "v", "errors"):
                getattr(found, name)[place] = getattr(alone, name)[0]
            found.numbers[:, place] = alone.numbers[:, 0]
            error = max(found.relative_error, alone.relative_error)
            found = replace(found, relative_error=error, attempts=[*found.attempts, *alone.attempts])
    return found


def _one_by_one(members: torch.Tensor, given: torch.Tensor, options: SVDOptions) -> _Triplets:
    found = [_of_matrix(member, given, options) for member in members]
    most = max(each.s.shape[1] for each in found)
    of_most = replace(options, rank=most, tol=None)
    for place, each in enumerate(found):
        if each.s.shape[1] < most:
            found[place] = _of_matrix(members[place], given, of_most)
    return _Triplets.of_each(found)


def _of_matrix(a: torch.Tensor, given: torch.Tensor, options: SVDOptions) -> _Triplets:
    """The triplets of a matrix, tall or wide, among those that were given."""
    transposed = options.shape_of(a.shape)[0] < a.shape[1]
    matrix, scale = _prepared(given, a.mH if transposed else a, options)
    m, n = options.shape_of(matrix.a.shape)
    judge = SVDJudge.for_shape(m, n, options)
    run = run_chain(chain(m, n, options), matrix, judge)
    found = run.found
    error = _relative_error(matrix, found.u[0], found.s[0], found.v[0], float(found.remainder[0]))
    u, v = (found.v, found.u) if transposed else (found.u, found.v)
    s, errors = _unscaled(found, scale)
    return _Triplets(u, s, v, errors, error, run.numbers, judge, run.attempts)


def _unscaled(found: SVDValues, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Singular values in the units of A, and bounds on their errors, also where these are subnormal."""
    s = found.s / scale
    errors = found.errors + (s * scale - found.s).abs()
    bounds = errors / scale
    return s, torch.where(
        bounds * scale < errors, torch.nextafter(bounds, torch.full_like(bounds, math.inf)), bounds
    )


def _options(
    call: Call,
    rank: int | None,
    tol: float | None,
    accuracy: Any,
    algorithm: str | None,
    progress: Progress | None,
) -> SVDOptions:
    target, part = _of_number(accuracy, call.dtype) if isinstance(accuracy, Real) else (call.target, None)
    # Not an unsigned rank, of which there is no -rank.
    whole = None if rank is None else operator.index(rank)
    return SVDOptions(target, call.engine, part, whole, part_of_one("tol", tol), algorithm, progress=progress)


def _of_source(
    A: Any,
    rank: int | None,
    tol: float | None,
    accuracy: Any,
    engine: str | Engine,
    algorithm: str | None,
    strict: bool,
    progress: Progress | None,
) -> SVDResult:
    source = row_blocks(A)
    if len(source.shape) != 2 or 0 in source.shape:
        raise ValueError(
            f"A must be one matrix with rows and columns, and its source has shape {source.shape}"
        )
    if algorithm is not None:
        raise ValueError(f"algorithm={algorithm!r} needs A in memory: leave it out, or load A first")
    _check_truncation(rank, tol, min(source.shape))
    dtype = torch_dtype(source.dtype, "A", or_complex=True)
    number = isinstance(accuracy, Real) and not isinstance(accuracy, bool)
    target = target_format(None if number else accuracy, dtype)
    taken = Taken.without_numbers(source.shape, dtype, torch.Tensor.numpy)
    chosen = over(select_engine(engine, taken.tensor.device), dtype)
    call = Call({"A": taken}, chosen, dtype, target, strict)
    options = _options(call, rank, tol, accuracy, None, progress)
    m, n = source.shape
    rows = max(call.engine.tuning[StreamTuning].streamed_bytes // (8 * n), n)
    matrix = StreamedMatrix(Reader({"A": source}, call.engine.device, rows, progress), n, options)
    with call.computing():
        judge = SVDJudge.for_shape(max(m, n), min(m, n), options)
        # Errors of R are measured in the Frobenius norm, to which all of its columns contribute.
        rounding = 0.0 if options.part else 4 * measurement_error(n, options.work.dtype)
        judge = replace(judge, bound=judge.bound + rounding)
        run = run_chain([Link("in passes", matrix.triplets)], matrix, judge)
        found, scale = run.found, matrix.scale
        s, errors = _unscaled(found, scale)
    error = matrix.relative_error
    one = _Triplets(found.u, s, found.v, errors, error, run.numbers, judge, run.attempts)
    return replace(_result(call, options, one), passes=matrix.reader.passes)


def _result(call: Call, options: SVDOptions, found: _Triplets) -> SVDResult:
    batch = call.first.tensor.shape[:-2]
    count = math.prod(batch)

    def of_batch(x: torch.Tensor) -> torch.Tensor:
        return x[:count].reshape(*batch, *x.shape[1:])

    dtype = call.first.tensor.dtype.to_real()
    rounding = (found.s.to(dtype).to(found.s.dtype) - found.s).abs()
    u, s, v, errors = map(of_batch, (found.u, found.s, found.v, found.errors + rounding))
    if call.differentiable:
        graph = call.first.graph
        if graph.shape[-2] < graph.shape[-1]:
            v, s, u = attach_triplets(graph.mH, v, s, u, errors=errors)
        else:
            u, s, v = attach_triplets(graph, u, s, v, errors=errors)
    diagnostics, accepted = call.diagnostics(found.attempts), found.accepted
    result: SVDResult = SVDResult(
        U=call.give_back(u),
        s=call.give_back(s, dtype),
        Vh=call.give_back(v.mH),
        relative_error=found.relative_error,
        errors=call.give_back(errors, torch.float64),
        certificate=Later(lambda: [found.certificate(i) for i in range(count)])
        if batch
        else found.certificate(0),
        **(diagnostics if options.part is None else diagnostics | {"accuracy": f"{options.part:g}"}),
        converged=bool(accepted.all()),
    )
    if not result.converged:
        what = f"the singular triplets are not certified to accuracy {result.accuracy}"
        words = str(found.certificate(int((~accepted).argmax())))
        call.report_missed(what, words, result, call.missed(accepted))
    return result


def _of_nothing(call: Call, options: SVDOptions) -> SVDResult:
    a = call.first.tensor
    *batch, m, n = a.shape
    k = min(m, n) if options.rank is None else options.rank
    count, judge = max(math.prod(batch), 1), SVDJudge.for_shape(max(m, 1), max(n, 1), options)
    u, s, v = (a.new_empty(count, *shape) for shape in ((m, k), (k,), (n, k)))
    done = [Attempt("nothing to do", True, "no elements")]
    return _result(call, options, _Triplets(u, s.real, v, s.real, 0.0, np.zeros((3, count)), judge, done))


def _of_number(accuracy: Real, dtype: torch.dtype) -> tuple[Format, float]:
    """A format that will do for an accuracy, and that number."""
    u, part = format_of(dtype).u, float(accuracy)
    if not 4 * u <= part < 1:
        raise ValueError(
            f"accuracy must be the name of a format, or a number from {4 * u:.1e}, which {dtype} can hold, "
            f"to below 1, got {accuracy!r}"
        )
    return FP64 if format_of(dtype) is FP64 and part < COARSE else FP32, part


def _prepared(given: torch.Tensor, tall: torch.Tensor, options: SVDOptions) -> tuple[TallMatrix, float]:
    """A tall matrix in working precision, and the power of two by which it is multiplied."""
    # That is 1 where squares neither overflow nor underflow.
    device, work, over_rows = options.engine.device, options.exact.storage, options.engine.over_rows
    tall = tall.to(torch.promote_types(tall.dtype, torch.float32))
    norm, scale = _norm(tall, over_rows), 1.0
    low, high = SAFE_NORMS[work.to_real()]
    if not low < norm < high:
        largest = over_rows.largest(largest_magnitude(tall, 0))
        check_finite(given, largest, "A", over_rows)
        exponent = math.frexp(float(largest.max()))[1]
        scale = 2.0 ** -max(-1022, min(1022, exponent))  # beyond there is no float64
        tall = in_double(tall) * scale
        norm = _norm(tall, over_rows)
    a, rounded = tall.to(device, work), 0.0
    if a.dtype != tall.dtype:
        rounded = float(over_rows.norms((tall - tall.to(work)).flatten()[:, None])[0])
    return TallMatrix(a[None], norm, rounded, options), scale


def _norm(a: torch.Tensor, over_rows: Reduction) -> float:
    """``||A||_F`` over all processes, in the precision of A if that holds squares, without a copy."""
    norm = float(torch.linalg.vector_norm(torch.linalg.vector_norm(a, dim=1), dtype=torch.float64))
    low, high = SAFE_NORMS[a.dtype.to_real()]
    norm = norm if low < norm < high else float(torch.linalg.matrix_norm(in_double(a)))
    if not over_rows.spread:
        return norm
    square = torch.tensor([norm], dtype=torch.float64, device=a.device).square()
    return float(over_rows.total(square).sqrt())


def _relative_error(
    matrix: TallMatrix, u: torch.Tensor, s: torch.Tensor, v: torch.Tensor, remainder: float
) -> float:
    """Relative error by Pythagoras, unless a small difference of two squares is all rounding errors."""
    norm = matrix.norm
    rest = 1 - float((s / norm).square().sum()) if norm > 0 else 0.0
    if rest > CLEAR_REST:
        return rest**0.5
    if remainder > CLEAR_REMAINDER * norm:
        return remainder / norm
    return low_rank_error(matrix.a[0], u, s.to(u.device), v.mH, matrix.options.engine.over_rows)


def _check_truncation(rank: int | None, tol: float | None, largest: int) -> None:
    smallest = min(1, largest)
    if rank is not None and tol is not None:
        raise ValueError(f"give rank or tol, not both (got rank={rank}, tol={tol})")
    if rank is not None and not (hasattr(rank, "__index__") and smallest <= rank <= largest):
        raise ValueError(
            f"rank must be a whole number from {smallest} to min(m, n) = {largest}, got {rank!r}"
        )
    part_of_one("tol", tol)
