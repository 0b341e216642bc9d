"""Low-rank approximation: check the input, factorize, truncate, measure."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any, Unpack, overload

import torch

from neula.algorithms.spectra.gram_svd import gram_svd
from neula.algorithms.spectra.qr_svd import qr_svd
from neula.certificates.bounds import Accuracy, orthogonality_bound, residual_bound
from neula.certificates.low_rank import low_rank_error
from neula.certificates.qr import QRCertificate
from neula.engines import FP16, FP16_COR, Engine, Format
from neula.kernels.precision import plain_arithmetic
from neula.pipeline.call import Call
from neula.pipeline.compilation import eager
from neula.pipeline.inputs import check_matrices
from neula.pipeline.progress import Progress
from neula.pipeline.result import Attempt, QRResult, SVDResult
from neula.problems.orthogonal.qr import qr
from neula.problems.signatures import Kind, SVDKeywords

CLEAR_REST = 1e-3
"""Part of ``||A||_F^2`` that is not approximated, above which it is known to three digits or more from the
norms of A and s: these err by ``sqrt(k) u`` or less."""

SAFE_EXPONENT = {torch.float64: 200, torch.float32: 30, torch.bfloat16: 30, torch.float16: 16}
"""Elements between ``2^-e`` and ``2^e`` are factorized as they are."""


@overload
def svd_lowrank(A: Kind, rank: int | None = ..., **keywords: Unpack[SVDKeywords]) -> SVDResult[Kind]: ...
@overload
def svd_lowrank(A: Any, rank: int | None = ..., **keywords: Unpack[SVDKeywords]) -> SVDResult[Any]: ...
@eager
def svd_lowrank(
    A: Any,
    rank: int | None = None,
    *,
    tol: float | None = None,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | None = None,
) -> SVDResult:
    """Best low-rank approximation ``A ~ U diag(s) Vh``: from the Gram matrix of A, or QR and the SVD of R.

    A few singular values (a ``rank`` of up to a quarter of the columns) come from the Gram matrix of A, if
    what is measured says that they are as accurate as A's dtype; otherwise, from the SVD of R. For tall
    matrices nearly all work is the Gram matrix or the QR. The truncation error usually exceeds the rounding
    errors by far: then ``accuracy="fp16"`` loses nothing (HPDC 2020, Table 4).

    Parameters
    ----------
    A : array_like, shape (m, n)
        NumPy array, torch tensor or DLPack object; not modified.
    rank : int, optional
        Number of singular triplets, from 1 to ``min(m, n)``; 0 of a matrix without elements.
    tol : float, optional
        Instead of ``rank``: the fewest for which ``||A - U diag(s) Vh||_F <= tol ||A||_F``. With neither,
        all of them.
    accuracy, engine, strict, progress : optional
        As for :func:`neula.qr`.

    Returns
    -------
    SVDResult
        Unpacks into ``U, s, Vh``; holds the estimated relative error.

    Raises
    ------
    ValueError
        If both ``rank`` and ``tol`` are given, if one is out of range, and for what :func:`neula.qr` refuses.
    TypeError
        For complex or sparse input.

    See Also
    --------
    torch.svd_lowrank : randomized, approximate, not certified.

    Examples
    --------
    >>> import numpy as np, neula
    >>> A = np.outer(np.arange(1.0, 101.0), [3.0, 4.0, 0.0])
    >>> U, s, Vh = neula.svd_lowrank(A, tol=1e-8)
    >>> U.shape, bool(abs(s[0] - np.linalg.norm(A)) < 1e-9 * s[0])
    ((100, 1), True)
    """
    call = Call.begin({"A": A}, engine=engine, accuracy=accuracy, strict=strict)
    a = call.first.tensor
    check_matrices(a, "A")
    if a.ndim > 2:
        raise ValueError(f"svd_lowrank takes one matrix at a time, got shape {tuple(a.shape)}")
    _check_truncation(rank, tol, min(a.shape))
    if 0 in a.shape:
        rank = tol = None  # there is nothing to leave out
    rank = None if rank is None else operator.index(rank)  # not an unsigned one, of which there is no -rank
    transposed = a.shape[0] < a.shape[1]
    tall, scale = _scaled(a.T if transposed else a)
    work = torch.float64 if a.dtype == torch.float64 else torch.float32
    with plain_arithmetic(a.device), call.computing():
        found, error = None, None
        factors: QRResult[Any] = QRResult(None, None, engine=str(call.engine), accuracy=call.target.name)
        if rank is not None and rank <= call.engine.tuning.gram_part * tall.shape[1]:
            found, factors, error = _from_gram(call.here(tall).to(work), rank, call.engine, call.target)
        if found is None:
            before = factors.attempts
            factors = qr(tall, accuracy=accuracy, engine=call.engine, strict=strict, progress=progress)
            found = qr_svd(factors.Q.to(work), factors.R.to(work), rank=rank, tol=tol)
            factors = dataclasses.replace(factors, attempts=before + factors.attempts)
        u, s, vh = (x.to(a.device) for x in found)
        if error is None:
            error = low_rank_error(tall, u, s, vh)
        s = (s.double() / scale).to(s.dtype)
        if not bool(s.isfinite().all()):
            raise OverflowError(f"the singular values do not fit {s.dtype}: scale A down")
        if transposed:
            u, vh = vh.T, u.T
    return SVDResult(
        U=call.give_back(u),
        s=call.give_back(s),
        Vh=call.give_back(vh),
        relative_error=error,
        qr=dataclasses.replace(factors, Q=None, R=None),
        seconds=call.seconds,
    )


def _scaled(a: torch.Tensor) -> tuple[torch.Tensor, float]:
    """A matrix whose squares neither overflow nor underflow, and the power of two it is multiplied by."""
    largest = float(a.abs().max()) if a.numel() else 0.0
    exponent = math.frexp(largest)[1] if 0 < largest < math.inf else 0
    if abs(exponent) <= SAFE_EXPONENT[a.dtype]:
        return a, 1.0
    # Beyond 2^1022 there is no float64.
    scale = 2.0 ** -max(-1022, min(1022, exponent))
    return (a.double() * scale).to(a.dtype), scale


_Factors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _from_gram(
    a: torch.Tensor, rank: int, engine: Engine, target: Format
) -> tuple[_Factors | None, QRResult, float | None]:
    """The leading singular triplets of a tall matrix if they are accepted, what was measured, and the error
    of the approximation where it follows from that.
    """
    compute = _gram_arithmetic(a, engine, target)
    n = a.shape[1]
    bound = residual_bound(target, n)
    found = gram_svd(a, rank, engine.using(compute), bound)
    certificate = QRCertificate(found.residual, found.orthogonality, bound, orthogonality_bound(target, n))
    attempt = Attempt(f"gram-svd {compute}", certificate.accepted, str(certificate))
    result = QRResult(None, None, certificate, (attempt,), str(engine), target.name)
    if not certificate.accepted:
        return None, result, None
    # By Pythagoras; but a small difference of two squares would consist of their rounding errors.
    rest = 1 - float((found.s.double() / found.norm).square().sum())
    return (found.u, found.s, found.v.T), result, rest**0.5 if rest > CLEAR_REST else None


def _gram_arithmetic(a: torch.Tensor, engine: Engine, target: Format) -> str:
    if a.dtype == torch.float64:
        return "fp64"
    if not engine.tuning.corrected:
        return "fp32"
    return "fp16" if target.u >= FP16.u else FP16_COR


def _check_truncation(rank: int | None, tol: float | None, largest: int) -> None:
    smallest = min(1, largest)
    if rank is not None and tol is not None:
        raise ValueError(f"give rank or tol, not both (got rank={rank}, tol={tol})")
    if rank is not None and not (hasattr(rank, "__index__") and smallest <= rank <= largest):
        raise ValueError(
            f"rank must be a whole number from {smallest} to min(m, n) = {largest}, got {rank!r}"
        )
    if tol is not None and not 0 <= tol < 1:
        raise ValueError(f"tol must be at least 0 and below 1, got {tol}")
