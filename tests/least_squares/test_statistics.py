"""Statistics of linear fits, beside statsmodels, NIST's certified values, and definitions."""

from __future__ import annotations

import pickle

import mpmath
import numpy as np
import pytest
import scipy.stats
import torch

import neula
from neula.io import datasets
from neula.io.datasets import nist, nist_names
from neula.io.sources import row_blocks

sm = pytest.importorskip("statsmodels.api")


def problem(m: int = 40, n: int = 5, seed: int = 0):
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((m, n)) * 10.0 ** rng.integers(-1, 2, n)
    return A, A @ np.ones(n) + rng.standard_normal(m), rng.random(m) + 0.5


def compare(result, model) -> None:
    assert np.allclose(result.covariance(), model.cov_params(), rtol=1e-9, atol=0)
    assert np.allclose(result.standard_errors(), model.bse, rtol=1e-11)
    assert np.allclose(result.confidence_intervals(0.9), model.conf_int(0.1), rtol=1e-11)
    assert result.residual_variance == pytest.approx(model.scale, rel=1e-12)
    assert result.degrees_of_freedom == model.df_resid


def test_ordinary_weighted_and_generalized() -> None:
    A, b, w = problem()
    ordinary = sm.OLS(b, A).fit()
    compare(neula.lstsq(A, b), ordinary)
    hat = ordinary.get_influence().hat_matrix_diag
    assert np.allclose(neula.lstsq(A, b).leverage(), hat, rtol=1e-11)
    compare(neula.lstsq(A, b, weights=w), sm.WLS(b, A, weights=w**2).fit())
    compare(neula.lstsq(A, b, covariance=w), sm.WLS(b, A, weights=1 / w).fit())
    sigma = np.diag(w) + 0.1
    compare(neula.lstsq(A, b, covariance=sigma), sm.GLS(b, A, sigma=sigma).fit())


def test_constraints_take_degrees_of_freedom() -> None:
    A, b, _ = problem()
    C = np.array([[1.0, 1, 0, 0, 0], [0, 0, 1, 0, -1]])
    result = neula.lstsq(A, b, constraints=(C, [2.0, 0.0]))
    model = sm.GLM(b, A).fit_constrained((C, [2.0, 0.0]))
    assert np.allclose(result.standard_errors(), model.bse, rtol=1e-7)
    assert result.degrees_of_freedom == 37
    assert np.abs(C @ result.covariance()).max() < 1e-10 * np.abs(result.covariance()).max()


def test_damping() -> None:
    A, b, _ = problem(30, 6)
    result = neula.lstsq(A, b, damp=2.0)
    inverse = np.linalg.solve(A.T @ A + 4 * np.eye(6), A.T)
    assert result.effective_degrees_of_freedom == pytest.approx(np.trace(A @ inverse))
    assert np.allclose(result.covariance(absolute=True), inverse @ inverse.T, rtol=1e-9, atol=1e-16)
    assert np.allclose(result.leverage(), np.diag(A @ inverse))
    variance = np.sum((b - A @ result.x) ** 2) / (30 - np.trace(A @ inverse))
    assert result.residual_variance == pytest.approx(variance)


def exact_standard_deviations(name: str) -> tuple[list[float], float]:
    """Of the coefficients, and of the residuals, from the published decimals in 60 digits."""
    rows, response = datasets._as_published(name)
    with mpmath.workdps(60):
        a, b = (
            mpmath.matrix([[mpmath.mpf(v.numerator) / v.denominator for v in row] for row in matrix])
            for matrix in (rows, [[y] for y in response])
        )
        inverse = (a.T * a) ** -1
        residual = b - a * (inverse * (a.T * b))
        variance = (residual.T * residual)[0] / (a.rows - a.cols)
        errors = [float(mpmath.sqrt(variance * inverse[j, j])) for j in range(a.cols)]
        return errors, float(mpmath.sqrt(variance))


@pytest.mark.parametrize("name", sorted(set(nist_names()) - {"wampler1", "wampler2"}))  # these fit exactly
def test_certified_standard_deviations(name) -> None:
    data = nist(name)
    result = neula.lstsq(data.A, data.b)
    exact, residual_std = exact_standard_deviations(name)
    assert residual_std == pytest.approx(data.residual_std, rel=1e-13)  # NIST's, to 15 digits
    # Rounding of A moves them by u times the condition number with columns of norm 1: 5e9 of Filip, and at
    # most 1e5 of the others.
    errors = 1e-6 if name == "filip" else 1e-10
    assert np.allclose(result.standard_errors(), exact, rtol=errors, atol=0)
    assert np.sqrt(result.residual_variance) == pytest.approx(residual_std, rel=errors / 10)


