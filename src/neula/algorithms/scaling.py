"""Column scaling by powers of two, so that nothing overflows fp16 (Zhang, Baharlouei, Wu 2020, section 3.5).

With ``A D = Q R_s`` the factor of ``A`` is ``R = R_s D^-1``: ``D`` holds powers of two, so neither step
rounds anything.
"""

from __future__ import annotations

import torch

SAFE_NORMS = {torch.float32: (1e-12, 1e18), torch.float64: (1e-140, 1e150)}
"""Norms of columns whose squares are far enough from underflow, also those of what is left of a column after
projections, and from overflow."""


def power_of_two_scales(column_max: torch.Tensor) -> torch.Tensor:
    """Scales that bring the largest element of every column into [1/2, 1); 1 for zero columns.

    Parameters
    ----------
    column_max : Tensor, shape (n,)
        Largest magnitude of each column, float32 or float64.

    Returns
    -------
    Tensor, shape (n,)
        Powers of two in the same dtype, each with a finite reciprocal.
    """
    limit = 126 if column_max.dtype == torch.float32 else 1022
    _, exponent = torch.frexp(column_max)
    scales = torch.ldexp(torch.ones_like(column_max), (-exponent).clamp(-limit, limit))
    return torch.where(column_max > 0, scales, 1.0)
