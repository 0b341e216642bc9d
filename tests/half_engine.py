"""A GPU's engine without a GPU: operands are stored in half precision, and multiplied in float32."""

from __future__ import annotations

from dataclasses import replace

import torch

from neula.engines import Engine
from neula.engines.shipped import cuda_tuning


class HalfEngine(Engine):
    """Plays nothing back, but says so."""

    name = "half"
    formats = ("fp16", "bf16", "fp32", "fp64")
    tuning = replace(
        cuda_tuning((9, 0), replayed_bytes=1 << 20),
        arithmetics=formats,
        gram_passes=0,  # which would come first
    )
    replayed_bytes = 1 << 20

    def _matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.matmul(a.to(self.storage), b.to(self.storage))
