"""Batches of square matrices as second-order optimizers meet them, easy and hard ones.

The profiles are those of the public QR set of the GPU MODE linear-algebra contest of 2026.
"""

from __future__ import annotations

from typing import Any

import torch

from neula.errors import unknown_name

EPS = torch.finfo(torch.float32).eps

MIXED = {"dense": 6}
"""How often a profile is drawn in a mixed batch; those that are not named once."""


PROFILES = ("dense", "rankdef", "nearrank", "clustered", "band", "rowscale", "nearcollinear", "upper")


def _graded(a: torch.Tensor, cond: float) -> torch.Tensor:
    return a * torch.logspace(0, -cond, a.shape[-1], dtype=torch.float32, device=a.device)


def _shaped(profile: str, a: torch.Tensor, cond: float, generator: torch.Generator) -> torch.Tensor:
    """Standard normal matrices, which are written into, as a profile has them."""
    like: dict[str, Any] = {"dtype": torch.float32, "device": a.device}
    n = a.shape[-1]
    rank, half = 3 * n // 4, n // 2
    match profile:
        case "rankdef":
            a[..., rank:] = 0
        case "nearrank":
            noise = torch.randn((*a.shape[:-1], n - rank), generator=generator, **like)
            a[..., rank:] = a[..., : n - rank] + 1e-5 * noise
        case "clustered":
            scales = torch.ones(n, **like)
            scales[half:] = 4 * EPS
            scales[max(0, half - 2) : half + 2] = EPS**0.5
            return a * scales
        case "band":
            i = torch.arange(n, device=a.device)
            near = (i[:, None] - i).abs() <= max(2, min(32, n // 32))
            a = a * near + torch.diag(torch.linspace(1, 0.5, n, **like))
        case "rowscale":
            return _graded(a.mT, max(cond, 4.0)).mT
        case "nearcollinear":
            a = torch.randn((*a.shape[:-1], 1), generator=generator, **like) + 1e-4 * a
        case "upper":
            a = a.triu() + torch.diag(torch.linspace(1, 0.25, n, **like))
    return _graded(a, cond)


def batch_of_profile(
    profile: str, count: int, n: int, cond: float = 0.0, *, device: torch.device | str = "cpu", seed: int = 0
) -> torch.Tensor:
    """Float32 matrices, shape (count, n, n), of one of :data:`PROFILES`, or ``"mixed"``: every matrix draws
    one, but not ``"upper"``. The last column is ``10**-cond`` times as long as the first.
    """
    if profile not in (*PROFILES, "mixed"):
        raise unknown_name("profile", profile, (*PROFILES, "mixed"))
    generator = torch.Generator(device).manual_seed(seed)
    a = torch.randn(count, n, n, dtype=torch.float32, device=device, generator=generator)
    if profile != "mixed":
        return _shaped(profile, a, cond, generator)
    names = [name for name in PROFILES if name != "upper" for _ in range(MIXED.get(name, 1))]
    drawn = torch.randint(len(names), (count,), device=device, generator=generator).tolist()
    return torch.stack([_shaped(names[i], x, cond, generator) for i, x in zip(drawn, a, strict=True)])
