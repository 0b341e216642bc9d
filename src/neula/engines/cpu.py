"""The bf16 and fp32 units of a CPU, through oneDNN."""

from __future__ import annotations

import time
from functools import lru_cache

import torch

from neula.engines.engine import Engine


class CpuEngine(Engine):
    """Real speed on a laptop or a server without a GPU.

    fp16 is missing on purpose: libraries emulate it on CPUs, hundreds of times slower than fp32.
    bf16 is there where it measures faster than fp32 (AVX512-BF16, AMX, Arm BF16).
    """

    name = "cpu"
    panel = "cholesky2"
    lu_panel = 384  # narrower ones copy more of L for oneDNN, wider ones take longer than that saves
    lu_inner_panel = 64
    inverted = 256
    swaps = True
    direct = 1400
    direct_definite = 1400

    @property
    def formats(self) -> tuple[str, ...]:
        rate = measured_rates()
        return ("bf16", "fp32", "fp64") if rate["bf16"] > BF16_GAIN * rate["fp32"] else ("fp32", "fp64")

    @property
    def preconditioners(self) -> tuple[str, ...]:
        # bf16 halves the time of the products, but its iterations take longer than that saves.
        return ("fp32",)

    def _matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return onednn_matmul(a, b) if a.dtype == torch.float32 and a.ndim == 2 else a @ b

    def gemm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> torch.Tensor:
        if c is None:
            return super().gemm(a, b, c, alpha, beta)
        columns = max(MIN_COLUMNS, PRODUCT_ELEMENTS // a.shape[0])
        for b_block, c_block in zip(b.split(columns, 1), c.split(columns, 1), strict=True):
            super().gemm(a, b_block, c_block, alpha, beta)
        return c

    def gram(self, a: torch.Tensor) -> torch.Tensor:
        return self._matmul(a.T, a).double()


PRODUCT_ELEMENTS = 1 << 22
"""Elements of a product that is added to C: it stays in the last-level cache, and the allocator hands out the
same memory again instead of fresh pages, whose first touch costs as much as a tenth of the product."""

MIN_COLUMNS = 64
"""Narrower products run below the full rate."""

BF16_GAIN = 1.3
"""bf16 operands cost a conversion: below this advantage in the product alone they gain nothing."""


def onednn_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` in float32 through oneDNN, which is twice as fast as MKL on some CPUs (AMD's Zen 5).

    torch reaches oneDNN for float32 products through a process-wide switch, or through its fused linear
    layer, which needs no switch: that is the one to call.
    """
    if not torch.backends.mkldnn.is_available():
        return a @ b
    return torch.ops.mkldnn._linear_pointwise(a, _dense(b).T, None, "none", [], "")


def _dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` without gaps between its rows or columns: for others oneDNN's linear layer takes a reference
    implementation, a thousand times slower.
    """
    if x.is_contiguous() or x.mT.is_contiguous():
        return x
    return x.mT.contiguous().mT if x.stride(0) == 1 else x.contiguous()


@lru_cache(maxsize=8)
def measured_rates(n: int = 256, k: int = 1024) -> dict[str, float]:
    """GFLOP/s of a product of n x k and k x n matrices in each format; best of three, some milliseconds."""
    rates = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64)):
        generator = torch.Generator("cpu").manual_seed(0)
        a = torch.rand(n, k, generator=generator, device="cpu").to(dtype)
        multiply = onednn_matmul if dtype == torch.float32 else torch.matmul
        seconds = min(_timed(multiply, a, a.T) for _ in range(4))
        rates[name] = 2e-9 * n * n * k / seconds
    return rates


def _timed(function, *args: torch.Tensor) -> float:  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start
