"""What a fit that is held open says of its errors, beside exact solutions."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from tests.campaign.matrices import KINDS, right_hand_side
from tests.campaign.oracle import LeastSquares

import neula


def checked(a: np.ndarray, b: np.ndarray, scales: np.ndarray | None = None) -> neula.LstsqResult:
    """The result of a fit of two blocks of rows; its forward errors hold unless there was a warning."""
    fit = neula.LeastSquares(a.shape[1], scales=scales)
    for rows in np.array_split(np.arange(len(a)), 2):
        fit.update(a[rows], b[rows])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", neula.AccuracyWarning)
        result = fit.solve()
    if result.converged and result.rank == a.shape[1]:
        errors = LeastSquares(a, b, rcond=0.0).errors(result.x, result.rank)
        assert (errors <= result.forward_errors).all(), (errors, result.forward_errors)
    return result


@pytest.mark.parametrize(
    "kind", ["normal", "uniform", "graded", "diagonal", "kahan", "hilbert", "vandermonde"]
)
@pytest.mark.parametrize("rhs", ["range", "nearly orthogonal", "orthogonal", "unit"])
def test_of_every_kind(kind: str, rhs: str) -> None:
    rng = np.random.default_rng(8)
    for m, n in ((2, 1), (4, 1), (6, 2), (8, 3)):
        a = KINDS[kind](rng, m, n)
        checked(a, right_hand_side(rng, rhs, a, 2))


@pytest.mark.parametrize("unit", [1e-300, 1e-200, 1e-130, 1e-60, 1e100])
@pytest.mark.parametrize("scaled", ["A", "b", "both", "one column"])
def test_units(scaled: str, unit: float, rng: np.random.Generator) -> None:
    """Where squares underflow nothing is claimed; elsewhere units of all numbers together do not matter."""
    a, b = rng.standard_normal((9, 3)), rng.standard_normal((9, 2))
    if scaled in ("A", "both"):
        a *= unit
    if scaled in ("b", "both"):
        b *= unit
    if scaled == "one column":
        a[:, 1] *= unit
    result = checked(a, b)
    assert result.converged or unit < 1e-120 or scaled == "one column"


@pytest.mark.parametrize("power", [3, 6, 9, 12])
def test_columns_of_different_sizes(power: int, rng: np.random.Generator) -> None:
    """The rounding errors of products of slices are those of the largest column."""
    sizes = 10.0 ** np.array([power, -power, 0.0])
    a, b = rng.standard_normal((12, 3)) * sizes, rng.standard_normal((12, 1))
    assert not checked(a, b).converged
    assert checked(a, b, scales=sizes).converged
