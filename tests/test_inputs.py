"""Inputs of each library, and inputs that are refused before any work."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import scipy.sparse
import torch

import neula
import neula.compat.numpy as compat_numpy
import neula.compat.scipy as compat_scipy
import neula.sklearn
from neula.io.integers import InexactIntegerError, in_float64
from neula.io.sources import row_blocks
from neula.pipeline.inputs import take


class Foreign:
    """An array of another library: DLPack out, and in through its namespace."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        return self

    def from_dlpack(self, x):
        return Foreign(np.from_dlpack(x))


class OneWay:
    """Exports DLPack and cannot take it back."""

    __init__, __dlpack__ = Foreign.__init__, Foreign.__dlpack__
    __dlpack_device__ = Foreign.__dlpack_device__


def test_dlpack_comes_back_in_its_own_library(rng, monkeypatch):
    """CuPy's arrays name no namespace: the package of their type takes the answer back."""
    A, b = rng.standard_normal((30, 4)), rng.standard_normal(30)
    result = neula.lstsq(Foreign(A), Foreign(b))
    assert isinstance(result.x, Foreign)
    np.testing.assert_allclose(result.x.array, np.linalg.lstsq(A, b, rcond=None)[0], rtol=1e-10)
    assert isinstance(neula.qr(Foreign(A)).Q, Foreign)
    with pytest.raises(TypeError, match=r"OneWay.*torch.from_dlpack\(A\)"):
        neula.qr(OneWay(A))
    package = types.ModuleType("foreignlib")
    package.from_dlpack = lambda x: np.from_dlpack(x).tolist()
    monkeypatch.setitem(sys.modules, "foreignlib", package)
    monkeypatch.setattr(OneWay, "__module__", "foreignlib.core")
    assert isinstance(neula.qr(OneWay(A)).Q, list)


def test_lists_are_arrays():
    result = neula.lstsq([[1, 0], [1, 1], [1, 2]], [1, 3, 5])
    assert isinstance(result.x, np.ndarray)
    np.testing.assert_allclose(result.x, [1, 2], rtol=1e-14)


TIMES = ("m8[ns]", "M8[ns]")
MASKED = np.ma.masked_array(np.ones((4, 2)), mask=np.eye(4, 2, dtype=bool))


