"""QR of batches as second-order optimizers have them, easy and hard, against cuSOLVER or LAPACK."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

import neula
from benchmarks.batches import batch_of_profile
from benchmarks.harness import Results
from neula.papers.measuring import median_seconds

EPS = torch.finfo(torch.float32).eps

TIMED = [
    (20, 32, "dense", 1),
    (40, 176, "dense", 1),
    (40, 352, "dense", 1),
    (640, 512, "dense", 2),
    (60, 1024, "dense", 2),
    (8, 2048, "dense", 1),
    (2, 4096, "dense", 1),
    (640, 512, "mixed", 2),
    (60, 1024, "mixed", 2),
    (640, 512, "rankdef", 0),
    (640, 512, "clustered", 0),
    (60, 1024, "nearrank", 0),
]
"""Count, order, profile and grading; the geometric mean of their times is the score."""

OTHERS = [
    (16, 512, "band", 0),
    (16, 512, "rowscale", 0),
    (16, 512, "nearcollinear", 0),
    (4, 1024, "dense", 4),
    (2, 2048, "rankdef", 0),
    (2, 2048, "mixed", 2),
    (1, 4096, "upper", 0),
]

CPU_CASES = [(20, 32, "dense", 1), (8, 176, "mixed", 2), (8, 176, "rankdef", 0), (4, 352, "nearrank", 0)]


def run(device: torch.device, repeats: int = 5) -> Results:
    """Time ``neula.qr`` beside ``torch.linalg.qr``, and in Householder form beside ``torch.geqrf``.

    Gates are ``||R - Q^T A||_1 / (20 n eps ||A||_1)`` and ``||Q^T Q - I||_1 / (100 n eps)`` of the worst
    matrix, in float64: at most 1.
    """
    results = Results("hard_batches", device)
    timed, speedups = [], []
    for count, n, profile, cond in [*TIMED, *OTHERS] if device.type == "cuda" else CPU_CASES:
        a = batch_of_profile(profile, count, n, cond, device=device)
        seconds = median_seconds(partial(neula.qr, a), repeats, warmup=2)
        peer = median_seconds(partial(torch.linalg.qr, a), 1)
        factors = neula.qr(a)
        residual, orthogonality = _gates(a, *factors)
        if (count, n, profile, cond) in TIMED:
            timed.append(1e3 * seconds)
        raw = _raw(a, repeats)
        if (count, n, profile, cond) in TIMED:
            speedups.append(raw["raw_speedup"])
        results.add(
            batch=count,
            n=n,
            profile=profile,
            cond=cond,
            ms=1e3 * seconds,
            torch_ms=1e3 * peer,
            speedup=peer / seconds,
            residual_gate=residual,
            orthogonality_gate=orthogonality,
            methods=" / ".join(attempt.method for attempt in factors.attempts),
            certified=factors.converged,
            **raw,
        )
    ms, speedup = (math.exp(sum(map(math.log, x)) / len(x)) for x in (timed, speedups or [1.0]))
    results.add(profile="geometric mean of the timed ones", ms=ms, raw_speedup=speedup)
    return results


def _raw(a: torch.Tensor, repeats: int) -> dict[str, Any]:
    """The Householder form, whose Q the gates are held against."""
    seconds = median_seconds(partial(neula.qr, a, "raw"), repeats, warmup=2)
    peer = median_seconds(partial(torch.geqrf, a), 1, warmup=1)
    h, tau = found = neula.qr(a, "raw")
    parts = (torch.linalg.householder_product(x.double(), y.double()) for x, y in zip(h, tau, strict=True))
    residual, orthogonality = _gates(a, torch.stack(list(parts)), h.triu())
    return {
        "raw_ms": 1e3 * seconds,
        "geqrf_ms": 1e3 * peer,
        "raw_speedup": peer / seconds,
        "raw_residual_gate": residual,
        "raw_orthogonality_gate": orthogonality,
        "raw_methods": " / ".join(attempt.method for attempt in found.attempts),
        "raw_certified": found.converged,
    }


def _gates(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> tuple[float, float]:
    """The two gates of the worst matrix, some at a time."""
    n = a.shape[-1]
    identity = torch.eye(n, dtype=torch.float64, device=a.device)
    residual = orthogonality = 0.0
    for x, y, z in zip(*(t.split(32) for t in (a, q, r)), strict=True):
        x, y, z = x.double(), y.double(), z.double()
        error = _one_norm(z - y.mT @ x) / (20 * n * EPS * _one_norm(x))
        residual = max(residual, float(error.max()))
        orthogonality = max(orthogonality, float(_one_norm(y.mT @ y - identity).max()) / (100 * n * EPS))
    return residual, orthogonality


def _one_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_norm(x, ord=1)
