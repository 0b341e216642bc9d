"""Systems for the tests of lu_solve, and measures of their solutions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from neula.problems.systems.lu import lu_factor


def factor(A: Any, **options: Any) -> Any:
    return lu_factor(A, **{"engine": "emulated", **options})


def backward_error(A: Any, x: Any, b: Any) -> float:
    """In the infinity norm, the worst of all columns."""
    A, x, b = (torch.as_tensor(y).double() for y in (A, x, b))
    x, b = x.reshape(len(A), -1), b.reshape(len(A), -1)
    size = A.abs().sum(1).amax() * x.abs().amax(0) + b.abs().amax(0)
    return float(((b - A @ x).abs().amax(0) / size).amax())


def silent(function: Callable[[], Any]) -> Any:
    """The result of a function; warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function()


def dominant(n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    """A random matrix of condition number about 2."""
    a = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (a / n**0.5 + 4 * torch.eye(n, dtype=torch.float64)).to(dtype)
