"""The command line: real files in, files and exit codes out; nothing but the answer on stdout."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

import neula
from neula import cli
from neula.certificates.qr_evidence import QRCertificate
from neula.cli import bench as benchmarks
from neula.cli import run, show
from neula.cli.app import app
from neula.cli.main import main
from neula.io.files import read_matrix, write_files, write_matrix
from neula.pipeline.result import AccuracyWarning, Attempt, LstsqResult, QRResult

RNG = np.random.default_rng(20)
A = RNG.normal(size=(60, 7))
B = RNG.normal(size=60)
X = np.linalg.lstsq(A, B, rcond=None)[0]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with A and b in every format."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for extension in (".npy", ".csv", ".mtx"):
        write_matrix(f"A{extension}", A)
        write_matrix(f"b{extension}", B)
    for name in ("A", "b"):
        Path(f"{name}.mtx.gz").write_bytes(gzip.compress(Path(f"{name}.mtx").read_bytes()))
    write_files({Path("problem.npz"): {"A": A, "b": B}})
    return tmp_path


def neula_cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def succeed(*arguments: str) -> Result:
    result = neula_cli(*arguments)
    assert result.exit_code == 0, result.output
    return result


def parsed(result: Result) -> dict[str, Any]:
    """The JSON object that must be all of stdout."""
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout, parse_constant=pytest.fail)


def fake_lstsq(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[dict[str, Any]]:
    """Put a stand-in in the place of ``neula.lstsq``; returns the calls that it got."""
    calls: list[dict[str, Any]] = []
    facts: dict[str, Any] = {
        "x": X,
        "converged": True,
        "iterations": 3,
        "backward_error": 1e-17,
        "optimality": 1e-16,
        "tolerance": 1e-15,
        "residual_norm": 1.5,
        "rank": 7,
        "attempts": (Attempt("fake fp16", True, "it is a fake"),),
        "engine": "cpu",
        "accuracy": "fp64",
    }

    def lstsq(A: np.ndarray, b: np.ndarray, **options: Any) -> LstsqResult:
        calls.append({"A": A, "b": b, **options})
        return LstsqResult(**{**facts, **changes})

    monkeypatch.setattr(neula, "lstsq", lstsq)
    return calls


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def assert_refused(result: Result, says: str, before: set[str], code: int = cli.BAD_INPUT) -> None:
    """One line on stderr, nothing on stdout, no file."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("neula: error: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr
    assert set(os.listdir()) == before


# --- lstsq ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "output"),
    [
        ("A.npy", "b.npy", "x.npz"),
        ("A.csv", "b.csv", "x.csv"),
        ("A.mtx", "b.mtx", "x.mtx"),
        ("A.mtx.gz", "b.mtx.gz", "x.npy"),
        ("problem.npz:A", "problem.npz:b", "x.npy"),
        ("A.npy", "b.csv", "x.npy"),
    ],
)
def test_lstsq_reads_and_writes_every_format(a: str, b: str, output: str) -> None:
    result = succeed("lstsq", a, b, "-o", output)
    x = read_matrix(output, column_as_vector=True)
    np.testing.assert_allclose(x, X, rtol=1e-12)
    assert "certified" in result.stderr
    assert f"saved to {output}" in result.stderr
    assert result.stdout == ""


def test_lstsq_prints_a_short_solution_with_all_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_lstsq(monkeypatch)
    lines = succeed("lstsq", "A.npy", "b.npy").stdout.splitlines()
    assert [float(line) for line in lines] == X.tolist()


def test_lstsq_prints_several_short_solutions_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.float32([[0.1, 2], [3, 4]])
    fake_lstsq(monkeypatch, x=x)
    # float32 as the float64 that it is exactly: what reads a pipe has no other dtype.
    assert succeed("lstsq", "A.npy", "b.npy").stdout.splitlines() == ["0.10000000149011612,2.0", "3.0,4.0"]


def test_a_terminal_is_told_how_to_keep_a_long_solution_and_a_pipe_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_lstsq(monkeypatch, x=np.arange(21.0))
    assert succeed("lstsq", "A.npy", "b.npy").stdout.splitlines() == [f"{i}.0" for i in range(21)]
    monkeypatch.setattr(show, "is_short", partial(_on_a_terminal, show.is_short))
    result = succeed("lstsq", "A.npy", "b.npy")
    assert result.stdout == ""
    assert "x, of 21 numbers, was not kept: give -o" in result.stderr


def _on_a_terminal(is_short: Callable[..., bool], answer: Any, *, on_terminal: bool) -> bool:
    return is_short(answer, on_terminal=True)


def test_lstsq_summary_holds_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = (Attempt("first", False, "too far"), Attempt("second", True, "close"))
    fake_lstsq(monkeypatch, rank=5, full_rank=7, attempts=attempts, residual_norm=[1.25, 2.5])
    output = succeed("lstsq", "A.npy", "b.npy").stderr
    for part in (
        "neula lstsq: certified, rank 5 of 7: minimum-norm solution",
        "60 x 7 float64  A.npy",
        "first: rejected, too far",
        "second: accepted, close",
        "1.0e-17 (tolerance 1.0e-15)",
        "1.25, 2.5",
        "cpu",
    ):
        assert part in output


