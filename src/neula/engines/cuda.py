"""Tensor cores of an NVIDIA GPU, through cuBLAS."""

from __future__ import annotations

import torch

from neula.engines.engine import Engine
from neula.engines.formats import TF32
from neula.engines.precision import cuda_matmul_precision


class CudaEngine(Engine):
    """cuBLAS products with half-precision operands and float32 results, in place on column-major storage.

    Nothing here waits for the GPU: work is queued on the caller's current stream.
    """

    name = "cuda"
    panel = "cholesky"
    preconditioner = "fp16"

    @property
    def formats(self) -> tuple[str, ...]:
        return ("fp16", "bf16", "tf32", "fp32", "fp64")

    @property
    def _half(self) -> bool:
        return self.operand_dtype != self.storage

    def _matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if self._half:
            multiply = torch.mm if a.ndim == 2 else torch.bmm
            return multiply(a, b, out_dtype=torch.float32)
        with cuda_matmul_precision("tf32" if self.format is TF32 else "ieee"):
            return a @ b

    def column_max(self, a: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(a, float("inf"), dim=0)

    def fill(self, out: torch.Tensor, a: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return torch.mul(a, scales, out=out)

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
        if self._half:
            torch.addmm(c.T, b.T, a.T, out_dtype=torch.float32, beta=beta, alpha=alpha, out=c.T)
            return c
        with cuda_matmul_precision("tf32" if self.format is TF32 else "ieee"):
            torch.addmm(c.T, b.T, a.T, beta=beta, alpha=alpha, out=c.T)
        return c
