"""Messages for what is no array of numbers: they say what was given and what to pass."""

from __future__ import annotations

import decimal
import pathlib
import re
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sparse
import scipy.sparse.linalg

import neula

b = np.ones(3)


class Frame:
    """Stand-in for a data frame, of pandas or of Polars."""

    def __init__(self, **columns: Any) -> None:
        self._columns = {name: np.asarray(values) for name, values in columns.items()}
        self.columns = list(columns)
        self.dtypes = [values.dtype for values in self._columns.values()]

    def __getitem__(self, name: str) -> np.ndarray:
        return self._columns[name]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array([list(row) for row in zip(*self._columns.values(), strict=True)], dtype=object)


CASES: list[tuple[Any, str]] = [
    (None, "A is None: pass an array"),
    ("data.csv", "A is text, 'data.csv': .* read that first"),
    (pathlib.Path("data") / "a.npy", "A is text, 'data.a.npy': .* numpy.load"),
    ({"x": [1.0], "y": [2.0]}, r"A is a dict with keys 'x', 'y': .*list\(A.values\(\)\)"),
    (dict.fromkeys("abcdefgh", b), "keys 'a', 'b', 'c', 'd', 'e', 3 more"),
    (scipy.sparse.linalg.aslinearoperator(np.eye(3)), r"LinearOperator of shape \(3, 3\), .*numpy.eye\(3\)"),
    (sparse.eye_array(3), r"A is a sparse dia_array: pass A.toarray\(\)"),
    (sparse.csr_matrix(np.eye(3)), r"A is a sparse csr_matrix: pass A.toarray\(\)"),
    (Frame(x=b, city=["a", "b", "c"], y=b, when=["x", "y", "z"]), r"not all numbers: 'city' .*'when' "),
    (Frame(x=np.array([1, None, 2], dtype=object)), r"'x' \(object\).*missing values"),
    ((i for i in range(3)), "A is a generator, which is no array"),
    (object(), "A is a object, which is no array"),
    (len, "A is a builtin_function_or_method, which is no array"),
    (np.array([["1", "2"]]), r"A has dtype <U1: pass numbers, e.g. A.astype\(float\)"),
    (np.array([[1.0, "q"]], dtype=object), r"A\[0, 1\] is 'q', a str: "),
    (np.array([[decimal.Decimal(1)]]), r"A\[0, 0\] is Decimal\('1'\), a Decimal: .*A.astype\(float\)"),
    (np.array([[1.0, 2]], dtype=object), "A has dtype object: pass numbers"),
    (np.array([["2020-01-01"]], dtype="M8[D]"), r"A has dtype datetime64\[D\]: pass numbers"),
    (neula.qr(np.eye(3)), "A is a QRResult, .* e.g. A.R"),
    (neula.solve(np.eye(3), b), "A is a SolveResult, .* e.g. A.x"),
]


@pytest.mark.parametrize(("given", "message"), CASES, ids=[message[:30] for _, message in CASES])
def test_message(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        neula.lstsq(given, b)
    with pytest.raises(TypeError, match=re.sub(r"\bA\b", "b", message)):
        neula.lstsq(np.eye(3), given)
    with pytest.raises(TypeError, match=message):
        neula.qr(given)


def test_rows_of_different_lengths() -> None:
    with pytest.raises(ValueError, match=r"A is a list of which NumPy makes no array: .*inhomogeneous"):
        neula.qr([[1.0, 2.0], [3.0]])


def test_frames_of_numbers_are_matrices() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": [1.0, 2.0, 3.0], "y": [1, 0, 1]})
    assert neula.lstsq(frame, frame["x"]).x.round(12).tolist() == [1.0, 0.0]
    frame["city"] = ["a", "b", "c"]
    with pytest.raises(TypeError, match="'city'"):
        neula.qr(frame)


@pytest.mark.parametrize(
    ("name", "meant"), [("lstq", "lstsq"), ("LSTSQ", "lstsq"), ("solv", "solve"), ("LuFactors", "LUFactors")]
)
def test_misspelled_functions(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': did you mean '{meant}'"):
        getattr(neula, name)


@pytest.mark.parametrize("name", ["frobnicate", "__wrapped__", "_private"])
def test_names_like_no_other(name: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'$"):
        getattr(neula, name)
