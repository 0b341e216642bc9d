"""``A X`` in twice the precision of float64 on a GPU: sums, and beside them sums of their rounding errors.

``8 m n`` bytes, and for each element and vector eleven operations in float64: two for a product and its
rounding error (a fused multiply-add), six for a sum and its rounding error, the rest to add up errors
(T. Ogita, S. M. Rump and S. Oishi, "Accurate sum and dot product", SIAM J. Sci. Comput. 26, 2005, algorithm
Dot2). An H200 does some twenty in the time of an element, so for one or two vectors memory decides.
"""

from __future__ import annotations

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.launch import multiprocessors, share

THREADS = 128

LANES = (8, 32)
"""Threads that have some rows together, where those are contiguous: few if they are short."""

HEIGHTS = (8, 32, THREADS)
"""Threads that have some rows together, where columns are contiguous: each has some rows, and others have
other columns."""

ROWS, ACROSS = 4, 2
"""Rows that a thread adds up, where they are contiguous and where columns are."""

ELEMENTS = 16
"""Elements of the result for which a thread block adds pieces."""

VECTORS = 4
"""For how many vectors at most an element is read once."""

BLOCKS = 12
"""Thread blocks for each multiprocessor, so that enough loads are in flight."""

LEAST = (1024, 16)
"""Elements of a row that are not divided any further, where rows are contiguous and where columns are."""


def doubled_product_cuda(
    a: torch.Tensor,
    x: torch.Tensor,
    x_low: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    least: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``A (x + x_low)``, or ``b - A (x + x_low)`` where b is given, queued on the current stream.

    Parameters
    ----------
    a : Tensor, shape (batch, m, n)
        float64, as all others, and of any strides, as all others.
    x : Tensor, shape (batch, n, k)
    x_low : Tensor, shape (batch, n, k), optional
        Of the size of the rounding errors of x at most.
    b : Tensor, shape (batch, m, k), optional
    least : int, optional
        Elements of a row that are not divided any further, in place of :data:`LEAST`.

    Returns
    -------
    high, low : Tensor, shape (batch, m, k)
        The result as a sum that is not evaluated; low is at most the rounding error of high.
    """
    (batch, m, n), k = a.shape, x.shape[2]
    result = torch.empty(2, batch, k, m, dtype=a.dtype, device=a.device)
    high, low = result.mT.unbind(0)
    if result.numel() == 0:
        return high, low
    by_columns = a.stride(1) == 1 and a.stride(2) != 1
    sizes, length = (HEIGHTS, m) if by_columns else (LANES, n)
    along = next((size for size in sizes if size >= length), sizes[-1])
    rows = along * ACROSS if by_columns else THREADS // along * ROWS
    vectors = min(VECTORS, 1 << (k - 1).bit_length())
    tasks = -(-m // rows) * -(-k // vectors) * batch
    least = LEAST[by_columns] if least is None else least
    pieces = max(1, min(BLOCKS * multiprocessors(a.device) // tasks, n // least))
    piece = share(n, pieces, 1)
    sums = result if pieces == 1 else result.new_empty(2, pieces, batch, k, m)
    where = [place(y) for y in (a, x, x_low, b)]
    task = (*sum(where, ()), sums, m, n, k, batch * k * m, pieces, piece)
    name, macros = "column_product" if by_columns else "row_product", f"#define VECTORS {vectors}\n"
    with torch.cuda.device_of(a):
        compiled("doubled", name, a.device, macros)((tasks * pieces, 1, 1), (THREADS, 1, 1), [task, along])
        if pieces > 1:
            grid = (-(-result[0].numel() // ELEMENTS), 1, 1)
            kernel = compiled("doubled", "sum_of_pieces", a.device, macros)
            kernel(grid, (THREADS, 1, 1), [task, result])
    return high, low


def place(x: torch.Tensor | None) -> tuple[torch.Tensor | int, ...]:
    """Address of a matrix, and its strides between members of a batch, rows and columns."""
    return (0, 0, 0, 0) if x is None else (x, *x.stride())