def test_lstsq_passes_every_option_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_lstsq(monkeypatch)
    write_matrix("w.npy", np.ones(60))
    options = ["--accuracy", "fp32", "--engine", "emulated", "--damp", "2", "--rcond", "1e-3"]
    succeed("lstsq", "A.npy", "b.npy", *options, "--weights", "w.npy", "--certify", "forward")
    succeed("lstsq", "A.npy", "b.npy")
    call, plain = calls
    np.testing.assert_array_equal(call["A"], A)
    np.testing.assert_array_equal(call["b"], B)
    np.testing.assert_array_equal(call["weights"], np.ones(60))
    assert (call["accuracy"], call["engine"], call["damp"], call["rcond"]) == ("fp32", "emulated", 2, 1e-3)
    assert callable(call["progress"])
    defaults = {"accuracy": None, "engine": "auto", "damp": 0, "rcond": None, "weights": None}
    assert plain.items() >= defaults.items()
    assert (call["certify"], plain["certify"]) == ("forward", "backward")


# --- solve ------------------------------------------------------------------------------------------------

SQUARE = A.T @ A
RHS = A.T @ B


@pytest.mark.parametrize(("assume_a", "method"), [("gen", "lu fp64 with pivoting"), ("pos", "cholesky fp64")])
def test_solve_json(assume_a: str, method: str) -> None:
    write_files({Path("system.npz"): {"S": SQUARE, "c": RHS}})
    facts = parsed(succeed("solve", "system.npz:S", "system.npz:c", "--assume-a", assume_a, "--json"))
    assert facts["command"] == "solve"
    assert facts["converged"] is True
    assert facts["method"] == facts["attempts"][-1]["method"] == method
    assert facts["backward_error"] <= facts["tolerance"]
    assert facts["growth"] > 0
    assert facts["iterations"] > 0
    assert len(facts["history"]) == facts["iterations"] + 1  # and after the first solve
    np.testing.assert_allclose(facts["x"], X, rtol=1e-11)


def test_solve_prints_a_short_solution_and_takes_every_option() -> None:
    write_matrix("S.npy", SQUARE.astype(np.float32))
    write_matrix("c.npy", RHS.astype(np.float32))
    result = succeed("solve", "S.npy", "c.npy", "--accuracy", "fp16", "--engine", "emulated")
    np.testing.assert_allclose([float(x) for x in result.stdout.split()], X, rtol=1e-2, atol=1e-3)
    for part in ("neula solve: certified", "growth", "accepted"):
        assert part in result.stderr


@pytest.mark.parametrize(
    ("matrix", "arguments", "says"),
    [
        (A, [], "A must be square, got 60 x 7; use 'neula lstsq'"),
        (np.ones((60, 60)), [], "A is singular: pivot 1 is exactly zero"),
        (-np.eye(60), ["--assume-a", "pos"], "not positive definite: A[0, 0] is -1.0"),
        (np.eye(9), [], "shapes of A and b do not fit: A is (9, 9), b is (60,)"),
    ],
)
def test_solve_refuses(matrix: np.ndarray, arguments: list[str], says: str) -> None:
    write_matrix("S.npy", matrix)
    before = set(os.listdir())
    assert_refused(neula_cli("solve", "S.npy", "b.npy", "-o", "x.npy", *arguments), says, before)


# --- JSON -------------------------------------------------------------------------------------------------


def test_lstsq_json() -> None:
    facts = parsed(succeed("lstsq", "problem.npz:A", "b.csv", "--json"))
    assert facts["command"] == "lstsq"
    about = {"dtype": "float64", "names": None}
    assert facts["inputs"]["A"] == {"file": "problem.npz:A", "shape": [60, 7], **about}
    assert facts["inputs"]["b"] == {"file": "b.csv", "shape": [60], **about}
    assert facts["outputs"] == {}
    assert facts["converged"] is True
    assert facts["accuracy"] == "fp64"
    assert facts["backward_error"] <= facts["tolerance"]
    assert facts["rank"] == 7
    assert facts["iterations"] >= 0
    assert facts["residual_norm"] == pytest.approx(np.linalg.norm(B - A @ X))
    assert facts["attempts"][-1]["accepted"] is True
    assert facts["attempts"][-1]["method"] == facts["factorization"]
    assert set(facts["seconds"]) == {"read", "compute"}
    np.testing.assert_allclose(facts["x"], X, rtol=1e-12)


def test_json_numbers_have_every_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.array([1 / 3, 5e-324, 1.7976931348623157e308, -0.0])
    fake_lstsq(monkeypatch, x=x)
    assert np.array(parsed(succeed("lstsq", "A.npy", "b.npy", "--json"))["x"]).tobytes() == x.tobytes()


def test_json_names_the_output_instead_of_repeating_it() -> None:
    facts = parsed(succeed("lstsq", "A.npy", "b.npy", "-o", "x.npz", "--json"))
    assert facts["outputs"] == {"x.npz": ["x"]}
    assert "x" not in facts
    assert "write" in facts["seconds"]


