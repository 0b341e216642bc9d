"""What is said of what is no array of numbers: what was given, and what to pass instead."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from neula.pipeline.result.shown import Shown

NAMED = 5
"""Columns, or keys, that a message names; it counts the others."""


def refuse_no_array(x: Any, name: str) -> None:
    """Refuse things that NumPy would make arrays of objects of.

    Raises
    ------
    TypeError
        That says what was given and what to pass.
    """
    if x is None:
        raise TypeError(f"{name} is None: pass an array (a function that forgot to return one gives None)")
    if isinstance(x, (str, bytes, os.PathLike)):
        raise TypeError(
            f"{name} is text, {os.fsdecode(x)!r}: pass an array. If it is the name of a file, read that "
            "first, e.g. by numpy.load, pandas.read_csv, or read_matrix of neula.io.files"
        )
    if isinstance(x, Mapping):
        raise TypeError(
            f"{name} is a {type(x).__name__} with keys {_listed(map(repr, x))}: pass an array, e.g. "
            f"numpy.column_stack(list({name}.values()))"
        )
    if isinstance(x, Shown):
        raise TypeError(
            f"{name} is a {type(x).__name__}, what a function of neula returned: pass the array in it, "
            f"e.g. {name}.{'x' if hasattr(x, 'x') else 'R' if hasattr(x, 'R') else 'U'}"
        )
    if hasattr(x, "matvec") and hasattr(x, "rmatvec"):
        shape = tuple(getattr(x, "shape", ()))
        raise TypeError(
            f"{name} is a {type(x).__name__} of shape {shape}, and neula needs the elements: pass a matrix, "
            f"e.g. {name} @ numpy.eye({shape[-1] if shape else 'n'}), or solve with products alone by "
            "scipy.sparse.linalg.lsqr"
        )


def as_array(x: Any, name: str) -> np.ndarray:
    """What NumPy makes of a list, or of a data frame.

    Raises
    ------
    ValueError
        If rows have different lengths.
    TypeError
        If it is no array, or columns hold no numbers.
    """
    try:
        array = np.asarray(x)
    except ValueError as error:
        raise ValueError(f"{name} is a {type(x).__name__} of which NumPy makes no array: {error}") from None
    if array.dtype.kind not in "iubfc":
        columns = _columns_without_numbers(x)
        if columns:
            raise TypeError(
                f"{name} has columns that are not all numbers: {_listed(columns)}. Leave them out, or encode "
                "them as numbers; rows with missing values have to be dropped or filled"
            )
        if array.ndim == 0:
            raise TypeError(f"{name} is a {type(x).__name__}, which is no array: pass an array")
    return array


def no_numbers(array: np.ndarray, name: str) -> TypeError:
    """Error for an array of objects, of text or of dates, that says where the first of them is."""
    if array.dtype.kind == "O":
        for index, value in np.ndenumerate(array):
            if not isinstance(value, (int, float, np.number)):
                where = ", ".join(map(str, index))
                return TypeError(
                    f"{name}[{where}] is {value!r}, a {type(value).__name__}: pass numbers, if they are "
                    f"meant to be some with {name}.astype(float)"
                )
    return TypeError(f"{name} has dtype {array.dtype}: pass numbers, e.g. {name}.astype(float)")


def _columns_without_numbers(x: Any) -> list[str]:
    """Columns of a data frame (of pandas, Polars, PyArrow) that are no numbers, with their dtypes."""
    names = getattr(x, "columns", None) if hasattr(x, "dtypes") else getattr(x, "column_names", None)
    if names is None:
        return []
    found = []
    for column in names:
        values = x[column]
        if np.asarray(values).dtype.kind not in "iubf":
            kind = getattr(values, "dtype", None) or getattr(values, "type", "object")
            found.append(f"{column!r} ({kind})")
    return found


def _listed(names: Any) -> str:
    shown = list(names)
    more = [f"{len(shown) - NAMED} more"] if len(shown) > NAMED else []
    return ", ".join([*shown[:NAMED], *more])
