"""The estimators are scikit-learn's, but for the answers, which are certified."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

import neula

pytest.importorskip("sklearn")

from sklearn import decomposition, linear_model
from sklearn.utils.estimator_checks import parametrize_with_checks

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
    for wanted in (5, "mle", 1.5):
        with pytest.raises(ValueError, match="n_components"):
            PCA(wanted).fit(X)


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
    with pytest.raises(ValueError, match="expecting 5 features"):
        model.transform(X[:, :3])
    with pytest.raises(ValueError, match="NaN"):
        Ridge().fit(X * torch.nan, y)
    with pytest.raises(ValueError, match="60 samples and y 59"):
        Ridge().fit(X, y[:-1])
    with pytest.raises(ValueError, match="two dimensions"):
        Ridge().fit(y, y)
    with pytest.raises(ValueError, match="requires y"):
        Ridge().fit(X, None)
    with pytest.raises(ValueError, match="Negative values"):
        Ridge().fit(X, y, -w)


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
