"""QR of small matrices on a GPU: by one kernel, which measures its factors as well, and one look at that.

What it does not accept begins with the first link of the chain.
"""

from __future__ import annotations

from typing import Any

import torch

from neula.certificates.bounds import orthogonality_bound
from neula.certificates.qr import exact_certificate, exact_certificates
from neula.certificates.qr_evidence import QRCertificate, QRCertificates
from neula.engines import FP32, FP64, Format
from neula.kernels.small_problems.small_qr import small_qr
from neula.pipeline.call import Call
from neula.pipeline.inputs import flattened
from neula.pipeline.result import QRResult
from neula.problems.orthogonal.by_kernel import LABEL
from neula.problems.orthogonal.factors import as_accepted

SMALL = 0.125
"""Part of the bound on orthogonality that is left to passes in double precision."""


def qr_at_once(call: Call, mode: str) -> QRResult[Any] | None:
    """The factors where all are accepted, and the matrices are for this way."""
    a, target = call.first.tensor, call.target
    (m, n), dtypes = a.shape[-2:], (a.dtype, target)
    usual = dtypes in ((FP32.dtype, FP32), (FP64.dtype, FP64)) and not call.differentiable
    if not (usual and 0 < m * n * n <= call.engine.tuning.by_host):
        return None
    matrices, enough = flattened(a), SMALL * orthogonality_bound(target, n)
    if not small_qr.takes(matrices, enough):
        return None
    q, r, measures = small_qr.kernel(matrices, enough)
    if (found := _certified(measures, a.shape, target)) is None:
        return None
    return as_accepted(call, mode, (q.view(a.shape), r.view(*a.shape[:-2], n, n)), found, LABEL)


def _certified(
    measures: torch.Tensor, shape: torch.Size, target: Format
) -> QRCertificate | QRCertificates | None:
    """What the kernel has measured, if all factors are accepted; the host waits."""
    if len(shape) == 2:  # microseconds count
        (norms,) = measures.tolist()
        one = exact_certificate(norms, shape, target)
        return one if one.accepted else None
    found = exact_certificates(measures.cpu().numpy(), shape[-2:], target)
    return None if found.rejected else found
