"""QR, bases, polar factors and triplets of matrices whose rows are spread over processes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import neula
from neula.engines.formats import in_double
from over_processes import tasks
from over_processes.problems import COUNTS, SPECTRA, matrix
from over_processes.processes import Failure, Processes

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


def check_polar(result: Any, a: torch.Tensor) -> None:
    """U is orthonormal, H positive, and both make up A, as far as is asked for."""
    u, h, a, (m, n) = in_double(result.U), in_double(result.H), in_double(a), a.shape
    noise = 4 * max(m, n) ** 0.5 * (2.0**-53 if result.accuracy == "fp64" else 2.0**-24)
    if result.rank == min(m, n):
        values = torch.linalg.svdvals(u)
        assert float((values - 1).abs().max()) <= result.orthogonality_bound + noise
    assert float((a - u @ h).norm() / a.norm()) <= result.residual_bound + noise
    assert float(torch.linalg.eigvalsh(h).min()) >= -(result.residual_bound + noise) * float(h.norm())


POLAR = [
    *itertools.product(["cpu"], [False], ["fp32", "fp64"], SPECTRA),
    *itertools.product(["cpu", "like a GPU"], [True], ["bf16", "fp32", "fp64"], ["geometric"]),
]


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize(("engine", "imaginary", "accuracy", "name"), POLAR)
@pytest.mark.parametrize("shape", [(331, 40), (40, 90), (60, 60)])
def test_polar_factors(
    processes: Processes,
    size: int,
    engine: str,
    imaginary: bool,
    accuracy: str,
    name: str,
    shape: tuple[int, int],
) -> None:
    """All spectra, tall and wide: the same on all processes, bit by bit."""
    a = matrix(max(shape), min(shape), name, imaginary=imaginary)
    a = a if shape[0] >= shape[1] else a.T.contiguous()
    asked = {"accuracy": accuracy, "side": "right"}
    asked |= {} if engine == "cpu" else {"engine": tasks.LikeAGpu("cpu")}
    found = processes.check(size, tasks.factors, "polar", a, asked)
    assert found[0].converged
    check_polar(found[0], a)
    for other in found[1:]:
        assert torch.equal(other.U, found[0].U)
        assert torch.equal(other.H, found[0].H)
        assert (other.attempts, other.residual) == (found[0].attempts, found[0].residual)


def test_fewer_rows_than_processes(processes: Processes) -> None:
    for a in (torch.ones(2, 1, dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64)):
        found = processes.check(3, tasks.factors, "polar", a, {"side": "right"})[0]
        assert found.converged
        check_polar(found, a)
    zero = processes.check(3, tasks.factors, "polar", torch.zeros(30, 4), {})[0]
    assert zero.converged
    assert zero.rank == 0
    assert not zero.U.any()


def test_for_optimizers(processes: Processes) -> None:
    """In half precision, with the links of a GPU."""
    a = matrix(200, 30, "geometric", 1e2)
    asked = {"engine": tasks.LikeAGpu("cpu"), "accuracy": "bf16"}
    found = processes.check(2, tasks.factors, "polar", a, {**asked, "side": "right"})[0]
    assert [attempt.method for attempt in found.attempts] == ["polynomials fp16"]
    check_polar(found, a)


def test_lists_of_dtensors(processes: Processes) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(*shape, generator=generator) for shape in ((12, 8), (8, 12), (12, 8))]
    expected = [neula.polar(a, accuracy="fp32").U for a in matrices]
    expected += [expected[0], expected[0]]
    for found in processes.check(2, tasks.polar_of_dtensors, matrices):
        for u, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(u, exact, rtol=0, atol=2.0**-6)


def test_what_polar_refuses(processes: Processes) -> None:
    for asked in ({"side": "left"}, {"wait": False}):
        failure = processes.run(2, tasks.factors, "polar", torch.ones(8, 4), asked)[0]
        assert "needs the whole matrix" in failure.message
    a = torch.ones(8, 4)
    a[5, 1] = torch.nan
    failure = processes.run(2, tasks.factors, "polar", a, {})[0]
    assert "A[5, 1] is nan" in failure.message


TRIPLETS: list[tuple[dict[str, Any], float]] = [
    ({"rank": 3}, 2.0**-53),
    ({"tol": 1e-2}, 2.0**-53),
    ({"rank": 20, "accuracy": "fp32"}, 2.0**-24),
    ({"rank": 2, "accuracy": 1e-3}, 1e-3),
]


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize(("asked", "u"), TRIPLETS)
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
