"""QR factorizations of tall matrices on a CPU from their Gram matrices, by the compiled core.

A matrix is read twice and Q written once, and both once more for each pass where one is not enough; all else
is done while some rows are in the cache, also what random vectors see of the factors. The definition in torch
is :func:`neula.algorithms.orthogonal.cholesky_qr.cholesky_qr2`, except for shifts for dependent columns.
"""

from __future__ import annotations

import numpy as np
import torch

from neula.kernels.core import DTYPES, core, empty

EACH = 1 << 21
"""Products of Gram matrices from which on another thread is worth the microseconds of its starts."""


def cholesky_qr(
    a: torch.Tensor, g: np.ndarray, enough: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray] | None:
    """Factorize A (batch, m, n) or (m, n), m >= n, and measure; None without the core, and for dtypes of
    other than single and double precision.

    The Gram matrix is in double precision. Where that is not enough, Q is factorized again, from a Gram
    matrix with an enlarged diagonal where columns are too dependent, until an estimate of ``||I - Q^T Q||_F /
    sqrt(n)`` is at most ``enough``. Q has its rows one after the other, and R a positive diagonal. Measures
    along the random vectors g (n, 4), of a complex A real ones (2 n, 4), as of
    ``probes_host.reflected_errors``, are NaN where numbers are not finite, vanish, or have squares that are
    not: these have no factors.
    """
    compiled, n = core(), a.shape[-1]
    if compiled is None or a.dtype.to_real() not in DTYPES:
        return None
    q, r = empty(*a.shape, dtype=a.dtype), empty(*a.shape[:-2], n, n, dtype=a.dtype)
    threads = min(torch.get_num_threads(), a.numel() * n // EACH) or 1
    a = a.resolve_conj()
    return q, r, compiled.cholesky_qr(a.numpy(), q.numpy(), r.numpy(), g, enough, threads)
