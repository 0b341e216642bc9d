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
from neula.certificates.probes import gaussian_probes
from neula.certificates.qr import QRCertificate, QRCertificates
from neula.engines import FP32, FP64
from neula.kernels.probes import probe_errors
from neula.kernels.probes_host import reflected_errors
from neula.pipeline.call import Call
from neula.pipeline.result import Attempt, QRResult
from neula.pipeline.result.deferred import Later
from neula.problems.orthogonal.by_kernel import LABEL, Factored, certified, factorized_by_kernel
from neula.problems.orthogonal.problem import Options

ALONE = 1 << 16
"""Elements of a matrix whose products with four vectors NumPy computes without threads: those of its
BLAS would wait for the processor while torch's, which have just reflected, wait busily for more work."""

BLOCK = 1 << 17
"""Elements of a batch that are measured together, while they are in the cache."""


def qr_by_lapack(call: Call, mode: str, options: Options) -> QRResult[Any] | None:
    """The factors where all are accepted, and the matrices are some for this way."""
    a, target = call.first.tensor, options.target
    if not _suits(call, options) or mode not in ("reduced", "r"):
        return None
    attempts: list[tuple[str, bool, QRCertificate | QRCertificates]] = []
    found = factorized_by_kernel(a, _vectors(a.shape[-1]), target)
    if found is not None:
        attempts.append((LABEL, found.all_accepted, found.certificate))
    if found is None or not attempts[-1][1]:
        with call.computing():
            found = _reflected(a, options) if found is None or a.ndim == 2 else _mended(a, found, options)
        if not found.all_accepted:
            return None
        attempts.append((f"householder {target.name}", True, found.certificate))
    fields = {
        "Q": None if mode == "r" else call.first.wrap(found.q),
        "R": call.first.wrap(found.r),
        "certificate": found.certificate,
        "attempts": Later(lambda: tuple(Attempt(label, good, of.in_words) for label, good, of in attempts)),
        "engine": str(options.engine),
        "accuracy": target.name,
        "seconds": call.seconds,
        "accepted": Later(lambda: call.first.wrap_array(np.ones(a.shape[:-2], bool))),
    }
    return QRResult.of(fields)


def _mended(a: torch.Tensor, found: Factored, options: Options) -> Factored:
    """A batch whose members that are not accepted are reflected."""
    missed = ~np.asarray(found.accepted)
    more = _reflected(a[torch.from_numpy(missed)], options)
    q, r, measures = found.q, found.r, found.measures
    q.numpy()[missed], r.numpy()[missed], measures[:, missed] = more.q.numpy(), more.r.numpy(), more.measures
    return Factored(q, r, measures, *certified(measures, a.shape, options.target))


def _reflected(a: torch.Tensor, options: Options) -> Factored:
    """Factors by LAPACK's reflections, the diagonal of R nonnegative, and what is measured of them."""
    g = _vectors(a.shape[-1])
    q, r = torch.linalg.qr(a)
    measures = None
    if math.prod(a.shape[-2:]) <= _measured_alone(options) or a.ndim > 2:
        measures = reflected_errors(a, q, r, g)
    if measures is None:
        with np.errstate(all="ignore"):  # what is not finite is not accepted
            basis, triangle = _with_signs(q, r)
            measured = _measured if a.ndim == 2 else _measured_together
            measures = measured(a.numpy(), basis, triangle, options)
    return Factored(q, r, measures, *certified(measures, a.shape, options.target))


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


def _measured(a: np.ndarray, q: np.ndarray, r: np.ndarray, options: Options) -> np.ndarray:
    """Residual and orthogonality along random vectors, as :mod:`neula.certificates.qr` measures them."""
    norms, g = _norms(r), _vectors(r.shape[1])
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


def _measured_alone(options: Options) -> int:
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


def _measured_together(a: np.ndarray, q: np.ndarray, r: np.ndarray, options: Options) -> np.ndarray:
    """The same of a batch, some at a time: NumPy takes a part of the time of torch for thin products."""
    norms, g, measures = _norms(r), _vectors(r.shape[-1]), []
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
def _vectors(n: int) -> np.ndarray:
    found: np.ndarray = gaussian_probes(n, torch.device("cpu")).numpy()
    return found
