"""Linear models: scikit-learn's parameters, attributes and meaning of ``sample_weight``."""

from __future__ import annotations

from numbers import Real
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn import linear_model
from sklearn.model_selection import GridSearchCV

import neula
from neula.certificates.bounds import Accuracy
from neula.compat.sklearn.data import Data, Dense, like_fitted, rows_times

EXTRA: dict[str, Any] = {"accuracy": "no_validation", "engine": "no_validation"}
"""What neula adds to scikit-learn's parameters, and checks itself."""


class _Linear(Dense):
    """What linear models share: how coefficients are kept, and tensors predicted."""

    accuracy: Accuracy | None
    engine: Any
    _flat = False
    """Whether coefficients of a single target in a matrix are a vector."""

    def _keep(self, data: Data, coefficients: torch.Tensor, result: Any) -> Self:
        """Set the attributes, by solutions of shape (n,) or (n, k)."""
        assert data.y_mean is not None
        intercept = data.y_mean - data.x_mean @ coefficients
        coefficients = coefficients.T.contiguous() if coefficients.ndim > 1 else coefficients
        if self._flat and coefficients.ndim > 1 and len(coefficients) == 1:
            coefficients = coefficients[0]
        self.coef_ = data.given(coefficients)
        self.intercept_ = data.given(intercept) if self.fit_intercept else 0.0
        self.result_ = result
        return self

    def _how(self, data: Data) -> dict[str, Any]:
        """Accuracy and engine: by default those of the data."""
        return {"accuracy": data.dtype if self.accuracy is None else self.accuracy, "engine": self.engine}

    def predict(self, X: Any) -> Any:
        """Predictions: tensors for tensors, if it was fitted with tensors.

        Parameters
        ----------
        X : array_like, shape (samples, features)

        Returns
        -------
        array, shape (samples,) or (samples, targets)
        """
        x = like_fitted(self, X, "coef_")
        if x is None:
            return super().predict(X)
        coefficients = self.coef_ if self.coef_.ndim == 1 else self.coef_.T
        return x.to(self.coef_.dtype) @ coefficients + self.intercept_


class LinearRegression(_Linear, linear_model.LinearRegression):
    """Least squares by :func:`neula.lstsq`, with scikit-learn's parameters.

    Parameters
    ----------
    fit_intercept, copy_X, tol, n_jobs : optional
        As for ``sklearn.linear_model.LinearRegression``; nothing is overwritten, and ``tol`` and ``n_jobs``
        change nothing.
    positive : bool, optional
        Coefficients that are not negative, by :func:`neula.nnls`.
    accuracy, engine : optional
        As for :func:`neula.lstsq`. By default the accuracy is that of X.

    Attributes
    ----------
    coef_, intercept_, rank_, n_features_in_, feature_names_in_
        scikit-learn's.
    result_ : LstsqResult or NNLSResult
        The evidence, of the problem with means subtracted: ``result_.digits``, ``result_.standard_errors()``.

    Examples
    --------
    >>> import numpy as np
    >>> from neula.sklearn import LinearRegression
    >>> X = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 3.0], [3.0, 1.0]])
    >>> model = LinearRegression().fit(X, X @ [1.0, 2.0] + 3.0)
    >>> model.coef_.round(12), round(float(model.intercept_), 12), model.result_.converged
    (array([1., 2.]), 3.0, True)
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **linear_model.LinearRegression._parameter_constraints,
        **EXTRA,
    }

    def __init__(
        self,
        *,
        fit_intercept: bool = True,
        copy_X: bool = True,
        tol: float = 1e-6,
        n_jobs: int | None = None,
        positive: bool = False,
        accuracy: Accuracy | None = None,
        engine: str = "auto",
    ) -> None:
        super().__init__(
            fit_intercept=fit_intercept, copy_X=copy_X, tol=tol, n_jobs=n_jobs, positive=positive
        )
        self.accuracy = accuracy
        self.engine = engine

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit.

        Parameters
        ----------
        X : array_like, shape (samples, features)
        y : array_like, shape (samples,) or (samples, targets)
        sample_weight : array_like, shape (samples,), optional
            Of squares, so that 2 counts a row twice.
        """
        self._validate_params()
        data = Data.of(self, X, y, sample_weight, centred=self.fit_intercept)
        if self.positive:
            result: Any = neula.nnls(*data.weighted, **self._how(data))
        else:
            result = neula.lstsq(data.x, data.y, weights=data.weights, **self._how(data))
            self.rank_ = result.rank
        return self._keep(data, result.x, result)


