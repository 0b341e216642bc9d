"""Names of tables in results, and rows that belong together."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

import neula
from neula.io.sources import row_blocks

pandas = pytest.importorskip("pandas")
RNG = np.random.default_rng(3)
A = RNG.standard_normal((12, 2))
B = A @ [1.0, 2.0] + 0.1 * RNG.standard_normal(12)
FRAME = pandas.DataFrame(A, columns=["u", "v"], index=[f"r{i}" for i in range(12)])
SERIES = pandas.Series(B, index=FRAME.index, name="y")


def tables():
    """A, b, and the library of ``to_frame``."""
    yield "pandas", lambda: (FRAME, SERIES)
    yield "polars", lambda: _polars(pytest.importorskip("polars"))
    yield "pyarrow", lambda: _arrow(pytest.importorskip("pyarrow"))
    yield "xarray", lambda: _xarray(pytest.importorskip("xarray"))


def _polars(polars):
    return polars.DataFrame({"u": A[:, 0], "v": A[:, 1]}), polars.Series("y", B)


def _arrow(arrow):
    return arrow.table({"u": A[:, 0], "v": A[:, 1]}), arrow.table({"y": B})


def _xarray(xarray):
    rows = {"row": FRAME.index}
    a = xarray.DataArray(A, dims=("row", "column"), coords={**rows, "column": ["u", "v"]})
    return a, xarray.DataArray(B, dims=("row",), coords=rows, name="y")


@pytest.mark.parametrize(("library", "given"), list(tables()), ids=lambda x: x if isinstance(x, str) else "")
def test_libraries(library, given) -> None:
    a, b = given()
    result = neula.lstsq(a, b)
    plain = neula.lstsq(A, B)
    flat = result.x[:, 0] if result.x.ndim == 2 else result.x
    assert type(result.x) is np.ndarray
    np.testing.assert_allclose(flat, plain.x, rtol=1e-12)
    assert (result.names, result.responses) == (("u", "v"), ("y",))
    assert result.coefficients == {"u": flat[0], "v": flat[1]}
    frame = result.to_frame()
    assert type(frame).__module__.partition(".")[0] == ("pandas" if library == "xarray" else library)
    reordered = (
        a[:, ::-1] if library == "xarray" else a.select(["v", "u"]) if library != "pandas" else a[["v", "u"]]
    )
    np.testing.assert_allclose(np.ravel(result.predict(reordered)), A @ plain.x, rtol=1e-12)
    assert pickle.loads(pickle.dumps(result)).names == ("u", "v")


@pytest.mark.parametrize("function", [neula.lstsq, neula.nnls, neula.lsq_linear])
def test_functions(function) -> None:
    result = function(FRAME, SERIES)
    assert list(result.coefficients) == ["u", "v"]
    assert list(result.to_frame().index) == ["u", "v"]
    assert function(A, B).names is None
    with pytest.raises(ValueError, match=r"b has other row labels than A: r11 at row 0, where A has r0"):
        function(FRAME, SERIES[::-1])
    np.testing.assert_array_equal(function(FRAME, SERIES.to_numpy()).x, function(A, B).x)


def test_weights_and_constraints_with_labels() -> None:
    with pytest.raises(ValueError, match="weights has other row labels"):
        neula.lstsq(FRAME, SERIES, weights=SERIES[::-1])
    C = pandas.DataFrame([[1.0, 3.0]], columns=["v", "u"])
    by_name = neula.lstsq(FRAME, SERIES, constraints=(C, [1.0]))
    np.testing.assert_array_equal(by_name.x, neula.lstsq(A, B, constraints=(C.to_numpy()[:, ::-1], [1.0])).x)


def test_paths_of_ridge_regression() -> None:
    path = neula.ridge_path(FRAME, SERIES, [0.5, 2.0])
    np.testing.assert_array_equal(path.coefficients["v"], path.x[:, 1])
    assert path.to_frame().shape == (2, 2)
    assert path.to_dict()["damps"] == [0.5, 2.0]


def test_tables_without_columns() -> None:
    for result in (neula.ridge_path(FRAME, SERIES, []), neula.lstsq(FRAME, B[:, None][:, :0])):
        assert result.to_frame().shape == (2, 0)
        assert list(result.to_frame().index) == ["u", "v"]


def test_several_responses() -> None:
    right = pandas.DataFrame({"p": B, "q": -B}, index=FRAME.index)
    result = neula.lstsq(FRAME, right)
    assert list(result.to_frame().columns) == ["p", "q"]
    np.testing.assert_array_equal(result.coefficients["u"], result.x[0])


@pytest.mark.parametrize("function", [neula.lstsq, neula.nnls, neula.lsq_linear])
@pytest.mark.parametrize("batch", [(2,), (2, 2), (0,)])
@pytest.mark.parametrize("k", [None, 2])
def test_coefficients_of_batches(function, batch, k) -> None:
    a = np.random.default_rng(0).random((*batch, 5, 2))
    result = function(a, B[:5] if k is None else np.ones((*batch, 5, k)))
    for j, values in enumerate(result.coefficients.values()):
        np.testing.assert_array_equal(values, result.x[..., j] if k is None else result.x[..., j, :])
    assert list(result.to_dict()["coefficients"]) == ["x1", "x2"]
    with pytest.raises(ValueError, match="a table is for one problem"):
        result.to_frame()
    if function is neula.lstsq:
        x = result.x[..., None] if k is None else result.x
        expected = a @ x
        np.testing.assert_allclose(result.predict(a), expected[..., 0] if k is None else expected, rtol=1e-13)


def test_complex_coefficients_as_json() -> None:
    result = neula.lstsq(A, (1 + 2j) * B)
    found = json.loads(result.to_json())["coefficients"]
    assert found == {f"x{i + 1}": [z.real, z.imag] for i, z in enumerate(result.x)}


def test_names_that_are_there_twice() -> None:
    result = neula.lstsq(pandas.DataFrame(A, columns=["u", "u"]), B)
    with pytest.raises(ValueError, match="two columns of A are named 'u'"):
        _ = result.coefficients


def test_predictions_refuse_what_does_not_fit() -> None:
    result = neula.lstsq(FRAME, SERIES, intercept=True)
    with pytest.raises(ValueError, match="A has no column 'v'"):
        result.predict(FRAME[["u"]])
    with pytest.raises(ValueError, match="1 columns, and the fit 2 without the intercept"):
        result.predict(A[:, :1])


def test_fits_that_are_held_open(tmp_path) -> None:
    fit, plain = neula.LeastSquares(2), neula.LeastSquares(2)
    for half in (slice(6), slice(6, 12)):
        fit.update(FRAME[half] if half.start is None else FRAME[["v", "u"]][half], SERIES[half])
        plain.update(A[half], B[half])
    fit.save(tmp_path / "fit.npz")
    for one in (fit, neula.LeastSquares.load(tmp_path / "fit.npz")):
        assert one.solve().coefficients == dict(zip("uv", plain.solve().x, strict=True))
    with pytest.raises(ValueError, match="no column 'v'"):
        fit.update(FRAME[["u"]], SERIES)
    with pytest.raises(ValueError, match="other row labels"):
        fit.update(FRAME, SERIES[::-1])
    other = neula.LeastSquares(2)
    other.update(FRAME[["v", "u"]], SERIES)
    with pytest.raises(ValueError, match="columns are v, u, and u, v here"):
        fit.merge(other)


def test_parameters_of_models() -> None:
    x = np.linspace(0, 4, 30)
    y = 3 * np.exp(-1.5 * x) + 0.5 + 0.01 * np.sin(99 * x)

    def model(x, a, b, c):
        return a * np.exp(-b * x) + c

    fit = neula.curve_fit(model, x, y, p0={"c": 0.1, "b": 1.0, "a": 2.0})
    assert list(fit.coefficients) == ["a", "b", "c"]
    np.testing.assert_allclose(fit.popt, neula.curve_fit(model, x, y, p0=[2.0, 1.0, 0.1]).popt, rtol=1e-9)
    np.testing.assert_array_equal(fit.to_frame()["standard_error"], fit.standard_errors())
    assert fit.to_dict()["coefficients"] == fit.coefficients
    with pytest.raises(ValueError, match="the parameters are a, b, c"):
        neula.curve_fit(model, x, y, p0={"a": 1.0, "k": 2.0, "c": 3.0})
    with pytest.raises(ValueError, match="ydata has other row labels than xdata"):
        neula.curve_fit(model, pandas.Series(x), pandas.Series(y)[::-1])


def test_labels_of_the_start() -> None:
    start = pandas.Series([-1.2, 1.0], index=["p", "q"])
    result = neula.least_squares(lambda x: np.array([10 * (x[1] - x[0] ** 2), 1 - x[0]]), start)
    assert result.coefficients == {"p": result.x[0], "q": result.x[1]}


def test_bounds_go_by_labels() -> None:
    lower, upper = {"v": 0.0, "u": 0.0}, {"v": 0.5, "u": 9.0}
    expected = neula.lsq_linear(A, B, bounds=(0.0, [9.0, 0.5])).x
    for kind in (dict, pandas.Series):
        pair = kind(lower), kind(upper)
        np.testing.assert_array_equal(neula.lsq_linear(FRAME, B, bounds=pair).x, expected)
        fit = neula.curve_fit(lambda _, u, v: A @ [u, v], A[:, 0], B, p0={"v": 0.2, "u": 0.1}, bounds=pair)
        np.testing.assert_allclose(fit.popt, expected, rtol=1e-9)
    start = pandas.Series([0.1, 0.1], index=["u", "v"])
    for found in (
        neula.least_squares(lambda x: A @ x - B, start, bounds=pair),
        neula.least_squares(lambda x: A @ x - B, start, lambda x: A, pair),
    ):
        np.testing.assert_allclose(found.x, expected, rtol=1e-9)
    by_position = neula.lsq_linear(FRAME, B, bounds=(0.0, pandas.Series([9.0, 0.5])))
    np.testing.assert_array_equal(by_position.x, expected)
    with pytest.raises(ValueError, match="lower bound has u, and the parameters are u, v"):
        neula.lsq_linear(FRAME, B, bounds=({"u": 0.0}, 1.0))


def test_sources_of_parquet(tmp_path) -> None:
    pytest.importorskip("pyarrow")
    FRAME.assign(y=B).to_parquet(tmp_path / "table.parquet")

    def columns(names):
        return row_blocks(tmp_path / "table.parquet", names)

    result = neula.lstsq(columns(["v", "u"]), columns("y"))
    assert (result.names, result.responses) == (("v", "u"), ("y",))
    assert list(result.to_frame().index) == ["v", "u"]
    fit = neula.LeastSquares(2)
    fit.update(columns(["v", "u"]), columns("y"))
    with pytest.raises(ValueError, match="columns of A are u, v: name them in the order v, u"):
        fit.update(columns(["u", "v"]), columns("y"))
    assert list(fit.solve().coefficients) == ["v", "u"]


def test_a_table_that_is_not_read_yet() -> None:
    polars = pytest.importorskip("polars")
    with pytest.raises(TypeError, match=r"A is a LazyFrame, which has no numbers yet: pass A\.collect"):
        neula.lstsq(polars.DataFrame({"u": B}).lazy(), B)
