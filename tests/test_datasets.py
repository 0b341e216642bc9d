"""The shipped data against the facts that are known about it."""

import csv
import math
from fractions import Fraction
from importlib.resources import files

import numpy as np
import pytest
import torch
from tests.exact_solutions import product, solved

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


@pytest.mark.parametrize("name", SHAPES)
def test_linear_problems(name):
    """The matrix is the nearest one in float64, and the exact solution the certified one."""
    response, rows = exact_columns(name)
    problem, transposed = nist(name.upper()), list(zip(*rows, strict=True))
    assert problem.name == name
    assert problem.A.shape == SHAPES[name]
    assert problem.A.dtype == problem.b.dtype == np.float64
    assert problem.A.tolist() == [[float(value) for value in row] for row in rows]
    assert problem.b.tolist() == [float(value) for value in response]
    x = solved([product(transposed, column) for column in transposed], product(transposed, response))
    np.testing.assert_allclose([float(value) for value in x], problem.certified, rtol=CERTIFIED)
    left = sum((y - z) ** 2 for y, z in zip(response, product(rows, x), strict=True))
    m, n = problem.A.shape
    assert math.sqrt(left / (m - n)) == pytest.approx(problem.residual_std, rel=CERTIFIED, abs=0.0)


# --- non-linear -------------------------------------------------------------------------------------------


def test_nonlinear_problems():
    names = nist_nonlinear_names()
    assert len(names) == 27
    assert {"bennett5", "boxbod", "lanczos1", "mgh17", "nelson", "thurber"} < set(names)
    nelson = nist_nonlinear("nelson")
    assert nelson.y[0] == np.log(15.0)
    assert set(nelson.predictors) == {"x1", "x2"}
    enso = nist_nonlinear("enso")
    for b in enso.starts:
        found = enso.residuals(torch.from_numpy(b))
        assert isinstance(found, torch.Tensor)
        np.testing.assert_allclose(found, enso.residuals(b), rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize(
    ("read", "name", "message"),
    [
        (nist, "anscombe", r"unknown NIST data set 'anscombe'.*'filip'.*'wampler5'"),
        (surveying, "well1850", r"unknown surveying problem 'well1850'.*'well1033', 'illc1033'"),
        (nist_nonlinear, "misra", r"unknown NIST non-linear data set 'misra'.*'bennett5'"),
    ],
)
def test_unknown_names_list_the_known_ones(read, name, message):
    with pytest.raises(ValueError, match=message):
        read(name)


def test_names():
    assert SURVEYING_NAMES == ("well1033", "illc1033")
    assert set(nist_names()) == set(SHAPES)


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
