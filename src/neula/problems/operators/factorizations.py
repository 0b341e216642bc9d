"""``torch.ops.neula.qr``, ``orth``, ``cholesky`` and ``polar``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from neula.errors import check_name
from neula.pipeline import derivatives
from neula.pipeline.gradients import symmetric_part
from neula.pipeline.operators import Operator
from neula.pipeline.result import CholeskyResult, PolarResult, QRResult
from neula.problems.operators.arguments import (
    COMMON,
    Tensors,
    are_simple,
    certified,
    fields_of,
    results_of,
    settings,
    unread,
)
from neula.problems.polar.problem import SIDES


def _qr(A: torch.Tensor, **options: Any) -> Tensors:
    from neula.problems.orthogonal.qr import qr

    result = qr(A, **options)
    return result.Q, result.R, *certified(result, A)


QR = Operator(
    f"qr(Tensor A, {COMMON}, str? algorithm=None, str? compute=None, str? panel=None, int? cutoff=None)"
    " -> (Tensor Q, Tensor R, Tensor residual, Tensor orthogonality, Tensor accepted)",
    derivatives.QRFunction,
    _qr,
    results_of("m k", "k n", "float64", "float64", "bool"),
)


def traced_qr(
    A: Any, mode: str = "reduced", *, pivoting: bool = False, **options: Any
) -> QRResult[Any] | None:
    if mode not in ("reduced", "r") or pivoting or not are_simple(A, **options):
        return None
    q, r, _, _, accepted = QR.by_name(A, **options)
    return QRResult(None if mode == "r" else q, r, accepted=accepted, **settings(options, A))


def traced_tsqr(
    A: Any, mode: str = "reduced", *, compute: str = "auto", **options: Any
) -> QRResult[Any] | None:
    """:func:`neula.tsqr` in a graph: the operator of ``qr`` takes any number of columns."""
    return traced_qr(A, mode, **options) if compute == "auto" else None


def _orth(A: torch.Tensor, **options: Any) -> Tensors:
    from neula.problems.orthogonal.orth import basis_and_ranks

    result, ranks = basis_and_ranks(A, **options)
    residual, orthogonality, accepted = certified(result, A)
    return result.Q, result.R, residual, orthogonality, ranks, accepted


ORTH = Operator(
    f"orth(Tensor A, {COMMON})"
    " -> (Tensor Q, Tensor R, Tensor residual, Tensor orthogonality, Tensor rank, Tensor accepted)",
    derivatives.QRFunction,
    _orth,
    results_of("m k", "k n", "float64", "float64", "int64", "bool"),
)


def traced_orth(
    A: Any, rcond: float | None = None, *, method: str = "qr", wait: bool = True, **options: Any
) -> Any:
    """:func:`neula.orth` in a graph; how many columns a range has depends on the numbers."""
    if rcond is not None or not are_simple(A, **options):
        return None
    if method == "polar" and A.shape[-2] >= A.shape[-1]:
        found: Any = traced_polar(A, completion=True, **options)
        return found.U if wait else replace(found, _pending=lambda: found.U)
    if method != "qr":
        return None
    q, r, *_, accepted = ORTH.by_name(A, **options)
    known = settings(options, A)
    return q if wait else QRResult(q, r, accepted=accepted, _pending=lambda: q, **known)


CHOLESKY = Operator(
    f"cholesky(Tensor A, {COMMON}) -> (Tensor L, Tensor residual, Tensor accepted)",
    derivatives.CholeskyFunction,
    fields_of("definite.cholesky:cholesky", "L", "residuals", "accepted"),
    results_of("n n", "float64", "bool"),
)


def traced_cholesky(
    A: Any, *, upper: bool = False, jitter: str | None = None, **options: Any
) -> CholeskyResult[Any] | None:
    """:func:`neula.cholesky` in a graph; how much jitter it takes depends on the numbers."""
    if jitter is not None or not are_simple(A, **options):
        return None
    lower, residuals, accepted = CHOLESKY.by_name(A.mH if upper else A, **options)
    known = unread(accepted, residuals=residuals) | settings(options, A)
    return CholeskyResult(factor=lower.mH if upper else lower, upper=upper, **known)


POLAR = Operator(
    f"polar(Tensor A, {COMMON}, float? rcond=None, bool completion=False)"
    " -> (Tensor U, Tensor rank, Tensor residual, Tensor orthogonality, Tensor accepted)",
    derivatives.Polar,
    fields_of("polar.polar:polar", "U", "ranks", "residuals", "orthogonalities", "accepted"),
    results_of("m n", "int64", "float64", "float64", "bool"),
)


def traced_polar(A: Any, *, side: str | None = None, **options: Any) -> PolarResult[Any] | None:
    if not are_simple(A, **options):
        return None
    check_name("side", side, SIDES, optional=True)
    u, ranks, residuals, orthogonalities, accepted = POLAR.by_name(A, **options)
    known = unread(accepted, residuals=residuals, orthogonalities=orthogonalities) | settings(options, A)
    known |= {"ranks": ranks, "rank": ranks.amin() if ranks.numel() else min(A.shape[-2:])}
    H = None if side is None else symmetric_part(A.to(u.dtype), u, side)
    return PolarResult(U=u, H=H, side=side, **known)