def test_sketched_leverage() -> None:
    A, b, _ = problem(300, 20)
    result = neula.lstsq(A, b)
    ratio = result.leverage(samples=2000) / result.leverage()
    # Chi-squared with so many degrees of freedom: six standard deviations.
    assert np.abs(ratio - 1).max() < 6 * np.sqrt(2 / 2000)


def test_batches_and_right_hand_sides() -> None:
    rng = np.random.default_rng(0)
    A, B = rng.standard_normal((2, 20, 3)), rng.standard_normal((20, 4))
    result = neula.lstsq(A, B)
    assert result.covariance().shape == (2, 4, 3, 3)
    assert result.standard_errors().shape == (2, 3, 4)
    assert result.confidence_intervals().shape == (2, 3, 4, 2)
    assert result.leverage().shape == (2, 20)
    for i, j in np.ndindex(2, 4):
        model = sm.OLS(B[:, j], A[i]).fit()
        assert np.allclose(result.covariance()[i, j], model.cov_params())
        assert np.allclose(result.standard_errors()[i, :, j], model.bse)
        assert np.allclose(result.confidence_intervals()[i, :, j], model.conf_int())
        assert result.residual_variance[i, j] == pytest.approx(model.scale)
    one = neula.lstsq(A, B[:, 0])
    assert one.covariance().shape == (2, 3, 3)
    assert one.degrees_of_freedom.tolist() == [17, 17]


def test_tensors_and_narrow_dtypes() -> None:
    A, b, _ = problem()
    result = neula.lstsq(torch.from_numpy(A).float(), torch.from_numpy(b).float())
    expected = sm.OLS(b.astype("f4").astype("f8"), A.astype("f4").astype("f8")).fit()
    assert result.standard_errors().dtype == torch.float64
    assert np.allclose(result.standard_errors().numpy(), expected.bse, rtol=1e-10)


def test_what_cannot_be_said() -> None:
    A, b, _ = problem()
    result = neula.lstsq(A, b)
    with pytest.raises(ValueError, match="leverages and residuals need the rows of A"):
        pickle.loads(pickle.dumps(result)).leverage()
    with pytest.raises(ValueError, match="between 0 and 1, got 95"):
        result.confidence_intervals(95)
    with pytest.raises(ValueError, match="samples must be at least 1"):
        result.leverage(samples=0)
    expected, unasked = result.covariance(), neula.lstsq(A, b)
    A[3] += 1
    with pytest.raises(ValueError, match="has changed since"):
        unasked.covariance()
    assert np.array_equal(result.covariance(), expected)  # of the A that was solved
    square = neula.lstsq(A[:5], b[:5])
    with pytest.raises(ValueError, match="no degrees of freedom"):
        square.standard_errors()
    assert np.isfinite(square.standard_errors(absolute=True)).all()
    dependent = neula.lstsq(A[:, [0, 1, 0]], b)
    for one in (dependent, neula.lstsq(row_blocks(A[:, [0, 1, 0]]), row_blocks(b))):
        with pytest.raises(ValueError, match="lacks full rank"):
            one.covariance()
    with pytest.raises(ValueError, match="lacked full rank when the result was pickled"):
        pickle.loads(pickle.dumps(dependent)).covariance()
    with pytest.raises(ValueError, match="lacks full rank"):
        neula.lstsq(A[:3], b[:3]).leverage()


def kept(a: np.ndarray, b: np.ndarray, damp: float) -> dict[str, neula.LstsqResult]:
    """Results that keep no row."""
    whole, sizes = neula.lstsq(a, b, damp=damp), np.linalg.norm(a, axis=0)
    fit = neula.LeastSquares(a.shape[1], scales=sizes)
    for start in range(0, len(a), 9):
        fit.update(a[start : start + 9], b[start : start + 9])
    found = {
        "pickled": whole,
        "streamed": neula.lstsq(row_blocks(a), row_blocks(b), damp=damp),
        "incremental": fit.solve(damp=damp),
    }
    found |= {f"{name}, pickled": pickle.loads(pickle.dumps(result)) for name, result in found.items()}
    return found


