"""Estimators with the interface of scikit-learn and certified answers; see :mod:`neula.sklearn`."""

from neula.compat.sklearn.decomposition import PCA, TruncatedSVD
from neula.compat.sklearn.linear import LinearRegression, NonNegativeLeastSquares, Ridge, RidgeCV

__all__ = ["PCA", "LinearRegression", "NonNegativeLeastSquares", "Ridge", "RidgeCV", "TruncatedSVD"]
