"""QR, tall QR and bases of matrices whose rows are spread over processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import neula
from over_processes import tasks
from over_processes.problems import COUNTS, SPECTRA, matrix
from over_processes.processes import Processes

U = {"fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11}

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("qr", {}),
    ("qr", {"accuracy": "fp32"}),
    ("qr", {"accuracy": "fp32", "algorithm": "rgsqrf-reortho"}),
    ("qr", {"algorithm": "householder"}),
    ("qr", {"engine": "emulated", "accuracy": "fp16"}),
    ("qr", {"panel": "cholesky32", "accuracy": "fp32"}),
    ("qr", {"panel": "cholesky", "cutoff": 16}),
    ("tsqr", {}),
]


def check_factors(q: torch.Tensor, r: torch.Tensor, a: torch.Tensor, u: float) -> None:
    """``A = Q R`` and ``Q^T Q = I`` to a modest multiple of ``sqrt(n) u``, R triangular."""
    n = a.shape[1]
    q, r, a = q.double(), r.double(), a.double()
    norm = torch.linalg.matrix_norm
    assert norm(a - q @ r) <= 12 * n**0.5 * u * norm(a)
    assert norm(q.T @ q - torch.eye(n, device=q.device)) <= 24 * n * u
    assert torch.equal(r, r.triu())
    assert (r.diagonal() >= 0).all()


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize(("function", "asked"), CALLS)
def test_factors(processes: Processes, size: int, function: str, asked: dict[str, Any]) -> None:
    """All spectra; the same R on all processes, bit by bit."""
    for name in SPECTRA:
        a = matrix(331, 40, name)
        found = processes.check(size, tasks.factors, function, a, asked)
        first, one = found[0], getattr(neula, function)(a, **asked)
        assert first.converged
        assert first.accuracy == one.accuracy
        check_factors(first.Q, first.R, a, U[first.accuracy])
        for other in found[1:]:
            assert torch.equal(other.R, first.R)
            assert torch.equal(other.Q, first.Q)
            assert other.attempts == first.attempts
            assert other.certificate == first.certificate


@pytest.mark.parametrize("accuracy", ["fp16", "fp32", "fp64"])
def test_the_links_of_a_gpu(processes: Processes, accuracy: str) -> None:
    """Panels that do not look at numbers, tall matrices by their Gram matrix: with emulated products."""
    a = matrix(700, 190, "geometric", 1e2)
    asked = {"engine": tasks.LikeAGpu("cpu"), "accuracy": accuracy}
    for size in (1, 3):
        for function, given in (("qr", asked), ("tsqr", {"engine": asked["engine"]})):
            found = processes.check(size, tasks.factors, function, a, given)[0]
            assert found.converged
            check_factors(found.Q, found.R, a, U[found.accuracy])


@pytest.mark.parametrize(
    ("condition", "methods"),
    [
        (10.0, ["rgsqrf fp32"]),
        (3000.0, ["rgsqrf fp32", "rgsqrf fp32 + correction"]),
        (1e6, ["rgsqrf fp32", "rgsqrf fp32 + correction", "rgsqrf fp32 + reortho"]),
    ],
)
def test_what_wide_panels_lose_comes_back(processes: Processes, condition: float, methods: list[str]) -> None:
    a = matrix(400, 190, "arithmetic", condition).float()
    found = processes.check(2, tasks.factors, "qr", a, {"engine": tasks.LikeAGpu("cpu")})
    assert [attempt.method for attempt in found[0].attempts] == methods
    check_factors(found[0].Q, found[0].R, a, U["fp32"])
    assert torch.equal(found[0].R, found[1].R)


@pytest.mark.parametrize("size", [1, 3])
def test_the_last_links(processes: Processes, size: int) -> None:
    """Of rank-deficient, badly scaled and zero columns Q is orthonormal as well."""
    a = matrix(150, 20)
    a[:, 3], a[:, 7], a[:, 11] = a[:, 4], 0.0, 1e-200 * a[:, 12]
    for asked in ({}, {"accuracy": "fp32"}):
        found = processes.check(size, tasks.factors, "qr", a, asked)[0]
        assert found.converged
        check_factors(found.Q, found.R, a, U[found.accuracy])
    zero = processes.check(size, tasks.factors, "qr", torch.zeros(30, 4), {})[0]
    assert zero.converged
    check_factors(zero.Q, zero.R, torch.zeros(30, 4), U["fp32"])


@pytest.mark.parametrize("n", [1, 5, 1100])
def test_triangles_are_those_of_the_first(processes: Processes, n: int) -> None:
    for found in processes.check(3, tasks.triangle, n):
        assert torch.equal(found, torch.arange(n).diag().float())


def test_a_square_matrix_over_processes(processes: Processes) -> None:
    """No process has as many rows as there are columns."""
    a = matrix(24, 24, "geometric")
    for function in ("qr", "tsqr"):
        found = processes.check(4, tasks.factors, function, a, {})[0]
        check_factors(found.Q, found.R, a, U["fp64"])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_of_numpy(processes: Processes, dtype: type) -> None:
    a = matrix(90, 6).numpy().astype(dtype)
    found = processes.check(3, tasks.factors, "qr", a, {})[0]
    assert isinstance(found.R, np.ndarray)
    assert found.R.dtype == dtype
    u = U["fp32" if dtype == np.float32 else "fp64"]
    check_factors(torch.from_numpy(found.Q), torch.from_numpy(found.R), torch.from_numpy(a), u)


def test_only_r(processes: Processes) -> None:
    a = matrix(60, 5)
    for found in processes.check(2, tasks.factors, "qr", a, {"mode": "r"}):
        assert found.Q is None
        assert torch.linalg.matrix_norm(found.R.T @ found.R - a.T @ a) <= 60 * U["fp64"]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_bases(processes: Processes, size: int) -> None:
    a = matrix(120, 10)
    q, warned = processes.check(size, tasks.basis, a, {})[0]
    assert not warned
    norm = torch.linalg.matrix_norm
    assert norm(q.T @ q - torch.eye(10)) <= 24 * 10 * U["fp64"]
    a[:, 3] = a[:, 1] + a[:, 2]
    _, warned = processes.check(size, tasks.basis, a, {})[0]
    assert "full rank" in warned[0]
    q, _ = processes.check(size, tasks.basis, a, {"rcond": 1e-10})[0]
    assert q.shape == (120, 9)
    assert norm(q.T @ q - torch.eye(9)) <= 24 * 10 * U["fp64"]
    assert norm(a - q @ (q.T @ a)) <= 24 * 10 * U["fp64"] * norm(a)


def test_dtensors(processes: Processes) -> None:
    """Uneven chunks, and a process without rows."""
    a = matrix(49, 7)
    b = a @ torch.ones(7, 1, dtype=torch.float64)
    for size in (1, 3, 4):
        for found, x in processes.check(size, tasks.of_dtensors, a, b):
            check_factors(found.Q, found.R, a, U["fp64"])
            assert torch.linalg.vector_norm(x - 1) <= 7 * 1e2 * U["fp64"]
