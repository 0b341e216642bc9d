"""Gradients of generalized eigenvalue problems, with respect to both matrices."""

from __future__ import annotations

import pytest
import torch
from tests.matrices import normal
from torch.autograd import gradcheck, gradgradcheck

import neula


def hermitian(a: torch.Tensor) -> torch.Tensor:
    return (a + a.mH) / 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients_of_a_pencil(dtype: torch.dtype) -> None:
    x, y = (normal(2, 3, 3, seed=seed).to(dtype) for seed in (1, 2))
    if dtype.is_complex:
        x, y = x + 1j * normal(2, 3, 3, seed=3), y + 1j * normal(2, 3, 3, seed=4)
    a, b = (x + x.mH).requires_grad_(), (y @ y.mH + torch.eye(3))[0].requires_grad_()

    def solved(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w, v = neula.eigh(hermitian(a), hermitian(b))
        return w, v.abs().square()

    assert gradcheck(solved, (a, b), fast_mode=True)
    assert gradcheck(solved, (a.detach(), b), fast_mode=True)
    assert gradgradcheck(solved, (a[0].detach().requires_grad_(), b), fast_mode=True)

    def some(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = neula.eigh(
            hermitian(a), hermitian(b), upper=True, subset_by_index=(1, 2)
        ).eigenvalues
        return found

    assert gradcheck(some, (a, b), fast_mode=True)
