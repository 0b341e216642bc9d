"""What random vectors see of small QR factorizations on a CPU, by a kernel in C.

:func:`neula.kernels.probes.probe_errors` in microseconds, while a matrix and its factors are in the cache.
Where there is no compiler, there is no kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

from neula.kernels.host_matrices import DTYPES, described, place_of
from neula.kernels.host_source import load

FOUND = 5
"""Numbers for each factorization."""

EACH = 1 << 14
"""Elements of a matrix from which on another thread is worth the microseconds of its starts."""


class Factorizations(ctypes.Structure):
    """As ``kernels/probes.h`` has them."""

    _fields_ = (
        ("matrices", ctypes.c_long * 15),
        *((name, ctypes.c_long) for name in ("count", "m", "n", "g", "numbers")),
        ("enough", ctypes.c_double),
        ("threads", ctypes.c_long),
    )


def reflected_errors(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor, g: np.ndarray) -> np.ndarray | None:
    """Make diagonals of R nonnegative, in place, and measure; None where there is no compiler.

    Parameters
    ----------
    a : Tensor, shape (batch, m, n) or (m, n)
        On the host, any strides. All three of one dtype, float64 or float32.
    q : Tensor, shape (batch, m, n) or (m, n)
        Rows of R and columns of Q change their signs.
    r : Tensor, shape (batch, n, n) or (n, n)
    g : array, shape (n, 4)
        Random vectors, float64, for residual and orthogonality.

    Returns
    -------
    array, shape (5, batch)
        The numbers of :func:`~neula.kernels.probes.probe_errors` for columns of A divided by their norms, of
        which R has the same; the smallest and the largest of these.

    Examples
    --------
    >>> import torch
    >>> from neula.certificates.probes import gaussian_probes
    >>> from neula.kernels.probes_host import reflected_errors
    >>> a = torch.tensor([[3.0, 1.0], [4.0, 2.0]], dtype=torch.float64)
    >>> q, r = torch.linalg.qr(a)
    >>> found = reflected_errors(a, q, r, gaussian_probes(2, a.device).numpy())
    >>> found is None or bool(found[0] < 1e-15 * found[1])
    True
    """
    library, (m, n) = _library(), a.shape[-2:]
    threads = min(torch.get_num_threads(), m * n // EACH) or 1
    return None if library is None else measured(library.probe_errors, a, q, r, g, threads=threads)


def measured(
    function: Callable[..., int],
    a: torch.Tensor,
    q: torch.Tensor,
    r: torch.Tensor,
    g: np.ndarray,
    enough: float = 0.0,
    threads: int = 1,
) -> np.ndarray | None:
    """What a kernel for factorizations says of them, shape (5, batch); None where it does not take them.

    Parameters
    ----------
    function : callable
        Of a library in C, for ``Factorizations`` of ``kernels/probes.h``.
    a, q, r : Tensor
    g : array, shape (n, 4)
    enough : float, optional
        Loss of orthogonality up to which nothing is done about it.
    threads : int, optional
    """
    if a.dtype not in DTYPES or not a.dtype == q.dtype == r.dtype:
        return None
    (m, n), count = a.shape[-2:], len(a) if a.ndim == 3 else 1
    found = (ctypes.c_double * (FOUND * count))()  # microseconds count
    matrices = (*described(a), *described(q), *described(r))
    numbers = (place_of(g), ctypes.addressof(found))
    if not function(ctypes.byref(Factorizations(matrices, count, m, n, *numbers, enough, threads))):
        return None
    return np.frombuffer(memoryview(found)).reshape(FOUND, count)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    return load("probes")
