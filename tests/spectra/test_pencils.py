"""Generalized eigenvalue problems: parts of their spectra, and gradients with respect to both matrices."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
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


@pytest.mark.parametrize("engine", ["auto", "emulated"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
def test_intervals_are_half_open(engine: str, dtype: str) -> None:
    """The eigenvalues are 1/4, 1/2, 1/2 and 2, without rounding errors."""
    a, b = np.diag([1.0, 2, 2, 8]).astype(dtype), 4 * np.eye(4, dtype=dtype)
    a[0, 3] = np.nan  # not read
    counts = {(0.25, 2.0): 3, (0.25, 1.9): 2, (-math.inf, 0.25): 1, (2.0, math.inf): 0, (-1.0, 0.0): 0}
    for interval, count in counts.items():
        for scale in (1.0, 2.0**-40):
            ends = interval[0] * scale, interval[1] * scale
            w, v = result = neula.eigh(a * a.dtype.type(scale), b, subset_by_value=ends, engine=engine)
            assert (w.shape, v.shape, result.errors.shape) == ((count,), (4, count), (count,))
            assert ((w > ends[0]) & (w <= ends[1])).all()
            assert result.converged


def test_intervals_as_in_scipy() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((2, 9, 9))
    a, b = a + a.T, b @ b.T + np.eye(9)
    values = scipy.linalg.eigvalsh(a, b)
    for low, high in ((-math.inf, 0.0), (0.0, math.inf), (values[2] - 1e-6, values[6] + 1e-6)):
        expected = scipy.linalg.eigh(a, b, subset_by_value=(low, high), eigvals_only=True)
        for options in ({}, {"eigvals_only": True}, {"upper": True}):
            found = neula.eigh(a, b, subset_by_value=(low, high), **options).eigenvalues
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
