"""The library's solvers, as they are to be on a GPU."""

from __future__ import annotations

import threading
from functools import cache

import torch

from neula.kernels.dispatch import refuse_capture

_loading = threading.Lock()


def load_solvers() -> None:
    """Let torch load its solvers, which fails where several threads ask for the first time at once.

    Source: issue 90613 of PyTorch, "lazy wrapper should be called at most once".
    """
    with _loading:
        if not _loaded.cache_info().currsize:
            refuse_capture("the library's solvers")
        _loaded()


@cache
def _loaded() -> None:
    torch.linalg.inv_ex(torch.ones(1, 1, device="cuda"))


def svd(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reduced singular value decomposition, as accurate on a GPU as LAPACK's.

    Jacobi's method, which torch takes by default there, errs by hundreds of unit roundoffs in float64 (order
    500 on an H200: 27 ms). Its approximate one does not, in a sixth of the time, unless A is ill-conditioned,
    which shows in its factors; and QR iterations never do, in twice the time.

    Parameters
    ----------
    a : Tensor, shape (..., m, n)

    Returns
    -------
    u, s, vh : Tensor
        Shapes (..., m, k), (..., k) and (..., k, n) with ``k = min(m, n)``.

    Examples
    --------
    >>> svd(torch.tensor([[2.0, 0.0], [0.0, 3.0]], dtype=torch.float64))[1]
    tensor([3., 2.], dtype=torch.float64)
    """
    if not a.is_cuda:
        u, s, vh = torch.linalg.svd(a, full_matrices=False)
    elif a.shape[-2] < a.shape[-1]:
        v, s, uh = svd(a.mT)
        u, vh = uh.mT, v.mT
    else:
        u, s, vh = torch.linalg.svd(a, full_matrices=False, driver="gesvda")
        if not _accurate(a, u, s, vh):
            u, s, vh = torch.linalg.svd(a, full_matrices=False, driver="gesvd")
    return u, s, vh


def _accurate(a: torch.Tensor, u: torch.Tensor, s: torch.Tensor, vh: torch.Tensor) -> bool:
    """Whether factors are as LAPACK's would be, to ``8 k u``."""
    k, norm = s.shape[-1], torch.linalg.matrix_norm
    identity = torch.eye(k, dtype=a.dtype, device=a.device)
    errors = [norm(u.mT @ u - identity), norm(vh @ vh.mT - identity), norm(a - (u * s[..., None, :]) @ vh)]
    bound = 4 * k * torch.finfo(a.dtype).eps
    sizes = [1.0, 1.0, norm(a)]
    return all(bool((error <= bound * size).all()) for error, size in zip(errors, sizes, strict=True))
