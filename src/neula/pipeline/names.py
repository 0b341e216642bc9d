"""Names of columns and labels of rows: read from the tables that a function is given, kept by its results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from neula.io.sources import Parquet, is_source
from neula.pipeline.result import AccuracyError

P = ParamSpec("P")
T = TypeVar("T")

INTERCEPT = "intercept"


def column_names(x: Any) -> tuple[str, ...] | None:
    """Names of the columns of a table, a labelled DataArray of xarray, or a source of Parquet."""
    if isinstance(x, (np.ndarray, torch.Tensor, list, tuple)) or type(x).__name__ == "LazyFrame":
        return None
    if is_source(x):
        return x.names if isinstance(x, Parquet) else None
    if (labels := _coordinates(x, 1)) is not None:
        return tuple(map(str, labels))
    found: Any = getattr(x, "column_names", None) or getattr(x, "columns", None)
    is_table = found is not None and (hasattr(x, "column_names") or hasattr(type(x), "dtypes"))
    return tuple(map(str, found)) if is_table else None


def row_labels(x: Any) -> Any:
    """The index of the rows of a table or series of pandas, or of a DataArray; None of what has none."""
    return x.index if hasattr(x, "iloc") else _coordinates(x, 0)


def _coordinates(x: Any, axis: int) -> Any:
    dims = getattr(x, "dims", None)  # of a Dataset no tuple
    if not hasattr(x, "indexes") or not isinstance(dims, tuple) or len(dims) <= axis:
        return None
    return x.indexes.get(dims[axis])


def check_aligned(labels: Any, others: Mapping[str, Any], name: str = "A") -> None:
    """Refuse arguments whose rows have labels other than those of A: rows go by position."""
    for other, x in others.items():
        theirs = None if isinstance(x, (np.ndarray, torch.Tensor)) else row_labels(x)
        if theirs is None or labels is None or len(theirs) != len(labels) or labels.equals(theirs):
            continue
        place = int(np.flatnonzero(np.asarray(labels != theirs))[0])
        by_label = f"{other}.loc[{name}.index]" if hasattr(x, "iloc") else f"{other}.reindex_like({name})"
        raise ValueError(
            f"{other} has other row labels than {name}: {theirs[place]} at row {place}, where {name} has "
            f"{labels[place]}; pass {by_label} to match rows by label, or "
            f"{other}.to_numpy() to go by position"
        )


def in_order(x: Any, names: tuple[str, ...] | None, name: str) -> Any:
    """The columns of a table in the order of their names; what is no table stays as it is."""
    theirs = column_names(x)
    if names is None or theirs is None or theirs == names:
        return x
    missing = [repr(one) for one in names if one not in theirs]
    if isinstance(x, Parquet):
        raise ValueError(
            f"columns of {name} are {', '.join(theirs)}: name them in the order {', '.join(names)}"
        )
    if missing:
        raise ValueError(f"{name} has no column {', '.join(missing)}: it has {', '.join(theirs) or 'none'}")
    places = [theirs.index(one) for one in names]
    if hasattr(x, "iloc"):
        return x.iloc[:, places]
    if hasattr(x, "indexes"):
        return x[:, places]
    return x.select([(getattr(x, "column_names", None) or x.columns)[i] for i in places])


def keeps_names(function: Callable[P, T]) -> Callable[P, T]:
    """A function of A and b whose result keeps the names of their columns; rows must have the same labels."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        a = args[0] if args else kwargs.get("A")
        if type(a) is np.ndarray or type(a) is torch.Tensor:  # microseconds count
            return function(*args, **kwargs)
        others = {"b": args[1] if len(args) > 1 else kwargs.get("b"), **kwargs}
        check_aligned(row_labels(a), {name: x for name, x in others.items() if name != "A"})
        names = column_names(a)
        if names is None:
            return function(*args, **kwargs)
        if isinstance(pair := kwargs.get("constraints"), (tuple, list)) and len(pair) == 2:
            kwargs["constraints"] = in_order(pair[0], _of_constraints(pair[0], names), "C"), pair[1]
        known = {
            "names": (INTERCEPT, *names) if kwargs.get("intercept") else names,
            "responses": column_names(others["b"]) or _series_name(others["b"]),
            "_library": type(a).__module__.partition(".")[0],
            "_row_labels": row_labels(a),
        }
        try:
            result = function(*args, **kwargs)
        except AccuracyError as missed:
            vars(missed.result).update(known)
            raise
        vars(result).update(known)
        return result

    return call


def keeps_names_of_start(function: Callable[P, T]) -> Callable[P, T]:
    """A function of ``fun`` and ``x0`` whose result keeps the labels of x0; bounds are taken by them."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        x0 = args[1] if len(args) > 1 else kwargs.get("x0")
        labels = None if isinstance(x0, (np.ndarray, torch.Tensor)) else row_labels(x0)
        if labels is None:
            return function(*args, **kwargs)
        names = tuple(map(str, labels))
        given: Any = list(args)
        if "bounds" in kwargs:
            kwargs["bounds"] = ends_by_name(kwargs["bounds"], names)
        elif len(given) > 3:  # fun, x0, jac, bounds
            given[3] = ends_by_name(given[3], names)
        result = function(*given, **kwargs)
        vars(result)["names"] = names
        return result

    return call


def by_name(values: Any, names: tuple[str, ...] | None, name: str) -> Any:
    """Values of a mapping, or of a series that pandas has not numbered, in the order of names."""
    labels = row_labels(values) if hasattr(values, "items") else None
    is_labelled = isinstance(values, Mapping) or type(labels).__name__ not in ("NoneType", "RangeIndex")
    if names is None or not is_labelled:
        return values
    given = {str(key): value for key, value in values.items()}
    if set(given) != set(names):
        raise ValueError(f"{name} has {', '.join(given)}, and the parameters are {', '.join(names)}")
    return [given[one] for one in names]


def ends_by_name(bounds: Any, names: tuple[str, ...] | None) -> Any:
    """A pair of lower and upper bounds, each :func:`by_name`; other kinds of bounds stay as they are."""
    if names is None or not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        return bounds
    return tuple(map(by_name, bounds, (names, names), ("lower bound", "upper bound")))


def _of_constraints(c: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the columns of C in the order of A's, with an intercept where C has one."""
    return (INTERCEPT, *names) if INTERCEPT in (column_names(c) or ()) and INTERCEPT not in names else names


def _series_name(x: Any) -> tuple[str, ...] | None:
    name = None if isinstance(x, (np.ndarray, torch.Tensor)) else getattr(x, "name", None)
    return None if name is None else (str(name),)
