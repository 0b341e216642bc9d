"""Estimators with the interface of scikit-learn and certified answers; see :mod:`neula.sklearn`."""

from importlib.util import find_spec

from neula.errors import needs_extra

if find_spec("sklearn") is None:
    raise needs_extra("neula.sklearn", "scikit-learn", "sklearn")

from neula.compat.sklearn.decomposition import PCA, TruncatedSVD
from neula.compat.sklearn.linear import LinearRegression, NonNegativeLeastSquares
from neula.compat.sklearn.ridge import Ridge, RidgeCV

__all__ = ["PCA", "LinearRegression", "NonNegativeLeastSquares", "Ridge", "RidgeCV", "TruncatedSVD"]
