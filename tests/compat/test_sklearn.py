"""The estimators are scikit-learn's, but for the answers, which are certified."""

from __future__ import annotations

import itertools
import pickle
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch

import neula

pytest.importorskip("sklearn")

from sklearn import decomposition, linear_model
from sklearn.base import clone
from sklearn.utils.estimator_checks import parametrize_with_checks

from neula.pipeline.result.shown import Later
from neula.sklearn import PCA, LinearRegression, NonNegativeLeastSquares, Ridge, RidgeCV, TruncatedSVD

ESTIMATORS = [
    LinearRegression(),
    NonNegativeLeastSquares(),
    Ridge(),
    RidgeCV(),
    TruncatedSVD(n_components=1),
    PCA(),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@parametrize_with_checks(ESTIMATORS)
def test_as_scikit_learn_wants_them(estimator, check) -> None:
    check(estimator)


def data(m: int = 60, n: int = 5, targets: int = 0):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((m, n)) + np.arange(n)
    shape = (targets,) if targets else ()
    y = X @ rng.standard_normal((n, *shape)) + 0.3 * rng.standard_normal((m, *shape))
    return X, y, rng.random(m) + 0.1


PAIRS = [
    (LinearRegression(), linear_model.LinearRegression()),
    (LinearRegression(fit_intercept=False), linear_model.LinearRegression(fit_intercept=False)),
    (LinearRegression(positive=True), linear_model.LinearRegression(positive=True)),
    (Ridge(3.0), linear_model.Ridge(3.0)),
    (Ridge(0.5, fit_intercept=False), linear_model.Ridge(0.5, fit_intercept=False)),
    (RidgeCV([0.01, 1.0, 50.0]), linear_model.RidgeCV([0.01, 1.0, 50.0])),
    (RidgeCV([0.1, 5.0], fit_intercept=False), linear_model.RidgeCV([0.1, 5.0], fit_intercept=False)),
    (RidgeCV([0.1, 5.0], cv=3), linear_model.RidgeCV([0.1, 5.0], cv=3)),
    *(
        (RidgeCV([0.01, 9.0], scoring=name), linear_model.RidgeCV([0.01, 9.0], scoring=name))
        for name in ("neg_mean_absolute_error", "r2")
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda x: str(x))
@pytest.mark.parametrize("targets", [0, 1, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_linear_models(ours, theirs, targets, weighted) -> None:
    X, y, w = data(targets=targets)
    w = w if weighted else None
    ours.fit(X, y, sample_weight=w)
    theirs.fit(X, y, sample_weight=w)
    assert np.shape(ours.coef_) == np.shape(theirs.coef_)
    assert np.shape(ours.intercept_) == np.shape(theirs.intercept_)
    assert np.allclose(ours.coef_, theirs.coef_, atol=1e-8)
    assert np.allclose(ours.intercept_, theirs.intercept_, atol=1e-8)
    assert np.allclose(ours.predict(X), theirs.predict(X), atol=1e-7)
    assert ours.result_.converged
    if isinstance(ours, RidgeCV):
        assert ours.alpha_ == theirs.alpha_
        assert ours.best_score_ == pytest.approx(theirs.best_score_, rel=1e-6)


def test_penalties_of_each_target() -> None:
    X, y, w = data(targets=3)
    ours, theirs = (c([0.1, 1.0, 10.0]).fit(X, y, w) for c in (Ridge, linear_model.Ridge))
    assert np.allclose(ours.coef_, theirs.coef_)
    with pytest.raises(ValueError, match="do not correspond"):
        Ridge([0.1, 1.0]).fit(X, y)
    ours, theirs = (
        c([0.1, 10.0], alpha_per_target=True, store_cv_results=True).fit(X, y, w)
        for c in (RidgeCV, linear_model.RidgeCV)
    )
    assert np.array_equal(ours.alpha_, theirs.alpha_)
    assert np.allclose(ours.coef_, theirs.coef_)
    assert np.allclose(ours.cv_results_, theirs.cv_results_)
    scored = {"alpha_per_target": True, "store_cv_results": True, "scoring": "neg_median_absolute_error"}
    ours, theirs = (c([0.1, 10.0], **scored).fit(X, y, w) for c in (RidgeCV, linear_model.RidgeCV))
    assert np.array_equal(ours.alpha_, theirs.alpha_)
    assert np.allclose(ours.best_score_, theirs.best_score_)
    assert np.allclose(ours.cv_results_, theirs.cv_results_)
    with pytest.raises(ValueError, match="alphas must be positive"):
        RidgeCV([0.0, 1.0]).fit(X, y)
    with pytest.raises(ValueError, match="incompatible"):
        RidgeCV([1.0], cv=2, store_cv_results=True).fit(X, y)


def test_not_negative() -> None:
    X, y, w = data()
    model = NonNegativeLeastSquares().fit(X, -y)
    assert (model.coef_ >= 0).all()
    assert model.intercept_ == 0
    assert np.allclose(model.coef_, neula.nnls(X, -y).x)
    both = Ridge(2.0, positive=True).fit(X, y, w)
    assert np.allclose(
        both.coef_, linear_model.Ridge(2.0, positive=True, tol=1e-12).fit(X, y, w).coef_, atol=1e-5
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (TruncatedSVD(3), decomposition.TruncatedSVD(3, algorithm="arpack")),
        (PCA(3), decomposition.PCA(3, svd_solver="full")),
        (PCA(), decomposition.PCA(svd_solver="full")),
        (PCA(0.8), decomposition.PCA(0.8, svd_solver="full")),
        (PCA(2, whiten=True), decomposition.PCA(2, whiten=True, svd_solver="full")),
    ],
    ids=str,
)
def test_decompositions(ours, theirs) -> None:
    X = data(m=50, n=6)[0] * np.linspace(1, 3, 6)
    scores, expected = ours.fit_transform(X), theirs.fit_transform(X)
    for name in ("explained_variance_", "explained_variance_ratio_", "singular_values_"):
        assert np.allclose(getattr(ours, name), getattr(theirs, name))
    signs = np.sign(np.sum(ours.components_ * theirs.components_, axis=1))
    assert np.allclose(ours.components_, signs[:, None] * theirs.components_, atol=1e-7)
    assert np.allclose(scores, expected * signs, atol=1e-6)
    assert np.allclose(ours.inverse_transform(scores), theirs.inverse_transform(expected), atol=1e-6)
    if isinstance(ours, PCA):
        assert ours.n_components_ == theirs.n_components_
        assert ours.noise_variance_ == pytest.approx(theirs.noise_variance_, abs=1e-12)
        assert np.allclose(ours.get_covariance(), theirs.get_covariance())


def test_components_that_cannot_be_had() -> None:
    X = data(m=20, n=4)[0]
    with pytest.raises(ValueError, match="must be <= n_features"):
        TruncatedSVD(5).fit(X)
    for wanted in (5, 1.5):
        with pytest.raises(ValueError, match="n_components"):
            PCA(wanted).fit(X)
    with pytest.raises(ValueError, match="only supported if n_samples >= n_features"):
        PCA("mle").fit(X.T)


@pytest.mark.parametrize("noise", [0.01, 0.5, 3.0])
def test_how_many_components_are_likely(noise) -> None:
    """Minka's estimate, as scikit-learn has it, for tensors as well."""
    rng = np.random.default_rng(3)
    X = rng.standard_normal((80, 3)) @ rng.standard_normal((3, 9)) + noise * rng.standard_normal((80, 9))
    ours, theirs = PCA("mle").fit(X), decomposition.PCA("mle").fit(X)
    assert ours.n_components_ == theirs.n_components_
    assert np.allclose(ours.explained_variance_, theirs.explained_variance_)
    assert ours.noise_variance_ == pytest.approx(theirs.noise_variance_)
    assert PCA("mle").fit(torch.from_numpy(X)).n_components_ == theirs.n_components_


def test_components_of_equal_variance() -> None:
    """And of none at all: the estimate stays a number of components."""
    for X in (np.repeat(np.eye(4), 5, 0), np.zeros((9, 3)), np.ones((6, 1)), np.eye(2)):
        assert 0 <= PCA("mle").fit(X).n_components_ <= X.shape[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors(dtype) -> None:
    X, y, w = (torch.from_numpy(x).to(dtype) for x in data())
    for model in (LinearRegression(), NonNegativeLeastSquares(), Ridge(), RidgeCV()):
        model.fit(X, y, sample_weight=w)
        plain = type(model)(**model.get_params()).fit(X.numpy(), y.numpy(), sample_weight=w.numpy())
        assert isinstance(model.coef_, torch.Tensor)
        assert model.coef_.dtype == dtype
        assert np.allclose(model.coef_.numpy(), plain.coef_, rtol=1e-5)
        found = model.predict(X)
        assert isinstance(found, torch.Tensor)
        assert np.allclose(found.numpy(), plain.predict(X.numpy()), rtol=1e-4)
    for model in (TruncatedSVD(2), PCA(2, whiten=True)):
        found = model.fit_transform(X)
        assert found.dtype == dtype
        assert np.allclose(
            found.numpy(), type(model)(**model.get_params()).fit_transform(X.numpy()), atol=1e-3
        )
        again = model.inverse_transform(found)
        assert isinstance(again, torch.Tensor)
        plain = type(model)(**model.get_params()).fit(X.numpy())
        expected = plain.inverse_transform(plain.transform(X.numpy()))
        assert np.allclose(again.numpy(), expected, atol=1e-3)
    for name, samples in (
        ("get_covariance", ()),
        ("get_precision", ()),
        ("score_samples", (X,)),
        ("score", (X,)),
    ):
        scikit = decomposition.PCA(2, whiten=True, svd_solver="full").fit(X.double().numpy())
        expected = getattr(scikit, name)(*(x.double().numpy() for x in samples))
        got = getattr(model, name)(*samples)
        assert isinstance(got, float if name == "score" else torch.Tensor)
        assert np.allclose(got, expected, rtol=1e-3)
    for call in (model.transform, model.inverse_transform, model.score, Ridge().fit(X, y).predict):
        with pytest.raises(TypeError, match=r"X is of type ndarray, and .* was fitted with tensors"):
            call(X.numpy())
    for message, function, given in [
        ("expecting 5 features", model.transform, (X[:, :3],)),
        ("NaN", Ridge().fit, (X * torch.nan, y)),
        ("60 samples and y 59", Ridge().fit, (X, y[:-1])),
        ("two dimensions", Ridge().fit, (y, y)),
        ("requires y", Ridge().fit, (X, None)),
        ("Negative values", Ridge().fit, (X, y, -w)),
    ]:
        with pytest.raises(ValueError, match=message):
            function(*given)
    for model in (LinearRegression(), Ridge()):
        expected = clone(model).fit(X, y, w)
        for some in (slice(0, 7), slice(7, None)):
            model.partial_fit(X[some], y[some], w[some])
        assert model.coef_.dtype == dtype
        assert torch.allclose(model.coef_, expected.coef_, rtol=1e-5)


def test_feature_names_pickling_and_evidence() -> None:
    pandas = pytest.importorskip("pandas")
    X, y, _ = data()
    frame = pandas.DataFrame(X, columns=list("abcde"))
    model = LinearRegression().fit(frame, y)
    assert model.feature_names_in_.tolist() == list("abcde")
    assert model.n_features_in_ == 5
    assert model.result_.digits > 12
    assert model.result_.standard_errors().shape == (5,)
    again = pickle.loads(pickle.dumps(model))
    assert np.array_equal(again.predict(frame), model.predict(frame))
    with pytest.raises(ValueError, match="unknown accuracy 'fp65'"):
        LinearRegression(accuracy="fp65").fit(X, y)


@pytest.mark.parametrize(
    "model",
    [
        LinearRegression(),
        LinearRegression(fit_intercept=False),
        Ridge(3.0),
        Ridge(0.5, fit_intercept=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("targets", [0, 1, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")  # three rows determine nothing
def test_rows_in_parts(model, targets, weighted) -> None:
    """However they are cut, even into parts of fewer rows than columns, and begun by ``fit``."""
    X, y, w = data(targets=targets)
    X = X * 10.0 ** np.arange(-2, 3) + 1e3  # means that are far larger than the deviations
    expected = clone(model).fit(X, y, sample_weight=w if weighted else None)
    begun = clone(model).fit(X[:20], y[:20], sample_weight=w[:20] if weighted else None)
    for parts, cuts in ((clone(model), [0, 3, 4, 20, 60]), (begun, [20, 21, 60])):
        for start, stop in itertools.pairwise(cuts):
            some = slice(start, stop)
            parts.partial_fit(X[some], y[some], sample_weight=w[some] if weighted else None)
        assert np.shape(parts.coef_) == np.shape(expected.coef_)
        assert np.shape(parts.intercept_) == np.shape(expected.intercept_)
        # Both are right to their forward errors, in the norms of the columns.
        sizes = X.std(0) if model.fit_intercept else np.linalg.norm(X, axis=0)
        wrong = np.linalg.norm(np.atleast_2d((parts.coef_ - expected.coef_) * sizes), axis=1)
        size = np.linalg.norm(np.atleast_2d(expected.coef_ * sizes), axis=1)
        error = parts.result_.forward_error + expected.result_.forward_error
        assert (wrong <= (10 * error + 1e-13) * size).all()
        assert np.allclose(parts.predict(X), expected.predict(X), rtol=1e-9)
        assert parts.result_.converged
        again = pickle.loads(pickle.dumps(parts)).partial_fit(X[:1], y[:1])
        assert np.isfinite(again.coef_).all()


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_standard_errors_count_the_intercept(intercept, weighted) -> None:
    """However many parts there are, each of which adds a row for its mean."""
    sm = pytest.importorskip("statsmodels.api")
    X, y, w = data()
    expected = sm.WLS(y, sm.add_constant(X) if intercept else X, weights=w if weighted else 1.0).fit()
    given = w if weighted else None
    models = [
        kind(fit_intercept=intercept).fit(X, y, given) for kind in (LinearRegression, partial(Ridge, 0.0))
    ]
    for size in (1, 7, len(y)):
        parts = LinearRegression(fit_intercept=intercept)
        for rows in (slice(k, k + size) for k in range(0, len(y), size)):
            parts.partial_fit(X[rows], y[rows], None if given is None else given[rows])
        models += [parts, pickle.loads(pickle.dumps(parts))]
    for model in models:
        result = model.result_
        assert result.degrees_of_freedom == expected.df_resid
        assert np.isclose(result.effective_degrees_of_freedom, X.shape[1] + intercept)
        assert np.allclose(result.standard_errors(), expected.bse[intercept:], rtol=1e-10)
        assert np.allclose(result.confidence_intervals(), expected.conf_int()[intercept:], rtol=1e-9)
    for model in models[:2]:
        errors = expected.get_robustcov_results("HC3").bse[intercept:]
        assert np.allclose(model.result_.standard_errors(robust="HC3"), errors, rtol=1e-9)
        hat = np.square(np.linalg.qr(expected.model.wexog)[0]).sum(1)
        assert np.allclose(model.result_.leverage(), hat, rtol=1e-10)
    assert np.isclose(models[0].result_.aic, expected.aic, rtol=1e-10)


@pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")  # a difference of rounding errors has no rank
def test_parts_of_few_rows() -> None:
    """The shortest solution, as of the same rows at once."""
    X, y, _ = data()
    for model in (LinearRegression(), Ridge(1e-3)):
        parts = clone(model).partial_fit(X[:2], y[:2]).partial_fit(X[2:3], y[2:3])
        assert np.allclose(parts.coef_, clone(model).fit(X[:3], y[:3]).coef_)
    assert np.array_equal(LinearRegression().partial_fit(X[:1], y[:1]).coef_, np.zeros(5))
    both = Ridge([0.1, 1.0]), Ridge([0.1, 1.0]).fit(X, np.stack([y, -y], 1))
    for some in (slice(0, 7), slice(7, None)):
        both[0].partial_fit(X[some], np.stack([y, -y], 1)[some])
    assert np.allclose(both[0].coef_, both[1].coef_)
    assert len(both[0].result_) == 2


def test_rows_that_cannot_be_added() -> None:
    X, y, _ = data()
    assert not hasattr(NonNegativeLeastSquares(), "partial_fit")
    assert not hasattr(Ridge(positive=True), "partial_fit")
    model = LinearRegression().partial_fit(X, y)
    before, refused = model.coef_.copy(), pickle.loads(pickle.dumps(LinearRegression().fit(X, y)))
    for fitted, rows, right, message in [
        (model, X, np.stack([y, y], 1), "b was a vector before"),
        *(
            (model, bad, y[: len(bad)], "expecting 5 features")
            for bad in (X[:, :3], torch.from_numpy(X[:, :3]))
        ),
        *((model, np.full_like(X, bad), y, "NaN|infinity") for bad in (np.nan, np.inf)),
        (model, X[:0], y[:0], "sample"),
        (model, np.full(X.shape, "a"), y, "could not convert"),
        (model, X, y[:-1], "inconsistent"),
        (refused, X, y, "keeps no rows"),
        (Ridge().partial_fit(X, y).set_params(alpha=-1.0), X, y, "'alpha' parameter"),
    ]:
        with pytest.raises(ValueError, match=message):
            fitted.partial_fit(rows, right)
    assert np.array_equal(model.coef_, before)


@pytest.mark.parametrize("weights", [None, 2.0, "some"])
def test_constant_columns_get_no_coefficient(weights) -> None:
    """Deviations that are only rounding errors are not data, however they compare with other columns."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        m = int(rng.integers(5, 30))
        X, y = rng.standard_normal((m, 3)), rng.standard_normal(m)
        X[:, 1] = rng.standard_normal()
        given = rng.random(m) if weights == "some" else weights
        fit = LinearRegression().fit(X, y, sample_weight=given)
        assert fit.coef_[1] == 0
        assert fit.rank_ == 2
        constant = LinearRegression().fit(X, np.full(m, 0.1), sample_weight=given)
        assert not constant.coef_.any()
        assert constant.score(X, np.full(m, 0.1)) == 1


@pytest.mark.parametrize("weighted", [False, True])
def test_means_do_not_add_a_dimension_to_wide_data(weighted: bool) -> None:
    """The shortest solution is that of exact deviations, whose rank is below the number of rows."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        m, n = int(rng.integers(2, 8)), int(rng.integers(8, 16))
        X, y = rng.integers(-9, 10, (m, n)) + 2.0**30 / 3, rng.standard_normal(m)
        w = rng.integers(1, 4, m) if weighted else np.ones(m, dtype=int)
        fit = LinearRegression().fit(X, y, sample_weight=w if weighted else None)
        near = [[Fraction(v) - Fraction(2.0**30 / 3) for v in row] for row in X.tolist()]
        means = [
            sum(int(c) * v for c, v in zip(w, column, strict=True)) / int(w.sum())
            for column in zip(*near, strict=True)
        ]
        exact = np.array([[float(v - mean) for v, mean in zip(row, means, strict=True)] for row in near])
        root = np.sqrt(w)
        expected = np.linalg.pinv(root[:, None] * exact, rcond=1e-10) @ (
            root * (y - np.average(y, weights=w))
        )
        assert fit.rank_ == np.linalg.matrix_rank(exact, 1e-9)
        np.testing.assert_allclose(fit.coef_, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


def test_evidence_is_made_when_somebody_reads_it() -> None:
    X, y, _ = data()
    for model in (RidgeCV([0.1, 3.0]).fit(X, y), PCA(1).fit(X), TruncatedSVD(1).fit(X)):
        assert isinstance(vars(model)["result_"], Later)
        assert pickle.loads(pickle.dumps(model)).result_.converged
        assert model.result_.converged
    assert not hasattr(PCA(), "result_")


@pytest.mark.parametrize("scale", [1.0, 1e-7])
def test_what_eigenvectors_leave_without_digits(scale: float) -> None:
    """Of columns in small units, with tiny penalties, the Gram matrix knows nothing."""
    X, y, _ = data()
    X = X * np.geomspace(1, scale, X.shape[1])
    model = RidgeCV([1e-16, 1e-15], fit_intercept=False).fit(X, y)
    assert isinstance(vars(model)["result_"], Later) == (scale == 1.0)
    exact = Ridge(model.alpha_, fit_intercept=False).fit(X, y).coef_
    error = np.linalg.norm((model.coef_ - exact) * np.linalg.norm(X, axis=0))
    assert error <= 1e-8 * np.linalg.norm(X @ exact)


@pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")
def test_scores_of_what_has_no_digit() -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((40, 5))
    y = X[:, 0] + rng.standard_normal(40)
    X = np.column_stack([X, X[:, 0]])
    assert RidgeCV([1e-34, 1e-12, 1.0], scoring="r2").fit(X, y).alpha_ == 1.0
    model = RidgeCV([1e-34, 1e-12, 1.0], scoring="r2", alpha_per_target=True).fit(X, np.stack([y, -y], 1))
    assert np.array_equal(model.alpha_, [1.0, 1.0])


@pytest.mark.parametrize("shape", [(60, 20), (20, 60), (60, 5)])
def test_triplets_of_equal_singular_values(shape: tuple[int, int]) -> None:
    """The last one that is wanted is as large as the next: their space is not unique."""
    q = np.linalg.qr(np.random.default_rng(3).standard_normal((60, min(shape))))[0]
    model = TruncatedSVD(2).fit(3 * q if shape[0] > shape[1] else 3 * q.T)
    assert np.allclose(model.singular_values_, 3.0, rtol=1e-13)
    assert model.result_.converged
