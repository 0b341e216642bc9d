"""Rounds of Cholesky QR of a few vectors, some of which depend on others: reference and kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, variants

from neula.kernels.cholesky.few_vectors import VECTORS, Steps, orthonormalizing

Round = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Steps]


one_round = variants(orthonormalizing)


def rounds(one_round: Round, x: torch.Tensor, least: torch.Tensor) -> tuple[torch.Tensor, Steps]:
    v, factor = x, torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    for _ in range(3):
        steps = one_round(v.mT @ v, factor, least)
        v, factor = v @ steps.inverse, steps.factor
    return v, steps


def vectors(k: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(300, k, dtype=torch.float64, generator=generator).to(DEVICE)


@pytest.mark.parametrize("k", [1, 3, 8, VECTORS])
@pytest.mark.parametrize("difference", [1.0, 1e-4, 1e-6, 1e-7])
def test_vectors_become_orthonormal(one_round: Round, k: int, difference: float) -> None:
    """However small the difference of the last one from a combination of others is, down to what counts."""
    x = vectors(k) * torch.logspace(0, -12, k, dtype=torch.float64, device=DEVICE)
    x[:, k - 1] = x[:, : k - 1].sum(1) + difference * vectors(1, seed=1)[:, 0]
    v, steps = rounds(one_round, x, 1e-8 * torch.linalg.vector_norm(x, dim=0))
    assert not steps.fails.any()
    assert torch.linalg.matrix_norm(v.mT @ v - torch.eye(k, dtype=x.dtype, device=DEVICE)) <= 1e-13
    lost = torch.linalg.vector_norm(v @ steps.factor - x, dim=0)
    assert (lost <= 1e-10 * torch.linalg.vector_norm(x, dim=0)).all()
    assert torch.equal(steps.factor, steps.factor.triu())


@pytest.mark.parametrize("difference", [0.0, 1e-17, 1e-10])
def test_what_depends_on_others_fails(one_round: Round, difference: float) -> None:
    x = vectors(5)
    x[:, 2] = x[:, 0] - x[:, 1] + difference * x[:, 2]
    x[:, 4] = 0.0
    v, steps = rounds(one_round, x, 1e-8 * torch.linalg.vector_norm(x, dim=0))
    assert steps.fails.tolist() == [0, 0, 1, 0, 1]
    v = v * (1 - steps.fails)
    assert torch.linalg.vector_norm(v @ steps.factor - x) <= 1e-8 * torch.linalg.vector_norm(x)


def test_nan_is_not_hidden(one_round: Round) -> None:
    x = vectors(3)
    x[7, 1] = torch.nan
    steps = one_round(x.mT @ x, torch.eye(3, dtype=x.dtype, device=DEVICE), torch.zeros_like(x[0]))
    assert steps.factor[:, 1:].isnan().any()
