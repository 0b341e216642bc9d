"""Tensor-core arithmetic on any CPU, bit by bit where the hardware is documented.

Operands are rounded to the low format. A product of two numbers of 11 bits has 22 and is exact in fp32; what
differs between machines is how products are summed. That is a :class:`neula.engines.units.Unit`: by default
the one of an A100, which adds 8 products at a time and truncates.

``accumulate`` is the format of C and D in ``D = C + A B``: ``"fp32"`` (TC32 in the papers), or ``"fp16"``
(TC16), to which a sum is rounded to nearest after each block of products. :meth:`EmulatedEngine.gemm_low`
rounds to the low format after each block, whatever the mode: C is in that format before and after. Both add a
block exactly before they round it: where the unit cuts off is 13 bits further right.
"""

from __future__ import annotations

from typing import Self

import torch

from neula.engines.engine import Engine, Named
from neula.engines.formats import FP16, FP32, FP64, Format, round_to
from neula.engines.shipped import EMULATED
from neula.engines.units import UNITS, Unit
from neula.errors import check_name, unknown_name
from neula.kernels.products.block_fma import block_fma_product

ACCUMULATIONS = ("fp32", "fp16")
DEFAULT_UNIT = UNITS["a100"]


# item: L block FMA
class EmulatedEngine(Engine):
    """Matrix products as tensor cores compute them, emulated on any machine.

    ``format``: low format, ``"fp16"`` by default. ``unit``: whose sums: ``"v100"``, ``"a100"``, ``"h100"``,
    or ``"ideal"``, which rounds to nearest. ``block``: products that are added at a time instead of the
    unit's own number, t in the papers. ``accumulate``, one of {"fp32", "fp16"}: format of the sums.
    """

    name = "emulated"
    tuning = EMULATED

    def __init__(
        self,
        device: torch.device | str = "cpu",
        format: Named | None = None,
        unit: Unit | str = DEFAULT_UNIT,
        *,
        block: int | None = None,
        accumulate: str = "fp32",
    ) -> None:
        super().__init__(device, format)
        if accumulate not in ACCUMULATIONS:
            raise unknown_name("accumulation", accumulate, ACCUMULATIONS)
        if block is not None and block < 1:
            raise ValueError(f"block must be at least 1, got {block}")
        if isinstance(unit, str):
            check_name("unit", unit, UNITS)
        self.unit = UNITS[unit] if isinstance(unit, str) else unit
        self.accumulate = accumulate
        self.block = self.unit.products_at_a_time(self.arithmetic.operands) if block is None else block
        self._chosen = block

    @property
    def formats(self) -> tuple[str, ...]:
        return ("fp16", "bf16", "tf32", "fp32", "fp64")

    def using(self, arithmetic: Named) -> Self:
        return self._made(arithmetic, self._chosen)

    @property
    def operand_dtype(self) -> torch.dtype:
        return self.storage

    def operand(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.format in (FP32, FP64) and x.dtype == self.storage:
            return x
        return self.round(x, self._workspace(x) if out is None else out)

    def operand_buffer(self, like: torch.Tensor) -> torch.Tensor | None:
        return None if self.format in (FP32, FP64) else self._workspace(like)

    def round(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(round_to(x, self.format))

    @property
    def unblocked(self) -> Self:
        return self._made(self.arithmetic, 1)

    def _made(self, arithmetic: Named, block: int | None) -> Self:
        return type(self)(self.device, arithmetic, self.unit, block=block, accumulate=self.accumulate)

    def gemm_low(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        if self.format in (FP32, FP64):
            return self.gemm(a, b, c, -1.0, 1.0)
        return c.copy_(self._narrowed(c, -a, b, self.format))

    def _matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        low, bits = self.format, self.unit.extra_bits
        if low in (FP32, FP64):
            return a @ b
        if self.accumulate == "fp16":
            start = a.new_zeros((*a.shape[:-1], b.shape[-1]))
            return self._narrowed(start, a, b, FP16).to(self.storage)
        if bits is None:
            return a @ b
        if low is not FP16:  # products may be beyond the range of fp32
            a, b = a.double(), b.double()
        least = 1 - low.max_exponent
        return block_fma_product(a, b, block=self.block, extra_bits=bits, min_exponent=least).to(self.storage)

    def _narrowed(
        self, start: torch.Tensor, a: torch.Tensor, b: torch.Tensor, target: Format
    ) -> torch.Tensor:
        """``C + A B``, rounded to a format after each block of products, whose sums err by ``2^-53``."""
        total, a, b = start.double(), a.double(), b.double()
        for x, y in zip(a.split(self.block, -1), b.split(self.block, -2), strict=True):
            total = round_to(total + x @ y, target)
        return total

    def __str__(self) -> str:
        sums = "" if self.accumulate == "fp32" else f", {self.accumulate} sums"
        block = "" if self._chosen is None else f", {self.block} products at a time"
        plain = self.unit is DEFAULT_UNIT and not sums + block
        return self.name if plain else f"{self.name} ({self.unit.name}{block}{sums})"
