"""Functions of complex matrices beside torch's, large, in batches and small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import neula
from benchmarks.harness import Results
from neula.papers.measuring import WARM, interleaved_seconds, median_seconds

C64, C128 = torch.complex64, torch.complex128

LARGE = 1 << 20
"""Elements from which on a problem is timed alone, and not in turns with its peer."""


@dataclass(frozen=True)
class Case:
    """A function, the shape of its matrices, and how its answer and that of its peer are judged."""

    function: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[torch.Tensor], tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], float]]]


def run(device: torch.device) -> Results:
    """Time all of them; on a CPU those that are small."""
    results = Results("complex", device)
    for case in cases(device):
        generator = torch.Generator(device).manual_seed(5)
        a = torch.randn(case.shape, dtype=case.dtype, device=device, generator=generator)
        mine, peer, error = case.make(a)
        if a.numel() >= LARGE:
            seconds, peer_seconds = (median_seconds(f, 3, 2) for f in (mine, peer))
        else:
            for _ in range(WARM):
                mine()
                peer()
            seconds, peer_seconds = interleaved_seconds((mine, peer), 0.2)
        found = mine()
        results.add(
            function=case.function,
            shape="x".join(map(str, case.shape)),
            dtype=str(case.dtype).removeprefix("torch."),
            ms=1e3 * seconds,
            torch_ms=1e3 * peer_seconds,
            speedup=peer_seconds / seconds,
            error=error(found),
            torch_error=error(peer()),
            method=found.method if hasattr(found, "method") else "",
            certified=getattr(found, "converged", None),
        )
    return results


def cases(device: torch.device) -> Iterator[Case]:
    """Large ones only on a GPU."""
    if device.type == "cuda":
        yield from _large()
    for shape in ((64, 32), (600, 100)):
        for dtype in (C64, C128):
            for name, make in (
                ("qr", qr),
                ("lstsq", lstsq),
                ("polar", polar),
                ("pinv", pinv),
                ("svd_lowrank", low_rank),
            ):
                yield Case(name, shape, dtype, make)
            n = shape[1]
            for name, make in (
                ("solve", solve),
                ("cholesky", cholesky),
                ("lu_factor", lu_factor),
                ("matmul", matmul),
            ):
                yield Case(name, (n, n), dtype, make)


def _large() -> Iterator[Case]:
    yield Case("matmul", (8192, 8192), C64, matmul)
    for n in (8192, 16384):
        for dtype in (C64, C128):
            yield Case("solve", (n, n), dtype, solve)
    yield Case("solve, definite", (16384, 16384), C128, definite)
    for shape in ((20000, 2000), (32768, 8192)):
        yield Case("lstsq", shape, C128, lstsq)
        yield Case("qr", shape, C64, qr)
    yield Case("qr", (1000, 256, 128), C64, qr)
    yield Case("lstsq", (10000, 32, 8), C64, lstsq)


def matmul(a: torch.Tensor) -> tuple[Any, ...]:
    b, g = torch.randn_like(a), torch.randn_like(a[:, :4])
    wide = a.to(C128) @ (b.to(C128) @ g.to(C128))
    return (
        partial(neula.matmul, a, b),
        partial(torch.matmul, a, b),
        lambda c: _norm(c.to(C128) @ g.to(C128) - wide) / _norm(wide),
    )


def solve(a: torch.Tensor) -> tuple[Any, ...]:
    b = torch.randn_like(a[:, :1])
    size = float(torch.linalg.vector_norm(a, 1, dim=1).amax())

    def error(found: Any) -> float:
        x = getattr(found, "x", found)
        rest = (b.to(C128) - _times(a, x.to(C128))).abs().amax()
        return float(rest / (size * x.abs().amax() + b.abs().amax()))

    return partial(neula.solve, a, b), partial(torch.linalg.solve, a, b), error


def definite(a: torch.Tensor) -> tuple[Any, ...]:
    gram = a @ a.mH / len(a)
    gram.diagonal().add_(0.5)
    b = torch.randn_like(a[:, :1])
    size = float(torch.linalg.vector_norm(gram, 1, dim=1).amax())

    def error(found: Any) -> float:
        x = getattr(found, "x", found)
        return float((b - _times(gram, x)).abs().amax() / (size * x.abs().amax() + b.abs().amax()))

    def peer() -> torch.Tensor:
        return torch.cholesky_solve(b, torch.linalg.cholesky(gram))

    return partial(neula.solve, gram, b, assume_a="pos"), peer, error


def cholesky(a: torch.Tensor) -> tuple[Any, ...]:
    gram = a @ a.mH + a.shape[-1] * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)

    def error(found: Any) -> float:
        factor = getattr(found, "factor", found)
        return _norm(factor @ factor.mH - gram) / _norm(gram)

    return partial(neula.cholesky, gram), partial(torch.linalg.cholesky, gram), error


def lu_factor(a: torch.Tensor) -> tuple[Any, ...]:
    b = torch.randn_like(a[:, :1])

    def error(found: Any) -> float:
        x = torch.linalg.lu_solve(*found, b) if isinstance(found, tuple) else neula.lu_solve(found, b)
        return _norm(a @ x - b) / (_norm(a) * _norm(x))

    return partial(neula.lu_factor, a), lambda: tuple(torch.linalg.lu_factor(a)), error


def lstsq(a: torch.Tensor) -> tuple[Any, ...]:
    b = torch.randn_like(a[..., :1])
    sizes = torch.linalg.matrix_norm(a).reshape(-1)

    def error(found: Any) -> float:
        """``||A^H r|| / (||A|| ||r||)``, the largest of a batch."""
        x = getattr(found, "x", None)
        x = found[0] if x is None else x
        rest = b.to(C128) - _times(a, x.to(C128))
        gradient = torch.linalg.vector_norm(_times(a.mH, rest), dim=(-2, -1)).reshape(-1)
        return float((gradient / (sizes * torch.linalg.vector_norm(rest, dim=(-2, -1)).reshape(-1))).max())

    return partial(neula.lstsq, a, b), partial(torch.linalg.lstsq, a, b), error


def qr(a: torch.Tensor) -> tuple[Any, ...]:
    def error(found: Any) -> float:
        """``||A - Q R|| / ||A||`` of one column of random numbers, and ``||I - Q^H Q||`` of another."""
        q, r = found[0], found[1]
        g = torch.randn(*a.shape[:-2], a.shape[-1], 4, dtype=C128, device=a.device)
        image = _times(a, g)
        rest = _norm(image - _times(q, _times(r, g))) / _norm(image)
        return max(rest, _norm(_times(q.mH, _times(q, g)) - g) / _norm(g))

    return partial(neula.qr, a), partial(torch.linalg.qr, a), error


def polar(a: torch.Tensor) -> tuple[Any, ...]:
    def peer() -> torch.Tensor:
        u, _, vh = torch.linalg.svd(a, full_matrices=False)
        return u @ vh

    def error(found: Any) -> float:
        u = getattr(found, "U", found)
        return _norm(u.mH @ u - torch.eye(a.shape[-1], dtype=u.dtype, device=u.device)) / a.shape[-1] ** 0.5

    return partial(neula.polar, a), peer, error


def pinv(a: torch.Tensor) -> tuple[Any, ...]:
    def error(x: torch.Tensor) -> float:
        return _norm(x @ a - torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)) / a.shape[-1] ** 0.5

    return partial(neula.pinv, a), partial(torch.linalg.pinv, a), error


def low_rank(a: torch.Tensor) -> tuple[Any, ...]:
    decaying = a * 0.5 ** torch.arange(a.shape[1], device=a.device)
    size = torch.linalg.svdvals(decaying.to(C128))

    def error(found: Any) -> float:
        return float((found[1].double() - size[:8]).abs().max() / size[0])

    def peer() -> Any:
        u, s, vh = torch.linalg.svd(decaying, full_matrices=False)
        return u[:, :8], s[:8], vh[:8]

    return partial(neula.svd_lowrank, decaying, 8), peer, error


def _times(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``A X`` in double precision, by blocks of rows of a large A."""
    if a.ndim > 2 or a.numel() < LARGE or a.dtype == C128:
        return a.to(C128) @ x.to(C128)
    return torch.cat([block.to(C128) @ x.to(C128) for block in a.split(1 << 11)])


def _norm(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x))
