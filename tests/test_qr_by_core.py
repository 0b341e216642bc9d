"""QR of few columns on a CPU by the compiled core: LAPACK reflects what is not accepted, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.matrices import normal

import neula
from neula.io.matrices import random_matrix
from neula.kernels.qr import cholesky_qr_host
from neula.problems.orthogonal import host_links
from neula.problems.orthogonal.links import REPEATED

LABEL = REPEATED.format("fp64")


def is_qr(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> bool:
    """To 40 n u, for few columns."""
    n = a.shape[-1]
    small = 40 * n * 2.0**-53
    loss = torch.linalg.matrix_norm(q.mT @ q - torch.eye(n)).max()
    residual = (torch.linalg.matrix_norm(a - q @ r) / torch.linalg.matrix_norm(a)).max()
    return bool(loss <= small) and bool(residual <= small)


def test_one_call_of_the_kernel() -> None:
    a = normal(300, 40)
    found = neula.qr(a)
    assert [attempt.method for attempt in found.attempts] == [LABEL]
    assert is_qr(a, *found)


@pytest.mark.parametrize("condition", [1e9, 1e12, 1e15])
def test_dependent_columns_are_no_other_way(condition: float) -> None:
    a = random_matrix("geometric", 60, 9, cond=condition, seed=1)
    found = neula.qr(a)
    assert [(one.method, one.accepted) for one in found.attempts] == [(LABEL, True)]
    assert is_qr(a, *found)


def test_columns_whose_squares_underflow_are_reflected() -> None:
    a = random_matrix("geometric", 60, 9, cond=1e3, seed=1)
    a[:, 4] *= 1e-170
    found = neula.qr(a)
    tried = [(one.method, one.accepted) for one in found.attempts]
    assert tried == [(LABEL, False), ("householder fp64", True)]
    assert is_qr(a, *found)


def test_only_those_of_a_batch_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others keep their factors."""
    a = normal(5, 60, 9)

    def without_one(a: torch.Tensor, g: np.ndarray, enough: float) -> Any:
        q, r, found = cholesky_qr_host.cholesky_qr(a, g, enough)
        if len(a) == 5:
            q[3], r[3], found[:, 3] = torch.nan, torch.nan, np.nan
        return q, r, found

    monkeypatch.setattr(host_links, "cholesky_qr", without_one)
    found, alone = neula.qr(a), neula.qr(a[2])
    assert [(one.method, one.accepted) for one in found.attempts] == [
        (LABEL, False),
        ("householder fp64", True),
    ]
    assert is_qr(a, *found)
    assert bool(found.accepted.all())
    assert torch.equal(found.Q[2], alone.Q)
