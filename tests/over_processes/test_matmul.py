"""``A^T B`` over processes."""

from __future__ import annotations

import torch

from over_processes import tasks
from over_processes.problems import noise
from over_processes.processes import Failure, Processes


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