def test_json_has_null_for_what_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_lstsq(
        monkeypatch,
        x=np.array([np.nan, 1.0]),
        converged=False,
        backward_error=float("nan"),
        residual_norm=[np.float64(np.inf)],
        history=(float("inf"), 1.0),
    )
    result = neula_cli("lstsq", "A.npy", "b.npy", "--json")
    assert result.exit_code == cli.NOT_CERTIFIED
    facts = parsed(result)
    assert facts["x"] == [None, 1.0]
    assert facts["backward_error"] is None
    assert facts["residual_norm"] == [None]
    assert facts["history"] == [None, 1.0]


def test_json_is_alone_on_stdout_when_there_is_something_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("s.mtx").write_text("%%MatrixMarket matrix coordinate real general\n60 2 2\n1 1 1\n2 2 1\n")
    Path("h.csv").write_text("rhs\n" + "1\n" * 60)
    fake_lstsq(monkeypatch)
    result = succeed("lstsq", "s.mtx", "h.csv", "--json")
    assert parsed(result)["converged"] is True
    assert "s.mtx: sparse, 60 x 2 with 2 entries (1.67% dense)" in result.stderr
    assert "h.csv: line 1 is a header" in result.stderr


def test_json_of_an_error() -> None:
    result = neula_cli("lstsq", "missing.npy", "b.npy", "--json")
    assert result.exit_code == cli.BAD_INPUT
    assert parsed(result) == {"command": "lstsq", "error": "missing.npy: no such file"}
    assert result.stderr == "neula: error: missing.npy: no such file\n"


# --- qr, orth, svd ----------------------------------------------------------------------------------------


def assert_factors(q: np.ndarray, r: np.ndarray) -> None:
    np.testing.assert_allclose(q @ r, A, atol=1e-13)
    np.testing.assert_allclose(q.T @ q, np.eye(7), atol=1e-13)
    np.testing.assert_array_equal(r, np.triu(r))


def test_qr_into_one_file() -> None:
    facts = parsed(succeed("qr", "A.npy", "-o", "qr.npz", "--json"))
    assert_factors(read_matrix("qr.npz", key="Q"), read_matrix("qr.npz", key="R"))
    assert facts["command"] == "qr"
    assert facts["outputs"] == {"qr.npz": ["Q", "R"]}
    assert facts["converged"] is True
    assert facts["certificate"]["orthogonality"] <= facts["certificate"]["orthogonality_bound"]
    assert facts["attempts"][-1]["accepted"] is True


def test_qr_of_r_alone() -> None:
    before = set(os.listdir())
    succeed("qr", "A.npy", "--mode", "r", "-o", "r.csv")
    assert set(os.listdir()) == before | {"r.csv"}
    np.testing.assert_allclose(read_matrix("r.csv").T @ read_matrix("r.csv"), A.T @ A, atol=1e-12)


def test_qr_without_a_file_shows_the_certificate() -> None:
    before = set(os.listdir())
    result = succeed("qr", "A.npy", "--accuracy", "fp32", "--engine", "cpu")
    for part in (
        "certified",
        "orthogonality",
        "Q and R were not kept: give -o with the name of an .npz file",
    ):
        assert part in result.stderr
    assert result.stdout == ""
    assert set(os.listdir()) == before


def test_orth() -> None:
    result = succeed("orth", "A.mtx", "-o", "q.npy", "--json")
    assert parsed(result)["outputs"] == {"q.npy": ["Q"]}
    q = np.load("q.npy")
    np.testing.assert_allclose(q.T @ q, np.eye(7), atol=1e-13)
    np.testing.assert_allclose(q @ (q.T @ A), A, atol=1e-12)


def test_svd_of_given_rank() -> None:
    facts = parsed(succeed("svd", "A.npy", "--rank", "3", "-o", "svd.npz", "--json"))
    u, s, vh = (read_matrix("svd.npz", key=key) for key in ("U", "s", "Vh"))
    u0, s0, vh0 = np.linalg.svd(A, full_matrices=False)
    np.testing.assert_allclose(s, s0[:3], rtol=1e-12)
    np.testing.assert_allclose((u * s) @ vh, (u0[:, :3] * s0[:3]) @ vh0[:3], atol=1e-12)
    assert facts["rank"] == 3
    assert facts["s"] == s.tolist()
    assert facts["converged"] is True


def test_svd_to_a_tolerance() -> None:
    facts = parsed(succeed("svd", "A.npy", "--tol", "0.5", "--json"))
    s = np.linalg.svd(A, compute_uv=False)
    tails = [np.linalg.norm(s[k:]) / np.linalg.norm(s) for k in range(8)]
    assert facts["rank"] == next(k for k in range(8) if tails[k] <= 0.5)
    assert "singular values" in succeed("svd", "A.npy", "--tol", "0.5").stderr


