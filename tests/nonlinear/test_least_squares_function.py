"""neula.least_squares: what SciPy's arguments mean, bounds, losses, batches, Jacobians, bad input."""

import io
from contextlib import redirect_stdout

import numpy as np
import pytest
import scipy.optimize
import torch

import neula

RNG = np.random.default_rng(7)
T = np.linspace(0, 4, 40)
Y = 2.5 * np.exp(-1.3 * T) + 0.5 + 0.05 * RNG.standard_normal(40)
TIGHT = {"ftol": 1e-15, "xtol": 1e-15, "gtol": 1e-15}
TORCH_T, TORCH_Y = torch.from_numpy(T), torch.from_numpy(Y)
START = np.array([1.0, 1.0, 1.0])


def decay(p):
    return p[0] * np.exp(-p[1] * T) + p[2] - Y


def torch_decay(p):
    return p[0] * torch.exp(-p[1] * TORCH_T) + p[2] - TORCH_Y


def decay_jacobian(p):
    e = np.exp(-p[1] * T)
    return np.column_stack([e, -p[0] * T * e, np.ones_like(T)])


def rosenbrock(x):
    return np.array([10 * (x[1] - x[0] ** 2), 1 - x[0]])


BEST = scipy.optimize.least_squares(decay, START, jac=decay_jacobian, **TIGHT)


def test_fields_of_scipy():
    result = neula.least_squares(decay, START)
    for name in ("x", "cost", "fun", "jac", "grad", "active_mask"):
        ours, theirs = np.asarray(result[name]), np.asarray(BEST[name])
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-7)
    assert result.optimality < 1e-10
    assert result.status in (1, 2, 3, 4)
    assert result.message in ("`gtol` termination condition is satisfied.",
                              "`ftol` termination condition is satisfied.")  # fmt: skip
    assert result.success is True
    assert isinstance(result.nfev, int)
    assert isinstance(result.njev, int)
    assert "certified" in repr(result)
    with pytest.raises(KeyError):
        result["nothing"]


def test_statistics_follow_from_r():
    result = neula.least_squares(decay, START)
    j, f = decay_jacobian(result.x), decay(result.x)
    variance = f @ f / (40 - 3)
    covariance = variance * np.linalg.inv(j.T @ j)
    assert result.degrees_of_freedom == 37
    np.testing.assert_allclose(result.residual_variance, variance, rtol=1e-12)
    np.testing.assert_allclose(result.covariance(), covariance, rtol=1e-9)
    np.testing.assert_allclose(result.covariance(absolute=True), covariance / variance, rtol=1e-9)
    np.testing.assert_allclose(result.standard_errors(), np.sqrt(np.diag(covariance)), rtol=1e-9)
    hat = j @ np.linalg.solve(j.T @ j, j.T)
    np.testing.assert_allclose(result.leverage(), np.diag(hat), rtol=1e-8)
    low, high = result.confidence_intervals(0.9).T
    quantile = scipy.stats.t.ppf(0.95, 37)
    np.testing.assert_allclose(high - low, 2 * quantile * result.standard_errors(), rtol=1e-12)
    with pytest.raises(ValueError, match="between 0 and 1"):
        result.confidence_intervals(95)


def test_the_estimate_of_the_error_holds():
    """A fit that is stopped early knows how far it got: within a factor of ten."""
    result = neula.least_squares(torch_decay, torch.tensor(START), ftol=1e-3, xtol=None, gtol=None)
    scale = np.linalg.norm(decay_jacobian(BEST.x), axis=0)
    error = np.linalg.norm(scale * (result.x.numpy() - BEST.x)) / np.linalg.norm(scale * BEST.x)
    assert error < 10 * result.forward_error
    assert result.forward_error < 1


@pytest.mark.parametrize("jac", [None, decay_jacobian, "2-point", "3-point", "5-point", "cs"])
def test_jacobians_of_numpy(jac):
    result = neula.least_squares(decay, START, jac)
    assert result.converged
    np.testing.assert_allclose(result.x, BEST.x, rtol=1e-6 if jac == "2-point" else 1e-8)
    exact = decay_jacobian(result.x)
    error = {"2-point": 1e-6, "3-point": 1e-9}.get(jac, 1e-10)
    assert np.abs(result.jac - exact).max() < error * np.abs(exact).max()


