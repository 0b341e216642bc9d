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

import neula
from command_line import assert_refused, column, environment, facts, numbers, parsed, run, words
from neula import cli
from neula.certificates.qr_evidence import QRCertificate
from neula.cli import bench as benchmarks
from neula.cli import run as steps
from neula.cli import show
from neula.cli.main import main
from neula.io.files import read_matrix, write_files, write_matrix
from neula.pipeline.result import AccuracyWarning, Attempt, LstsqResult, QRResult

RNG = np.random.default_rng(20)
A = RNG.normal(size=(60, 7))
B = RNG.normal(size=60)
X = np.linalg.lstsq(A, B, rcond=None)[0]
SQUARE, RHS = A.T @ A, A.T @ B
NEARLY_SINGULAR = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]])
FILES = {"S": SQUARE, "c": RHS, "twice": np.hstack([A, A])}
LSTSQ = ("lstsq", "A.npy", "b.npy")


@pytest.fixture(autouse=True)
def files(in_folder: Path) -> None:
    """A and b in every format, and others."""
    for extension in (".npy", ".csv", ".mtx"):
        write_matrix(f"A{extension}", A)
        write_matrix(f"b{extension}", B)
    for name in ("A", "b"):
        Path(f"{name}.mtx.gz").write_bytes(gzip.compress(Path(f"{name}.mtx").read_bytes()))
    for name, matrix in FILES.items():
        np.save(f"{name}.npy", matrix)
    write_files({Path("problem.npz"): {"A": A, "b": B}})


