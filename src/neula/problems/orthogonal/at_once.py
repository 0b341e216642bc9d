"""QR of one small matrix on a GPU: by one kernel, which measures its factors as well, and one look at that.

What it does not accept begins with the first link of the chain.
"""

from __future__ import annotations

from typing import Any

import torch

from neula.certificates.bounds import orthogonality_bound
from neula.certificates.qr import exact_certificate
from neula.engines import FP32, FP64
from neula.kernels.small_qr import small_qr
from neula.pipeline.call import Call
from neula.pipeline.result import Attempt, QRResult
from neula.pipeline.result.deferred import Later

LABEL = "cholesky-qr fp64, repeated"

SMALL = 0.125
"""Part of the bound on orthogonality that is left to passes in double precision."""


def qr_at_once(call: Call, mode: str) -> QRResult[Any] | None:
    """The factors where they are accepted, and the matrix is one for this way."""
    a, target = call.first.tensor, call.target
    usual = a.dtype == target.dtype and target in (FP32, FP64) and not call.differentiable
    if not (usual and a.ndim == 2 and 0 < a.numel() * a.shape[1] <= call.engine.tuning.by_host):
        return None
    enough = SMALL * orthogonality_bound(target, a.shape[1])
    if not small_qr.takes(a, enough):
        return None
    q, r, measures = small_qr.kernel(a, enough)
    residual, orthogonality = measures.tolist()  # the host waits
    found = exact_certificate(residual, orthogonality, a.shape, target)
    if not found.accepted:
        return None
    return QRResult(
        Q=None if mode == "r" else call.first.wrap(q),
        R=call.first.wrap(r),
        certificate=found,
        attempts=Later(lambda: (Attempt(LABEL, True, str(found)),)),
        engine=str(call.engine),
        accuracy=target.name,
        seconds=call.seconds,
        accepted=Later(lambda: call.first.wrap(torch.ones((), dtype=torch.bool, device=a.device))),
    )
