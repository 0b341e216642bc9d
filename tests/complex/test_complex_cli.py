"""Commands with files of complex numbers: certified answers, reports that show them, refusals in a line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from neula import cli
from neula.cli import show
from neula.cli.app import app
from neula.io.files import Table, read_matrix, write_files, write_matrix

RNG = np.random.default_rng(46)


def gaussian(*shape: int) -> np.ndarray:
    """Complex normal numbers."""
    return RNG.standard_normal(shape) + 1j * RNG.standard_normal(shape)


A = gaussian(41, 5)
B = A @ (np.arange(5) - 1j) + 0.01 * gaussian(41)
X = np.linalg.lstsq(A, B, rcond=None)[0]
S = gaussian(7, 7)
H = A.conj().T @ A
U = 2.0**-52


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with matrices in every kind of file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    matrices = {"A": A, "b": B, "S": S, "H": H, "c": S @ np.ones(7), "d": H @ (1j * np.ones(5)), "R": A.real}
    for name, array in matrices.items():
        for extension in (".npy", ".csv", ".mtx", ".h5"):
            write_matrix(f"{name}{extension}", array, name=name)
    write_files({Path("all.mat"): matrices})
    names = (*(f"a{j}_{part}" for j in range(5) for part in ("re", "im")), "u", "v")
    rows = np.column_stack([A, B]).view(float)  # real and imaginary parts by turns
    write_files({Path("table.parquet"): {"table": Table(rows, names)}})
    np.savetxt("table.csv", rows, "%.17g", ",", header=",".join(names), comments="")
    return tmp_path


def succeed(command: str) -> Result:
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize(
    "files",
    [
        "A.npy b.npy",
        "A.csv b.mtx",
        "A.h5 b.h5",
        "all.mat:A all.mat:b",
        "table.csv:a0,a1,a2,a3,a4 table.csv:u+vj",
        "A.npy b.npy --stream",
        "A.h5 b.csv --stream",
        "table.parquet:a0,a1,a2,a3,a4 table.parquet:u+vj --stream",
        "A.npy b.npy --engine emulated",
    ],
)
def test_least_squares_of_every_kind_of_file(files: str) -> None:
    result = succeed(f"lstsq {files} -o x.npy")
    assert "neula lstsq: certified" in result.stderr
    assert "41 x 5 complex128" in result.stderr
    found = np.load("x.npy")
    # Wedin: backward errors of 4 u, a condition number below 10.
    assert np.linalg.norm(found - X) <= 1000 * U * np.linalg.norm(X)


@pytest.mark.parametrize("command", ["qr", "tsqr"])
def test_qr(command: str) -> None:
    succeed(f"{command} A.mtx -o qr.npz --q q.csv --r r.csv")
    with np.load("qr.npz") as factors:
        q, r = factors["Q"], factors["R"]
    assert np.linalg.norm(A - q @ r) <= 100 * U * np.linalg.norm(A)
    assert np.linalg.norm(q.conj().T @ q - np.eye(5)) <= 100 * U
    np.testing.assert_array_equal(np.diagonal(r).imag, 0.0)
    np.testing.assert_array_equal(read_matrix("q.csv"), q)
    np.testing.assert_array_equal(read_matrix("r.csv"), r)
    alone = succeed(f"{command} A.mtx --mode r -o r2.csv")
    assert "certified" in alone.stderr
    assert np.linalg.norm(read_matrix("r2.csv") - r) <= 1000 * U * np.linalg.norm(r)


# --- how they are shown -----------------------------------------------------------------------------------


def test_answers_as_text_and_json() -> None:
    result = succeed("solve S.npy c.npy")
    found = np.array([complex(line) for line in result.stdout.splitlines()])
    np.testing.assert_allclose(found, np.ones(7), atol=1e-12)
    Path("x.csv").write_text(result.stdout)
    np.testing.assert_array_equal(read_matrix("x.csv")[:, 0], found)
    facts = json.loads(succeed("lstsq A.npy b.npy --json").stdout)
    assert facts["inputs"]["A"]["dtype"] == "complex128"
    np.testing.assert_allclose(np.array(facts["x"]) @ [1, 1j], X, rtol=1e-12)
    assert show._plain(complex(np.nan, 1)) == [None, 1.0]
    assert show._plain({"x": np.array([1j], np.complex64)}) == {"x": [[0.0, 1.0]]}


def test_coefficients_with_standard_errors() -> None:
    result = succeed("lstsq table.csv:a0,a1,a2,a3,a4 table.csv:u+vj")
    assert result.stdout.splitlines()[0] == ",u+vj"
    assert result.stdout.splitlines()[1].startswith("a0,")
    lines = {line.split()[0]: line for line in result.stderr.splitlines() if "+-" in line}
    assert list(lines) == [f"a{j}" for j in range(5)]
    value, error = lines["a3"].split()[1], float(lines["a3"].split()[3])
    assert complex(value) == pytest.approx(X[3], rel=1e-6)
    # Of noise of size 0.014 per row, and nearly orthogonal columns of 41 numbers of size 1.4.
    assert 0.5 < error / (0.014 / (41**0.5 * 1.4)) < 2
    facts = json.loads(succeed("lstsq table.csv:a0,a1,a2,a3,a4 table.csv:u+vj --json").stdout)
    assert facts["lower"] is None
    assert len(facts["standard_errors"]) == 5


def test_a_report_about_complex_numbers() -> None:
    pytest.importorskip("matplotlib")
    succeed("lstsq A.npy b.npy --intercept --report page.html -o x.npy")
    page = Path("page.html").read_text()
    assert f"{np.load('x.npy')[2]:.10g}" in page
    assert page.count("<svg") == 2


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("lstsq A.npy b.npy --nonnegative", "A is complex (complex128), and must be real"),
        ("lstsq R.npy b.npy --bounds=0,1", "b is complex (complex128), and must be real"),
        ("lstsq A.npy b.npy --weights b.npy", "complex"),
        ("lstsq A.npy b.npy --sigma b.npy", "complex"),
        ("lstsq A.npy b.npy --trace", "--trace shows the steps of a real matrix, got a complex128 one"),
        ("qr A.npy --trace -o qr.npz", "--trace shows the steps of a real matrix, got a complex128 one"),
        ("fit all.mat:A a*x", "the table is complex (complex128), and must be real"),
        ("lstsq A.npy b.npy -o x.parquet", "a .parquet file has no complex numbers"),
    ],
)
def test_refusals(command: str, says: str) -> None:
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == cli.BAD_INPUT, result.output
    assert result.stderr.startswith("neula: error: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr
