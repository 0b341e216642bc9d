"""Conjugate transposes, signs and real diagonals, of real and of complex numbers."""

from __future__ import annotations

from typing import Any

import torch


def adjoint(a: Any) -> Any:
    """The conjugate transposes of matrices of torch, NumPy or JAX; those of real ones are views."""
    transposed = a.swapaxes(-1, -2)
    return transposed.conj() if isinstance(a, torch.Tensor) or a.dtype.kind == "c" else transposed


def phases(x: torch.Tensor) -> torch.Tensor:
    """``x / |x|``, and 1 for zero: the signs of real numbers.

    Examples
    --------
    >>> phases(torch.tensor([-2.0, 0.0])), phases(torch.tensor([1e-40j]))
    (tensor([-1.,  1.]), tensor([0.+1.j]))
    """
    if not x.is_complex():
        return torch.copysign(torch.ones_like(x), x)
    parts = torch.view_as_real(x.resolve_conj())
    largest = parts.abs().amax(-1, keepdim=True)  # torch.sgn squares the parts, which may underflow
    near_one = torch.view_as_complex(parts / torch.where(largest == 0, 1.0, largest))
    return torch.where(x == 0, 1.0, torch.sgn(near_one))


def with_real_diagonal(x: torch.Tensor) -> torch.Tensor:
    """Matrices whose diagonals are real except for rounding errors, which are cleared in place."""
    if x.is_complex():
        x.diagonal(dim1=-2, dim2=-1).imag.zero_()
    return x


def with_nonnegative_diagonal(q: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and R of the same product whose R has a real and nonnegative diagonal; in place."""
    turn = phases(r.diagonal(dim1=-2, dim2=-1))
    q.mul_(turn[..., None, :])
    return q, with_real_diagonal(r.mul_(turn.conj()[..., None]))
