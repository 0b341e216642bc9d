"""Tensor cores with error correction as an engine: products of float32 matrices at a third of the fp16 rate.

Every product is three of fp16 (:mod:`neula.kernels.gemm`), about as accurate as one in float32, and on a
data-center GPU four times as fast. An algorithm that is given this engine has single precision.
"""

from __future__ import annotations

import torch

from neula.engines.cuda import CudaEngine
from neula.engines.engine import Engine
from neula.engines.formats import Format
from neula.kernels.gemm import corrected_gemm, kernel_runs

FP16_COR = "fp16_cor"
"""What the user calls it."""


class CorrectedEngine(CudaEngine):
    """Its format is fp32, to which operands are rounded; panels are those of the plain engine."""

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(device, "fp32")

    def using(self, format: Format | str) -> CudaEngine:  # type: ignore[override]
        return CudaEngine(self.device, format)

    def gemm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> torch.Tensor:
        return corrected_gemm(
            a, b, alpha=alpha, beta=beta, c=self.empty(len(a), b.shape[1]) if c is None else c
        )

    def __repr__(self) -> str:
        return f"{self} in {FP16_COR}"


def arithmetic(engine: Engine, name: str) -> Engine:
    """The engine in the format of this name, or with error correction if the name is ``"fp16_cor"``.

    Raises
    ------
    ValueError
        If the engine does not multiply so.
    """
    if name != FP16_COR:
        return engine.using(name)
    if not isinstance(engine, CudaEngine):
        raise ValueError(
            f"the {engine} engine has no products with error correction ({name!r}): pass compute='fp32', "
            "which is as accurate"
        )
    return CorrectedEngine(engine.device)


def corrects(engine: Engine) -> bool:
    """Whether corrected products run on matrix units here, and so pay."""
    return isinstance(engine, CudaEngine) and kernel_runs(engine.device)