@pytest.mark.parametrize(
    ("A", "error", "message"),
    [
        (np.ones((3, 2), dtype=np.clongdouble), TypeError, "A .*complex256"),
        (np.ones((3, 2), dtype=np.longdouble), TypeError, "pass float16, bfloat16, float32"),
        (np.array([[None, 1]]), TypeError, r"A\[0, 0\] is None"),
        ("matrix", TypeError, "A is text, 'matrix'"),
        (MASKED, TypeError, r"A is a masked array: pass A.filled"),
        *((np.array([[1, 2]], dtype=x), TypeError, r"A has dtype (time|date).*A - A.min") for x in TIMES),
        (scipy.sparse.eye_array(3), TypeError, r"sparse.*A.toarray\(\)"),
        (torch.eye(3).to_sparse(), TypeError, r"sparse.*A.to_dense\(\)"),
        (np.ones(3), ValueError, r"1 dimension\(s\), shape \(3,\)"),
        (np.float64(3.0), ValueError, r"0 dimension\(s\), shape \(\)"),
        (np.array([[1.0, 2.0], [3.0, np.nan]]), ValueError, r"A\[1, 1\] is nan"),
        (np.array([[1.0, -np.inf], [3.0, 4.0]]), ValueError, r"A\[0, 1\] is -inf"),
    ],
)
@pytest.mark.parametrize("function", ["qr", "orth", "svd_lowrank", "lstsq"])
def test_refused_with_a_message_that_helps(function, A, error, message):
    rows = (*getattr(A, "shape", ()), 3)[0]
    arguments = (A, np.ones(rows)) if function == "lstsq" else (A,)
    with pytest.raises(error, match=message):
        getattr(neula, function)(*arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_engine_without_a_gpu():
    with pytest.raises(ValueError, match="engine 'cuda' needs an NVIDIA GPU"):
        neula.qr(np.eye(3), engine="cuda")


def test_factors_that_overflow_the_dtype_are_an_error():
    with pytest.raises(OverflowError, match="float16: pass the input in a wider dtype"):
        neula.qr(np.full((100, 2), 6e4, dtype=np.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["auto", "cuda"])
@pytest.mark.parametrize("library", ["cupy", "jax.numpy"])
def test_arrays_of_other_gpu_libraries(library, engine, rng, monkeypatch):
    """The host may fetch a problem so small, which takes less time; its answer goes back."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of the GPU for good
    xp = pytest.importorskip(library)
    A, b = (xp.asarray(x.astype(np.float32)) for x in (rng.standard_normal((500, 40)), np.ones(500)))
    result = neula.lstsq(A, b, engine=engine)
    assert type(result.x) is type(A)
    assert torch.from_dlpack(result.x).is_cuda
    assert result.converged
    assert engine == "auto" or "cuda" in result.engine


def test_a_view_with_a_sign_is_taken_by_its_numbers() -> None:
    """Kernels read memory: the imaginary part of a conjugate has the opposite sign there."""
    x = torch.randn(6, 2, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)).conj().imag
    assert x.is_neg()
    taken = take(x, "A").tensor
    assert not taken.is_neg()
    assert taken.tolist() == x.tolist()
    q, r = neula.qr(x)
    assert torch.allclose(q @ r, x)


# --- integers ---------------------------------------------------------------------------------------------

BIG = 1_700_000_000_000_000_001


KINDS = {
    "list of integers": lambda value: [[value, 5], [1, 2], [3, 4]],
    "list": lambda value: [[value, 0.5], [1, 2], [3, 4]],
    "int64": lambda value: np.array([[value, 5], [1, 2], [3, 4]]),
    "big-endian": lambda value: np.array([[value, 5], [1, 2], [3, 4]], dtype=">i8"),
    "view": lambda value: np.array([[4, 3], [2, 1], [5, value]])[::-1, ::-1],
    "tensor": lambda value: torch.tensor([[value, 5], [1, 2], [3, 4]]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "value", [BIG, -BIG, 2**53 + 1, 2**63 - 1, 1 - 2**63, 2**53, BIG - 1, -(2**63), 2**62]
)
def test_large_integers(kind, value):
    """Exact, or refused where no float64 holds them."""
    if int(float(value)) == value:
        assert float(take(KINDS[kind](value), "A").tensor[0, 0]) == value
        return
    with pytest.raises(InexactIntegerError, match=rf"A\[0, 0\] is {value}, .*subtract an offset"):
        neula.lstsq(KINDS[kind](value), np.ones(3))


def test_every_integer_is_exact_or_refused():
    rng = np.random.default_rng(5)
    low = rng.integers(0, 4, 4000) << rng.integers(0, 12, 4000)
    for dtype, sign in (("i8", 1), ("i8", -1), ("u8", 1)):
        bits = rng.integers(50, 63 + (dtype == "u8"), 4000)
        for value in (sign * ((1 << int(b)) + int(x)) for b, x in zip(bits, low, strict=True)):
            try:
                assert int(in_float64(np.array([value], dtype=dtype), "x")[0]) == value
            except InexactIntegerError:
                assert int(float(value)) != value
    for value in (2**64 - 1, 2**200 + 1, 10**400):
        with pytest.raises(InexactIntegerError, match=f"x is {value}"):
            in_float64(value, "x")
        with pytest.raises(InexactIntegerError, match=rf"A\[0, 0\] is {value}"):
            neula.qr([[value, 1], [1, 1]])


A, RIGHT = np.array([[2.0, 1.0], [1.0, 3.0], [0.0, 1.0]]), np.array([1.0, 2.0, 3.0])
OTHERS = {
    "b": lambda: neula.lstsq(A, [BIG, 1, 1]),
    "weights": lambda: neula.lstsq(A, RIGHT, weights=[BIG, 1, 1]),
    "damp": lambda: neula.lstsq(A, RIGHT, damp=BIG),
    "C": lambda: neula.lstsq(A, RIGHT, constraints=([[BIG, 1]], [1])),
    "d": lambda: neula.lstsq(A, RIGHT, constraints=([[1, 1]], [BIG])),
    "damps": lambda: neula.ridge_path(A, RIGHT, [BIG]),
    "upper": lambda: neula.lsq_linear(A, RIGHT, bounds=([0, 0], [BIG, 1])),
    "x0": lambda: neula.least_squares(lambda p: p - 1.0, [BIG, 1]),
    "fun": lambda: neula.least_squares(lambda p: [BIG, p[0]], [1.0]),
    "p0": lambda: neula.curve_fit(lambda x, a: a * x, RIGHT, RIGHT, p0=torch.tensor([BIG])),
    "xdata": lambda: neula.curve_fit(lambda x, a: a * x, [BIG, 1, 2], RIGHT),
    "ydata": lambda: neula.curve_fit(lambda x, a: a * x, RIGHT, [BIG, 1, 2]),
    "sigma": lambda: neula.curve_fit(lambda x, a: a * x, RIGHT, RIGHT, sigma=[BIG, 1, 1]),
    "A": lambda: neula.LeastSquares(2).update(np.array([[BIG, 1]]), [1.0]),
    "block 0 of A": lambda: neula.lstsq(row_blocks(torch.tensor([[BIG, 1]] * 3)), RIGHT),
    r"A\[2, 1\] is": lambda: neula.lstsq(row_blocks(np.array([[1, 2], [3, 4], [5, BIG]])), RIGHT),
}


@pytest.mark.parametrize("name", OTHERS)
def test_integers_of_other_operands(name):
    with pytest.raises(ValueError, match=rf"^{name}\b.*{BIG}"):
        OTHERS[name]()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: compat_numpy.lstsq(x, RIGHT, rcond=None)[0],
        lambda x: compat_scipy.solve(x[:2], RIGHT[:2]),
        lambda x: neula.sklearn.LinearRegression().fit(x, RIGHT).coef_,
    ],
)
def test_drop_ins_round_integers_with_a_warning(call):
    x = np.array([[BIG, 1], [1, 3], [0, 1]])
    with pytest.warns(neula.AccuracyWarning, match=rf"\[0, 0\] is {BIG}.*rounded"):
        found = call(x)
    assert np.array_equal(found, call(x.astype(float)), equal_nan=True)


# --- tables -----------------------------------------------------------------------------------------------


def tables():
    pd = pytest.importorskip("pandas")
    pa = pytest.importorskip("pyarrow")
    plain = pd.DataFrame({"x": [1.0, 2, 4, 3], "z": [1, 0, 1, 1], "g": [True, False, True, False]})
    numbers = plain[["x", "z"]]
    return {
        "float, int, bool": plain,
        "nullable": plain.convert_dtypes(),
        "arrow": plain.convert_dtypes(dtype_backend="pyarrow"),
        "objects": plain.astype(object),
        "categories": plain.astype({"z": "category"}),
        "sparse": plain.astype({"x": pd.SparseDtype("float64", 0), "z": pd.SparseDtype("int64", 0)}),
        "all sparse": numbers.astype(pd.SparseDtype("float64", 0)),
        "table": pa.table(plain),
        "batch": pa.RecordBatch.from_pandas(plain),
        "one name twice": pd.DataFrame(plain.to_numpy(float), columns=["x", "x", "g"]),
    }


def test_tables_of_numbers():
    numbers = np.array([[1, 1, 1], [2, 0, 0], [4, 1, 1], [3, 1, 0]], dtype=float)
    for kind, table in tables().items():
        width = len(getattr(table, "column_names", getattr(table, "columns", ())))
        np.testing.assert_array_equal(take(table, "A").tensor.numpy(), numbers[:, :width], err_msg=kind)
        b = table.column(0) if hasattr(table, "column_names") else table.iloc[:, 0]
        np.testing.assert_allclose(neula.lstsq(table, b).x, np.eye(width)[0], atol=1e-14, err_msg=kind)


@pytest.mark.parametrize("dtype", ["Int64", "Float64", "boolean", "float64[pyarrow]", "float64"])
def test_missing_values_are_told_by_the_name_of_their_column(dtype):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    column = pd.Series([1, None, 0]).astype(dtype)
    table = pd.DataFrame({"whole": [1.0, 2.0, 3.0], "gaps": column})
    with pytest.raises(ValueError, match=r"A has missing values in columns 'gaps' \(1 of 3\): drop"):
        neula.lstsq(table, RIGHT)
    with pytest.raises(ValueError, match=r"b has missing values"):
        neula.lstsq(A, column)


def test_integers_and_dates_in_tables():
    pd = pytest.importorskip("pandas")
    pa = pytest.importorskip("pyarrow")
    table = pd.DataFrame({"y": [0.5, 1, 2], "t": [1, BIG, 2]})
    for given in (table, table.convert_dtypes(), pa.table(table)):
        with pytest.raises(InexactIntegerError, match=rf"A\['t'\]\[1\] is {BIG}"):
            neula.lstsq(given, RIGHT)
    table["t"] = pd.to_datetime(table["t"])
    with pytest.raises(TypeError, match=r"not all numbers: 't' \(datetime64"):
        neula.lstsq(table, RIGHT)
