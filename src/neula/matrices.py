"""Test matrices of the papers (HPDC 2020, section 4.2).

Random matrices with chosen singular values are products ``U diag(s) V^T`` of random (Haar-distributed)
orthogonal U and V, so their condition number is exact to rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from neula.engines.precision import exact_matmul
from neula.errors import unknown_name

SPECTRA = ("geometric", "arithmetic", "cluster_small", "cluster_large")
ENTRIES = ("uniform01", "uniform", "normal")
KINDS = (*ENTRIES, *SPECTRA)


def singular_values(kind: str, n: int, cond: float) -> torch.Tensor:
    """Singular values from 1 down to ``1/cond``.

    Parameters
    ----------
    kind : {"geometric", "arithmetic", "cluster_small", "cluster_large"}
        Evenly spaced logarithms; evenly spaced values; all 1 but the smallest; all ``1/cond`` but the
        largest.
    n : int
        How many; a single one is 1.
    cond : float
        Condition number, at least 1.

    Returns
    -------
    Tensor, shape (n,)
        float64, descending.

    Raises
    ------
    ValueError
        For an unknown kind or a condition number below 1.

    Examples
    --------
    >>> singular_values("arithmetic", 3, 4.0)
    tensor([1.0000, 0.6250, 0.2500], dtype=torch.float64)
    """
    if kind not in SPECTRA:
        raise unknown_name("spectrum", kind, SPECTRA)
    if not cond >= 1:
        raise ValueError(f"a condition number is at least 1, got {cond}")
    position = torch.linspace(0, 1, n, dtype=torch.float64, device="cpu")
    if kind == "geometric":
        return cond**-position
    if kind == "arithmetic":
        return 1 - position * (1 - 1 / cond)
    s = torch.full((n,), 1.0 if kind == "cluster_small" else 1 / cond, dtype=torch.float64, device="cpu")
    s[0] = 1.0
    if n > 1:
        s[-1] = 1 / cond
    return s


def random_matrix(
    kind: str,
    m: int,
    n: int,
    *,
    cond: float = 1e3,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> torch.Tensor:
    """A random m x n matrix of one of the papers' kinds.

    Parameters
    ----------
    kind : str
        ``"uniform01"`` (0, 1), ``"uniform"`` (-1, 1), ``"normal"``, or a spectrum: see
        :func:`singular_values`.
    m, n : int
    cond : float
        Condition number, for the kinds with a spectrum.
    dtype : torch.dtype
        The matrix is made in it: with float32 the condition number is exact up to about 1e6.
    device : torch.device or str
    seed : int

    Returns
    -------
    Tensor, shape (m, n)

    Raises
    ------
    ValueError
        For an unknown kind, or sizes below 1.
    """
    if kind not in KINDS:
        raise unknown_name("kind of matrix", kind, KINDS)
    if m < 1 or n < 1:
        raise ValueError(f"a matrix has at least one row and one column, got {m} x {n}")
    generator = torch.Generator(device).manual_seed(seed)
    if kind in ENTRIES:
        return _random_entries(kind, m, n, dtype, generator)
    k = min(m, n)
    u = random_orthonormal(m, k, generator, dtype)
    v = random_orthonormal(n, k, generator, dtype)
    u *= singular_values(kind, k, cond).to(u)
    return exact_matmul(u, v.T)


def random_orthonormal(m: int, n: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Random m x n matrix with orthonormal columns, m >= n, on the generator's device."""
    gaussian = torch.randn(m, n, dtype=dtype, device=generator.device, generator=generator)
    return torch.linalg.qr(gaussian)[0]


def _random_entries(
    kind: str, m: int, n: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    draw: Callable[..., torch.Tensor] = torch.randn if kind == "normal" else torch.rand
    a = draw(m, n, dtype=dtype, device=generator.device, generator=generator)
    return a.mul_(2).sub_(1) if kind == "uniform" else a
