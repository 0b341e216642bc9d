"""How numbers become parts of a narrower format, whose products make up those of the numbers.

Ootomo and Yokota, "TSQR on TensorCores with error correction" (2021): an operand is the sum of a number of
the low format and a remainder, which is rounded to the low format as well. Rows are scaled by powers of two
first, which is exact. :mod:`neula.kernels.products.parts_triton` does the same in kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scheme:
    """How a float32 number becomes parts of a narrower format."""

    name: str  # its name in the user's options
    dtype: torch.dtype  # the narrowest type that holds a part
    significand: int  # bits of a part
    # Two, or three: then products of the second parts, and of first and third ones, count as well. One part
    # is no correction.
    parts: int
    # The second part is stored times 2**shift, which keeps it out of the format's subnormal numbers.
    shift: int
    # Exponent of the largest element of a row of A, or a column of B, after scaling. Sums of products stay
    # below 2**100: scales beyond 2**-252 then leave nothing of them.
    top: int

    @property
    def corrections(self) -> list[tuple[int, int]]:
        """Products of parts that are computed in addition to that of the leading ones."""
        return [(i, j) for i in range(self.parts) for j in range(self.parts) if 0 < i + j < self.parts]


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp16_cor", torch.float16, 11, 2, 11, 14),
        Scheme("tf32_cor", torch.float32, 11, 2, 0, 30),
        Scheme("bf16_cor", torch.bfloat16, 8, 3, 0, 30),
    )
}

UNCORRECTED = Scheme("fp16", torch.float16, 11, 1, 0, 14)
"""One part, for the scaling alone: sums are the unit's, truncated."""


def parts_of(
    x: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor], count: int, scale: float
) -> list[torch.Tensor]:
    """Rounded numbers whose sum is about x: ``parts[0] + parts[1] / scale + parts[2] / scale**2 + ...``"""
    parts, rest = [], x
    for _ in range(count):
        parts.append(rounded(rest))
        rest = (rest - parts[-1]) * scale
    return parts


def balanced(x: torch.Tensor, top: int = 14) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale rows of x (m, k) by powers of two, exactly, so that their largest elements lie in ``[2**top,
    2**(top + 1))``; 14 is as large as fp16 allows after rounding.

    Returns float32 numbers, rounded if ``x`` is float64, and exponents: ``x`` is about ``scaled *
    2**exponents[:, None]``.
    """
    exponents = row_exponents(x) - top
    return times_power_of_two(x, -exponents[:, None]).to(torch.float32), exponents


def unbalanced(c: torch.Tensor, a_exponents: torch.Tensor, b_exponents: torch.Tensor) -> torch.Tensor:
    """Undo :func:`balanced` in the product of scaled rows and scaled columns.

    The exponents are added before anything is multiplied: nothing overflows on the way to a result that
    does not.
    """
    return times_power_of_two(c, a_exponents[:, None] + b_exponents)


def row_exponents(x: torch.Tensor) -> torch.Tensor:
    """For each row the e with ``2**e <= max|x| < 2**(e+1)``, in int32; 0 where that is zero or not finite.

    Subnormal numbers count as the smallest normal one, so that every scale and its reciprocal can be
    written as two factors.
    """
    largest = torch.linalg.vector_norm(x, float("inf"), dim=-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    usable = largest.isfinite() & (largest > 0)
    exponents = torch.frexp(largest.clamp_min(torch.finfo(x.dtype).tiny)).exponent - 1
    return torch.where(usable, exponents, 0).to(torch.int32)


def times_power_of_two(x: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """``x 2**exponents``, rounded only where the result itself is too small or too large for the dtype.

    Two factors of the same kind, since one alone may be out of range, and factors that first shrink and
    then grow could lose what the result can hold.
    """
    single = x.dtype == torch.float32
    bias, bits, dtype = (127, 23, torch.int32) if single else (1023, 52, torch.int64)
    exponents = exponents.to(dtype).clamp(2 - 2 * bias, 2 * bias - 2)
    half = exponents >> 1
    first, second = (((e + bias) << bits).view(x.dtype) for e in (half, exponents - half))
    return x * first * second


def round_part(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """float32 rounded to a part, to nearest, ties to even."""
    if scheme.dtype != torch.float32:
        return x.to(scheme.dtype)
    drop = 24 - scheme.significand
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + (1 << (drop - 1)) - 1 + ((bits >> drop) & 1)) & -(1 << drop)
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)
