"""Errors of small QR factorizations along random vectors on a CPU, by the compiled core.

``probes.probe_errors`` in microseconds, while a matrix and its factors are in the cache.
"""

from __future__ import annotations

import numpy as np
import torch

from neula.kernels.core import DTYPES, core

EACH = 1 << 14
"""Elements of a matrix from which on another thread is worth the microseconds of its starts."""


def reflected_errors(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor, g: np.ndarray) -> np.ndarray | None:
    """Make diagonals of R nonnegative, in place, and measure; None without the core, and for other dtypes.

    A, Q (both (batch, m, n) or (m, n)) and R are of one dtype, float64 or float32; rows of R and columns of Q
    change their signs. g (n, 4) are random vectors. Returns an array (6, batch): the first three of
    ``probes.probe_errors`` for columns of A divided by their norms, of which R has the same; an upper
    estimate of ``||I - Q^T Q||_2`` (``certificates.orthogonality``); the smallest and the largest of the
    norms.

    Examples
    --------
    >>> from neula.certificates.orthogonality import gaussian_probes
    >>> a = torch.tensor([[3.0, 1.0], [4.0, 2.0]], dtype=torch.float64)
    >>> q, r = torch.linalg.qr(a)
    >>> found = reflected_errors(a, q, r, gaussian_probes(2, a.device).numpy())
    >>> found is None or bool(found[0] < 1e-15 * found[1])
    True
    """
    compiled, (m, n) = core(), a.shape[-2:]
    if compiled is None or a.dtype not in DTYPES or not a.dtype == q.dtype == r.dtype:
        return None
    threads = min(torch.get_num_threads(), m * n // EACH) or 1
    return compiled.probe_errors(a.numpy(), q.numpy(), r.numpy(), g, threads)
