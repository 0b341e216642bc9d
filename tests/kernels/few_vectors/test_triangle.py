"""Products of triangles with a few vectors: the reference by definition, the kernel to the same bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, KERNEL, normal

from neula.kernels.few_vectors.triangle import VECTORS, triangle_product

Multiply = Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]


@pytest.fixture(params=["reference", KERNEL])
def multiply(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Multiply:
    if request.param == "reference":
        return triangle_product.reference
    pytest.importorskip("triton")
    from neula.kernels.few_vectors import triangle as module

    for name in ("TILE", "SMALL"):  # that several tiles are small enough for the interpreter
        monkeypatch.setattr(module, name, 16)
    monkeypatch.setattr(module, "WIDTH", 32)
    return module.triangle_product_triton


def expected(t: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    lower = t.double().tril()
    full = {"lower": lower, "transposed": lower.mT, "symmetric": lower + lower.tril(-1).mT}[kind]
    return full @ x


@pytest.mark.parametrize(("count", "n"), [(1, 1), (2, 16), (3, 17)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["lower", "transposed", "symmetric"])
@pytest.mark.parametrize("by_columns", [False, True])
def test_errors_are_those_of_double_precision(
    multiply: Multiply, count: int, n: int, dtype: torch.dtype, kind: str, by_columns: bool
) -> None:
    t = normal(count, n, n, dtype=dtype)
    t = t if kind == "symmetric" else t.tril()
    t = t.mT.contiguous().mT if by_columns else t
    x = normal(count, n, VECTORS, dtype=torch.float64)
    before = t.clone()
    found = multiply(t, x, kind)
    assert torch.equal(t, before)
    assert (found.shape, found.dtype) == (x.shape, torch.float64)
    # gamma_n |T| |x| (Higham 2002, section 3.5).
    size = expected(t.abs(), x.abs(), kind)
    assert ((found - expected(t, x, kind)).abs() <= (n + 2) * 2.0**-52 * size).all()


def test_what_is_above_the_diagonal_of_a_symmetric_matrix_is_not_read(multiply: Multiply) -> None:
    t, x = (
        normal(2, 40, 40, dtype=torch.float32),
        normal(1, 40, VECTORS, dtype=torch.float64).expand(2, -1, -1),
    )
    clean = multiply(t.tril(), x, "symmetric")
    t[:, torch.ones(40, 40, dtype=torch.bool, device=DEVICE).triu(1)] = torch.nan
    assert torch.equal(multiply(t, x, "symmetric"), clean)


def test_nothing_to_multiply() -> None:
    x = torch.zeros(0, 5, VECTORS, dtype=torch.float64, device=DEVICE)
    assert triangle_product(torch.zeros(0, 5, 5, device=DEVICE), x, "lower").shape == (0, 5, VECTORS)
