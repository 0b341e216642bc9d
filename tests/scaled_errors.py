"""Errors of solutions in the norm of the certificates."""

from __future__ import annotations

from typing import Any

import numpy as np


def scaled_errors(a: Any, x: Any, exact: Any) -> np.ndarray:
    """``||D (x - x*)|| / ||D x*||`` of each right-hand side; D has the norms of the columns of A."""
    wide = np.clongdouble if any("complex" in str(y.dtype) for y in (a, x, exact)) else np.longdouble
    a, x, exact = (np.asarray(y, wide) for y in (a, x, exact))
    sizes = np.sqrt((np.abs(a) ** 2).sum(-2))
    sizes = sizes if exact.ndim == a.ndim - 1 else sizes[..., None]
    axis = -1 if exact.ndim == a.ndim - 1 else -2

    def norm(y: np.ndarray) -> np.ndarray:
        return np.sqrt((np.abs(sizes * y) ** 2).sum(axis))

    return (norm(x - exact) / norm(exact)).astype(np.float64)
