"""The shipped data against the facts that are known about it."""

import csv
import math
from fractions import Fraction
from importlib.resources import files

import numpy as np
import pytest
import torch

from neula.io.datasets import (
    SURVEYING_NAMES,
    log_relative_error,
    nist,
    nist_names,
    nist_nonlinear,
    nist_nonlinear_names,
    surveying,
)

SHAPES = {
    "filip": (82, 11),
    "longley": (16, 7),
    "noint1": (11, 1),
    "noint2": (3, 1),
    "norris": (36, 2),
    "pontius": (40, 3),
    "wampler1": (21, 6),
    "wampler2": (21, 6),
    "wampler3": (21, 6),
    "wampler4": (21, 6),
    "wampler5": (21, 6),
}
CERTIFIED = 1e-14
"""NIST rounds to 15 significant digits: at most half a unit of the last one, 5e-15 of the value."""


def exact_columns(name: str) -> tuple[list[Fraction], list[list[Fraction]]]:
    """Response and rows of the design matrix in rational arithmetic, read independently of the package."""
    text = (files("neula") / "io" / "data" / "nist_strd" / f"{name}.csv").read_text(encoding="utf-8")
    table = [[Fraction(v) for v in row] for row in csv.reader(text.splitlines()[1:])]
    response = [row[0] for row in table]
    if name == "longley":
        return response, [[Fraction(1), *row[1:]] for row in table]
    if name.startswith("noint"):
        return response, [row[1:] for row in table]
    return response, [[row[1] ** k for k in range(SHAPES[name][1])] for row in table]


def exact_least_squares(response: list[Fraction], rows: list[list[Fraction]]) -> list[Fraction]:
    """The exact solution: Gaussian elimination on the normal equations, in rational arithmetic."""
    n = len(rows[0])
    system = [
        [sum(row[i] * row[j] for row in rows) for j in range(n)]
        + [sum(row[i] * y for row, y in zip(rows, response, strict=True))]
        for i in range(n)
    ]
    for k in range(n):
        system[k] = [value / system[k][k] for value in system[k]]
        for i in range(n):
            if i != k:
                system[i] = [a - system[i][k] * b for a, b in zip(system[i], system[k], strict=True)]
    return [row[n] for row in system]


def test_all_sets_are_there():
    assert set(nist_names()) == set(SHAPES)


@pytest.mark.parametrize("name", nist_names())
def test_nist_matrix_is_the_nearest_float64_matrix(name):
    response, rows = exact_columns(name)
    problem = nist(name.upper())
    assert problem.name == name
    assert problem.A.shape == SHAPES[name]
    assert problem.A.dtype == problem.b.dtype == np.float64
    assert problem.A.tolist() == [[float(value) for value in row] for row in rows]
    assert problem.b.tolist() == [float(value) for value in response]


@pytest.mark.parametrize("name", nist_names())
def test_exact_solution_is_the_certified_one(name):
    response, rows = exact_columns(name)
    problem = nist(name)
    x = exact_least_squares(response, rows)
    np.testing.assert_allclose([float(value) for value in x], problem.certified, rtol=CERTIFIED)
    residual = [
        y - sum(a * c for a, c in zip(row, x, strict=True)) for y, row in zip(response, rows, strict=True)
    ]
    m, n = problem.A.shape
    deviation = math.sqrt(sum(value**2 for value in residual) / (m - n))
    assert deviation == pytest.approx(problem.residual_std, rel=CERTIFIED, abs=0.0)


# --- non-linear -------------------------------------------------------------------------------------------


def test_all_nonlinear_sets_are_there():
    names = nist_nonlinear_names()
    assert len(names) == 27
    assert {"bennett5", "boxbod", "lanczos1", "mgh17", "nelson", "thurber"} < set(names)


def test_response_of_nelson_is_a_logarithm():
    problem = nist_nonlinear("nelson")
    assert problem.y[0] == np.log(15.0)
    assert set(problem.predictors) == {"x1", "x2"}


def test_models_of_torch_and_numpy_are_the_same():
    problem = nist_nonlinear("enso")
    for b in problem.starts:
        found = problem.residuals(torch.from_numpy(b))
        assert isinstance(found, torch.Tensor)
        np.testing.assert_allclose(found, problem.residuals(b), rtol=1e-12, atol=1e-12)


def test_unknown_nonlinear_set():
    with pytest.raises(ValueError, match=r"unknown NIST non-linear data set 'misra'.*'bennett5'"):
        nist_nonlinear("misra")


def test_problems_cannot_change_each_other():
    nist("norris").A[:] = 0
    nist("norris").certified[:] = 0
    assert nist("norris").A.any()
    assert nist("norris").certified.any()


@pytest.mark.parametrize(
    ("name", "nonzeros", "condition"), [("well1033", 4732, 166), ("illc1033", 4719, 1.89e4)]
)
def test_surveying_problem(name, nonzeros, condition):
    A, b = surveying(name)
    assert A.shape == (1033, 320)
    assert b.shape == (1033,)
    assert A.dtype == b.dtype == np.float64
    assert np.count_nonzero(A) == nonzeros
    # The condition numbers for which the two problems are known, to three digits.
    assert np.linalg.cond(A) == pytest.approx(condition, rel=5e-3)
    assert np.linalg.norm(b - A @ np.linalg.lstsq(A, b)[0]) < 0.1 * np.linalg.norm(b)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown NIST data set 'anscombe'.*'filip'.*'wampler5'"):
        nist("anscombe")
    with pytest.raises(ValueError, match=r"unknown surveying problem 'well1850'.*'well1033', 'illc1033'"):
        surveying("well1850")
    assert SURVEYING_NAMES == ("well1033", "illc1033")


@pytest.mark.parametrize(
    ("x", "certified", "digits"),
    [
        ([1.0, 2.0], [1.0, 2.0], 15.0),
        ([1.0, 2.0002], [1.0, 2.0], 4.0),
        ([1e-6, 2.0], [0.0, 2.0], 6.0),
        ([-1.0], [1.0], 0.0),
        ([1e30], [1.0], 0.0),
        ([math.nan, 2.0], [1.0, 2.0], 0.0),
        ([math.inf, 2.0], [1.0, 2.0], 0.0),
        ([-3.003], [-3.0], 3.0),
    ],
)
def test_log_relative_error(x, certified, digits):
    assert log_relative_error(x, certified) == pytest.approx(digits, abs=1e-9)


def test_log_relative_error_of_other_shape():
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        log_relative_error([1, 2], [1, 2, 3])