def fake_lstsq(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[dict[str, Any]]:
    """Put a stand-in in the place of ``neula.lstsq``; returns the calls that it got."""
    calls: list[dict[str, Any]] = []
    found: dict[str, Any] = {
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
        return LstsqResult(**{**found, **changes})

    monkeypatch.setattr(neula, "lstsq", lstsq)
    return calls


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


# --- lstsq and solve --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "output"),
    [
        ("A.npy", "b.npy", "x.npz"),
        ("A.csv", "b.csv", "x.csv"),
        ("A.mtx", "b.mtx", "x.mtx"),
        ("A.mtx.gz", "b.mtx.gz", "x.npy"),
        ("problem.npz:A", "problem.npz:b", "x.npy"),
    ],
)
def test_lstsq_reads_and_writes_every_format(a: str, b: str, output: str) -> None:
    result = run("lstsq", a, b, "-o", output)
    np.testing.assert_allclose(read_matrix(output, column_as_vector=True), X, rtol=1e-12)
    assert "certified" in result.stderr
    assert f"saved to {output}" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("x", "shown"),
    [
        (X, [repr(float(x)) for x in X]),
        # float32 as the float64 that it is exactly: what reads a pipe has no other dtype.
        (np.float32([[0.1, 2], [3, 4]]), ["0.10000000149011612,2.0", "3.0,4.0"]),
        (np.arange(21.0), [f"{i}.0" for i in range(21)]),
    ],
)
def test_lstsq_prints_solutions_with_all_digits(
    x: np.ndarray, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_lstsq(monkeypatch, x=x)
    assert run(*LSTSQ).stdout.splitlines() == shown


def test_a_terminal_is_told_how_to_keep_a_long_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_lstsq(monkeypatch, x=np.arange(21.0))
    monkeypatch.setattr(show, "is_short", partial(_on_a_terminal, show.is_short))
    result = run(*LSTSQ)
    assert result.stdout == ""
    assert "x, of 21 numbers, was not kept: give -o" in result.stderr


def _on_a_terminal(is_short: Callable[..., bool], answer: Any, *, on_terminal: bool) -> bool:
    return is_short(answer, on_terminal=True)


def test_lstsq_summary_holds_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = (Attempt("first", False, "too far"), Attempt("second", True, "close"))
    fake_lstsq(monkeypatch, rank=5, full_rank=7, attempts=attempts, residual_norm=[1.25, 2.5])
    output = run(*LSTSQ).stderr
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
    run(*LSTSQ, *options, "--weights", "w.npy", "--certify", "forward")
    run(*LSTSQ)
    call, plain = calls
    for name, array in (("A", A), ("b", B), ("weights", np.ones(60))):
        np.testing.assert_array_equal(call[name], array)
    asked = {"accuracy": "fp32", "engine": "emulated", "damp": 2, "rcond": 1e-3, "certify": "forward"}
    assert call.items() >= asked.items()
    assert callable(call["progress"])
    defaults = {"accuracy": None, "engine": "auto", "damp": 0, "rcond": None, "certify": "backward"}
    assert plain.items() >= {**defaults, "weights": None}.items()


@pytest.mark.parametrize("assume_a", ["gen", "pos"])
def test_solve(assume_a: str) -> None:
    found = facts("solve", "S.npy", "c.npy", "--assume-a", assume_a)
    assert found["command"] == "solve"
    assert found["converged"] is True
    assert found["method"] == found["attempts"][-1]["method"]
    assert found["backward_error"] <= found["tolerance"]
    assert found["growth"] > 0
    assert len(found["history"]) == found["iterations"] + 1 > 1  # and after the first solve
    np.testing.assert_allclose(found["x"], X, rtol=1e-11)


def test_solve_prints_a_short_solution_and_takes_every_option() -> None:
    write_matrix("S.npy", SQUARE.astype(np.float32))
    write_matrix("c.npy", RHS.astype(np.float32))
    result = run("solve", "S.npy", "c.npy", "--accuracy", "fp16", "--engine", "emulated")
    np.testing.assert_allclose(column(result), X, rtol=1e-2, atol=1e-3)
    for part in ("neula solve: certified", "growth", "accepted"):
        assert part in result.stderr


@pytest.mark.parametrize("command", ["lstsq", "solve"])
def test_digits_that_are_sure(command: str) -> None:
    output = run(command, "S.npy", "c.npy").stderr
    rounding = "(rounding only; noise in the data is not counted)"
    for part in ("condition", "digits of x", "forward error", rounding):
        assert part in output
    found = facts(command, "S.npy", "c.npy")
    assert 1 <= found["condition"] < 10 * np.linalg.cond(SQUARE)
    assert found["forward_error"] < 1e-15
    assert found["digits"] == pytest.approx(-np.log10(max(2.0**-53, found["forward_error"])))


# --- JSON -------------------------------------------------------------------------------------------------


def test_lstsq_json() -> None:
    found = facts("lstsq", "problem.npz:A", "b.csv")
    assert found["command"] == "lstsq"
    about = {"dtype": "float64", "names": None}
    assert found["inputs"]["A"] == {"file": "problem.npz:A", "shape": [60, 7], **about}
    assert found["inputs"]["b"] == {"file": "b.csv", "shape": [60], **about}
    assert found["outputs"] == {}
    assert (found["converged"], found["accuracy"], found["rank"]) == (True, "fp64", 7)
    assert found["backward_error"] <= found["tolerance"]
    assert found["iterations"] >= 0
    assert found["residual_norm"] == pytest.approx(np.linalg.norm(B - A @ X))
    assert found["attempts"][-1]["accepted"] is True
    assert found["attempts"][-1]["method"] == found["factorization"]
    assert set(found["seconds"]) == {"read", "compute"}
    np.testing.assert_allclose(found["x"], X, rtol=1e-12)


def test_json_names_the_output_instead_of_repeating_it() -> None:
    found = facts(*LSTSQ, "-o", "x.npz")
    assert found["outputs"] == {"x.npz": ["x"]}
    assert "x" not in found
    assert "write" in found["seconds"]


def test_json_has_every_digit_and_null_for_what_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.array([1 / 3, 5e-324, 1.7976931348623157e308, -0.0, np.nan])
    values = {"backward_error": float("nan"), "residual_norm": [np.float64(np.inf)]}
    fake_lstsq(monkeypatch, x=x, converged=False, history=(float("inf"), 1.0), **values)
    found = facts(*LSTSQ, code=cli.NOT_CERTIFIED)
    assert np.array(found["x"][:-1]).tobytes() == x[:-1].tobytes()
    assert found["x"][-1] is found["backward_error"] is None
    assert (found["residual_norm"], found["history"]) == ([None], [None, 1.0])


def test_json_is_alone_on_stdout_when_there_is_something_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("s.mtx").write_text("%%MatrixMarket matrix coordinate real general\n60 2 2\n1 1 1\n2 2 1\n")
    Path("h.csv").write_text("rhs\n" + "1\n" * 60)
    fake_lstsq(monkeypatch)
    result = run("lstsq", "s.mtx", "h.csv", "--json")
    assert parsed(result)["converged"] is True
    assert "s.mtx: sparse, 60 x 2 with 2 entries (1.67% dense)" in result.stderr
    assert "h.csv: line 1 is a header" in result.stderr


def test_json_of_an_error() -> None:
    result = run("lstsq", "missing.npy", "b.npy", "--json", code=cli.BAD_INPUT)
    assert parsed(result) == {"command": "lstsq", "error": "missing.npy: no such file"}
    assert result.stderr == "neula: error: missing.npy: no such file\n"


# --- factors ----------------------------------------------------------------------------------------------

U, SIGMA, VH = np.linalg.svd(A, full_matrices=False)
LAMBDA = np.linalg.eigvalsh(SQUARE)
WEIGHTS = np.diag(np.arange(1.0, 8.0))
DEFINITE = scipy.linalg.eigh(SQUARE, WEIGHTS)[0]
TAILS = np.sqrt(np.cumsum(SIGMA[::-1] ** 2)[::-1]) / np.linalg.norm(SIGMA)
LEAST = int((TAILS > 0.5).sum())


def of_rank(k: int) -> np.ndarray:
    return (U[:, :k] * SIGMA[:k]) @ VH[:k]


def product(q: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """The matrix, of its factors."""
    if others and others[-1].ndim == 1:  # a permutation
        return (q @ others[0])[np.argsort(others[1])]
    if len(others) == 2:
        return (q * others[0]) @ others[1]
    return q @ others[0]


def projection(q: np.ndarray) -> np.ndarray:
    np.testing.assert_allclose(q.T @ q, np.eye(7), atol=1e-13)
    return q @ (q.T @ A)


@pytest.mark.parametrize(
    ("command", "names", "made", "expected"),
    [
        ("qr A.npy", "Q R", product, A),
        ("qr A.npy --mode r", "R", lambda r: r.T @ r, SQUARE),
        ("tsqr A.npy", "Q R", product, A),
        ("tsqr A.npy --mode r", "R", lambda r: r.T @ r, SQUARE),
        ("orth A.mtx", "Q", projection, A),
        ("orth twice.npy --rcond 1e-10", "Q", projection, A),
        ("svd A.npy", "U s Vh", product, A),
        ("svd A.npy --rank 3", "U s Vh", product, of_rank(3)),
        ("svd A.npy --tol 0.5", "U s Vh", product, of_rank(LEAST)),
        ("eigh S.npy", "eigenvalues eigenvectors", lambda w, v: (v * w) @ v.T, SQUARE),
        ("cholesky S.npy", "L", lambda factor: factor @ factor.T, SQUARE),
        ("cholesky S.npy --upper", "U", lambda factor: factor.T @ factor, SQUARE),
        ("lu S.npy --compute fp64", "L U permutation", product, SQUARE),
        ("matmul A.npy S.npy", "C", np.asarray, A @ SQUARE),
    ],
)
def test_factors(command: str, names: str, made: Callable[..., Any], expected: np.ndarray) -> None:
    found = facts(*command.split(), "-o", "f.npz")
    assert (found["command"], found["outputs"]) == (command.split()[0], {"f.npz": names.split()})
    assert found.get("converged", True) is True
    factors = [read_matrix("f.npz", key=name, column_as_vector=True) for name in names.split()]
    np.testing.assert_allclose(made(*factors), expected, atol=1e-13 * np.linalg.norm(expected))
    before = set(os.listdir())
    shown = run(*command.split())
    assert "certified" in shown.stderr or command.startswith(("lu", "matmul"))
    assert set(os.listdir()) == before
    if len(names.split()) > 1 and command[:2] in ("qr", "ts", "lu"):
        assert "were not kept: give -o with the name of an .npz file" in shown.stderr
        assert shown.stdout == ""


@pytest.mark.parametrize(
    ("command", "values", "says"),
    [
        ("svd A.npy", SIGMA, ""),
        ("svd A.npy --rank 2", SIGMA[:2], ""),
        ("eigh S.npy", LAMBDA, "a priori"),
        ("eigh S.npy --subset -2,-1", LAMBDA[-2:], ""),
        ("eigh lower.npy weights.npy", DEFINITE, ""),
        ("eigh upper.npy weights.npy --upper", DEFINITE, ""),
    ],
)
def test_values_only(command: str, values: np.ndarray, says: str) -> None:
    for name, matrix in (("lower", np.tril(SQUARE)), ("upper", np.triu(SQUARE)), ("weights", WEIGHTS)):
        np.save(f"{name}.npy", matrix)
    result = run(*command.split(), "--values-only")
    np.testing.assert_allclose(column(result), values, rtol=1e-12)
    assert says in result.stderr


def test_evidence_of_factors() -> None:
    found = facts("qr", "A.npy", "-o", "f.npz")
    assert found["attempts"][-1]["accepted"] is True
    assert found["certificate"]["orthogonality"] <= found["certificate"]["orthogonality_bound"]
    found = facts("svd", "A.npy", "--rank", "3")
    np.testing.assert_allclose(found["s"], SIGMA[:3], rtol=1e-12)
    assert (found["rank"], "rank" in facts("svd", "A.npy")) == (3, False)
    assert max(facts("svd", "A.npy")["errors"]) < 1e-12
    found = facts("eigh", "S.npy")
    np.testing.assert_allclose(found["eigenvalues"], LAMBDA, rtol=1e-12)
    assert (found["evidence"], found["clusters"]) == ("measured", list(range(7)))
    assert facts("matmul", "A.npy", "S.npy")["shape"] == [60, 7]
    for command, says in (
        ("qr A.npy --accuracy fp32 --engine cpu", "orthogonality"),
        ("orth twice.npy --rcond 1e-10", "7, of 14 in A (rcond 1e-10)"),
        ("svd A.npy --tol 0.5", "singular values"),
        ("svd A.npy --stream", "read block by block"),
        ("eigh S.npy", "7 of 7 eigenvalues"),
        ("lu S.npy --compute fp32 --storage fp32", "products in fp32, factors in fp32"),
    ):
        assert says in run(*command.split()).stderr


def test_arithmetic_that_is_named() -> None:
    found = run("matmul", "A.npy", "S.npy", "--compute", "fp16", "--engine", "emulated")
    error = np.abs(numbers(found) - A @ SQUARE)
    assert 0 < error.max() <= 2.0**-9 * (np.abs(A) @ np.abs(SQUARE)).max()
    factor = numbers(run("cholesky", "S.npy", "--accuracy", "1e-3"))
    np.testing.assert_allclose(factor, np.linalg.cholesky(SQUARE), rtol=1e-3, atol=1e-2)


# --- exit code 1 ------------------------------------------------------------------------------------------


def test_not_certified_is_exit_code_1_and_the_solution_is_still_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_lstsq(monkeypatch, converged=False, backward_error=3e-9)
    result = run(*LSTSQ, "-o", "x.npy", code=cli.NOT_CERTIFIED)
    np.testing.assert_array_equal(np.load("x.npy"), X)
    assert result.stdout == ""
    assert "NOT certified" in result.stderr
    assert result.stderr.endswith(
        "neula: the requested accuracy was not reached: backward error 3.0e-09, tolerance 1.0e-15; "
        "the best answer is in x.npy\n"
    )


def test_qr_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = QRCertificate(1e-3, 2e-3, 1e-15, 1e-15)
    bad = QRResult(Q=A, R=np.eye(7), certificate=certificate, attempts=(), accuracy="fp64")
    monkeypatch.setattr(neula, "qr", lambda *_, **__: bad)
    result = run("qr", "A.npy", "-o", "out.npz", "--json", code=cli.NOT_CERTIFIED)
    assert parsed(result)["converged"] is False
    assert "orthogonality 2.0e-03 (bound 1.0e-15)" in result.stderr
    np.testing.assert_array_equal(read_matrix("out.npz", key="Q"), A)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("pass another rcond, or damp=", "pass another rcond, or --damp"),
        ("A[0, 0] is -1; solve it with assume_a='gen'", "A[0, 0] is -1; solve it with --assume-a gen"),
        ("pass compute='fp32_notc' or engine='emulated'", "pass --compute fp32_notc or --engine emulated"),
        ("use\nneula.lstsq for the minimum-norm solution", "use 'neula lstsq' for the minimum-norm solution"),
        ("no gap at rcond = 1e-15: A.csv", "no gap at rcond = 1e-15: A.csv"),
    ],
)
def test_advice_is_that_of_a_shell(message: str, shown: str) -> None:
    assert show.at_shell(message) == shown