@pytest.mark.parametrize("damp", [0.0, 0.5, 1e3])
@pytest.mark.parametrize("k", [None, 2])
def test_results_without_rows(damp: float, k: int | None) -> None:
    """Their statistics are those of the rows, by NumPy in a way of its own."""
    rng = np.random.default_rng(5)
    a = rng.standard_normal((60, 4)) * [1e-3, 1.0, 30.0, 1e4]
    b = a @ rng.standard_normal((4, k) if k else 4) + rng.standard_normal((60, k) if k else 60)
    x, *_ = np.linalg.lstsq(np.vstack([a, damp * np.eye(4)]), np.concatenate([b, 0 * b[:4]]), rcond=None)
    _, s, vt = np.linalg.svd(a, full_matrices=False)
    free = 60 - (s**2 / (s**2 + damp**2)).sum()
    variance = ((b - a @ x) ** 2).sum(0) / free
    by_rows = (vt.T * (s / (s**2 + damp**2)) ** 2) @ vt
    errors = np.sqrt(np.multiply.outer(np.diag(by_rows), variance))
    for name, result in kept(a, b, damp).items():
        assert np.allclose(result.standard_errors(), errors, rtol=1e-7), name
        assert np.allclose(result.standard_errors(absolute=True).T, np.sqrt(np.diag(by_rows)), rtol=1e-7), (
            name
        )
        covariance = np.multiply.outer(variance, by_rows)
        sizes = np.multiply.outer(variance, np.sqrt(np.outer(np.diag(by_rows), np.diag(by_rows))))
        assert (np.abs(result.covariance() - covariance) <= 1e-7 * sizes).all(), name
        assert np.allclose(result.degrees_of_freedom, free), name
        ends = result.confidence_intervals(0.9)
        assert np.allclose(ends.mean(-1), result.x), name
        half = scipy.stats.t.ppf(0.95, free) * errors
        assert np.allclose(np.diff(ends, axis=-1)[..., 0], 2 * half, rtol=1e-6), name
    with pytest.raises(ValueError, match="need the rows of A"):
        neula.lstsq(row_blocks(a), row_blocks(b)).leverage()


def test_tensors_stay_tensors_without_rows() -> None:
    A, b, _ = problem()
    again = pickle.loads(pickle.dumps(neula.lstsq(torch.from_numpy(A), torch.from_numpy(b))))
    assert isinstance(again.standard_errors(), torch.Tensor)
    assert np.allclose(again.standard_errors(), sm.OLS(b, A).fit().bse, rtol=1e-10)


# --- many dampings ---


@pytest.mark.parametrize("shape", [(30, 6), (6, 6), (8, 12), (5, 1)])
def test_ridge_path(shape) -> None:
    A, b, _ = problem(*shape, seed=3)
    A /= np.linalg.norm(A, axis=0)
    damps = np.array([1e-2, 0.1, 1.0, 30.0])
    path = neula.ridge_path(A, np.stack([b, -2 * b], 1), damps)
    assert path.converged
    assert path.x.shape == (4, shape[1], 2)
    for i, damp in enumerate(damps):
        single = neula.lstsq(A, b, damp=damp)
        assert np.allclose(path.x[i, :, 0], single.x, rtol=1e-9, atol=1e-12)
        hat = A @ np.linalg.solve(A.T @ A + damp**2 * np.eye(shape[1]), A.T)
        r = b - hat @ b
        assert path.effective_degrees_of_freedom[i] == pytest.approx(np.trace(hat), rel=1e-9)
        assert path.residual_norms[i, 0] == pytest.approx(np.linalg.norm(r), rel=1e-8)
        assert path.solution_norms[i, 1] == pytest.approx(2 * np.linalg.norm(single.x), rel=1e-9)
        gcv = shape[0] * np.sum(r**2) / (shape[0] - np.trace(hat)) ** 2
        assert path.gcv[i, 0] == pytest.approx(gcv, rel=1e-6)
        loo = np.mean((r / (1 - np.diag(hat))) ** 2)
        assert path.leave_one_out[i, 0] == pytest.approx(loo, rel=1e-6)
    assert path.best().tolist() == path.gcv.argmin(0).tolist()


