"""Ranks by differences, fits of nothing, solutions at zero, and gradients that would be lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize

import neula
import neula.compat.scipy.optimize as drop_in


@pytest.mark.parametrize("jac", [None, "2-point", "3-point", "cs", "given"])
@pytest.mark.parametrize("alone", [True, False])
def test_noise_of_differences_is_no_rank(jac, alone):
    """Every point of (1, 1, 1) + t (1, -2, 1) fits."""
    s = np.array([[0.025, 0.05, 0.075], [0.1, 0.125, 0.15], [0.175, 0.2, 0.225]])
    x0, batch = (np.zeros(3), ()) if alone else (np.zeros((2, 3)), (2,))
    given = (
        {}
        if jac is None
        else {"jac": jac if jac != "given" else lambda p: np.broadcast_to(s, (*batch, 3, 3))}
    )
    with pytest.warns(neula.IllConditionedWarning, match="rank 2"):
        result = neula.least_squares(lambda p: p @ s.T - [0.15, 0.375, 0.6], x0, **given)
    assert np.all(np.asarray(result.rank) == 2)
    assert np.isinf(result.forward_error).all()
    assert np.isinf(result.standard_errors()).all()


@pytest.mark.parametrize("jac", ["2-point", "3-point"])
def test_differences_whose_rounding_errors_are_alike(jac):
    """Where x is small, steps are a few rounding errors of the residuals long."""
    s = torch.tensor([[0.025, 0.05, 0.075], [0.1, 0.125, 0.15], [0.175, 0.2, 0.225]])
    y = torch.tensor([0.15, 0.375, 0.6])
    with pytest.warns(neula.IllConditionedWarning):
        result = neula.least_squares(lambda p: s @ p - y, torch.zeros(3), jac)
    assert result.rank < 3


@pytest.mark.parametrize("jac", ["2-point", "3-point", "cs", lambda x: np.zeros((0, 2))])
@pytest.mark.parametrize("options", [{}, {"bounds": ([0, 0], [3, 3]), "loss": "huber"}])
@pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")
def test_no_residuals(jac, options):
    def none(x):
        return np.zeros(0)

    ours = drop_in.least_squares(none, [1.0, 2.0], jac, **options)
    theirs = optimize.least_squares(none, [1.0, 2.0], jac, **options)
    for name in ("x", "cost", "fun", "jac", "grad", "optimality", "active_mask", "status", "success"):
        np.testing.assert_array_equal(ours[name], theirs[name])
    with pytest.warns(neula.IllConditionedWarning, match="rank 0"):
        result = neula.least_squares(none, [1.0, 2.0], jac, **options)
    assert (result.converged, result.rank, result.x.tolist()) == (False, 0, [1.0, 2.0])


def test_imaginary_steps_need_imaginary_parts():
    with pytest.raises(TypeError, match="real numbers for a complex x"):
        neula.least_squares(lambda x: np.abs(x) - 1, [2.0], "cs")


A = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 7.0]], dtype=torch.float64)
Y, X0 = A[:, 0], torch.zeros(2, dtype=torch.float64)


def linear(a, **options):
    return neula.least_squares(lambda x: a @ x - Y, X0, **options).x


def curve(s):
    return neula.curve_fit(lambda t, p, q: s * p * t + q, A[:, 1], Y).popt


def with_loss(s):
    loss = {"loss": lambda z: torch.stack([s * z, s + 0 * z, 0 * z])}
    return neula.least_squares(lambda x: A @ x - Y, X0, **loss).x


def by_blocks(a):
    return neula.least_squares(lambda x, rows: a[rows] @ x - Y[rows], X0, blocks=[slice(0, 2), slice(2, 3)]).x


ONE = torch.ones((), dtype=torch.float64)
DEPENDENT = [
    (linear, A),
    (lambda a: linear(a, jac="3-point"), A),
    (by_blocks, A),
    (curve, ONE),
    (with_loss, ONE),
]


@pytest.mark.parametrize(("fit", "closed"), DEPENDENT)
def test_gradients_through_closures_are_refused(fit, closed):
    wanted = closed.clone().requires_grad_()
    calls = [
        lambda: fit(wanted),
        lambda: torch.func.grad(lambda a: fit(a).sum())(closed),
        lambda: torch.func.jvp(fit, (closed,), (closed,)),
        lambda: torch.func.jacrev(fit)(closed),
    ]
    for call in calls:
        with pytest.raises(
            ValueError,
            match=r"depends on a tensor that requires a gradient|hides an operand",
        ):
            call()
    with torch.no_grad():
        assert torch.equal(fit(wanted), fit(closed))


def test_vmap_is_refused():
    for call, argument in [(linear, A), (lambda x: neula.least_squares(lambda p: A @ p - Y, x).x, X0)]:
        with pytest.raises(ValueError, match=r"torch\.vmap maps over|hides an operand"):
            torch.func.vmap(call)(torch.stack([argument, argument]))


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
def test_solutions_that_are_zero(unit: float) -> None:
    """No digit is sure where residuals differ by zero; it is exact where they vanish, or bounds stop all."""
    ends = torch.tensor([1.0, -1.0], dtype=torch.float64)
    with pytest.warns(neula.AccuracyWarning, match="no digit"):
        result = neula.least_squares(lambda x: unit * (x - ends), torch.zeros(1, dtype=torch.float64))
    assert (float(result.x), result.forward_error) == (0, 1)
    matrix, b = np.array([[1.0, 2.0], [0.0, 1.0], [1.0, 1.0]]), np.array([-1.0, -2.0, -3.0])
    for exact in (
        neula.least_squares(lambda x: unit * x, np.zeros(2)),
        neula.least_squares(lambda x: unit * (matrix @ x - b), [1.0, 1.0], bounds=(0, 5)),
    ):
        assert exact.converged
        assert exact.forward_error == 0
        assert exact.x.tolist() == [0, 0]
