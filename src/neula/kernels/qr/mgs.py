"""Modified Gram-Schmidt of many small tiles at once.

Zhang, Baharlouei, Wu, "High Accuracy Matrix Computations on Neural Engines" (HPDC 2020), Algorithm 2.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial

# item: Q tiles
TILE_ROWS = 256
TILE_COLUMNS = 32
"""The paper's tile, and the largest one that the registers of a thread block hold well."""

TALLEST_TILE = {torch.float32: 1024, torch.float64: 256}
"""Rows of a tile of 32 columns above which a tree of smaller ones is faster: measured on an H200."""


@trial("The tile kernel", "plain torch takes its place, many times slower")
def _tried(device: torch.device) -> None:
    mgs.kernel(torch.ones(1, 1, 1, dtype=torch.float32, device=device))


def fits(tiles: torch.Tensor) -> bool:
    """Whether the kernel takes tiles of this shape and dtype."""
    m, n = tiles.shape[-2:]
    return m <= TILE_ROWS and n <= TILE_COLUMNS and tiles.dtype in (torch.float32, torch.float64)


# item: Q Algorithm 2; V Algorithm 4
@kernel("neula.kernels.qr.mgs_triton:mgs_triton", trial=_tried, when=fits)
def mgs(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """QR of each tile by modified Gram-Schmidt, in the full precision of its dtype.

    Algorithm 2 as it is written, for a batch. Tiles of up to 256 x 32 on a GPU go to a Triton kernel, one
    thread block a tile.

    Parameters
    ----------
    tiles : Tensor, shape (*batch, m, n)
        float32 or float64, of any strides; not modified. Squares of the elements should neither overflow nor
        underflow (float32: columns between 1e-19 and 1e19, or zero).

    Returns
    -------
    Q : Tensor, shape (*batch, m, n)
        Contiguous. A column that vanishes becomes a zero column.
    R : Tensor, shape (*batch, n, n)
        Contiguous, upper triangular with a nonnegative diagonal: zero where a column vanishes, NaN or Inf
        where the tile holds NaN or Inf, or squares overflow. Other tiles are not affected.

    Examples
    --------
    >>> import torch
    >>> q, r = mgs(torch.tensor([[0.0, 3.0], [2.0, 5.0]]))
    >>> r
    tensor([[2., 5.],
            [0., 3.]])
    """
    n = tiles.shape[-1]
    q = tiles.clone(memory_format=torch.contiguous_format)
    r = tiles.new_zeros(*tiles.shape[:-2], n, n)
    for k in range(n):
        norm = torch.linalg.vector_norm(q[..., k], dim=-1, keepdim=True)
        q[..., k] /= torch.where(norm == 0, 1.0, norm)
        column, rest = q[..., k : k + 1], q[..., k + 1 :]
        # Not a matrix product, whose precision is the user's to choose; nor is that one faster here.
        row = (column.conj() * rest).sum(-2, keepdim=True)
        rest -= column * row
        r[..., k, k] = norm[..., 0]
        r[..., k : k + 1, k + 1 :] = row
    return q, r


def _fits_in_place(tiles: torch.Tensor, q: torch.Tensor, r: torch.Tensor, *, twice: bool = False) -> bool:
    if twice and tiles.dtype == torch.float64:  # two launches
        return False
    m, n = tiles.shape[-2:]
    return m <= tallest_tile(tiles.dtype) and n <= TILE_COLUMNS


@kernel("neula.kernels.qr.mgs_triton:mgs_into_triton", trial=_tried, when=_fits_in_place)
def mgs_into(tiles: torch.Tensor, q: torch.Tensor, r: torch.Tensor, *, twice: bool = False) -> None:
    """:func:`mgs` with the place for Q and R, and of taller tiles (1024 x 32 in float32).

    Parameters
    ----------
    tiles : Tensor, shape (batch, m, n)
    q : Tensor, shape (batch, m, n)
        Of any strides; may be ``tiles`` itself.
    r : Tensor, shape (batch, n, n)
        Of any strides.
    twice : bool
        Factorize Q once more, so that it becomes orthonormal to the working precision where the tile has full
        rank (*twice is enough*), and return the product of both R.
    """
    if twice:
        first = r.new_empty(r.shape)
        mgs_into(tiles, q, first)
        mgs_into(q, q, r)
        r.copy_(_product(r, first))
        return
    for place, factor in zip((q, r), mgs.reference(tiles), strict=True):
        place.copy_(factor)


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``X Y``, not as a matrix product, whose precision is the user's to choose."""
    total = torch.zeros_like(y)
    for k in range(x.shape[-1]):
        total += x[..., k : k + 1] * y[..., k : k + 1, :]
    return total


def tallest_tile(dtype: torch.dtype) -> int:
    """Rows of the tallest tile that is factorized in one piece."""
    return TALLEST_TILE[dtype.to_real()]
