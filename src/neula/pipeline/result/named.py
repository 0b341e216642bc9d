"""Results whose coefficients have the names of the columns of A."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from neula.errors import needs_extra


class Named:
    """Coefficients by name; a part of results of functions that take tables.

    Attributes
    ----------
    names : tuple of str or None
        Names of the coefficients: those of A's columns, if A is a table of pandas, Polars or Arrow, or a
        DataArray of xarray; ``"intercept"`` first, if there is one.
    responses : tuple of str or None
        Names of the columns of b.
    """

    x: Any
    names: tuple[str, ...] | None = None
    responses: tuple[str, ...] | None = None
    _library: str = "pandas"
    _axis: int | None = None  # of x, along which coefficients lie; None: after the dimensions of ``accepted``
    _facts: tuple[str, ...] = ("converged", "accuracy", "residual_norm", "forward_error", "digits")

    @property
    def coefficients(self) -> dict[str, Any]:
        """Coefficients by name, without names as ``x1``, ``x2`` and so on: numbers, or arrays of several.

        Raises
        ------
        ValueError
            If two columns have the same name.
        """
        return self._by_name(self._coefficients())

    def to_frame(self) -> Any:
        """Coefficients as a table in the library of A: pandas (the default), Polars or Arrow.

        A row for each coefficient, with standard errors and intervals if there are any; for several
        right-hand sides or dampings a column for each.

        Raises
        ------
        ImportError
            Without narwhals, or the library.
        ValueError
            For batches.
        """
        columns = self._columns()
        names, library = self._labels(len(self._coefficients())), self._library
        try:
            if library not in ("polars", "pyarrow"):
                import pandas

                return pandas.DataFrame(columns, index=list(names))
            import narwhals
        except ImportError:
            raise needs_extra("a table of coefficients", "pandas and narwhals", "io") from None
        backend: Any = library
        return narwhals.from_dict({"name": list(names), **columns}, backend=backend).to_native()

    def to_dict(self) -> dict[str, Any]:
        """Coefficients, errors and measures of the fit as numbers, lists and dictionaries of Python."""
        found = {"coefficients": {name: _plain(value) for name, value in self.coefficients.items()}}
        if self._coefficients().ndim == 1:
            others = list(self._columns().items())[1:]
            found |= {name: self._by_name(values) for name, values in others}
        return found | {name: _plain(getattr(self, name)) for name in self._facts}

    def to_json(self, **options: Any) -> str:
        """The table as JSON, with null for NaN and infinities, and pairs for complex numbers.

        Parameters
        ----------
        **options
            For :func:`json.dumps`.
        """
        return json.dumps(_finite(self.to_dict()), allow_nan=False, **options)

    @property
    def _axis_of_x(self) -> int:
        if self._axis is None:  # a stream has none accepted by itself
            accepted = getattr(self, "accepted", None)
            return 0 if accepted is None else int(accepted.ndim)
        return self._axis

    def _coefficients(self) -> np.ndarray:
        """Array with one coefficient, or the coefficients of one name, along its first axis."""
        return np.moveaxis(as_numpy(self.x), self._axis_of_x, 0)

    def _columns(self) -> dict[str, np.ndarray]:
        found = self._coefficients()
        if found.ndim == 1:
            return {"coefficient": found}
        if found.ndim > 2 or self._axis_of_x % found.ndim:
            raise ValueError(f"a table is for one problem, and x has shape {tuple(self.x.shape)}")
        given = self.responses
        wanted = given if given and len(given) == found.shape[1] else _numbered("b", found.shape[1])
        return dict(zip(wanted, found.T, strict=True))

    def _labels(self, count: int) -> tuple[str, ...]:
        return self.names if self.names and len(self.names) == count else _numbered("x", count)

    def _by_name(self, values: np.ndarray) -> dict[str, Any]:
        names = self._labels(len(values))
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two columns of A are named {twice!r}: take x, or rename one")
        return {name: v.item() if v.ndim == 0 else v for name, v in zip(names, values, strict=True)}


def as_numpy(x: Any) -> np.ndarray:
    """An array of any library on the host, without its gradient."""
    x = x.detach().cpu() if hasattr(x, "detach") else x.get() if hasattr(x, "get") else x
    return np.asarray(x)


def _numbered(letter: str, count: int) -> tuple[str, ...]:
    return tuple(f"{letter}{i + 1}" for i in range(count))


def _plain(value: Any) -> Any:
    return as_numpy(value).tolist() if hasattr(value, "shape") else value


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, complex):
        value = value.real, value.imag
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
