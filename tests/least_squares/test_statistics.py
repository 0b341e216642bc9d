"""Statistics and tables of linear fits, compared with statsmodels, NIST's values, and definitions."""

from __future__ import annotations

import copy
import json
import math
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


def exact(name: str) -> tuple[list[float], list[float]]:
    """Standard errors, then residual deviation, R squared and F, from the published decimals in 60 digits."""
    rows, response = datasets._as_published(name)
    with mpmath.workdps(60):
        a, b = (
            mpmath.matrix([[mpmath.mpf(v.numerator) / v.denominator for v in row] for row in matrix])
            for matrix in (rows, [[y] for y in response])
        )
        m, n = a.rows, a.cols
        inverse = (a.T * a) ** -1
        left = mpmath.norm(b - a * (inverse * (a.T * b))) ** 2
        constant = any(all(r[j] == rows[0][j] for r in rows) for j in range(n))
        mean = sum(b) / m if constant else 0
        total = sum((y - mean) ** 2 for y in b)
        errors = [mpmath.sqrt(left / (m - n) * inverse[j, j]) for j in range(n)]
        f = (total - left) / (n - constant) / (left / (m - n))
        return [*map(float, errors)], [*map(float, (mpmath.sqrt(left / (m - n)), 1 - left / total, f))]


@pytest.mark.parametrize("name", nist_names())
def test_sets_of_nist(name: str) -> None:
    data = nist(name)
    errors, (deviation, r_squared, f) = exact(name)
    result = neula.lstsq(data.A, data.b)
    # A and b are rounded: their squares lose half of the digits that the set leaves at most.
    assert result.r_squared == pytest.approx(r_squared, rel=1e-9)
    if name in ("wampler1", "wampler2"):  # which fit exactly
        assert result.f_statistic > 1e12
        return
    assert result.f_statistic == pytest.approx(f, rel=1e-6)
    assert deviation == pytest.approx(data.residual_std, rel=1e-13)  # NIST's, to 15 digits
    # Rounding of A moves them by u times the condition number with columns of norm 1: 5e9 of Filip, and at
    # most 1e5 of the others.
    rtol = 1e-6 if name == "filip" else 1e-10
    assert np.allclose(result.standard_errors(), errors, rtol=rtol, atol=0)
    assert np.sqrt(result.residual_variance) == pytest.approx(deviation, rel=rtol / 10)


def test_constraints_take_degrees_of_freedom() -> None:
    A, b, _ = problem()
    C = np.array([[1.0, 1, 0, 0, 0], [0, 0, 1, 0, -1]])
    result = neula.lstsq(A, b, constraints=(C, [2.0, 0.0]))
    model = sm.GLM(b, A).fit_constrained((C, [2.0, 0.0]))
    assert np.allclose(result.standard_errors(), model.bse, rtol=1e-7)
    assert result.degrees_of_freedom == 37
    assert np.abs(C @ result.covariance()).max() < 1e-10 * np.abs(result.covariance()).max()


def test_sketched_leverage() -> None:
    A, b, _ = problem(300, 20)
    result = neula.lstsq(A, b)
    ratio = result.leverage(samples=2000) / result.leverage()
    # Chi-squared with so many degrees of freedom: six standard deviations.
    assert np.abs(ratio - 1).max() < 6 * np.sqrt(2 / 2000)


def test_tensors_and_narrow_dtypes() -> None:
    A, b, _ = problem()
    result = neula.lstsq(torch.from_numpy(A).float(), torch.from_numpy(b).float())
    expected = sm.OLS(b.astype("f4").astype("f8"), A.astype("f4").astype("f8")).fit()
    for one in (result, pickle.loads(pickle.dumps(result))):
        assert one.standard_errors().dtype == torch.float64
        assert np.allclose(one.standard_errors().numpy(), expected.bse, rtol=1e-10)


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


sm = pytest.importorskip("statsmodels.api")
smf = pytest.importorskip("statsmodels.formula.api")
pandas = pytest.importorskip("pandas")

