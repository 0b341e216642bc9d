"""LU factorization of a small block without pivoting, and of panels with the inverses of its triangles.

Panels are solved with these inverses: products are what is fast.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, runs, trial
from neula.kernels.precision import exact_matmul
from neula.kernels.triangular_inverse import triangular_inverses

LEAF = 16
"""Columns at which the recursion of the reference stops."""

WIDTH = 128
"""Inner panels that the kernels have."""


def lu_unpivoted(block: torch.Tensor) -> torch.Tensor:
    """Overwrite a square block with its factors: U, and L below the diagonal.

    Parameters
    ----------
    block : Tensor, shape (n, n)
        float32 or float64, of any strides.

    Returns
    -------
    Tensor, shape (n, n)
        ``block``. It never waits for the device: a zero pivot stays on the diagonal, and what is divided by
        it is NaN or Inf.

    Examples
    --------
    >>> import torch
    >>> lu_unpivoted(torch.tensor([[2.0, 4.0], [1.0, 5.0]]))
    tensor([[2.0000, 4.0000],
            [0.5000, 3.0000]])
    """
    if not block.is_cuda:
        return lu_unpivoted_reference(block)
    if block.T.is_contiguous():  # as the library has it: in its place
        pivots, info = (block.new_empty(shape, dtype=torch.int32) for shape in (len(block), ()))
        torch.linalg.lu_factor_ex(block, pivot=False, out=(block, pivots, info))
        return block
    return block.copy_(torch.linalg.lu_factor_ex(block, pivot=False).LU)


def lu_unpivoted_reference(block: torch.Tensor) -> torch.Tensor:
    """:func:`lu_unpivoted` in plain torch, on any device: recursive down to :data:`LEAF` columns."""
    n = block.shape[0]
    if n <= LEAF:
        for j in range(n - 1):
            column = block[j + 1 :, j]
            column /= block[j, j].clone()
            block[j + 1 :, j + 1 :].addr_(column, block[j, j + 1 :], alpha=-1)
        return block
    k = n // 2
    lu_unpivoted_reference(block[:k, :k])
    factors, right, below = block[:k, :k], block[:k, k:], block[k:, :k]
    right.copy_(torch.linalg.solve_triangular(factors, right, upper=False, unitriangular=True))
    below.copy_(torch.linalg.solve_triangular(factors, below, upper=True, left=False))
    # In double: no switch for float32 products has a say.
    wide = torch.promote_types(block.dtype, torch.float64)
    block[k:, k:] -= (below.to(wide) @ right.to(wide)).to(block.dtype)
    lu_unpivoted_reference(block[k:, k:])
    return block


@trial("The kernels for blocks of LU", "many calls of the library take their place, several times slower")
def _tried(device: torch.device) -> None:
    block = torch.eye(WIDTH + 1, dtype=torch.float16, device=device)
    solve_beside.kernel(block, WIDTH, *factor_block.kernel(block[:WIDTH, :WIDTH], WIDTH))


def kernels_take(dtype: torch.dtype, device: torch.device, width: int) -> bool:
    """Whether :func:`factor_block` and :func:`solve_beside` have kernels for such a matrix and panel."""
    return dtype.itemsize == 2 and width == WIDTH and runs(factor_block, device)


@kernel(
    "neula.kernels.lu.lu_block_cuda:factor_diagonal_cuda",
    trial=_tried,
    when=lambda work, out, *_: out.dtype.itemsize == 2 and len(work) == WIDTH,
)
def factor_diagonal(
    work: torch.Tensor, out: torch.Tensor, l_inverse: torch.Tensor, u_inverse: torch.Tensor
) -> None:
    """Factors of one block, and their inverses, without synchronizing.

    Parameters
    ----------
    work : Tensor, shape (width, width)
        float32, row-major: the block, bordered by an identity. It may be overwritten.
    out : Tensor, shape (n, n)
        Of a low format, of any strides: U, and L below the diagonal, take its place.
    l_inverse, u_inverse : Tensor, shape (width, width)
        float32, column-major: room for the inverses.
    """
    n = len(out)
    factors = lu_unpivoted_reference(work)
    out.copy_(factors[:n, :n])
    for inverse, found in zip((l_inverse, u_inverse), triangular_inverses(factors), strict=True):
        inverse.copy_(found)


@kernel(
    "neula.kernels.lu.lu_block_triton:factor_block_triton",
    trial=_tried,
    when=lambda block, width: block.dtype.itemsize == 2 and width == WIDTH,
)
def factor_block(block: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Overwrite a block with its factors, by inner panels in float32 (Lopez and Mary, Algorithm 5.1).

    Parameters
    ----------
    block : Tensor, shape (r, r)
        Of a low format, of any strides: U, and L below the diagonal, take its place.
    width : int
        Of the inner panels.

    Returns
    -------
    l_inverses, u_inverses : Tensor, shape (ceil(r / width), width, width)
        float32: inverses of the triangles on the diagonal, before they were rounded. Where r is no multiple
        of the width, the last ones are bordered by an identity.
    """
    r = block.shape[0]
    inverses = block.new_empty(2, -(-r // width), width, width, dtype=torch.float32)
    for start in range(0, r, width):
        k, done, rest = slice(start, start + width), slice(0, start), slice(start + width, None)
        work = torch.eye(width, dtype=torch.float32, device=block.device)
        diagonal, (l_inverse, u_inverse) = block[k, k], inverses[:, start // width]
        n = len(diagonal)
        work[:n, :n] = diagonal.float() - _product(block[k, done], block[done, k])
        below = block[rest, k].float() - _product(block[rest, done], block[done, k])
        right = block[k, rest].float() - _product(block[k, done], block[done, rest])
        factor_diagonal.reference(work, diagonal, l_inverse, u_inverse)
        block[rest, k] = exact_matmul(below, u_inverse[:n, :n]).to(block.dtype)
        block[k, rest] = exact_matmul(l_inverse[:n, :n], right).to(block.dtype)
    return inverses[0], inverses[1]


@kernel(
    "neula.kernels.lu.lu_block_triton:solve_upper_triton",
    trial=_tried,
    when=lambda b, upper, inverses: (
        b.numel() > 0 and b.dtype.itemsize == 2 and inverses.shape[-1] in (32, WIDTH)
    ),
)
def solve_upper(b: torch.Tensor, upper: torch.Tensor, inverses: torch.Tensor) -> torch.Tensor:
    """``X U = B`` in place; with ``b.T``, ``lower.T`` and ``l_inverses.mT`` it is ``L X = B``.

    Parameters
    ----------
    b : Tensor, shape (m, r)
        Of a low format, of any strides.
    upper : Tensor, shape (r, r)
        In the same format; only what is above the blocks on the diagonal is read.
    inverses : Tensor, shape (ceil(r / width), width, width)
        Of these blocks, from :func:`factor_block`; on a GPU a kernel takes 32 or :data:`WIDTH` columns.

    Returns
    -------
    Tensor, shape (m, r)
        ``b``.
    """
    if b.numel() == 0:
        return b
    for index, columns in enumerate(b.split(inverses.shape[-1], 1)):
        start, n = index * inverses.shape[-1], columns.shape[1]
        rest = columns.float() - _product(b[:, :start], upper[:start, start : start + n])
        columns.copy_(exact_matmul(rest, inverses[index, :n, :n]))
    return b


@kernel(
    "neula.kernels.lu.lu_block_triton:solve_beside_triton",
    trial=_tried,
    when=lambda a, r, l_inverses, u_inverses: (
        r < len(a) and a.dtype.itemsize == 2 and l_inverses.shape[-1] == WIDTH
    ),
)
def solve_beside(a: torch.Tensor, r: int, l_inverses: torch.Tensor, u_inverses: torch.Tensor) -> torch.Tensor:
    """``X U = B`` below a block that is factorized, and ``L X = B`` to the right of it, in place.

    Parameters
    ----------
    a : Tensor, shape (n, n)
        Of a low format, of any strides: L and U of the leading block, and what lies beside it.
    r : int
        Order of that block.
    l_inverses, u_inverses : Tensor, shape (ceil(r / width), width, width)
        From :func:`factor_block`.

    Returns
    -------
    Tensor, shape (n, n)
        ``a``.
    """
    factors, below, right = a[:r, :r], a[r:, :r], a[:r, r:]
    solve_upper.reference(below, factors, u_inverses)
    solve_upper.reference(right.T, factors.T, l_inverses.mT)
    return a


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return exact_matmul(a.float(), b.float())