def test_svd_of_all_values() -> None:
    facts = parsed(succeed("svd", "A.npy", "-o", "svd.npz", "--json"))
    u, s, vh = (read_matrix("svd.npz", key=key) for key in ("U", "s", "Vh"))
    np.testing.assert_allclose((u * s) @ vh, A, atol=1e-13)
    assert facts["s"] == s.tolist()
    assert max(facts["errors"]) < 1e-12
    assert "rank" not in facts
    np.testing.assert_allclose(_column(succeed("svd", "A.npy", "--values-only")), s, rtol=1e-12)
    few = _column(succeed("svd", "A.npy", "--rank", "2", "--values-only"))
    np.testing.assert_allclose(few, s[:2], rtol=1e-12)
    assert "read block by block" in succeed("svd", "A.npy", "--stream").stderr


def _column(result: Result) -> np.ndarray:
    return np.array(result.stdout.split(), dtype=float)


def test_eigh() -> None:
    S = A.T @ A
    write_matrix("S.npy", S)
    facts = parsed(succeed("eigh", "S.npy", "-o", "eig.npz", "--json"))
    w, v = (read_matrix("eig.npz", key=key) for key in ("eigenvalues", "eigenvectors"))
    np.testing.assert_allclose((v * w) @ v.T, S, atol=1e-11)
    assert (facts["eigenvalues"], facts["evidence"], facts["converged"]) == (w.tolist(), "measured", True)
    assert facts["clusters"] == list(range(7))
    assert "7 of 7 eigenvalues" in succeed("eigh", "S.npy").stderr
    values = succeed("eigh", "S.npy", "--values-only")
    np.testing.assert_allclose(_column(values), w, rtol=1e-12)
    assert "a priori" in values.stderr
    largest = succeed("eigh", "S.npy", "--values-only", "--subset", "-2,-1")
    np.testing.assert_allclose(_column(largest), w[-2:], rtol=1e-12)


def test_eigh_of_two_matrices() -> None:
    S = A.T @ A
    write_matrix("S.npy", np.tril(S))
    write_matrix("U.npy", np.triu(S))
    write_matrix("M.npy", np.diag(np.arange(1.0, 8.0)))
    values = _column(succeed("eigh", "S.npy", "M.npy", "--values-only"))
    np.testing.assert_allclose(values, scipy.linalg.eigh(S, np.diag(np.arange(1.0, 8.0)))[0], rtol=1e-12)
    above = _column(succeed("eigh", "U.npy", "M.npy", "--values-only", "--upper"))
    np.testing.assert_allclose(above, values, rtol=1e-12)


# --- exit code 1 ------------------------------------------------------------------------------------------


def test_not_certified_is_exit_code_1_and_the_solution_is_still_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_lstsq(monkeypatch, converged=False, backward_error=3e-9)
    result = neula_cli("lstsq", "A.npy", "b.npy", "-o", "x.npy")
    assert result.exit_code == cli.NOT_CERTIFIED
    np.testing.assert_array_equal(np.load("x.npy"), X)
    assert result.stdout == ""
    assert "NOT certified" in result.stderr
    assert result.stderr.endswith(
        "neula: the requested accuracy was not reached: backward error 3.0e-09, tolerance 1.0e-15; "
        "the best answer is in x.npy\n"
    )


def test_qr_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = QRResult(
        Q=A, R=np.eye(7), certificate=QRCertificate(1e-3, 2e-3, 1e-15, 1e-15), attempts=(), accuracy="fp64"
    )
    monkeypatch.setattr(neula, "qr", lambda *_, **__: bad)
    result = neula_cli("qr", "A.npy", "-o", "out.npz", "--json")
    assert result.exit_code == cli.NOT_CERTIFIED
    assert parsed(result)["converged"] is False
    assert "orthogonality 2.0e-03 (bound 1.0e-15)" in result.stderr
    np.testing.assert_array_equal(read_matrix("out.npz", key="Q"), A)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("pass another rcond, or damp=", "pass another rcond, or --damp"),
        (
            "not definite: A[0, 0] is -1; solve it with assume_a='gen'",
            "not definite: A[0, 0] is -1; solve it with --assume-a gen",
        ),
        ("pass compute='fp32_notc' or engine='emulated'", "pass --compute fp32_notc or --engine emulated"),
        ("use\nneula.lstsq for the minimum-norm solution", "use 'neula lstsq' for the minimum-norm solution"),
        ("no gap at rcond = 1e-15: A.csv", "no gap at rcond = 1e-15: A.csv"),
    ],
)
def test_advice_is_that_of_a_shell(message: str, shown: str) -> None:
    assert show.at_shell(message) == shown


NEARLY_SINGULAR = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]])