PEERS = {
    "r_squared": "rsquared",
    "adjusted_r_squared": "rsquared_adj",
    "f_statistic": "fvalue",
    "f_p_value": "f_pvalue",
    "log_likelihood": "llf",
    "aic": "aic",
    "bic": "bic",
    "model_degrees_of_freedom": "df_model",
    "residual_variance": "scale",
    "degrees_of_freedom": "df_resid",
}
RNG = np.random.default_rng(5)
A = RNG.standard_normal((40, 3)) + 2
B = A @ [1.0, -2.0, 0.5] + 3 + RNG.standard_normal(40)
W = RNG.random(40) + 0.5
GROUPS = np.arange(40) // 5


def compare(result, model, rtol: float = 1e-9) -> None:
    """All numbers of the table; the tolerance is that of statsmodels, which inverts."""
    for ours, theirs in PEERS.items():
        assert getattr(result, ours) == pytest.approx(getattr(model, theirs), rel=rtol), ours
    for ours, theirs in (
        (result.t_values(), model.tvalues),
        (result.p_values(), model.pvalues),
        (result.covariance(), model.cov_params()),
        (result.standard_errors(), model.bse),
        (result.confidence_intervals(0.9), model.conf_int(0.1)),
    ):
        np.testing.assert_allclose(ours, theirs, rtol=rtol)
    np.testing.assert_allclose(result.residuals, model.resid, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("constant", [True, False])
def test_beside_statsmodels(constant: bool) -> None:
    X = sm.add_constant(A) if constant else A
    ordinary, result = sm.OLS(B, X).fit(), neula.lstsq(A, B, intercept=constant)
    compare(result, ordinary)
    np.testing.assert_allclose(result.leverage(), ordinary.get_influence().hat_matrix_diag, rtol=1e-11)
    weighted = sm.WLS(B, X, weights=W**2).fit()
    given = {"weights": W}, {"weights": -W}, {"sigma": 1 / W}, {"sample_weight": W**2}, {"covariance": W**-2}
    for keywords in given:
        compare(neula.lstsq(A, B, intercept=constant, **keywords), weighted)
    V = np.diag(W) + 0.2
    compare(neula.lstsq(A, B, intercept=constant, covariance=V), sm.GLS(B, X, sigma=V).fit())


def test_constants_that_are_combinations_of_columns() -> None:
    """Dummy variables of all categories: the mean counts as fitted, as in statsmodels."""
    dummies = np.eye(4)[np.arange(40) % 4]
    compare(neula.lstsq(dummies, B), sm.OLS(B, dummies).fit())


@pytest.mark.parametrize("keywords", [{}, {"sample_weight": W}])
def test_robust_and_clustered(keywords: dict[str, np.ndarray]) -> None:
    X, labels = sm.add_constant(A), np.array(list("abcdefgh"))[GROUPS]
    model = sm.WLS(B, X, weights=W) if keywords else sm.OLS(B, X)
    result = neula.lstsq(A, B, intercept=True, **keywords)
    cases = [({"robust": kind}, {"cov_type": kind}) for kind in ("HC0", "HC1", "HC2", "HC3")]
    cases.append(({"groups": labels}, {"cov_type": "cluster", "cov_kwds": {"groups": GROUPS}}))
    for ours, theirs in cases:
        robust = model.fit(**theirs, use_t=True)
        np.testing.assert_allclose(result.covariance(**ours), robust.cov_params(), rtol=1e-9)
        np.testing.assert_allclose(result.p_values(**ours), robust.pvalues, rtol=1e-9)
        np.testing.assert_allclose(result.confidence_intervals(0.9, **ours), robust.conf_int(0.1), rtol=1e-9)


def test_several_problems() -> None:
    """Of batches and right-hand sides as of each alone."""
    batch, right = RNG.standard_normal((2, 20, 3)), RNG.standard_normal((20, 4))
    groups, w = np.arange(20) % 5, W[:20]
    result = neula.lstsq(batch, right, intercept=True, weights=w)
    found = {
        "covariance": lambda x: x.covariance(robust="HC3"),
        "errors": lambda x: np.moveaxis(x.standard_errors(robust="HC3"), -1, -2),
        "p values": lambda x: np.moveaxis(x.p_values(groups=groups), -1, -2),
        "classical errors": lambda x: np.moveaxis(x.standard_errors(), -1, -2),
        "intervals": lambda x: np.moveaxis(x.confidence_intervals(), -2, -3),
        "variance": lambda x: x.residual_variance,
        "r squared": lambda x: x.r_squared,
    }
    for name, of in found.items():
        for i, k in np.ndindex(2, 4):
            alone = neula.lstsq(batch[i], right[:, k : k + 1], intercept=True, weights=w)
            np.testing.assert_allclose(of(result)[i, k], of(alone)[0], rtol=1e-10, err_msg=name)
    assert result.leverage().shape == (2, 20)
    np.testing.assert_allclose(result.predict(batch), right - result.residuals, atol=1e-13)
    one = neula.lstsq(batch, right[:, 0])
    assert one.covariance().shape == (2, 3, 3)
    assert one.degrees_of_freedom.tolist() == [17, 17]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    "keywords", [{}, {"weights": W}, {"covariance": W**-2}, {"covariance": np.diag(W**-2)}]
)
def test_the_intercept_is_not_damped(dtype: type, keywords: dict[str, np.ndarray]) -> None:
    a, b, damp = A.astype(dtype), B.astype(dtype), 3.0
    result = neula.lstsq(a, b, intercept=True, damp=damp, **keywords)
    w = W if keywords else np.ones(40)
    scaled = np.column_stack([np.ones(40), a]) * w[:, None]
    inverse = np.linalg.solve(scaled.T @ scaled + damp**2 * np.diag([0, 1, 1, 1]), scaled.T)
    rtol = 1e-12 if dtype is np.float64 else 4e-7
    np.testing.assert_allclose(result.x, inverse @ (b * w), rtol=rtol)
    assert result.x.dtype == dtype
    assert result.converged
    assert result.effective_degrees_of_freedom == pytest.approx(np.trace(scaled @ inverse))
    np.testing.assert_allclose(result.leverage(), np.diag(scaled @ inverse), rtol=1e-8)
    np.testing.assert_allclose(result.covariance(absolute=True), inverse @ inverse.T, rtol=1e-8, atol=1e-15)
    np.testing.assert_allclose(result.residuals, b - result.predict(a), atol=1e-13 if rtol < 1e-9 else 1e-5)
    assert math.isnan(result.f_statistic)
    # Of data far from zero the damped coefficients are those of centred data.
    if not keywords:
        far = neula.lstsq(a, b + 1000, intercept=True, damp=damp)
        np.testing.assert_allclose(far.x[1:], result.x[1:], rtol=1e-9 if dtype is np.float64 else 2e-3)


