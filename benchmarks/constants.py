"""Measured numbers of a machine and its network that the model of time (:mod:`benchmarks.model`) needs.

Each row is one number: the rate of what a GPU does alone, or the time of an all-reduce of some bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed

import neula
from neula.algorithms.spectra.gram import gram
from neula.engines import FP16, Engine, select_engine
from neula.kernels.few_vectors.normal_product import normal_product
from neula.papers.measuring import median_seconds

MESSAGES = (512, 1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 30)
"""Bytes of the all-reduces."""

SHAPES = {"cuda": (1 << 18, 2048), "cpu": (1 << 14, 128)}
"""Of the matrices: 4 GB on a GPU."""


def measured(device: torch.device, group: Any, size: int) -> list[dict[str, Any]]:
    """Rows for the data of ``python -m benchmarks distributed``, from all ``size`` processes of a group."""
    rows = [{"problem": "constant", "what": what, "value": rate} for what, rate in _rates(device).items()]
    largest = max(MESSAGES) if device.type == "cuda" else 1 << 23
    for length in (length for length in MESSAGES if length <= largest):
        x = torch.ones(length // 8, dtype=torch.float64, device=device)
        seconds = median_seconds(partial(distributed.all_reduce, x, group=group), 5, warmup=2)
        rows.append({"problem": "constant", "what": "all-reduce", "bytes": length, "ms": 1e3 * seconds})
    return [{**row, "processes": size} for row in rows]


def _rates(device: torch.device) -> dict[str, float]:
    """Bytes and operations a second of one process."""
    m, n = SHAPES[device.type]
    engine = select_engine("auto", device)
    corrected = "fp16_cor" if engine.tuning.corrected else "fp32"
    low = engine.tuning.cheapest(FP16)
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(m, n, dtype=torch.float64, device=device, generator=generator)
    x, single = torch.ones(n, 1, dtype=torch.float64, device=device), a.float()
    operations = 2 * m * n * n - 2 * n**3 / 3
    return {
        "memory": a.nbytes / _seconds(lambda: normal_product(a, x)),
        "gram corrected": 1.25 * m * n * n / _gram(engine.using(corrected), single),
        "gram low": 1.25 * m * n * n / _gram(engine.using(low), single),
        "qr low": operations / _seconds(lambda: neula.qr(single, accuracy="fp16", mode="r")),
    }


def _gram(engine: Engine, a: torch.Tensor) -> float:
    operand = a.to(engine.operand_dtype)
    return _seconds(lambda: gram(operand, engine))


def _seconds(run: Callable[[], Any]) -> float:
    return median_seconds(run, 5, warmup=2)
