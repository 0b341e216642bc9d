"""Small QR factorizations on a CPU, and what random vectors see of them, by kernels in C.

:func:`neula.kernels.probes.probe_errors` in microseconds, while a matrix and its factors are in the cache.
Where there is no compiler, there are no kernels.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
import torch

from neula.kernels.host_matrices import DTYPES, address_of, pointer_to
from neula.kernels.host_source import load

FOUND = 5
"""Numbers for each factorization."""


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
    return _called("probe_errors", a, q, r, g)


def reflected(a: torch.Tensor, g: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, np.ndarray] | None:
    """Factorize by Householder's reflections, and measure; None where there is no compiler.

    One after the other and without blocks: for as many elements as a cache holds.

    Parameters
    ----------
    a : Tensor, shape (batch, m, n) or (m, n), m >= n
        On the host, float64 or float32, any strides. In either case the arithmetic is in double precision.
    g : array, shape (n, 4)

    Returns
    -------
    q, r : Tensor
        The diagonal of R is not negative. They are laid out as torch does.
    found : array, shape (5, batch)
        As of :func:`reflected_errors`.
    """
    (m, n), batch = a.shape[-2:], a.shape[:-2]
    q, r = a.new_empty((*batch, n, m)).mT, a.new_empty((*batch, n, n)).mT
    found = _called("reflect_and_measure", a, q, r, g)
    return None if found is None else (q, r, found)


def _called(name: str, a: torch.Tensor, q: torch.Tensor, r: torch.Tensor, g: np.ndarray) -> np.ndarray | None:
    library, (m, n) = _library(), a.shape[-2:]
    if library is None or a.dtype not in DTYPES or not a.dtype == q.dtype == r.dtype:
        return None
    count = len(a) if a.ndim == 3 else 1
    found, sizes = np.empty((FOUND, count)), (ctypes.c_long * 3)(count, m, n)
    factors = pointer_to(a), pointer_to(q), pointer_to(r)
    return found if library[name](*factors, sizes, address_of(g), address_of(found)) else None


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    return load("probes")
