"""LU of small blocks without pivoting: the reference, and what CUDA offers."""

from __future__ import annotations

import pytest
import torch

from neula.kernels.lu_block import lu_unpivoted, lu_unpivoted_reference, triangular_inverses
from neula.matrices import hpl_ai_matrix, no_pivoting_matrix

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def unpacked(lu: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lu = lu.double().cpu()
    return lu.tril(-1) + torch.eye(len(lu), dtype=torch.float64), lu.triu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 64, 100, 129])
def test_backward_error(n: int, dtype: torch.dtype, device: str) -> None:
    """``|A - L U| <= gamma_n |L| |U|`` (Higham, Theorem 9.3)."""
    a = hpl_ai_matrix(n, dtype=dtype)
    lu = lu_unpivoted(a.to(device, copy=True))
    lower, upper = unpacked(lu)
    bound = n * torch.finfo(dtype).eps / 2 * (lower.abs() @ upper.abs())
    assert ((lower @ upper - a.double()).abs() <= bound).all()


@pytest.mark.parametrize("n", [3, 40])
def test_in_place_on_blocks_with_gaps(n: int) -> None:
    matrix = torch.zeros(2 * n, 3 * n).T
    matrix[n : 2 * n, n : 2 * n] = a = hpl_ai_matrix(n, dtype=torch.float32)
    assert torch.equal(lu_unpivoted(matrix[n : 2 * n, n : 2 * n]), lu_unpivoted_reference(a.clone()))
    assert torch.equal(matrix.nonzero().amin(0), torch.tensor([n, n]))
    assert torch.equal(matrix.nonzero().amax(0), torch.tensor([2 * n - 1, 2 * n - 1]))


@pytest.mark.parametrize("zero", [0, 5, 16, 30, 39])
def test_a_zero_pivot_stays(zero: int) -> None:
    a = torch.eye(40) + torch.ones(40, 40).tril(-1)
    a[zero, zero] = 0.0
    lu = lu_unpivoted(a)
    assert lu[zero, zero] == 0
    assert (lu.diagonal()[:zero] == 1).all()
    assert bool(lu.isfinite().all()) == (zero == 39)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 7, 64, 128])
def test_inverses(n: int, device: str) -> None:
    """Small residuals, column by column: ``|T X - I| <= gamma_n |T| |X|`` (Higham, section 14.2)."""
    lu = lu_unpivoted(no_pivoting_matrix(n, 50.0 if n > 1 else 1.0, dtype=torch.float32).to(device))
    identity = torch.eye(n, dtype=torch.float64)
    for factor, inverse in zip(unpacked(lu), triangular_inverses(lu), strict=True):
        x = inverse.double().cpu()
        bound = n * 2.0**-24 * (factor.abs() @ x.abs())
        # The inverse of U is made from the transposed one: residuals on the other side.
        right, left = (factor @ x - identity).abs(), (x @ factor - identity).abs()
        assert bool((right <= bound).all()) or bool((left <= n * 2.0**-24 * (x.abs() @ factor.abs())).all())
