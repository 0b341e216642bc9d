"""Batches of square matrices as second-order optimizers meet them, easy and hard ones.

The profiles are those of the public QR set of the GPU MODE linear-algebra contest of 2026.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from neula.errors import unknown_name

Make = Callable[[torch.Tensor, float, torch.Generator], torch.Tensor]
"""From standard normal matrices, and the decimal logarithm of how far columns are scaled, to a profile."""

EPS = torch.finfo(torch.float32).eps

MIXED = {"dense": 6}
"""How often a profile is drawn in a mixed batch; those that are not named once."""


def _graded(a: torch.Tensor, cond: float) -> torch.Tensor:
    return a * torch.logspace(0, -cond, a.shape[-1], dtype=torch.float32, device=a.device)


def _dense(a: torch.Tensor, cond: float, generator: torch.Generator) -> torch.Tensor:
    return _graded(a, cond)


def _deficient(a: torch.Tensor, cond: float, generator: torch.Generator) -> torch.Tensor:
    a[..., 3 * a.shape[-1] // 4 :] = 0
    return _graded(a, cond)


def _nearly_deficient(a: torch.Tensor, cond: float, generator: torch.Generator) -> torch.Tensor:
    rank = 3 * a.shape[-1] // 4
    last = a[..., rank:]
    noise = torch.randn(last.shape, dtype=torch.float32, device=a.device, generator=generator)
    last.copy_(a[..., : last.shape[-1]] + 1e-5 * noise)
    return _graded(a, cond)


def _clustered(a: torch.Tensor, cond: float, generator: torch.Generator) -> torch.Tensor:
    half = a.shape[-1] // 2
    scales = torch.ones(a.shape[-1], dtype=torch.float32, device=a.device)
    scales[half:] = 4 * EPS
    scales[max(0, half - 2) : half + 2] = EPS**0.5
    return a * scales


def _banded(a: torch.Tensor, cond: float, generator: torch.Generator) -> torch.Tensor:
    n = a.shape[-1]
    i = torch.arange(n, device=a.device)
    near = (i[:, None] - i).abs() <= max(2, min(32, n // 32))
    return _graded(
        a * near + torch.diag(torch.linspace(1, 0.5, n, dtype=torch.float32, device=a.device)), cond
    )


def _with_graded_rows(a: torch.Tensor, cond: float, generator: torch.Generator) -> torch.Tensor:
    return _graded(a.mT, max(cond, 4.0)).mT


def _nearly_collinear(a: torch.Tensor, cond: float, generator: torch.Generator) -> torch.Tensor:
    column = torch.randn((*a.shape[:-1], 1), dtype=torch.float32, device=a.device, generator=generator)
    return _graded(column + 1e-4 * a, cond)


def _upper(a: torch.Tensor, cond: float, generator: torch.Generator) -> torch.Tensor:
    return _graded(
        a.triu() + torch.diag(torch.linspace(1, 0.25, a.shape[-1], dtype=torch.float32, device=a.device)),
        cond,
    )


PROFILES: dict[str, Make] = {
    "dense": _dense,
    "rankdef": _deficient,
    "nearrank": _nearly_deficient,
    "clustered": _clustered,
    "band": _banded,
    "rowscale": _with_graded_rows,
    "nearcollinear": _nearly_collinear,
    "upper": _upper,
}


def batch_of_profile(
    profile: str, count: int, n: int, cond: float = 0.0, *, device: torch.device | str = "cpu", seed: int = 0
) -> torch.Tensor:
    """A batch of float32 matrices.

    Parameters
    ----------
    profile : str
        A key of :data:`PROFILES`, or ``"mixed"``: every matrix draws one, but not ``"upper"``.
    count, n : int
        Shape of the batch, ``(count, n, n)``.
    cond : float
        The last column is ``10**-cond`` times as long as the first.
    device : torch.device or str
    seed : int

    Returns
    -------
    Tensor, shape (count, n, n)

    Raises
    ------
    ValueError
        For an unknown profile.
    """
    if profile not in (*PROFILES, "mixed"):
        raise unknown_name("profile", profile, (*PROFILES, "mixed"))
    generator = torch.Generator(device).manual_seed(seed)
    a = torch.randn(count, n, n, dtype=torch.float32, device=device, generator=generator)
    if profile != "mixed":
        return PROFILES[profile](a, cond, generator)
    names = [name for name in PROFILES if name != "upper" for _ in range(MIXED.get(name, 1))]
    drawn = torch.randint(len(names), (count,), device=device, generator=generator).tolist()
    return torch.stack([PROFILES[names[i]](x, cond, generator) for i, x in zip(drawn, a, strict=True)])
