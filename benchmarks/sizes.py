"""Problems of the sizes that people have, hard ones among them, beside the library call that they replace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import neula
from benchmarks.harness import Results
from neula.papers.measuring import median_seconds

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A problem, neula's call and its peer's.

    Attributes
    ----------
    problem, matrix, shape : str
    call, peer : callable
    """

    problem: str
    matrix: str
    shape: str
    call: Call
    peer: Call


def run(device: torch.device, repeats: int = 5) -> Results:
    """Time ``lstsq``, ``solve``, ``cholesky`` and ``svd_lowrank`` beside torch's functions.

    The forward error is the bound in neula's result; ``difference`` is that of the two solutions, relative to
    torch's. A peer that does not decide the rank, or iterates without an end that is measured, is no equal.
    """
    results = Results("sizes", device)
    for case in _cases(device, small=device.type != "cuda"):
        seconds = median_seconds(case.call, repeats, warmup=3)
        peer = median_seconds(case.peer, repeats, warmup=1)
        result = case.call()
        results.add(
            problem=case.problem,
            matrix=case.matrix,
            shape=case.shape,
            ms=1e3 * seconds,
            torch_ms=1e3 * peer,
            speedup=peer / seconds,
            forward_error=getattr(result, "forward_error", None),
            difference=_difference(result, case.peer()),
            methods=" / ".join(attempt.method for attempt in result.attempts),
            certified=result.converged,
        )
    return results


def _difference(result: Any, expected: Any) -> float | None:
    found = getattr(result, "x", None)
    if found is None:
        return None
    expected = getattr(expected, "solution", expected).reshape(found.shape)
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))


def _cases(device: torch.device, *, small: bool) -> Iterator[Case]:
    shrink = 8 if small else 1
    normal = partial(torch.randn, dtype=torch.float64, device=device)
    for m, n in [(64, 32), (600, 100), (2000, 500), (512, 512), (20000, 1000), (16384, 2048), (262144, 1024)]:
        if m * n * n <= 1e10 or not small:
            yield _least_squares("normal", normal(m, n))
    rows = normal(20000 // shrink, 1000 // shrink)
    rows[::100] *= 1e10
    yield _least_squares("every hundredth row times 1e10", rows)
    m, n = 20000 // shrink, 2000 // shrink
    yield _least_squares("rank 3/4", normal(m, 3 * n // 4) @ normal(3 * n // 4, n))
    yield _least_squares("kernel", _kernel(normal(8000 // shrink, 3), 4000 // shrink))
    for n in (64, 500, 1000, 3000, 6000, 8192, 12000, 24000):
        if n <= 3000 or not small:
            a, b = normal(n, n), normal(n)
            yield Case(
                "solve", "normal", str(n), partial(neula.solve, a, b), partial(torch.linalg.solve, a, b)
            )
            yield _definite("definite", a @ a.T / n + torch.eye(n, dtype=a.dtype, device=device))
    gaussian = _kernel(normal(30000 // shrink, 3), 30000 // shrink)
    gaussian.diagonal().add_(0.01)
    yield _definite("kernel + 0.01 I", gaussian)
    for count, n in [(1, 4096), (1, 16384), (1, 32768), (640, 512), (60, 1024), (8, 2048)]:
        if count * n**3 <= 1e11 or not small:
            yield _cholesky(torch.randn(*((count,) if count > 1 else ()), n, n, device=device))
    for rank, m, n in [(20, 50000, 4000), (50, 8000, 8000), (100, 200000, 2000)]:
        yield _low_rank(rank, m // shrink, n // shrink, device)


def _least_squares(matrix: str, a: torch.Tensor) -> Case:
    b = torch.randn(len(a), 1, dtype=a.dtype, device=a.device)
    peer = partial(torch.linalg.lstsq, a, b)
    return Case("lstsq", matrix, _shape(a), partial(neula.lstsq, a, b), peer)


def _definite(matrix: str, a: torch.Tensor) -> Case:
    b = torch.randn(len(a), 1, dtype=a.dtype, device=a.device)
    call = partial(neula.solve, a, b, assume_a="pos")
    return Case("solve definite", matrix, str(len(a)), call, lambda: _by_cholesky(a, b))


def _by_cholesky(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cholesky_solve(b, torch.linalg.cholesky(a))


def _cholesky(a: torch.Tensor) -> Case:
    a = a @ a.mT / a.shape[-1] + torch.eye(a.shape[-1], device=a.device)
    return Case(
        "cholesky", "float32", _shape(a), partial(neula.cholesky, a), partial(torch.linalg.cholesky, a)
    )


def _low_rank(rank: int, m: int, n: int, device: torch.device) -> Case:
    """Singular values from 1 to 0.01, the others 1e-4 at most."""
    u, v = (torch.linalg.qr(torch.randn(k, rank, device=device))[0] for k in (m, n))
    noise = 1e-4 / (m**0.5 + n**0.5) * torch.randn(m, n, device=device)
    a = (u * torch.logspace(0, -2, rank, device=device)) @ v.T + noise
    peer = partial(torch.svd_lowrank, a, q=rank + 6, niter=4)
    call = partial(neula.svd_lowrank, a, rank, accuracy=1e-2)
    return Case("svd_lowrank, 1e-2", f"rank {rank} and noise", _shape(a), call, peer)


def _kernel(points: torch.Tensor, columns: int) -> torch.Tensor:
    """``exp(-|x - y|^2)`` of points and the first of them."""
    return torch.cdist(points, points[:columns]).square_().neg_().exp_()


def _shape(a: torch.Tensor) -> str:
    return " x ".join(map(str, a.shape))