@pytest.mark.parametrize("filters", ["default", "ignore"])
def test_a_singular_system_has_exit_code_1(filters: Any) -> None:
    """Its last pivot is a rounding error: LU goes through, and no digit is sure."""
    write_matrix("N.csv", NEARLY_SINGULAR)
    write_matrix("d.csv", NEARLY_SINGULAR.sum(1))
    with warnings.catch_warnings():
        warnings.simplefilter(filters)
        shown = run("solve", "N.csv", "d.csv", "-o", "x.csv", code=cli.NOT_CERTIFIED)
    assert "NOT certified" in shown.stderr
    assert "none is guaranteed" in shown.stderr
    assert "no digit of x is guaranteed: condition number" in shown.stderr.splitlines()[-1]
    assert shown.stdout == ""
    assert Path("x.csv").exists()
    found = facts("solve", "N.csv", "d.csv", code=cli.NOT_CERTIFIED)
    assert found["converged"] is False
    assert found["condition"] is None or found["condition"] > 1e14


def test_an_ill_conditioned_least_squares_problem_has_exit_code_1() -> None:
    write_matrix("V.npy", np.vander(np.linspace(1, 2, 60), 18))
    shown = run("lstsq", "V.npy", "b.npy", "--rcond", "0", "-o", "x.npy", code=cli.NOT_CERTIFIED)
    assert "least squares is not certified" in shown.stderr


