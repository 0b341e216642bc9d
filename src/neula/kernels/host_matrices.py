"""Matrices as kernels in C are handed them (``matrices.h``)."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

DTYPES = (torch.float64, torch.float32)
"""Those of their elements."""

Matrices = ctypes.c_long * 5
"""Where they begin, whether they are float32, and their strides."""


def described(x: torch.Tensor) -> tuple[int, ...]:
    """The five numbers of :data:`Matrices` of a matrix or a batch of them, in one of ``DTYPES``.

    Parameters
    ----------
    x : Tensor, shape (batch, m, n) or (m, n)
        In the memory of the host, without lazy signs.
    """
    strides = x.stride()
    apart = strides if len(strides) == 3 else (0, *strides)
    return (x.data_ptr(), x.dtype == torch.float32, *apart)


def pointer_to(x: torch.Tensor) -> ctypes.Array[ctypes.c_long]:
    """The same for a kernel, while x is kept alive."""
    return Matrices(*described(x))


def place_of(x: np.ndarray) -> int:
    """Where the numbers of an array without gaps are, which must be kept alive."""
    place: int = x.__array_interface__["data"][0]
    return place


def address_of(x: np.ndarray) -> ctypes.c_void_p:
    """The same as an argument of a kernel."""
    return ctypes.c_void_p(place_of(x))


def empty(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Memory, in one of ``DTYPES``: torch takes twice the microseconds, and more pages for large ones."""
    return torch.from_numpy(np.empty(shape, np.float32 if dtype == torch.float32 else np.float64))