@pytest.mark.parametrize("filters", ["default", "ignore"])
def test_a_singular_system_has_exit_code_1(filters: Any) -> None:
    """Its last pivot is a rounding error: LU goes through, and no digit is sure."""
    write_matrix("S.csv", NEARLY_SINGULAR)
    write_matrix("c.csv", NEARLY_SINGULAR.sum(1))
    with warnings.catch_warnings():
        warnings.simplefilter(filters)
        shown = neula_cli("solve", "S.csv", "c.csv", "-o", "x.csv")
    assert shown.exit_code == cli.NOT_CERTIFIED
    assert "NOT certified" in shown.stderr
    assert "none is guaranteed" in shown.stderr
    assert "no digit of x is guaranteed: condition number" in shown.stderr.splitlines()[-1]
    assert shown.stdout == ""
    assert Path("x.csv").exists()
    facts = parsed(neula_cli("solve", "S.csv", "c.csv", "--json"))
    assert facts["converged"] is False
    assert facts["condition"] is None or facts["condition"] > 1e14


def test_an_ill_conditioned_least_squares_problem_has_exit_code_1() -> None:
    graded = np.vander(np.linspace(1, 2, 60), 18)
    write_matrix("V.npy", graded)
    shown = neula_cli("lstsq", "V.npy", "b.npy", "--rcond", "0", "-o", "x.npy")
    assert shown.exit_code == cli.NOT_CERTIFIED
    assert "least squares is not certified" in shown.stderr


@pytest.mark.parametrize("command", ["lstsq", "solve"])
def test_digits_that_are_sure(command: str) -> None:
    write_matrix("S.npy", SQUARE)
    write_matrix("c.npy", RHS)
    output = succeed(command, "S.npy", "c.npy").stderr
    for part in (
        "condition",
        "digits of x",
        "forward error",
        "(rounding only; noise in the data is not counted)",
    ):
        assert part in output
    facts = parsed(succeed(command, "S.npy", "c.npy", "--json"))
    assert 1 <= facts["condition"] < 10 * np.linalg.cond(SQUARE)
    assert facts["forward_error"] < 1e-15
    assert facts["digits"] == pytest.approx(-np.log10(max(2.0**-53, facts["forward_error"])))


def test_orth_of_dependent_columns_says_so() -> None:
    write_matrix("twice.npy", np.hstack([A, A]))
    shown = neula_cli("orth", "twice.npy", "-o", "q.npy", "--json")
    assert shown.exit_code == cli.NOT_CERTIFIED
    assert parsed(shown)["columns"] == 14
    assert "the columns lack full rank: the rank is at most 7, not 14" in shown.stderr
    assert np.load("q.npy").shape == (60, 14)


def test_orth_of_the_range() -> None:
    write_matrix("twice.npy", np.hstack([A, A]))
    shown = succeed("orth", "twice.npy", "--rcond", "1e-10", "-o", "q.npy")
    assert "7, of 14 in A (rcond 1e-10)" in shown.stderr
    q = np.load("q.npy")
    np.testing.assert_allclose(q @ (q.T @ A), A, atol=1e-12)
    assert neula_cli("orth", "twice.npy", "--rcond", "2").exit_code == cli.BAD_INPUT


def test_accuracy_warnings_are_not_said_twice_and_others_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_lstsq(monkeypatch, converged=False)
    fake = neula.lstsq

    def warn(*arguments: Any, **options: Any) -> Any:
        warnings.warn("not certified", AccuracyWarning, stacklevel=2)
        warnings.warn("something else", UserWarning, stacklevel=2)
        return fake(*arguments, **options)

    monkeypatch.setattr(neula, "lstsq", warn)
    shown = warnings.showwarning
    lines = neula_cli("lstsq", "A.npy", "b.npy").stderr.splitlines()
    assert lines[0] == "neula: warning: something else"
    assert lines[1] == "neula lstsq: NOT certified"
    assert lines[-1] == "neula: not certified"
    assert sum("not certified" in line for line in lines) == 1
    assert warnings.showwarning is shown


# --- exit code 2 ------------------------------------------------------------------------------------------


