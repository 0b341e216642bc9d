"""Rows over two GPUs of one host, with NCCL between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import neula
from over_processes import tasks
from over_processes.problems import matrix, noise
from over_processes.processes import Processes
from over_processes.test_qr import U, check_factors

pytestmark = pytest.mark.gpu2


@pytest.fixture(scope="module")
def gpus() -> Iterator[Processes]:
    found = Processes(2, "nccl")
    yield found
    found.stop()


CALLS: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("qr", torch.float32, {}),
    ("qr", torch.float64, {}),
    ("qr", torch.float32, {"accuracy": "fp16"}),
    ("qr", torch.float32, {"algorithm": "rgsqrf-reortho"}),
    ("qr", torch.float64, {"algorithm": "householder"}),
    ("tsqr", torch.float32, {}),
    ("tsqr", torch.float64, {}),
]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("function", "dtype", "asked"), CALLS)
@pytest.mark.parametrize("shape", [(30001, 200), (5000, 33)])
def test_factors(
    gpus: Processes,
    size: int,
    function: str,
    dtype: torch.dtype,
    asked: dict[str, Any],
    shape: tuple[int, int],
) -> None:
    a = matrix(*shape, "arithmetic", 1e2).to(dtype)
    found = gpus.check(size, tasks.on_gpus, function, a, a[:, 0], asked)
    assert found[0].converged
    check_factors(found[0].Q, found[0].R, a, U[found[0].accuracy])
    for other in found[1:]:
        assert torch.equal(other.R, found[0].R)
        assert other.attempts == found[0].attempts


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("condition", [1e2, 1e6, 1e9])
@pytest.mark.parametrize("shape", [(30001, 200), (8191, 200), (300, 20)])
def test_least_squares(gpus: Processes, size: int, condition: float, shape: tuple[int, int]) -> None:
    a, b = matrix(*shape, "geometric", condition), noise(shape[0], 2)
    found = gpus.check(size, tasks.on_gpus, "lstsq", a, b, {})
    one = neula.lstsq(a, b)
    assert found[0].converged
    error = found[0].forward_error + one.forward_error
    norms = torch.linalg.vector_norm(a, dim=0)[:, None]
    norm = torch.linalg.vector_norm
    assert (norm(norms * (found[0].x - one.x), dim=0) <= error * norm(norms * one.x, dim=0)).all()
    for other in found[1:]:
        assert torch.equal(other.x, found[0].x)
        assert other.attempts == found[0].attempts


def test_products(gpus: Processes) -> None:
    a, b = noise(20000, 64).float(), noise(20000, 32, seed=2).float()
    exact, size = a.double().T @ b.double(), a.double().abs().T @ b.double().abs()
    for product in gpus.check(2, tasks.on_gpus, "matmul", a, b, {"compute": "fp16_cor"}):
        assert ((product - exact).abs() <= (200 + 20000 / 50) * 2.0**-24 * size).all()
