"""A matrix in parts that are kept: made once, a block at a time, and multiplied again and again.

A factorization subtracts products of what it has done with itself. ``gemm.corrected_gemm``
would look for the largest elements of both operands, and split them, each time anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Self

import torch

from neula.kernels.dispatch import kernel
from neula.kernels.products.gemm import SplitProduct, combine, first_that_runs, product_of_parts
from neula.kernels.products.gemm_split_triton import Parts, configs, split_into
from neula.kernels.products.parts import (
    SCHEMES,
    Scheme,
    parts_of,
    round_part,
    row_exponents,
    times_power_of_two,
    unbalanced,
)

ALIGNED = 16
"""Rows start at multiples of so many elements, where bulk copies can."""


@dataclass(frozen=True)
class Kept:
    """A matrix in parts, or a block of one."""

    parts: torch.Tensor  # shape (parts, m, k): rows contiguous
    # Shape (m,): float32: no element of a row is larger in magnitude, from which its scale follows.
    largest: torch.Tensor
    scheme: Scheme = SCHEMES["fp16_cor"]

    @classmethod
    def from_matrix(cls, x: torch.Tensor) -> Self:
        """Split a float32 matrix into its parts."""
        m, k = x.shape
        kept = cls.room(m, k, torch.linalg.vector_norm(x, torch.inf, dim=1))
        keep(x, kept)
        return kept

    @classmethod
    def room(cls, m: int, k: int, largest: torch.Tensor, scheme: Scheme = SCHEMES["fp16_cor"]) -> Self:
        """Room for an m x k matrix."""
        across = -(-k // ALIGNED) * ALIGNED
        parts = torch.empty(scheme.parts, m, across, dtype=scheme.dtype, device=largest.device)
        return cls(parts[..., :k], largest.float(), scheme)

    def block(self, rows: slice, columns: slice) -> Self:
        """A view."""
        return type(self)(self.parts[:, rows, columns], self.largest[rows], self.scheme)

    @property
    def exponents(self) -> torch.Tensor:
        """Rows are ``2**exponents`` times what the parts stand for, shape (m,)."""
        return row_exponents(self.largest[:, None]) - self.scheme.top


@kernel("keep_triton", when=lambda x, into: 0 not in x.shape)
def keep(x: torch.Tensor, into: Kept) -> None:
    """Split a float32 matrix (m, k) into its parts, for which there is room."""
    scheme = into.scheme
    scaled = times_power_of_two(x, -into.exponents[:, None])
    parts = parts_of(scaled, partial(round_part, scheme=scheme), scheme.parts, 2.0**scheme.shift)
    for room, part in zip(into.parts, parts, strict=True):
        room.copy_(part)


@kernel("multiply_kept_triton", when=lambda c, x, y, **_: 0 not in (*c.shape, x.parts.shape[2]))
def multiply_kept(
    c: torch.Tensor, x: Kept, y: Kept, *, alpha: float, beta: float, spare: int = 0
) -> torch.Tensor:
    """``C = alpha X Y^T + beta C`` for X (m, k) and Y (n, k), about as accurate as a float32 product.

    C, float32 and overwritten, is not read if ``beta`` is zero, where it may be narrower.

    Examples
    --------
    >>> kept = Kept.from_matrix(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> multiply_kept(torch.ones(2, 2), kept, kept, alpha=1.0, beta=-1.0)
    tensor([[ 4., 10.],
            [10., 24.]])
    """
    product = product_of_parts([*x.parts], [*y.parts], x.scheme)
    return combine(unbalanced(product, x.exponents, y.exponents), alpha, beta, c)


def keep_triton(x, into):
    split_into(into.parts, x, into.largest, into.scheme)


def multiply_kept_triton(c, x, y, *, alpha, beta, spare=0):
    product = SplitProduct(Parts(x.parts, x.largest), Parts(y.parts, y.largest), x.scheme)
    config = first_that_runs(c.device, x.scheme, tuple(configs(x.scheme)))
    return product(c, alpha, beta, config, product.pieces(config, waves=1, spare=spare), spare)
