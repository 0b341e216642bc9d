"""Errors for arguments that are not arrays of numbers: the given value, and what to pass instead."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from neula.io.integers import WHOLE, in_float64
from neula.pipeline.result.attempts import listed
from neula.pipeline.result.shown import Shown


def refuse_no_array(x: Any, name: str) -> None:
    """Refuse things that NumPy would make arrays of objects of."""
    if x is None:
        raise TypeError(f"{name} is None: pass an array (a function that forgot to return one gives None)")
    if isinstance(x, (str, bytes, os.PathLike)):
        raise TypeError(
            f"{name} is text, {os.fsdecode(x)!r}: pass an array. If it is the name of a file, read that "
            "first, e.g. by numpy.load, pandas.read_csv, or read_matrix of neula.io.files"
        )
    if type(x).__name__ == "LazyFrame":  # of Polars
        raise TypeError(f"{name} is a LazyFrame, which has no numbers yet: pass {name}.collect()")
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name} is a tracer of JAX, which has no numbers yet (jit, vmap and grad trace functions): call "
            "lstsq, solve, cholesky or qr of neula.jax there, and other functions of neula outside"
        )
    if isinstance(x, Mapping):
        raise TypeError(
            f"{name} is a {type(x).__name__} with keys {listed([*map(repr, x)], len(x))}: pass an array, "
            f"e.g. numpy.column_stack(list({name}.values()))"
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
    """Convert a list or a data frame to a NumPy array; refuses ragged rows, missing values, columns without
    numbers, and integers that are no float64.
    """
    if (columns := _columns(x)) is not None:
        return _of_columns(x, columns, name)
    try:
        array = np.asarray(x)
    except RuntimeError:  # of torch
        raise of_tensors(x, name) from None
    except ValueError as error:
        raise ValueError(f"{name} is a {type(x).__name__} of which NumPy makes no array: {error}") from None
    if array.dtype.kind not in "iubfc" and array.ndim == 0:
        raise TypeError(f"{name} is a {type(x).__name__}, which is no array: pass an array")
    if array.dtype.kind == "O" and _are_numbers(array):
        return in_float64(array, name, or_complex=True)
    if array.dtype.kind in "fc" and not np.abs(array).max(initial=0) < WHOLE:
        in_float64(x, name, or_complex=True)  # integers among the elements of a list
    return array


def of_tensors(x: Any, name: str) -> ValueError:
    """Error for a list of tensors whose gradients NumPy would lose."""
    return ValueError(
        f"{name} is a {type(x).__name__} of tensors that require a gradient or have a tangent, which arrays "
        f"of NumPy do not keep: pass torch.stack({name}), or detach them"
    )


def no_numbers(array: np.ndarray, name: str) -> TypeError:
    """Error for an array of objects, of text or of dates, that says where the first of them is."""
    if array.dtype.kind in "mM":
        return TypeError(
            f"{name} has dtype {array.dtype}: pass numbers, as the seconds since the first time, "
            f"({name} - {name}.min()) / numpy.timedelta64(1, 's')"
        )
    if array.dtype.kind == "O":
        for index, value in np.ndenumerate(array):
            if not isinstance(value, (int, float, complex, np.number)):
                where = ", ".join(map(str, index))
                return TypeError(
                    f"{name}[{where}] is {value!r}, a {type(value).__name__}: pass numbers, if they are "
                    f"meant to be some with {name}.astype(float)"
                )
        in_float64(array, name, or_complex=True)  # what this raises must not be rounded away
    return TypeError(f"{name} has dtype {array.dtype}: pass numbers, e.g. {name}.astype(float)")


def _are_numbers(array: np.ndarray) -> bool:
    """Whether all elements are numbers, also those of an array of objects."""
    if array.dtype.kind != "O":
        return array.dtype.kind in "iubfc"
    return all(isinstance(value, (int, float, complex, np.bool_, np.number)) for value in array.flat)


def _columns(x: Any) -> list[tuple[Any, Any]] | None:
    """Names and columns of a table of pandas, Polars or PyArrow, a series is one; None for all else."""
    if hasattr(x, "dtypes") and hasattr(x, "columns"):
        return list(x.items() if hasattr(x, "items") else ((name, x[name]) for name in x.columns))
    if hasattr(x, "column_names"):
        return list(zip(x.column_names, x.columns, strict=True))
    is_series = hasattr(x, "null_count") or (hasattr(x, "isna") and hasattr(x, "dtype"))
    return [(None, x)] if is_series else None


def _of_columns(x: Any, columns: list[tuple[Any, Any]], name: str) -> np.ndarray:
    """A table as a matrix, a series as a vector, each column converted by itself; of one dtype as it is."""
    dtypes = list(getattr(x, "dtypes", ())) if hasattr(x, "columns") else [getattr(x, "dtype", None)]
    if dtypes and all(isinstance(dtype, np.dtype) and dtype.kind in "fc" for dtype in dtypes):
        array = np.asarray(x)
        if not np.isnan(np.add.reduce(array, axis=None)):  # no NaN in it
            return array
    arrays, strange, missing = [], [], []
    for label, values in columns:
        column = name if label is None else repr(label)
        drop = next((d for d in ("dropna", "drop_nulls", "drop_null") if hasattr(values, d)), "")
        there = getattr(values, drop)() if drop else values
        array = np.asarray(there, getattr(getattr(values, "dtype", None), "numpy_dtype", None))
        kind = getattr(values, "dtype", None) or getattr(values, "type", "object")
        if not _are_numbers(array):
            strange.append(f"{column} ({kind})")
        elif len(there) < len(values):
            missing.append(f"{column} ({len(values) - len(there)} of {len(values)})")
        elif not strange and not missing:
            column = name if label is None else f"{name}[{label!r}]"
            arrays.append(in_float64(array, column, or_complex=True))
    if strange:
        raise TypeError(
            f"{name} has columns that are not all numbers: {listed(strange, len(strange))}. Leave them "
            "out, or encode them as numbers; rows with missing values have to be dropped or filled"
        )
    if missing:
        raise ValueError(
            f"{name} has missing values in columns {listed(missing, len(missing))}: drop these rows, or fill "
            "the values in"
        )
    if not hasattr(x, "columns"):
        return arrays[0]
    return np.column_stack(arrays) if arrays else np.empty((len(x), 0))
