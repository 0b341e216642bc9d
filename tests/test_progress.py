"""Progress: stages with a name, and digits as a part of the way."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import neula
from neula.engines import CpuEngine
from neula.io.matrices import hpl_ai_matrix
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


NUMBERS = np.random.default_rng(0).standard_normal((900, 300))
DEFINITE = NUMBERS.T @ NUMBERS + 300 * np.eye(300)
DIRECT = replace(CpuEngine("cpu").tuning, direct=300, direct_definite=300)


@pytest.mark.parametrize(
    ("call", "stages"),
    [
        (partial(neula.qr, NUMBERS.astype(np.float32)), None),
        (partial(neula.cholesky, np.eye(5)), None),
        (partial(neula.lu_factor, hpl_ai_matrix(64), engine="emulated", panel=16), {"lu": 4}),
        (
            partial(neula.lstsq, NUMBERS, NUMBERS[:, 0], algorithm="householder"),
            {"factorizing in fp64": None, "refining": None},
        ),
        (partial(neula.solve, DEFINITE, NUMBERS[:300]), {"factorizing in fp32": None, "refining": None}),
        (
            partial(neula.solve, DEFINITE, NUMBERS[:300], assume_a="pos"),
            {"factorizing in fp32": None, "refining": None},
        ),
    ],
)
def test_stages_go_from_their_beginning_to_their_end(
    call: Callable[..., Any], stages: dict[str, int | None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuEngine, "tuning", DIRECT)
    told: dict[str, list[float]] = {}
    call(progress=lambda name, fraction: told.setdefault(name, []).append(fraction))
    assert stages is None or list(told) == list(stages)
    for name, fractions in told.items():
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0
        steps = (stages or {}).get(name)
        assert steps is None or fractions == [(i + 1) / steps for i in range(steps)]


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
