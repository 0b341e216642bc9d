"""Code shared by linear models: storing coefficients, predicting, and rows that come in parts."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

import neula
from neula.certificates.bounds import Accuracy
from neula.compat.sklearn.data import Dense, TrainingData, like_fitted
from neula.pipeline.result.shown import Later

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Seen:
    """Sums over all rows so far.

    T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", COMPSTAT 1982: sums of squares of deviations add up, with one more term for the distance of
    the means. In least squares that term is one more row.

    Means are kept as sums of two numbers, of which only the second one changes: rounding errors of a mean
    that is far larger than the deviations would be those of the distance of two means.
    """

    # Of their deviations from the means; of the rows themselves without an intercept. Never changed.
    held: neula.LeastSquares
    weight: float  # sum of their weights
    origin: Pair  # means of x and y of the first rows; zeros without an intercept
    apart: Pair  # term to add for all rows
    centred: bool  # whether there is an intercept
    parts: int = 1

    @classmethod
    def begin(cls, data: TrainingData, engine: Any, *, centred: bool) -> Seen:
        """The first ones, which say how large the columns are, and where the fit is kept."""
        sizes = torch.linalg.vector_norm(data.x, dim=0) / max(1, len(data.x)) ** 0.5
        sizes = torch.where(sizes > 0, sizes, data.x_mean.abs())
        where = data.x.device.type if engine == "auto" else engine
        held = neula.LeastSquares(data.x.shape[1], scales=torch.where(sizes > 0, sizes, 1.0), engine=where)
        held.update(data.x, data.y, weights=data.weights)
        return cls(held, data.total, data.means, data.left, centred)

    def plus(self, data: TrainingData) -> Seen:
        held, total = copy(self.held), self.weight + data.total
        if not self.centred:
            held.update(data.x, data.y, weights=data.weights)
            return replace(self, held=held, weight=total, parts=self.parts + 1)
        part = data.total / total if total else 0.0
        parts = zip(self.origin, self.apart, data.means, data.left, strict=True)
        steps = [(mean - old.to(mean)) + (left - far.to(left)) for old, far, mean, left in parts]
        last = (((1 - part) * data.total) ** 0.5 * step[None] for step in steps)
        weights = None if data.weights is None else torch.cat([data.weights, data.weights.new_ones(1)])
        joined: Any = zip((data.x, data.y), last, strict=True)
        held.update(*map(torch.cat, joined), weights=weights)
        x, y = (far.to(step) + part * step for far, step in zip(self.apart, steps, strict=True))
        return replace(self, held=held, weight=total, apart=(x, y), parts=self.parts + 1)

    @property
    def means(self) -> Pair:
        return self.origin[0] + self.apart[0], self.origin[1] + self.apart[1]

    def solve(self, damp: float, **how: Any) -> neula.LstsqResult[Any]:
        """The fit of all rows: the minimum-norm solution if they are too few."""
        held, missing = self.held, max(0, self.held.n - self.held.rows)
        if missing:  # rows of zeros change nothing
            held = copy(held)
            zeros = torch.zeros(missing, held.n, dtype=torch.float64, device=self.origin[0].device)
            held.update(zeros, zeros.new_zeros(missing, *self.origin[1].shape))
        added = missing + (self.parts - 1) * self.centred  # a row for the means of every other part
        return counted(held.solve(damp=damp, accuracy=how["accuracy"]), self.centred, added)


def counted(result: neula.LstsqResult[Any], centred: Any, added: int = 0) -> neula.LstsqResult[Any]:
    """A result whose statistics count means that were subtracted, but not rows that were added."""
    made = vars(result)["_fit"]

    def fit() -> Any:
        found = made.make() if isinstance(made, Later) else made
        return None if found is None else replace(found, centred=bool(centred), lost=centred + added)

    vars(result)["_fit"] = Later(fit)
    return result


class Linear(Dense):
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
        before: Seen | TrainingData | None = getattr(self, "_seen", None)
        first = before is None and not hasattr(self, "coef_")
        asked, valid = self.get_params(deep=False), vars(self).get("_valid", {})
        if any(value is not valid.get(name, self) for name, value in asked.items()):
            self._validate_params()
            self._valid = asked
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
        """Set the attributes when one of them is first read, so that many parts cost one solution."""
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
