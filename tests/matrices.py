"""Random matrices of tests; those whose spectrum has a name are made by :mod:`neula.io.matrices`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def normal(*shape: int, seed: int | None = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Standard normal numbers, drawn in double precision; without a seed that of the shape."""
    generator = torch.Generator("cpu").manual_seed(sum(shape) if seed is None else seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)


def normal_complex(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.complex(normal(*shape, seed=seed), normal(*shape, seed=seed + 1))


def normal_array(*shape: int, seed: int | None = 0, dtype: Any = np.float64) -> np.ndarray:
    """The same by NumPy, with other numbers."""
    rng = np.random.default_rng(sum(shape) if seed is None else seed)
    return rng.standard_normal(shape).astype(dtype)


def complex_array(*shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)


def with_condition(rng: np.random.Generator, m: int, n: int, condition: float) -> np.ndarray:
    """Singular values in geometric sequence from 1 to ``1 / condition``."""
    k = min(m, n)
    u, v = (np.linalg.qr(rng.standard_normal((size, k)))[0] for size in (m, n))
    return u * np.geomspace(1, 1 / condition, k) @ v.T


def definite(rng: np.random.Generator, n: int, condition: float) -> np.ndarray:
    """Symmetric, with such eigenvalues."""
    q = np.linalg.qr(rng.standard_normal((n, n)))[0]
    a = (q * np.geomspace(1, 1 / condition, n)) @ q.T
    return (a + a.T) / 2
