"""Code shared by linear models: storing coefficients, predicting, and adding rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import torch

from neula.certificates.bounds import Accuracy
from neula.compat.sklearn.data import Dense, TrainingData, like_fitted
from neula.compat.sklearn.seen import Seen

EXTRA: dict[str, Any] = {"accuracy": "no_validation", "engine": "no_validation"}
"""Parameters that neula adds to scikit-learn's, and checks itself."""


class Linear(Dense):
    """A linear model."""

    accuracy: Accuracy | None
    engine: Any
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
        return self

    def _more(self, X: Any, y: Any, sample_weight: Any) -> tuple[TrainingData, Seen]:
        """Rows with the means of all that were seen, and all these rows as a fit that is held open.

        Raises
        ------
        ValueError
            If the rows before were not kept.
        """
        self._validate_params()
        before: Seen | TrainingData | None = getattr(self, "_seen", None)
        first = not hasattr(self, "coef_")
        if before is None and not first:
            raise ValueError("the rows of fit are not there any more: begin with partial_fit, on a clone")
        data = TrainingData.from_arrays(self, X, y, sample_weight, centred=self.fit_intercept, first=first)
        if isinstance(before, TrainingData):
            before = Seen.begin(before, self.engine, centred=self.fit_intercept)
        if before is None:
            seen = Seen.begin(data, self.engine, centred=self.fit_intercept)
        else:
            seen = before.plus(data)
        x_mean, y_mean = seen.means
        return replace(data, x_mean=x_mean, y_mean=y_mean), seen

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