def make_bad_files() -> None:
    Path("text.npy").write_text("1,2\n3,4\n")
    Path("empty.csv").touch()
    Path("short.npy").write_bytes(Path("A.npy").read_bytes()[:-8])
    Path("short.mtx.gz").write_bytes(Path("A.mtx.gz").read_bytes()[:-9])
    Path("a.xyz").write_text("1")
    Path("words.csv").write_text("1,2\n3,four\n")
    np.save("complex.npy", A + 1j)
    np.save("objects.npy", np.array([None]), allow_pickle=True)
    np.save("cube.npy", np.zeros((2, 3, 4, 5)))
    np.save("none.npy", np.zeros((0, 7)))
    np.save("scalar.npy", np.float64(1))
    np.save("nan.npy", np.where(np.arange(60 * 7).reshape(60, 7) == 65, np.nan, A))
    np.save("b59.npy", B[:-1])
    np.save("square.npy", A.T @ A)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("lstsq . b.npy", "is a directory"),
        ("lstsq A.npy text.npy", "text.npy: not a .npy file"),
        ("lstsq A.npy empty.csv", "empty.csv: the file is empty"),
        ("lstsq short.npy b.npy", "short.npy: truncated or damaged .npy file"),
        ("lstsq short.mtx.gz b.npy", "short.mtx.gz: truncated or damaged gzip file"),
        ("lstsq a.xyz b.npy", "unknown extension '.xyz'; .npy, .npz, .csv, .tsv, .txt, .csv.gz, .tsv.gz"),
        ("lstsq words.csv b.npy", "words.csv: line 2, column 2: 'four' is not a number"),
        ("lstsq problem.npz b.npy", "holds 2 arrays (A, b); choose one, as in problem.npz:A"),
        ("lstsq problem.npz:C b.npy", "no array is named 'C'; it holds A, b"),
        ("lstsq complex.npy b.npy --nonnegative", "A is complex (complex128), and must be real"),
        ("lstsq objects.npy b.npy", "objects.npy: holds Python objects"),
        ("lstsq A.npy b59.npy", "59"),
        ("lstsq nan.npy b.npy", "[9, 2] is nan"),
        ("lstsq b.npy b.npy", "(60,)"),
        ("lstsq scalar.npy b.npy", "()"),
        ("lstsq none.npy b.npy", "(0, 7)"),
        ("lstsq A.npy b.npy --weights b59.npy", "weights"),
        ("lstsq A.npy b.npy --weights missing.csv", "missing.csv: no such file"),
        ("lstsq A.npy b.npy --damp -1", "damp"),
        ("lstsq A.npy b.npy --rcond 2", "rcond"),
        ("lstsq A.npy b.npy -o x.xyz", "x.xyz: unknown extension '.xyz'; .npy, .npz, .csv"),
        ("lstsq A.npy b.npy -o x.npz:x:", "x.npz:x:: the answer is written as a whole: leave out ':x:'"),
        ("lstsq A.npy b.npy -o missing/x.npy", "there is no directory missing; create it first"),
        ("lstsq A.npy b.npy -o b.npy", "b.npy: would replace the input b.npy"),
        ("lstsq problem.npz:A b.npy -o problem.npz", "problem.npz: would replace the input problem.npz:A"),
        ("qr A.npy -o qr.npy", "a .npy file holds one array, not 2; give the name of an .npz file"),
        ("qr A.npy --q a.npy --r a.npy", "a.npy: would replace another output"),
        ("tsqr A.npy --mode foo", "unknown --mode 'foo': choose one of 'reduced', 'r', 'auto', 'fp16_cor'"),
        ("data illc1033 A.npy", "A.npy is a file: name a folder"),
        ("qr A.npy --mode r --q q.npy", "--mode r computes no Q"),
        ("qr nan.npy", "[9, 2] is nan"),
        ("eigh A.npy", "A must be square, got 60 x 7"),
        ("eigh square.npy --subset 1", "--subset must be two indices, as 0,4 or -5,-1, got '1'"),
        ("eigh square.npy --subset 5,9", "--subset 5,9 is out of range"),
        ("eigh square.npy -o w.npy", "holds one array, not 2"),
        ("svd A.npy --rank 2 --tol 0.1", "give one of --rank and --tol"),
        ("svd A.npy --rank 99", "99"),
        ("svd A.npy --rank 2 -o svd.mtx", "holds one array, not 3"),
        ("svd cube.npy --rank 2", "(2, 3, 4, 5)"),
    ],
)
def test_bad_input(arguments: str, says: str) -> None:
    make_bad_files()
    assert_refused(neula_cli(*arguments.split()), says, before=set(os.listdir()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_engine_that_this_machine_lacks() -> None:
    before = set(os.listdir())
    assert_refused(neula_cli("lstsq", "A.npy", "b.npy", "--engine", "cuda", "-o", "x.npy"), "cuda", before)


@pytest.mark.parametrize("output", ["x.xyz", "missing/x.npy", "A.npy"])
def test_an_output_that_cannot_be_is_refused_before_the_work(
    output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_lstsq(monkeypatch)
    assert neula_cli("lstsq", "A.npy", "b.npy", "-o", output).exit_code == cli.BAD_INPUT
    assert calls == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("lstsq A.npy b.npy --accuracy fp8", "'fp16', 'bf16', 'tf32', 'fp32', 'fp64'"),
        ("lstsq A.npy b.npy --certify sideways", "'backward', 'forward'"),
        ("qr A.npy --engine abacus", "'auto', 'cpu', 'emulated', 'cuda'"),
        ("lstsq A.npy", "missing argument"),
        ("lstsq A.npy b.npy --accuracy", "requires an argument; see 'neula lstsq --help'"),
        ("bench --out", "requires an argument; see 'neula bench --help'"),
        ("svd A.npy --rank two", "--rank"),
        ("frobnicate", "frobnicate"),
    ],
)
def test_usage_errors(arguments: str, says: str) -> None:
    result = neula_cli(*arguments.split())
    assert result.exit_code == cli.BAD_INPUT
    assert result.stdout == ""
    assert says in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 8 EiB"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
)
def test_out_of_memory(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neula, "lstsq", raising(error))
    before = set(os.listdir())
    assert_refused(neula_cli("lstsq", "A.npy", "b.npy", "-o", "x.npy"), "out of memory", before)


