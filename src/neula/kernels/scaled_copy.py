"""A matrix with scaled columns, in another order of memory: row-major input becomes column-major storage."""

from __future__ import annotations

from functools import lru_cache

import torch

from neula.kernels.availability import can_run


def scaled_copy(out: torch.Tensor, a: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``A diag(scales)`` in ``out``: scaled in the wider precision, rounded once.

    On a GPU a Triton kernel goes from any order to any other at the speed of memory.

    Parameters
    ----------
    out : Tensor, shape (m, n)
        float32 or float64.
    a : Tensor, shape (m, n)
        Of any floating dtype and any strides.
    scales : Tensor, shape (n,)
        float32 or float64.

    Returns
    -------
    Tensor, shape (m, n)
        ``out``, which may be ``a``.

    Examples
    --------
    >>> import torch
    >>> scaled_copy(torch.empty(2, 2), torch.ones(2, 2), torch.tensor([2.0, 4.0]))
    tensor([[2., 4.],
            [2., 4.]])
    """
    if a.is_cuda and a.numel() > 0 and _kernel_runs(a.device):
        from neula.kernels.scaled_copy_triton import scaled_copy_triton

        return scaled_copy_triton(out, a, scales)
    return torch.mul(a, scales, out=out)


@lru_cache
def _kernel_runs(device: torch.device) -> bool:
    """Whether the kernel can run, tried once a device."""

    def attempt() -> None:
        from neula.kernels.scaled_copy_triton import scaled_copy_triton

        one = torch.ones(1, 1, device=device)
        scaled_copy_triton(torch.empty_like(one), one, one[0])

    return can_run(attempt, f"the kernel of scaled copies on {device}", "slower copies take its place")
