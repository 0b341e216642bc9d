"""Bad input, and processes that disagree or are killed."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch

import neula
from over_processes import tasks
from over_processes.problems import matrix
from over_processes.processes import Failure, Processes


def the_same_error(found: list[object]) -> Failure:
    """The error that all processes have raised."""
    assert all(isinstance(x, Failure) for x in found), found
    assert len({repr(x) for x in found}) == 1, found
    return found[0]  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("columns", r"processes disagree about columns: \(3,\) on process 0, \(2,\) on process 2"),
        ("dtype", "processes disagree about dtype: torch.float64 on process 0, torch.float32 on process 2"),
        ("kind", r"sparse .*\(process 2 of 3\)"),
        ("damp", "processes disagree about damp: '1.0' on process 0, '2.0' on process 2"),
        ("weights", "processes disagree about .*weights: .* on process 0, None on process 2"),
        (
            "rows of b",
            r"b must be distributed like A: on the processes A has \[6, 6, 6\] rows, and b has \[6, 6, 4\]",
        ),
        ("b", "b is not distributed over processes, and A is"),
        ("A", "A is not distributed over processes, and another operand is"),
    ],
)
def test_processes_that_disagree(processes: Processes, what: str, message: str) -> None:
    found = the_same_error(processes.run(3, tasks.disagreeing, what))
    assert found.error == ("TypeError" if what in ("kind", "A", "b") else "ValueError")
    assert re.search(message, found.message), found


@pytest.mark.parametrize("function", ["qr", "tsqr", "orth", "lstsq"])
@pytest.mark.parametrize(("m", "n"), [(40, 4), (1500, 90)])
def test_nan_on_one_process(processes: Processes, function: str, m: int, n: int) -> None:
    for operand in ("A", "b", "weights") if function == "lstsq" else ("A",):
        found = the_same_error(processes.run(2, tasks.with_nan, function, operand, m, n))
        place = f"[{m - 1}, 1]" if operand == "A" else f"[{m - 1}]"
        row = round(0.1 * m) - 1
        assert found.message == (
            f"{operand}{place} is nan (row {row} of process 1): {operand} must be finite"
        )


def test_wide_matrices(processes: Processes) -> None:
    a, b = torch.ones(5, 9), torch.ones(5)
    found = the_same_error(processes.run(3, tasks.solution, a, b, None, {}))
    assert "A has 5 rows over 3 processes, fewer than its 9 columns" in found.message
    assert "pass A.full() and b.full(), or damp=" in found.message


@pytest.mark.parametrize(
    ("a", "asked", "message"),
    [
        (matrix(9, 3), {"mode": "complete"}, "mode='complete' needs the whole matrix"),
        (torch.ones(9, 3, requires_grad=True), {}, "requires a gradient"),
        (torch.ones(9, 3, 3), {}, "matrix"),
        (matrix(9, 3), {"engine": "gpu"}, "engine"),
        (torch.ones(5, 9), {}, "pass A.full()"),
    ],
)
def test_what_qr_refuses(processes: Processes, a: torch.Tensor, asked: dict[str, Any], message: str) -> None:
    assert message in the_same_error(processes.run(3, tasks.factors, "qr", a, asked)).message


def test_what_takes_whole_matrices(processes: Processes) -> None:
    for name in ("pinv", "cholesky"):
        found = the_same_error(processes.run(2, tasks.whole, name))
        assert found.message.startswith("A is distributed over processes")
        assert found.message.endswith("pass A.full()")


def test_strict_calls(processes: Processes) -> None:
    """The error has the result as it would have been returned."""
    a, b = matrix(60, 10), torch.ones(60).double()
    asked = {"strict": True, "algorithm": "direct"}
    found = the_same_error(processes.run(2, tasks.solution, a, b, None, asked))
    assert found.error == "AccuracyError"
    assert "least squares is not certified" in found.message


@pytest.mark.parametrize(
    ("kind", "message"),
    [("mesh", "a mesh of 2 dimensions"), ("columns", "redistribute"), ("solve", "A.full_tensor()")],
)
def test_other_layouts(processes: Processes, kind: str, message: str) -> None:
    assert message in the_same_error(processes.run(4, tasks.refused_layout, kind)).message


def test_without_a_group() -> None:
    with pytest.raises(RuntimeError, match="torchrun"):
        neula.distributed.rows(torch.ones(3, 2))


def test_a_killed_process() -> None:
    """The others end within the timeout of the group."""
    patience = 5
    few = Processes(2, patience=patience)
    try:
        few.check(2, tasks.basis, matrix(20, 2), {})
        for pipe in few.pipes:
            pipe.send((2, tasks.forever, (matrix(20, 2),)))
        time.sleep(0.2)
        few.processes[1].kill()
        assert few.pipes[0].poll(6 * patience)
        assert few.pipes[0].recv().error == "RuntimeError"
    finally:
        few.stop()


def test_a_process_that_ends_is_an_error_of_the_test() -> None:
    one = Processes(1)
    try:
        with pytest.raises(AssertionError, match="process 0 has died with exit code 3"):
            one.run(1, tasks.ends, 3)
    finally:
        one.stop()