def test_messages_of_several_lines_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neula, "lstsq", raising(OverflowError("first\n  second")))
    result = neula_cli("lstsq", "A.npy", "b.npy")
    assert result.exit_code == cli.BAD_INPUT
    assert result.stderr == "neula: error: first second\n"


# --- interruptions and defects ----------------------------------------------------------------------------


def test_a_defect_is_not_mistaken_for_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(neula, "lstsq", raising(RuntimeError("a bug")))
    monkeypatch.setattr(sys, "argv", ["neula", "lstsq", "A.npy", "b.npy"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == cli.DEFECT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "RuntimeError: a bug" in captured.err
    assert "please report" in captured.err


# --- progress ---------------------------------------------------------------------------------------------


def test_progress_lines_only_for_what_takes_longer_than_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(run.time, "perf_counter", lambda: now)
    with run.ProgressReport(Console(stderr=True, width=100)) as progress:
        for now in np.arange(100.0, 112.0, 0.5):
            progress("factorizing", (now - 100) / 12)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "neula: factorizing, 17% after 2 s",
        "neula: factorizing, 33% after 4 s",
        "neula: factorizing, 67% after 8 s",
    ]


def test_a_bar_on_a_terminal_leaves_stdout_clean() -> None:
    pty = pytest.importorskip("pty")
    Path("[").mkdir()
    Path("[/]A.npy").write_bytes(Path("A.npy").read_bytes())  # looks like markup
    terminal, stderr = pty.openpty()
    command = [sys.executable, "-m", "neula", "lstsq", "[/]A.npy", "b.npy", "--json"]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environment)
    os.close(stderr)
    shown = b""
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:  # Linux says so when the other end is closed
        pass
    os.close(terminal)
    stdout, _ = process.communicate()
    assert process.returncode == 0
    assert json.loads(stdout)["converged"] is True
    assert shown.startswith(b"\x1b[?25l")  # the cursor is hidden while the bar moves
    assert shown.endswith(b"\x1b[2K")  # and the bar is wiped away


# --- info, demo, version, help ----------------------------------------------------------------------------

ENGINES = [
    {"engine": "cuda", "available": False, "device": "", "formats": {}, "note": "no GPU"},
    {
        "engine": "cpu",
        "available": True,
        "device": "2 threads",
        "formats": {
            "bf16": {"rate_gflops": 1234.5, "note": "fast"},
            "fp64": {"rate_gflops": 98.76, "note": ""},
            "fp16": {"rate_gflops": None, "note": "not offered"},
        },
        "note": "",
    },
]


def test_info(monkeypatch: pytest.MonkeyPatch) -> None:
    import neula.engines

    monkeypatch.setattr(neula.engines, "describe", lambda: ENGINES)
    output = succeed("info").stdout
    for part in ("cuda", "not available", "no GPU", "1.23 TFLOP/s", "98.8 GFLOP/s", "not offered"):
        assert part in output
    assert torch.__version__ in output
    facts = parsed(succeed("info", "--json"))
    assert facts["engines"] == ENGINES
    packages = {"neula", "torch", "numpy", "scipy"}
    assert set(facts["versions"]) == packages | {"python", "threads", "compiled core"}


def test_info_of_this_machine() -> None:
    engines = {entry["engine"]: entry for entry in parsed(succeed("info", "--json"))["engines"]}
    assert set(engines) == {"cuda", "cpu", "emulated"}
    assert engines["cpu"]["available"] is True
    assert engines["cpu"]["formats"]["fp64"]["rate_gflops"] > 0


def test_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, int]] = []
    monkeypatch.setattr(
        "neula.cli.demo.run_demo", lambda out, *, degree, **others: calls.append((out, degree))
    )
    succeed("demo", "--out", "pictures", "--degree", "12")
    succeed("demo")
    assert calls == [(Path("pictures"), 12), (Path("demo-output"), 40)]
    monkeypatch.setattr("neula.cli.demo.run_demo", raising(ValueError("degree must be positive")))
    assert_refused(neula_cli("demo"), "degree must be positive", set(os.listdir()))


def test_data_are_listed_and_copied_and_replace_no_other_file() -> None:
    listed = succeed("data").stdout
    assert all(name in listed for name in ("illc1033", "longley", "misra1a"))
    before = set(os.listdir())
    for _ in range(2):  # the same files again do no harm
        assert succeed("data", "ILLC1033", "sub").stdout.splitlines() == [
            os.path.join("sub", "illc1033.mtx.gz"),
            os.path.join("sub", "illc1033_rhs1.mtx.gz"),
        ]
    assert read_matrix("sub/illc1033.mtx.gz").shape == (1033, 320)
    assert succeed("data", "misra1a").stdout == "misra1a.csv\n"
    Path("misra1a.csv").write_text("mine")
    before |= {"sub", "misra1a.csv"}
    assert_refused(neula_cli("data", "misra1a"), "choose another folder", before)
    assert Path("misra1a.csv").read_text() == "mine"
    assert_refused(neula_cli("data", "mine"), "unknown data set 'mine'", before)


# --- tune -------------------------------------------------------------------------------------------------


