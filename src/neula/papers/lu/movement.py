"""Section 4.1: the data that Algorithms 3.1 and 4.1 move, by the paper's model and counted by an engine."""

from __future__ import annotations

import math

import torch

from neula.algorithms.elimination.lu import lu_factorize
from neula.engines import FP16, FP32, EmulatedEngine
from neula.papers.lu import algorithms as lu

BLOCKS = 128
"""q = n / r: the model is of the order ``q n^2``, and what it leaves out of the order ``n^2``."""

LEFT_OUT = 7
"""Bytes an element of A that the model leaves out, at most. Algorithm 4.1: 4 for the buffer, 2 for the L and
U that are operands of U and of L, 1 for those of the diagonal blocks. Algorithm 3.1: 2 for L and U.
"""


class CountingEngine(EmulatedEngine):
    """Counts the bytes of the operands of its products, each in its own format.

    As the paper's model has it, fast memory holds blocks of r rows and columns: an element is loaded once for
    each product that it takes part in. Panels in float32 are factorized by other engines, which do not count.
    """

    loaded = 0

    def gemm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> torch.Tensor:
        added = c.numel() * self.storage.itemsize if c is not None and beta != 0.0 else 0
        self.loaded += added + (a.numel() + b.numel()) * self.format.dtype.itemsize
        return super().gemm(a, b, c, alpha, beta)

    def gemm_low(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        self.loaded += (a.numel() + b.numel() + c.numel()) * self.format.dtype.itemsize
        # What the numbers are is no matter here: rounded once.
        return self.round(c - EmulatedEngine.gemm(self, a, b), c)


def panel_of(n: int) -> int:
    """R with about :data:`BLOCKS` blocks in a row of the matrix."""
    return max(1, n // BLOCKS)


# item: L (4.4) and (4.5)
def counted_bytes(a: torch.Tensor, name: str) -> int:
    """What the products of Algorithm 3.1 or 4.1 load, with panels of :func:`panel_of` columns."""
    engine = CountingEngine(a.device, FP16, "ideal")
    storage = FP32 if name == lu.SINGLE else FP16
    lu_factorize(a, engine, variant=lu.variant_of(name), panel=panel_of(len(a)), storage=storage)
    return engine.loaded


# item: L (4.4) and (4.5)
def modelled_bytes(n: int, name: str) -> float:
    """Formulas (4.4), for Algorithm 3.1 with a matrix in either format, and (4.5), for Algorithm 4.1."""
    r = panel_of(n)
    q = n / r
    steps = range(1, math.ceil(q) + 1)
    if name == lu.BUFFERED:
        return 2 * sum((q - k) * (k - 1) for k in steps) * r**2 * 2
    return sum((q - k) ** 2 for k in steps) * r**2 * (4 if name == lu.SINGLE else 2)
