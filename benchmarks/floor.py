"""Best rates of a machine, for products and for copies, and the floor that they set."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from neula.papers.measuring import sustained_seconds

DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Machine:
    """Rates, measured in the same run as what is compared with them.

    Attributes
    ----------
    products : dict of str to float
        Operations a second of a large product, by format.
    bandwidth : float
        Bytes a second that a large copy reads and writes.
    """

    products: dict[str, float]
    bandwidth: float

    @classmethod
    def measured(cls, device: torch.device, formats: tuple[str, ...]) -> Machine:
        """Of a GPU."""
        return cls({name: _product_rate(device, DTYPES[name]) for name in formats}, _copy_rate(device))

    def floor(self, flops: float, size: float, format: str) -> tuple[float, str]:
        """The longer one of the times, in seconds, for operations and for bytes, and which of them it is."""
        compute, memory = flops / self.products[format], size / self.bandwidth
        return max(compute, memory), "operations" if compute > memory else "bytes"


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    n = 8192
    a = torch.rand(n, n, device=device).to(dtype)
    return 2 * n**3 / sustained_seconds(partial(torch.mm, a, a))


def _copy_rate(device: torch.device) -> float:
    a = torch.rand(1 << 29, device=device)
    return 2 * a.nbytes / sustained_seconds(partial(torch.empty_like(a).copy_, a))