def test_tune_measures_keeps_shows_and_forgets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from neula.cli import tune
    from neula.engines import CpuEngine, tuned

    monkeypatch.setenv("NEULA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tune, "measure", lambda device, progress: {"direct": 4321})
    _ = CpuEngine("cpu").tuning  # which is read once in a process, before anything is kept
    result = succeed("tune", "--cpu")
    assert "4321" in result.stdout
    assert "neula tune" in result.stdout
    shown = succeed("tune", "--cpu", "--show")
    assert "4321" in shown.stdout
    assert str(tuned.file_of(tuned.machine_of(torch.device("cpu")))) in shown.stderr
    # What is measured on such a machine, and nothing else.
    rows = {line.split()[1] for line in shown.stdout.splitlines() if line.startswith("│")}
    assert rows == {crossover.name for crossover in tune.CPU}
    assert "4321" not in succeed("tune", "--cpu", "--reset").stdout
    assert "shipped" in succeed("tune", "--cpu", "--show").stdout
    assert_refused(neula_cli("tune", "--show", "--reset"), "give one of them", set(os.listdir()))


# --- bench ------------------------------------------------------------------------------------------------


@pytest.fixture
def small_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LARGE", "SQUARE", "BATCHES"):
        monkeypatch.setattr(benchmarks, name, ())
    for name, sizes in {"TALL": ((64, 16),), "ORDERS": (8,), "LOW_RANK": ((64, 16, 3),)}.items():
        monkeypatch.setattr(benchmarks, name, sizes)


def test_bench_measures_shows_and_saves(small_benchmarks: None) -> None:
    result = succeed("bench", "qr", "lstsq", "--cpu", "--quick", "--out", "results")
    assert "neula and the fastest call of torch and SciPy" in result.stdout
    assert "64x16" in result.stdout
    assert "times as fast as" in result.stderr
    (name,) = (path.name for path in Path("results").glob("*.json"))
    assert name.startswith("bench-sweep-lstsq-qr-")
    assert f"saved to results/{name}" in result.stdout
    again = succeed("bench", "--data", "results")
    assert "64x16" in again.stdout
    assert again.stderr == ""


def test_bench_for_machines(small_benchmarks: None) -> None:
    facts = parsed(succeed("bench", "sweep", "--cpu", "--quick", "--json"))
    assert facts["command"] == "bench"
    rows = facts["results"][0]["rows"]
    assert {row["problem"] for row in rows} == {"qr", "lstsq", "solve", "svd_lowrank"}


def test_bench_draws(small_benchmarks: None) -> None:
    pytest.importorskip("matplotlib")
    drawn = succeed("bench", "solve", "--cpu", "--quick", "--draw", "pictures/all.svg")
    assert "saved to pictures/all.svg" in drawn.stdout
    assert Path("pictures/all.svg").stat().st_size > 1000


def test_bench_refuses_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir())
    assert_refused(neula_cli("bench", "--data", "nowhere"), "nowhere: no bench-*.json", before)
    assert_refused(neula_cli("bench", "qr", "--data", "nowhere"), "--data shows stored results", before)
    both = neula_cli("bench", "--special", "--condition", "10")
    assert_refused(both, "--special problems have their own matrices: leave out --condition", before)
    refused = neula_cli("bench", "--condition", "1e15")
    assert_refused(refused, "--condition must be from 1 to 1e+14, got 1e+15", before)
    assert_refused(neula_cli("bench", "--draw", "x.bmp"), "x.bmp: the name must end with .svg", before)
    monkeypatch.setattr(benchmarks, "new_canvas", raising(ImportError("drawing needs matplotlib")))
    assert_refused(neula_cli("bench", "qr", "--cpu", "--draw", "x.svg"), "drawing needs matplotlib", before)


def test_help_names_every_command_and_the_exit_codes() -> None:
    output = succeed("--help").stdout
    for command in ("lstsq", "qr", "orth", "eigh", "svd", "info", "bench", "tune", "demo"):
        assert command in output
        assert "--help" in succeed(command, "--help").stdout
    assert "Exit codes" in output


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    Path("[red]A[bold].npy").write_bytes(Path("A.npy").read_bytes())
    assert "[red]A[bold].npy" in succeed("lstsq", "[red]A[bold].npy", "b.npy", "-o", "[x].npy").stderr
    assert "[x][/y].npy: no such file" in neula_cli("qr", "[x][/y].npy").stderr


# --- the installed program --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--help", 0),
        ("--version", 0),
        ("experiment qr-paper --help", 0),
        ("lstsq missing.npy missing.npy", cli.BAD_INPUT),
        ("solve none.npy b.npy", cli.BAD_INPUT),
    ],
)
def test_answers_that_need_no_arrays_come_at_once(arguments: str, code: int) -> None:
    """NumPy and torch, whose imports take long, are not imported; a time would depend on the machine."""
    script = (
        "import sys\nfrom neula.cli.main import main\n"
        f"sys.argv = ['neula', *{arguments.split()}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    code = end.code or 0\n"
        "print(code, sorted({'numpy', 'scipy', 'torch'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.endswith(f"{code} []\n")
