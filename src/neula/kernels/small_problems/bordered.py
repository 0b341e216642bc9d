"""A problem in the shape of another one, with what makes that no harder, in one launch.

A problem written in its border on a GPU in one launch, in CUDA C++.
"""

from __future__ import annotations

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div


@trial("The kernel that borders matrices", "half a dozen launches of the library take its place")
def _tried(device: torch.device, itemsize: int) -> None:
    one = torch.ones(1, 1, 1, dtype=torch.float64 if itemsize == 8 else torch.float32, device=device)
    bordered.kernel(one, one, one.new_empty(1, 3, 2), one.new_empty(1, 3, 1))


def _is_one(a: torch.Tensor, b: torch.Tensor, to_a: torch.Tensor, to_b: torch.Tensor) -> bool:
    alike = a.dtype == b.dtype == to_a.dtype == to_b.dtype and a.dtype in (torch.float32, torch.float64)
    return alike and len(a) == 1 and to_a.is_contiguous() and to_b.is_contiguous()


@kernel(
    "bordered_cuda",
    trial=_tried,
    when=_is_one,
    variant=lambda a, b, to_a, to_b: a.dtype.itemsize,
)
def bordered(a: torch.Tensor, b: torch.Tensor, to_a: torch.Tensor, to_b: torch.Tensor) -> None:
    """Write ``[A 0; 0 s I; 0 0]`` and ``[b; 0]``, s being the largest magnitude in the first column of A.

    Parameters
    ----------
    a : Tensor, shape (batch, m, n)
    b : Tensor, shape (batch, m, k)
    to_a : Tensor, shape (batch, m + p, n + q), p >= q
        Overwritten.
    to_b : Tensor, shape (batch, m + p, k)
        Overwritten.

    Examples
    --------
    >>> a, b = torch.empty(1, 3, 2), torch.empty(1, 3, 1)
    >>> bordered(torch.tensor([[[5.0], [-7.0]]]), torch.ones(1, 2, 1), a, b)
    >>> a[0], b[0, :, 0]
    (tensor([[ 5.,  0.],
            [-7.,  0.],
            [ 0.,  7.]]), tensor([1., 1., 0.]))
    """
    _, m, n = a.shape
    to_a.zero_()[:, :m, :n] = a
    to_b.zero_()[:, :m] = b
    largest = torch.linalg.vector_norm(a[:, :, 0], torch.inf, dim=1)
    to_a[:, m:, n:].diagonal(dim1=1, dim2=2).copy_(largest[:, None])


THREADS, TILE = 256, 32


def bordered_cuda(a: torch.Tensor, b: torch.Tensor, to_a: torch.Tensor, to_b: torch.Tensor) -> None:
    (_, m, n), (_, rows, columns), k = a.shape, to_a.shape, b.shape[2]
    real = "double" if a.dtype == torch.float64 else "float"
    tiles = ceil_div(rows, TILE) * ceil_div(columns, TILE)
    arguments = [a, b, to_a, to_b, m, n, k, rows, columns, *a.stride()[1:], *b.stride()[1:]]
    kernel = compiled("bordered", "bordered", a.device, f"#define REAL {real}\n")
    kernel((tiles, 1, 1), (THREADS, 1, 1), arguments)
