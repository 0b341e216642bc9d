"""Triangular solves in one launch: the reference by definition, and the kernel against the same bound.

The kernel runs on the GPU where there is one (``pytest -m gpu``), in Triton's interpreter elsewhere, where
programs run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from neula.kernels.dispatch import runs
from neula.kernels.sweep import ROWS, sweep

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")
GPU = [pytest.mark.gpu] if HAS_GPU else []


@pytest.fixture(params=["reference", pytest.param("kernel", marks=GPU)])
def solve(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    if request.param == "reference":
        return sweep.reference
    pytest.importorskip("triton")
    from triton.runtime.interpreter import InterpretedFunction

    from neula.kernels import sweep_triton

    if not HAS_GPU and not isinstance(sweep_triton._sweep, InterpretedFunction):
        pytest.skip("Triton was imported before its interpreter could be chosen: run tests/kernels by itself")
    return sweep_triton.sweep_triton


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
    return (t if rows else t.T.contiguous().T).to(DEVICE), inverses.to(DEVICE)


@pytest.mark.parametrize(
    ("n", "width", "k"),
    [(1, ROWS, 1), (64, 64, 1), (200, 64, 3), (330, 128, 8), (257, 128, 2), (100, 128, 4)],
)
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("rows", [False, True])
def test_solves(
    solve: Callable[..., torch.Tensor], n: int, width: int, k: int, upper: bool, rows: bool
) -> None:
    t, inverses = triangle(n, width, upper=upper, rows=rows)
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
    assert runs(sweep, DEVICE)
    for upper in (False, True):
        t, inverses = triangle(n, 512, upper=upper, rows=False)
        t = t.nan_to_num()
        b = torch.randn(n, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        found = [sweep(t, inverses, b, upper=upper) for _ in range(20)]
        assert all(torch.equal(x, found[0]) for x in found), "sums do not depend on what comes first"
        expected = sweep.reference(t, inverses, b, upper=upper)
        assert torch.linalg.vector_norm(found[0] - expected) <= 1e-5 * torch.linalg.vector_norm(expected)
