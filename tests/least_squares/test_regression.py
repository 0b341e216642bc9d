"""The table of regression, robust covariances and intercepts, beside statsmodels, NIST, and exact sums."""

from __future__ import annotations

import copy
import json
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

import neula
from neula.io import datasets
from neula.io.datasets import nist, nist_names

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
    np.testing.assert_allclose(result.t_values(), model.tvalues, rtol=rtol)
    np.testing.assert_allclose(result.p_values(), model.pvalues, rtol=rtol)
    np.testing.assert_allclose(result.residuals, model.resid, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("constant", [True, False])
def test_beside_statsmodels(constant: bool) -> None:
    X = sm.add_constant(A) if constant else A
    compare(neula.lstsq(A, B, intercept=constant), sm.OLS(B, X).fit())
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


@pytest.mark.parametrize("name", ["longley", "stackloss", "engel", "spector", "cpunish"])
def test_data_sets_of_statsmodels(name: str) -> None:
    data = getattr(sm.datasets, name).load()
    result = neula.lstsq(data.exog, data.endog, intercept=True)
    X = sm.add_constant(data.exog)
    # The errors of statsmodels grow with the square of the condition number, as NIST's sets show.
    compare(result, sm.OLS(data.endog, X).fit(), rtol=1e-6 if name == "longley" else 1e-8)
    assert list(result.coefficients) == ["intercept", *data.exog.columns]
    for kind in ("HC0", "HC1", "HC2", "HC3"):
        model = sm.OLS(data.endog, X).fit(cov_type=kind, use_t=True)
        rtol = 1e-6 if name == "longley" else 1e-8
        np.testing.assert_allclose(result.standard_errors(robust=kind), model.bse, rtol=rtol)


def exact(name: str) -> tuple[float, float]:
    """R squared and the F statistic of a set of NIST, from the published decimals in rational numbers."""
    rows, response = datasets._as_published(name)
    m, n = len(rows), len(rows[0])
    columns = [*zip(*rows, strict=True), response]
    system = [[sum(a * b for a, b in zip(c, d, strict=True)) for d in columns] for c in columns[:n]]
    for i in range(n):
        pivot = next(k for k in range(i, n) if system[k][i])
        system[i], system[pivot] = system[pivot], system[i]
        for k in range(i + 1, n):
            factor = Fraction(system[k][i]) / system[i][i]
            system[k] = [a - factor * b for a, b in zip(system[k], system[i], strict=True)]
    x = [Fraction(0)] * n
    for i in reversed(range(n)):
        x[i] = (system[i][n] - sum(system[i][j] * x[j] for j in range(i + 1, n))) / Fraction(system[i][i])
    left = sum(
        (y - sum(a * b for a, b in zip(r, x, strict=True))) ** 2 for r, y in zip(rows, response, strict=True)
    )
    constant = any(all(r[j] == rows[0][j] for r in rows) for j in range(n))
    mean = sum(response) / m if constant else 0
    total = sum((y - mean) ** 2 for y in response)
    r_squared = 1 - left / total
    f = math.inf if left == 0 else float((total - left) / (n - constant) / (left / (m - n)))
    return float(r_squared), f


@pytest.mark.parametrize("name", nist_names())
def test_sets_of_nist(name: str) -> None:
    problem = nist(name)
    r_squared, f = exact(name)
    result = neula.lstsq(problem.A, problem.b)
    # A and b are rounded: their squares lose half of the digits that the set leaves at most.
    assert result.r_squared == pytest.approx(r_squared, rel=1e-9)
    if f < 1e15:
        assert result.f_statistic == pytest.approx(f, rel=1e-6)
    else:
        assert result.f_statistic > 1e12


def test_robust_and_clustered() -> None:
    X = sm.add_constant(A)
    for keywords, model in (({}, sm.OLS(B, X)), ({"sample_weight": W}, sm.WLS(B, X, weights=W))):
        result = neula.lstsq(A, B, intercept=True, **keywords)
        for kind in ("HC0", "HC1", "HC2", "HC3"):
            robust = model.fit(cov_type=kind, use_t=True)
            np.testing.assert_allclose(result.covariance(robust=kind), robust.cov_params(), rtol=1e-9)
            np.testing.assert_allclose(result.p_values(robust=kind), robust.pvalues, rtol=1e-9)
            ends = result.confidence_intervals(0.9, robust=kind)
            np.testing.assert_allclose(ends, robust.conf_int(0.1), rtol=1e-9)
        clustered = model.fit(cov_type="cluster", cov_kwds={"groups": GROUPS}, use_t=True)
        labels = np.array(list("abcdefgh"))[GROUPS]
        np.testing.assert_allclose(result.covariance(groups=labels), clustered.cov_params(), rtol=1e-9)
        np.testing.assert_allclose(result.p_values(groups=labels), clustered.pvalues, rtol=1e-9)
        np.testing.assert_allclose(
            result.confidence_intervals(groups=labels), clustered.conf_int(), rtol=1e-9
        )


def test_robust_of_several_problems() -> None:
    """Of batches and right-hand sides as of each alone."""
    batch = RNG.standard_normal((2, 20, 3))
    right = RNG.standard_normal((20, 4))
    result = neula.lstsq(batch, right, intercept=True, weights=W[:20])
    covariance, errors = result.covariance(robust="HC3"), result.standard_errors(robust="HC3")
    groups = np.arange(20) % 5
    for i in range(2):
        for k in range(4):
            alone = neula.lstsq(batch[i], right[:, k], intercept=True, weights=W[:20])
            np.testing.assert_allclose(covariance[i, k], alone.covariance(robust="HC3"), rtol=1e-10)
            np.testing.assert_allclose(errors[i, :, k], alone.standard_errors(robust="HC3"), rtol=1e-10)
            np.testing.assert_allclose(
                result.p_values(groups=groups)[i, :, k], alone.p_values(groups=groups), rtol=1e-10
            )
            assert result.r_squared[i, k] == pytest.approx(alone.r_squared, rel=1e-12)
            np.testing.assert_allclose(result.residuals[i, :, k], alone.residuals, atol=1e-13)
    np.testing.assert_allclose(result.predict(batch), right - result.residuals, atol=1e-13)


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


def test_gradients_of_predictions() -> None:
    a, new = (torch.tensor(x, requires_grad=True) for x in (A[:8], A[8:12]))
    b = torch.tensor(B[:8])
    for right in (b, torch.stack([b, 2 * b], 1)):
        assert torch.autograd.gradcheck(
            lambda a, new, right=right: neula.lstsq(a, right, intercept=True).predict(new), (a, new)
        )
    result = neula.lstsq(a, b)
    found = result.predict(A)
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, A @ result.x.detach().numpy(), rtol=1e-13)


