"""Solutions at zero or beside it: a relative error knows no units, and zero has no digits."""

import numpy as np
import pytest
import torch

import neula
from neula.pipeline.result import AccuracyWarning

UNITS = [1e-20, 1.0, 1e20]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("minimum", [5e-2, 5e-8, 5e-10, 5e-14])
@pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")
def test_a_minimum_beside_zero_where_the_fit_begins(unit: float, minimum: float) -> None:
    """Residuals x - 1 and x + 1 - 2 minimum pull in opposite directions: x is what they differ by."""
    ends = torch.tensor([1.0, 2 * minimum - 1.0], dtype=torch.float64)
    exact = float(ends.sum()) / 2
    result = neula.least_squares(lambda x: unit * (x - ends), torch.zeros(1, dtype=torch.float64))
    error = abs(float(result.x) - exact) / exact
    assert error <= result.forward_error
    assert result.forward_error >= 2.0**-53 / exact  # what rounding of the data comes to


@pytest.mark.parametrize("unit", UNITS)
def test_no_digit_of_zero_is_sure(unit: float) -> None:
    ends = torch.tensor([1.0, -1.0], dtype=torch.float64)
    with pytest.warns(AccuracyWarning, match="no digit"):
        result = neula.least_squares(lambda x: unit * (x - ends), torch.zeros(1, dtype=torch.float64))
    assert float(result.x) == 0
    assert result.forward_error == 1


@pytest.mark.parametrize("unit", UNITS)
def test_zero_is_exact_where_residuals_vanish(unit: float) -> None:
    result = neula.least_squares(lambda x: unit * x, np.zeros(3))
    assert result.converged
    assert result.forward_error == 0


@pytest.mark.parametrize("unit", UNITS)
def test_zero_is_exact_where_bounds_stop_everything(unit: float) -> None:
    """The cost falls outside of both bounds alone."""
    matrix, b = np.array([[1.0, 2.0], [0.0, 1.0], [1.0, 1.0]]), np.array([-1.0, -2.0, -3.0])
    result = neula.least_squares(lambda x: unit * (matrix @ x - b), [1.0, 1.0], bounds=(0, 5))
    assert result.x.tolist() == [0, 0]
    assert result.converged
    assert result.forward_error == 0
