"""Integers in float64: exactly, or not at all."""

from __future__ import annotations

from typing import Any

import numpy as np

WHOLE = 2**53  # up to here every integer is a float64


class InexactIntegerError(ValueError):
    """An integer is no float64; the message says which and where, and what to do."""


def inexact(place: str, value: int) -> InexactIntegerError:
    """Error for an integer that rounding would change."""
    return InexactIntegerError(
        f"{place} is {value}, an integer that no float64 holds: subtract an offset (as the smallest of the "
        "integers) in integer arithmetic first, or pass floats if rounding does no harm"
    )


def is_exact(value: int) -> bool:
    try:
        return float(value) == value
    except OverflowError:
        return False


def in_float64(x: Any, name: str, first: int = 0, *, or_complex: bool = False) -> np.ndarray:
    """An array, or a list, of numbers in float64, called ``name`` in messages, its first row ``first``.

    With ``or_complex`` complex numbers keep their dtype, and objects become complex128; else they are a
    TypeError. An integer that is no float64 is an InexactIntegerError.
    """
    array = np.asarray(x)
    kind, size = array.dtype.kind, array.dtype.itemsize
    lost: Any = ()
    is_complex = kind == "c" or (kind == "O" and any(map(np.iscomplexobj, array.flat)))
    if is_complex and not or_complex:
        raise TypeError(f"{name} is complex ({array.dtype}), and must be real")
    if kind in "iu" and size == 8 and array.size and max(int(array.max()), -int(array.min())) > WHOLE:
        lost = _lost(array)
    elif kind == "O" or (array is not x and kind in "fc" and not np.abs(array).max(initial=0) < WHOLE):
        array = np.asarray(x, dtype=object)  # a list of integers and other numbers
        lost = np.frompyfunc(
            lambda value: isinstance(value, (int, np.integer)) and not is_exact(int(value)), 1, 1
        )
        lost = np.asarray(lost(array), dtype=bool)
    for place in np.argwhere(lost)[:1].tolist():
        where = ", ".join(str(i + first * (axis == 0)) for axis, i in enumerate(place))
        raise inexact(f"{name}[{where}]" if place else name, int(array[tuple(place)]))
    if is_complex:
        return np.asarray(x) if kind == "c" else array.astype(np.complex128)
    return array.astype(np.float64, copy=False)


def _lost(array: np.ndarray) -> np.ndarray:
    """Which integers have more than 53 digits from their first one to their last that is not zero."""
    digits = np.frexp(array.astype(np.float64))[1]
    rest = (np.uint64(1) << np.maximum(digits - 53, 0).astype(np.uint64)) - np.uint64(1)
    found: np.ndarray = array.astype(array.dtype.newbyteorder("=")).view(np.uint64) & rest != 0
    return found
