"""Refinement in one launch, with the limits of :mod:`neula.algorithms.krylov.batched_lstsq`."""

from __future__ import annotations

from functools import lru_cache

from neula.algorithms.krylov.batched_lstsq import ROUNDING
from neula.certificates.forward_error import COMPUTED, MAX_RATE
from neula.certificates.residuals import DOUBLED
from neula.certificates.stagnation import FLOOR, STAGNATION
from neula.kernels.small_problems.seminormal import RefinementLimits


@lru_cache(maxsize=64)
def limits_of(tolerance: float, max_steps: int) -> RefinementLimits:
    """Limits of a refinement in one launch, equal to those of the refinement step by step."""
    return RefinementLimits(
        tolerance=tolerance,
        max_steps=max_steps,
        max_rate=MAX_RATE,
        rounding=ROUNDING,
        noise=DOUBLED,
        floor=FLOOR,
        stagnation=STAGNATION,
        computed=COMPUTED,
    )
