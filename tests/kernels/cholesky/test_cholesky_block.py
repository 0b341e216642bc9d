"""Cholesky factors of blocks with their inverses: reference and kernels against the same bounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from neula.kernels.cholesky import cholesky_block
from neula.kernels.cholesky.cholesky_block import BlockFactors, factor_lower

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
U = 2.0**-24

Factor = Callable[[torch.Tensor], BlockFactors]


@pytest.fixture(params=["reference", pytest.param("kernel", marks=[pytest.mark.gpu] if HAS_GPU else [])])
def factor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Factor:
    """With leaves as small as they can be, where there is no GPU."""
    if not HAS_GPU:
        monkeypatch.setattr(cholesky_block, "LEAF", 32)
    if request.param == "reference":
        return factor_lower.reference
    pytest.importorskip("triton")
    from neula.kernels.cholesky import cholesky_block_triton

    if not HAS_GPU:
        monkeypatch.setattr(cholesky_block_triton, "LEAF", 32)
        for name in ("ROWS", "TILE"):
            monkeypatch.setattr(cholesky_block_triton, name, 16)
    return factor_lower.kernel


def definite(n: int) -> torch.Tensor:
    """A column-major float32 block of a larger matrix, with NaN above the diagonal."""
    generator = torch.Generator().manual_seed(n)
    g = torch.randn(n, 2 * n, generator=generator, dtype=torch.float64)
    above = torch.ones(n, n, dtype=torch.bool).triu(1)
    whole = torch.full((n + 3, n + 5), torch.nan, device=DEVICE)
    return whole.T[2 : n + 2, 3 : n + 3].copy_((g @ g.T / n).float().masked_fill(above, torch.nan))


@pytest.mark.parametrize("n", [1, 32, 75])
def test_factors_and_inverses(factor: Factor, n: int) -> None:
    """``|A - L L^T| <= gamma |L| |L^T|`` (Higham, Theorem 10.3), with what products with inverses lose."""
    a = definite(n)
    exact = a.double().tril() + a.double().tril(-1).T
    inverse, order = factor(a)
    leaf = cholesky_block.LEAF
    assert not order.any()
    assert order.shape == (-(-n // leaf), 1)
    lower, x = a.double().tril(), inverse.double().T
    size = lower.abs() @ lower.abs().T
    assert ((lower @ lower.T - exact).abs() <= 2 * (n + 2) * U * size).all()
    identity = torch.eye(n, dtype=torch.float64, device=DEVICE)
    assert not x.triu(1).any()
    assert ((x @ lower - identity).abs() <= 2 * (n + 2) * U * (x.abs() @ lower.abs())).all()


def test_what_is_not_definite_is_found(factor: Factor) -> None:
    a = definite(75)
    a[70, 70] = -1.0
    _, order = factor(a)
    found = int((order[:, 0] > 0).nonzero()[0])
    assert found * cholesky_block.LEAF + int(order[found]) == 71