def test_leaving_rows_out() -> None:
    A, b, _ = problem(12, 3)
    path = neula.ridge_path(A, b, [0.5])
    errors = []
    for row in range(12):
        rest = np.arange(12) != row
        errors.append(b[row] - A[row] @ neula.lstsq(A[rest], b[rest], damp=0.5).x)
    assert path.leave_one_out[0] == pytest.approx(np.mean(np.square(errors)), rel=1e-9)
    assert path.best("leave_one_out") == 0
    assert "damps" in repr(path)


def test_no_damping_and_dependent_columns() -> None:
    A, b, _ = problem(20, 3)
    A = np.column_stack([A, A[:, 0]])
    path = neula.ridge_path(A, b, [0.0])
    assert np.allclose(path.x[0], np.linalg.lstsq(A, b, rcond=None)[0], rtol=1e-8, atol=1e-10)
    assert path.effective_degrees_of_freedom[0] == pytest.approx(3)


def test_bad_input_of_paths() -> None:
    A, b, _ = problem(9, 3)
    for message, given in [
        ("must be a vector", (A, b, 1.0)),
        ("must not be negative, got -1", (A, b, [1.0, -1.0])),
        (r"damps\[1\] is nan", (A, b, [1.0, np.nan])),
        ("are a batch", (A[None], b, [1.0])),
        (r"A\[0, 0\] is nan", (A * np.nan, b, [1.0])),
        ("do not fit", (A, b[:-1], [1.0])),
    ]:
        with pytest.raises(ValueError, match=message):
            neula.ridge_path(*given)
    with pytest.raises(ValueError, match="unknown error 'aic'"):
        neula.ridge_path(A, b, [1.0]).best("aic")
    assert neula.ridge_path(A, b, []).x.shape == (0, 3)


def test_ridge_path_does_not_depend_on_units() -> None:
    """Powers of two round nothing, and no square may be lost."""
    rng = np.random.default_rng(7)
    A, b, damps = rng.standard_normal((12, 4)), rng.standard_normal((12, 2)), np.logspace(-6, 1, 3)
    plain = neula.ridge_path(A, b, damps)
    for of_a, of_b in ((-900, -800), (900, 500), (0, -900), (0, 900), (-450, 450)):
        found = neula.ridge_path(np.ldexp(A, of_a), np.ldexp(b, of_b), np.ldexp(damps, of_a))
        assert found.converged
        np.testing.assert_array_equal(found.x, np.ldexp(plain.x, of_b - of_a))
        np.testing.assert_array_equal(found.residual_norms, np.ldexp(plain.residual_norms, of_b))
        np.testing.assert_array_equal(found.solution_norms, np.ldexp(plain.solution_norms, of_b - of_a))
        np.testing.assert_array_equal(found.backward_errors, plain.backward_errors)


def test_ridge_path_says_what_a_narrow_dtype_cannot_hold() -> None:
    rng = np.random.default_rng(7)
    A, b = rng.standard_normal((12, 4)).astype(np.float32), rng.standard_normal(12)
    with pytest.warns(neula.AccuracyWarning):
        result = neula.ridge_path(A, (1e-43 * b).astype(np.float32), [1.0])
    assert result.backward_errors[0] > 1e-4


@pytest.mark.parametrize("options", [{}, {"damp": 0.5}, {"weights": np.linspace(1, 2, 40)}])
def test_statistics_do_not_depend_on_units(options) -> None:
    A, b, *_ = problem()
    plain = neula.lstsq(A, b, **options)
    for of_a, of_b in ((-900, -900), (900, 900), (0, -900), (0, 900), (-400, 500), (450, -500)):
        damp = float(np.ldexp(options["damp"], of_a)) if "damp" in options else 0.0
        result = neula.lstsq(np.ldexp(A, of_a), np.ldexp(b, of_b), **{**options, "damp": damp})
        np.testing.assert_allclose(
            result.standard_errors(), np.ldexp(plain.standard_errors(), of_b - of_a), 1e-10
        )
        np.testing.assert_allclose(result.leverage(), plain.leverage(), 1e-10)
        known = np.ldexp(plain.standard_errors(absolute=True), -of_a)
        np.testing.assert_allclose(result.standard_errors(absolute=True), known, 1e-10)
        with np.errstate(over="ignore"):  # a square of it
            covariance = np.ldexp(np.ldexp(plain.covariance(), of_b - of_a), of_b - of_a)
        np.testing.assert_allclose(result.covariance(), covariance, 1e-10)
