"""Orthogonal polar factors beside Newton-Schulz iterations and the SVD of torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import neula
from benchmarks.harness import Results
from neula.engines.formats import FormatName
from neula.papers.measuring import median_seconds

SHAPES = [(64, 1024, 1024), (12, 1024, 4096), (8, 4096, 4096), (1, 4096, 16384)]
CPU_SHAPES = [(4, 128, 128), (2, 128, 512), (1, 512, 512)]

CONDITIONS = [1e3, None]
"""Singular values fall geometrically by so much, or are those of a normal matrix."""

ACCURACIES: tuple[FormatName, ...] = ("bf16", "fp32")

SVD_ELEMENTS = 1 << 24
"""Elements of a matrix up to which the SVD is waited for, of one matrix of the batch."""

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon. Source: K. Jordan, "Muon: An optimizer for hidden layers in neural networks"."""


def run(device: torch.device, repeats: int = 10) -> Results:
    """Time ``neula.polar``, five steps of Newton-Schulz in bf16 under ``torch.compile``, and the SVD.

    The SVD is that of one matrix of a batch, times their number. Beside each time stands the interval of the
    singular values of the result that belong to those of A of at least 1e-3 times the largest.
    """
    results = Results("polar", device)
    iterate = compiled(newton_schulz, device)
    on_gpu = device.type == "cuda"
    for count, m, n in SHAPES if on_gpu else CPU_SHAPES:
        for condition in CONDITIONS:
            a = matrices(count, m, n, condition, device)
            left, values, right = torch.linalg.svd(a[0].double(), full_matrices=False)
            basis = left, right, values >= 1e-3 * values[0]
            peer = median_seconds(partial(iterate, a), repeats, warmup=3)
            svd: dict[str, float] = {}
            if m * n <= SVD_ELEMENTS:
                svd["svd_ms"] = 1e3 * count * median_seconds(partial(svd_factor, a[:1]), 1)
            common = {"batch": count, "m": m, "n": n, "condition": condition or "normal"}
            for accuracy in ACCURACIES:
                seconds = median_seconds(partial(neula.polar, a, accuracy=accuracy), repeats, warmup=3)
                found = neula.polar(a, accuracy=accuracy)
                results.add(
                    **common,
                    accuracy=accuracy,
                    ms=1e3 * seconds,
                    newton_schulz_ms=1e3 * peer,
                    ratio=seconds / peer,
                    **svd,
                    **interval("", found.U[0], *basis),
                    **interval("newton_schulz_", iterate(a)[0], *basis),
                    residual=found.residual,
                    methods=" / ".join(attempt.method for attempt in found.attempts),
                    certified=found.converged,
                )
    return results


def newton_schulz(a: torch.Tensor) -> torch.Tensor:
    """Five steps in bf16, as Muon takes them."""
    x = a.bfloat16()
    x = x if a.shape[-2] <= a.shape[-1] else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a1, a3, a5 = NEWTON_SCHULZ
    for _ in range(5):
        gram = x @ x.mT
        x = a1 * x + (a3 * gram + a5 * gram @ gram) @ x
    return x if a.shape[-2] <= a.shape[-1] else x.mT


def svd_factor(a: torch.Tensor) -> torch.Tensor:
    """``W V^T`` of ``W S V^T``."""
    left, _, right = torch.linalg.svd(a, full_matrices=False)
    return left @ right


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """By ``torch.compile`` on a GPU; a CPU may lack a compiler, and gains nothing."""
    return torch.compile(function) if device.type == "cuda" else function


def matrices(count: int, m: int, n: int, condition: float | None, device: torch.device) -> torch.Tensor:
    """Random matrices in float32."""
    generator = torch.Generator(device).manual_seed(m + n)
    a = torch.randn(count, m, n, generator=generator, device=device)
    if condition is None:
        return a
    k = min(m, n)
    steps = torch.linspace(0, 1, k, device=device, dtype=torch.float64)
    u = torch.linalg.qr(a[0, :, :k].double()).Q
    v = torch.linalg.qr(torch.randn(n, k, generator=generator, device=device).double()).Q
    one = ((u * condition**-steps) @ v.T).float()
    # Others by permutations of rows, which leave the singular values as they are.
    rows = [torch.randperm(m, generator=generator, device=device) for _ in range(count)]
    return torch.stack([one[order] for order in rows])


def interval(
    name: str, x: torch.Tensor, left: torch.Tensor, right: torch.Tensor, counts: torch.Tensor
) -> dict[str, float]:
    """Smallest and largest singular value of X on the leading singular vectors of A."""
    inner = left[:, counts].T @ x.double() @ right[counts].T
    values = torch.linalg.svdvals(inner)
    return {f"{name}smallest": float(values[-1]), f"{name}largest": float(values[0])}
