"""What "accurate" means here: the largest error that an accuracy allows.

An accuracy is the name of a format. A result has it when its measured error is a small multiple of that
format's unit roundoff, the multiple growing as theory and LAPACK's own tests let it.
"""

from __future__ import annotations

import math

import torch

from neula.engines import FORMATS, FP64, Format, format_of
from neula.errors import unknown_name


def target_format(accuracy: str | None, dtype: torch.dtype) -> Format:
    """The format whose accuracy is asked for; that of the input when nothing is.

    Raises
    ------
    ValueError
        For an unknown name, and for an accuracy that the dtype of the result cannot hold.
    """
    if accuracy is None:
        return format_of(dtype)
    if accuracy not in FORMATS:
        raise unknown_name("accuracy", accuracy, FORMATS)
    target, kept = FORMATS[accuracy], format_of(dtype)
    if target.u < kept.u:
        raise ValueError(
            f"accuracy {accuracy!r} is finer than the dtype of the result, {dtype}: pass A in a wider dtype"
        )
    return target


def residual_bound(target: Format, n: int) -> float:
    """What the residual of a QR may be: ``3 u (2 + log2 n)``.

    A recursion of depth ``log2 n`` adds an error of order u at every level.
    """
    return 3 * target.u * (2 + math.log2(n))


def orthogonality_bound(target: Format, n: int) -> float:
    """What ``||I - Q^T Q||`` may be: ``6 u (2 + log2 n)``, since it counts an error of Q twice."""
    return 2 * residual_bound(target, n)


def measurement_error(m: int, high: torch.dtype) -> float:
    """What the measurement adds by itself: sums of m products in ``high`` precision err by ``sqrt(m) u``."""
    return math.sqrt(m) * torch.finfo(high).eps / 2


def lstsq_bound(target: Format, n: int) -> float:
    """What the backward error of a least-squares solution may be: ``8 u + 8 sqrt(n) u64``.

    Solutions are refined in double precision, whatever the accuracy: what grows with n are the rounding
    errors of that. Householder QR in double guarantees a multiple of ``m n u64`` and is observed between 1
    and 5 times ``sqrt(n) u64``.
    """
    return 8 * target.u + 8 * math.sqrt(n) * FP64.u


def solve_bound(target: Format, n: int) -> float:
    """What the backward error of a linear system may be, in the infinity norm: ``4 u + sqrt(n) u64``.

    LU with partial pivoting in double precision is observed at 0.5 to 1.2 times ``sqrt(n) u64``. Refined
    solutions are below 1 u64, but where A and x have one sign: there the rounding errors of the residual
    itself come to a third of ``sqrt(n) u64``.
    """
    return 4 * target.u + math.sqrt(n) * FP64.u
