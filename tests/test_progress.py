"""Progress: stages with a name, and digits as a part of the way."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import neula
from neula.io.matrices import hpl_ai_matrix, random_matrix
from neula.pipeline.progress import digits_done, stage


def test_a_stage_begins_at_once_and_tells_its_name_each_time() -> None:
    told: list[tuple[str, float]] = []
    report = stage(lambda name, fraction: told.append((name, fraction)), "factorizing")
    report(0.5)
    assert told == [("factorizing", 0.0), ("factorizing", 0.5)]


def test_nobody_listens() -> None:
    stage(None, "factorizing")(0.5)


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (1.0, 0.0),
        (1e-4, 0.5),
        (1e-8, 1.0),
        (1e-12, 1.0),
        (10.0, 0.0),
        (0.0, 1.0),
        (math.inf, 1.0),
        (math.nan, 1.0),
    ],
)
def test_digits(error: float, part: float) -> None:
    assert digits_done(error, 1e-8) == pytest.approx(part)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda told: neula.qr(random_matrix("normal", 500, 300).float(), progress=told), None),
        (lambda told: neula.cholesky(np.eye(5), progress=told), None),
        (
            lambda told: neula.lu_factor(hpl_ai_matrix(64), engine="emulated", panel=16, progress=told),
            [("lu", 0.25), ("lu", 0.5), ("lu", 0.75), ("lu", 1.0)],
        ),
    ],
)
def test_factorizations_tell(call: Callable[..., Any], expected: list[tuple[str, float]] | None) -> None:
    told: list[tuple[str, float]] = []
    call(lambda *step: told.append(step))
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert expected is None or told == expected


@pytest.mark.parametrize("call", [neula.lstsq, neula.solve])
def test_a_bar(call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal it is drawn while the work is done, and gone in the end; elsewhere nothing is written."""
    terminal, pipe = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    assert call(np.eye(3), np.ones(3), progress=True).converged
    assert pipe.getvalue().strip() == ""  # older versions of rich end the line
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert call(np.eye(3), np.ones(3), progress=True).converged
    assert terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")


def test_no_bar_and_no_function() -> None:
    assert neula.qr(np.eye(3), progress=False).converged
    with pytest.raises(TypeError, match="progress is 'yes': pass True for a bar, or a function"):
        neula.qr(np.eye(3), progress="yes")


def test_a_bar_ends_with_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="must be square"):
        neula.solve(np.ones((2, 3)), np.ones(2), progress=True)
    assert neula.solve(np.eye(3), np.ones(3), progress=True).converged
