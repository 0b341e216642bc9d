"""Solutions of small least-squares problems by the kernel of the core."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from neula.kernels.small_problems import seminormal_host


def solved(a: torch.Tensor, b: torch.Tensor, *given: Any, **limits: Any) -> Any:
    """Given what :func:`seminormal_host.prepared` takes; None without the core, or for lack of memory."""
    solve = seminormal_host.prepared(*given, **limits)
    if solve is None:
        return None
    n, k, count = a.shape[-1], b.shape[-1], len(a) if a.ndim == 3 else 1
    written = np.empty(seminormal_host.size_of(count, n, k))
    found = seminormal_host.SeminormalHostSolutions(written, count, n, k)
    return found if solve(a.numpy(), b.numpy(), written) else None
