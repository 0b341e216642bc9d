"""Problems of the sizes that people have, beside the library call that each replaces."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import neula
from neula.io.matrices import hpl_ai_matrix, random_matrix

Call = Callable[[], Any]

SHAPES = 1000
"""Problems of different shapes in a row of them."""


@dataclass(frozen=True)
class Work:
    """Operations and bytes that any algorithm of its kind needs.

    Attributes
    ----------
    flops : float
        Of the factorization, those of error correction included.
    size : float
        Bytes that are read and written.
    format : str
        Of the matrix unit's operands.
    """

    flops: float
    size: float
    format: str = "fp16"


@dataclass(frozen=True)
class Case:
    """A problem, neula's call and its peer's.

    Attributes
    ----------
    problem, matrix, shape : str
    call, peer : callable
    work : Work
    matrix_bytes : float
        Size of A, which memory is counted in.
    first_calls : bool
        Whether first calls count: it is run once, and not before.
    """

    problem: str
    matrix: str
    shape: str
    call: Call
    peer: Call
    work: Work
    matrix_bytes: float
    first_calls: bool = False


def cases(device: torch.device, *, small: bool) -> Iterator[Case]:
    """One after the other, since they do not fit into memory together; shrunk for a CPU."""
    yield from _least_squares_cases(device, small=small)
    yield from _system_cases(device, small=small)
    yield from _factorization_cases(device, small=small)
    shrink = 8 if small else 1
    for rank, m, n in [(20, 50000, 4000), (50, 8000, 8000), (100, 200000, 2000)]:
        yield _low_rank(rank, m // shrink, n // shrink, device)


def _least_squares_cases(device: torch.device, *, small: bool) -> Iterator[Case]:
    shrink = 8 if small else 1
    normal = partial(torch.randn, dtype=torch.float64, device=device)
    yield from (_many_shapes(m, n, device) for m, n in [(300, 40), (2000, 500)] if not small)
    for m, n in [
        *((64, 32), (600, 100), (2000, 500), (512, 512), (20000, 1000), (16384, 2048)),
        *((262144, 1024), (1000000, 200), (5000, 4999)),
    ]:
        if m * n * n <= 1e10 or not small:
            yield _least_squares("normal", normal(m, n))
    yield _least_squares("normal, 20 right-hand sides", normal(30000 // shrink, 1500 // shrink), 20)
    rows = normal(20000 // shrink, 1000 // shrink)
    rows[::100] *= 1e10
    yield _least_squares("every hundredth row times 1e10", rows)
    m, n = 20000 // shrink, 2000 // shrink
    yield _least_squares("rank 3/4", normal(m, 3 * n // 4) @ normal(3 * n // 4, n))
    yield _least_squares("kernel", _kernel(normal(8000 // shrink, 3), 4000 // shrink))
    for count, m, n in [(50000, 16, 6), (1000, 200, 50)]:
        yield _least_squares("normal, float32", normal(count // shrink, m, n).float())


def _system_cases(device: torch.device, *, small: bool) -> Iterator[Case]:
    shrink = 8 if small else 1
    normal = partial(torch.randn, dtype=torch.float64, device=device)
    for n in (64, 500, 1000, 3000, 6000, 8192, 12000, 24000, 32768):
        if n <= 3000 or not small:
            a = normal(n, n)
            yield _system("normal", a, 1)
            if n < 30000:
                yield _definite("definite", a @ a.T / n + torch.eye(n, dtype=a.dtype, device=device))
    for n in (500, 3000, 12000):
        if n <= 3000 or not small:
            yield _system("condition 1e8", random_matrix("geometric", n, n, cond=1e8, device=device), 1)
    n = 20000 // shrink
    dominant = normal(n, n)
    dominant.diagonal().add_(2 * n)
    for k in (1, 50):
        yield _system(f"diagonally dominant, {k} right-hand side{'s' * (k > 1)}", dominant, k)
    del dominant
    gaussian = _kernel(normal(30000 // shrink, 3), 30000 // shrink)
    gaussian.diagonal().add_(0.01)
    yield _definite("kernel + 0.01 I", gaussian)


def _factorization_cases(device: torch.device, *, small: bool) -> Iterator[Case]:
    for count, n in [(1, 4096), (1, 16384), (1, 32768), (640, 512), (60, 1024), (8, 2048)]:
        if count * n**3 <= 1e11 or not small:
            yield _cholesky(torch.randn(*((count,) if count > 1 else ()), n, n, device=device))
    for n in (8192, 16384, 25000):
        if not small:
            yield _lu("none", hpl_ai_matrix(n, dtype=torch.float32, device=device))
    for n in (8192, 16384):
        if not small:
            yield _lu("pivoting", torch.randn(n, n, device=device))
    for m, n in [(64, 32), (6000, 6000), (16384, 16384), (24576, 24576), (65536, 16384)]:
        if m * n * n <= 1e10 or not small:
            yield _qr("float32", torch.randn(m, n, device=device))
    for m, n in [(2000, 500), (3000, 3000), (20000, 1000)]:
        if m * n * n <= 1e10 or not small:
            a = random_matrix("geometric", m, n, cond=1e6, device=device)
            yield _qr("float32, condition 1e6", a.float())
            yield _qr("float64, condition 1e6", a)


def _least_squares(matrix: str, a: torch.Tensor, k: int = 1) -> Case:
    b = torch.randn(*a.shape[:-1], k, dtype=a.dtype, device=a.device)
    peer, call = partial(torch.linalg.lstsq, a, b), partial(neula.lstsq, a, b)
    return Case("lstsq", matrix, _shape(a), call, peer, _triangle(a, 2), a.nbytes)


def _many_shapes(m: int, n: int, device: torch.device) -> Case:
    """Problems near a shape, no two of which are alike."""
    drawn = random.Random(m)
    shapes = [(m + drawn.randrange(m // 4), n + drawn.randrange(n // 4)) for _ in range(SHAPES)]
    largest = torch.randn(2 * m, 2 * n, dtype=torch.float64, device=device)

    def each(solve: Callable[[torch.Tensor, torch.Tensor], Any]) -> Call:
        return lambda: [solve(largest[:p, :q].contiguous(), largest[:p, q : q + 1]) for p, q in shapes][-1]

    work = _triangle(largest[:m, :n], 2)
    work = Work(SHAPES * work.flops, SHAPES * work.size)
    ours, peer = each(neula.lstsq), each(torch.linalg.lstsq)
    name = f"{SHAPES:,} shapes, in sum"
    return Case("lstsq", name, f"about {m} x {n}", ours, peer, work, 8 * m * n, first_calls=True)


def _system(matrix: str, a: torch.Tensor, k: int) -> Case:
    n = len(a)
    b = torch.randn(n, k, dtype=a.dtype, device=a.device)
    work = Work(2 / 3 * n**3, 2 * a.nbytes)
    call, peer = partial(neula.solve, a, b), partial(torch.linalg.solve, a, b)
    return Case("solve", matrix, str(n), call, peer, work, a.nbytes)


def _definite(matrix: str, a: torch.Tensor) -> Case:
    b = torch.randn(len(a), 1, dtype=a.dtype, device=a.device)
    call = partial(neula.solve, a, b, assume_a="pos")
    work = Work(len(a) ** 3 / 3, 2 * a.nbytes)
    return Case("solve definite", matrix, str(len(a)), call, lambda: _by_cholesky(a, b), work, a.nbytes)


def _by_cholesky(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cholesky_solve(b, torch.linalg.cholesky(a))


def _cholesky(a: torch.Tensor) -> Case:
    a = a @ a.mT / a.shape[-1] + torch.eye(a.shape[-1], device=a.device)
    work = Work(3 * a.numel() * a.shape[-1] / 3, 2 * a.nbytes)
    call, peer = partial(neula.cholesky, a), partial(torch.linalg.cholesky, a)
    return Case("cholesky", "float32", _shape(a), call, peer, work, a.nbytes)


def _lu(pivot: str, a: torch.Tensor) -> Case:
    """Factors in half precision; the library's are in float32."""
    n, named = len(a), {"pivot": "none"} if pivot == "none" else {}
    call: Call = partial(neula.lu_factor, a, keep_a=False, **named)  # type: ignore[arg-type]
    peer = partial(torch.linalg.lu_factor_ex, a, pivot=pivot != "none")
    work = Work(2 / 3 * n**3, 1.5 * a.nbytes)
    return Case("lu_factor", f"fp16, {pivot}", str(n), call, peer, work, a.nbytes)


