"""Triangular solves in one launch: the reference by definition, and the kernel against the same bound.

The kernel runs on the GPU where there is one (``pytest -m gpu``), elsewhere compiled for the CPU, where a
single thread block takes all tasks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, variants

from neula.kernels.lu import sweep as module
from neula.kernels.lu.sweep import ALIGNED, PIECE, sweep

Solve = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def on_host(compiled_for_host: Callable[..., ctypes.CDLL]) -> Solve:
    """The kernel, compiled for the CPU."""
    macros = dict(line.split()[1:] for line in module.MACROS.splitlines())
    function = compiled_for_host("sweep", **macros).solve

    def solve(t: torch.Tensor, inverses: torch.Tensor, b: torch.Tensor, *, upper: bool) -> torch.Tensor:
        arguments, x = module.prepared(t, inverses, b, upper=upper)
        tensors, numbers = arguments[:5], arguments[5:]
        function(*[ctypes.c_void_p(y.data_ptr()) for y in tensors], *map(ctypes.c_longlong, numbers))
        return x

    return solve


solve = variants(sweep, "reference", "on_host", pytest.param("kernel", marks=pytest.mark.gpu))


def triangle(n: int, width: int, *, upper: bool, rows: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A well-conditioned matrix in half precision, and the inverses of its diagonal blocks."""
    generator = torch.Generator().manual_seed(n)
    t = torch.randn(n, n, generator=generator) / (2 * n**0.5)
    t = t.triu(1) if upper else t.tril(-1)
    t.diagonal().fill_(1.0)
    t = t.half()
    inverses = torch.eye(width).repeat(-(-n // width), 1, 1)
    for inverse, start in zip(inverses, range(0, n, width), strict=True):
        block = t[start : start + width, start : start + width].float()
        inverse[: len(block), : len(block)] = torch.linalg.inv(block)
    # What is on the other side of the diagonal means nothing.
    other = torch.full_like(t, torch.nan)
    t = t + (other.tril(-width) if upper else other.triu(width))
    # Neither does what lies between its columns, or rows.
    room = torch.full((n, -(-n // ALIGNED) * ALIGNED), torch.nan, dtype=t.dtype, device=DEVICE)[:, :n]
    room.copy_(t if rows else t.T)
    return room if rows else room.T, inverses.to(DEVICE)


@pytest.mark.parametrize(
    ("n", "pieces", "k", "upper", "rows"),
    [
        (1, 1, 1, False, False),
        *((PIECE + 100, 1, 3, upper, rows) for upper in (False, True) for rows in (False, True)),
        (2 * PIECE + 100, 2, 8, False, True),
        (2 * PIECE + 100, 2, 8, True, False),
    ],
)
def test_solves(solve: Solve, n: int, pieces: int, k: int, upper: bool, rows: bool) -> None:
    t, inverses = triangle(n, pieces * PIECE, upper=upper, rows=rows)
    b = torch.randn(n, k, generator=torch.Generator().manual_seed(k)).to(DEVICE)
    given = b.clone()
    x = solve(t, inverses, b, upper=upper)
    assert torch.equal(b, given)
    whole = (t.triu() if upper else t.tril()).double()
    # Backward stable up to the condition number of a block, which is below 10.
    bound = 10 * (n + 16) * torch.finfo(torch.float32).eps
    assert torch.linalg.vector_norm(whole @ x.double() - b) <= bound * torch.linalg.vector_norm(b)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [3000, 9999])
def test_many_programs_wait_for_one_another(n: int) -> None:
    assert sweep.runs(DEVICE)
    for upper in (False, True):
        t, inverses = triangle(n, PIECE, upper=upper, rows=False)
        t = t.nan_to_num()
        b = torch.randn(n, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        found = [sweep(t, inverses, b, upper=upper) for _ in range(20)]
        assert all(torch.equal(x, found[0]) for x in found), "sums do not depend on what comes first"
        expected = sweep.reference(t, inverses, b, upper=upper)
        assert torch.linalg.vector_norm(found[0] - expected) <= 1e-5 * torch.linalg.vector_norm(expected)