def test_constraints_and_the_intercept() -> None:
    C, d = np.array([[1.0, 1.0, 0.0]]), [1.0]
    for damp in (0.0, 2.0):
        result = neula.lstsq(A, B, intercept=True, damp=damp, weights=W, constraints=(C, d))
        X = np.column_stack([np.ones(40), A]) * W[:, None]
        gram = X.T @ X + damp**2 * np.diag([0, 1, 1, 1])
        border = np.array([[0.0, 1, 1, 0]])
        kkt = np.block([[gram, border.T], [border, np.zeros((1, 1))]])
        np.testing.assert_allclose(result.x, np.linalg.solve(kkt, [*(X.T @ (B * W)), 1.0])[:4], rtol=1e-10)
        assert result.residuals == pytest.approx(B - result.predict(A), abs=1e-12)
    through_zero = neula.lstsq(A, B, intercept=True, constraints=(np.array([[1.0, 0, 0, 0]]), [0.0]))
    np.testing.assert_allclose(through_zero.x[1:], neula.lstsq(A, B).x, rtol=1e-11)
    with pytest.raises(ValueError, match="3 columns, as A has, or one more"):
        neula.lstsq(A, B, intercept=True, constraints=(np.ones((1, 2)), [0.0]))


def test_residuals_of_rows_without_weight() -> None:
    weights = W.copy()
    weights[7] = 0.0
    for right in (B, np.column_stack([B, -2 * B])):
        for damp in (0.0, 1.0):
            result = neula.lstsq(A, right, weights=weights, intercept=True, damp=damp)
            np.testing.assert_allclose(result.residuals, right - result.predict(A), atol=1e-13)