class NonNegativeLeastSquares(LinearRegression):
    """Least squares with coefficients that are not negative, by :func:`neula.nnls`.

    Parameters
    ----------
    fit_intercept : bool, optional
        Not by default. An intercept may have any sign.
    accuracy, engine : optional
        As for :func:`neula.nnls`.

    Attributes
    ----------
    coef_, intercept_, n_features_in_, feature_names_in_
        scikit-learn's.
    result_ : NNLSResult
        The evidence.

    Examples
    --------
    >>> import numpy as np
    >>> from neula.sklearn import NonNegativeLeastSquares
    >>> X = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> NonNegativeLeastSquares().fit(X, [2.0, 1.0, -1.0]).coef_.round(12)
    array([1.5, 0. ])
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {"fit_intercept": ["boolean"], **EXTRA}

    def __init__(
        self, *, fit_intercept: bool = False, accuracy: Accuracy | None = None, engine: str = "auto"
    ) -> None:
        self.fit_intercept = fit_intercept
        self.accuracy = accuracy
        self.engine = engine

    positive = True


class Ridge(_Linear, linear_model.Ridge):
    """Ridge regression by :func:`neula.lstsq` with damping, with scikit-learn's parameters.

    Parameters
    ----------
    alpha : float or array_like, shape (targets,), optional
        The square of the damping.
    fit_intercept, copy_X, max_iter, tol, solver, random_state : optional
        As for ``sklearn.linear_model.Ridge``; all but the first are accepted and change nothing.
    positive : bool, optional
        Coefficients that are not negative, by :func:`neula.nnls`.
    accuracy, engine : optional
        As for :func:`neula.lstsq`. By default the accuracy is that of X.

    Attributes
    ----------
    coef_, intercept_, n_features_in_, feature_names_in_
        scikit-learn's.
    result_ : LstsqResult, NNLSResult or tuple of them
        The evidence; a tuple with penalties of their own for some targets.

    Examples
    --------
    >>> import numpy as np
    >>> from neula.sklearn import Ridge
    >>> Ridge(alpha=1.0).fit(np.array([[0.0], [1.0], [2.0]]), [0.0, 1.0, 2.0]).coef_.round(6)
    array([0.666667])
    """

    _flat = True
    _parameter_constraints: ClassVar[dict[str, Any]] = {**linear_model.Ridge._parameter_constraints, **EXTRA}

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        fit_intercept: bool = True,
        copy_X: bool = True,
        max_iter: int | None = None,
        tol: float = 1e-4,
        solver: str = "auto",
        positive: bool = False,
        random_state: Any = None,
        accuracy: Accuracy | None = None,
        engine: str = "auto",
    ) -> None:
        super().__init__(
            alpha=alpha,
            fit_intercept=fit_intercept,
            copy_X=copy_X,
            max_iter=max_iter,
            tol=tol,
            solver=solver,
            positive=positive,
            random_state=random_state,
        )
        self.accuracy = accuracy
        self.engine = engine

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit.

        Parameters
        ----------
        X : array_like, shape (samples, features)
        y : array_like, shape (samples,) or (samples, targets)
        sample_weight : float or array_like, shape (samples,), optional
            Of squares, so that 2 counts a row twice.
        """
        self._validate_params()
        data = Data.of(self, X, y, sample_weight, centred=self.fit_intercept)
        assert data.y is not None
        if isinstance(self.alpha, Real):
            result = self._solve(data, data.y, float(self.alpha))
            self.n_iter_ = max(1, result.iterations)
            return self._keep(data, result.x, result)
        alphas = np.asarray(self.alpha, dtype=float).ravel()
        targets = data.y[:, None] if data.y.ndim == 1 else data.y
        if len(alphas) not in (1, targets.shape[1]):
            raise ValueError(
                "Number of targets and number of penalties do not correspond: "
                f"{targets.shape[1]} != {len(alphas)}"
            )
        alphas = np.broadcast_to(alphas, targets.shape[1])
        results = tuple(self._solve(data, targets[:, i], a) for i, a in enumerate(alphas.tolist()))
        self.n_iter_ = np.array([max(1, result.iterations) for result in results])
        coefficients = torch.stack([result.x for result in results], 1)
        return self._keep(data, coefficients[:, 0] if data.y.ndim == 1 else coefficients, results)

    def _solve(self, data: Data, y: torch.Tensor, alpha: float) -> Any:
        if not self.positive:
            return neula.lstsq(data.x, y, damp=alpha**0.5, weights=data.weights, **self._how(data))
        w = torch.ones_like(data.x[:, 0]) if data.weights is None else data.weights
        n = data.x.shape[1]
        penalty = alpha**0.5 * torch.eye(n, dtype=data.x.dtype, device=data.x.device)
        stacked = torch.cat([w[:, None] * data.x, penalty])
        target = torch.cat([rows_times(w, y), y.new_zeros(n, *y.shape[1:])])
        return neula.nnls(stacked, target, **self._how(data))


