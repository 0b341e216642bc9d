"""Cholesky QR in passes, of some matrices together: each as accurate as alone, whatever the others are."""

from __future__ import annotations

import pytest
import torch
from tests.devices import DEVICE

from neula.algorithms.orthogonal.gram_passes import gram_passes, shifted_passes
from neula.engines import select_engine
from neula.io.matrices import random_matrix

DTYPE = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
ENGINE = select_engine("auto", DEVICE)


def matrices(dtype: torch.dtype, *conditions: float) -> torch.Tensor:
    """Tall ones of unit columns."""
    made = [
        random_matrix("geometric", 90, 20, cond=cond, dtype=dtype, seed=i)
        for i, cond in enumerate(conditions)
    ]
    a = torch.stack(made).to(DEVICE)
    return a / torch.linalg.vector_norm(a, dim=1, keepdim=True)


def lost(q: torch.Tensor) -> list[float]:
    identity = torch.eye(q.shape[2], dtype=q.dtype, device=q.device)
    return torch.linalg.matrix_norm(q.mH @ q - identity).tolist()


@DTYPE
@pytest.mark.parametrize("exact", [False, True])
def test_two_passes(dtype: torch.dtype, exact: bool) -> None:
    a = matrices(dtype, 10.0, 1e6, 1e3)
    q, r = gram_passes(a, ENGINE, passes=2, exact=exact)
    assert max(lost(q)) < 1e-14
    assert torch.equal(r, r.triu())
    assert torch.linalg.matrix_norm(q @ r - a).max() < (1e-14 if exact else 1e-11)
    alone = [gram_passes(one[None], ENGINE, passes=2, exact=exact) for one in a]
    torch.testing.assert_close(q, torch.cat([one for one, _ in alone]), rtol=0.0, atol=1e-9)


@DTYPE
def test_dependent_columns_are_nan_in_their_matrix_alone(dtype: torch.dtype) -> None:
    a = matrices(dtype, 10.0, 10.0)
    a[1, :, 3] = a[1, :, 2]
    q, r = gram_passes(a, ENGINE, passes=1, exact=False)
    assert lost(q)[0] < 1e-13
    assert bool(r[0].isfinite().all())
    assert bool(q[1].isnan().any())
    assert bool(r[1].isnan().all())


@DTYPE
def test_a_shift_for_columns_that_are_nearly_dependent(dtype: torch.dtype) -> None:
    a = matrices(dtype, 1e11, 10.0)
    q, r = shifted_passes(a, ENGINE)
    assert max(lost(q)) < 1e-14
    assert torch.linalg.matrix_norm(q @ r - a).max() < 1e-14
