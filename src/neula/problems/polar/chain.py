"""What is tried for polar factors, cheapest first, and when they are accepted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from neula.algorithms.polar.polynomials import composition, image
from neula.certificates.polar import PolarBounds, PolarNumbers
from neula.engines import BF16, FP16, FP64, Arithmetic, Format
from neula.errors import of_batch
from neula.pipeline.chain import Answer, Link, Verdict
from neula.pipeline.inputs import finite_members
from neula.problems.polar.links import PolarLink, by_svd, polynomials
from neula.problems.polar.problem import PolarMatrices, PolarOptions, PolarValues

SMALLEST = 7e-4
"""Singular values that the first polynomials are made for, relative to the bound on the norm, which is up to
1.4 times the largest one: of condition numbers up to 1e3."""

NEXT = 1e-2
"""The same for those that take on what these leave: of condition numbers up to 3e5."""

ERROR = 5.5e-3
"""What polynomials may leave at the accuracy of bf16; the rest of ``2^-7`` is for rounding errors."""

MARGIN = {"fp16": 2.0**-6, "fp16_cor": 2.0**-9, "fp32": 2.0**-9, "fp64": 2.0**-9}
"""By how much numbers stay below 1 between two polynomials: several times what rounding errors add."""


def chain(options: PolarOptions) -> list[PolarLink]:
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
    error = ERROR if target is BF16 else 2 * target.u
    least = fine.u / 2
    steps = partial(composition, error=error, margin=MARGIN[fine.name])
    begun = composition(SMALLEST, error, MARGIN[first.name])
    found = [polynomials(f"polynomials {first.name}", first, begun)]
    if first != fine:  # what is small is lost in what the first have left
        return [*found, polynomials(f"more polynomials {fine.name}", fine, steps(least)), last]
    more = steps(NEXT)
    rest = steps(image(more, image(begun, least)))
    for word, on in (("more", more), ("still more", rest)):
        found.append(polynomials(f"{word} polynomials {fine.name}", fine, on, on=True))
    return [*found, last]


def _svd(format: Format) -> PolarLink:
    return Link(f"svd {format.name}", partial(by_svd, format=format))


@dataclass(frozen=True)
class PolarJudge:
    """Factors are accepted by residual, orthogonality, and the sign of H.

    Attributes
    ----------
    bounds : PolarBounds
    options : PolarOptions
    batch : Tensor, shape (batch, m, n)
        What was given: matrices that hold NaN or Inf are not tried again.
    """

    bounds: PolarBounds
    options: PolarOptions
    batch: torch.Tensor

    @classmethod
    def for_batch(cls, batch: torch.Tensor, options: PolarOptions) -> PolarJudge:
        """The judge of a batch of matrices."""
        return cls(options.bounds(batch.shape), options, batch)

    @property
    def full(self) -> int:
        """The full rank."""
        return min(self.options.shape_of(self.batch.shape))

    def measure(self, problems: PolarMatrices, answer: Answer[PolarValues]) -> torch.Tensor:
        """Links have done it, since CUDA graphs play it back with the rest."""
        values = answer.values
        return torch.cat([values.rank.double()[:, None], values.measures], 1).T

    def numbers(self, measured: np.ndarray) -> PolarNumbers:
        """What was measured, by name."""
        return PolarNumbers(*measured[1:])

    def ranks(self, measured: np.ndarray) -> np.ndarray:
        """How many singular values became 1: what a link has counted, or what was measured."""
        ranks = self.numbers(measured).ranks(self.bounds, self.full)
        return np.where(measured[0] >= 0, measured[0], ranks).astype(np.int64)

    def verdict(self, answer: Answer[PolarValues], numbers: np.ndarray) -> Verdict:
        """Of factors that are not accepted those are best whose measures exceed their bounds least."""
        found, bounds = self.numbers(numbers), self.bounds
        # What was cut off is a part of A - U H.
        missing = np.where(numbers[0] >= 0, self.full - numbers[0], 0.0)
        cut_off = self.options.cutoff(self.batch.shape) * np.sqrt(missing)
        accepted = found.accepted_by(bounds, cut_off)
        residual_bound = bounds.residual + cut_off
        excess = np.maximum(found.residual / residual_bound, found.orthogonality / bounds.orthogonality)
        penalty = np.array([~accepted, np.nan_to_num(excess, nan=np.inf)])
        reason = self.reason(found, int(np.lexsort(penalty[::-1])[-1]))
        reason = of_batch(reason, int((~accepted).sum()), len(accepted), "matrices")
        return Verdict(accepted, penalty, reason, accepted | ~self._usable(found))

    def reason(self, found: PolarNumbers, place: int) -> str:
        """What was measured of one of the matrices."""
        bounds = self.bounds
        measured = (
            f"residual {found.residual[place]:.1e} (bound {bounds.residual:.1e}), "
            f"orthogonality {found.orthogonality[place]:.1e} (bound {bounds.orthogonality:.1e})"
        )
        indefinite = np.isfinite(found.residual[place]) and found.positive[place] != 1
        return measured + (", H is not positive semidefinite" if indefinite else "")

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
