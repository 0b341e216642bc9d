"""QR of small matrices on a CPU: the first link of their chain without the chain, measured in NumPy.

For small matrices tensors of batches and records of what was tried take many times as long as LAPACK.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from neula.algorithms.lapack.refinement import length
from neula.algorithms.scaling import SAFE_NORMS
from neula.certificates.probes import gaussian_probes
from neula.certificates.qr import QRCertificate, QRCertificates, certificate_of, certificates_of
from neula.engines import FP32, FP64
from neula.kernels.probes import probe_errors
from neula.kernels.probes_host import reflected, reflected_errors
from neula.pipeline.call import Call
from neula.pipeline.result import Attempt, QRResult
from neula.pipeline.result.deferred import Later
from neula.problems.orthogonal.problem import Options

ALONE = 1 << 16
"""Elements of a matrix whose products with four vectors NumPy computes without threads: those of its
BLAS would wait for the processor while torch's, which have just reflected, wait busily for more work."""

REFLECTED, REFLECTED_COLUMNS = {torch.float64: 1 << 14, torch.float32: 1 << 12}, 64
"""Elements and columns of matrices that a kernel reflects, in double precision, and measures in less time
than LAPACK reflects them: of larger ones that makes products of matrices."""

BLOCK = 1 << 17
"""Elements of a batch that are measured together, while they are in the cache."""


def qr_by_lapack(call: Call, mode: str, options: Options) -> QRResult[Any] | None:
    """The factors where all are accepted, and the matrices are some for this way."""
    a, label = call.first.tensor, f"householder {options.target.name}"
    if not _suits(call, options) or mode not in ("reduced", "r"):
        return None
    with call.computing():
        q, r, found = _factorized(a.resolve_neg(), options)
    if found is None or not (found.accepted is True or np.all(found.accepted)):  # in a tenth of its time
        return None

    def attempts() -> tuple[Attempt, ...]:
        reason = found.in_words if isinstance(found, QRCertificates) else str(found)
        return (Attempt(label, True, reason),)

    fields = {
        "Q": None if mode == "r" else call.first.wrap(q),
        "R": call.first.wrap(r),
        "certificate": found,
        "attempts": Later(attempts),
        "engine": str(options.engine),
        "accuracy": options.target.name,
        "seconds": call.seconds,
        "accepted": Later(lambda: call.first.wrap_array(np.ones(a.shape[:-2], bool))),
    }
    return QRResult.of(fields)


def _factorized(
    a: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor, QRCertificate | QRCertificates | None]:
    """Factors, the diagonal of R nonnegative, and what is measured of them."""
    (m, n), g, measures = a.shape[-2:], _vectors(a.shape[-1]), None
    if n <= REFLECTED_COLUMNS and m * n <= REFLECTED[a.dtype] and (found := reflected(a, g)) is not None:
        q, r, measures = found
    else:
        q, r = torch.linalg.qr(a)
        if m * n <= options.engine.tuning.measured_here:
            measures = reflected_errors(a, q, r, g)
    if measures is None:
        with np.errstate(all="ignore"):  # what is not finite is not accepted
            basis, triangle = _reflected(q, r)
            measured = _measured if a.ndim == 2 else _measured_together
            return q, r, measured(a.numpy(), basis, triangle, options)
    return q, r, _certificate(measures, a.shape, options)


def _certificate(
    measures: np.ndarray, shape: torch.Size, options: Options
) -> QRCertificate | QRCertificates | None:
    """None where squares of a norm of a column are not to be trusted."""
    low, high = SAFE_NORMS[options.target.dtype]
    if len(shape) == 2:
        residual, size, loss, smallest, largest = measures[:, 0].tolist()
        if not (smallest > low and largest < high):
            return None
        return certificate_of(residual, size, loss, shape, options.target)
    if not (measures[3].min() > low and measures[4].max() < high):
        return None
    return certificates_of(measures[:3], torch.float64, shape[-2:], options.target)


def _suits(call: Call, options: Options) -> bool:
    """Whether matrices are tall, in the memory of the host, neither large nor attached to a graph."""
    a, tuning = call.first.tensor, options.engine.tuning
    asked = options.named or options.in_place or options.progress is not None or call.differentiable
    if asked or not (2 <= a.ndim <= 3 and a.is_cpu and options.engine.device.type == "cpu"):
        return False
    usual = a.dtype == options.target.dtype and options.target in (FP32, FP64) and not call.first.places
    m, n = a.shape[-2:]
    small = a.ndim == 2 or m * n <= tuning.measured_here
    return usual and m >= n and a.numel() > 0 and small and tuning.lapack_first(m, n)


def _reflected(q: torch.Tensor, r: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
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


def _measured(a: np.ndarray, q: np.ndarray, r: np.ndarray, options: Options) -> QRCertificate | None:
    """Residual and orthogonality along random vectors, as :mod:`neula.certificates.qr` measures them.

    None where squares of a norm of a column are not to be trusted.
    """
    norms = _safe_norms(r, options)
    if norms is None:
        return None
    g = _vectors(r.shape[1])
    several, here = torch.get_num_threads() > 1, options.engine.tuning.measured_here
    if a.size > (ALONE if several else here):
        way = _errors_in_torch if several else _errors_by_blocks
        return certificate_of(*way(a, q, r, g, norms), a.shape, options.target)
    a, q, r = (x.astype(np.float64, copy=False) for x in (a, q, r))
    scaled = g / norms[:, None]
    image, loss = a.dot(scaled), q.T.dot(q.dot(g)) - g
    missed = image - q.dot(r.dot(scaled))
    residual, size, orthogonality = (length(x.ravel(order="K")) for x in (missed, image, loss))
    return certificate_of(residual, size, orthogonality, a.shape, options.target)


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


def _measured_together(
    a: np.ndarray, q: np.ndarray, r: np.ndarray, options: Options
) -> QRCertificates | None:
    """The same of a batch, some at a time: NumPy takes a part of the time of torch for thin products."""
    norms = _safe_norms(r, options)
    if norms is None:
        return None
    g, measures = _vectors(r.shape[-1]), []
    step = max(1, BLOCK // a[0].size)
    for start in range(0, len(a), step):
        part = slice(start, start + step)
        some, basis, triangle = (x[part].astype(np.float64, copy=False) for x in (a, q, r))
        scaled = g / norms[part, :, None]
        image = some @ scaled
        missed = image - basis @ (triangle @ scaled)
        loss = basis.transpose(0, 2, 1) @ (basis @ g) - g
        measures.append([np.einsum("pij,pij->p", x, x) for x in (missed, image, loss)])
    found = np.sqrt(np.concatenate(measures, axis=1))
    return certificates_of(found, torch.float64, a.shape[-2:], options.target)


def _safe_norms(r: np.ndarray, options: Options) -> np.ndarray | None:
    """Norms of columns; None where the squares of one are not to be trusted."""
    low, high = SAFE_NORMS[options.target.dtype]
    if r.size > ALONE:
        norms: np.ndarray = torch.linalg.vector_norm(torch.from_numpy(r), dim=-2).numpy()
    else:
        norms = np.sqrt(np.einsum("...ij,...ij->...j", r, r))
    return norms if norms.min() > low and norms.max() < high else None


@lru_cache(maxsize=64)
def _vectors(n: int) -> np.ndarray:
    found: np.ndarray = gaussian_probes(n, torch.device("cpu")).numpy()
    return found
