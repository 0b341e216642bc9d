"""Errors of QR factors along random vectors on a CPU: by the compiled core, or by NumPy and torch."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch

from neula.algorithms.lapack.refinement import length
from neula.certificates.probes import gaussian_probes
from neula.kernels.probes import probe_errors
from neula.kernels.probes_host import reflected_errors
from neula.problems.orthogonal.problem import QROptions

ALONE = 1 << 16
"""Elements of a matrix whose products with four vectors NumPy computes without threads: those of its
BLAS would wait for the processor while torch's, which have just reflected, wait busily for more work."""

BLOCK = 1 << 17
"""Elements of a batch that are measured together, while they are in the cache."""


def measured_on_host(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor, options: QROptions) -> np.ndarray:
    """The errors of :func:`neula.kernels.probes_host.reflected_errors`, also without the core."""
    measures = reflected_errors(a, q, r, probe_vectors(a.shape[-1]))
    if measures is not None:
        return measures
    with np.errstate(all="ignore"):  # what is not finite is not accepted
        basis, triangle = _with_signs(q, r)
        measured = _measured if a.ndim == 2 else _measured_together
        return measured(a.numpy(), basis, triangle, options)


def _with_signs(q: torch.Tensor, r: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The same as arrays, the diagonal of R made nonnegative, in place."""
    basis, triangle = q.numpy(), r.numpy()
    sign = np.copysign(triangle.dtype.type(1), triangle.diagonal(axis1=-2, axis2=-1))
    if basis.size > ALONE:  # for torch's threads
        q *= torch.from_numpy(sign[..., None, :])
        r *= torch.from_numpy(sign[..., None])
    else:
        basis *= sign[..., None, :]
        triangle *= sign[..., None]
    return basis, triangle


def _measured(a: np.ndarray, q: np.ndarray, r: np.ndarray, options: QROptions) -> np.ndarray:
    """Residual and orthogonality along random vectors, as :mod:`neula.certificates.qr` measures them."""
    norms, g = _norms(r), probe_vectors(r.shape[1])
    if a.size > _measured_alone(options):
        way = _errors_in_torch if torch.get_num_threads() > 1 else _errors_by_blocks
        found = way(a, q, r, g, norms)
    else:
        a, q, r = (x.astype(np.float64, copy=False) for x in (a, q, r))
        scaled = g / norms[:, None]
        image, loss = a.dot(scaled), q.T.dot(q.dot(g)) - g
        missed = image - q.dot(r.dot(scaled))
        found = length(missed.ravel(order="K")), length(image.ravel(order="K")), length(loss.ravel(order="K"))
    return np.array([*found, norms.min(), norms.max()])[:, None]


def _measured_alone(options: QROptions) -> int:
    """Elements of a matrix up to which one thread measures it at once."""
    return ALONE if torch.get_num_threads() > 1 else options.engine.tuning.measured_here


def _errors_by_blocks(
    a: np.ndarray, q: np.ndarray, r: np.ndarray, g: np.ndarray, norms: np.ndarray
) -> tuple[float, float, float]:
    """The three norms of a larger matrix, which is read once, by blocks of rows that stay in the cache."""
    scaled = g / norms[:, None]
    triangle, loss, residual, size = r.dot(scaled), -g, 0.0, 0.0
    rows = max(1, ALONE // len(g))
    for start in range(0, len(a), rows):
        some, basis = (x[start : start + rows].astype(np.float64, copy=False) for x in (a, q))
        image = some.dot(scaled)
        loss += basis.T.dot(basis.dot(g))
        residual += length((basis.dot(triangle) - image).ravel(order="K")) ** 2
        size += length(image.ravel()) ** 2
    return math.sqrt(residual), math.sqrt(size), length(loss.ravel())


def _errors_in_torch(
    a: np.ndarray, q: np.ndarray, r: np.ndarray, g: np.ndarray, norms: np.ndarray
) -> tuple[float, float, float]:
    """The same of a matrix that is worth several threads."""
    matrix, basis, triangle, scales = (torch.from_numpy(x)[None] for x in (a, q, r, 1 / norms))
    vectors = torch.from_numpy(g)
    residual, size, loss = probe_errors(matrix, basis, triangle, scales, vectors, vectors)
    return residual.item(), size.item(), loss.item()


def _measured_together(a: np.ndarray, q: np.ndarray, r: np.ndarray, options: QROptions) -> np.ndarray:
    """The same of a batch, some at a time: NumPy takes a part of the time of torch for thin products."""
    norms, g, measures = _norms(r), probe_vectors(r.shape[-1]), []
    step = max(1, BLOCK // a[0].size)
    for start in range(0, len(a), step):
        part = slice(start, start + step)
        some, basis, triangle = (x[part].astype(np.float64, copy=False) for x in (a, q, r))
        scaled = g / norms[part, :, None]
        image = some @ scaled
        missed = image - basis @ (triangle @ scaled)
        loss = basis.transpose(0, 2, 1) @ (basis @ g) - g
        measures.append([np.einsum("pij,pij->p", x, x) for x in (missed, image, loss)])
    return np.concatenate([np.sqrt(np.concatenate(measures, axis=1)), [norms.min(1), norms.max(1)]])


def _norms(r: np.ndarray) -> np.ndarray:
    """Norms of columns."""
    if r.size > ALONE:
        norms: np.ndarray = torch.linalg.vector_norm(torch.from_numpy(r), dim=-2).numpy()
        return norms
    return np.sqrt(np.einsum("...ij,...ij->...j", r, r))


@lru_cache(maxsize=64)
def probe_vectors(n: int) -> np.ndarray:
    """Random vectors of a length, kept."""
    found: np.ndarray = gaussian_probes(n, torch.device("cpu")).numpy()
    return found
