"""QR of a batch by a chain of methods, each for all matrices at once, with a certificate for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from neula.algorithms.scaling import SAFE_NORMS, power_of_two_scales
from neula.certificates.qr import QRCertificate, QRCertificates, qr_certificates, qr_measures
from neula.engines import FP32, FP64, Engine, Format
from neula.pipeline.gradients import attach_factors
from neula.pipeline.inputs import Taken, check_finite, finite_members
from neula.pipeline.progress import Progress
from neula.pipeline.result import Attempt, QRResult, report_missed


@dataclass(frozen=True)
class Factors:
    q: torch.Tensor
    r: torch.Tensor
    certificate: QRCertificate | Sequence[QRCertificate]
    attempts: tuple[Attempt, ...]

    @property
    def certificates(self) -> Sequence[QRCertificate]:
        """One for each matrix, also where there is only one."""
        return (self.certificate,) if isinstance(self.certificate, QRCertificate) else self.certificate


def complete(q: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add an orthonormal basis of the complement to Q, and zeros to R."""
    *batch, m, k = q.shape
    complement = torch.linalg.qr(q, mode="complete")[0][..., k:]
    return torch.cat([q, complement], -1), torch.cat([r, r.new_zeros(*batch, m - k, r.shape[-1])], -2)


def empty_factors(matrices: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the factors of matrices of any batch shape."""
    *batch, m, n = matrices.shape
    k = m if mode == "complete" else min(m, n)
    return matrices.new_empty(*batch, m, k), matrices.new_empty(*batch, k, n)


def nothing(matrices: torch.Tensor, mode: str) -> Factors:
    """The factors of no matrices, which are as good as can be."""
    q, r = empty_factors(matrices, mode)
    return Factors(q, r, (), (Attempt("nothing to do", True, "an empty batch"),))


def as_result(
    factors: Factors, taken: Taken, mode: str, engine: Engine, target: Format, strict: bool
) -> QRResult:
    """What the user gets, attached to the graph of A; says so where the accuracy was not reached."""
    a = taken.tensor
    batch = a.shape[:-2]
    q, r = (x.reshape(*batch, *x.shape[-2:]) for x in (factors.q, factors.r))
    if taken.needs_gradient:
        q, r = attach_factors(taken.graph, q, r)
    result = QRResult(
        Q=None if mode == "r" else taken.give_back(q),
        R=taken.give_back(r),
        certificate=factors.certificate,
        attempts=factors.attempts,
        engine=str(engine),
        accuracy=target.name,
    )
    if not result.converged:
        if strict and batch:  # a single matrix has been checked
            check_finite(a, a, "A")
        rejected = torch.tensor([not c.accepted for c in factors.certificates])
        report_missed(
            f"QR is not certified to {target.name} accuracy",
            factors.attempts[-1].reason if batch else str(factors.certificate),
            result,
            rejected.reshape(batch).nonzero().tolist(),
            strict=strict,
        )
    return result


def unusable(bad: int, count: int) -> Attempt:
    return Attempt("none", False, f"{bad} of {count} matrices hold NaN or Inf")


@dataclass(frozen=True)
class Batch:
    """Matrices, and in what their factors are computed."""

    a: torch.Tensor
    target: Format

    @property
    def storage(self) -> Format:
        return FP64 if self.target is FP64 else FP32

    @property
    def k(self) -> int:
        return min(self.a.shape[1:])

    def leading(self, dtype: torch.dtype) -> torch.Tensor:
        """The leading blocks that are not wide; the matrices themselves where nothing changes."""
        return self.a[..., : self.k].to(dtype)

    def scales(self) -> torch.Tensor:
        """Column scales, shape (batch, n)."""
        wide_enough = torch.float64 if self.a.dtype == torch.float64 else torch.float32
        return power_of_two_scales(torch.linalg.vector_norm(self.a, math.inf, dim=1).to(wide_enough))

    def scaled(self, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The leading blocks with their columns scaled."""
        return (self.a[..., : self.k] * scales[:, None, : self.k]).to(dtype)

    def measured(
        self, q: torch.Tensor, r: torch.Tensor, scales: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Factors as they are kept, the R of wide matrices with the columns beyond the square, and errors.

        Without scales, those that make columns of norm 1: R has the norms of A's columns, unless they are out
        of the range in which their squares can be trusted, and then errors are NaN.
        """
        q = q.to(self.storage.dtype)
        r = r.to(torch.float64 if self.a.dtype == torch.float64 else torch.float32)
        if scales is not None:
            r = r / scales[:, None, : self.k]
        if self.a.shape[2] > self.k:
            r = torch.cat([r, self._projected(q, scales).to(r.dtype)], -1)
        if scales is None:
            norms = torch.linalg.vector_norm(r, dim=1)
            low, high = SAFE_NORMS[q.dtype]
            # NaN unless low < norm < high; zero columns are harmless.
            inverse = functional.threshold(norms, low, math.nan).reciprocal_()
            scales = functional.threshold(inverse, 1 / high, math.nan).masked_fill_(norms == 0, 1.0)
        return q, r, qr_measures(self.a, q, r, scales)

    def _projected(self, q: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """``Q^T A`` of the columns beyond the square."""
        rest = self.a[..., self.k :].double()
        if scales is None:
            return q.double().mT @ rest
        beyond = scales[:, None, self.k :]
        return (q.double().mT @ (rest * beyond)) / beyond


class Certified(NamedTuple):
    q: torch.Tensor
    r: torch.Tensor
    certificates: QRCertificates


Method = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From a matrix, or from a batch of them, to Q and R."""


class Link(NamedTuple):
    """A method of a chain.

    Attributes
    ----------
    label : str
        Says what the method does: equal labels, equal methods.
    dtype : torch.dtype
        Of the matrices that it takes.
    method : callable
        QR of a batch of matrices that are not wide; it may overwrite them where they are scaled.
    scaled : bool
        Whether it needs columns whose largest elements are near 1.
    waits : bool
        Whether the host waits for the device in it, or copies to it: then it cannot be played back.
    """

    label: str
    dtype: torch.dtype
    method: Method
    scaled: bool = True
    waits: bool = False


def one_by_one(a: torch.Tensor, method: Method) -> tuple[torch.Tensor, torch.Tensor]:
    """A method of single matrices as one of a batch; a single one is not copied."""
    if len(a) == 1:
        q, r = method(a[0])
        return q[None], r[None]
    factors = [method(x) for x in a]
    return torch.stack([q for q, _ in factors]), torch.stack([r for _, r in factors])


def factorize_together(
    matrices: torch.Tensor,
    mode: str,
    target: Format,
    chain: Sequence[Link],
    engine: Engine,
    progress: Progress | None = None,
) -> Factors:
    """Run a chain: each link for those matrices that were not accepted before.

    A first link that takes matrices as they are saves a scaled copy. It is right unless squares of the
    elements leave the range of the format, and then it is not accepted.
    """
    first, *rest = chain
    found = run_link(first, matrices, target, engine)
    attempts = [_attempt(first.label, found.certificates, progress)]
    lost = torch.empty(0, dtype=torch.int64)
    if not attempts[0].accepted:
        found, lost = _repaired(found, matrices, target, rest, engine, attempts, progress)
    q, r, certificates = found
    if mode == "complete":
        q, r = complete(q, r)
    if len(lost) > 0:
        attempts.append(unusable(len(lost), len(matrices)))
        for factor in (q, r):
            factor[lost.to(factor.device)] = math.nan
    return Factors(q, r, certificates, tuple(attempts))


def _repaired(
    found: Certified,
    matrices: torch.Tensor,
    target: Format,
    chain: Sequence[Link],
    engine: Engine,
    attempts: list[Attempt],
    progress: Progress | None,
) -> tuple[Certified, torch.Tensor]:
    """Replace the factors that were not accepted, and add attempts; also which matrices hold NaN or Inf."""
    q, r, certificates = found
    usable = _usable(matrices, certificates)
    for link in chain:
        failed = (~certificates.accepted & usable).nonzero()[:, 0]
        if len(failed) == 0:
            break
        which = failed.to(matrices.device)
        found = run_link(link, matrices[which], target, engine)
        better = found.certificates.accepted | (found.certificates.error < certificates.error[failed])
        chosen = better.to(matrices.device)
        q[which[chosen]], r[which[chosen]] = found.q[chosen], found.r[chosen]
        certificates = certificates.replaced(failed[better], found.certificates, better)
        attempts.append(_attempt(link.label, found.certificates, progress))
    return Certified(q, r, certificates), (~usable).nonzero()[:, 0]


def run_link(link: Link, matrices: torch.Tensor, target: Format, engine: Engine) -> Certified:
    """One link for all matrices; the host waits only for its certificates."""

    def factorized(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch = Batch(a, target)
        if not link.scaled:
            return batch.measured(*link.method(batch.leading(link.dtype)), None)
        scales = batch.scales()
        return batch.measured(*link.method(batch.scaled(scales, link.dtype)), scales)

    if link.waits:
        q, r, measures = factorized(matrices)
    else:
        q, r, measures = engine.replay(factorized, (matrices,), (link.label, link.scaled, target.name))
    return Certified(q, r, qr_certificates(measures, matrices.shape[1:], target))


def _usable(matrices: torch.Tensor, certificates: QRCertificates) -> torch.Tensor:
    """Which matrices hold neither NaN nor Inf, both of which show in the residual: others are not read."""
    usable = certificates.residual.isfinite()
    doubtful = (~usable).nonzero()[:, 0]
    if len(doubtful) > 0:
        usable[doubtful] = finite_members(matrices[doubtful.to(matrices.device)]).to(usable.device)
    return usable


def _attempt(label: str, certificates: QRCertificates, progress: Progress | None) -> Attempt:
    """Record a link of the chain, with the worst certificate of the matrices that it was tried on."""
    if progress is not None:
        progress(label, 1.0)
    count = len(certificates)
    reason = f"{certificates.rejected} of {count} matrices rejected; the worst: {certificates.worst}"
    return Attempt(label, certificates.rejected == 0, reason)
