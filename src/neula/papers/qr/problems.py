"""Matrices that several figures share."""

from __future__ import annotations

import torch

from neula.io.matrices import random_matrix
from neula.papers.figure import Setting


def column_major_normal(setting: Setting, m: int, n: int) -> torch.Tensor:
    """A random matrix in column-major storage, as LAPACK and the recursion have it: nobody transposes."""
    a = random_matrix("normal", m, n, dtype=torch.float32, device=setting.device, seed=m + n)
    return setting.speed.empty(m, n).copy_(a)
