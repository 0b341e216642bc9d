"""The factors of one matrix or of a batch, as they are returned."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from neula.certificates.qr import certificates_of
from neula.certificates.qr_evidence import QRCertificate, QRCertificates
from neula.engines import Format
from neula.pipeline.call import Call
from neula.pipeline.chain import Run
from neula.pipeline.distributed import Give
from neula.pipeline.factors import QRMethods
from neula.pipeline.gradients import attach_factors
from neula.pipeline.plans import Given, accepted_result
from neula.pipeline.result import Attempt, QRResult
from neula.pipeline.result.shown import Later
from neula.problems.orthogonal.problem import QROptions, QRValues, raw_dtype
from neula.problems.orthogonal.ways import holding_nan


@dataclass(frozen=True)
class QRFactors:
    """Q and R in working precision, with the evidence."""

    q: torch.Tensor  # shape (batch, m, k): or H, shape (batch, m, n), in Householder form
    r: torch.Tensor  # shape (batch, k, n): or tau, shape (batch, k)
    certificates: Sequence[QRCertificate]  # one for each matrix
    attempts: tuple[Attempt, ...]

    @classmethod
    def from_run(cls, run: Run[Any], certificates: Sequence[QRCertificate]) -> QRFactors:
        """Factors at the end of a chain; NaN for matrices that hold NaN or Inf."""
        q, r, attempts = run.found.q, run.found.r, list(run.attempts)
        lost = ~run.accepted
        lost[run.open] = False
        if lost.any():
            attempts.append(Attempt("none", False, holding_nan(int(lost.sum()), len(q))))
            for factor in (q, r):
                factor[torch.from_numpy(lost).to(factor.device)] = math.nan
        return cls(q, r, certificates, tuple(attempts))

    @classmethod
    def of_nothing(cls, matrices: torch.Tensor, mode: str, target: Format) -> QRFactors:
        """The factors of no matrices, or of matrices without elements: nothing in them can be wrong."""
        # Without columns the complete Q is the identity, as in NumPy and torch.
        count, m, n = matrices.shape
        k = m if mode == "complete" else min(m, n)
        q, r = matrices.new_empty(count, m, k), matrices.new_empty(count, k, n)
        if q.numel() > 0:
            q.copy_(torch.eye(m, dtype=q.dtype, device=q.device))
        perfect = certificates_of(np.zeros((4, count)), torch.float64, (m, max(n, 1)), target)
        return cls(q, r, tuple(perfect), (Attempt("nothing to do", True, "no elements"),))

    def completed(self) -> QRFactors:
        """Append an orthonormal basis of the complement to Q, and zeros to R."""
        *batch, m, k = self.q.shape
        complement = torch.linalg.qr(self.q, mode="complete")[0][..., k:]
        zeros = self.r.new_zeros(*batch, m - k, self.r.shape[-1])
        zeros[self.q.isnan().all((-2, -1))] = math.nan  # where there are no factors
        return replace(self, q=torch.cat([self.q, complement], -1), r=torch.cat([self.r, zeros], -2))

    @property
    def residual(self) -> torch.Tensor:
        return self._of_each("residual")

    @property
    def accepted(self) -> torch.Tensor:
        return self._of_each("accepted")

    def _of_each(self, name: str) -> torch.Tensor:
        found = self.certificates
        if isinstance(found, QRCertificates):  # thousands take milliseconds one by one
            return torch.from_numpy(getattr(found, name))
        return torch.from_numpy(np.array([getattr(c, name) for c in found]))


def as_pending(
    values: QRValues, accepted: torch.Tensor, call: Call, mode: str, finish: Callable[[], Any]
) -> QRResult:
    """The result of first links before anything is read from the device."""
    batch = call.first.tensor.shape[:-2]
    q, r = (x.reshape(*batch, *x.shape[1:]) for x in (values.q, values.r))
    if call.differentiable:
        q, r = attach_factors(call.first.graph, q, r)
    fits = (r.to(call.dtype).isfinite() == r.isfinite()).flatten(len(batch)).all(-1)
    Q, R = None if mode == "r" else call.hand_back(q), call.hand_back(r)
    return QRResult(
        Q=Q,
        R=R,
        engine=str(call.engine),
        accuracy=call.target.name,
        accepted=call.hand_back(accepted.reshape(batch) & fits, torch.bool),
        _pending=finish,
        _factors=_methods(call.first.graph, (Q, R), (q, r)),
    )


def as_accepted(
    given: Given,
    options: QROptions,
    mode: str,
    factors: tuple[torch.Tensor, torch.Tensor],
    certificate: QRCertificate | QRCertificates,
    label: str,
    order: torch.Tensor | None = None,
) -> QRResult[Any]:
    """Accepted result of one method, from factors in the shape and dtype of A, in few microseconds."""
    give, (q, r) = given.give, factors
    fields = {
        "Q": None if mode == "r" else give(q),
        "R": give(r.resolve_conj()),
        "certificate": certificate,
        "accepted": Later(lambda: give(torch.ones(q.shape[:-2], dtype=torch.bool, device=q.device))),
    }
    if order is not None:
        fields["P"] = give(order)
    elif given.arrays:
        fields["_factors"] = _methods(given.arrays[0], (fields["Q"], fields["R"]), factors)
    return accepted_result(QRResult, given, options, label, lambda: certificate.in_words, fields)


def give_factors_back(result: QRResult, tall: Give, replicated: Give) -> QRResult:
    """Factors of a distributed matrix: Q distributed like A, R on all processes."""
    Q = None if result.Q is None else tall(result.Q)
    return replace(result, Q=Q, R=replicated(result.R), _factors=None)


def _methods(matrix: Any, arrays: tuple[Any, Any], factors: tuple[torch.Tensor, ...]) -> QRMethods | None:
    """Methods of the result; None unless it has a Q, and R as many columns as that."""
    m, n = factors[0].shape[-2:]
    if arrays[0] is None or n != factors[1].shape[-1]:
        return None
    return QRMethods(matrix if m == n else None, *arrays)  # tall ones are not kept alive


def as_result(
    factors: QRFactors, call: Call, mode: str, options: QROptions, order: torch.Tensor | None = None
) -> QRResult:
    batch, certificates = call.first.tensor.shape[:-2], factors.certificates
    q, r = (x.reshape(*batch, *x.shape[1:]) for x in (factors.q, factors.r))
    if call.differentiable:
        q, r = attach_factors(call.first.graph, q, r)
    dtype = raw_dtype(call.dtype) if mode == "raw" else None
    pair = (None if mode == "r" else call.give_back(q, dtype)), call.give_back(r, dtype)
    Q, R, H, tau = (None, None, *pair) if mode == "raw" else (*pair, None, None)
    result: QRResult[Any] = QRResult(
        Q=Q,
        R=R,
        H=H,
        tau=tau,
        certificate=certificates if batch else certificates[0],
        P=None if order is None else call.give_back(order.reshape(*batch, order.shape[-1]), order.dtype),
        **(call.told(factors.attempts) | {"engine": str(options.engine), "accuracy": options.target.name}),
        accepted=Later(lambda: call.give_back(factors.accepted.reshape(batch), torch.bool)),
        _factors=None
        if order is not None or options.in_place
        else _methods(call.first.graph, (Q, R), (q, r)),
    )
    if not result.converged:
        call.report_missed(
            f"QR is not certified to {options.target.name} accuracy",
            factors.attempts[-1].reason if batch else str(certificates[0]),
            result,
            (~factors.accepted).reshape(batch).nonzero().tolist(),
        )
    return result
