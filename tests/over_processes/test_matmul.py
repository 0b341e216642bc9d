"""``A^T B`` over processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from over_processes import tasks
from over_processes.problems import COUNTS, noise
from over_processes.processes import Failure, Processes

BOUNDS: list[tuple[torch.dtype, dict[str, Any], float]] = [
    (torch.float64, {}, 2.0**-53),
    (torch.float32, {}, 2.0**-24),
    (torch.float32, {"compute": "fp16_cor", "engine": "emulated", "alpha": -2.0}, 2.0**-24),
]


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize(("dtype", "asked", "u"), BOUNDS)
def test_products(
    processes: Processes, size: int, dtype: torch.dtype, asked: dict[str, Any], u: float
) -> None:
    """Within the bound of one process: that of a sum of k products, whatever its order."""
    a, b = noise(130, 7).to(dtype), noise(130, 5, seed=2).to(dtype)
    alpha = asked.get("alpha", 1.0)
    exact = alpha * a.double().T @ b.double()
    bound = abs(alpha) * (130 + 20) * u * (a.double().abs().T @ b.double().abs())
    found = processes.check(size, tasks.product, a, b, asked)
    for product, of_dtensors in found:
        assert torch.equal(product, found[0][0])
        for x in (product, of_dtensors):
            assert x.dtype == dtype
            assert ((x - exact).abs() <= bound).all()


def test_half_precision_is_rounded_once(processes: Processes) -> None:
    a, b = noise(64, 3).half(), noise(64, 2, seed=2).half()
    product, _ = processes.check(3, tasks.product, a, b, {"engine": "emulated"})[0]
    exact = a.double().T @ b.double()
    assert product.dtype == torch.float16
    error = 2.0**-11 * exact.abs() + 64 * 2.0**-24 * (a.double().abs().T @ b.double().abs())
    assert ((product - exact).abs() <= error).all()


def test_other_products_are_refused(processes: Processes) -> None:
    found = processes.run(2, tasks.refused_product)
    assert all(isinstance(x, Failure) and "pass A.T" in x.message for x in found)
