"""Low-rank approximation of matrices whose rows are spread over processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from over_processes import tasks
from over_processes.problems import COUNTS, SPECTRA, matrix
from over_processes.processes import Failure, Processes

CALLS: list[tuple[dict[str, Any], float]] = [
    ({"rank": 3}, 2.0**-53),
    ({"tol": 1e-2}, 2.0**-53),
    ({"rank": 20, "accuracy": "fp32"}, 2.0**-24),
    ({"rank": 2, "accuracy": 1e-3}, 1e-3),
]


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize(("asked", "u"), CALLS)
def test_triplets(processes: Processes, size: int, asked: dict[str, Any], u: float) -> None:
    """Singular values and residuals to a modest multiple of ``u ||A||``, the same on all processes."""
    for name in SPECTRA:
        a = matrix(200, 24, name)
        found = processes.check(size, tasks.factors, "svd_lowrank", a, asked)
        one, norm = found[0], torch.linalg.matrix_norm(a)
        assert one.converged
        for other in found[1:]:
            assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
        k = len(one.s)
        exact = torch.linalg.svdvals(a)
        assert ((one.s - exact[:k]).abs() <= 50 * u * norm).all()
        assert torch.linalg.matrix_norm(a.T @ one.U - one.Vh.T * one.s) <= 50 * k * u * norm
        assert torch.linalg.matrix_norm(one.U.T @ one.U - torch.eye(k)) <= 50 * 24 * u
        rest = torch.linalg.vector_norm(exact[k:]) / norm
        assert abs(one.relative_error - rest) <= 0.5 * rest + 50 * u


def test_badly_scaled_and_nan(processes: Processes) -> None:
    a = matrix(40, 6)
    for scale in (2.0**600, 2.0**-700, 0.0):
        found = processes.check(2, tasks.factors, "svd_lowrank", scale * a, {"rank": 2})[0]
        error = (found.s - torch.linalg.svdvals(a)[:2] * scale).abs()
        assert (error <= 1e-13 * scale).all()
    a[39, 1] = torch.nan
    found = processes.run(2, tasks.factors, "svd_lowrank", a, {"rank": 2})
    assert all(isinstance(x, Failure) and x.message.startswith("A[39, 1] is nan (row 3 of") for x in found)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("algorithm", ["iteration", "gram-svd", "qr-svd"])
@pytest.mark.parametrize("asked", [{}, {"accuracy": 1e-2}, {"engine": tasks.LikeAGpu("cpu")}], ids=str)
@pytest.mark.parametrize("imaginary", [False, True])
def test_every_algorithm(
    processes: Processes, size: int, algorithm: str, asked: dict[str, Any], imaginary: bool
) -> None:
    """Triplets to the accuracy, the same on all processes; some have fewer rows than columns."""
    left, right = (torch.linalg.qr(matrix(m, 40, imaginary=imaginary))[0] for m in (150, 40))
    exact = torch.cat([2.0 ** -torch.arange(4), 1e-3 * 0.9 ** torch.arange(36)]).double()
    a, given = left * exact @ right.mH, {"rank": 3, "algorithm": algorithm, **asked}
    one, *others = processes.check(size, tasks.factors, "svd_lowrank", a, given)
    assert one.converged
    assert one.s.dtype == torch.float64
    method = {"iteration": "subspace iteration", "gram-svd": "gram-svd", "qr-svd": " + svd"}[algorithm]
    assert all(method in attempt.method for attempt in one.attempts)
    for other in others:
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    assert ((one.s - exact[:3]).abs() <= one.errors + 1e-14).all()
    assert torch.linalg.matrix_norm(one.U.mH @ one.U - torch.eye(3)) <= 1e-5
    if "accuracy" not in asked:
        rest = torch.linalg.matrix_norm(a - (one.U * one.s) @ one.Vh, 2)
        assert float(rest) <= exact[3] * (1 + 1e-10)


def test_iterations_come_first(processes: Processes) -> None:
    """A few triplets of many take no QR."""
    found = processes.check(2, tasks.factors, "svd_lowrank", matrix(400, 120), {"rank": 2, "accuracy": 1e-2})[
        0
    ]
    assert found.attempts[0].method.split()[0] in ("subspace", "gram-svd")
