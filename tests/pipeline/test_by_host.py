"""Small matrices of an engine whose launches take longer than LAPACK are left to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests import matrices

import neula
from neula.algorithms.elimination import compiled
from neula.engines import CpuEngine, EmulatedEngine, select_engine
from neula.engines.shipped import EMULATED
from neula.kernels.core import core
from neula.pipeline import call
from neula.problems.systems import ways as of_systems

LIMIT = 40 * 8 * 9
"""Of what the host takes here: one right-hand side of 40 x 8."""


class Launching(EmulatedEngine):
    """An engine that leaves small matrices to the host."""

    tuning = replace(EMULATED, by_host=LIMIT)


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``engine="auto"`` select :class:`Launching`."""
    monkeypatch.setattr(
        call,
        "select_engine",
        lambda asked, device: Launching("cpu") if asked == "auto" else select_engine(asked, device),
    )


normal = partial(matrices.normal, seed=None)


def system(n: int, k: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(n, n) + n * torch.eye(n, dtype=torch.float64), normal(n, k)


SMALL: list[Callable[..., Any]] = [
    lambda **asked: neula.lstsq(normal(40, 8), normal(40), **asked),
    lambda **asked: neula.lstsq(normal(40, 8).numpy(), normal(40).numpy(), **asked),
    lambda **asked: neula.lstsq(normal(40, 8), normal(40), damp=0.5, weights=normal(40).abs(), **asked),
    lambda **asked: neula.lstsq(normal(5, 8), normal(5), **asked),
    lambda **asked: neula.solve(*system(12), **asked),
    lambda **asked: neula.solve(system(12)[0] + system(12)[0].T, system(12)[1], assume_a="pos", **asked),
    lambda **asked: neula.qr(normal(40, 8), **asked),
    lambda **asked: neula.qr(normal(40, 8, dtype=torch.float32), "r", **asked),
    lambda **asked: neula.eigh(system(12)[0], **asked),
    lambda **asked: neula.eigh(system(12)[0], eigvals_only=True, **asked),
    lambda **asked: neula.svd(normal(40, 8), **asked),
    lambda **asked: neula.svd_lowrank(normal(40, 8), 3, **asked),
    lambda **asked: neula.polar(normal(40, 8), **asked),
]


@pytest.mark.parametrize("compute", SMALL)
def test_small_ones_are_the_hosts(compute: Callable[..., Any], launching: None) -> None:
    """Unless an engine is named."""
    found = compute()
    assert found.engine == compute(engine="cpu").engine
    assert found.converged
    assert compute(engine=Launching("cpu")).engine == str(Launching("cpu"))


@pytest.mark.parametrize("positive", [False, True])
def test_a_kernel_of_the_host_takes_systems(
    positive: bool, launching: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where others are queued, those that there is no kernel for are queued, too."""
    queued = {"queued": 100, "queued_definite": 100, "prelaunched_steps": 3}
    tuning = replace(Launching.tuning, by_host_kernel=-(-40 * 40 * 41 // 3), **queued)
    monkeypatch.setattr(Launching, "tuning", tuning)
    a, b = normal(41, 41), normal(41)
    a = a @ a.T + 41 * torch.eye(41, dtype=a.dtype) if positive else a + 41 * torch.eye(41, dtype=a.dtype)
    solve = partial(neula.solve, assume_a="pos" if positive else "gen")
    small, here = (a[:40, :40], b[:40]), str(Launching("cpu"))
    expected = str(select_engine("cpu", torch.device("cpu"))) if compiled.available() else here
    found = solve(*small)
    assert found.engine == expected
    assert found.converged
    assert torch.linalg.vector_norm(small[0] @ found.x - small[1]) <= 1e-13 * torch.linalg.vector_norm(b)
    assert solve(a[:40, :40], b[:40, None]).engine == expected
    columns = CpuEngine("cpu").tuning[of_systems.CoreTuning].core_numbers // 10
    for other in (
        solve(a, b),
        solve(a[:10, :10], b[:10, None].expand(10, columns + 1)),
        solve(a[None, :40, :40], b[:40, None]),
        solve(*small, wait=False),
        solve(*small, compute="fp32"),
        solve(*(x[:10].half() for x in (a[:, :10], b))),
    ):
        assert other.engine == here
    monkeypatch.setattr(of_systems, "available", lambda: False)
    assert solve(*small).engine == here


def test_what_the_host_finds_has_gradients(launching: None) -> None:
    a, b = normal(20, 4).requires_grad_(), normal(20).requires_grad_()
    torch.autograd.gradcheck(lambda a, b: neula.lstsq(a, b).x, (a, b), fast_mode=True)
    square, right = (x.requires_grad_() for x in system(5))
    torch.autograd.gradcheck(lambda a, b: neula.solve(a, b).x, (square, right), fast_mode=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_answers_go_back_to_the_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = normal(64, 32, dtype=dtype).cuda().requires_grad_(), normal(64, dtype=dtype).cuda()
    found, alone = neula.lstsq(a, b), neula.lstsq(a, b, engine="cuda")
    assert found.engine.startswith("cpu")
    assert alone.engine.startswith("cuda")
    tolerance = 64 * torch.finfo(dtype).eps * found.condition
    assert torch.linalg.vector_norm(found.x - alone.x) <= tolerance * torch.linalg.vector_norm(alone.x)
    of = ("x", "accepted", "backward_errors", "conditions", "forward_errors", "ranks")
    assert all(getattr(found, name).is_cuda for name in of)
    found.x.sum().backward()
    assert a.grad is not None
    assert a.grad.is_cuda
    x = neula.solve(a.detach()[:32], b[:32]).x
    residual = torch.linalg.vector_norm(a.detach()[:32].double() @ x.double() - b[:32].double())
    size = torch.linalg.matrix_norm(a.detach()[:32].double(), 2) * torch.linalg.vector_norm(x.double())
    assert x.is_cuda
    assert residual <= 32 * torch.finfo(dtype).eps * size
    q, r = factors = neula.qr(a.detach())
    assert factors.engine.startswith("cpu")
    assert q.is_cuda
    assert r.is_cuda
    assert factors.accepted.is_cuda
    assert torch.linalg.matrix_norm(q @ r - a) <= 64 * torch.finfo(dtype).eps * torch.linalg.matrix_norm(a)


OTHERS: list[Callable[[], Any]] = [
    lambda: neula.lstsq(normal(41, 8), normal(41)),
    lambda: neula.lstsq(normal(40, 8), normal(40, 2)),
    lambda: neula.lstsq(normal(2, 40, 8), normal(2, 40, 1)),
    lambda: neula.lstsq(normal(40, 8), normal(40), algorithm="cgls"),
    lambda: neula.lstsq(normal(40, 8), normal(40), compute="fp32"),
    lambda: neula.lstsq(normal(0, 8), normal(0)),
    lambda: neula.solve(*system(15)),
    lambda: neula.solve(*system(8), pivot="partial"),
    lambda: neula.solve(*system(8), compute="fp32"),
    lambda: neula.solve(*system(5), wait=False),
    lambda: neula.qr(normal(41, 9)),
    lambda: neula.qr(normal(40, 8), pivoting=True),
    lambda: neula.qr(normal(40, 8), panel="caqr"),
]


@pytest.mark.parametrize("compute", OTHERS)
def test_others_stay(compute: Callable[[], Any], launching: None) -> None:
    assert compute().engine == str(Launching("cpu"))


def test_the_core_factorizes_what_several_threads_of_a_library_would(
    launching: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Launching, "tuning", replace(EMULATED, by_host=10000))
    a = normal(10000, 1)
    expected = str(select_engine("cpu", torch.device("cpu"))) if core() else str(Launching("cpu"))
    for given in (a, a.numpy(), a.clone().requires_grad_()):
        found = neula.qr(given)
        assert found.engine == expected
        assert found.converged
        assert torch.linalg.vector_norm(a - torch.as_tensor(found.Q @ found.R)) <= 1e-14 * a.norm()
    assert neula.qr(a + 0j).engine == str(Launching("cpu"))
