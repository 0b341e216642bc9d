"""``neula lstsq`` with bounds, constraints and a report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize
from typer.testing import CliRunner

import neula
from neula.cli import app as cli
from neula.io.files import write_matrix

RNG = np.random.default_rng(3)
A, B = RNG.normal(size=(30, 4)), RNG.normal(size=30)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write_matrix("A.csv", A)
    write_matrix("b.csv", B)
    write_matrix("C.csv", np.ones((1, 4)))
    write_matrix("d.csv", np.array([2.0]))
    return tmp_path


def lstsq(*options: str, code: int = 0):
    result = CliRunner().invoke(cli.app, ["lstsq", "A.csv", "b.csv", *options])
    assert result.exit_code == code, result.output
    return result


def x_of(*options: str) -> np.ndarray:
    return np.array(json.loads(lstsq(*options, "--json").stdout)["x"])


def test_bounds_and_constraints() -> None:
    assert np.allclose(x_of("--nonnegative"), scipy.optimize.nnls(A, B)[0])
    bounded = scipy.optimize.lsq_linear(A, B, (-0.1, 0.05), method="bvls").x
    assert np.allclose(x_of("--bounds=-0.1,0.05"), bounded)
    constrained = neula.lstsq(A, B, constraints=(np.ones((1, 4)), [2.0])).x
    assert np.allclose(x_of("--constraints", "C.csv,d.csv"), constrained)
    assert "at bounds" in lstsq("--nonnegative").stderr
    assert "rank" in lstsq("--constraints", "C.csv,d.csv").stderr


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
    assert re.search(message, " ".join(lstsq(*options, code=2).stderr.split()))


@pytest.mark.parametrize("options", [[], ["--nonnegative"]])
def test_report(folder: Path, options: list[str]) -> None:
    pytest.importorskip("matplotlib")
    lstsq(*options, "--report", "report.html")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2
    assert "certified to fp64 accuracy" in page
    assert ("standard error" in page) == (not options)
    # Nothing is loaded from elsewhere; names of XML's vocabularies are no links.
    assert not re.search(r"(src|href)=\"(?!#)", re.sub(r"xlink:href=\"#[^\"]*\"", "", page))


def test_the_report_has_the_names_of_columns(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    lstsq("--intercept", "--report", "new/report.html")
    page = (folder / "new" / "report.html").read_text(encoding="utf-8")
    assert re.findall(r"<tr><td>(\w+)</td>", page) == ["intercept", "1", "2", "3", "4"]