class RidgeCV(_Linear, linear_model.RidgeCV):
    """Ridge regression with the penalty chosen by leaving one out, by :func:`neula.ridge_path`.

    Parameters
    ----------
    alphas : array_like, shape (p,), optional
        Positive; squares of dampings.
    fit_intercept, scoring, cv, store_cv_results, alpha_per_target : optional
        As for ``sklearn.linear_model.RidgeCV``. With ``scoring`` or ``cv`` a grid search is made.
    gcv_mode : optional
        Accepted; there is one way.
    accuracy, engine : optional
        As for :func:`neula.ridge_path`. By default the accuracy is that of X.

    Attributes
    ----------
    coef_, intercept_, alpha_, best_score_, cv_results_, n_features_in_, feature_names_in_
        scikit-learn's; ``best_score_`` is the negative mean square of the errors of prediction.
    result_ : RidgePath or Ridge's
        The evidence.

    Examples
    --------
    >>> import numpy as np
    >>> from neula.sklearn import RidgeCV
    >>> X = np.vander(np.linspace(0, 1, 30), 10)
    >>> bool(RidgeCV(np.logspace(-8, 2, 40)).fit(X, np.sin(5 * X[:, -2])).alpha_ < 1e-3)
    True
    """

    _flat = True
    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **linear_model.RidgeCV._parameter_constraints,
        **EXTRA,
    }

    def __init__(
        self,
        alphas: Any = (0.1, 1.0, 10.0),
        *,
        fit_intercept: bool = True,
        scoring: Any = None,
        cv: Any = None,
        gcv_mode: str | None = None,
        store_cv_results: bool = False,
        alpha_per_target: bool = False,
        accuracy: Accuracy | None = None,
        engine: str = "auto",
    ) -> None:
        super().__init__(
            alphas=alphas,
            fit_intercept=fit_intercept,
            scoring=scoring,
            cv=cv,
            gcv_mode=gcv_mode,
            store_cv_results=store_cv_results,
            alpha_per_target=alpha_per_target,
        )
        self.accuracy = accuracy
        self.engine = engine

    def fit(self, X: Any, y: Any, sample_weight: Any = None, **params: Any) -> Self:
        """Fit.

        Parameters
        ----------
        X : array_like, shape (samples, features)
        y : array_like, shape (samples,) or (samples, targets)
        sample_weight : array_like, shape (samples,), optional
            Of squares, so that 2 counts a row twice.
        **params
            For a grid search.
        """
        self._validate_params()
        alphas = np.atleast_1d(np.asarray(self.alphas, dtype=float))
        if not (alphas > 0).all():
            raise ValueError(f"alphas must be positive, got {alphas.min()}")
        if self.cv is not None or self.scoring is not None:
            return self._search(X, y, sample_weight, alphas, params)
        data = Data.of(self, X, y, sample_weight, centred=self.fit_intercept)
        path = neula.ridge_path(
            *data.weighted, np.sqrt(alphas), leverage=self._leverage(data), **self._how(data)
        )
        errors, solutions = path.leave_one_out, path.x
        if errors.ndim > 1 and not self.alpha_per_target:
            errors = errors.mean(1)
        best = errors.argmin(0)
        if best.ndim:
            columns = torch.arange(len(best), device=best.device)
            coefficients, score = solutions[best, :, columns].mT, -errors[best, columns]
        else:
            coefficients, score = solutions[best], -errors[best]
        self.alpha_ = alphas[best.cpu().numpy()] if best.ndim else float(alphas[int(best)])
        self.best_score_ = score.cpu().numpy() if score.ndim else float(score)
        if self.store_cv_results:
            self.cv_results_ = data.given(path.squared_errors.movedim(0, -1))
        return self._keep(data, coefficients, path)

    def _leverage(self, data: Data) -> Any:
        """Leverages of the intercept."""
        if not self.fit_intercept:
            return 0.0
        w = torch.ones_like(data.x[:, 0]) if data.weights is None else data.weights.square()
        return w / w.sum()

    def _search(self, X: Any, y: Any, sample_weight: Any, alphas: np.ndarray, params: dict[str, Any]) -> Self:
        if self.store_cv_results or self.alpha_per_target:
            raise ValueError("cv!=None and store_cv_results=True, or alpha_per_target=True, are incompatible")
        ridge = Ridge(fit_intercept=self.fit_intercept, accuracy=self.accuracy, engine=self.engine)
        search = GridSearchCV(ridge, {"alpha": alphas}, cv=self.cv, scoring=self.scoring)
        weights = {} if sample_weight is None else {"sample_weight": sample_weight}
        search.fit(X, y, **weights, **params)
        found = search.best_estimator_
        self.alpha_, self.best_score_ = found.alpha, search.best_score_
        for name in ("coef_", "intercept_", "result_", "n_features_in_", "feature_names_in_"):
            if hasattr(found, name):
                setattr(self, name, getattr(found, name))
        return self
