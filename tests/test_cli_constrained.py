"""``neula lstsq`` with bounds, constraints and a report."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize

import neula
from command_line import facts, run, words
from neula import cli
from neula.io.files import write_matrix

RNG = np.random.default_rng(3)
A, B = RNG.normal(size=(30, 4)), RNG.normal(size=30)


LSTSQ = ("lstsq", "A.csv", "b.csv")


@pytest.fixture(autouse=True)
def files(in_folder: Path) -> None:
    for name, array in {"A": A, "b": B, "C": np.ones((1, 4)), "d": np.array([2.0])}.items():
        write_matrix(f"{name}.csv", array)


def x_of(*options: str) -> np.ndarray:
    return np.array(facts(*LSTSQ, *options)["x"])


def test_bounds_and_constraints() -> None:
    assert np.allclose(x_of("--nonnegative"), scipy.optimize.nnls(A, B)[0])
    bounded = scipy.optimize.lsq_linear(A, B, (-0.1, 0.05), method="bvls").x
    assert np.allclose(x_of("--bounds=-0.1,0.05"), bounded)
    constrained = neula.lstsq(A, B, constraints=(np.ones((1, 4)), [2.0])).x
    assert np.allclose(x_of("--constraints", "C.csv,d.csv"), constrained)
    assert "at bounds" in run(*LSTSQ, "--nonnegative").stderr
    assert "rank" in run(*LSTSQ, "--constraints", "C.csv,d.csv").stderr


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("not a pair of numbers", ["--bounds=1"]),
        ("the lower bound 1.0 of x\\[0\\]", ["--bounds=1,0"]),
        ("leave one of them out", ["--bounds=0,1", "--nonnegative"]),
        ("--damp does not go together with bounds", ["--nonnegative", "--damp=1"]),
        ("do not go together with bounds", ["--nonnegative", "--constraints=C.csv,d.csv"]),
        ("does not name two files", ["--constraints=C.csv"]),
        ("C must have shape", ["--constraints=b.csv,d.csv"]),
        ("b.csv: the name must end with .html", ["--report=b.csv"]),
    ],
)
def test_bad_input(message: str, options: list[str]) -> None:
    assert re.search(message, words(run(*LSTSQ, *options, code=cli.BAD_INPUT).stderr))


@pytest.mark.parametrize("options", [[], ["--nonnegative"]])
def test_report(options: list[str]) -> None:
    pytest.importorskip("matplotlib")
    run(*LSTSQ, *options, "--report", "report.html")
    page = Path("report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2
    assert "certified to fp64 accuracy" in page
    assert ("standard error" in page) == (not options)
    # Nothing is loaded from elsewhere; names of XML's vocabularies are no links.
    assert not re.search(r"(src|href)=\"(?!#)", re.sub(r"xlink:href=\"#[^\"]*\"", "", page))


def test_the_report_has_the_names_of_columns() -> None:
    pytest.importorskip("matplotlib")
    run(*LSTSQ, "--intercept", "--report", "new/report.html")
    page = Path("new/report.html").read_text(encoding="utf-8")
    assert re.findall(r"<tr><td>(\w+)</td>", page) == ["intercept", "1", "2", "3", "4"]
