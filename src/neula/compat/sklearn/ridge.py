"""Ridge regression: scikit-learn's parameters, attributes and meaning of ``sample_weight``."""

from __future__ import annotations

from functools import partial
from numbers import Real
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from sklearn import linear_model
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.metrics import check_scoring
from sklearn.model_selection import GridSearchCV
from sklearn.utils.metaestimators import available_if

import neula
from neula.compat.sklearn.base import Linear, Seen, counted, of_any_sign
from neula.compat.sklearn.data import TrainingData, rows_times, with_accuracy
from neula.engines import FP64
from neula.pipeline.result.shown import Later


@with_accuracy
class Ridge(Linear, linear_model.Ridge):
    """Ridge regression by :func:`neula.lstsq` with damping, with scikit-learn's parameters.

    Parameters
    ----------
    alpha : float or array_like, shape (targets,), optional
        The square of the damping.
    fit_intercept, copy_X, max_iter, tol, solver, random_state : optional
        As for ``sklearn.linear_model.Ridge``; all except the first are accepted and change nothing.
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

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit rows of X to y; weights are those of squares, so that 2 counts a row twice."""
        self._validate_params()
        data = TrainingData.from_arrays(self, X, y, sample_weight, centred=self.fit_intercept)
        assert data.y is not None
        alphas = self._penalties(data)
        if alphas is None:
            result = self._solve(data, data.y, float(self.alpha))
            return self._counted(data, result.x, result)
        targets = data.y[:, None] if data.y.ndim == 1 else data.y
        results = tuple(self._solve(data, targets[:, i], alpha) for i, alpha in enumerate(alphas))
        coefficients = torch.stack([result.x for result in results], 1)
        return self._counted(data, coefficients[:, 0] if data.y.ndim == 1 else coefficients, results)

    @available_if(of_any_sign)
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Take more rows: the fit is then that of all rows so far, which are not kept.

        See :meth:`LinearRegression.partial_fit <neula.sklearn.LinearRegression.partial_fit>`.
        """
        data, seen = self._more(X, y, sample_weight)
        alphas = self._penalties(data)
        asked = (float(self.alpha) if alphas is None else alphas), self._how(data)
        return self._solve_later(seen, partial(self._solve_seen, data, seen, *asked))

    def _solve_seen(
        self, data: TrainingData, seen: Seen, alphas: float | list[float], how: dict[str, Any]
    ) -> Self:
        if isinstance(alphas, float):
            result = seen.solve(alphas**0.5, **how)
            return self._counted(data, result.x, result, seen)
        results = tuple(seen.solve(alpha**0.5, **how) for alpha in alphas)
        columns = [result.x.reshape(len(result.x), -1)[:, i] for i, result in enumerate(results)]
        vector = seen.origin[1].ndim == 0
        return self._counted(data, columns[0] if vector else torch.stack(columns, 1), results, seen)

    def _counted(
        self, data: TrainingData, coefficients: torch.Tensor, found: Any, seen: Seen | None = None
    ) -> Self:
        """Set the attributes, with the numbers of iterations."""
        counts = [max(1, result.iterations) for result in (found if isinstance(found, tuple) else (found,))]
        self.n_iter_ = np.array(counts) if isinstance(found, tuple) else counts[0]
        return self._keep(data, coefficients, found, data if seen is None and not self.positive else seen)

    def _penalties(self, data: TrainingData) -> list[float] | None:
        """A penalty for each target; None if all targets have one penalty."""
        if isinstance(self.alpha, Real):
            return None
        assert data.y is not None
        targets = data.y.shape[1] if data.y.ndim > 1 else 1
        alphas = np.asarray(self.alpha, dtype=float).ravel()
        if len(alphas) not in (1, targets):
            raise ValueError(
                f"Number of targets and number of penalties do not correspond: {targets} != {len(alphas)}"
            )
        found: list[float] = np.broadcast_to(alphas, targets).tolist()
        return found

    def _solve(self, data: TrainingData, y: torch.Tensor, alpha: float) -> Any:
        if not self.positive:
            found = neula.lstsq(data.x, y, damp=alpha**0.5, weights=data.weights, **self._how(data))
            return counted(found, self.fit_intercept)
        w = torch.ones_like(data.x[:, 0]) if data.weights is None else data.weights
        n = data.x.shape[1]
        penalty = alpha**0.5 * torch.eye(n, dtype=data.x.dtype, device=data.x.device)
        stacked = torch.cat([w[:, None] * data.x, penalty])
        target = torch.cat([rows_times(w, y), y.new_zeros(n, *y.shape[1:])])
        return neula.nnls(stacked, target, **self._how(data))


class _QuickPath(NamedTuple):
    """Solutions for each penalty, with the fields of :class:`neula.RidgePath`."""

    x: torch.Tensor
    leave_one_out: torch.Tensor
    squared_errors: torch.Tensor


def _path_by_eigenvectors(data: TrainingData, alphas: np.ndarray, leverage: Any) -> _QuickPath | None:
    """A path by the eigenvectors of ``A^T A`` on a CPU; None if half of its digits are not certain.

    ``A^T A`` errs by at most ``(m + n) u ||A||_F^2``, and ``A^T b`` by ``(m + n) u ||A||_F ||b||``. Both are
    divided by the smallest eigenvalue plus penalty; the first also by the relative size of residuals, and by
    the smallest ``1 - h``, h being the leverages.
    """
    (a, y), (m, n) = data.weighted, data.x.shape
    if not (a.is_cpu and m > n > 0):
        return None
    b, penalties = y.reshape(m, -1), torch.from_numpy(alphas)
    squares, v = torch.linalg.eigh(a.mT @ a)
    z, filters = a @ v, 1 / (squares + penalties[:, None])
    x = filters[:, :, None] * (z.mT @ b)
    left, solutions = b - z @ x, v @ x
    rest = 1 - leverage - filters @ z.square().mT
    errors = (left / rest[:, :, None]).square()
    smallest, total = squares[0].clamp(min=0.0) + penalties[:, None], squares.sum()
    norm_x, norm_b, norm_left = (torch.linalg.vector_norm(c, dim=-2) for c in (x, b, left))
    magnified = 1 + norm_b / norm_left + 1 / rest.amin(1, keepdim=True).clamp(min=0.0)
    lost = (m + n) * FP64.u * (total * magnified + total.sqrt() * norm_b / norm_x) / smallest
    if not bool((lost <= FP64.u**0.5).all()):  # not for NaN
        return None
    return _QuickPath(*(c if y.ndim > 1 else c[..., 0] for c in (solutions, errors.mean(1), errors)))


class _Predictions(RegressorMixin, BaseEstimator):
    """Take X for the predictions that a scorer asks for."""

    def fit(self, X: Any, y: Any) -> Self:
        return self

    def predict(self, X: Any) -> Any:
        return X


@with_accuracy
class RidgeCV(Linear, linear_model.RidgeCV):
    """Ridge regression with the penalty chosen by leave-one-out errors, by :func:`neula.ridge_path`.

    On a CPU it is computed by eigenvectors of ``A^T A`` if that guarantees at least half of the digits.

    Parameters
    ----------
    alphas : array_like, shape (p,), optional
        Positive; squares of dampings.
    fit_intercept, scoring, cv, store_cv_results, alpha_per_target : optional
        As for ``sklearn.linear_model.RidgeCV``. With ``cv`` a grid search is made.
    gcv_mode : optional
        Accepted for compatibility; has no effect.
    accuracy, engine : optional
        As for :func:`neula.ridge_path`. By default the accuracy is that of X.

    Attributes
    ----------
    coef_, intercept_, alpha_, best_score_, cv_results_, n_features_in_, feature_names_in_
        scikit-learn's; without ``scoring`` ``best_score_`` is the negative mean square of the errors of
        prediction.
    result_ : RidgePath or Ridge's
        The evidence, computed when it is first read.

    Examples
    --------
    >>> import numpy as np
    >>> from neula.sklearn import RidgeCV
    >>> X = np.vander(np.linspace(0, 1, 30), 10)
    >>> bool(RidgeCV(np.logspace(-8, 2, 40)).fit(X, np.sin(5 * X[:, -2])).alpha_ < 1e-3)
    True
    """

    _flat = True

    def fit(self, X: Any, y: Any, sample_weight: Any = None, **params: Any) -> Self:
        """Fit rows of X to y, as :meth:`Ridge.fit`; further parameters are those of a grid search."""
        self._validate_params()
        alphas = np.atleast_1d(np.asarray(self.alphas, dtype=float))
        if not (alphas > 0).all():
            raise ValueError(f"alphas must be positive, got {alphas.min()}")
        if self.cv is not None:
            return self._search(X, y, sample_weight, alphas, params)
        data = TrainingData.from_arrays(self, X, y, sample_weight, centred=self.fit_intercept)
        leverage, how = self._leverage(data), self._how(data)

        def evidence() -> Any:
            return neula.ridge_path(*data.weighted, np.sqrt(alphas), leverage=leverage, **how)

        plain = self.accuracy is None and self.engine == "auto"
        soon = _path_by_eigenvectors(data, alphas, leverage) if plain else None
        path = evidence() if soon is None else soon
        if self.scoring is None:
            scores, kept = -path.leave_one_out.nan_to_num(torch.inf), path.squared_errors
            scores = scores.mean(1) if scores.ndim > 1 and not self.alpha_per_target else scores
        else:
            weights = {} if sample_weight is None else {"sample_weight": sample_weight}
            scores, kept = self._scored(data, path, {**weights, **params})
        best, solutions = scores.argmax(0), path.x
        if best.ndim:
            columns = torch.arange(len(best), device=best.device)
            coefficients, score = solutions[best, :, columns].mT, scores[best, columns]
        else:
            coefficients, score = solutions[best], scores[best]
        self.alpha_ = alphas[best.cpu().numpy()] if best.ndim else float(alphas[int(best)])
        self.best_score_ = score.cpu().numpy() if score.ndim else float(score)
        if self.store_cv_results:
            self.cv_results_ = data.given(kept.movedim(0, -1))
        return self._keep(data, coefficients, path if soon is None else Later(evidence))

    def _scored(self, data: TrainingData, path: Any, how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of what the fits of all other rows predict, shape (p,) or (p, k), and these predictions.

        Where no digit of a prediction is known, it is NaN, and the score is the lowest.
        """
        assert data.y is not None
        y, w, x = data.y.reshape(len(data.y), -1), data.weights, path.x.reshape(*path.x.shape[:2], -1)
        left = y - data.x @ x
        errors = path.squared_errors.reshape(left.shape).sqrt().copysign(left)
        if w is not None:
            errors = torch.where(w[:, None] == 0, left, errors / w[:, None])
        given = data.y + data.means[1]
        predicted = given - errors.reshape(-1, *given.shape)
        scorer, target = check_scoring(_Predictions(), self.scoring), given.cpu().numpy()
        columns = range(given.shape[1]) if self.alpha_per_target and given.ndim > 1 else [slice(None)]

        def score(x: np.ndarray) -> list[float]:
            pairs = ((x.T[j].T, target.T[j].T) for j in columns)
            return [scorer(_Predictions(), *p, **how) if np.isfinite(p[0]).all() else -np.inf for p in pairs]

        found = np.array([score(x) for x in predicted.cpu().numpy()])
        scores = torch.from_numpy(found).to(predicted.device)
        return scores if columns != [slice(None)] else scores[:, 0], predicted

    def _leverage(self, data: TrainingData) -> Any:
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
