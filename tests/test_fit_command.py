"""``neula fit``: a table and a formula in, parameters with errors out."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import neula
from neula.cli.app import app
from neula.io.datasets import nist_nonlinear

X = np.linspace(0, 5, 40)
Y = 2.5 * np.exp(-1.3 * X) + 0.5 + 0.05 * np.random.default_rng(1).standard_normal(40)
EXPECTED = neula.curve_fit(lambda x, a, b, c: a * np.exp(-b * x) + c, X, Y)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    table = np.column_stack([X, Y, 0.7 + 0.2 * np.sin(X)])
    np.savetxt("data.csv", table, delimiter=",", header="x,y,s", comments="")
    np.savetxt("bare.csv", table[:, :2], delimiter=",")
    return tmp_path


def fit(*arguments: str) -> Result:
    return CliRunner().invoke(app, ("fit", *arguments))


def answer(result: Result) -> dict[str, list[float]]:
    header, *rows = csv.reader(io.StringIO(result.stdout))
    assert header == ["", "value", "standard_error"]
    return {name: [float(v) for v in numbers] for name, *numbers in rows}


@pytest.mark.parametrize(
    "arguments",
    [
        ("data.csv", "a*exp(-b*x)+c", "--response", "y"),
        ("data.csv", "y = a*exp(-b*x) + c"),
        ("data.csv", "a*exp(-b*x)+c"),
        ("bare.csv", "a*exp(-b*x)+c", "--p0", "b=1.5, a=2"),
        ("data.csv", "a*exp(-b*x)+c", "--p0", "2,1.5,0", "--sigma", "s", "--response", "y"),
    ],
)
def test_parameters_and_errors(arguments):
    result = fit(*arguments)
    assert result.exit_code == 0, result.output
    found = answer(result)
    assert list(found) == ["a", "b", "c"]
    weighted = "--sigma" in arguments
    rtol = 0.05 if weighted else 1e-8
    np.testing.assert_allclose([v for v, _ in found.values()], EXPECTED.popt, rtol=rtol)
    np.testing.assert_allclose(
        [e for _, e in found.values()], EXPECTED.standard_errors(), rtol=0.5 if weighted else 1e-6
    )
    assert "certified" in result.stderr


def test_json():
    result = fit("data.csv", "y = a*exp(-b*x)+c", "--json")
    facts = json.loads(result.stdout)
    assert facts["converged"] is True
    assert facts["names"] == ["a", "b", "c"]
    np.testing.assert_allclose(facts["values"], EXPECTED.popt, rtol=1e-8)
    np.testing.assert_allclose(facts["covariance"], EXPECTED.pcov, rtol=1e-6)
    assert facts["degrees_of_freedom"] == 37


def test_a_set_of_nist(folder):
    problem = nist_nonlinear("misra1a")
    table = np.column_stack([problem.y, problem.predictors["x"]])
    np.savetxt("m.csv", table, delimiter=",", header="y,x", comments="")
    result = fit("m.csv", problem.formula.text, "--p0", ",".join(map(str, problem.starts[0])))
    (b1, e1), (b2, e2) = answer(result).values()
    np.testing.assert_allclose([b1, b2], problem.certified, rtol=1e-10)
    np.testing.assert_allclose([e1, e2], problem.standard_deviations, rtol=1e-8)


@pytest.mark.parametrize("formula", ["y = a*exp(-b*x)+c", "y = a + b*x + c*s"])
def test_pictures(formula):
    pytest.importorskip("matplotlib")
    result = fit("data.csv", formula, "--plot", "pictures/fit.png")
    assert result.exit_code == 0, result.output
    assert Path("pictures/fit.png").read_bytes().startswith(b"\x89PNG")
    assert "pictures/fit.png" in result.stderr


def test_output_file():
    result = fit("data.csv", "y = a*exp(-b*x)+c", "-o", "parameters.csv")
    assert result.stdout == ""
    assert Path("parameters.csv").read_text().startswith(",value,standard_error\na,")


def test_a_fit_that_cannot_be_certified():
    result = fit("data.csv", "y = a*x + b*x")
    assert result.exit_code == 1
    assert "rank 1" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("data.csv", "a*exp(-b*x)+c*z.real"), "allowed are"),
        (("data.csv", "x + s"), "nothing to fit"),
        (("data.csv", "y = a*x", "--response", "s"), "leave one out"),
        (("data.csv", "a*x", "--response", "z"), "the response 'z' is no column"),
        (("data.csv", "y = a*x", "--sigma", "z"), "no column is named 'z'"),
        (("data.csv", "y = a*x", "--p0", "b=1"), "the parameters are a"),
        (("data.csv", "y = a*x", "--p0", "1,2"), "2 numbers for 1 parameters"),
        (("data.csv", "y = a*x", "--p0", "a=one"), "not understood"),
        (("data.csv", "y = a*x", "--plot", "fit.txt"), "fit.txt: the name must end with"),
        (("data.csv", "y = log(a - 2 - x)"), "not finite at x0"),
        (("nothing.csv", "y = a*x"), "nothing.csv"),
        (("data.csv", "y = a*X"), "no column is named 'X': did you mean 'x'?"),
        (("data.csv", "y = a*x", "--absolute-sigma"), "needs standard deviations"),
    ],
)
def test_refusals(arguments, message):
    result = fit(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in " ".join(result.stderr.split())


def test_what_is_to_be_fitted(folder):
    np.savetxt("many.csv", np.column_stack([X, Y, Y]), delimiter=",", header="x,u,v", comments="")
    result = fit("many.csv", "a*x")
    assert result.exit_code == 2
    assert "--response" in result.stderr


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_that_the_fit_does_not_use(kind):
    pd = pytest.importorskip("pandas")
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    labels = ["a label"] * 40
    frame = pd.DataFrame({"label": labels, "x": X, "y": Y, "empty": [np.nan, *X[1:]]})
    frame.to_csv("more.csv", index=False)
    if kind == "parquet":
        frame.to_parquet("more.parquet")
    result = fit(f"more.{kind}", "y = a*exp(-b*x)+c")
    assert result.exit_code == 0, result.output
    np.testing.assert_allclose([v for v, _ in answer(result).values()], EXPECTED.popt, rtol=1e-8)
    # An empty field of a column that is not used leaves out no line.
    dropped = fit(f"more.{kind}", "y = a*exp(-b*x)+c", "--missing", "drop")
    assert answer(dropped) == answer(result)
    refused = fit(f"more.{kind}", "y = a*label")
    assert refused.exit_code == 2
    assert "label" in refused.stderr
    mistyped = fit(f"more.{kind}", "y = a*exp(-b*X)+c")
    assert "error: no column is named 'X': did you mean 'x'?" in " ".join(mistyped.stderr.split())


def test_two_columns_of_one_name():
    Path("twice.csv").write_text("x,y,z,z\n1,2,3,4\n2,4,5,6\n3,6.1,7,8\n")
    assert fit("twice.csv", "y = a*x").exit_code == 0
    refused = fit("twice.csv", "y = a*z")
    assert refused.exit_code == 2
    assert "2 columns are named 'z'" in refused.stderr


def test_a_parameter_that_looks_like_a_column(folder):
    result = fit("data.csv", "y = a*exp(-X*x)+c", "--p0", "X=1")
    assert result.exit_code == 0, result.output
    np.testing.assert_allclose([v for v, _ in answer(result).values()], EXPECTED.popt, rtol=1e-8)


def test_deviations_that_are_believed(folder):
    pytest.importorskip("matplotlib")
    sigma = np.loadtxt("data.csv", delimiter=",", skiprows=1)[:, 2]
    expected = neula.curve_fit(
        lambda x, a, b, c: a * np.exp(-b * x) + c, X, Y, sigma=sigma, absolute_sigma=True
    )
    result = fit("data.csv", "y = a*exp(-b*x)+c", "--sigma", "s", "--absolute-sigma", "--plot", "bars.svg")
    assert result.exit_code == 0, result.output
    np.testing.assert_allclose([e for _, e in answer(result).values()], expected.standard_errors(), rtol=1e-6)
    without = fit("data.csv", "y = a*exp(-b*x)+c", "--sigma", "s", "--plot", "bars.svg")
    assert [e for _, e in answer(without).values()] != [e for _, e in answer(result).values()]


def test_error_bars(folder, monkeypatch):
    Axes = pytest.importorskip("matplotlib.axes").Axes
    drawn = []
    monkeypatch.setattr(Axes, "errorbar", lambda self, x, y, yerr, **_: drawn.append(yerr))
    fit("data.csv", "y = a*exp(-b*x)+c", "--sigma", "s", "--plot", "bars.png")
    sigma = np.loadtxt("data.csv", delimiter=",", skiprows=1)[:, 2]
    assert len(drawn) == 2  # of data, and of residuals
    for bars in drawn:
        np.testing.assert_allclose(bars, sigma)
