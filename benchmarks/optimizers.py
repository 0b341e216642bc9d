"""Time that optimizers spend on orthogonal factors, for the layers of a language model of seven billion
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import neula
from benchmarks.harness import Results
from benchmarks.polar import compiled, newton_schulz
from neula.papers.measuring import median_seconds

WIDTH, HIDDEN = 4096, 11008
"""Of Llama 2. Source: H. Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models", 2023, and
its published configuration of seven billion parameters."""

LAYER = {
    "attention": [(WIDTH, WIDTH)] * 4,
    "feed-forward": [(HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)],
}
"""Matrices of one of its 32 layers."""

SMALLER = 32
"""By so much smaller are those that a CPU is given."""

PRECONDITIONER = 1024
"""Order of the blocks of SOAP's preconditioners, whose bases are updated by QR."""


def run(device: torch.device, repeats: int = 5) -> Results:
    """Time lists of gradients of one layer: Muon's polar factors, and the QR of SOAP's blocks.

    Beside ``neula.polar`` stand five Newton-Schulz steps in bf16, each matrix by itself, as Muon takes them;
    beside ``neula.qr`` stands that of torch.
    """
    results = Results("optimizers", device)
    smaller = 1 if device.type == "cuda" else SMALLER
    generator = torch.Generator(device).manual_seed(0)
    iterate = compiled(newton_schulz, device)
    for part, shapes in LAYER.items():
        sizes = [(m // smaller, n // smaller) for m, n in shapes]
        gradients = [gradient(*size, generator, device) for size in sizes]
        seconds = median_seconds(partial(neula.polar, gradients, accuracy="bf16"), repeats, warmup=3)
        peer = median_seconds(partial(one_by_one, iterate, gradients), repeats, warmup=3)
        found = neula.polar(gradients, accuracy="bf16")
        results.add(
            optimizer="Muon",
            part=part,
            matrices=len(sizes),
            ms=1e3 * seconds,
            peer="Newton-Schulz, compiled",
            peer_ms=1e3 * peer,
            ratio=seconds / peer,
            error=max(result.orthogonality for result in found),
            certified=all(result.converged for result in found),
        )
    order = PRECONDITIONER // smaller
    for part, shapes in LAYER.items():
        count = sum((m // smaller // order + n // smaller // order) for m, n in shapes)
        blocks = [gradient(order, order, generator, device) for _ in range(count)]
        seconds = median_seconds(partial(neula.qr, blocks, accuracy="fp32"), repeats, warmup=3)
        peer = median_seconds(partial(one_by_one, torch.linalg.qr, blocks), 1, warmup=1)
        factors = neula.qr(blocks)
        results.add(
            optimizer="SOAP",
            part=part,
            matrices=count,
            ms=1e3 * seconds,
            peer="torch.linalg.qr",
            peer_ms=1e3 * peer,
            ratio=seconds / peer,
            error=max(result.certificate.orthogonality for result in factors),
            certified=all(result.converged for result in factors),
        )
    return results


def one_by_one(function: Callable[[torch.Tensor], Any], matrices: list[torch.Tensor]) -> list[Any]:
    """As optimizers call the library."""
    return [function(a) for a in matrices]


def gradient(m: int, n: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """A matrix with a few large singular values above noise, as gradients of weights are."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    rank = max(1, min(m, n) // 32)
    large = normal(m, rank) * torch.logspace(1, -1, rank, device=device)
    return large @ normal(rank, n) / rank**0.5 + 0.1 * normal(m, n)
