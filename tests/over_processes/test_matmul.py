"""``A^T B`` over processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from over_processes import tasks
from over_processes.problems import COUNTS, noise
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


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize(("left", "right"), [("c", "c"), ("r", "c"), ("c", "r"), ("r", "r")])
@pytest.mark.parametrize(
    ("single", "asked"),
    [(False, {}), (True, {}), (True, {"compute": "fp16_cor", "engine": "emulated"})],
)
def test_products(
    processes: Processes, size: int, left: str, right: str, single: bool, asked: dict[str, Any]
) -> None:
    """``A^T B``, without a conjugate: within the bound of a sum of k products, whatever its order."""
    a, b = noise(130, 7, imaginary=True), noise(130, 5, seed=2, imaginary=True)
    a, b = a if left == "c" else a.real.contiguous(), b if right == "c" else b.real.contiguous()
    if single:
        a, b = (x.to(torch.complex64 if x.is_complex() else torch.float32) for x in (a, b))
    wide = [x.to(torch.complex128) for x in (a, b)]
    exact = wide[0].T @ wide[1]
    factor = 1 if left == right == "r" else 4
    bound = factor * (130 + 30) * (2.0**-24 if single else 2.0**-53) * (wide[0].abs().T @ wide[1].abs())
    found = processes.check(size, tasks.product, a, b, asked)
    for product, of_dtensors in found:
        assert torch.equal(product, found[0][0])
        for x in (product, of_dtensors):
            assert x.dtype == torch.promote_types(a.dtype, b.dtype)
            assert ((x - exact).abs() <= bound).all()