def test_orth_of_dependent_columns_says_so() -> None:
    shown = run("orth", "twice.npy", "-o", "q.npy", "--json", code=cli.NOT_CERTIFIED)
    assert parsed(shown)["columns"] == 14
    assert "the columns lack full rank: the rank is at most 7, not 14" in shown.stderr
    assert np.load("q.npy").shape == (60, 14)


def test_accuracy_warnings_are_not_said_twice_and_others_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_lstsq(monkeypatch, converged=False)
    fake = neula.lstsq

    def warn(*arguments: Any, **options: Any) -> Any:
        warnings.warn("not certified", AccuracyWarning, stacklevel=2)
        warnings.warn("something else", UserWarning, stacklevel=2)
        return fake(*arguments, **options)

    monkeypatch.setattr(neula, "lstsq", warn)
    shown = warnings.showwarning
    lines = run(*LSTSQ, code=cli.NOT_CERTIFIED).stderr.splitlines()
    assert lines[0] == "neula: warning: something else"
    assert lines[1] == "neula lstsq: NOT certified"
    assert lines[-1] == "neula: not certified"
    assert sum("not certified" in line for line in lines) == 1
    assert warnings.showwarning is shown


# --- exit code 2 ------------------------------------------------------------------------------------------

BAD_FILES = {
    "complex": A + 1j,
    "cube": np.zeros((2, 3, 4, 5)),
    "none": np.zeros((0, 7)),
    "scalar": np.float64(1),
    "nan": np.where(np.arange(60 * 7).reshape(60, 7) == 65, np.nan, A),
    "b59": B[:-1],
    "ones": np.ones((7, 7)),
    "negative": -np.eye(7),
}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("lstsq . b.npy", "is a directory"),
        ("lstsq a.xyz b.npy", "unknown extension '.xyz'; .npy, .npz, .csv, .tsv, .txt, .csv.gz, .tsv.gz"),
        ("lstsq words.csv b.npy", "words.csv: line 2, column 2: 'four' is not a number"),
        ("lstsq problem.npz b.npy", "holds 2 arrays (A, b); choose one, as in problem.npz:A"),
        ("lstsq complex.npy b.npy --nonnegative", "A is complex (complex128), and must be real"),
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
        ("solve A.npy b.npy", "A must be square, got 60 x 7; use 'neula lstsq'"),
        ("solve ones.npy c.npy -o x.npy", "A is singular: pivot 1 is exactly zero"),
        ("solve negative.npy c.npy --assume-a pos", "not positive definite: A[0, 0] is -1.0"),
        ("solve S.npy b.npy", "shapes of A and b do not fit: A is (7, 7), b is (60,)"),
        ("qr A.npy -o qr.npy", "a .npy file holds one array, not 2; give the name of an .npz file"),
        ("qr A.npy --q a.npy --r a.npy", "a.npy: would replace another output"),
        ("qr A.npy --mode r --q q.npy", "--mode r computes no Q"),
        ("qr nan.npy", "[9, 2] is nan"),
        ("orth twice.npy --rcond 2", "rcond must be at least 0 and below 1"),
        ("tsqr A.npy --mode foo", "unknown --mode 'foo': choose one of 'reduced', 'r', 'auto', 'fp16_cor'"),
        ("data illc1033 A.npy", "A.npy is a file: name a folder"),
        ("cholesky negative.npy", "not positive definite"),
        ("lu A.npy", "'neula lstsq'"),
        ("matmul A.npy S.npy --compute fp17", "fp17"),
        ("data mine", "unknown data set 'mine'"),
        ("eigh A.npy", "A must be square, got 60 x 7"),
        ("eigh S.npy --subset 1", "--subset must be two indices, as 0,4 or -5,-1, got '1'"),
        ("eigh S.npy --subset 5,9", "--subset 5,9 is out of range"),
        ("svd A.npy --rank 2 --tol 0.1", "give one of --rank and --tol"),
        ("svd A.npy --rank 99", "99"),
        ("svd A.npy --rank 2 -o svd.mtx", "holds one array, not 3"),
        ("svd cube.npy --rank 2", "(2, 3, 4, 5)"),
        ("tune --show --reset", "give one of them"),
        ("bench --data nowhere", "nowhere: no bench-*.json"),
        ("bench qr --data nowhere", "--data shows stored results"),
        ("bench --special --condition 10", "have their own matrices: leave out --condition"),
        ("bench --condition 1e15", "--condition must be from 1 to 1e+14, got 1e+15"),
        ("bench --draw x.bmp", "x.bmp: the name must end with .svg"),
    ],
)
def test_bad_input(arguments: str, says: str) -> None:
    Path("a.xyz").write_text("1")
    Path("words.csv").write_text("1,2\n3,four\n")
    for name, array in BAD_FILES.items():
        np.save(f"{name}.npy", array)
    assert_refused(arguments, says)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_engine_that_this_machine_lacks() -> None:
    assert_refused("lstsq A.npy b.npy --engine cuda -o x.npy", "cuda")


