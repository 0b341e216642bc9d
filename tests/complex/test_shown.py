"""Complex numbers in lists and tables, and on the screen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from neula.io.integers import InexactIntegerError, in_float64
from neula.pipeline.inputs import as_array, no_numbers
from neula.pipeline.result import shown


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_numbers_on_the_screen(dtype: type) -> None:
    x = np.array([1.25 - 3.1j, 2, -1e-20j, complex(np.nan, np.inf)], dtype)
    for one in (x, torch.from_numpy(x), torch.from_numpy(x.conj()).conj()):
        assert shown.numbers(one) == "1.25-3.1j, 2+0j, -0-1e-20j, nan+infj"
        assert shown.array(one).startswith(f"(4,) {np.dtype(dtype)}: [1.25-3.1j, ")
    assert shown.numbers(1j * np.arange(9)) == "0+0j, 0+1j, 0+2j, ..., 0+6j, 0+7j, 0+8j"


@pytest.mark.parametrize(
    "given",
    [
        [[1, 2j], [True, 3.5]],
        ((np.float32(1), 2j), (1, np.complex64(3.5))),
        np.array([[1, 2j], [1, 3.5]], dtype=object),
    ],
)
def test_lists_and_objects(given: object) -> None:
    found = as_array(given, "A")
    assert found.dtype == np.complex128
    assert found.tolist() == [[1, 2j], [1, 3.5]]


def test_what_is_refused_among_them() -> None:
    for given in ([2**53 + 1, 1j], np.array([2**53 + 1, 1j], dtype=object)):
        with pytest.raises(InexactIntegerError, match=r"b\[0\] is 9007199254740993"):
            as_array(given, "b")
    assert as_array([2.0**60, 1j], "b").tolist() == [2.0**60, 1j]
    for given in ([1, 1j], np.array([1j]), np.array([1, 1j], dtype=object), 1j):
        with pytest.raises(TypeError, match=r"bounds is complex \(.*\), and must be real"):
            in_float64(given, "bounds")
    error = no_numbers(np.array([1j, "1+2j"], dtype=object), "A")
    assert str(error).startswith("A[1] is '1+2j', a str: pass numbers")


def test_tables() -> None:
    pd, pl = pytest.importorskip("pandas"), pytest.importorskip("polars")
    z = np.array([1 + 2j, 3, 4j], np.complex64)
    frame = pd.DataFrame({"z": z, "w": [1.0, 2, 3], "n": [1, 2, 3]})
    found = as_array(frame, "A")
    assert found.dtype == np.complex128
    assert found.tolist() == [[1 + 2j, 1, 1], [3, 2, 2], [4j, 3, 3]]
    assert as_array(frame[["z"]], "A").dtype == np.complex64
    assert as_array(frame["z"], "b").tolist() == z.tolist()
    frame.loc[1, "z"] = np.nan
    with pytest.raises(ValueError, match=r"missing values in columns 'z' \(1 of 3\)"):
        as_array(frame, "A")
    frame = pl.DataFrame({"z": z.tolist()}, schema={"z": pl.Object}).with_columns(n=pl.lit(2))
    assert as_array(frame, "A").tolist() == [[1 + 2j, 2], [3, 2], [4j, 2]]
