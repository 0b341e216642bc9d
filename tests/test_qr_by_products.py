"""QR of tall matrices with more columns than a kernel takes, on a CPU: Cholesky QR, once or twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import neula
from neula.algorithms.orthogonal.cholesky_qr import solved_cholesky_qr
from neula.certificates.bounds import orthogonality_bound
from neula.engines import FP32, FP64
from neula.io.matrices import random_matrix
from neula.kernels.few_vectors import probes_host

FORMATS = {torch.float64: FP64, torch.float32: FP32}


def normal(m: int, n: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(m, n, dtype=dtype, generator=torch.Generator().manual_seed(0))


def loss(q: torch.Tensor) -> float:
    wide = q.double()
    lost = wide.T @ wide - torch.eye(q.shape[1], dtype=torch.float64)
    return float(torch.linalg.matrix_norm(lost)) / q.shape[1] ** 0.5


def residual(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> float:
    wide = a.double()
    return float(torch.linalg.matrix_norm(wide - q.double() @ r.double()) / torch.linalg.matrix_norm(wide))


def tried(found: neula.QRResult) -> list[tuple[str, bool]]:
    return [(attempt.method, attempt.accepted) for attempt in found.attempts]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("by_columns", [False, True])
def test_one_pass_for_what_is_well_conditioned(dtype: torch.dtype, by_columns: bool) -> None:
    a = normal(450, 150, dtype)
    a = a.T.contiguous().T if by_columns else a
    before, target = a.clone(), FORMATS[dtype]
    found = neula.qr(a)
    assert tried(found) == [(f"cholesky-qr {target.name}, repeated", True)]
    assert torch.equal(a, before)
    assert loss(found.Q) <= orthogonality_bound(target, 150)
    assert residual(a, *found) <= 150**0.5 * target.u
    assert bool((found.R.diagonal() > 0).all())
    assert not bool(found.R.tril(-1).any())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_another_pass_where_one_is_not_enough(dtype: torch.dtype) -> None:
    """Positive columns are nearly parallel: one pass misses the bound, two are as good as reflections."""
    target = FORMATS[dtype]
    a = torch.rand(600, 200, dtype=dtype, generator=torch.Generator().manual_seed(0))
    once = torch.empty_like(a)
    assert solved_cholesky_qr(a, out=once) is not None
    assert loss(once) > orthogonality_bound(target, 200)
    found = neula.qr(a)
    assert tried(found) == [(f"cholesky-qr {target.name}, repeated", True)]
    assert loss(found.Q) <= 2 * loss(torch.linalg.qr(a)[0])
    assert residual(a, *found) <= 200**0.5 * target.u


def test_what_a_pass_leaves_is_small_at_any_condition() -> None:
    a = random_matrix("geometric", 400, 150, cond=1e5, seed=1)
    q = torch.empty_like(a)
    r = solved_cholesky_qr(a, out=q)
    assert r is not None
    assert loss(q) > 1e-9
    assert residual(a, q, r) <= 150**0.5 * FP64.u


def dependent(m: int, n: int) -> torch.Tensor:
    a = normal(m, n)
    a[:, 7] = a[:, 3] - a[:, 5]
    return a


def vanishing(m: int, n: int) -> torch.Tensor:
    a = normal(m, n)
    a[:, 7] = 0.0
    return a


HARD = {
    "dependent": dependent(450, 150),
    "a zero column": vanishing(450, 150),
    "ill-conditioned": random_matrix("geometric", 450, 150, cond=1e12, seed=1),
    "out of range": 1e-170 * normal(450, 150),
}


@pytest.mark.parametrize("name", HARD)
def test_columns_that_are_too_dependent_are_reflected(name: str) -> None:
    a = HARD[name]
    found = neula.qr(a)
    assert tried(found)[0] == ("cholesky-qr fp64, repeated", False)
    assert tried(found)[-1] == ("householder fp64", True)
    assert loss(found.Q) <= orthogonality_bound(FP64, 150)
    scale = 1.0 / float(a.abs().max())
    assert residual(a * scale, found.Q, found.R * scale) <= 150**0.5 * FP64.u


def test_other_accuracies_than_that_of_the_matrix() -> None:
    """What is measured is relative to the matrix as it was given."""
    a = normal(450, 150)
    for accuracy in ("fp32", "bf16"):
        found = neula.qr(a, accuracy=accuracy)
        assert tried(found) == [("cholesky-qr fp32, repeated", True)]
        assert 1e-9 < found.certificate.residual < 1e-6
    half = a.to(torch.bfloat16)
    assert tried(neula.qr(half)) == [("cholesky-qr fp32, repeated", True)]


def test_what_is_not_finite_is_refused() -> None:
    a = normal(450, 150)
    a[5, 5] = torch.nan
    with pytest.raises(ValueError, match="A must be finite"):
        neula.qr(a)


def test_with_a_gradient_and_in_other_modes() -> None:
    """These go through the chain, whose first link does the same."""
    a = normal(450, 150)
    usual, label = neula.qr(a), [("cholesky-qr fp64, repeated", True)]
    found = neula.qr(a.clone().requires_grad_())
    assert tried(found) == label
    assert torch.allclose(found.Q.detach(), usual.Q, atol=1e-13)
    complete = neula.qr(a, mode="complete")
    assert complete.attempts[-1].method == label[0][0]
    assert loss(complete.Q) < 1e-13
    a[:, 7] = 0.0
    found = neula.qr(a.clone().requires_grad_())
    assert tried(found) == [(label[0][0], False), ("householder fp64", True)]


def test_arrays_without_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes_host, "core", lambda: None)
    for a in (normal(450, 150), torch.rand(450, 150, dtype=torch.float32)):
        found = neula.qr(a.numpy())
        assert isinstance(found.Q, np.ndarray)
        assert tried(found) == [(f"cholesky-qr {FORMATS[a.dtype].name}, repeated", True)]