def test_gradients_with_an_intercept() -> None:
    a, s = (torch.tensor(x, requires_grad=True) for x in (A[:8], 1 / W[:8]))
    b = torch.tensor(B[:8])
    assert torch.autograd.gradcheck(
        lambda a, s: neula.lstsq(a, b, intercept=True, damp=1.0, sigma=s).x, (a, s), fast_mode=True
    )


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
    result = neula.lstsq(A, B)
    with pytest.raises(ValueError, match="unknown robust 'HC4'"):
        result.covariance(robust="HC4")
    with pytest.raises(ValueError, match="exclude one another"):
        result.covariance(robust="HC1", absolute=True)
    with pytest.raises(ValueError, match="groups must have shape"):
        result.covariance(groups=[1, 2])
    with pytest.raises(ValueError, match="two different labels"):
        result.covariance(groups=np.ones(40))
    alone = np.column_stack([A, np.arange(40) == 3])
    with pytest.raises(ValueError, match="row 3 has leverage 1"):
        neula.lstsq(alone, B).standard_errors(robust="HC3")
    assert np.isfinite(neula.lstsq(alone, B).standard_errors(robust="HC1")).all()
    fit = neula.LeastSquares(3)
    fit.update(A, B)
    with pytest.raises(ValueError, match=r"A"):
        _ = fit.solve().r_squared


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


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
def test_columns_of_very_different_sizes(scale: float) -> None:
    expected = sm.OLS(B, sm.add_constant(A)).fit()
    result = neula.lstsq(A * scale, B, intercept=True)
    np.testing.assert_allclose(result.standard_errors()[1:] * scale, expected.bse[1:], rtol=1e-12)
    np.testing.assert_allclose(result.t_values(), expected.tvalues, rtol=1e-9)


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