def _qr(matrix: str, a: torch.Tensor) -> Case:
    call, peer = partial(neula.qr, a), partial(torch.linalg.qr, a)
    work = _triangle(a, 2, products=3)
    if a.dtype == torch.float64:
        work = replace(_triangle(a, 2), format="fp64")
    return Case("qr", matrix, _shape(a), call, peer, work, a.nbytes)


def _triangle(a: torch.Tensor, passes: int, products: int = 1) -> Work:
    """``2 m n^2`` operations less those of a square, and passes over A."""
    m, n = a.shape[-2:]
    count = math.prod(a.shape[:-2])
    return Work(products * count * (2 * m * n**2 - 2 / 3 * n**3), passes * a.nbytes)


def _low_rank(rank: int, m: int, n: int, device: torch.device) -> Case:
    """Singular values from 1 to 0.01, the others 1e-4 at most."""
    u, v = (torch.linalg.qr(torch.randn(k, rank, device=device))[0] for k in (m, n))
    noise = 1e-4 / (m**0.5 + n**0.5) * torch.randn(m, n, device=device)
    a = (u * torch.logspace(0, -2, rank, device=device)) @ v.T + noise
    peer = partial(torch.svd_lowrank, a, q=rank + 6, niter=4)
    call = partial(neula.svd_lowrank, a, rank, accuracy=1e-2)
    work = Work(2 * 2 * m * n * rank, 2 * a.nbytes)
    return Case("svd_lowrank, 1e-2", f"rank {rank} and noise", _shape(a), call, peer, work, a.nbytes)


def _kernel(points: torch.Tensor, columns: int) -> torch.Tensor:
    """``exp(-|x - y|^2)`` of points and the first of them."""
    return torch.cdist(points, points[:columns]).square_().neg_().exp_()


def _shape(a: torch.Tensor) -> str:
    return " x ".join(map(str, a.shape))
