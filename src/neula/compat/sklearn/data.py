"""Data of estimators as tensors, checked as scikit-learn does; what is fitted in the library of the data."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from neula.compat.drop_in import may_hold_integers, warn_of_rounding
from neula.pipeline.inputs import take
from neula.pipeline.result.shown import Deferrable

Estimator = TypeVar("Estimator", bound=type)

FLOATS = [np.float64, np.float32]

EXTRA: dict[str, Any] = {"accuracy": "no_validation", "engine": "no_validation"}
"""Parameters that neula adds to scikit-learn's, and checks itself."""


@dataclass(frozen=True)
class TrainingData:
    """Rows to fit, in double precision."""

    x: torch.Tensor  # shape (m, n)
    y: torch.Tensor | None  # shape (m,) or (m, k)
    weights: torch.Tensor | None  # square roots of scikit-learn's, shape (m,)
    x_mean: torch.Tensor  # means that were subtracted; zeros without an intercept
    y_mean: torch.Tensor | None
    x_left: torch.Tensor  # means subtracted afterwards: those of the rounded deviations
    y_left: torch.Tensor | None
    dtype: torch.dtype  # of the data as given
    is_tensor: bool  # whether a torch tensor was given

    @classmethod
    def from_arrays(
        cls,
        estimator: BaseEstimator,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        centred: bool,
        first: bool = True,
    ) -> TrainingData:
        """Check as scikit-learn does, and subtract means; rows that are not the first have known features.

        An integer that is no float64 is an error in a tensor. In an array it is rounded, as scikit-learn
        rounds it, with a warning.
        """
        is_tensor = isinstance(X, torch.Tensor)
        for name, given in (("X", X), ("y", y), ("sample_weight", sample_weight)):
            if may_hold_integers(given):
                warn_of_rounding(given, name)
        if is_tensor:
            x, target, w = _tensors(estimator, X, y, sample_weight, first)
        else:
            x, target, w = _arrays(estimator, X, y, sample_weight, first)
        dtype = x.dtype
        x, target = x.double(), None if target is None else target.double()
        part = None
        if centred:
            part = x.new_full(x.shape[:1], 1 / len(x)) if w is None else w / w.sum()
        x, *of_x = _deviations(x, part)
        target, *of_y = (None, None, None) if target is None else _deviations(target, part)
        means = (of_x[0], of_y[0], of_x[1], of_y[1])
        return cls(x, target, None if w is None else w.sqrt(), *means, dtype, is_tensor)

    def __reduce__(self) -> Any:
        """Rows do not travel with an estimator."""
        return _forgotten, ()

    @property
    def total(self) -> float:
        """Sum of scikit-learn's weights."""
        return float(len(self.x) if self.weights is None else self.weights.square().sum())

    @property
    def means(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.y_mean is not None
        return self.x_mean, self.y_mean

    @property
    def left(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Means subtracted from x and y in addition to the exact ones, which were rounded."""
        assert self.y_left is not None
        return self.x_left, self.y_left

    @property
    def weighted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of x and y multiplied by the weights."""
        assert self.y is not None
        if self.weights is None:
            return self.x, self.y
        return self.weights[:, None] * self.x, rows_times(self.weights, self.y)

    def given(self, x: torch.Tensor) -> Any:
        """A tensor in the library and dtype of the data; a number of the CPU as a number of NumPy."""
        x = x.to(self.dtype)
        if self.is_tensor:
            return x
        return x.cpu().numpy() if x.ndim else x.cpu().numpy()[()]


def _deviations(
    x: torch.Tensor, part: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Deviations from means, the means, and what is subtracted besides.

    Means are those of differences from one row, so that a constant column leaves zeros; and of wide data what
    rounding them leaves is subtracted, for it would be one more dimension.
    """
    if part is None:
        zeros = x.new_zeros(x.shape[1:])
        return x, zeros, zeros
    row = x[part.argmax()]
    x = x - row  # the only memory: to touch more of it takes as long as the arithmetic
    offset = part @ x
    x -= offset
    mean, left = row + offset, torch.zeros_like(offset)
    if x.ndim == 1 or len(x) <= x.shape[1]:
        left = part @ x
        x -= left
    return x, mean, left + (offset - (mean - row))


def _forgotten() -> None:
    return None


class Dense(BaseEstimator):
    """An estimator that takes no sparse matrices; its evidence may be computed when it is first read."""

    result_: Any = Deferrable()

    def __getstate__(self) -> Any:
        """Copies and pickles have the evidence, even if it was not read before."""
        getattr(self, "result_", None)
        return super().__getstate__()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        return tags


def with_accuracy(estimator: Estimator) -> Estimator:
    """Class decorator: the parameters of the last base, scikit-learn's, and ``accuracy`` and ``engine``."""
    peer: Any = estimator.__bases__[-1]

    @functools.wraps(peer.__init__)
    def initialize(self: Any, *args: Any, accuracy: Any = None, engine: Any = "auto", **kwargs: Any) -> None:
        peer.__init__(self, *args, **kwargs)
        self.accuracy, self.engine = accuracy, engine

    theirs, ours = inspect.signature(peer.__init__), inspect.signature(initialize, follow_wrapped=False)
    both = [*theirs.parameters.values(), *(ours.parameters[name] for name in EXTRA)]
    vars(initialize)["__signature__"] = theirs.replace(parameters=both)
    estimator.__init__ = initialize  # type: ignore[misc]
    estimator._parameter_constraints = {**peer._parameter_constraints, **EXTRA}  # type: ignore[attr-defined]
    return estimator


def rows_times(w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``diag(w) y`` of a vector or a matrix."""
    return w * y if y.ndim == 1 else w[:, None] * y


def _arrays(
    estimator: BaseEstimator, X: Any, y: Any, sample_weight: Any, first: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    if not first and _are_plain(estimator, X, y):
        x, target = X, y
    elif y is None and not isinstance(estimator, RegressorMixin):  # tags would say so, in 50 us
        x, target = validate_data(estimator, X, dtype=FLOATS, reset=first), None
    else:
        x, target = validate_data(
            estimator, X, y, dtype=FLOATS, reset=first, y_numeric=True, multi_output=True
        )
    if sample_weight is not None:
        sample_weight = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
    return _shared(x), None if target is None else _shared(target), _shared(sample_weight)


def _are_plain(estimator: BaseEstimator, X: Any, y: Any) -> bool:
    """Whether scikit-learn's checks, a quarter of the time of a partial fit, would change nothing."""
    return (
        (type(X) is type(y) is np.ndarray and X.dtype == y.dtype == np.float64)
        and (X.ndim == 2 and y.ndim in (1, 2) and len(X) == len(y) > 0)
        and (X.shape[1] == estimator.n_features_in_ and not hasattr(estimator, "feature_names_in_"))
        and bool(np.isfinite(X.sum()) and np.isfinite(y.sum()))
    )


def _shared(x: Any) -> Any:
    """A tensor that shares the memory of an array, unless that is in another order or read-only."""
    if x is None:
        return None
    x = np.asarray(x)
    if x.dtype.kind in "iub":
        x = x.astype(np.float64)
    if any(stride < 0 for stride in x.strides) or not x.flags.writeable:
        x = x.copy()
    return torch.from_numpy(x)


def _tensors(
    estimator: BaseEstimator, X: torch.Tensor, y: Any, sample_weight: Any, first: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    x = checked_tensor(X)
    if first:
        estimator.n_features_in_ = x.shape[1]
        if hasattr(estimator, "feature_names_in_"):
            del estimator.feature_names_in_
    else:
        check_features(estimator, x)
    if y is None and isinstance(estimator, RegressorMixin):
        raise ValueError(f"{type(estimator).__name__} requires y to be passed, but the target y is None")
    target, w = (
        None if z is None else take(torch.as_tensor(z, device=x.device).detach(), name).tensor
        for name, z in (("y", y), ("sample_weight", sample_weight))
    )
    for name, z in (("y", target), ("sample_weight", w)):
        if z is not None and len(z) != len(x):
            raise ValueError(f"X has {len(x)} samples and {name} {len(z)}")
    if w is not None and bool((w < 0).any()):
        raise ValueError("Negative values in data passed to `sample_weight`")
    return x, target, None if w is None else w.double()


def checked_tensor(X: torch.Tensor) -> torch.Tensor:
    """Samples in a matrix of floating-point numbers."""
    if X.ndim != 2:
        raise ValueError(f"X must have two dimensions, samples and features, got shape {tuple(X.shape)}")
    if not X.is_floating_point():
        X = take(X, "X").tensor
    if not bool(X.isfinite().all()):
        raise ValueError("X contains NaN or Inf")
    return X.detach()


def like_fitted(
    estimator: BaseEstimator, X: Any, fitted: str, *, features: bool = True
) -> torch.Tensor | None:
    """New samples, by default with all features, if the estimator was fitted with tensors; else None."""
    check_is_fitted(estimator)
    if not isinstance(getattr(estimator, fitted), torch.Tensor):
        return None
    if not isinstance(X, torch.Tensor):
        raise TypeError(
            f"X is of type {type(X).__name__}, and {type(estimator).__name__} was fitted with tensors: "
            "pass a tensor"
        )
    if features:
        check_features(estimator, X)
    return checked_tensor(X)


def check_features(estimator: BaseEstimator, X: torch.Tensor) -> None:
    """Check that X has as many features as in the fit."""
    if X.shape[-1] != estimator.n_features_in_:
        raise ValueError(
            f"X has {X.shape[-1]} features, but {type(estimator).__name__} is expecting "
            f"{estimator.n_features_in_} features as input"
        )
