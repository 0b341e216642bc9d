"""Linear systems in double precision against torch's direct solvers."""

from __future__ import annotations

from functools import partial

import torch

import neula
from benchmarks.harness import Results
from neula.certificates.backward_error import Scaling
from neula.io.matrices import SPECTRA, hpl_ai_matrix, no_pivoting_matrix, random_matrix
from neula.papers.measuring import median_seconds

CASES = [
    ("hpl-ai", 0.0),
    ("fasi-higham", 1e3),
    ("normal", 0.0),
    ("geometric", 1e3),
    ("arithmetic", 1e5),
    ("definite", 10.0),
]
SIZES = {"cpu": (2048, 4096), "cuda": (8192, 16384, 32768)}

SPECTRA_UP_TO = 20000
"""Order up to which matrices with a given spectrum are made: that takes longer than all else."""


def run(device: torch.device, sizes: tuple[int, ...] | None = None, repeats: int = 3) -> Results:
    """Time ``neula.solve`` beside ``torch.linalg.solve``, or Cholesky where the matrix is definite."""
    results = Results("solve", device)
    for n in sizes or SIZES[device.type]:
        for kind, cond in CASES:
            if kind in SPECTRA and n > SPECTRA_UP_TO:
                continue
            a = _matrix(kind, n, cond, device)
            generator = torch.Generator(device).manual_seed(8)
            b = torch.randn(n, 1, dtype=a.dtype, device=device, generator=generator)
            definite = kind == "definite"
            mine = partial(neula.solve, a, b, assume_a="pos" if definite else "gen")
            peer = partial(_cholesky if definite else torch.linalg.solve, a, b)
            seconds, peer_seconds = (median_seconds(f, repeats) for f in (mine, peer))
            result = mine()
            results.add(
                matrix=kind,
                cond=cond or "",
                n=n,
                ms=1e3 * seconds,
                torch_ms=1e3 * peer_seconds,
                speedup=peer_seconds / seconds,
                backward_error=_backward_error(a, b, result.x),
                torch_backward_error=_backward_error(a, b, peer()),
                iterations=result.iterations,
                method=result.method,
                certified=result.converged,
                attempts=[attempt.reason for attempt in result.attempts],
            )
            del a, b, mine, peer, result
    return results


def _matrix(kind: str, n: int, cond: float, device: torch.device) -> torch.Tensor:
    if kind == "hpl-ai":
        return hpl_ai_matrix(n, device=device)
    if kind == "fasi-higham":
        return no_pivoting_matrix(n, cond, device=device)
    if kind != "definite":
        return random_matrix(kind, n, n, cond=max(cond, 1.0), device=device, seed=7)
    a = random_matrix("normal", n, n, device=device, seed=7)
    gram = a @ a.T / n
    # Eigenvalues of the Gram matrix lie in (0, 4).
    gram.diagonal().add_(4 / (cond - 1))
    return gram


def _cholesky(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cholesky_solve(b, torch.linalg.cholesky(a))


def _backward_error(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> float:
    norm = torch.linalg.vector_norm(a, 1, dim=1).amax()
    return float(Scaling(norm).backward_error(b, x, b - a @ x).max())
