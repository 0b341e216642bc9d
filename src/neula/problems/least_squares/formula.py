"""Least squares by a formula and a table."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from neula.errors import needs_extra
from neula.pipeline.names import INTERCEPT
from neula.pipeline.result import LstsqResult
from neula.problems.least_squares.lstsq import lstsq
from neula.problems.signatures import LstsqKeywords

OF_ROWS = ("weights", "sigma", "sample_weight")
"""Keywords that may name a column of the table."""


def fit_formula(formula: str, data: Any, **keywords: Unpack[LstsqKeywords]) -> LstsqResult[Any]:
    """Solve the least-squares problem of a formula, such as ``"y ~ x1 + C(region)"``, for a table.

    Categories become columns of zeros and ones; one of them, the reference, has none where there is an
    intercept. The intercept is that of ``intercept=True``, and is not damped.

    Parameters
    ----------
    formula : str
        In the notation of patsy and R, read by `formulaic <https://matthewwardrop.github.io/formulaic>`_:
        variables are columns of the table, ``a:b`` and ``a * b`` interactions, ``- 1`` leaves out the
        intercept, ``C(x)`` a category, ``np.log(x)`` a function, ``I(x**2)`` arithmetic, and backticks
        quote names that Python does not allow.
    data : table
        Of pandas, Polars or Arrow, or a dictionary of columns.
    **keywords
        Of :func:`neula.lstsq`. ``weights``, ``sigma`` and ``sample_weight`` may be names of columns.

    Returns
    -------
    LstsqResult
        Whose ``predict`` takes a table with the same variables.

    Raises
    ------
    ImportError
        Without formulaic.
    ValueError
        For a formula without a response, missing values, and as :func:`neula.lstsq`.

    See Also
    --------
    lstsq : the same for matrices.

    Examples
    --------
    >>> import pandas, neula
    >>> table = pandas.DataFrame({"y": [1.0, 3.0, 4.0, 8.0], "x": [0.0, 1.0, 0.0, 2.0], "kind": list("aabb")})
    >>> result = neula.fit_formula("y ~ x + kind", table)
    >>> {name: round(value, 12) for name, value in result.coefficients.items()}
    {'intercept': 1.0, 'x': 2.0, 'kind[T.b]': 3.0}
    >>> result.predict(pandas.DataFrame({"x": [1.0], "kind": ["b"]})).round(12)
    array([6.])
    """
    try:
        import formulaic
    except ImportError:
        raise needs_extra("a formula", "formulaic", "formula") from None
    if isinstance(data, dict):
        import pandas

        data = pandas.DataFrame(data)
    given: dict[str, Any] = dict(keywords)
    for name in OF_ROWS:
        if isinstance(column := given.get(name), str):
            given[name] = data[column]
    matrices = _evaluated(formula, lambda **how: formulaic.model_matrix(formula, data, context=None, **how))
    if not hasattr(matrices, "lhs"):
        raise ValueError(f"the formula {formula!r} has no response: write it like 'y ~ {formula}'")
    names, responses = (_names(one) for one in (matrices.rhs, matrices.lhs))
    constant = "Intercept" in names
    a, b = (_numbers(one) for one in (matrices.rhs, matrices.lhs))
    result = lstsq(_without(a, names), b[:, 0] if b.shape[1] == 1 else b, **{**given, "intercept": constant})
    kept = [name for name in names if name != "Intercept"]
    vars(result).update(
        names=(INTERCEPT, *kept) if constant else tuple(kept),
        responses=tuple(responses),
        _design=_Design(matrices.rhs.model_spec),
    )
    return result


def _names(matrix: Any) -> list[str]:
    return [str(name) for name in matrix.model_spec.column_names]


def _numbers(matrix: Any) -> np.ndarray:
    found = np.asarray(matrix)
    return found.astype(np.complex128 if found.dtype.kind == "c" else np.float64, copy=False)


def _without(a: np.ndarray, names: list[str]) -> np.ndarray:
    """Columns other than the intercept."""
    return np.ascontiguousarray(a[:, [name != "Intercept" for name in names]])


@dataclass(frozen=True)
class _Design:
    """From a table to the columns of the fit."""

    spec: Any  # of formulaic

    def __call__(self, table: Any) -> np.ndarray:
        found = _evaluated(self.spec.formula, lambda **how: self.spec.get_model_matrix(table, **how))
        return _without(_numbers(found), _names(found))


def _evaluated(formula: Any, matrices: Callable[..., Any]) -> Any:
    """Matrices of a formula."""
    from formulaic.errors import DataMismatchWarning, FormulaicError

    try:
        with warnings.catch_warnings():
            # A category that the fit has not seen would be taken for the reference.
            warnings.simplefilter("error", DataMismatchWarning)
            return matrices(output="numpy", na_action="raise")
    except (FormulaicError, DataMismatchWarning, ValueError) as wrong:
        why = str(wrong).partition("\n")[0].partition(". They are being")[0]
        if "null values" in why:
            why = why.rstrip(".") + ": drop these rows, or fill the values in"
        raise ValueError(f"the formula {str(formula)!r} does not fit the table: {why}") from wrong
