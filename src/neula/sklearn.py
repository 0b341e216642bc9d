"""Estimators with scikit-learn's parameters and attributes: ``from neula.sklearn import Ridge``.

They need scikit-learn, which ``pip install "neula[sklearn]"`` brings. Each is a subclass of scikit-learn's
own of the same name, so pipelines, searches and everything else take it. Torch tensors are fitted where they
are.
"""

from neula.compat.sklearn import PCA, LinearRegression, NonNegativeLeastSquares, Ridge, RidgeCV, TruncatedSVD

__all__ = ["PCA", "LinearRegression", "NonNegativeLeastSquares", "Ridge", "RidgeCV", "TruncatedSVD"]
