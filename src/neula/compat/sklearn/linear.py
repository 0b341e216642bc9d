"""Linear models: scikit-learn's parameters, attributes and meaning of ``sample_weight``."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Self

from sklearn import linear_model
from sklearn.utils.metaestimators import available_if

import neula
from neula.certificates.bounds import Accuracy
from neula.compat.sklearn.base import Linear, Seen, counted, of_any_sign
from neula.compat.sklearn.data import EXTRA, TrainingData, with_accuracy


@with_accuracy
class LinearRegression(Linear, linear_model.LinearRegression):
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

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit rows of X to y; weights are those of squares, so that 2 counts a row twice."""
        self._validate_params()
        data = TrainingData.from_arrays(self, X, y, sample_weight, centred=self.fit_intercept)
        if self.positive:
            result: Any = neula.nnls(*data.weighted, **self._how(data))
        else:
            result = counted(
                neula.lstsq(data.x, data.y, weights=data.weights, **self._how(data)), self.fit_intercept
            )
            self.rank_ = result.rank
        return self._keep(data, result.x, result, data if of_any_sign(self) else None)

    @available_if(of_any_sign)
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Take more rows: the fit is then that of all rows so far, which are not kept.

        :class:`neula.LeastSquares` updates it. Its evidence is coarser than that of :meth:`fit`: above a
        condition number of about 1e6 no digit is guaranteed. How large the columns are is taken from the
        first part, which should have some rows. Coefficients are solved for when they are first read;
        warnings of their accuracy appear then. There is a ValueError after :meth:`fit`, once the estimator
        has been copied or pickled: rows are left behind.
        """
        data, seen = self._more(X, y, sample_weight)
        return self._solve_later(seen, partial(self._solve_seen, data, seen, self._how(data)))

    def _solve_seen(self, data: TrainingData, seen: Seen, how: dict[str, Any]) -> Self:
        result = seen.solve(0.0, **how)
        self.rank_ = result.rank
        return self._keep(data, result.x, result, seen)


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
