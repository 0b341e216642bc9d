"""Complex matrices as real ones of twice the order, for kernels that take real numbers only.

``A x = b`` is ``[A1 -A2; A2 A1] [x1; x2] = [b1; b2]`` of real and imaginary parts. Singular values are those
of A, each of them twice, norms of vectors are the same, and so are pseudoinverses, minimum-norm solutions and
all numbers of a certificate except the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

Array = TypeVar("Array", np.ndarray, torch.Tensor)


def embedded(a: Array) -> Array:
    """``[A1 -A2; A2 A1]`` of complex matrices, shape (..., m, n)."""
    join = _joining(a)
    return join([join([a.real, -a.imag], -1), join([a.imag, a.real], -1)], -2)


def interleaved(a: torch.Tensor) -> torch.Tensor:
    """:func:`embedded`, the two columns that come from one next to each other: Gram and Schmidt leave them
    as orthogonal to each other as they are.
    """
    parts = torch.stack([stacked_parts(a), stacked_parts(1j * a)], -1)
    return parts.flatten(-2)


def stacked_parts(b: Array) -> Array:
    """``[b1; b2]`` of complex columns, shape (..., m, k), or real ones of NumPy."""
    return _joining(b)([b.real, b.imag], -2)


def of_stacked_parts(x: Array) -> Array:
    """The inverse of :func:`stacked_parts`."""
    n = x.shape[-2] // 2
    if isinstance(x, torch.Tensor):
        return torch.complex(x[..., :n, :], x[..., n:, :])
    found = np.empty((*x.shape[:-2], n, x.shape[-1]), np.result_type(x, np.complex64))
    found.real, found.imag = x[..., :n, :], x[..., n:, :]
    return found


def _joining(x: Array) -> Callable[..., Array]:
    return torch.cat if isinstance(x, torch.Tensor) else np.concatenate
