"""Matrices in a border: the kernel on a CPU or on a GPU writes what the reference does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, GPU, HAS_GPU, KERNEL

from neula.kernels.small_problems import bordered as module
from neula.kernels.small_problems.bordered import bordered

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda a: a,
    "columns": lambda a: a.mT.contiguous().mT,
    "strided": lambda a: a.repeat_interleave(2, 1).repeat_interleave(3, 2)[:, ::2, ::3],
}


@pytest.fixture(name="way", params=[KERNEL, pytest.param("function", marks=GPU)])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    if request.param == "function":
        return bordered
    if not HAS_GPU:
        monkeypatch.setattr(module, "compiled", request.getfixturevalue("compiled_on_host"))
    return module.bordered_cuda


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("m", "n", "rows", "columns"),
    [(1, 1, 8, 8), (40, 33, 64, 40), (70, 70, 80, 80), (100, 5, 112, 8), (31, 9, 31, 9), (33, 32, 96, 64)],
)
@pytest.mark.parametrize("k", [1, 3])
def test_what_is_in_the_border(
    way: Callable[..., None], view: str, dtype: torch.dtype, m: int, n: int, rows: int, columns: int, k: int
) -> None:
    generator = torch.Generator().manual_seed(m)
    a, b = (torch.randn(1, m, x, dtype=dtype, generator=generator) for x in (n, k))
    a[0, m // 2, 0] = -9.0
    to_a, to_b = (torch.full((1, rows, x), torch.nan, dtype=dtype, device=DEVICE) for x in (columns, k))
    way(*(VIEWS[view](x.to(DEVICE)) for x in (a, b)), to_a, to_b)
    expected = torch.zeros(1, rows, columns, dtype=dtype)
    expected[:, :m, :n] = a
    added = torch.arange(columns - n)
    expected[0, m + added, n + added] = 9.0
    assert torch.equal(to_a.cpu(), expected)
    assert torch.equal(to_b.cpu(), torch.cat([b, torch.zeros(1, rows - m, k, dtype=dtype)], 1))
