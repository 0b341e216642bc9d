"""QR with column pivoting of one small matrix on a CPU: what LAPACK finds, without a chain."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.linalg import lapack

from neula.algorithms.lapack.independent import PIVOTED
from neula.algorithms.lapack.refinement import length
from neula.algorithms.orthogonal.pivots import lapack_factors
from neula.engines import FP32, FP64
from neula.pipeline.call import Call
from neula.pipeline.result import Attempt, QRResult
from neula.pipeline.result.deferred import Later
from neula.problems.orthogonal.by_kernel import certified
from neula.problems.orthogonal.on_host import measured_on_host
from neula.problems.orthogonal.orth import rank_tolerance
from neula.problems.orthogonal.problem import QROptions

LABEL = "householder with pivoting"

LARGEST = 1 << 17
"""Elements up to which calls take longer than what is called."""


def pivoted_by_lapack(call: Call, mode: str, options: QROptions) -> QRResult[Any] | None:
    """Factors that are accepted, and whose R hides no small singular value; None where there are none."""
    a, target = call.first.tensor, options.target
    if not _suits(call, options) or mode not in ("reduced", "r"):
        return None
    with call.computing(), np.errstate(all="ignore"):  # what is not finite is not accepted
        if not bool(a.isfinite().all()):
            return None
        q, r, order = (x[0] for x in lapack_factors(a[None]))
        measures = measured_on_host(a[:, order], q, r, options)
        certificate, accepted = certified(measures, a.shape, target)
        if accepted is not True or not _shows_all(r.numpy(), rank_tolerance(a.dtype, *a.shape)):
            return None
    fields = {
        "Q": None if mode == "r" else call.first.wrap(q),
        "R": call.first.wrap(r),
        "P": call.first.wrap(order),
        "certificate": certificate,
        "attempts": Later(lambda: (Attempt(LABEL, True, certificate.in_words),)),
        "engine": str(options.engine),
        "accuracy": target.name,
        "seconds": call.seconds,
        "accepted": Later(lambda: call.first.wrap_array(np.ones((), bool))),
    }
    return QRResult.from_fields(fields)


def _suits(call: Call, options: QROptions) -> bool:
    """Whether a matrix is tall, of few columns, in the memory of the host, and not attached to a graph."""
    a = call.first.tensor
    asked = options.named or options.progress is not None or call.differentiable or call.first.places
    if asked or a.ndim != 2 or not (a.is_cpu and options.engine.device.type == "cpu"):
        return False
    usual = a.dtype == options.target.dtype and options.target in (FP32, FP64)
    m, n = a.shape
    return usual and options.engine.tuning.lapack and m >= n and 0 < n <= PIVOTED and a.numel() <= LARGEST


def _shows_all(r: np.ndarray, tolerance: float) -> bool:
    """Whether all singular values count, of columns of norm 1: then R has none to hide."""
    columns = np.sqrt(np.einsum("ij,ij->j", r, r, dtype=np.float64))
    inverse, singular = lapack.dtrtri(r.astype(np.float64, copy=False))
    if singular:
        return False
    return length((columns[:, None] * inverse).ravel(order="K")) * tolerance * len(r) ** 0.5 < 1
