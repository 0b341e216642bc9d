"""Extreme singular values of a triangular factor, by the power method and by inverse iteration."""

from __future__ import annotations

import torch

from neula.algorithms.triangular.triangular import UpperTriangular, triangular
from neula.engines.random_vectors import gaussian
from neula.kernels.magnitudes import two_norms

_STEPS = 4
_SEED = 20200623


def largest_singular_value(r: torch.Tensor, steps: int = _STEPS + 1) -> float:
    """Estimate ``||R||_2`` from below, usually within a few percent, by some steps of the power method on
    ``R^H R``.
    """
    return float(_largest(r, steps, torch.ones_like(r[0].real)))


def extreme_singular_values(
    r: torch.Tensor, triangle: UpperTriangular, columns: torch.Tensor | None = None
) -> torch.Tensor:
    """Estimates of the largest singular value of R, from below, and of the smallest, from above, shape (2,).

    The latter is 0 for an exactly singular R; ``triangle`` is R as it is solved with, and columns of R are
    divided by ``columns``. Nothing synchronizes.
    """
    columns = torch.ones_like(r[0].real) if columns is None else columns.to(r.dtype.to_real())
    largest, smallest = _largest(r, _STEPS + 1, columns), _smallest(triangle, _STEPS, columns)
    return torch.stack([largest, smallest]).double()


def expected_decay(diagonal: torch.Tensor, n: int) -> float:
    """Decay of the diagonal of an R of n columns, extrapolated from that of the first columns, two at least.

    Each element is the distance of a column from those before it. Errors of its direction are those of the
    arithmetic divided by that distance, so this says early how good R can become. Medians of eighths are
    compared: a few large singular values show in a few elements, and cost few iterations. How it falls in the
    later half of what is known says how it will continue.

    Examples
    --------
    >>> import torch
    >>> round(expected_decay(torch.tensor([1.0, 0.5, 0.25, 0.125, 0.0625]), 8))
    181
    """
    k = len(diagonal)
    part = max(1, k // 8)
    middle = (k - part) // 2
    first, then, last = (diagonal[i : i + part].abs().median().double() for i in (0, middle, k - part))
    further = (n - k + part / 2) / (k - part - middle)
    return float(first / last * (then / last) ** further)


def _largest(r: torch.Tensor, steps: int, columns: torch.Tensor) -> torch.Tensor:
    x = random_direction(len(r), r.dtype, r.device)[:, 0]
    for _ in range(steps):
        x = x / two_norms(x).clamp_min(torch.finfo(x.dtype).tiny)
        x = (r.mH @ (r @ (x / columns))) / columns
    return two_norms(x).sqrt()


def _smallest(r: UpperTriangular, steps: int, columns: torch.Tensor) -> torch.Tensor:
    x, d = random_direction(len(columns), r.dtype, columns.device), columns[:, None]
    for _ in range(steps):
        x = d * solve_normal(r, d * (x / two_norms(x)))
    growth = two_norms(x)
    regular = (r.diagonal() != 0).all() & (growth > 0)
    return torch.where(regular, growth.rsqrt(), 0.0)


def solve_normal(r: UpperTriangular, x: torch.Tensor) -> torch.Tensor:
    """``(R^H R)^-1 x`` for upper triangular R and the columns of x."""
    return solve_r(r, solve_rt(r, x))


def solve_r(r: UpperTriangular, x: torch.Tensor) -> torch.Tensor:
    return triangular(r).solve(x)


def solve_rt(r: UpperTriangular, x: torch.Tensor) -> torch.Tensor:
    return triangular(r).solve_transposed(x)


def random_direction(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A fixed direction that no matrix is built to avoid, shape (n, 1)."""
    return gaussian(n, 1, dtype, device, seed=_SEED)
