"""Tensor cores of an NVIDIA GPU, through cuBLAS."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache

import torch

from neula.engines import graphs
from neula.engines.engine import Engine, Tensors
from neula.engines.formats import FP32, TF32, Format
from neula.engines.precision import cuda_matmul_precision
from neula.kernels.gemm import corrected_gemm, kernel_runs
from neula.kernels.projection import project_out, projects
from neula.kernels.scaled_copy import scaled_copy

ALIGNED = 8
"""Columns start at multiples of so many elements, 16 bytes in half precision, where bulk copies can. Working
matrices end there as well: products over an odd number of rows take several times as long."""


CORRECTED = 1024
"""Smallest dimension from which on a float32 product is computed in fp16 with error correction: 140 to 200
TFLOP/s on an H200 instead of 50."""


ORTHONORMAL = 1.5
"""Elements of orthonormal columns are at most 1; what is not orthonormal may overflow, and is rejected."""


class CudaEngine(Engine):
    """cuBLAS products with half-precision operands and float32 results, in place on column-major storage.

    Nothing here waits for the GPU: work is queued on the caller's current stream.
    """

    name = "cuda"
    direct = 2048  # estimated from launches, not measured
    lu_panel = 1024  # tensor cores reach their rate at products this wide
    lu_inner_panel = 128

    def __init__(self, device: torch.device | str, format: Format | str | None = None) -> None:
        super().__init__(device, format)
        # In float64 panels are library calls, and 256 columns take half of the launches of 128.
        self.panel, self.cutoff = ("cholesky32", 128) if self.storage == torch.float32 else ("cholesky", 256)

    @property
    def formats(self) -> tuple[str, ...]:
        return ("fp16", "bf16", "tf32", "fp32", "fp64")

    @property
    def preconditioners(self) -> tuple[str, ...]:
        # Data-center GPUs multiply fp64 on tensor cores, as fast as fp32 without them.
        return ("fp16", "fp64" if _has_fast_fp64(self.device) else "fp32")

    @property
    def _half(self) -> bool:
        return self.operand_dtype != self.storage

    def _corrects(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether a float32 product is faster in parts, on units that multiply fp16."""
        large = self.format is FP32 and a.ndim == 2 and min(*a.shape, b.shape[1]) >= CORRECTED
        return large and kernel_runs(a.device)

    def _matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if self._corrects(a, b):
            return corrected_gemm(a, b)
        if self._half:
            multiply = torch.mm if a.ndim == 2 else torch.bmm
            return multiply(a, b, out_dtype=torch.float32)
        with cuda_matmul_precision("tf32" if self.format is TF32 else "ieee"):
            return a @ b

    def rows(self, m: int) -> int:
        return -(-m // ALIGNED) * ALIGNED

    def empty(self, m: int, n: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return super().empty(self.rows(m), n, dtype=dtype)[:m]

    def column_max(self, a: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(a, float("inf"), dim=0)

    def fill(self, out: torch.Tensor, a: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return scaled_copy(out, a, scales)

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
        # addmm scales and adds inside the product: no temporary of the size of C.
        if self._corrects(a, b):
            return corrected_gemm(a, b, alpha=alpha, beta=beta, c=c)
        if self._half:
            torch.addmm(c.T, b.T, a.T, out_dtype=torch.float32, beta=beta, alpha=alpha, out=c.T)
            return c
        with cuda_matmul_precision("tf32" if self.format is TF32 else "ieee"):
            torch.addmm(c.T, b.T, a.T, beta=beta, alpha=alpha, out=c.T)
        return c

    def project_out(
        self, q: torch.Tensor, a: torch.Tensor, r: torch.Tensor, room: torch.Tensor | None = None
    ) -> None:
        if self.format is FP32 and projects(q, a):
            project_out(q, a, r)
        elif self._corrects(q, r):
            corrected_gemm(q.T, a, c=r, bound=ORTHONORMAL)
            corrected_gemm(q, r, alpha=-1.0, beta=1.0, c=a, bound=ORTHONORMAL)
        else:
            super().project_out(q, a, r, room)

    def gemm_low(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        if not self._half:
            return self.gemm(a, b, c, -1.0, 1.0)
        torch.addmm(c.T, b.T, a.T, alpha=-1.0, out=c.T)
        return c

    @property
    def replayed_bytes(self) -> int:
        return graphs.largest_input(self.device)

    def replay(
        self, function: Callable[..., Tensors], inputs: Tensors, key: Hashable, out: Tensors | None = None
    ) -> Tensors:
        return graphs.replay(function, inputs, key, out)


def measured_rate(engine: CudaEngine, n: int = 4096) -> float:
    """GFLOP/s of an n x n x n product in the engine's format, best of three."""
    generator = torch.Generator(engine.device).manual_seed(0)
    a = engine.operand(torch.rand(n, n, generator=generator, device=engine.device, dtype=engine.storage))
    best = float("inf")
    for _ in range(4):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        engine.gemm(a, a)
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop))
    return 2e-6 * n**3 / best


@lru_cache
def _has_fast_fp64(device: torch.device) -> bool:
    fp64, fp32 = (measured_rate(CudaEngine(device, name), 2048) for name in ("fp64", "fp32"))
    return fp64 > 0.5 * fp32
