"""Orthonormal bases: Q of a certified QR, the rank of its R, and the range where that is less than full."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Unpack, overload

import torch

from neula.algorithms.scaling import power_of_two_scales
from neula.algorithms.spectra.numerical_rank import columns_of_norm_one, numerical_ranks, rank_tolerance
from neula.certificates.bounds import Accuracy
from neula.engines import Engine
from neula.engines.formats import in_double
from neula.engines.reduction import Reduction
from neula.errors import check_name, part_of_one
from neula.kernels.polar.svd import svd
from neula.kernels.precision import exact_matmul
from neula.pipeline.call import Call
from neula.pipeline.chain import finish
from neula.pipeline.distributed import OverProcesses
from neula.pipeline.inputs import check_matrices, over_lists
from neula.pipeline.operators import with_operator
from neula.pipeline.plans import Plans
from neula.pipeline.progress import Progress
from neula.pipeline.result import PolarResult, QRResult
from neula.problems.operators.factorizations import traced_orth
from neula.problems.orthogonal.factorize import Begun, begin, factorize, factors_by_plan, range_plan_of
from neula.problems.orthogonal.problem import QRFactors, QROptions, as_pending, as_result
from neula.problems.polar.polar import polar_result
from neula.problems.polar.problem import PolarOptions
from neula.problems.signatures import Array, ArrayLike, Kind, OrthKeywords

METHODS = ("qr", "polar")


@overload
def orth(A: Kind, rcond: float | None = ..., **keywords: Unpack[OrthKeywords]) -> Kind: ...
@overload
def orth(A: Any, rcond: float | None = ..., **keywords: Unpack[OrthKeywords]) -> Any: ...
@with_operator(traced_orth, Plans(range_plan_of, operands=1, fetches=False, then=("rcond",)))
@OverProcesses(lambda basis, tall, replicated: tall(basis), refused={"wait": (False,)})
@over_lists(lambda bases, place: bases[place])
def orth(
    A: ArrayLike,
    rcond: float | None = None,
    *,
    method: str = "qr",
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | None = None,
    wait: bool = True,
) -> Array:
    """Orthonormal basis of the columns of A: the Q of :func:`qr`, or with ``rcond`` a basis of the numerical
    range.

    Parameters
    ----------
    A : array_like, shape (..., m, n)
        As for :func:`qr`; of a list of torch matrices a list of bases comes back.
    rcond : float, optional
        Singular values of A of at most ``rcond`` times the largest count as zero, and the basis has as many
        columns as the others, as in :func:`scipy.linalg.orth`; all matrices of a batch must have the same
        number. By default the basis has ``min(m, n)`` columns, whatever the rank.
    method : {"qr", "polar"}, optional
        Which orthonormal basis: that of :func:`qr`, where each column depends on the columns of A up to it,
        or that of :func:`neula.polar`, which is nearest to A. The latter is for matrices that are not wide,
        without ``rcond``.
    accuracy, engine, strict, progress : optional
        As for :func:`qr`.
    wait : bool, optional
        As for :func:`qr`, without ``rcond``. With False what is returned is a
        :class:`~neula.pipeline.result.QRResult` whose Q is the basis, or a
        :class:`~neula.pipeline.result.PolarResult` whose U it is, and :func:`neula.finish` returns the basis.

    Returns
    -------
    array, shape (..., m, min(m, n)), or (..., m, rank) with ``rcond``
        Orthonormal columns. NaN where a matrix of a batch holds NaN or Inf.

    Raises
    ------
    ValueError
        As :func:`qr`; for an ``rcond`` that is out of range; if the matrices of a batch have different ranks;
        if the basis of a range of smaller dimension is to have a gradient.
    AccuracyError
        In place of the warnings, if ``strict`` is set; its ``result`` is that of :func:`qr`.

    Warns
    -----
    AccuracyWarning
        If the accuracy was not reached; without ``rcond`` also if the numerical rank is below ``min(m, n)``:
        the columns of Q are orthonormal, but those beyond the rank are rounding errors outside the range of
        A.

    See Also
    --------
    qr : returns R as well.
    scipy.linalg.orth : by the SVD of A; without ``rcond`` it takes ``max(m, n)`` times the precision of A.

    Notes
    -----
    The warning depends on the singular values of R with columns divided by their norms, so that a column in
    small units counts by its direction. Singular values count as zero if they are at most

    - ``max(m, n)`` times the precision of float64, relative to the largest, or, for A in a narrower dtype,
      ``sqrt(max(m, n))`` times that of float32 or the precision of the dtype, whichever is larger (with
      ``max(m, n)`` in place of its root a random matrix of order 2000 would lack full rank in float32);
    - or as small as the error of R that was measured: ``accuracy="fp16"`` makes no statement about less.

    With ``rcond`` the singular values are those of A in the given units, and the basis is ``Q U`` with the
    leading left singular vectors of R, or Q itself at full rank.

    Examples
    --------
    >>> import torch, neula
    >>> Q = neula.orth(torch.tensor([[1.0, 1.0], [1.0, 1.0001], [1.0, 1.0]]))
    >>> bool((Q.T @ Q - torch.eye(2)).norm() < 1e-6)
    True
    >>> neula.orth(torch.tensor([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]), rcond=1e-6).shape
    torch.Size([3, 1])
    """
    rcond = part_of_one("rcond", rcond)
    check_name("method", method, METHODS)
    if not wait and rcond is not None:
        raise ValueError(f"wait=False with rcond={rcond}: the rank depends on the numbers; leave wait out")
    call, options = _begun(A, engine, progress, wait=wait, accuracy=accuracy, strict=strict)
    if method == "polar":
        return _nearest(call, rcond, progress, wait=wait)
    if not wait and (found := begin(call.matrices(), options)) is not None:
        values, accepted, begun = found
        return as_pending(values, accepted, call, "reduced", lambda: _with_ranks(call, options, begun)[0].Q)
    if rcond is None:
        complete = _with_ranks(call, options)[0]
        return complete.Q if wait else replace(complete, _pending=lambda: complete.Q)
    factors, result = _factorized(call, options)
    a = call.first.tensor
    if a.numel() == 0:
        return result.Q
    with call.computing():
        basis = _range_basis(factors, a.shape, rcond, options.over_rows)
    if basis is not None and call.differentiable:
        raise ValueError(
            f"A of shape {tuple(a.shape)} has rank {basis.shape[-1]} with rcond={rcond} and requires a "
            "gradient, and the basis of its range is not unique and has none: pass A.detach()"
        )
    return result.Q if basis is None else call.give_back(basis.reshape(*a.shape[:-1], basis.shape[-1]))


def _begun(
    A: Any, engine: str | Engine, progress: Progress | None, *, wait: bool = True, **asked: Any
) -> tuple[Call, QROptions]:
    call = Call.begin({"A": A}, engine=engine, gradients=True, **asked)
    check_matrices(call.first.tensor, "A")
    call = call.by_host(engine, gradients=False) if wait else call
    return call, QROptions(call.target, call.engine, progress=progress)


def _factorized(call: Call, options: QROptions, begun: Begun | None = None) -> tuple[QRFactors, QRResult]:
    factors = factors_by_plan(call, options) if begun is None else None
    factors = factors or factorize(call.matrices(), "reduced", options, begun)
    return factors, as_result(factors, call, "reduced", options)


def basis_and_ranks(
    A: Any, *, accuracy: Accuracy | None, engine: str | Engine, strict: bool
) -> tuple[QRResult, torch.Tensor]:
    """A result whose Q is the basis, and the rank of each matrix of the batch, which may be reported."""
    return _with_ranks(*_begun(A, engine, None, accuracy=accuracy, strict=strict))


def _with_ranks(call: Call, options: QROptions, begun: Begun | None = None) -> tuple[QRResult, torch.Tensor]:
    factors, result = _factorized(call, options, begun)
    *batch, m, n = call.first.tensor.shape
    if 0 in (*batch, m, n):
        return result, torch.zeros(batch, dtype=torch.int64, device="cpu")
    with call.computing():
        return result, _check_full_rank(factors, call, result).reshape(batch)


def _nearest(call: Call, rcond: float | None, progress: Progress | None, *, wait: bool) -> Any:
    a = call.first.tensor
    if rcond is not None:
        raise ValueError(f"method='polar' has no basis of the range (rcond={rcond}): pass method='qr'")
    if call.engine.over_rows.count(a.shape[-2]) < a.shape[-1]:
        raise ValueError(
            f"A of shape {tuple(a.shape)} is wide, and its polar factor has orthonormal rows, not columns: "
            "pass method='qr', or use neula.polar"
        )
    options = PolarOptions(call.target, call.engine, completion=True, progress=progress)
    result = polar_result(call, options, wait=wait)
    if wait:
        return _of_full_rank(call, result)
    return replace(result, _pending=lambda: _of_full_rank(call, finish(result)))


def _of_full_rank(call: Call, result: PolarResult) -> Any:
    """The basis; says where it spans more than A does."""
    columns = call.first.tensor.shape[-1]
    if result.converged and result.rank < columns:
        call.report_missed(
            "the columns lack full rank",
            f"the rank is at most {result.rank}, not {columns}, to {result.accuracy} accuracy; the "
            "other basis vectors are rounding errors",
            result,
            (torch.as_tensor(result.ranks, device="cpu") < columns).nonzero().tolist(),
        )
    return result.U


def _check_full_rank(factors: QRFactors, call: Call, result: QRResult) -> torch.Tensor:
    """Say where columns are dependent, of those factors that are accepted: the others have been reported."""
    over_rows = call.engine.over_rows
    *batch, m, n = call.first.tensor.shape
    m = over_rows.count(m)
    r = factors.r
    residuals, accepted = factors.residual.to(r.device), factors.accepted.to(r.device)
    # The measured residual is relative to the norm of all columns together.
    error = (math.sqrt(n) * torch.where(accepted, residuals, 0.0)).to(r.dtype.to_real())
    ranks = numerical_ranks(columns_of_norm_one(r), rank_tolerance(call.dtype, m, n), error, exact=False)
    ranks = over_rows.agree(ranks)
    deficient = (accepted & (ranks < min(m, n))).cpu()
    if not bool(deficient.any()):
        return ranks
    rank = int(ranks.cpu()[deficient].min())
    call.report_missed(
        "the columns lack full rank",
        f"the rank is at most {rank}, not {min(m, n)}, to {result.accuracy} accuracy; the other basis "
        "vectors are rounding errors; pass rcond= for a basis of the range only",
        result,
        deficient.reshape(batch).nonzero().tolist(),
    )
    return ranks


def _range_basis(
    factors: QRFactors, shape: torch.Size, rcond: float, over_rows: Reduction
) -> torch.Tensor | None:
    """Basis of the range of each matrix, shape (batch, m, rank); None where that is Q."""
    q, r = factors.q, factors.r
    # Squares of large or small elements would be out of range.
    r = in_double(r * power_of_two_scales(r.abs().amax((1, 2)))[:, None, None])
    finite = r.isfinite().flatten(1).all(1)
    ranks = over_rows.agree(numerical_ranks(r, rcond))[finite].tolist()
    k = r.shape[1]
    if len(set(ranks)) > 1:
        raise ValueError(
            f"the matrices of A, shape {tuple(shape)}, have ranks from {min(ranks)} to "
            f"{max(ranks)} with rcond={rcond}, and their bases do not fit one array: pass matrices of one "
            "rank together, or leave rcond out"
        )
    rank = ranks[0] if ranks else k
    if rank == k:
        return None
    u = svd(torch.where(finite[:, None, None], r, 0.0))[0]
    u = over_rows.agree(u)  # singular vectors are not unique: all processes take those of the first
    return exact_matmul(q, u[..., :rank].to(q.dtype))
