"""Corrections of approximate eigenvectors of Hermitian matrices, apart from dense products: block diagonal
transformations of neighbours, and first-order changes (:mod:`neula.algorithms.spectra.divide`).
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.precision import exact_matmul


@trial("The kernels that correct eigenvectors", "several passes of the library's take their place")
def _tried(device: torch.device) -> None:
    x = torch.ones(1, 16, 16, dtype=torch.float32, device=device)
    turned.kernel(x, x[None], 0)
    correction.kernel(x, x[0, :1], x[0, 0, :1], x[0, 0, :1])


@kernel(
    "neula.kernels.spectra.correction_triton:turned_triton",
    trial=_tried,
    when=lambda x, turns, _: x.numel() > 0 and x.dtype == torch.float32 and turns.shape[-1] in (16, 32),
)
def turned(x: torch.Tensor, turns: torch.Tensor, offset: int) -> torch.Tensor:
    """``X T`` with block diagonal T.

    Parameters
    ----------
    x : Tensor, shape (batch, m, n)
    turns : Tensor, shape (batch, blocks, width, width)
    offset : int
        Column of X at which a block begins; the first and the last one may stick out.

    Returns
    -------
    Tensor, shape (batch, m, n)

    Examples
    --------
    >>> import torch
    >>> swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> turned(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.stack([swap, swap])[None], 0)
    tensor([[[2., 1., 4., 3.]]])
    """
    count, m, n = x.shape
    blocks, width = turns.shape[1:3]
    before = -offset % width
    x = torch.nn.functional.pad(x, (before, blocks * width - before - n))
    x = x.view(count, m, blocks, width).transpose(1, 2)
    return exact_matmul(x, turns).transpose(1, 2).reshape(count, m, -1)[:, :, before : before + n]


@kernel(
    "neula.kernels.spectra.correction_triton:correction_triton",
    trial=_tried,
    when=lambda s, *_: s.numel() > 0,
)
def correction(s: torch.Tensor, w: torch.Tensor, apart: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """``s_ij / (w_j - w_i)`` where the denominator exceeds ``apart`` and the numerator ``noise``, else 0.

    Parameters
    ----------
    s : Tensor, shape (batch, n, n)
    w : Tensor, shape (batch, n)
    apart, noise : Tensor, shape (batch,)

    Examples
    --------
    >>> import torch
    >>> s, w = torch.tensor([[[0.0, 0.2], [0.2, 0.0]]]), torch.tensor([[1.0, 3.0]])
    >>> correction(s, w, torch.ones(1), torch.zeros(1))
    tensor([[[ 0.0000,  0.1000],
             [-0.1000,  0.0000]]])
    """
    gaps = w[:, None, :] - w[:, :, None]
    clear = (gaps.abs() > apart[:, None, None]) & (s.abs() > noise[:, None, None])
    return torch.where(clear, s / torch.where(clear, gaps, 1.0), 0.0)
