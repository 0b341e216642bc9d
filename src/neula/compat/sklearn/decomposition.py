"""Decompositions: scikit-learn's parameters and attributes, singular vectors by :func:`neula.svd_lowrank`."""

from __future__ import annotations

import math
from copy import copy
from numbers import Integral
from typing import Any, Self

import torch
from sklearn import decomposition
from sklearn.utils.validation import check_is_fitted

import neula
from neula.algorithms.scaling import SAFE_NORMS
from neula.certificates.bounds import Accuracy, measurement_error, residual_bound
from neula.compat.sklearn.data import Dense, TrainingData, like_fitted, with_accuracy
from neula.engines import FP64
from neula.pipeline.result.named import as_numpy
from neula.pipeline.result.shown import Later

PART = 4
"""One in so many singular values, or fewer, take less time by eigenvectors of ``A^T A`` than all of them."""

MOST_OF_PART, MOST_OF_ALL = 10**9, 10**7  # values of ``m n^2`` up to which a part, or all, are computed so

NO_VARIANCE = 1e-15  # variances below this one count as none (scikit-learn's)


class _Decomposition(Dense):
    accuracy: Accuracy | None
    engine: Any

    def _triplets(self, data: TrainingData, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """U, s and V^T, the largest element of each row of V^T positive, as scikit-learn has it."""
        accuracy, x = data.dtype if self.accuracy is None else self.accuracy, data.x

        def evidence() -> Any:
            return neula.svd_lowrank(x, rank, accuracy=accuracy, engine=self.engine)

        plain = self.accuracy is None and self.engine == "auto" and x.is_cpu and rank > 0
        soon = _measured_triplets(x if x.shape[0] >= x.shape[1] else x.mT, rank) if plain else None
        if soon is None:
            self.result_ = evidence()
            u, s, vt = self.result_
        else:
            self.result_ = Later(evidence)
            u, s, vt = soon if x.shape[0] >= x.shape[1] else (soon[2].mT, soon[1], soon[0].mT)
        if not len(s):
            return u, s, vt
        signs = vt.gather(1, vt.abs().argmax(1, keepdim=True)).sign()
        return u * signs.mT, s, vt * signs

    def transform(self, X: Any) -> Any:
        """Samples in terms of the components: tensors for tensors, if it was fitted with tensors.

        Parameters
        ----------
        X : array_like, shape (samples, features)

        Returns
        -------
        array, shape (samples, components)
        """
        x = like_fitted(self, X, "components_")
        if x is None:
            return super().transform(X)
        found = (x - getattr(self, "mean_", 0.0)) @ self.components_.mT
        if getattr(self, "whiten", False):
            found = found / self.explained_variance_.sqrt().clamp(min=torch.finfo(found.dtype).eps)
        return found

    def inverse_transform(self, X: Any) -> Any:
        """Samples whose components are X, as :meth:`transform` returns them.

        Parameters
        ----------
        X : array_like, shape (samples, components)

        Returns
        -------
        array, shape (samples, features)
        """
        x = like_fitted(self, X, "components_", features=False)
        if x is None:
            return super().inverse_transform(X)
        if getattr(self, "whiten", False):
            x = x * self.explained_variance_.sqrt()
        return x @ self.components_ + getattr(self, "mean_", 0.0)

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        """:meth:`fit`, and :meth:`transform` the same samples."""
        return self.fit(X, y).transform(X)


@with_accuracy
class TruncatedSVD(_Decomposition, decomposition.TruncatedSVD):
    """Truncated SVD by :func:`neula.svd_lowrank`, with scikit-learn's parameters.

    Parameters
    ----------
    n_components : int, optional
    algorithm, n_iter, n_oversamples, power_iteration_normalizer, random_state, tol : optional
        As for ``sklearn.decomposition.TruncatedSVD``; accepted, and change nothing: iterations end when what
        is measured meets the accuracy, and random vectors are always the same.
    accuracy, engine : optional
        As for :func:`neula.svd_lowrank`. By default the accuracy is that of X.

    Attributes
    ----------
    components_, explained_variance_, explained_variance_ratio_, singular_values_, n_features_in_,
    feature_names_in_
        scikit-learn's.
    result_ : SVDResult
        The evidence, of small problems computed when it is first read.

    Examples
    --------
    >>> import numpy as np
    >>> from neula.sklearn import TruncatedSVD
    >>> X = np.random.default_rng(0).standard_normal((50, 8)) * np.arange(8)
    >>> model = TruncatedSVD(3).fit(X)
    >>> model.components_.shape, model.result_.converged
    ((3, 8), True)
    """

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit samples, shape (samples, features); y is ignored."""
        self._validate_params()
        data = TrainingData.from_arrays(self, X, centred=False)
        m, n = data.x.shape
        if self.n_components > n:
            raise ValueError(f"n_components({self.n_components}) must be <= n_features({n}).")
        u, s, vt = self._triplets(data, min(self.n_components, m))
        variances = (u * s).var(0, correction=0)
        total = data.x.var(0, correction=0).sum()
        self.components_, self.singular_values_ = data.given(vt), data.given(s)
        self.explained_variance_ = data.given(variances)
        self.explained_variance_ratio_ = data.given(variances / total)
        return self


@with_accuracy
class PCA(_Decomposition, decomposition.PCA):
    """Principal components by :func:`neula.svd_lowrank`, with scikit-learn's parameters.

    Parameters
    ----------
    n_components : int, float or "mle", optional
        A number between 0 and 1 is the part of the variance to be explained; ``"mle"`` is Minka's estimate
        [1]_.
    whiten : bool, optional
    copy, svd_solver, tol, iterated_power, n_oversamples, power_iteration_normalizer, random_state : optional
        As for ``sklearn.decomposition.PCA``; accepted, and change nothing.
    accuracy, engine : optional
        As for :func:`neula.svd_lowrank`. By default the accuracy is that of X.

    Attributes
    ----------
    components_, explained_variance_, explained_variance_ratio_, singular_values_, mean_, n_components_,
    n_samples_
        scikit-learn's, and ``noise_variance_``, ``n_features_in_``, ``feature_names_in_``.
    result_ : SVDResult
        The evidence, of small problems computed when it is first read.

    References
    ----------
    .. [1] T. P. Minka, "Automatic choice of dimensionality for PCA", NIPS 2000.

    Examples
    --------
    >>> import numpy as np
    >>> from neula.sklearn import PCA
    >>> X = np.random.default_rng(0).standard_normal((50, 8)) * np.arange(8)
    >>> model = PCA(0.9).fit(X)
    >>> model.n_components_, bool(model.explained_variance_ratio_.sum() > 0.9)
    (4, True)
    """

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit samples, shape (samples, features); y is ignored."""
        self._validate_params()
        data = TrainingData.from_arrays(self, X, centred=True)
        m, n = data.x.shape
        smaller = min(m, n)
        rank = self._rank(m, n)
        _, s, vt = self._triplets(data, rank)
        free = max(m - 1, 1)
        variances = s.square() / free
        total = torch.linalg.vector_norm(data.x).square() / free
        ratio = variances / total
        if rank == smaller and isinstance(self.n_components, float) and self.n_components < 1:
            rank = min(int((ratio.cumsum(0) <= self.n_components).sum()) + 1, smaller)
        if self.n_components == "mle":
            rank = _likely_rank(variances, m)
        rest = (total - variances[:rank].sum()) / (smaller - rank) if rank < smaller else total * 0
        self.n_samples_, self.n_components_ = m, rank
        self.mean_, self.components_ = data.given(data.x_mean), data.given(vt[:rank])
        self.explained_variance_ = data.given(variances[:rank])
        self.explained_variance_ratio_ = data.given(ratio[:rank])
        self.singular_values_, self.noise_variance_ = data.given(s[:rank]), data.given(rest.clamp(min=0.0))
        return self

    def get_covariance(self) -> Any:
        """Covariance of the model, as of ``sklearn.decomposition.PCA``."""
        return self._by_arrays("get_covariance")

    def get_precision(self) -> Any:
        """Inverse of :meth:`get_covariance`."""
        return self._by_arrays("get_precision")

    def score_samples(self, X: Any) -> Any:
        """Logarithm of the likelihood of each sample, as of ``sklearn.decomposition.PCA``."""
        return self._by_arrays("score_samples", X)

    def score(self, X: Any, y: Any = None) -> float:
        """Mean of :meth:`score_samples`; y is ignored."""
        return float(self.score_samples(X).mean())

    def _by_arrays(self, name: str, *samples: Any) -> Any:
        """A method of scikit-learn's; of an estimator of tensors by that of one of arrays."""
        check_is_fitted(self)
        method, like = getattr(decomposition.PCA, name), self.components_
        if not isinstance(like, torch.Tensor):
            return method(self, *samples)
        given = [like_fitted(self, x, "components_") for x in samples]
        model = copy(self)
        for key, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(model, key, as_numpy(value))
        return torch.from_numpy(method(model, *map(as_numpy, given))).to(like)

    def _rank(self, m: int, n: int) -> int:
        wanted, smaller = self.n_components, min(m, n)
        if wanted == "mle" and m < n:
            raise ValueError("n_components='mle' is only supported if n_samples >= n_features")
        if wanted is None or wanted == "mle" or (isinstance(wanted, float) and wanted < 1):
            return smaller
        if not isinstance(wanted, Integral):
            raise ValueError(f"n_components={wanted!r} must be of type int when greater than or equal to 1")
        rank = int(wanted)
        if not 0 <= rank <= smaller:
            raise ValueError(
                f"n_components={rank} must be between 0 and min(n_samples, n_features)={smaller}"
            )
        return rank


def _measured_triplets(a: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """U, s and V^T of a tall matrix; None unless they are as accurate as rounding errors allow.

    A few come from the range of eigenvectors of ``A^T A``, whose other eigenvalues show that none was missed.
    """
    m, n = a.shape
    few = PART * rank <= n
    if m * n * n > (MOST_OF_PART if few else MOST_OF_ALL):
        return None
    norm, image, v, beyond = float(torch.linalg.vector_norm(a)), a, None, 0.0
    if few:
        squares, v = torch.linalg.eigh(a.mT @ a)
        image, v = a @ v[:, -rank:], v[:, -rank:]
        beyond = (squares[-rank - 1].clamp(min=0.0) + (m + n) * FP64.u * norm**2).sqrt()
    u, s, vt = torch.linalg.svd(image, full_matrices=False)
    u, s, vt = u[:, :rank], s[:rank], (vt if v is None else vt @ v.mT)[:rank]
    bound = (residual_bound(FP64, n) + measurement_error(m, torch.float64)) * norm
    left, (low, high) = torch.linalg.vector_norm(u.mT @ a - s[:, None] * vt), SAFE_NORMS[torch.float64]
    accepted = low < norm < high and left <= bound and beyond - s[-1] <= bound
    return (u, s, vt) if accepted else None


def _likely_rank(variances: torch.Tensor, m: int) -> int:
    """Minka's most likely number of components of m samples, by their variances, the largest first.

    The evidence of each number by Laplace's method, equations 30 and 31 of his report.
    """
    n, device = len(variances), variances.device
    spectrum = variances.clamp(min=torch.finfo(torch.float64).tiny)
    ranks = torch.arange(1, n, dtype=torch.float64, device=device)
    halves = (n - torch.arange(n - 1, dtype=torch.float64, device=device)) / 2
    uniform = (halves.lgamma() - halves * math.log(math.pi) - math.log(2)).cumsum(0)
    rest = (variances.flip(0).cumsum(0).flip(0)[1:] / (n - ranks)).clamp(min=NO_VARIANCE)
    likelihood = -0.5 * m * (spectrum.log().cumsum(0)[:-1] + (n - ranks) * rest.log())
    freedom = n * ranks - ranks * (ranks + 1) / 2
    evidence = uniform + likelihood + (freedom + ranks) / 2 * math.log(2 * math.pi) - ranks / 2 * math.log(m)
    for k in range(1, n):
        smoothed = torch.cat([spectrum[:k], rest[k - 1].expand(n - k)])
        curvature = (spectrum[:k, None] - spectrum) * (1 / smoothed - 1 / spectrum[:k, None])
        pairs = torch.ones_like(curvature).triu(1).bool()
        evidence[k - 1] -= 0.5 * (curvature[pairs].log() + math.log(m)).sum()
    evidence = evidence.masked_fill(variances[:-1] < NO_VARIANCE, -math.inf)
    return int(evidence.argmax()) + 1 if n > 1 else 0
