"""One small symmetric matrix on a CPU, by NumPy and LAPACK: the first link of its chain without the chain.

For small matrices tensors and records of what was tried take ten times as long as the arithmetic. What is
accepted here is what the judge of the chain accepts; what is not begins with its first link again.
"""

from __future__ import annotations

import numpy as np
import torch

from neula.algorithms.lapack.products import cholesky_factor, in_double, products
from neula.certificates.probes import gaussian_probes
from neula.engines import FP64
from neula.pipeline.chain import Answer
from neula.pipeline.in_numpy import IN_NUMPY, array_of
from neula.problems.definite.links import SAFE_EXPONENT
from neula.problems.definite.problem import CholeskyOptions, CholeskyValues

LARGEST = 512
"""Order up to which calls take longer than what is called."""

FEW = 95
"""Order up to which NumPy and SciPy take no threads of their own."""


def factorize_by_lapack(
    lower: torch.Tensor, options: CholeskyOptions
) -> tuple[Answer[CholeskyValues], float] | None:
    """L with its residual; None for what this is not made for, and where there is no factor.

    Parameters
    ----------
    lower : Tensor, shape (batch, n, n)
        Of which the lower triangles are read.
    options : CholeskyOptions
    """
    one_of_host = len(lower) == 1 and lower.is_cpu and options.engine.device.type == "cpu"
    if not (one_of_host and options.tuning.lapack and lower.dtype in IN_NUMPY and len(lower[0]) <= LARGEST):
        return None
    given, double = array_of(lower[0]), options.low.format is FP64
    with np.errstate(all="ignore"):  # what is not finite is not accepted
        return _factorized(given, lower.dtype, double=double, threads=torch.get_num_threads() > 1)


def _factorized(
    given: np.ndarray, dtype: torch.dtype, *, double: bool, threads: bool
) -> tuple[Answer[CholeskyValues], float] | None:
    scales, diagonal, large = _scales(given), given.diagonal(), threads and len(given) > FEW
    most = 2.0**SAFE_EXPONENT
    if double and not (diagonal.min() >= 1 / most and diagonal.max() <= most):
        return None
    work = in_double(given, large=large) if double else given.astype(np.float32, copy=False)
    found = cholesky_factor(work, large=large)
    if found is None:
        return None
    factor = found.astype(IN_NUMPY[dtype], copy=False)
    residual = _residual(given, factor, scales, large=large)
    values = CholeskyValues(torch.from_numpy(factor)[None], torch.from_numpy(np.array([residual])))
    return Answer(values, f"cholesky fp{8 * work.itemsize}"), residual


def _scales(given: np.ndarray) -> np.ndarray:
    """Powers of two that bring the diagonal near one, which is positive if there is a factor."""
    half = np.frexp(given.diagonal().astype(np.float64))[1] // 2
    scales: np.ndarray = np.ldexp(1.0, -half)
    return scales


def _residual(given: np.ndarray, factor: np.ndarray, scales: np.ndarray, *, large: bool) -> float:
    """That of :func:`neula.certificates.cholesky.residuals_of_triangles`."""
    lower = torch.from_numpy(given).tril().numpy() if large else np.tril(given)
    vectors = gaussian_probes(len(given), torch.device("cpu")).numpy() * scales[:, None]
    left, below = products(factor, large=large), products(lower, large=large)
    image = below.times(vectors) + below.transposed_times(vectors)
    image -= given.diagonal()[:, None] * vectors
    product = left.times(left.transposed_times(vectors))
    size = np.linalg.norm(image * scales[:, None])
    return float(np.linalg.norm((image - product) * scales[:, None]) / size)
