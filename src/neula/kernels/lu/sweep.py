"""Triangular systems with inverted diagonal blocks and a few right-hand sides, solved in one launch.

Block by block a solve is two launches a block, dozens in all, each of which takes longer to begin and to end
than to read what it multiplies.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.few_vectors.mixed_product import VECTORS
from neula.kernels.precision import exact_matmul

PIECE = 512
"""Columns that a thread block multiplies; widths of blocks are multiples of it."""

ALIGNED = 4
"""Elements that are loaded at a time: at multiples of so many begin the columns, or rows, of a matrix."""


@trial("The kernel of triangular solves", "a launch for each block takes its place")
def _tried(device: torch.device) -> None:
    t = torch.eye(3 * PIECE, device=device, dtype=torch.float16)
    inverses = torch.eye(PIECE, dtype=torch.float32, device=device).repeat(3, 1, 1)
    sweep.kernel(t, inverses, torch.ones(len(t), 1, dtype=torch.float32, device=device), upper=False)
    torch.cuda.synchronize(device)


def _takes(t: torch.Tensor, inverses: torch.Tensor, b: torch.Tensor, *, upper: bool) -> bool:
    single = t.ndim == 2 and t.dtype.itemsize == 2 and inverses.dtype == b.dtype == torch.float32
    if not single or inverses.shape[-1] % PIECE or not 0 < b.shape[1] <= VECTORS:
        return False
    along, across = sorted(t.stride())
    return along == 1 and across % ALIGNED == 0 and t.data_ptr() % (2 * ALIGNED) == 0


@kernel("neula.kernels.lu.sweep_cuda:sweep_cuda", trial=_tried, when=_takes)
def sweep(t: torch.Tensor, inverses: torch.Tensor, b: torch.Tensor, *, upper: bool) -> torch.Tensor:
    """``T^-1 B``, in the precision of B.

    Parameters
    ----------
    t : Tensor, shape (n, n)
        Triangular, of a low format and any strides; blocks on the diagonal are not read.
    inverses : Tensor, shape (blocks, width, width)
        Of these, triangular; the last one is bordered by an identity where it is smaller.
    b : Tensor, shape (n, k)
        Not modified.
    upper : bool

    Returns
    -------
    Tensor, shape (n, k)

    Examples
    --------
    >>> import torch
    >>> t = torch.tensor([[2.0, 0.0], [4.0, 8.0]]).half()
    >>> sweep(t, 1 / t.diagonal().float()[:, None, None], torch.tensor([[2.0], [12.0]]), upper=False)
    tensor([[1.],
            [1.]])
    """
    width, x = inverses.shape[-1], torch.empty_like(b)
    rest, starts = b.clone(), range(0, len(t), width)
    for index in reversed(range(len(starts))) if upper else range(len(starts)):
        k = slice(starts[index], min(starts[index] + width, len(t)))
        size = k.stop - k.start
        x[k] = exact_matmul(inverses[index, :size, :size], rest[k])
        beside = slice(0, k.start) if upper else slice(k.stop, None)
        rest[beside] -= exact_matmul(t[beside, k].to(x.dtype), x[k])
    return x