@pytest.mark.parametrize("output", ["x.xyz", "missing/x.npy", "A.npy"])
def test_an_output_that_cannot_be_is_refused_before_the_work(
    output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_lstsq(monkeypatch)
    run(*LSTSQ, "-o", output, code=cli.BAD_INPUT)
    assert calls == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("lstsq A.npy b.npy --accuracy fp8", "'fp16', 'bf16', 'tf32', 'fp32', 'fp64'"),
        ("svd A.npy --rank 1 --accuracy fp8", "neither a backward error"),
        ("svd A.npy --rank 1 --accuracy 0", "got 0.0"),
        ("svd A.npy --rank 1 --accuracy 1e-30", "got 1e-30"),
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
    result = run(*arguments.split(), code=cli.BAD_INPUT)
    assert result.stdout == ""
    assert says in words(result.stderr)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError("Unable to allocate 8 EiB"), "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: tried to allocate 8"), "out of memory"),
        (OverflowError("first\n  second"), "neula: error: first second\n"),
    ],
)
def test_errors_of_functions(error: Exception, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neula, "lstsq", raising(error))
    assert_refused("lstsq A.npy b.npy -o x.npy", says)


def test_a_defect_is_not_mistaken_for_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(neula, "lstsq", raising(RuntimeError("a bug")))
    monkeypatch.setattr(sys, "argv", ["neula", *LSTSQ])
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
    monkeypatch.setattr(steps.time, "perf_counter", lambda: now)
    with steps.ProgressReport(Console(stderr=True, width=100)) as progress:
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
    variables = {**environment(), "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=variables)
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


# --- info, demo, data, tune, bench, help ------------------------------------------------------------------

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
    engines = {entry["engine"]: entry for entry in facts("info")["engines"]}
    assert set(engines) == {"cuda", "cpu", "emulated"}
    assert engines["cpu"]["available"] is True
    assert engines["cpu"]["formats"]["fp64"]["rate_gflops"] > 0
    monkeypatch.setattr("neula.engines.describe", lambda: ENGINES)
    output = run("info").stdout
    shown = ("cuda", "not available", "no GPU", "1.23 TFLOP/s", "98.8 GFLOP/s", "not offered")
    for part in (*shown, torch.__version__):
        assert part in output
    found = facts("info")
    assert found["engines"] == ENGINES
    packages = {"neula", "torch", "numpy", "scipy", "python", "threads", "compiled core"}
    assert set(found["versions"]) == packages


def test_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, int]] = []

    def demo(out: Path, *, degree: int, **others: Any) -> None:
        calls.append((out, degree))

    monkeypatch.setattr("neula.cli.demo.run_demo", demo)
    run("demo", "--out", "pictures", "--degree", "12")
    run("demo")
    assert calls == [(Path("pictures"), 12), (Path("demo-output"), 40)]
    monkeypatch.setattr("neula.cli.demo.run_demo", raising(ValueError("degree must be positive")))
    assert_refused("demo", "degree must be positive")


