"""The bf16 and fp32 units of a CPU, through oneDNN."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from functools import lru_cache

import torch

from neula.engines.engine import Engine
from neula.engines.shipped import cpu_tuning
from neula.engines.tuned import tuned
from neula.engines.tuning import Tuning


class CpuEngine(Engine):
    """Matrix products on a CPU: by oneDNN in fp32, by torch in other formats.

    fp16 is missing on purpose: libraries emulate it on CPUs, hundreds of times slower than fp32.
    bf16 is there where a unit multiplies it (see :func:`why_no_bf16`).
    """

    name = "cpu"
    splits = False
    narrow_products = ("bf16",)  # as torch has them

    @property
    def formats(self) -> tuple[str, ...]:
        return ("fp32", "fp64") if why_no_bf16() else ("bf16", "fp32", "fp64")

    @property
    def tuning(self) -> Tuning:
        return _tuning_of(self.formats)

    def _matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return onednn_matmul(a, b) if a.dtype == torch.float32 and a.ndim == 2 else a @ b

    def _gemm(
        self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, alpha: float, beta: float
    ) -> torch.Tensor:
        columns = max(MIN_COLUMNS, PRODUCT_ELEMENTS // max(1, a.shape[0]))
        for b_block, c_block in zip(b.split(columns, 1), c.split(columns, 1), strict=True):
            super()._gemm(a, b_block, c_block, alpha, beta)
        return c

    def image(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        # MKL takes two thirds of the time of the transposed product where rows of A follow one another.
        return self._matmul(a, b).to(self.storage) if a.stride(1) == 1 else self.gemm(a, b)

    def gram(self, a: torch.Tensor) -> torch.Tensor:
        return self._matmul(a.T, a).double()


@lru_cache(maxsize=2)
def _tuning_of(formats: tuple[str, ...]) -> Tuning:
    return tuned(cpu_tuning(formats), torch.device("cpu"))


PRODUCT_ELEMENTS = 1 << 22
"""Elements of a product that is added to C: it stays in the last-level cache, and the allocator hands out the
same memory again instead of fresh pages, whose first touch costs as much as a tenth of the product."""

MIN_COLUMNS = 64  # narrower products run below the full rate
BF16_UNITS = ("avx512_bf16", "amx_bf16")  # flags of x86; Arm's is ``bf16``

CAPS = {
    "ONEDNN_MAX_CPU_ISA": (
        "SSE41",
        "AVX",
        "AVX2",
        "AVX2_VNNI",
        "AVX2_VNNI_2",
        "AVX512_CORE",
        "AVX512_CORE_VNNI",
    ),
    "ATEN_CPU_CAPABILITY": ("DEFAULT", "AVX2"),
}
"""Environment variables that keep oneDNN and torch from instruction sets, and their values below a bf16 unit.

A cap of x86 counts on every processor, so that a CPU without bf16 can be had anywhere.
"""

_deciding = threading.Lock()


def why_no_bf16() -> str:
    """Why the CPU engine has no bf16; empty where it has. Decided once in a process."""
    with _deciding:
        return _decided()


@lru_cache(maxsize=1)
def _decided() -> str:
    if not torch.backends.mkldnn.is_available():
        return "this torch comes without oneDNN"
    return obstacle_to_bf16(torch.cpu.get_capabilities(), os.environ, sys.platform)


def obstacle_to_bf16(flags: Mapping[str, object], environment: Mapping[str, str], system: str) -> str:
    """The reason why oneDNN cannot multiply bf16 in a matrix unit; empty if it can.

    Flags are the processor's, as in ``torch.cpu.get_capabilities()``; oneDNN and torch read some environment
    variables as caps. Builds for Arm are known to reach the unit on the system ``"linux"`` only.
    """
    arm = system == "linux" and flags.get("bf16")
    if not (arm or any(flags.get(unit) for unit in BF16_UNITS)):
        return "no bf16 unit is known in this CPU"
    for cap, values in CAPS.items():
        # oneDNN reads its variables by their old names, too.
        name = next((n for n in (cap, cap.replace("ONEDNN", "DNNL")) if environment.get(n)), None)
        if name is not None and environment[name].upper() in values:
            return f"{name}={environment[name]} keeps the CPU from its bf16 unit"
    return ""


ONEDNN_PRODUCTS = 1 << 24
"""Multiplications from which on oneDNN is called. It compiles a kernel for every new shape, 1 to 5 ms and
half a MB, and keeps a thousand of them: measured, products of 192 x 192 matrices never make that good, and
with small matrices of all shapes a process grew by hundreds of MB."""


def onednn_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` in float32 through oneDNN, which is twice as fast as MKL on some CPUs (AMD's Zen 5). torch
    reaches it through a process-wide switch, or through its fused linear layer, which needs no switch: that
    is the one to call.
    """
    small = a.shape[0] * a.shape[1] * b.shape[1] < ONEDNN_PRODUCTS
    # Where the user has set that switch, the ordinary product may be narrower than float32.
    if small and torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee"):  # type: ignore[attr-defined]
        return a @ b
    if not torch.backends.mkldnn.is_available():
        return a @ b
    return torch.ops.mkldnn._linear_pointwise(a, _dense(b).T, None, "none", [], "")


def _dense(x: torch.Tensor) -> torch.Tensor:
    """``x`` without gaps: for other tensors oneDNN's linear layer takes a thousand times as long."""
    if x.is_contiguous() or x.mT.is_contiguous():
        return x
    return x.mT.contiguous().mT if x.stride(0) == 1 else x.contiguous()


@lru_cache(maxsize=8)
def measured_rates(n: int = 256, k: int = 1024) -> dict[str, float]:
    """GFLOP/s of a product of n x k and k x n matrices in each format; best of three, some milliseconds."""
    rates = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64)):
        generator = torch.Generator("cpu").manual_seed(0)
        a = torch.rand(n, k, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
        multiply = onednn_matmul if dtype == torch.float32 else torch.matmul
        seconds = min(_timed(multiply, a, a.T) for _ in range(4))
        rates[name] = 2e-9 * n * n * k / seconds
    return rates


def _timed(function, *args: torch.Tensor) -> float:  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start
