"""QR and bases of ranges by the first link of a chain, where that accepts all: of small matrices the records
of a chain take longer than the link.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from neula.algorithms.spectra.numerical_rank import is_invertible, rank_tolerance
from neula.certificates.bounds import Accuracy
from neula.certificates.qr_evidence import QRCertificate, QRCertificates
from neula.engines import FP32, FP64, Engine
from neula.engines.formats import in_double
from neula.errors import part_of_one
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer, answer_of_first
from neula.pipeline.inputs import flattened
from neula.pipeline.plans import Given
from neula.pipeline.result import Attempt, QRResult
from neula.pipeline.result.deferred import Later
from neula.problems.orthogonal.factorize import factorize, goes_at_once, links_for
from neula.problems.orthogonal.factors import QRFactors, as_accepted
from neula.problems.orthogonal.problem import QRJudge, QRMatrices, QROptions, QRValues
from neula.problems.orthogonal.ways import QRLink, is_for_core, is_for_kernel


class QRPlan:
    def __init__(self, link: QRLink, options: QROptions, mode: str = "reduced") -> None:
        self.options, self._link, self._mode = options, link, mode

    def __call__(self, given: Given) -> QRResult[Any] | None:
        found = self.solved(given, torch.from_numpy(given.arrays[0]))
        return found if isinstance(found, QRResult) else None

    def solved(self, given: Given, a: torch.Tensor) -> QRResult[Any] | Answer[QRValues] | None:
        found, certificate = self.first(a)
        if found is None or certificate is None:
            return found
        q, r = (x.reshape(*a.shape[:-2], *x.shape[1:]) for x in (found.values.q, found.values.r))
        return as_accepted(given, self.options, self._mode, (q, r), certificate, found.label)

    def first(self, a: torch.Tensor) -> tuple[Answer[QRValues] | None, QRCertificate | QRCertificates | None]:
        """Answer of the link, and its certificate if all of it is accepted."""
        found = answer_of_first(
            [self._link], QRMatrices(a[None] if a.ndim == 2 else flattened(a), self.options)
        )
        if found is None:
            return None, None
        judge = QRJudge(a.shape[-2:], self.options.target)
        # A link that knows numbers on the host has made them an array.
        numbers = found.measured if isinstance(found.measured, np.ndarray) else None
        if a.ndim == 2:
            one = judge.certificate(found.values, numbers)
            return found, one if one.accepted else None
        if numbers is None:
            numbers = found.values.measures.T.cpu().numpy()
        several = judge.certificates_of_batch(found.values, numbers)
        return found, None if several.rejected else several


def plan_for(a: torch.Tensor, options: QROptions, mode: str = "reduced") -> QRPlan | None:
    """The first link for matrices that keep their dtype and are factorized all at once: on a CPU, and on a
    GPU the kernel of small ones.
    """
    (m, n), target, tuning = a.shape[-2:], options.target, options.engine.tuning
    asked = options.named or options.in_place or options.progress is not None
    if asked or not a.numel() or a.dtype.to_real() != target.dtype or target not in (FP32, FP64):
        return None
    here = a.is_cpu and options.engine.device.type == "cpu" and tuning.lapack_first(m, n)
    matrices = flattened(a)
    if not goes_at_once(matrices, options) or not (here or is_for_kernel(m, n, options)):
        return None
    return QRPlan(links_for(matrices, options)[0], options, mode)


class RangePlan:
    """A plan for orthonormal bases of single matrices of one shape, with independent columns."""

    def __init__(self, plan: QRPlan, rcond: float | None) -> None:
        self.options, self._plan, self._rcond = plan.options, plan, rcond

    def __call__(self, given: Given) -> Any | None:
        """Q; None where it is not accepted, or the inverse of R does not show that the rank is full."""
        m, n = given.arrays[0].shape
        found, certificate = self._plan.first(torch.from_numpy(given.arrays[0])) if m >= n else (None, None)
        if found is None or certificate is None:
            return None
        r, rcond, error = found.values.r[0], self._rcond, 0.0
        if rcond is None:
            rcond, error = rank_tolerance(r.dtype, m, n), n**0.5 * certificate.residual
        if not is_invertible(in_double(r).resolve_conj().numpy(), rcond, error, unit=self._rcond is None):
            return None
        return given.wrap(found.values.q[0].numpy())


def plan_of(A: Any, mode: str = "reduced", **asked: Any) -> QRPlan | None:
    return _of_core(A, mode, **asked) if mode in ("reduced", "r") else None


def range_plan_of(
    A: Any, *, rcond: float | None = None, method: str = "qr", wait: bool = True, **asked: Any
) -> RangePlan | None:
    rcond = part_of_one("rcond", rcond)
    plan = _of_core(A, **asked) if method == "qr" and wait else None
    return None if plan is None else RangePlan(plan, rcond)


def _of_core(
    A: Any,
    mode: str = "reduced",
    *,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    wait: bool = True,
    **others: Any,
) -> QRPlan | None:
    call = Call.begin({"A": A}, engine=engine, accuracy=accuracy, strict=strict)
    a, target = call.first.tensor, call.target
    if a.ndim != 2 or any(others.values()) or not a.is_cpu:
        return None
    (m, n), options = a.shape, QROptions(target, call.engine)
    return plan_for(a, options, mode) if is_for_core(m, n, target) or m < n else None


def solved_by_plan(call: Call, options: QROptions, mode: str) -> QRResult[Any] | Answer[QRValues] | None:
    """The result where the first link is accepted, else what it has found, if anything."""
    plan = _of_call(call, options, mode)
    with call.computing():
        return None if plan is None else plan.solved(Given.of_call(call), call.first.tensor)


def factors_by_plan(call: Call, options: QROptions) -> QRFactors | None:
    """Factors where the first link is accepted, or the chain that continues from it; None without a plan."""
    plan = _of_call(call, options, "reduced")
    with call.computing():
        found, certificate = (None, None) if plan is None else plan.first(call.first.tensor)
    if found is None:
        return None
    if certificate is None:
        return factorize(call.matrices(), "reduced", options, [found])
    attempt = Attempt(found.label, True, Later(lambda: certificate.in_words))
    all_of_them = (certificate,) if isinstance(certificate, QRCertificate) else certificate
    return QRFactors(found.values.q, found.values.r, all_of_them, (attempt,))


def _of_call(call: Call, options: QROptions, mode: str) -> QRPlan | None:
    plain = not (call.differentiable or call.first.places)
    return plan_for(call.first.tensor, options, mode) if plain else None