def test_data_are_listed_and_copied_and_replace_no_other_file() -> None:
    listed = run("data").stdout
    assert all(name in listed for name in ("illc1033", "longley", "misra1a"))
    copied = [os.path.join("sub", name) for name in ("illc1033.mtx.gz", "illc1033_rhs1.mtx.gz")]
    for _ in range(2):  # the same files again do no harm
        assert run("data", "ILLC1033", "sub").stdout.splitlines() == copied
    assert read_matrix("sub/illc1033.mtx.gz").shape == (1033, 320)
    assert run("data", "misra1a").stdout == "misra1a.csv\n"
    Path("misra1a.csv").write_text("mine")
    assert_refused("data misra1a", "choose another folder")
    assert Path("misra1a.csv").read_text() == "mine"


def test_tune_measures_keeps_shows_and_forgets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from neula.cli import tune
    from neula.engines import CpuEngine, tuned

    monkeypatch.setenv("NEULA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tune, "measure", lambda device, progress: {"direct": 4321})
    _ = CpuEngine("cpu").tuning  # which is read once in a process, before anything is kept
    result = run("tune", "--cpu")
    assert "4321" in result.stdout
    assert "neula tune" in result.stdout
    shown = run("tune", "--cpu", "--show")
    assert "4321" in shown.stdout
    assert str(tuned.file_of(tuned.machine_of(torch.device("cpu")))) in shown.stderr
    # What is measured on such a machine, and nothing else.
    rows = {line.split()[1] for line in shown.stdout.splitlines() if line.startswith("│")}
    assert rows == {crossover.name for crossover in tune.CPU}
    assert "4321" not in run("tune", "--cpu", "--reset").stdout
    assert "shipped" in run("tune", "--cpu", "--show").stdout


@pytest.fixture
def small_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LARGE", "SQUARE", "BATCHES"):
        monkeypatch.setattr(benchmarks, name, ())
    for name, sizes in {"TALL": ((64, 16),), "ORDERS": (8,), "LOW_RANK": ((64, 16, 3),)}.items():
        monkeypatch.setattr(benchmarks, name, sizes)


def test_bench_measures_shows_and_saves(small_benchmarks: None) -> None:
    result = run("bench", "qr", "lstsq", "--cpu", "--quick", "--out", "results")
    assert "neula and the fastest call of torch and SciPy" in result.stdout
    assert "64x16" in result.stdout
    assert "times as fast as" in result.stderr
    (name,) = (path.name for path in Path("results").glob("*.json"))
    assert name.startswith("bench-sweep-lstsq-qr-")
    assert f"saved to results/{name}" in result.stdout
    again = run("bench", "--data", "results")
    assert "64x16" in again.stdout
    assert again.stderr == ""
    found = facts("bench", "sweep", "--cpu", "--quick")
    assert found["command"] == "bench"
    problems = {row["problem"] for row in found["results"][0]["rows"]}
    assert problems == {"qr", "lstsq", "solve", "svd_lowrank"}


def test_bench_draws(small_benchmarks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    drawn = run("bench", "solve", "--cpu", "--quick", "--draw", "pictures/all.svg")
    assert "saved to pictures/all.svg" in drawn.stdout
    assert Path("pictures/all.svg").stat().st_size > 1000
    monkeypatch.setattr(benchmarks, "new_canvas", raising(ImportError("drawing needs matplotlib")))
    assert_refused("bench qr --cpu --draw x.svg", "drawing needs matplotlib")


def test_help_names_every_command_and_the_exit_codes() -> None:
    output = run("-h").stdout
    for command in ("lstsq", "qr", "orth", "eigh", "svd", "info", "bench", "tune", "demo"):
        assert command in output
        assert "--help" in run(command, "--help").stdout
    assert "Exit codes" in output
    assert "Usage" in run("experiment", "qr-paper", "-h").stdout


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    Path("[red]A[bold].npy").write_bytes(Path("A.npy").read_bytes())
    assert "[red]A[bold].npy" in run("lstsq", "[red]A[bold].npy", "b.npy", "-o", "[x].npy").stderr
    assert_refused("qr [x][/y].npy", "[x][/y].npy: no such file")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--help", 0),
        ("--version", 0),
        ("experiment qr-paper --help", 0),
        ("lstsq missing.npy missing.npy", cli.BAD_INPUT),
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
