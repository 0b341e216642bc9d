"""QR on a CPU: the first links of a chain without the chain.

For small matrices tensors of batches and records of what was tried take many times as long as LAPACK.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from neula.certificates.qr import QRCertificate, QRCertificates
from neula.engines import FP32, FP64
from neula.pipeline.call import Call
from neula.pipeline.result import Attempt, QRResult
from neula.pipeline.result.deferred import Later
from neula.problems.orthogonal.by_kernel import LABEL, KernelQRFactors, certified, factorized_by_kernel
from neula.problems.orthogonal.by_products import factorized_by_products, label_of
from neula.problems.orthogonal.on_host import measured_on_host, probe_vectors
from neula.problems.orthogonal.problem import QROptions


class LapackQRFactors(NamedTuple):
    """Factors that are all accepted, and what led to them."""

    found: KernelQRFactors
    attempts: list[tuple[str, bool, QRCertificate | QRCertificates]]

    def result(self, call: Call, mode: str, options: QROptions) -> QRResult[Any]:
        """What the user gets."""
        found, wrap = self.found, call.first.wrap
        fields = {
            "Q": None if mode == "r" else wrap(found.q),
            "R": wrap(found.r),
            "certificate": found.certificate,
            "attempts": Later(
                lambda: tuple(Attempt(way, good, of.in_words) for way, good, of in self.attempts)
            ),
            "engine": str(options.engine),
            "accuracy": options.target.name,
            "seconds": call.seconds,
            "accepted": Later(lambda: call.first.wrap_array(np.ones(found.q.shape[:-2], bool))),
        }
        return QRResult.from_fields(fields)


def factorized_by_lapack(call: Call, options: QROptions) -> LapackQRFactors | None:
    """The factors where all are accepted, and the matrices are some for this way."""
    a, target = call.first.tensor, options.target
    if not _suits(call, options):
        return None
    attempts: list[tuple[str, bool, QRCertificate | QRCertificates]] = []
    found: KernelQRFactors | None
    with call.computing():
        if a.ndim == 2 and options.engine.tuning.cholesky_qr_first(*a.shape):
            label, found = label_of(target), factorized_by_products(a, options)
        else:
            label, found = LABEL, factorized_by_kernel(a, probe_vectors(a.shape[-1]), target)
    if found is not None:
        attempts.append((label, found.all_accepted, found.certificate))
    if found is None or not attempts[-1][1]:
        with call.computing():
            found = _reflected(a, options) if found is None or a.ndim == 2 else _mended(a, found, options)
        if not found.all_accepted:
            return None
        attempts.append((f"householder {target.name}", True, found.certificate))
    return LapackQRFactors(found, attempts)


def qr_by_lapack(call: Call, mode: str, options: QROptions) -> QRResult[Any] | None:
    """The result of :func:`factorized_by_lapack`."""
    alone = factorized_by_lapack(call, options) if mode in ("reduced", "r") else None
    return None if alone is None else alone.result(call, mode, options)


def _mended(a: torch.Tensor, found: KernelQRFactors, options: QROptions) -> KernelQRFactors:
    """A batch whose members that are not accepted are reflected."""
    missed = ~np.asarray(found.accepted)
    more = _reflected(a[torch.from_numpy(missed)], options)
    q, r, measures = found.q, found.r, found.measures
    q.numpy()[missed], r.numpy()[missed], measures[:, missed] = more.q.numpy(), more.r.numpy(), more.measures
    return KernelQRFactors(q, r, measures, *certified(measures, a.shape, options.target))


def _reflected(a: torch.Tensor, options: QROptions) -> KernelQRFactors:
    """Factors by LAPACK's reflections, the diagonal of R nonnegative, and what is measured of them."""
    q, r = torch.linalg.qr(a)
    measures = measured_on_host(a, q, r, options)
    return KernelQRFactors(q, r, measures, *certified(measures, a.shape, options.target))


def _suits(call: Call, options: QROptions) -> bool:
    """Whether matrices are tall, in the memory of the host, neither large nor attached to a graph."""
    a, tuning = call.first.tensor, options.engine.tuning
    asked = options.named or options.in_place or options.progress is not None or call.differentiable
    if asked or not (2 <= a.ndim <= 3 and a.is_cpu and options.engine.device.type == "cpu"):
        return False
    usual = a.dtype == options.target.dtype and options.target in (FP32, FP64) and not call.first.places
    m, n = a.shape[-2:]
    small = a.ndim == 2 or m * n <= tuning.measured_here
    return usual and m >= n and a.numel() > 0 and small and tuning.lapack_first(m, n)
