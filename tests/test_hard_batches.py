"""Batches as second-order optimizers have them: hard matrices are factorized together, too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from benchmarks.batches import PROFILES, batch_of_profile

import neula
from neula.engines import CpuEngine
from neula.engines.shipped import cuda_tuning

EPS = torch.finfo(torch.float32).eps


class Together(CpuEngine):
    """A CPU that takes the steps of a GPU."""

    tuning = replace(cuda_tuning((9, 0)), corrected=False)


def meets_gates(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> bool:
    """Whether Q and R meet the error limits of the contest."""
    a, q, r, n = a.double(), q.double(), r.double(), a.shape[-1]
    identity = torch.eye(n, dtype=q.dtype, device=q.device)
    residual = one_norm(r - q.mT @ a) <= 20 * n * EPS * one_norm(a)
    return bool((residual & (one_norm(q.mT @ q - identity) <= 100 * n * EPS)).all())


def of_householder(h: torch.Tensor, tau: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and R of the Householder form."""
    return torch.linalg.householder_product(h.double(), tau.double()), h.triu()


def one_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_norm(x.double(), ord=1)


@pytest.mark.parametrize("profile", [*PROFILES, "mixed"])
@pytest.mark.parametrize(("n", "cond"), [(32, 1.0), (100, 0.0), (100, 2.0), (100, 4.0)])
def test_no_profile_goes_one_by_one(profile: str, n: int, cond: float) -> None:
    """One pass does where columns vanish, or have nearly all in common."""
    a = batch_of_profile(profile, 3, n, cond)
    q, r = factors = neula.qr(a, engine=Together("cpu"))
    assert factors.converged
    methods = [attempt.method for attempt in factors.attempts]
    assert not any("householder" in method for method in methods)
    if cond in (0.0, 2.0) and profile not in ("upper", "mixed"):
        assert methods == ["gram-schmidt fp64"]
    assert meets_gates(a, q, r)
    assert torch.equal(r, r.triu())
    if profile == "rankdef" and n == 100:
        assert not r[:, :, 75:].any()


@pytest.mark.parametrize("engine", ["cpu", Together("cpu")], ids=["lapack", "from Q"])
@pytest.mark.parametrize("profile", [*PROFILES, "mixed"])
def test_reflectors_of_every_profile(profile: str, engine: str | CpuEngine) -> None:
    a = batch_of_profile(profile, 3, 70, 2.0)
    h, tau = found = neula.qr(a, mode="raw", engine=engine)
    assert found.converged
    assert len(found.attempts) == 1
    assert meets_gates(a, *of_householder(h, tau))


@pytest.mark.gpu
@pytest.mark.parametrize("profile", [*PROFILES, "mixed"])
@pytest.mark.parametrize("n", [32, 512, 700])
def test_every_profile_on_a_gpu(profile: str, n: int) -> None:
    a = batch_of_profile(profile, 4, n, 2.0, device="cuda")
    h, tau = found = neula.qr(a, mode="raw")
    assert found.converged
    assert meets_gates(a, *of_householder(h, tau))
    q, r = factors = neula.qr(a)
    assert factors.converged
    # Random triangles of order 512 have condition numbers beyond any precision: what is left of their columns
    # are rounding errors along those before, however many passes.
    if profile != "upper" and n == 512:
        assert not any("householder" in attempt.method for attempt in factors.attempts)
    assert meets_gates(a, q, r)
