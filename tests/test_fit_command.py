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
    np.savetxt("many.csv", np.column_stack([X, Y, Y]), delimiter=",", header="x,u,v", comments="")
    Path("twice.csv").write_text("x,y,z,z\n1,2,3,4\n2,4,5,6\n3,6.1,7,8\n")
    return tmp_path


def fit(*arguments: str) -> Result:
    return CliRunner().invoke(app, ("fit", *arguments))


def answer(result: Result) -> dict[str, list[float]]:
    header, *rows = csv.reader(io.StringIO(result.stdout))
    assert header == ["", "value", "standard_error"]
    return {name: [float(v) for v in numbers] for name, *numbers in rows}


MODEL = "y = a*exp(-b*x)+c"


def fitted(*arguments: str) -> tuple[list[float], list[float]]:
    """Values and standard errors."""
    result = fit(*arguments)
    assert result.exit_code == 0, result.output
    assert "certified" in result.stderr
    return tuple(zip(*answer(result).values(), strict=True))


@pytest.mark.parametrize(
    "arguments",
    [
        ("data.csv", "a*exp(-b*x)+c", "--response", "y"),
        ("data.csv", MODEL),
        ("data.csv", "a*exp(-b*x)+c"),
        ("bare.csv", "a*exp(-b*x)+c", "--p0", "b=1.5, a=2"),
        ("data.csv", "a*exp(-b*x)+c", "--p0", "2,1.5,0", "--response", "y"),
        ("data.csv", "y = a*exp(-X*x)+c", "--p0", "X=1"),  # a parameter that looks like a column
    ],
)
def test_parameters_and_errors(arguments):
    values, errors = fitted(*arguments)
    np.testing.assert_allclose(values, EXPECTED.popt, rtol=1e-8)
    np.testing.assert_allclose(errors, EXPECTED.standard_errors(), rtol=1e-6)


def test_json_and_output_files():
    facts = json.loads(fit("data.csv", MODEL, "--json").stdout)
    assert facts["converged"] is True
    assert facts["names"] == ["a", "b", "c"]
    np.testing.assert_allclose(facts["values"], EXPECTED.popt, rtol=1e-8)
    np.testing.assert_allclose(facts["covariance"], EXPECTED.pcov, rtol=1e-6)
    assert facts["degrees_of_freedom"] == 37
    result = fit("data.csv", MODEL, "-o", "parameters.csv")
    assert result.stdout == ""
    assert Path("parameters.csv").read_text().startswith(",value,standard_error\na,")


def test_a_set_of_nist(folder):
    problem = nist_nonlinear("misra1a")
    table = np.column_stack([problem.y, problem.predictors["x"]])
    np.savetxt("m.csv", table, delimiter=",", header="y,x", comments="")
    values, errors = fitted("m.csv", problem.formula.text, "--p0", ",".join(map(str, problem.starts[0])))
    np.testing.assert_allclose(values, problem.certified, rtol=1e-10)
    np.testing.assert_allclose(errors, problem.standard_deviations, rtol=1e-8)


@pytest.mark.parametrize("formula", ["y = a*exp(-b*x)+c", "y = a + b*x + c*s"])
def test_pictures(formula):
    pytest.importorskip("matplotlib")
    result = fit("data.csv", formula, "--plot", "pictures/fit.png")
    assert result.exit_code == 0, result.output
    assert Path("pictures/fit.png").read_bytes().startswith(b"\x89PNG")
    assert "pictures/fit.png" in result.stderr


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
        (("many.csv", "a*x"), "--response"),
        (("twice.csv", "y = a*z"), "2 columns are named 'z'"),
    ],
)
def test_refusals(arguments, message):
    result = fit(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in " ".join(result.stderr.split())


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
    found = fitted(f"more.{kind}", MODEL)
    np.testing.assert_allclose(found[0], EXPECTED.popt, rtol=1e-8)
    # An empty field of a column that is not used leaves out no line.
    assert fitted(f"more.{kind}", MODEL, "--missing", "drop") == found
    assert fit("twice.csv", "y = a*x").exit_code == 0
    refused = fit(f"more.{kind}", "y = a*label")
    assert refused.exit_code == 2
    assert "label" in refused.stderr
    mistyped = fit(f"more.{kind}", "y = a*exp(-b*X)+c")
    assert "error: no column is named 'X': did you mean 'x'?" in " ".join(mistyped.stderr.split())


def test_standard_deviations(monkeypatch):
    """They weigh, are believed if they are called absolute, and are drawn as error bars."""
    Axes = pytest.importorskip("matplotlib.axes").Axes
    sigma = np.loadtxt("data.csv", delimiter=",", skiprows=1)[:, 2]
    drawn = []
    monkeypatch.setattr(Axes, "errorbar", lambda self, x, y, yerr, **_: drawn.append(yerr))
    for absolute in (False, True):
        expected = neula.curve_fit(
            lambda x, a, b, c: a * np.exp(-b * x) + c, X, Y, sigma=sigma, absolute_sigma=absolute
        )
        options = ("--absolute-sigma",) if absolute else ()
        values, errors = fitted("data.csv", MODEL, "--sigma", "s", "--plot", "bars.svg", *options)
        np.testing.assert_allclose(values, expected.popt, rtol=1e-7)
        np.testing.assert_allclose(errors, expected.standard_errors(), rtol=1e-6)
    assert len(drawn) == 4  # of data, and of residuals
    for bars in drawn:
        np.testing.assert_allclose(bars, sigma)
