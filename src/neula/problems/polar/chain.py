"""What is tried for polar factors, cheapest first, and when they are accepted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from neula.certificates.polar import PolarBounds, PolarNumbers
from neula.engines import BF16, FP16, FP64, Arithmetic, Format
from neula.pipeline.chain import Answer, Link, Verdict
from neula.pipeline.inputs import finite_members
from neula.problems.polar.links import PolarLink, by_svd, polynomials
from neula.problems.polar.problem import Matrices, Options, PolarValues

SMALLEST = 7e-4
"""Singular values that the first polynomials are made for, relative to the bound on the norm, which is up to
1.4 times the largest one: of condition numbers up to 1e3."""

ERROR = 5.5e-3
"""What polynomials may leave at the accuracy of bf16; the rest of ``2^-7`` is for rounding errors."""


def chain(options: Options) -> list[PolarLink]:
    """What is tried: polynomials for condition numbers up to 1e3, for any, and the SVD.

    For the accuracy of bf16 they are evaluated in fp16: bf16 would bury small singular values. Where LAPACK
    is fast its SVD comes first: polynomials in float32 take up to 6 times as long for small matrices, and 1.3
    to 2 times for 1024 x 1024 and 512 x 2048, on one core of an AMD EPYC. A threshold that the caller names
    is for the SVD in double precision to decide.
    """
    tuning, target, work = options.engine.tuning, options.target, options.work
    last = _svd(FP64)
    if options.rcond is not None:
        return [last]
    if tuning.lapack:
        return [last] if work is FP64 else [_svd(work), last]
    first, fine = (
        Arithmetic.named(tuning.cheapest(wanted)) for wanted in (FP16 if target is BF16 else work, work)
    )
    error = ERROR if target is BF16 else target.u
    return [
        polynomials(f"polynomials {first.name}", first, SMALLEST, error),
        polynomials(f"more polynomials {fine.name}", fine, fine.u / 2, error),
        last,
    ]


def _svd(format: Format) -> PolarLink:
    return Link(f"svd {format.name}", partial(by_svd, format=format))


@dataclass(frozen=True)
class PolarJudge:
    """Factors are accepted by residual, orthogonality, and the sign of H.

    Attributes
    ----------
    bounds : PolarBounds
    options : Options
    batch : Tensor, shape (batch, m, n)
        What was given: matrices that hold NaN or Inf are not tried again.
    """

    bounds: PolarBounds
    options: Options
    batch: torch.Tensor

    def measure(self, problems: Matrices, answer: Answer[PolarValues]) -> torch.Tensor:
        """Links have done it, since CUDA graphs play it back with the rest."""
        values = answer.values
        return torch.cat([values.rank.double()[:, None], values.measures], 1).T

    def numbers(self, measured: np.ndarray) -> PolarNumbers:
        """What was measured, evaluated."""
        return PolarNumbers.of(measured[1:], weighted=not self.options.small_too)

    def ranks(self, measured: np.ndarray) -> np.ndarray:
        """How many singular values became 1: what a link has counted, all of them, or what was measured."""
        found = self.numbers(measured)
        all_of_them = found.distance <= self.bounds.orthogonality
        count = np.where(all_of_them, min(self.batch.shape[1:]), np.nan_to_num(found.count))
        return np.where(measured[0] >= 0, measured[0], count.round()).clip(0).astype(np.int64)

    def verdict(self, answer: Answer[PolarValues], numbers: np.ndarray) -> Verdict:
        """Of factors that are not accepted those are best whose measures exceed their bounds least."""
        found, bounds = self.numbers(numbers), self.bounds
        # What was cut off is a part of A - U H.
        missing = np.where(numbers[0] >= 0, min(self.batch.shape[1:]) - numbers[0], 0.0)
        residual_bound = bounds.residual + self.options.cutoff * np.sqrt(missing)
        excess = np.maximum(found.residual / residual_bound, found.orthogonality / bounds.orthogonality)
        accepted = (excess <= 1) & found.positive
        demerit = np.array([~accepted, np.nan_to_num(excess, nan=np.inf)])
        worst = int(np.lexsort(demerit[::-1])[-1])
        reason = (
            f"residual {found.residual[worst]:.1e} (bound {residual_bound[worst]:.1e}), "
            f"orthogonality {found.orthogonality[worst]:.1e} (bound {bounds.orthogonality:.1e})"
        )
        if not found.positive[worst]:
            reason += ", H is not positive semidefinite"
        if len(accepted) > 1:
            reason = f"{int((~accepted).sum())} of {len(accepted)} matrices rejected; the worst: {reason}"
        return Verdict(accepted, demerit, reason, accepted | ~self._usable(found))

    def _usable(self, found: PolarNumbers) -> np.ndarray:
        """Which matrices hold neither NaN nor Inf; only those are read whose residual is not finite."""
        usable = np.isfinite(found.residual)
        doubtful = np.flatnonzero(~usable)
        if len(usable) < len(self.batch):  # those that were are no longer tried
            usable[doubtful] = True
        elif len(doubtful) > 0:
            places = torch.from_numpy(doubtful).to(self.batch.device)
            usable[doubtful] = finite_members(self.batch[places]).cpu()
        return usable