@pytest.mark.parametrize("jac", [None, "forward", "reverse", "3-point", "cs"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_jacobians_of_torch(jac, dtype):
    def residuals(p):
        t, y = TORCH_T.to(dtype), TORCH_Y.to(dtype)
        return p[0] * torch.exp(-p[1] * t) + p[2] - y

    result = neula.least_squares(residuals, torch.tensor(START, dtype=dtype), jac)
    assert result.x.dtype == dtype
    assert result.converged
    np.testing.assert_allclose(result.x, BEST.x, rtol=1e-8 if dtype == torch.float64 else 1e-3)


def test_more_variables_than_residuals_go_by_rows():
    a = torch.from_numpy(RNG.standard_normal((4, 9)))
    with pytest.warns(neula.AccuracyWarning, match="rank 4"):
        result = neula.least_squares(lambda x: torch.tanh(a @ x) - 0.5, torch.zeros(9, dtype=torch.float64))
    assert result.rank == 4
    assert result.cost < 1e-12


def test_functions_that_cannot_be_vectorized():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 2 * x * g.clone()

    result = neula.least_squares(
        lambda p: Square.apply(p) - torch.tensor([4.0, 9.0, 4.0]).double()[:2],
        torch.tensor([1.0, 1.0]).double(),
    )
    np.testing.assert_allclose(result.x.abs(), [2, 3], rtol=1e-12)


def test_a_function_that_leaves_torch():
    with pytest.raises(TypeError, match="3-point"):
        neula.least_squares(lambda p: torch.tensor([p[0].item() - 1, p[1].item()]), torch.ones(2).double())


def test_steps_of_differences():
    """SciPy's meaning: relative to x."""
    seen = []

    def residuals(x):
        seen.append(x.copy())
        return np.array([x[0] - 1, x[1] - 200])

    neula.least_squares(residuals, [2.0, 100.0], "2-point", diff_step=1e-3, max_nfev=20)
    assert any(np.allclose(x, [2.002, 100.0], rtol=1e-12) for x in seen)
    assert any(np.allclose(x, [2.0, 100.1], rtol=1e-12) for x in seen)


@pytest.mark.parametrize("jac", ["2-point", "3-point", "5-point"])
def test_differences_stay_within_bounds(jac):
    lower, upper = np.array([0.0, 0.5]), np.array([1.0, 0.5 + 1e-9])

    def residuals(x):
        assert (x >= lower).all()
        assert (x <= upper).all()
        return np.array([x[0] ** 2 - 4, x[1] - 7, x[0] * x[1]])

    result = neula.least_squares(residuals, [1.0, 0.5], jac, (lower, upper))
    np.testing.assert_allclose(result.x, upper)


@pytest.mark.parametrize(
    "bounds",
    [([-np.inf, 1.5], np.inf), ([-2, -1], [0.8, 2]), ([-1.3, -1], [0.5, 0.2]), ([-5, -5], [5, 5])],
)
def test_bounds(bounds):
    start = np.clip([-1.2, 1], *bounds)
    theirs = scipy.optimize.least_squares(rosenbrock, start, bounds=bounds, **TIGHT)
    for given in (bounds, scipy.optimize.Bounds(*bounds)):
        ours = neula.least_squares(rosenbrock, start, bounds=given)
        np.testing.assert_allclose(ours.x, theirs.x, rtol=1e-7, atol=1e-9)
        np.testing.assert_array_equal(ours.active_mask, theirs.active_mask)
        assert ours.converged
        assert ours.optimality < 1e-6


@pytest.mark.parametrize("loss", ["soft_l1", "huber", "cauchy", "arctan"])
@pytest.mark.parametrize("jac", [None, decay_jacobian])
def test_losses(loss, jac):
    """By MINPACK, and, with a limit of calls, in tensors."""
    outliers = np.where(np.random.default_rng(3).random(40) < 0.15, 3.0, 0.0)

    def residuals(p):
        return decay(p) + outliers

    options = {"loss": loss, "f_scale": 0.1}
    theirs = scipy.optimize.least_squares(residuals, BEST.x, jac=decay_jacobian, **options, **TIGHT)
    both = [neula.least_squares(residuals, BEST.x, jac, max_nfev=limit, **options) for limit in (None, 10**6)]
    for ours in both:
        np.testing.assert_allclose(ours.x, theirs.x, rtol=1e-6)
        np.testing.assert_allclose(ours.cost, theirs.cost, rtol=1e-9)
        np.testing.assert_allclose(ours.fun, theirs.fun, atol=1e-6)
        assert ours.converged
        assert np.abs(ours.x - BEST.x).max() < 0.2
    for name in ("jac", "condition", "residual_variance"):
        np.testing.assert_allclose(*(getattr(ours, name) for ours in both), rtol=1e-6, atol=1e-9)


def test_a_loss_of_the_caller():
    def cauchy(z):
        return np.array([np.log1p(z), 1 / (1 + z), -1 / (1 + z) ** 2])

    ours = neula.least_squares(decay, START, loss=cauchy, f_scale=0.1)
    named = neula.least_squares(decay, START, loss="cauchy", f_scale=0.1)
    np.testing.assert_allclose(ours.x, named.x, rtol=1e-12)
    with pytest.raises(ValueError, match=r"expected \(3, 40\)"):
        neula.least_squares(decay, START, loss=lambda z: z)


def test_scales_and_units_do_not_matter():
    scales = np.array([1e-12, 1e9, 1e3])
    for options in ({}, {"x_scale": 1 / scales}):
        scaled = neula.least_squares(lambda p: decay(p * scales), START / scales, **options)
        assert scaled.converged
        np.testing.assert_allclose(scaled.x * scales, BEST.x, rtol=1e-8)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_batches_are_as_each_alone(library):
    rates = np.array([[0.3, 1.0], [2.0, 5.0]])
    y = 2.5 * np.exp(-rates[..., None] * T) + 0.5 + 0.05 * RNG.standard_normal((2, 2, 40))
    exp = np.exp if library == "numpy" else torch.exp
    t, target = (T, y) if library == "numpy" else (TORCH_T, torch.from_numpy(y))
    start = np.broadcast_to(START, (2, 2, 3)).copy()
    start = start if library == "numpy" else torch.from_numpy(start)
    result = neula.least_squares(lambda p: p[..., :1] * exp(-p[..., 1:2] * t) + p[..., 2:] - target, start)
    assert result.converged
    assert result.x.shape == (2, 2, 3)
    assert result.jac.shape == (2, 2, 40, 3)
    assert result.accepted.shape == result.status.shape == result.nit.shape == (2, 2)
    assert len(set(result.nit.ravel().tolist())) > 1
    errors = result.standard_errors()
    for i, j in np.ndindex(2, 2):
        alone = neula.least_squares(
            lambda p, i=i, j=j: p[0] * np.exp(-p[1] * T) + p[2] - y[i, j], START, bounds=(-99, 99)
        )
        np.testing.assert_allclose(result.x[i, j], alone.x, rtol=1e-8)
        np.testing.assert_allclose(errors[i, j], alone.standard_errors(), rtol=1e-6)


def test_a_hopeless_member_leaves_the_others_alone():
    def residuals(p):
        wave = torch.stack([p[:, 0] - 3, p[:, 1] ** 2 - 2, p[:, 0] * 0], 1)
        wave[1] = wave[1] * 0 + 1  # depends on nothing
        return wave

    with pytest.warns(neula.AccuracyWarning, match=r"x0\[1\]"):
        result = neula.least_squares(residuals, torch.ones(3, 2).double())
    assert result.accepted.tolist() == [True, False, True]
    np.testing.assert_allclose(result.x[[0, 2]], [[3, 2**0.5]] * 2, rtol=1e-12)


def test_no_problems():
    result = neula.least_squares(lambda p: p[..., :1] - torch.ones(5).double(), torch.ones(0, 2).double())
    assert result.x.shape == (0, 2)
    assert result.converged


@pytest.mark.parametrize(
    "options",
    [{"loss": "soft_l1", "f_scale": 0.1}, {"bounds": ([0, 0, 0.6], [10, 10, 10])}],
)
def test_blocks_of_rows(options):
    parts, lengths = [slice(0, 7), slice(7, 20), slice(20, 40)], []

    def some(p, rows):
        found = p[0] * np.exp(-p[1] * T[rows]) + p[2] - Y[rows]
        lengths.append(len(found))
        return found

    result = neula.least_squares(some, START, blocks=parts, **options)
    whole = neula.least_squares(decay, START, **options)
    assert result.converged
    np.testing.assert_allclose(result.x, whole.x, rtol=1e-9)
    np.testing.assert_allclose(result.standard_errors(), whole.standard_errors(), rtol=1e-7)
    assert result.active_mask.tolist() == whole.active_mask.tolist() == [0, 0, -("bounds" in options)]
    assert result.observations == 40
    assert max(lengths) == 20
    assert result.fun is result.jac is None
    with pytest.raises(ValueError, match="blocks"):
        result.leverage()
    for unreadable in (iter(parts), []):
        with pytest.raises(ValueError, match="read again and again"):
            neula.least_squares(some, START, blocks=unreadable)


def test_too_few_calls():
    with pytest.warns(neula.AccuracyWarning, match="maximum number of function evaluations"):
        result = neula.least_squares(rosenbrock, [-1.2, 1.0], max_nfev=3)
    assert result.status == 0
    assert not result.success
    assert not result.converged
    with pytest.raises(neula.AccuracyError) as error:
        neula.least_squares(rosenbrock, [-1.2, 1.0], max_nfev=3, strict=True)
    np.testing.assert_array_equal(error.value.result.x, result.x)


@pytest.mark.parametrize(("name", "status"), [("ftol", 2), ("xtol", 3), ("gtol", 1)])
def test_each_tolerance(name, status):
    tolerances = {"ftol": None, "xtol": None, "gtol": None, name: 1e-8}
    result = neula.least_squares(decay, START, **tolerances)
    assert result.status == status
    np.testing.assert_allclose(result.x, BEST.x, rtol=1e-7)


def test_callbacks():
    told = []

    def watch(x):
        told.append(x.copy())
        if len(told) == 3:
            raise StopIteration

    with pytest.warns(neula.AccuracyWarning, match="callback"):
        result = neula.least_squares(rosenbrock, [-1.2, 1.0], callback=watch)
    assert result.status == -2
    assert len(told) == 3
    np.testing.assert_array_equal(told[-1], result.x)
    costs = []
    neula.least_squares(
        rosenbrock, [-1.2, 1.0], callback=lambda intermediate_result: costs.append(intermediate_result.cost)
    )
    assert costs == sorted(costs, reverse=True)


def test_progress_and_verbosity():
    told = []
    out = io.StringIO()
    with redirect_stdout(out):
        neula.least_squares(
            rosenbrock, [-1.2, 1.0], verbose=2, progress=lambda stage, part: told.append((stage, part))
        )
    assert "Total nfev" in out.getvalue()
    assert "first-order optimality" in out.getvalue()
    assert told
    assert all(0 <= part <= 1 for _, part in told)


def test_nan_on_the_way_is_refused():
    def residuals(p):
        return np.array([np.log(p[0]) if p[0] > 0 else np.nan, p[1] - 1, p[0] + 3])

    result = neula.least_squares(residuals, [5.0, 3.0])
    assert result.refused >= 1
    assert result.converged
    x = result.x[0]
    # Gauss-Newton steps shrink by a hundredth each: the estimate of the error counts a hundred of them.
    assert abs(np.log(x) / x + x + 3) < 1e-6
    assert 5 < result.digits < 9


def test_a_jacobian_that_is_not_finite_on_the_way():
    def jac(x):
        return np.array([[1.0 if x[0] < 6 else np.nan], [2 * x[0]]])

    with pytest.warns(neula.AccuracyWarning, match="steps were refused"):
        result = neula.least_squares(lambda x: np.array([x[0] - 7, (x[0] ** 2 - 30) / 99]), [1.0], jac)
    assert result.refused >= 1
    assert result.x[0] < 6.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bounds": (0, 0.5)}, "x0 is outside of the bounds: variable 0 is 1"),
        ({"bounds": ([0, 3, 0], [2, 2, 2])}, "lower bound must be strictly less"),
        ({"bounds": (0, 1, 2)}, "pair"),
        ({"bounds": ([0, 0], [2, 2])}, "does not fit x0"),
        ({"bounds": (np.nan, 2)}, "NaN"),
        ({"jac": "4-point"}, "unknown jac '4-point'"),
        ({"jac": "forward"}, "pass x0 as a tensor"),
        ({"jac": lambda p: np.ones((3, 40))}, r"expected \(40, 3\)"),
        ({"method": "newton"}, "unknown method"),
        ({"loss": "l1"}, "unknown loss"),
        ({"f_scale": 0.0}, "f_scale must be positive"),
        ({"x_scale": [1, -1, 1]}, "x_scale must be"),
        ({"x_scale": "jacobian"}, "x_scale must be"),
        ({"diff_step": -1.0}, "diff_step must be positive"),
        ({"max_nfev": 0}, "max_nfev"),
        ({"verbose": 3}, "verbose"),
        ({"ftol": -1.0}, "ftol"),
        ({"ftol": None, "xtol": None, "gtol": None}, "at least one of the tolerances"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        neula.least_squares(decay, START, **options)


@pytest.mark.parametrize(
    ("fun", "x0", "error", "message"),
    [
        (decay, [np.nan, 1, 1], ValueError, "x0 must be finite"),
        (decay, [], ValueError, "no variables"),
        (decay, [1j, 1, 1], TypeError, "complex"),
        (lambda p: p * np.nan, [1.0, 2.0], ValueError, "residuals are not finite at x0"),
        (lambda p: np.ones((3, 2)), [1.0, 2.0], ValueError, "flatten it"),
        (lambda p: None, [1.0], TypeError, "forgot to return"),
        (lambda p: np.ones(3), np.ones((2, 4)), ValueError, "leading dimensions"),
    ],
)
def test_functions_and_starts_that_cannot_be(fun, x0, error, message):
    with pytest.raises(error, match=message):
        neula.least_squares(fun, x0)


def test_residuals_whose_number_changes():
    calls = iter([5, 5, 5, 5, 4, 4, 4, 4, 4])

    def residuals(p):
        return np.ones(next(calls)) * p[0] - 3

    with pytest.raises(ValueError, match="5 residuals before, and now 4"):
        neula.least_squares(residuals, [1.0], "2-point")


def test_gradients_are_not_lost():
    weights = torch.ones(40, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="requires a gradient"):
        neula.least_squares(lambda p, w: w * torch_decay(p), torch.tensor(START), args=(weights,))


def test_arguments_are_passed_on():
    def residuals(p, t, *, y):
        return p[0] * np.exp(-p[1] * t) + p[2] - y

    def jac(p, t, *, y):
        return decay_jacobian(p)

    result = neula.least_squares(residuals, START, jac, args=(T,), kwargs={"y": Y})
    np.testing.assert_allclose(result.x, BEST.x, rtol=1e-8)


def test_a_number_to_begin_with():
    result = neula.least_squares(lambda x: x**2 - 2, 1)
    np.testing.assert_allclose(result.x, [2**0.5], rtol=1e-12)
    assert neula.least_squares(lambda x: (x[0] - 1) * 3, [4.0]).fun.shape == (1,)


def test_a_function_in_single_precision():
    """Its differences are as long as its rounding errors ask for, whatever the dtype of x."""
    t, y = T.astype(np.float32), Y.astype(np.float32)

    def coarse(p):
        return (p[0] * np.exp(-p[1] * t) + p[2]).astype(np.float32) - y

    result = neula.least_squares(coarse, START)
    exact = neula.least_squares(decay, START)
    assert result.converged
    # Rounding errors of f times the condition number, and those of Y.
    error = np.abs(result.x - exact.x).max() / np.abs(exact.x).max()
    assert error < 100 * result.condition * 2.0**-24
    assert error < 10 * result.forward_error < 1.0
