"""Examples that were wrong once, most found by the campaign, as a failure prints them for ``--recipe``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import neula

from .areas.fits import Fit
from .fuzz import recipe_of, run_one
from .oracle import LeastSquares

LINES = (Path(__file__).parent / "found.txt").read_text(encoding="utf-8").splitlines()
FOUND = dict(zip((line.removeprefix("# ") for line in LINES[::2]), LINES[1::2], strict=True))
"""From what was wrong to the recipe."""


@pytest.mark.parametrize("why", FOUND)
def test_sound(why: str) -> None:
    verdict, shown = run_one(recipe_of(FOUND[why]), "cpu")
    assert not verdict.findings, f"{verdict}\n{shown}"


def test_a_narrow_peak_keeps_its_digits() -> None:
    """Usual steps of fourth-order differences are sixteen widths long."""
    result = Fit.of(recipe_of(FOUND["A narrow peak: gauss by None, numpy, far 18."])).run("cpu")
    assert result.converged
    assert result.forward_error < 1e-8


@pytest.mark.filterwarnings("ignore::neula.IllConditionedWarning")
def test_almost_nothing_of_b_lies_in_the_range_of_rank_one() -> None:
    """Coefficients by the SVD are rounding errors of b, beside which the residual does not look large."""
    small, large = 2.0**47 * 1.1, 2.0**127 * 0.91
    a = np.array([[small, 0, small], [-small, large, small], [-small, -large, small]], np.float32)
    b = np.array([[0.5], [0.0], [-1.0]], np.float32) * np.float32(2.0**126)
    weights = np.array([0.08148235249254794, 1448278652.5880702, 1.866325391248749e-15])
    result = neula.lstsq(a, b, weights=weights, engine="cpu")
    (error,) = LeastSquares(a, b, weights=weights, rcond=1e-8).errors(result.x, 1)
    assert result.rank == 1
    assert result.forward_error >= error or not result.accepted
