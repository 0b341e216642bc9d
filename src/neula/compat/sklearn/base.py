"""Code shared by linear models: storing coefficients, predicting, and adding rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch

from neula.certificates.bounds import Accuracy
from neula.compat.sklearn.data import Dense, TrainingData, like_fitted
from neula.compat.sklearn.seen import Seen


class Linear(Dense):
    """A linear model."""

    accuracy: Accuracy | None
    engine: Any
    _solved = ("coef_", "intercept_", "rank_", "n_iter_", "result_")
    """Attributes that follow from a solution."""
    _flat = False
    """Whether coefficients of a single target in a matrix are a vector."""

    def _keep(
        self,
        data: TrainingData,
        coefficients: torch.Tensor,
        result: Any,
        seen: Seen | TrainingData | None = None,
    ) -> Self:
        """Set the attributes, by solutions of shape (n,) or (n, k); to what was seen more may come."""
        x_mean, y_mean = data.means
        intercept = y_mean - x_mean @ coefficients
        coefficients = coefficients.T.contiguous() if coefficients.ndim > 1 else coefficients
        if self._flat and coefficients.ndim > 1 and len(coefficients) == 1:
            coefficients = coefficients[0]
        self.coef_ = data.given(coefficients)
        self.intercept_ = data.given(intercept) if self.fit_intercept else 0.0
        self.result_ = result
        self._seen = seen
        self.__dict__.pop("_unsolved", None)
        return self

    def _more(self, X: Any, y: Any, sample_weight: Any) -> tuple[TrainingData, Seen]:
        """The new data without its rows, with the means of all rows so far, and the fit of all these rows."""
        self._validate_params()
        before: Seen | TrainingData | None = getattr(self, "_seen", None)
        first = before is None and not hasattr(self, "coef_")
        if before is None and not first:
            raise ValueError("fit keeps no rows for partial_fit: call partial_fit for all parts, on a clone")
        data = TrainingData.from_arrays(self, X, y, sample_weight, centred=self.fit_intercept, first=first)
        if isinstance(before, TrainingData):
            before = Seen.begin(before, self.engine, centred=self.fit_intercept)
        if before is None:
            seen = Seen.begin(data, self.engine, centred=self.fit_intercept)
        else:
            seen = before.plus(data)
        assert data.y is not None
        x_mean, y_mean = seen.means
        no_x, no_y = data.x.new_empty(0, data.x.shape[1]), data.y.new_empty(0, *data.y.shape[1:])
        return replace(data, x=no_x, y=no_y, weights=None, x_mean=x_mean, y_mean=y_mean), seen

    def _solve_later(self, seen: Seen, solve: Callable[[], Self]) -> Self:
        """Set the attributes when somebody reads one of them: many parts are to cost one solution."""
        for name in self._solved:
            self.__dict__.pop(name, None)
        self._seen, self._unsolved = seen, solve
        return self

    def __getattr__(self, name: str) -> Any:
        if name not in type(self)._solved or "_unsolved" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        vars(self)["_unsolved"]()
        return getattr(self, name)

    def _how(self, data: TrainingData) -> dict[str, Any]:
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


def of_any_sign(estimator: Any) -> bool:
    """Whether coefficients may be negative: others cannot be had from what is kept of rows."""
    return not estimator.positive
