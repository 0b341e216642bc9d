"""Rows over the GPUs of one host, with NCCL between them: 1, 2, 4, ... of those that there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import neula
from over_processes import tasks
from over_processes.problems import SPECTRA, matrix, noise
from over_processes.processes import Processes
from over_processes.test_decompositions import U, check_factors, check_polar

pytestmark = pytest.mark.gpu2

COUNT = min(8, max(2, torch.cuda.device_count()))
SIZES = [size for size in (1, 2, 4, 8) if size <= COUNT]


@pytest.fixture(scope="module")
def gpus() -> Iterator[Processes]:
    found = Processes(COUNT, "nccl")
    yield found
    found.stop()


def of_all(gpus: Processes, size: int, function: str, *given: Any) -> Any:
    """The result of some GPUs, which is the same on all of them, bit by bit."""
    first, *others = gpus.check(size, tasks.on_gpus, function, *given)
    for other in others:
        for name in ("x", "Q", "R", "U", "H", "s", "Vh"):
            if isinstance(getattr(first, name, None), torch.Tensor):
                assert torch.equal(getattr(other, name), getattr(first, name))
        assert other.attempts == first.attempts
    assert first.converged
    return first


CALLS: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("qr", torch.float32, {}),
    ("qr", torch.float64, {}),
    ("qr", torch.float32, {"accuracy": "fp16"}),
    ("qr", torch.float32, {"algorithm": "rgsqrf-reortho"}),
    ("qr", torch.float64, {"algorithm": "householder"}),
    ("tsqr", torch.float32, {}),
    ("tsqr", torch.float64, {}),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("function", "dtype", "asked"), CALLS)
@pytest.mark.parametrize("shape", [(30001, 200), (5000, 33), (6000, 1300)])
def test_factors(
    gpus: Processes,
    size: int,
    function: str,
    dtype: torch.dtype,
    asked: dict[str, Any],
    shape: tuple[int, int],
) -> None:
    """As those of one GPU: with R positive on its diagonal there is but one QR."""
    condition = 1e2
    if function == "tsqr" and shape[1] > 256:
        pytest.skip("tsqr takes up to 256 columns")
    a = (matrix(*shape, "arithmetic", condition) if shape[1] < 1000 else noise(*shape)).to(dtype)
    found = of_all(gpus, size, function, a, a[:, 0], asked)
    u, n = U[found.accuracy], shape[1]
    check_factors(found.Q.cuda(), found.R.cuda(), a.cuda(), u)
    one = getattr(neula, function)(a.cuda(), **asked)
    # Of both: a backward error moves R by the condition number as much, what Q lacks as it is.
    bound = 2 * (2**0.5 * condition * 12 * n**0.5 + 24 * n) * u * torch.linalg.matrix_norm(a.double())
    assert torch.linalg.matrix_norm(found.R.double() - one.R.cpu().double()) <= bound


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("condition", [1e2, 1e6, 1e9])
@pytest.mark.parametrize("shape", [(30001, 200), (8191, 200), (300, 20)])
def test_least_squares(gpus: Processes, size: int, condition: float, shape: tuple[int, int]) -> None:
    a, b = matrix(*shape, "geometric", condition), noise(shape[0], 2)
    found, one = of_all(gpus, size, "lstsq", a, b, {}), neula.lstsq(a.cuda(), b.cuda())
    error = found.forward_error + one.forward_error
    norms = torch.linalg.vector_norm(a, dim=0)[:, None]
    norm, x = torch.linalg.vector_norm, one.x.cpu()
    assert (norm(norms * (found.x - x), dim=0) <= error * norm(norms * x, dim=0)).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", [(40000, 1500), (40000, 2500), (12000, 4500)])
def test_least_squares_of_many_columns(gpus: Processes, size: int, shape: tuple[int, int]) -> None:
    """R from Gram matrices in corrected products and in plain fp16, and from recursive Gram-Schmidt."""
    found, one, norms = (results := gpus.check(size, tasks.large_on_gpus, *shape))[0]
    assert found.converged
    assert all(torch.equal(other.x, found.x) for other, *_ in results)
    norm = torch.linalg.vector_norm
    allowed = (found.forward_error + one.forward_error) * norm(norms * one.x)
    assert norm(norms * (found.x - one.x)) <= allowed


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SPECTRA)
def test_triplets(gpus: Processes, size: int, name: str) -> None:
    a, n, norm = matrix(3001, 100, name), 100, torch.linalg.matrix_norm
    exact = torch.linalg.svdvals(a)
    for asked in ({"rank": 5}, {"rank": 5, "accuracy": "fp32"}, {"tol": 1e-2}):
        found = of_all(gpus, size, "svd_lowrank", a, a[:, 0], asked)
        u, k = U["fp32" if "accuracy" in asked else "fp64"], len(found.s)
        assert ((found.s - exact[:k]).abs() <= n * u * norm(a)).all()
        assert norm(a.T @ found.U - found.Vh.T * found.s) <= n * k * u * norm(a)
        assert norm(found.U.T @ found.U - torch.eye(k)) <= n * k * u


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("accuracy", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("shape", [(3001, 200), (200, 600)])
def test_polar_factors(gpus: Processes, size: int, accuracy: str, shape: tuple[int, int]) -> None:
    a = matrix(max(shape), min(shape), "arithmetic", 1e2)
    a = a if shape[0] >= shape[1] else a.T.contiguous()
    found = of_all(gpus, size, "polar", a, a[:, 0], {"accuracy": accuracy, "side": "right"})
    check_polar(found, a)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("asked", [{}, {"method": "polar"}])
def test_bases(gpus: Processes, size: int, asked: dict[str, Any]) -> None:
    a = matrix(3001, 100, "geometric", 1e3)
    for q in gpus.check(size, tasks.on_gpus, "orth", a, a[:, 0], asked):
        assert torch.linalg.matrix_norm(q.T @ q - torch.eye(q.shape[1])) <= 24 * 100 * 2.0**-53
        assert torch.linalg.matrix_norm(a - q @ (q.T @ a)) <= 50 * 100 * 2.0**-53 * torch.linalg.matrix_norm(
            a
        )


@pytest.mark.parametrize("size", SIZES)
def test_products(gpus: Processes, size: int) -> None:
    a, b = noise(20000, 64).float(), noise(20000, 32, seed=2).float()
    exact, magnitude = a.double().T @ b.double(), a.double().abs().T @ b.double().abs()
    for product in gpus.check(size, tasks.on_gpus, "matmul", a, b, {"compute": "fp16_cor"}):
        assert ((product - exact).abs() <= (200 + 20000 / 50) * 2.0**-24 * magnitude).all()
