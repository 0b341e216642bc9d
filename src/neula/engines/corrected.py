"""Tensor cores with error correction by name: single precision at a third of the rate of fp16.

A float32 product is three of fp16 (:mod:`neula.kernels.gemm`), about as accurate as one in float32, and on a
data-center GPU four times as fast. Large products of the CUDA engine in fp32 are computed so.
"""

from __future__ import annotations

from neula.engines.cuda import CudaEngine
from neula.engines.engine import Engine

FP16_COR = "fp16_cor"
"""What the user calls it."""


def arithmetic(engine: Engine, name: str) -> Engine:
    """The engine in the format of this name; ``"fp16_cor"`` is fp32 where large products are corrected.

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
    return engine.using("fp32")


def corrects(engine: Engine) -> bool:
    """Whether corrected products run on matrix units here, and so pay."""
    return isinstance(engine, CudaEngine) and engine.has_corrected_products()
