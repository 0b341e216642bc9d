"""The command line in this process: exit codes, both outputs, and files of a working directory."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from neula import cli
from neula.cli.app import app


def run(*arguments: str, given: str | bytes | None = None, code: int = cli.CERTIFIED) -> Result:
    result = CliRunner().invoke(app, arguments, input=given)
    assert result.exit_code == code, result.output
    return result


def facts(*arguments: str, code: int = cli.CERTIFIED) -> dict[str, Any]:
    """The JSON object that must be all of stdout, without NaN."""
    return parsed(run(*arguments, "--json", code=code))


def parsed(result: Result) -> dict[str, Any]:
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout, parse_constant=pytest.fail)


def assert_refused(arguments: str, says: str) -> None:
    """With one line on stderr, nothing on stdout, and no file."""
    before = set(os.listdir())
    result = run(*arguments.split(), code=cli.BAD_INPUT)
    assert result.stdout == ""
    assert result.stderr.startswith("neula: error: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr
    assert set(os.listdir()) == before


def numbers(result: Result) -> np.ndarray:
    """The matrix of text on stdout."""
    return np.loadtxt(io.StringIO(result.stdout), delimiter=",", ndmin=2)


def column(result: Result) -> np.ndarray:
    return numbers(result)[:, 0]


def words(text: str) -> str:
    """A message without the frame and the line breaks that a terminal gets."""
    return " ".join(text.replace("│", " ").split())


def environment() -> dict[str, str]:
    """That of the program in another process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "80"}
