"""Complex matrices whose rows are spread over processes, beside NumPy and beside one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import neula
from over_processes import tasks
from over_processes.processes import Processes

RNG = np.random.default_rng(3)


def noise(*shape: int) -> torch.Tensor:
    return torch.from_numpy(RNG.standard_normal(shape) + 1j * RNG.standard_normal(shape))


def graded(m: int, n: int, condition: float) -> torch.Tensor:
    return noise(m, n) * torch.logspace(0, -np.log10(condition), n, dtype=torch.float64) @ noise(n, n)


SMALL, LARGE = (noise(60, 5), noise(60)), (noise(900, 40), noise(900, 2))
ILL = graded(200, 8, 1e5), noise(200)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("algorithm", [None, "cgls", "lsqr", "householder"])
@pytest.mark.parametrize("given", [SMALL, LARGE, ILL], ids=["small", "large", "ill"])
def test_least_squares(processes: Processes, given: Any, algorithm: str | None, size: int) -> None:
    a, b = given
    asked = {"algorithm": algorithm}
    found = processes.check(size, tasks.solution, a, b, None, asked)
    for other in found[1:]:
        assert torch.equal(other.x, found[0].x)
        assert other.attempts == found[0].attempts
    expected = torch.from_numpy(np.linalg.lstsq(a.numpy(), b.numpy(), rcond=None)[0])
    sizes = torch.linalg.vector_norm(a, dim=0)
    columns = sizes if b.ndim == 1 else sizes[:, None]
    norm = torch.linalg.vector_norm
    error = norm(columns * (found[0].x - expected), dim=0) / norm(columns * expected, dim=0)
    condition = np.linalg.cond((a / sizes).numpy())
    assert found[0].converged
    assert float(error.max()) <= found[0].forward_error + 10 * condition**2 * 2.0**-53
    assert found[0].forward_error < 1e-3


@pytest.mark.parametrize("asked", [{"damp": 0.5}, {"certify": "forward"}])
def test_least_squares_with_options(processes: Processes, asked: dict[str, Any]) -> None:
    (a, b), weights = SMALL, torch.linspace(0.5, 2.0, 60, dtype=torch.float64)
    for right in (b, b.real.clone()):
        found = processes.check(3, tasks.solution, a, right, weights, asked)[0]
        expected = neula.lstsq(a, right, weights=weights, **asked)
        assert found.converged
        assert (found.x - expected.x).abs().max() <= 1e-11
    found = processes.check(3, tasks.solution, a.real.clone(), b, weights, asked)[0]
    assert (found.x - neula.lstsq(a.real, b, weights=weights, **asked).x).abs().max() <= 1e-11


def test_statistics(processes: Processes) -> None:
    (a, b), (m, n) = SMALL, SMALL[0].shape
    for x, y in ((a, b), (a.real.clone(), b)):
        found = processes.check(3, tasks.covariance, x, y)[0]
        solution = np.linalg.lstsq(x.numpy(), y.numpy(), rcond=None)[0]
        variance = np.linalg.norm(y.numpy() - x.numpy() @ solution) ** 2 / (m - n)
        expected = variance * np.linalg.inv((x.mH @ x).numpy())
        assert np.abs(found.numpy() - expected).max() <= 1e-13 * np.abs(expected).max()


def test_messages(processes: Processes) -> None:
    for found in processes.check(3, tasks.sums_of_mixed_dtypes):
        assert all(found), found


def test_nan(processes: Processes) -> None:
    a, b = (x.clone() for x in SMALL)
    a[59, 1] = complex(0, float("nan"))
    for failed in processes.run(2, tasks.solution, a, b, None, {}):
        assert failed.message == "A[59, 1] is nanj (row 5 of process 1): A must be finite"
