"""Random vectors that norms are estimated along, as arrays of NumPy."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from neula.algorithms.krylov.batched_lstsq import probes


@lru_cache(maxsize=64)
def probe_array(n: int, count: int, *, unit: bool = False) -> np.ndarray:
    """Those of :func:`neula.algorithms.krylov.batched_lstsq.probes`, not to be written to, shape (n, p)."""
    found: np.ndarray = probes(n, torch.device("cpu"), count, unit=unit).numpy()
    return found
