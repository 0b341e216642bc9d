"""Tensor-core arithmetic on any CPU, bit by bit where the hardware is documented.

Operands are rounded to the low format. A product of two numbers of 11 bits has 22 and is exact in fp32;
what differs between machines is how products are summed:

``"fp32"``
    fp32, round to nearest: what an ideal unit would do.
``"fp32_rz"``
    ``block`` products and the running sum are added exactly, then truncated to fp32: what tensor cores do
    (block 4 on Volta, 8 on Ampere, 16 on Hopper).
``"fp16"``
    as before, but rounded to fp16 (the TC16 mode of the papers).

:meth:`EmulatedEngine.gemm_low` rounds to the low format after every ``block`` products, whatever the mode: C
is in that format before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Self

import torch

from neula.engines.engine import Engine, Named
from neula.engines.formats import FP16, FP32, FP64, round_to, round_toward_zero
from neula.engines.shipped import EMULATED
from neula.errors import unknown_name

ACCUMULATIONS = ("fp32", "fp32_rz", "fp16")


# item: L block FMA
class EmulatedEngine(Engine):
    """Reproduces the numerics of tensor cores; every numerical test runs on it.

    Parameters
    ----------
    device : torch.device or str
    format : Arithmetic, Format or str, optional
        Low format, ``"fp16"`` by default.
    accumulate : {"fp32", "fp32_rz", "fp16"}
        How products are summed (see the module's text).
    block : int
        Products that are added before each rounding, for ``"fp32_rz"`` and ``"fp16"``.
    """

    name = "emulated"
    tuning = EMULATED

    def __init__(
        self,
        device: torch.device | str = "cpu",
        format: Named | None = None,
        accumulate: str = "fp32",
        block: int = 8,
    ) -> None:
        super().__init__(device, format)
        if accumulate not in ACCUMULATIONS:
            raise unknown_name("accumulation", accumulate, ACCUMULATIONS)
        if block < 1:
            raise ValueError(f"block must be at least 1, got {block}")
        self.accumulate = accumulate
        self.block = block

    @property
    def formats(self) -> tuple[str, ...]:
        return ("fp16", "bf16", "tf32", "fp32", "fp64")

    def using(self, arithmetic: Named) -> Self:
        return type(self)(self.device, arithmetic, self.accumulate, self.block)

    @property
    def operand_dtype(self) -> torch.dtype:
        return self.storage

    def operand(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.format in (FP32, FP64) and x.dtype == self.storage:
            return x
        return self.round(x, self._room(x) if out is None else out)

    def operand_buffer(self, like: torch.Tensor) -> torch.Tensor | None:
        return None if self.format in (FP32, FP64) else self._room(like)

    def round(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(round_to(x, self.format))

    @property
    def unblocked(self) -> Self:
        return type(self)(self.device, self.format, self.accumulate, block=1)

    def gemm_low(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        if self.format in (FP32, FP64):
            return self.gemm(a, b, c, -1.0, 1.0)
        narrow = partial(round_to, target=self.format)
        return c.copy_(_sum_in_blocks(-a.double(), b.double(), self.block, narrow, start=c.double()))

    def _matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if self.accumulate == "fp32" or self.format in (FP32, FP64):
            return a @ b
        narrow = round_toward_zero if self.accumulate == "fp32_rz" else _round_fp16
        return _sum_in_blocks(a.double(), b.double(), self.block, narrow).to(self.storage)

    def __str__(self) -> str:
        return self.name if self.accumulate == "fp32" else f"{self.name} ({self.accumulate} per {self.block})"


def _round_fp16(x: torch.Tensor) -> torch.Tensor:
    return round_to(x, FP16)


def _sum_in_blocks(
    a: torch.Tensor,
    b: torch.Tensor,
    block: int,
    narrow: Callable[[torch.Tensor], torch.Tensor],
    start: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum ``block`` products at a time in float64 (exact up to 2^-53) and narrow the running sum."""
    total = a.new_zeros((*a.shape[:-1], b.shape[-1])) if start is None else start
    for first in range(0, a.shape[-1], block):
        run = slice(first, first + block)
        total = narrow(total + a[..., run] @ b[..., run, :])
    return total
