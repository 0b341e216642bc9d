"""Problems in the memory of the host as NumPy has them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from neula.engines import Engine, Format
from neula.pipeline.shapes import BatchedProblem

IN_NUMPY = {torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float16}
"""Dtypes that NumPy has as well."""

FEW = 16
"""Right-hand sides of one problem that are refined one by one; more of them are taken together."""


class Asked(Protocol):
    """What is asked for, as options of all problems say it."""

    @property
    def engine(self) -> Engine:
        """What multiplies."""

    @property
    def target(self) -> Format:
        """Whose accuracy the result is to have."""

    @property
    def dtype(self) -> torch.dtype:
        """Of x as it is given back."""


def arrays_of(shapes: BatchedProblem) -> tuple[np.ndarray, list[np.ndarray]]:
    """The matrix of one problem as it was given, and its right-hand sides in double precision."""
    return array_of(shapes.a), list(np.ascontiguousarray(array_of(shapes.b).T, dtype=np.float64))


def array_of(x: torch.Tensor) -> np.ndarray:
    """A tensor in the memory of the host as an array: a view, unless NumPy does not know what is in it."""
    found: np.ndarray = (x if x.dtype in IN_NUMPY else x.double()).numpy()
    return found
