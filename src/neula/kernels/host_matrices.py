"""Matrices as kernels in C are handed them (``matrices.h``)."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

DTYPES = (torch.float64, torch.float32)
"""Those of their elements."""

Matrices = ctypes.c_long * 5
"""Where they begin, whether they are float32, and their strides."""


def pointer_to(x: torch.Tensor) -> ctypes.Array[ctypes.c_long]:
    """A matrix or a batch of them in the memory of the host, in one of ``DTYPES``, to be kept alive.

    Parameters
    ----------
    x : Tensor, shape (batch, m, n) or (m, n)
        Without lazy signs.
    """
    strides = x.stride()
    apart = strides if len(strides) == 3 else (0, *strides)
    return Matrices(x.data_ptr(), x.dtype == torch.float32, *apart)


def address_of(x: np.ndarray) -> ctypes.c_void_p:
    """Where the numbers of an array without gaps are, which must be kept alive."""
    return ctypes.c_void_p(x.__array_interface__["data"][0])