def test_gradients() -> None:
    """Of predictions, and of x with an intercept, damping, and standard deviations."""
    a, new, s = (torch.tensor(x, requires_grad=True) for x in (A[:8], A[8:12], 1 / W[:8]))
    b = torch.tensor(B[:8])
    for right in (b, torch.stack([b, 2 * b], 1)):
        assert torch.autograd.gradcheck(
            lambda a, new, right=right: neula.lstsq(a, right, intercept=True).predict(new), (a, new)
        )
    assert torch.autograd.gradcheck(
        lambda a, s: neula.lstsq(a, b, intercept=True, damp=1.0, sigma=s).x, (a, s), fast_mode=True
    )
    result = neula.lstsq(a, b)
    found = result.predict(A)
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, A @ result.x.detach().numpy(), rtol=1e-13)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"sigma": -W}, r"sigma\[0\] is -.*must be positive"),
        ({"sigma": 0 * W}, "must be positive"),
        ({"sample_weight": -W}, r"sample_weight\[0\] is -.*not be negative"),
        ({"sigma": W, "weights": W}, "weights and sigma weight the rows"),
    ],
)
def test_weights_that_are_refused(keywords: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        neula.lstsq(A, B, **keywords)


def test_what_robust_covariances_refuse() -> None:
    result, alone = neula.lstsq(A, B), neula.lstsq(np.column_stack([A, np.arange(40) == 3]), B)
    fit = neula.LeastSquares(3)
    fit.update(A, B)
    for message, asked in [
        ("unknown robust 'HC4'", lambda: result.covariance(robust="HC4")),
        ("exclude one another", lambda: result.covariance(robust="HC1", absolute=True)),
        ("groups must have shape", lambda: result.covariance(groups=[1, 2])),
        ("two different labels", lambda: result.covariance(groups=np.ones(40))),
        ("row 3 has leverage 1", lambda: alone.standard_errors(robust="HC3")),
        ("A", lambda: fit.solve().r_squared),
    ]:
        with pytest.raises(ValueError, match=message):
            asked()
    assert np.isfinite(alone.standard_errors(robust="HC1")).all()


def test_groups_go_by_labels() -> None:
    table = pandas.DataFrame(A, index=RNG.permutation(40))
    result = neula.lstsq(table, B, intercept=True)
    expected = result.standard_errors(groups=GROUPS)
    groups = pandas.Series(GROUPS, table.index)
    assert np.array_equal(result.standard_errors(groups=groups), expected)
    for one in (result, copy.copy(result)):
        with pytest.raises(ValueError, match="other row labels"):
            one.standard_errors(groups=groups.sort_index())
    for wrong in ([None, *"ab" * 19, "c"], [np.nan, *GROUPS[1:]], pandas.array([pandas.NA, *GROUPS[1:]])):
        with pytest.raises(ValueError, match="missing"):
            result.standard_errors(groups=wrong)
    assert vars(pickle.loads(pickle.dumps(result)))["_row_labels"] is None


def test_numbers_that_nothing_determines() -> None:
    """Of a constant, whose rounding errors are no variance, and of a fit with no more than a constant."""
    for w in (None, W):
        constant = neula.lstsq(A, np.full(40, 0.1), intercept=True, weights=w)
        assert math.isnan(constant.r_squared)
        assert math.isnan(constant.adjusted_r_squared)
    alone = neula.lstsq(np.ones((40, 1)), B)
    assert math.isnan(alone.f_statistic)
    assert math.isnan(alone.f_p_value)
    assert alone.r_squared == pytest.approx(0.0, abs=1e-14)
    assert alone.aic == pytest.approx(sm.OLS(B, np.ones(40)).fit().aic)


def test_coefficients_of_a_batch() -> None:
    vectors = neula.lstsq(np.stack([A, 2 * A]), B)
    columns = neula.lstsq(np.stack([A, 2 * A]), B[:, None])
    for place, name in enumerate(("x1", "x2", "x3")):
        assert np.array_equal(vectors.coefficients[name], vectors.x[:, place])
        assert np.array_equal(columns.coefficients[name], columns.x[:, place])


def test_the_summary_reads_like_that_of_statsmodels() -> None:
    table = pandas.DataFrame(A, columns=["x1", "x2", "x3"]).assign(y=B)
    text = neula.lstsq(table[["x1", "x2", "x3"]], table["y"], intercept=True).summary()
    theirs = str(smf.ols("y ~ x1 + x2 + x3", table).fit().summary())
    assert repr(text) == str(text)
    for name in ("x1", "x2", "x3"):
        (row,), (their_row,) = (
            [list(map(float, line.split()[1:])) for line in one.splitlines() if line.startswith(f"{name} ")]
            for one in (text, theirs)
        )
        assert row == pytest.approx(their_row, abs=2e-3)
    labels = "R-squared", "Adj. R-squared", "F-statistic", "Log-Likelihood", "AIC", "BIC", "Durbin-Watson"
    for label in labels:
        value, their_value = (float(one.split(f"{label}:")[1].split()[0]) for one in (text, theirs))
        assert value == pytest.approx(their_value, rel=2e-3), label


def test_dictionaries_and_json() -> None:
    result = neula.lstsq(A, B, intercept=True)
    found = json.loads(result.to_json())
    assert list(found["coefficients"]) == ["intercept", "x1", "x2", "x3"]
    assert found["standard_error"]["x2"] == result.standard_errors()[2]
    assert found["r_squared"] == result.r_squared
    assert found["level"] == 0.95
    deficient = neula.lstsq(np.column_stack([A, A[:, 0]]), B).to_dict()
    assert "lacks full rank" in deficient["no_statistics"]
    assert "standard_error" not in deficient


def test_formulas() -> None:
    pytest.importorskip("formulaic")
    table = pandas.DataFrame(A, columns=["x", "u", "z"])
    table = table.assign(y=B, z=table.z.abs() + 1, kind=np.array(list("abc"))[np.arange(40) % 3], w=W)
    formula = "y ~ x + np.log(z) + C(kind) + x:u"
    result, model = (
        neula.fit_formula(formula, table, sample_weight="w"),
        smf.wls(formula, table, weights=W).fit(),
    )
    for ours, theirs in PEERS.items():
        assert getattr(result, ours) == pytest.approx(getattr(model, theirs), rel=1e-9), ours
    params = {name.replace("Intercept", "intercept"): value for name, value in model.params.items()}
    assert result.coefficients == pytest.approx(params, rel=1e-9)
    np.testing.assert_allclose(result.predict(table[:3]), model.predict(table[:3]), rtol=1e-12)
    np.testing.assert_allclose(
        pickle.loads(pickle.dumps(result)).predict(table), model.fittedvalues, rtol=1e-12
    )
    without = neula.fit_formula("y ~ x - 1", table)
    np.testing.assert_allclose(without.x, smf.ols("y ~ x - 1", table).fit().params, rtol=1e-12)
    damped = neula.fit_formula("y ~ x + u", table, damp=2.0)
    np.testing.assert_allclose(damped.x, neula.lstsq(A[:, :2], B, intercept=True, damp=2.0).x, rtol=1e-12)
    for wrong, message in (("y ~ q", "q"), ("x + u", "no response")):
        with pytest.raises(ValueError, match=message):
            neula.fit_formula(wrong, table)
    with pytest.raises(ValueError, match=r"null values.*drop these rows"):
        neula.fit_formula("y ~ x", table.assign(x=table.x.where(table.x > 2)))
    with pytest.raises(ValueError, match="not seen in original dataset"):
        neula.fit_formula("y ~ x + kind", table).predict(table.assign(kind="z"))
    with pytest.raises(ValueError, match="two columns are named 'x'"):
        neula.fit_formula("y ~ x", pandas.concat([table, table[["x"]]], axis=1))
    for reordered in (
        lambda: neula.fit_formula("y ~ x", table, sample_weight=table.w[::-1]),
        lambda: neula.fit_formula("y ~ x", table).standard_errors(groups=table.kind[::-1]),
    ):
        with pytest.raises(ValueError, match="other row labels"):
            reordered()
