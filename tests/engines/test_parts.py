"""Products of batches in parts, on engines without a kernel for them."""

from __future__ import annotations

import pytest
import torch
from tests.matrices import normal

from neula.engines import CpuEngine, EmulatedEngine, Engine

ENGINES = [
    *(EmulatedEngine("cpu", name) for name in ("fp16", "bf16", "fp32", "fp64")),
    *(CpuEngine("cpu", name) for name in ("fp32", "fp64")),
]


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
def test_products_by_definition(engine: Engine) -> None:
    """Operands are rounded once, sums are in the storage precision, and the result is rounded once."""
    a, b = normal(3, 20, 30, seed=None) / 8, normal(3, 20, 30, seed=None) / 8
    parts, others = engine.parts(a), engine.parts(b)
    scales = torch.tensor([1.0, 0.5, 3.0], dtype=engine.storage)
    found = engine.joined(engine.product(parts, others.mT, factor=0.3, shift=2.0, scales=scales)).double()
    x, y = engine.joined(parts).double(), engine.joined(others).double()
    exact = scales[:, None, None] * (0.3 * (x @ y.mT) + 2.0 * torch.eye(20))
    sums = 40 * torch.finfo(engine.storage).eps * (x.abs() @ y.abs().mT + 2)
    assert (abs(found - exact) <= engine.format.u * exact.abs() + 3 * sums).all()
    assert (abs(x - a) <= engine.format.u * a.abs() + 2.0**-25).all()


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
def test_the_rest_by_definition(engine: Engine) -> None:
    a, v = normal(2, 25, 25, seed=None), normal(2, 25, 3, seed=None).to(engine.storage)
    parts = engine.parts(a)
    x, u = engine.joined(parts).double(), engine.format.u
    scales = torch.tensor([0.5, -3.0], dtype=engine.storage)
    exact = scales[:, None, None] * x - 0.25 * torch.eye(25)
    assert (
        abs(engine.joined(engine.adjusted(parts, scales, -0.25)) - exact) <= 3 * u * (exact.abs() + 1)
    ).all()
    assert torch.equal(engine.joined(parts).double(), x)  # what was given stays as it is
    bound = (2 * u + 50 * torch.finfo(engine.storage).eps) * (x.abs() @ v.double().abs())
    assert (abs(engine.thin(parts, v).double() - x @ v.double()) <= bound).all()
