"""The command line as a part of others: pipes, columns by name, empty fields, and how it ends."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import typer

import neula
from command_line import environment, facts, numbers, run
from neula import cli
from neula.certificates.bounds import DtypeName
from neula.cli import options
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
def files(in_folder: Path) -> None:
    Path("reg.csv").write_text(REGRESSION)
    write_files({Path("problem.npz"): {"A": A, "b": B, "S": SPD}})


def solution(a: Any, b: Any) -> np.ndarray:
    return np.linalg.lstsq(a, b, rcond=None)[0]


def says(text: str, *arguments: str, given: str | None = None) -> bool:
    """Whether a call is refused with these words."""
    return text in run(*arguments, given=given, code=cli.BAD_INPUT).stderr


# --- pipes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_parts_of_the_standard_input(name: str) -> None:
    result = run("lstsq", f"{name}:x1,x2", f"{name}:y", "-o", "x.npy", given=REGRESSION)
    np.testing.assert_allclose(np.load("x.npy"), solution(A[:, :2], B), rtol=1e-12)
    assert "40 x 2 float64  -:x1,x2" in result.stderr


def test_the_standard_input_twice_and_empty() -> None:
    twice = "the standard input is given twice: say which part is which, as in -:x1,x2"
    assert says(twice, "lstsq", "-", "-", given=REGRESSION)
    assert says("standard input is empty", "qr", "-", given="")
    assert says("standard input: line 2", "qr", "-", given="1,2\n3,a\n")


@pytest.mark.parametrize("output", ["-", "/dev/stdout"])
def test_a_pipeline(output: str) -> None:
    factors = run("qr", "problem.npz:A", "-o", output)
    product = run("matmul", "-:Q", "-:R", given=factors.stdout_bytes)
    np.testing.assert_allclose(numbers(product), A, atol=1e-13)
    r = run("qr", "problem.npz:A", "--mode", "r")
    run("matmul", "-", "-:1,2,3", given=r.stdout)


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
    x = solution(A[:, [0, 2]], B)
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
    first, *rows = run("solve", "S.csv", "S.csv:c,a").stdout.splitlines()
    assert (first, [row[0] for row in rows]) == (",c,a", ["a", "b", "c"])
    assert run("solve", "S.csv", "A.npy").stdout.splitlines()[0] == ",1,2,3"
    assert run("qr", "S.csv", "--mode", "r").stdout.splitlines()[0] == "a,b,c"


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
def test_intercept(dtype: type) -> None:
    matrix = np.round(3 * A).astype(dtype)
    write_matrix("A.npy", matrix)
    result = run("lstsq", "A.npy", "problem.npz:b", "--intercept")
    rows = [line.split(",") for line in result.stdout.splitlines()]
    assert [row[0] for row in rows] == ["", "intercept", "1", "2", "3"]
    x = solution(np.hstack([np.ones((40, 1)), matrix]), B)
    np.testing.assert_allclose([float(row[1]) for row in rows[1:]], x, rtol=1e-10)
    assert "4 of 4" in result.stderr


# --- empty fields, decimals -------------------------------------------------------------------------------


def test_lines_with_empty_fields_are_refused_or_left_out_everywhere() -> None:
    pytest.importorskip("pandas")
    lines = ["x1,x2,y,w", "1,2,3,1", "2,,4,1", "3,1,NA,2", "4,4,7,", "5,3,8,2", "6,1,6,1"]
    Path("m.csv").write_text("\n".join(lines))
    files = ["m.csv:x1,x2", "m.csv:y", "--weights", "m.csv:w"]
    assert says("line 3, column 2 (x2) is empty (leave out such lines with --missing drop)", "lstsq", *files)
    result = run("lstsq", *files, "--missing", "drop", "-o", "x.npy")
    assert "neula: left out 3 of 6 lines: they have empty fields or NaN" in result.stderr
    kept = np.array([[1.0, 2, 3, 1], [5, 3, 8, 2], [6, 1, 6, 1]])
    expected = neula.lstsq(kept[:, :2], kept[:, 2], weights=kept[:, 3]).x
    np.testing.assert_allclose(np.load("x.npy"), expected, rtol=1e-12)


def test_nan_in_arrays_is_left_out_too_and_something_must_be_left() -> None:
    holes = np.where(np.arange(120).reshape(40, 3) % 50 == 0, np.nan, A)
    write_matrix("A.npy", holes)
    whole = ~np.isnan(holes).any(1)
    drop = ["--missing", "drop"]
    run("lstsq", "A.npy", "problem.npz:b", *drop, "-o", "x.npy")
    np.testing.assert_allclose(np.load("x.npy"), solution(A[whole], B[whole]), rtol=1e-12)
    write_matrix("none.npy", np.full((40, 3), np.nan))
    nothing = "every line of A, b has an empty field or NaN: nothing is left"
    assert says(nothing, "lstsq", "none.npy", "problem.npz:b", *drop)
    assert says("do not fit", "lstsq", "A.npy", "problem.npz:S", *drop)


def test_decimal_commas() -> None:
    Path("de.csv").write_text("Länge;Größe;y\n1,5;2;3\n2,5;-1;0,5\n0;1e1;2\n", encoding="utf-8")
    files = ["de.csv:Länge,Größe", "de.csv:y"]
    run("lstsq", *files, "--decimal", ",", "-o", "x.npy")
    expected = solution([[1.5, 2], [2.5, -1], [0, 10]], [3, 0.5, 2])
    np.testing.assert_allclose(np.load("x.npy"), expected, rtol=1e-12)
    number = "line 2, column 1 (Länge): '1,5' is not a number (for decimal commas give --decimal ,)"
    assert says(number, "lstsq", *files)


# --- headers of numbers, integers -------------------------------------------------------------------------


@pytest.mark.parametrize(("index", "columns"), [(False, range(3)), (True, range(2019, 2022))])
def test_every_command_reads_the_tables_of_pandas(index: bool, columns: Any) -> None:
    pd = pytest.importorskip("pandas")
    square = np.array([[2, 1, 0.5], [1, 3, 1], [0.5, 1, 4]])
    pd.DataFrame(square, columns=list(columns)).to_csv("S.csv", index=index)
    pd.Series(square @ [1, -2, 3]).to_csv("c.csv", index=index)
    header = "line 1 is a header: " + ", ".join(map(str, columns))
    for command, *extra in (
        ["lstsq"],
        ["lstsq", "--missing", "drop"],
        ["lstsq", "--bounds=-9,9"],
        ["solve"],
        ["solve", "--assume-a", "pos"],
    ):
        for name, source in (("S.csv", ""), ("-", "standard input: ")):
            result = run(command, name, "c.csv", *extra, "-o", "x.npy", given=Path("S.csv").read_text())
            np.testing.assert_allclose(np.load("x.npy"), [1, -2, 3], rtol=1e-12)
            assert source + header in result.stderr
    for command, expected in (
        (["qr", "S.csv", "--mode", "r"], np.linalg.qr(square, mode="r")),
        (["matmul", "S.csv", "S.csv"], square @ square),
        (["cholesky", "S.csv"], np.linalg.cholesky(square)),
    ):
        run(*command, "-o", "F.npy")
        np.testing.assert_allclose(np.abs(np.load("F.npy")), np.abs(expected), rtol=1e-12, atol=1e-14)


def test_the_header_is_decided_on_the_command_line() -> None:
    Path("S.csv").write_text("0,1\n1,0\n2,3\n")
    Path("b.csv").write_text("1\n2\n3\n")
    both = "line 1 (0, 1) may name the columns, or be numbers: say which by --header or --no-header"
    assert says(both, "lstsq", "S.csv", "b.csv")
    run("lstsq", "S.csv", "b.csv", "--no-header", "-o", "x.npy")
    np.testing.assert_allclose(np.load("x.npy"), solution([[0, 1], [1, 0], [2, 3]], [1, 2, 3]), rtol=1e-12)
    run("solve", "S.csv", "b.csv", "--header", "-o", "x.npy")
    np.testing.assert_allclose(np.load("x.npy"), np.linalg.solve([[1, 0], [2, 3]], [2, 3]), rtol=1e-12)


def test_empty_fields_where_no_line_can_be_left_out() -> None:
    pytest.importorskip("pandas")
    Path("S.csv").write_text("x,y\n1,\n2,3\n")
    assert says("line 2, column 2 (y) is empty (fill it in: every line counts)", "solve", "S.csv", "S.csv:x")


def test_names_that_are_quoted_in_formulas() -> None:
    Path("a.csv").write_text("1st floor,2019,y\n1,2,3.5\n2,3,5.5\n4,1,8\n3,3,7.5\n")
    for formula in (
        "y = a*`1st floor`+b*`2019`",
        'y = a*Q("1st floor")+b*Q("2019")',
        "a*`1st floor`+b*`2019`",
    ):
        np.testing.assert_allclose(facts("fit", "a.csv", formula)["values"], [1.8, 0.7], atol=0.2)
    assert facts("fit", "a.csv", "`2019` = a*y")["names"] == ["a"]


@pytest.mark.parametrize("name", ["t.csv", "t.npy"])
def test_integers_that_no_float64_holds(name: str) -> None:
    integers = np.array([[1_700_000_000_000_000_001, 1], [3, 4]])
    np.save("t.npy", integers)
    np.savetxt("t.csv", integers, fmt="%d", delimiter=",")
    Path("b.csv").write_text("1\n2\n")
    for command in (["lstsq", name, "b.csv"], ["qr", name]):
        assert says("1700000000000000001, an integer that no float64 holds: subtract an offset", *command)


# --- commands ---------------------------------------------------------------------------------------------


def test_nothing_and_a_number() -> None:
    np.save("none.npy", np.zeros((0, 0)))
    np.save("v.npy", np.arange(3.0))
    for command in (["lu", "none.npy", "--json"], ["solve", "none.npy", "none.npy"], ["orth", "none.npy"]):
        run(*command)
    assert run("matmul", "v.npy", "v.npy").stdout == "5.0\n"
    Path("named.csv").write_text("a,b\n1,2\n3,4\n5,6\n")
    assert run("matmul", "v.npy", "named.csv").stdout == "13.0\n16.0\n"


def test_one_standard_output() -> None:
    assert says("would replace another output", "qr", "problem.npz:A", "--q", "-", "--r", "-")
    assert "Q and R were not kept" in run("qr", "problem.npz:A", "--json").stderr


@pytest.mark.parametrize(
    "command",
    [
        "svd problem.npz:A --rank 2",
        "svd problem.npz:A",
        "eigh problem.npz:S",
        "qr problem.npz:A",
        "orth problem.npz:A",
        "lstsq problem.npz:A problem.npz:b",
        "solve problem.npz:S problem.npz:S",
        "cholesky problem.npz:S",
    ],
)
def test_accuracies_are_names_or_numbers(command: str) -> None:
    for accuracy in ("1e-3", "float32"):
        assert "certified" in run(*command.split(), "--accuracy", accuracy).stderr


def test_the_accuracies_of_the_library() -> None:
    assert (*sorted(FORMATS, key=list(FORMATS).index), *get_args(DtypeName)) == options.ACCURACIES


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
    place = str(len(typed.split(" ")) - 1)
    variables = {"COMP_WORDS": typed, "COMP_CWORD": place, "_NEULA_COMPLETE": "complete_bash"}
    command = [sys.executable, "-m", "neula"]
    done = subprocess.run(command, capture_output=True, text=True, env={**environment(), **variables})
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
    found = facts(*arguments)
    assert (found["names"], found["inputs"]["b"]["names"]) == (["intercept", "x1", "x2"], ["y"])
    ends = expected.confidence_intervals().T
    for name, values in {
        "x": expected.x,
        "standard_errors": expected.standard_errors(),
        "lower": ends[0],
        "upper": ends[1],
        "t": expected.t_values(),
        "p": expected.p_values(),
    }.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-10)
    assert found["degrees_of_freedom"] == 37
    shown = run(*arguments, "--level", "0.9").stderr
    low, high = expected.confidence_intervals(0.9)[2]
    assert f"{expected.x[2]:.8g} +- {expected.standard_errors()[2]:.2g}" in shown
    assert f"(90%: {low:.6g} to {high:.6g})" in shown
    assert "R-squared" in shown
    assert "+-" not in run(*arguments, "--no-errors").stderr


def test_standard_errors_of_columns_without_names() -> None:
    arguments = "lstsq", "problem.npz:A", "problem.npz:b"
    assert "standard_errors" not in facts(*arguments)
    found = facts(*arguments, "--errors")["standard_errors"]
    np.testing.assert_allclose(found, neula.lstsq(A, B).standard_errors(), rtol=1e-12)
    assert "x3" in run(*arguments, "--errors").stderr


def test_why_there_are_no_standard_errors() -> None:
    assert "lacks full rank" in facts("lstsq", "reg.csv:x1,x1", "reg.csv:y")["no_standard_errors"]
    bounded = run("lstsq", "reg.csv:x1,x2", "reg.csv:y", "--nonnegative", "--errors")
    assert "standard errors none: solutions with bounds have none" in " ".join(bounded.stderr.split())


def test_standard_deviations() -> None:
    sigma = np.linspace(0.5, 2.0, 40)
    np.savetxt("s.csv", sigma)
    files = "lstsq", "reg.csv:x1,x2", "reg.csv:y"
    expected = neula.lstsq(A[:, :2], B, sigma=sigma)
    for option, absolute in (((), False), (("--absolute-sigma",), True)):
        found = facts(*files, "--sigma", "s.csv", *option)
        np.testing.assert_allclose(found["x"], expected.x, rtol=1e-13)
        errors = expected.standard_errors(absolute=absolute)
        np.testing.assert_allclose(found["standard_errors"], errors, rtol=1e-12)
    assert says("needs standard deviations", *files, "--absolute-sigma")
    assert says("does not go together with bounds", *files, "--sigma", "s.csv", "--nonnegative")
