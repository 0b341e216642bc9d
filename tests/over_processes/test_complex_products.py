"""Products of matrices whose rows are spread over processes; polar factors and triplets of complex ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from over_processes import tasks
from over_processes.problems import COUNTS, noise
from over_processes.processes import Processes


def normal(m: int, n: int, seed: int = 1) -> torch.Tensor:
    return torch.complex(noise(m, n, seed=seed), noise(m, n, seed=seed + 10))


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize(("left", "right"), [("c", "c"), ("r", "c"), ("c", "r"), ("r", "r")])
@pytest.mark.parametrize(
    ("single", "asked"),
    [(False, {}), (True, {}), (True, {"compute": "fp16_cor", "engine": "emulated"})],
)
def test_products(
    processes: Processes, size: int, left: str, right: str, single: bool, asked: dict[str, Any]
) -> None:
    """``A^T B``, without a conjugate: within the bound of a sum of k products, whatever its order."""
    a, b = normal(130, 7), normal(130, 5, seed=2)
    a, b = a if left == "c" else a.real.contiguous(), b if right == "c" else b.real.contiguous()
    if single:
        a, b = (x.to(torch.complex64 if x.is_complex() else torch.float32) for x in (a, b))
    wide = [x.to(torch.complex128) for x in (a, b)]
    exact = wide[0].T @ wide[1]
    factor = 1 if left == right == "r" else 4
    bound = factor * (130 + 30) * (2.0**-24 if single else 2.0**-53) * (wide[0].abs().T @ wide[1].abs())
    found = processes.check(size, tasks.product, a, b, asked)
    for product, of_dtensors in found:
        assert torch.equal(product, found[0][0])
        for x in (product, of_dtensors):
            assert x.dtype == torch.promote_types(a.dtype, b.dtype)
            assert ((x - exact).abs() <= bound).all()


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize("engine", ["cpu", "like a GPU"])
@pytest.mark.parametrize("shape", [(131, 20), (20, 50), (2, 1)])
@pytest.mark.parametrize("accuracy", ["bf16", "fp32", "fp64"])
def test_polar_factors(
    processes: Processes, size: int, engine: str, shape: tuple[int, int], accuracy: str
) -> None:
    a = normal(*shape)
    asked = {"accuracy": accuracy, "side": "right"}
    if engine != "cpu":
        asked["engine"] = tasks.LikeAGpu("cpu")
    found = processes.check(size, tasks.polar, a, asked)
    assert found[0].converged
    off = found[0].residual_bound + 1e-5 * (accuracy != "fp64")
    assert float((a - found[0].U @ found[0].H).norm() / a.norm()) <= off
    assert torch.equal(found[0].H, found[0].H.mH)
    values = torch.linalg.svdvals(found[0].U)
    assert float((values - 1).abs().max()) <= found[0].orthogonality_bound + 1e-14
    for other in found[1:]:
        assert torch.equal(other.U, found[0].U)
        assert torch.equal(other.H, found[0].H)


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize("algorithm", [None, "iteration", "gram-svd", "qr-svd"])
@pytest.mark.parametrize("engine", ["cpu", "like a GPU"])
def test_singular_triplets(processes: Processes, size: int, algorithm: str | None, engine: str) -> None:
    u, v = torch.linalg.qr(normal(160, 24)).Q, torch.linalg.qr(normal(24, 24)).Q
    s = 0.5 ** torch.arange(24, dtype=torch.float64)
    asked: dict[str, Any] = {"rank": 3, "algorithm": algorithm}
    if engine != "cpu":
        asked["engine"] = tasks.LikeAGpu("cpu")
    for found in processes.check(size, tasks.triplets, (u * s) @ v.mH, asked):
        assert found.converged
        assert found.s.dtype == torch.float64
        assert bool(((found.s - s[:3]).abs() <= found.errors + 1e-14).all())
        rest = (u * s) @ v.mH - (found.U * found.s) @ found.Vh
        assert float(torch.linalg.matrix_norm(rest, 2)) <= s[3] * (1 + 1e-10)
