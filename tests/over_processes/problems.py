"""Matrices of all spectra, and how their rows are dealt out."""

from __future__ import annotations

import torch

COUNTS = {1: (1,), 2: (0.9, 0.1), 3: (0.45, 0.0, 0.55), 4: (0.01, 0.3, 0.0, 0.69)}
"""Part of all rows that each of so many processes has: all of them, uneven ones, none, and a few only."""

SPECTRA = ("well", "arithmetic", "geometric", "cluster", "dominant")


def counts_of(m: int, size: int) -> list[int]:
    """Rows of each process."""
    counts = [round(m * part) for part in COUNTS.get(size, (1 / size,) * size)]
    counts[-1] += m - sum(counts)
    return counts


def spectrum(name: str, n: int, condition: float) -> torch.Tensor:
    """Singular values from 1 to ``1 / condition``."""
    least = 1 / condition
    return {
        "well": torch.linspace(1, 0.5, n, dtype=torch.float64),
        "arithmetic": torch.linspace(1, least, n, dtype=torch.float64),
        "geometric": torch.logspace(0, torch.tensor(least).log10().item(), n, dtype=torch.float64),
        "cluster": torch.cat([torch.ones(n - 1), torch.tensor([least])]).double(),
        "dominant": torch.cat([torch.ones(1), torch.full((n - 1,), least)]).double(),
    }[name]


def matrix(
    m: int, n: int, name: str = "well", condition: float = 1e4, imaginary: bool = False
) -> torch.Tensor:
    """A matrix in double precision with this spectrum."""
    generator, dtype = torch.Generator().manual_seed(0), torch.complex128 if imaginary else torch.float64
    q, v = (torch.linalg.qr(torch.randn(rows, n, generator=generator, dtype=dtype)).Q for rows in (m, n))
    return (q * spectrum(name, n, condition)) @ v.mH


def noise(*shape: int, seed: int = 1, imaginary: bool = False) -> torch.Tensor:
    """Normal numbers, of complex ones both parts."""
    if imaginary:
        return torch.complex(noise(*shape, seed=seed), noise(*shape, seed=seed + 10))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
