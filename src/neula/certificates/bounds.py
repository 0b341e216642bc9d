"""The largest error that each accuracy allows.

An accuracy is the name of a format. A result has it when its measured error is a small multiple of that
format's unit roundoff, the multiple growing as theory and LAPACK's own tests let it. An accuracy that is a
number is that of the cheapest format with which errors are at most the number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from neula.engines import FORMATS, FP32, FP64, Format, format_of
from neula.engines.formats import FormatName
from neula.errors import unknown_name

DtypeName = Literal["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
Accuracy: TypeAlias = FormatName | DtypeName | torch.dtype | np.dtype[Any] | type[np.inexact[Any]] | float
"""An accuracy as it may be asked for: the name of a format, a dtype or its name, or a backward error."""

_OF_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
_OF_DTYPES |= {"complex64": "fp32", "complex128": "fp64"}


CONSTANT = 30  # multiple of n u that ``||I - Q^H Q||_2`` may be


def target_format(
    accuracy: Accuracy | str | None, dtype: torch.dtype, bound: Callable[[Format], float] | None = None
) -> Format:
    """The format whose accuracy is requested; that of the input when nothing is.

    ``accuracy``: a number is a backward error: of the formats with which it is at most that, by ``bound``,
    the cheapest is taken. Raises ValueError for an unknown name, and for an accuracy that the dtype of the
    result cannot hold.
    """
    if accuracy is None:
        return format_of(dtype)
    kept = format_of(dtype)
    if isinstance(accuracy, Real) and not isinstance(accuracy, bool):
        return _within(float(accuracy), kept, bound or (lambda target: 8 * target.u))
    name = _name_of(accuracy)
    if name not in FORMATS:
        raise unknown_name("accuracy", accuracy, [*FORMATS, *_OF_DTYPES])
    target = FORMATS[name]
    if target.u < kept.u:
        raise ValueError(
            f"accuracy {accuracy!r} is finer than the dtype of the result, {dtype}: pass A in a wider dtype"
        )
    return target


def _name_of(accuracy: object) -> str:
    """Name of a format, also where a dtype was given."""
    name = str(accuracy).removeprefix("torch.")
    if not isinstance(accuracy, (str, torch.dtype)):
        try:
            name = np.dtype(accuracy).name  # type: ignore[call-overload]
        except TypeError:
            return name
    return _OF_DTYPES.get(name, name)


def _within(error: float, kept: Format, bound: Callable[[Format], float]) -> Format:
    """The cheapest format with which backward errors are at most a number."""
    if not 0 < error < 1:
        raise ValueError(f"accuracy {error}: pass a backward error between 0 and 1, or the name of a format")
    for target in sorted(FORMATS.values(), key=lambda target: -target.u):
        if target.u >= kept.u and bound(target) <= error:
            return target
    wider = "" if kept is FP64 else ", or pass A in a wider dtype"
    raise ValueError(
        f"accuracy {error} is finer than can be certified for a matrix of this shape in {kept.name}, "
        f"{bound(kept):.1e}: pass that, or leave accuracy out{wider}"
    )


# item: Q error bounds
def residual_bound(target: Format, n: int) -> float:
    """Largest accepted residual of a QR, ``3 u (2 + log2 n)``: a recursion of depth ``log2 n`` adds an error
    of order u at every level.
    """
    return 3 * target.u * (2 + math.log2(n))


# item: Q error bounds
def orthogonality_bound(target: Format, n: int) -> float:
    """Largest accepted ``||I - Q^H Q||``: ``6 u (2 + log2 n)``, since it counts an error of Q twice."""
    return 2 * residual_bound(target, n)


def orthogonality_2norm_bound(target: Format, n: int) -> float:
    """The largest accepted ``||I - Q^H Q||_2``: ``30 n u``, and never more than 0.1.

    Two passes of Cholesky QR lose at most ``6 (m n + n (n + 1)) u`` (Yamamoto, Nakatsukasa, Yanagisawa and
    Fukaya 2015), which is at least 30 n u for m >= n > 1, and Householder reflections a multiple of ``m n u``
    (Higham 2002, Theorem 19.4). The factor m is the worst case of sums over rows, whose rounding errors are
    independent; ``30 n u`` without it is the threshold of LAPACK's tests of square matrices. If the norm is
    at most 0.1, singular values of Q are between 0.94 and 1.05.
    """
    return min(0.1, CONSTANT * n * target.u)


def measurement_error(m: int, high: torch.dtype) -> float:
    """Rounding errors of the measurement: sums of m products in ``high`` precision err by ``sqrt(m) u``.
    Those of complex products may err by ``2 sqrt(2)`` as much (Higham 2002, section 3.6); that is not
    allowed for.
    """
    return math.sqrt(m) * torch.finfo(high).eps / 2


def probing_error(m: int) -> float:
    """Error of a measurement with random vectors in single precision, for a QR of m rows: ``sqrt(1 + log2 m)
    u``. Sums in kernels branch like trees (``probes``). A residual has three products, each of which adds a
    third of the square of this.
    """
    return math.sqrt(1 + math.log2(max(m, 1))) * FP32.u


def lstsq_bound(target: Format, n: int) -> float:
    """Largest accepted backward error of a least-squares solution: ``8 u + 8 sqrt(n) u64``.

    Solutions are refined in double precision, whatever the accuracy: what grows with n are the rounding
    errors of that. Householder QR in double guarantees a multiple of ``m n u64`` and is observed between 1
    and 5 times ``sqrt(n) u64``.
    """
    return 8 * target.u + 8 * math.sqrt(n) * FP64.u


def lstsq_bound_of(target: Format, shape: tuple[int, ...]) -> float:
    """The bound for matrices of a shape, also for empty ones and vectors."""
    return lstsq_bound(target, min((1, *shape)[-2:]) or 1)


def solve_bound(target: Format, n: int) -> float:
    """Largest accepted backward error of a linear system, in the infinity norm: ``4 u + sqrt(n) u64``.

    LU with partial pivoting in double precision is observed at 0.5 to 1.2 times ``sqrt(n) u64``. Refined
    solutions are below 1 u64, but where A and x have one sign: there the rounding errors of the residual
    itself come to a third of ``sqrt(n) u64``.
    """
    return 4 * target.u + math.sqrt(n) * FP64.u


def qr_bound(target: Format, shape: tuple[int, ...]) -> float:
    """Largest accepted residual of a QR of this shape, with the error of its measurement."""
    *_, m, n = (1, 1, *shape)
    return residual_bound(target, max(n, 1)) + measurement_error(m, torch.float64)
