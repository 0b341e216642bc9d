"""``torch.ops.neula.qr``, ``orth`` and ``cholesky``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from neula.certificates.bounds import Accuracy
from neula.pipeline import functions
from neula.pipeline.operators import Operator, name_of
from neula.pipeline.result import CholeskyResult, QRResult
from neula.problems.operators.arguments import (
    COMMON,
    Shapes,
    Tensors,
    are_simple,
    certified,
    common,
    common_dtype,
    shapes_of_evidence,
    worst,
)
from neula.problems.operators.polar import traced_polar

QR_OPTIONS = ("algorithm", "compute", "panel", "cutoff")


def _qr(A: torch.Tensor, accuracy: str | None, engine: str, strict: bool, *named: Any) -> Tensors:
    from neula.problems.orthogonal.qr import qr

    result = qr(A, **common(accuracy, engine, strict), **dict(zip(QR_OPTIONS, named, strict=True)))
    return result.Q, result.R, *certified(result, A)


def _shapes_of_qr(A: torch.Tensor) -> Shapes:
    *batch, m, n = A.shape
    dtype, k = common_dtype(A), min(m, n)
    return ((*batch, m, k), dtype), ((*batch, k, n), dtype), *shapes_of_evidence(tuple(batch))


QR = Operator(
    f"qr(Tensor A, {COMMON}, str? algorithm=None, str? compute=None, str? panel=None, int? cutoff=None)"
    " -> (Tensor Q, Tensor R, Tensor residual, Tensor orthogonality, Tensor accepted)",
    functions.QRFunction,
    _qr,
    _shapes_of_qr,
)


def traced_qr(
    A: Any,
    mode: str = "reduced",
    *,
    accuracy: Accuracy | None = None,
    engine: Any = "auto",
    algorithm: str | None = None,
    compute: str | None = None,
    panel: str | None = None,
    cutoff: int | None = None,
    strict: bool = False,
    pivoting: bool = False,
    **others: Any,
) -> QRResult[Any] | None:
    """:func:`neula.qr` in a graph."""
    if mode not in ("reduced", "r") or pivoting or not are_simple(engine, A):
        return None
    options = name_of(accuracy), engine, strict, algorithm, compute, panel, cutoff
    q, r, _, _, accepted = QR(A, *options)
    name = name_of(accuracy) or ""
    return QRResult(None if mode == "r" else q, r, engine=engine, accuracy=name, accepted=accepted)


def traced_tsqr(
    A: Any, mode: str = "reduced", *, compute: str = "auto", **options: Any
) -> QRResult[Any] | None:
    """:func:`neula.tsqr` in a graph: the operator of ``qr`` takes any number of columns."""
    return traced_qr(A, mode, **options) if compute == "auto" else None


def _orth(A: torch.Tensor, accuracy: str | None, engine: str, strict: bool) -> Tensors:
    from neula.problems.orthogonal.orth import basis_and_ranks

    result, ranks = basis_and_ranks(A, **common(accuracy, engine, strict))
    residual, orthogonality, accepted = certified(result, A)
    return result.Q, result.R, residual, orthogonality, ranks, accepted


def _shapes_of_orth(A: torch.Tensor) -> Shapes:
    *found, accepted = _shapes_of_qr(A)
    return *found, (tuple(A.shape[:-2]), torch.int64), accepted


ORTH = Operator(
    f"orth(Tensor A, {COMMON})"
    " -> (Tensor Q, Tensor R, Tensor residual, Tensor orthogonality, Tensor rank, Tensor accepted)",
    functions.QRFunction,
    _orth,
    _shapes_of_orth,
)


def traced_orth(
    A: Any,
    rcond: float | None = None,
    *,
    method: str = "qr",
    accuracy: Accuracy | None = None,
    engine: Any = "auto",
    strict: bool = False,
    wait: bool = True,
    **others: Any,
) -> Any:
    """:func:`neula.orth` in a graph; how many columns a range has depends on the numbers."""
    if rcond is not None or not are_simple(engine, A):
        return None
    if method == "polar" and A.shape[-2] >= A.shape[-1]:
        found: Any = traced_polar(A, completion=True, accuracy=accuracy, engine=engine, strict=strict)
        return found.U if wait else replace(found, _pending=lambda: found.U)
    if method != "qr":
        return None
    q, r, *_, accepted = ORTH(A, name_of(accuracy), engine, strict)
    return q if wait else QRResult(q, r, engine=engine, accepted=accepted, _pending=lambda: q)


def _cholesky(A: torch.Tensor, accuracy: str | None, engine: str, strict: bool) -> Tensors:
    from neula.problems.definite.cholesky import cholesky

    found = cholesky(A, **common(accuracy, engine, strict))
    return found.L, found.residuals, found.accepted


def _shapes_of_cholesky(A: torch.Tensor) -> Shapes:
    batch = tuple(A.shape[:-2])
    return (tuple(A.shape), common_dtype(A)), (batch, torch.float64), (batch, torch.bool)


CHOLESKY = Operator(
    f"cholesky(Tensor A, {COMMON}) -> (Tensor L, Tensor residual, Tensor accepted)",
    functions.CholeskyFunction,
    _cholesky,
    _shapes_of_cholesky,
)


def traced_cholesky(
    A: Any,
    *,
    upper: bool = False,
    accuracy: Accuracy | None = None,
    engine: Any = "auto",
    strict: bool = False,
    jitter: str | None = None,
    **others: Any,
) -> CholeskyResult[Any] | None:
    """:func:`neula.cholesky` in a graph; how much jitter it takes depends on the numbers."""
    if jitter is not None or not are_simple(engine, A):
        return None
    lower, residuals, accepted = CHOLESKY(A.mH if upper else A, name_of(accuracy), engine, strict)
    known: dict[str, Any] = {"converged": accepted.all(), "residual": worst(residuals), "bound": math.nan}
    return CholeskyResult(
        factor=lower.mH if upper else lower,
        upper=upper,
        **known,
        residuals=residuals,
        accepted=accepted,
        engine=engine,
    )
