"""The command line as a part of others: pipes, columns by name, empty fields, and how it ends."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

import neula
from neula import cli
from neula.certificates.bounds import DtypeName
from neula.cli import options
from neula.cli.app import app
from neula.engines import FORMATS
from neula.io.files import write_files, write_matrix

RNG = np.random.default_rng(17)
A = RNG.normal(size=(40, 3))
X = np.array([1.0, -2.0, 0.5])
B = A @ X + 0.1 * RNG.normal(size=40)
SPD = A.T @ A

REGRESSION = ',x1,x2,"mass, kg",y,site\n' + "".join(
    f"{i},{','.join(map(repr, row))},{y!r},s{i}\n"
    for i, (row, y) in enumerate(zip(A.tolist(), B.tolist(), strict=True))
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("reg.csv").write_text(REGRESSION)
    write_files({Path("problem.npz"): {"A": A, "b": B, "S": SPD}})
    return tmp_path


def run(*arguments: str, given: str | bytes | None = None, code: int = 0) -> Result:
    result = CliRunner().invoke(app, arguments, input=given)
    assert result.exit_code == code, result.output
    return result


def numbers(result: Result) -> np.ndarray:
    """The matrix of text on stdout."""
    return np.loadtxt(io.StringIO(result.stdout), delimiter=",", ndmin=2)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "80"}


# --- pipes ------------------------------------------------------------------------------------------------


def test_the_answer_alone_is_on_stdout() -> None:
    result = run("lstsq", "problem.npz:A", "problem.npz:b")
    np.testing.assert_allclose(numbers(result)[:, 0], np.linalg.lstsq(A, B, rcond=None)[0], rtol=1e-12)
    assert "neula lstsq: certified" in result.stderr


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_parts_of_the_standard_input(name: str) -> None:
    result = run("lstsq", f"{name}:x1,x2", f"{name}:y", "-o", "x.npy", given=REGRESSION)
    np.testing.assert_allclose(np.load("x.npy"), np.linalg.lstsq(A[:, :2], B, rcond=None)[0], rtol=1e-12)
    assert "40 x 2 float64  -:x1,x2" in result.stderr


def test_the_standard_input_twice_and_empty() -> None:
    result = run("lstsq", "-", "-", given=REGRESSION, code=cli.BAD_INPUT)
    assert "the standard input is given twice: say which part is which, as in -:x1,x2" in result.stderr
    assert "standard input is empty" in run("qr", "-", given="", code=cli.BAD_INPUT).stderr
    assert "standard input: line 2" in run("qr", "-", given="1,2\n3,a\n", code=cli.BAD_INPUT).stderr


@pytest.mark.parametrize("output", ["-", "/dev/stdout"])
def test_a_pipeline(output: str) -> None:
    factors = run("qr", "problem.npz:A", "-o", output)
    product = run("matmul", "-:Q", "-:R", given=factors.stdout_bytes)
    np.testing.assert_allclose(numbers(product), A, atol=1e-13)
    r = run("qr", "problem.npz:A", "--mode", "r")
    gram = run("matmul", "-", "-:1,2,3", given=r.stdout)
    assert gram.exit_code == 0


def test_answers_of_a_batch_go_through_a_pipe_as_arrays() -> None:
    np.save("batch.npy", np.stack([SPD, 2 * SPD]))
    result = run("cholesky", "batch.npy", "-o", "-")
    np.testing.assert_allclose(np.load(io.BytesIO(result.stdout_bytes))[1], np.linalg.cholesky(2 * SPD))


def test_a_reader_that_is_gone_has_read_enough() -> None:
    command = [sys.executable, "-m", "neula", "lstsq", "problem.npz:A", "problem.npz:b"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait() == cli.BROKEN_PIPE
    assert "Traceback" not in said
    assert "Broken pipe" not in said


def test_arrays_are_not_for_a_terminal() -> None:
    pty = pytest.importorskip("pty")
    terminal, other = pty.openpty()
    command = [sys.executable, "-m", "neula", "qr", "problem.npz:A", "-o", "-"]
    done = subprocess.run(command, stdout=other, stderr=subprocess.PIPE, env=environment(), check=False)
    os.close(other)
    os.close(terminal)
    assert done.returncode == cli.BAD_INPUT
    assert b"2 arrays go to the standard output as an .npz file, which is not for a terminal" in done.stderr


# --- columns ----------------------------------------------------------------------------------------------


def test_columns_by_name_have_their_names_in_the_answer() -> None:
    result = run("lstsq", 'reg.csv:x1,"mass, kg"', "reg.csv:y")
    x = np.linalg.lstsq(A[:, [0, 2]], B, rcond=None)[0]
    first, *lines = result.stdout.splitlines()
    assert first == ",y"
    assert [line.rpartition(",")[0] for line in lines] == ["x1", '"mass, kg"']
    np.testing.assert_allclose([float(line.rpartition(",")[2]) for line in lines], x, rtol=1e-12)
    # And it is a file that neula reads.
    again = run("matmul", 'reg.csv:x1,"mass, kg"', "-", given=result.stdout)
    assert again.stdout.splitlines()[0] == "y"
    np.testing.assert_allclose([float(y) for y in again.stdout.split()[1:]], A[:, [0, 2]] @ x, rtol=1e-12)


def test_several_right_hand_sides_have_their_names() -> None:
    write_matrix("A.npy", SPD)
    Path("S.csv").write_text("a,b,c\n" + "".join(f"{','.join(map(repr, row))}\n" for row in SPD.tolist()))
    result = run("solve", "S.csv", "S.csv:c,a")
    assert result.stdout.splitlines()[0] == ",c,a"
    assert [line[0] for line in result.stdout.splitlines()[1:]] == ["a", "b", "c"]
    assert run("solve", "S.csv", "A.npy").stdout.splitlines()[0] == ",1,2,3"
    assert run("qr", "S.csv", "--mode", "r").stdout.splitlines()[0] == "a,b,c"


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
def test_intercept(dtype: type) -> None:
    matrix = np.round(3 * A).astype(dtype)
    write_matrix("A.npy", matrix)
    result = run("lstsq", "A.npy", "problem.npz:b", "--intercept")
    names = [line.partition(",")[0] for line in result.stdout.splitlines()]
    assert names == ["", "intercept", "1", "2", "3"]
    with_ones = np.hstack([np.ones((40, 1)), matrix])
    x = np.linalg.lstsq(with_ones, B, rcond=None)[0]
    found = [float(line.partition(",")[2]) for line in result.stdout.splitlines()[1:]]
    np.testing.assert_allclose(found, x, rtol=1e-10)
    assert "4 of 4" in result.stderr


def test_json_has_the_names() -> None:
    facts = json.loads(run("lstsq", "reg.csv:x1,x2", "reg.csv:y", "--intercept", "--json").stdout)
    assert facts["names"] == ["intercept", "x1", "x2"]
    assert facts["inputs"]["b"]["names"] == ["y"]
    assert len(facts["x"]) == 3


# --- empty fields, decimals -------------------------------------------------------------------------------


def test_lines_with_empty_fields_are_refused_or_left_out_everywhere() -> None:
    pytest.importorskip("pandas")
    rows = [
        line.split(",")
        for line in ["x1,x2,y,w", "1,2,3,1", "2,,4,1", "3,1,NA,2", "4,4,7,", "5,3,8,2", "6,1,6,1"]
    ]
    Path("m.csv").write_text("\n".join(",".join(row) for row in rows))
    files = ["m.csv:x1,x2", "m.csv:y", "--weights", "m.csv:w"]
    refused = run("lstsq", *files, code=cli.BAD_INPUT)
    assert (
        "m.csv: line 3, column 2 (x2) is empty (leave out such lines with --missing drop)" in refused.stderr
    )
    result = run("lstsq", *files, "--missing", "drop", "-o", "x.npy")
    assert "neula: left out 3 of 6 lines: they have empty fields or NaN" in result.stderr
    kept = np.array([row for row in rows[1:] if "" not in row and "NA" not in row], dtype=float)
    expected = neula.lstsq(kept[:, :2], kept[:, 2], weights=kept[:, 3]).x
    np.testing.assert_allclose(np.load("x.npy"), expected, rtol=1e-12)


def test_nan_in_arrays_is_left_out_too_and_something_must_be_left() -> None:
    holes = np.where(np.arange(120).reshape(40, 3) % 50 == 0, np.nan, A)
    write_matrix("A.npy", holes)
    whole = ~np.isnan(holes).any(1)
    run("lstsq", "A.npy", "problem.npz:b", "--missing", "drop", "-o", "x.npy")
    np.testing.assert_allclose(
        np.load("x.npy"), np.linalg.lstsq(A[whole], B[whole], rcond=None)[0], rtol=1e-12
    )
    write_matrix("none.npy", np.full((40, 3), np.nan))
    result = run("lstsq", "none.npy", "problem.npz:b", "--missing", "drop", code=cli.BAD_INPUT)
    assert "every line of A, b has an empty field or NaN: nothing is left" in result.stderr
    short = run("lstsq", "A.npy", "problem.npz:S", "--missing", "drop", code=cli.BAD_INPUT)
    assert "do not fit" in short.stderr


def test_decimal_commas() -> None:
    Path("de.csv").write_text("Länge;Größe;y\n1,5;2;3\n2,5;-1;0,5\n0;1e1;2\n", encoding="utf-8")
    result = run("lstsq", "de.csv:Länge,Größe", "de.csv:y", "--decimal", ",", "-o", "x.npy")
    expected = np.linalg.lstsq([[1.5, 2], [2.5, -1], [0, 10]], [3, 0.5, 2], rcond=None)[0]
    np.testing.assert_allclose(np.load("x.npy"), expected, rtol=1e-12)
    assert "certified" in result.stderr
    refused = run("lstsq", "de.csv:Länge,Größe", "de.csv:y", code=cli.BAD_INPUT)
    assert (
        "line 2, column 1 (Länge): '1,5' is not a number (for decimal commas give --decimal ,)"
        in refused.stderr
    )


# --- headers of numbers, integers ---------------------------------------------------------------------------


def frames(index: bool, columns: Any) -> tuple[np.ndarray, list[str]]:
    """A regular system with a known solution as pandas writes it, and the names of its files."""
    pd = pytest.importorskip("pandas")
    square = np.array([[2, 1, 0.5], [1, 3, 1], [0.5, 1, 4]])
    pd.DataFrame(square, columns=list(columns)).to_csv("S.csv", index=index)
    pd.Series(square @ [1, -2, 3]).to_csv("c.csv", index=index)
    return square, ["S.csv", "c.csv"]


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("columns", [range(3), range(2019, 2022)])
def test_every_command_reads_the_tables_of_pandas(index: bool, columns: Any) -> None:
    square, files = frames(index, columns)
    for command, extra in (
        ("lstsq", []),
        ("lstsq", ["--missing", "drop"]),
        ("lstsq", ["--bounds=-9,9"]),
        ("solve", []),
        ("solve", ["--assume-a", "pos"]),
    ):
        result = run(command, *files, *extra, "-o", "x.npy")
        np.testing.assert_allclose(np.load("x.npy"), [1, -2, 3], rtol=1e-12)
        assert "line 1 is a header: " + ", ".join(map(str, columns)) in result.stderr
        piped = run(command, "-", "c.csv", *extra, "-o", "x.npy", given=Path("S.csv").read_text())
        assert "standard input: line 1 is a header" in piped.stderr
        np.testing.assert_allclose(np.load("x.npy"), [1, -2, 3], rtol=1e-12)
    run("qr", "S.csv", "--mode", "r", "-o", "R.npy")
    np.testing.assert_allclose(np.load("R.npy").T @ np.load("R.npy"), square.T @ square, rtol=1e-12)
    run("matmul", "S.csv", "S.csv", "-o", "P.npy")
    np.testing.assert_allclose(np.load("P.npy"), square @ square, rtol=1e-12)
    run("cholesky", "S.csv", "-o", "L.npy")
    np.testing.assert_allclose(np.load("L.npy"), np.linalg.cholesky(square), rtol=1e-12)


def test_the_header_is_decided_on_the_command_line() -> None:
    Path("S.csv").write_text("0,1\n1,0\n2,3\n")
    Path("b.csv").write_text("1\n2\n3\n")
    refused = run("lstsq", "S.csv", "b.csv", code=cli.BAD_INPUT)
    assert (
        "line 1 (0, 1) may name the columns, or be numbers: say which by --header or --no-header"
        in refused.stderr
    )
    run("lstsq", "S.csv", "b.csv", "--no-header", "-o", "x.npy")
    expected = np.linalg.lstsq([[0, 1], [1, 0], [2, 3]], [1, 2, 3], rcond=None)[0]
    np.testing.assert_allclose(np.load("x.npy"), expected, rtol=1e-12)
    run("solve", "S.csv", "b.csv", "--header", "-o", "x.npy")
    np.testing.assert_allclose(np.load("x.npy"), np.linalg.solve([[1, 0], [2, 3]], [2, 3]), rtol=1e-12)


def test_empty_fields_where_no_line_can_be_left_out() -> None:
    pytest.importorskip("pandas")
    Path("S.csv").write_text("x,y\n1,\n2,3\n")
    refused = run("solve", "S.csv", "S.csv:x", code=cli.BAD_INPUT)
    assert "line 2, column 2 (y) is empty (fill it in: every line counts)" in refused.stderr


def test_names_that_are_quoted_in_formulas() -> None:
    Path("a.csv").write_text("1st floor,2019,y\n1,2,3.5\n2,3,5.5\n4,1,8\n3,3,7.5\n")
    for formula in (
        "y = a*`1st floor`+b*`2019`",
        'y = a*Q("1st floor")+b*Q("2019")',
        "a*`1st floor`+b*`2019`",
    ):
        facts = json.loads(run("fit", "a.csv", formula, "--json").stdout)
        np.testing.assert_allclose(facts["values"], [1.8, 0.7], atol=0.2)
    quoted = json.loads(run("fit", "a.csv", "`2019` = a*y", "--json").stdout)
    assert quoted["names"] == ["a"]


@pytest.mark.parametrize("name", ["t.csv", "t.npy"])
def test_integers_that_no_float64_holds(name: str) -> None:
    write = np.array([[1_700_000_000_000_000_001, 1], [3, 4]])
    np.save("t.npy", write)
    np.savetxt("t.csv", write, fmt="%d", delimiter=",")
    for command in (["lstsq", name, "b.csv"], ["qr", name]):
        Path("b.csv").write_text("1\n2\n")
        refused = run(*command, code=cli.BAD_INPUT)
        assert "1700000000000000001, an integer that no float64 holds: subtract an offset" in refused.stderr


# --- commands ---------------------------------------------------------------------------------------------


def test_cholesky() -> None:
    result = run("cholesky", "problem.npz:S")
    np.testing.assert_allclose(numbers(result), np.linalg.cholesky(SPD), rtol=1e-12, atol=1e-14)
    assert "neula cholesky: certified" in result.stderr
    upper = run("cholesky", "problem.npz:S", "--upper", "--accuracy", "1e-3")
    np.testing.assert_allclose(numbers(upper), np.linalg.cholesky(SPD).T, rtol=1e-3, atol=1e-2)
    write_matrix("not.npy", -SPD)
    assert "not positive definite" in run("cholesky", "not.npy", code=cli.BAD_INPUT).stderr


def test_lu() -> None:
    result = run("lu", "problem.npz:S", "--compute", "fp32", "--storage", "fp32", "-o", "lu.npz")
    found = np.load("lu.npz")
    product = found["L"] @ found["U"]
    np.testing.assert_allclose(product, SPD[found["permutation"]], atol=1e-5 * np.abs(SPD).max())
    assert "products in fp32, factors in fp32" in result.stderr
    kept = run("lu", "problem.npz:S")
    assert kept.stdout == ""
    assert "L, U and permutation were not kept" in kept.stderr
    assert "'neula lstsq'" in run("lu", "problem.npz:A", code=cli.BAD_INPUT).stderr


@pytest.mark.parametrize("mode", ["reduced", "r"])
def test_tsqr(mode: str) -> None:
    result = run("tsqr", "problem.npz:A", "--mode", mode, "-o", "f.npz")
    found = np.load("f.npz")
    np.testing.assert_allclose(found["R"].T @ found["R"], SPD, rtol=1e-12, atol=1e-12)
    assert sorted(found) == (["R"] if mode == "r" else ["Q", "R"])
    assert "neula tsqr: certified" in result.stderr


def test_matmul() -> None:
    result = run("matmul", "problem.npz:A", "problem.npz:S", "--json")
    facts = json.loads(result.stdout)
    np.testing.assert_allclose(facts["C"], A @ SPD, rtol=1e-12, atol=1e-12)
    assert facts["shape"] == [40, 3]
    emulated = run("matmul", "problem.npz:A", "problem.npz:S", "--compute", "fp16", "--engine", "emulated")
    error = np.abs(numbers(emulated) - A @ SPD)
    assert 0 < error.max() <= 2.0**-9 * (np.abs(A) @ np.abs(SPD)).max()
    assert "fp17" in run("matmul", "problem.npz:A", "problem.npz:S", "--compute", "fp17", code=2).stderr


def test_nothing_and_a_number() -> None:
    np.save("none.npy", np.zeros((0, 0)))
    np.save("v.npy", np.arange(3.0))
    for command in (["lu", "none.npy", "--json"], ["solve", "none.npy", "none.npy"], ["orth", "none.npy"]):
        run(*command)
    assert run("matmul", "v.npy", "v.npy").stdout == "5.0\n"
    Path("named.csv").write_text("a,b\n1,2\n3,4\n5,6\n")
    assert run("matmul", "v.npy", "named.csv").stdout == "13.0\n16.0\n"


def test_one_standard_output() -> None:
    result = run("qr", "problem.npz:A", "--q", "-", "--r", "-", code=cli.BAD_INPUT)
    assert "would replace another output" in result.stderr
    assert "Q and R were not kept" in run("qr", "problem.npz:A", "--json").stderr


@pytest.mark.parametrize(
    "command",
    [
        ["svd", "problem.npz:A", "--rank", "2"],
        ["svd", "problem.npz:A"],
        ["eigh", "problem.npz:S"],
        ["qr", "problem.npz:A"],
        ["orth", "problem.npz:A"],
        ["lstsq", "problem.npz:A", "problem.npz:b"],
        ["solve", "problem.npz:S", "problem.npz:S"],
        ["cholesky", "problem.npz:S"],
    ],
)
@pytest.mark.parametrize("accuracy", ["1e-3", "float32"])
def test_accuracies_are_names_or_numbers(command: list[str], accuracy: str) -> None:
    assert "certified" in run(*command, "--accuracy", accuracy).stderr


@pytest.mark.parametrize(
    ("accuracy", "says"),
    [("fp8", "neither a backward error"), ("0", "got 0.0"), ("1e-30", "got 1e-30")],
)
def test_accuracies_that_cannot_be(accuracy: str, says: str) -> None:
    result = run("svd", "problem.npz:A", "--rank", "1", "--accuracy", accuracy, code=cli.BAD_INPUT)
    assert says in " ".join(result.stderr.replace("│", " ").split())


def test_the_accuracies_of_the_library() -> None:
    assert (*sorted(FORMATS, key=list(FORMATS).index), *get_args(DtypeName)) == options.ACCURACIES


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", [[], ["lstsq"], ["experiment", "qr-paper"]])
def test_help(command: list[str], flag: str) -> None:
    assert "Usage: neula" in CliRunner().invoke(app, [*command, flag], prog_name="neula").stdout


# --- the program ------------------------------------------------------------------------------------------


def test_version() -> None:
    assert run("-V").stdout == run("--version").stdout == f"neula {neula.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("neula ls", {"lstsq"}),
        ("neula lstsq --accuracy fp3", {"fp32"}),
        ("neula solve --assume-a ", {"gen", "pos"}),
        ("neula experiment lu-paper tab", {"table1", "table2", "table3", "table-qr"}),
        ("neula qr A.n", set()),  # and the shell offers files
    ],
)
def test_completion(typed: str, offered: set[str]) -> None:
    words = {
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split(" ")) - 1),
        "_NEULA_COMPLETE": "complete_bash",
    }
    command = [sys.executable, "-m", "neula"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**environment(), **words}, check=False
    )
    assert set(done.stdout.split()) == offered
    assert done.stderr == ""


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "moment", ["neula.lstsq", "neula.cli.run.CommandRun.check", "typer.core.TyperCommand.parse_args"]
)
def test_an_interruption_is_one_line(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moment, interrupt)
    result = run("lstsq", "problem.npz:A", "problem.npz:b", "-o", "x.npy", code=cli.INTERRUPTED)
    assert result.stderr == "neula: interrupted\n"
    assert result.stdout == ""
    assert not Path("x.npy").exists()


def test_an_interruption_while_the_program_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from neula.cli.main import main

    monkeypatch.setattr(typer.Typer, "__call__", interrupt)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == cli.INTERRUPTED
    assert capsys.readouterr().err == "neula: interrupted\n"


# --- standard errors --------------------------------------------------------------------------------------


def test_standard_errors_of_named_columns() -> None:
    arguments = "lstsq", "reg.csv:x1,x2", "reg.csv:y", "--intercept"
    expected = neula.lstsq(A[:, :2], B, intercept=True)
    facts = json.loads(run(*arguments, "--json").stdout)
    assert facts["names"] == ["intercept", "x1", "x2"]
    np.testing.assert_allclose(facts["x"], expected.x, rtol=1e-13)
    np.testing.assert_allclose(facts["standard_errors"], expected.standard_errors(), rtol=1e-12)
    ends = np.transpose([facts["lower"], facts["upper"]])
    np.testing.assert_allclose(ends, expected.confidence_intervals(), rtol=1e-12)
    np.testing.assert_allclose(facts["t"], expected.t_values(), rtol=1e-12)
    np.testing.assert_allclose(facts["p"], expected.p_values(), rtol=1e-10)
    assert facts["degrees_of_freedom"] == 37
    shown = run(*arguments, "--level", "0.9").stderr
    low, high = expected.confidence_intervals(0.9)[2]
    assert f"{expected.x[2]:.8g} +- {expected.standard_errors()[2]:.2g}" in shown
    assert f"(90%: {low:.6g} to {high:.6g})" in shown
    assert "R-squared" in shown
    assert "+-" not in run(*arguments, "--no-errors").stderr


def test_standard_errors_of_columns_without_names() -> None:
    arguments = "lstsq", "problem.npz:A", "problem.npz:b"
    assert "standard_errors" not in json.loads(run(*arguments, "--json").stdout)
    facts = json.loads(run(*arguments, "--errors", "--json").stdout)
    np.testing.assert_allclose(facts["standard_errors"], neula.lstsq(A, B).standard_errors(), rtol=1e-12)
    assert "x3" in run(*arguments, "--errors").stderr


def test_why_there_are_no_standard_errors() -> None:
    twice = run("lstsq", "reg.csv:x1,x1", "reg.csv:y", "--json")
    assert "lacks full rank" in json.loads(twice.stdout)["no_standard_errors"]
    bounded = run("lstsq", "reg.csv:x1,x2", "reg.csv:y", "--nonnegative", "--errors")
    assert "standard errors none: solutions with bounds have none" in " ".join(bounded.stderr.split())


def test_standard_deviations() -> None:
    sigma = np.linspace(0.5, 2.0, 40)
    np.savetxt("s.csv", sigma)
    arguments = "lstsq", "reg.csv:x1,x2", "reg.csv:y", "--sigma", "s.csv"
    expected = neula.lstsq(A[:, :2], B, sigma=sigma)
    for option, absolute in (((), False), (("--absolute-sigma",), True)):
        facts = json.loads(run(*arguments, *option, "--json").stdout)
        np.testing.assert_allclose(facts["x"], expected.x, rtol=1e-13)
        errors = expected.standard_errors(absolute=absolute)
        np.testing.assert_allclose(facts["standard_errors"], errors, rtol=1e-12)
    assert "needs standard deviations" in run(*arguments[:3], "--absolute-sigma", code=2).stderr
    assert "does not go together with bounds" in run(*arguments, "--nonnegative", code=2).stderr
