"""Column scaling by powers of two, so that nothing overflows fp16 (Zhang, Baharlouei, Wu 2020, section 3.5).

With ``A D = Q R_s`` the factor of ``A`` is ``R = R_s D^-1``: ``D`` holds powers of two, so neither step
rounds anything.
"""

from __future__ import annotations

import torch

from neula.kernels.shift import shift

SAFE_NORMS = {torch.float32: (1e-12, 1e18), torch.float64: (1e-140, 1e150)}
"""Norms of columns whose squares are far enough from underflow, also those of what is left of a column after
projections, and from overflow."""


# item: Q scaling
def power_of_two_scales(column_max: torch.Tensor) -> torch.Tensor:
    """Scales that bring the largest element of every column into [1/2, 1); 1 for zero columns.

    They are powers of two in the dtype of the largest magnitudes, each with a finite reciprocal.
    """
    limit = 126 if column_max.dtype == torch.float32 else 1022
    _, exponent = torch.frexp(column_max)
    scales = torch.ldexp(torch.ones_like(column_max), (-exponent).clamp(-limit, limit))
    return scales.masked_fill(~(column_max > 0), 1.0)


def binary_exponents(largest: torch.Tensor) -> torch.Tensor:
    """The e with ``largest 2^-e`` in [1/2, 1), also for subnormal numbers; 0 for zero.

    Of complex numbers that of the larger part.

    >>> binary_exponents(torch.tensor([0.0, 1.0, 6.0, 2.0**-1074], dtype=torch.float64)).tolist()
    [0, 1, 3, -1073]
    """
    if largest.is_complex():
        largest = torch.maximum(largest.real.abs(), largest.imag.abs())
    return torch.frexp(largest)[1]


def two_product(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x y`` as an unevaluated sum of the rounded product and its rounding error, in double precision.

    Dekker's algorithm, by products of halves of the significands; exact unless numbers are near the ends of
    the range. One of them may be complex.

    >>> x = torch.tensor([1 + 2.0**-40], dtype=torch.float64)
    >>> high, low = two_product(x, x)
    >>> high.item() == 1 + 2.0**-39, low.item() == 2.0**-80
    (True, True)
    """
    product = x * y
    (a, b), (c, d) = _halves(x), _halves(y)
    return product, b * d - (((product - a * c) - b * c) - a * d)


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper and the lower 26 bits of float64 significands."""
    large = x * (2.0**27 + 1)
    upper = large - (large - x)
    return upper, x - upper


class ScaledUnknowns:
    """Solutions of problems whose A has its columns, and b its own, scaled by powers of two."""

    # columns, b_columns, shape (..., 1, n), (..., 1, k): exponents by which columns of A and of b were
    # divided.
    columns: torch.Tensor
    b_columns: torch.Tensor
    given: bool = False  # whether nothing was scaled

    def unscale(self, y: torch.Tensor) -> torch.Tensor:
        """The x of the problem that was given, for a solution of the scaled one, shape (..., n, k)."""
        if self.given:
            return y
        return shift(y, self.b_columns - self.columns.mT)

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`unscale`."""
        if self.given:
            return x
        return shift(x, self.columns.mT - self.b_columns)

    def residual_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Norms of residuals of the problem that was given, shape (..., k)."""
        return norm if self.given else shift(norm, self.b_columns.squeeze(-2))
