"""Largest magnitudes, and sizes of the rows and columns of matrices, on a CPU by one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 1 << 16
"""Elements whose magnitudes stay in a cache while they are reduced in several ways."""

MODERATE = 2.0**200
"""Numbers up to this, and down to its reciprocal, have squares and quotients that float64 holds."""

SQUARABLE_EXPONENT = 400
SQUARABLE = 2.0**SQUARABLE_EXPONENT
"""Numbers up to this, and down to its reciprocal, have sums of squares that float64 holds."""


def largest_magnitude(x: torch.Tensor, dim: int | tuple[int, ...], *, keepdim: bool = False) -> torch.Tensor:
    """``max |x|`` along some dimensions; NaN and Inf come through.

    Of complex numbers it is that of their parts, which does not overflow. The norm in the library is one
    launch on a GPU, and on a CPU takes five times as long as two reductions that its vector units know (1000
    x 1000 on an AMD EPYC: 3.8 ms and 0.7).
    """
    if x.is_complex():
        dims = [d % x.ndim for d in ((dim,) if isinstance(dim, int) else dim)]
        found = largest_magnitude(torch.view_as_real(x.resolve_conj()), (*dims, x.ndim), keepdim=keepdim)
        return found.squeeze(-1) if keepdim else found
    if x.is_cuda:
        return torch.linalg.vector_norm(x, torch.inf, dim=dim, keepdim=keepdim)
    return torch.maximum(x.amax(dim, keepdim=keepdim), x.amin(dim, keepdim=keepdim).neg_())


def squares(x: torch.Tensor) -> torch.Tensor:
    """``|x|^2`` of each element, real."""
    return x.square() if not x.is_complex() else x.real.square().addcmul_(x.imag, x.imag)


def two_norms(x: torch.Tensor, *dims: int, keepdim: bool = False) -> torch.Tensor:
    """2-norms along some dimensions, by default all; of complex numbers as of their parts, for which the
    library on a CPU takes a third to a fortieth of the time.
    """
    of = tuple(dim % x.ndim for dim in dims or range(x.ndim)) if x.is_complex() else ()
    if all(x.shape[dim] == 1 for dim in of):  # of real numbers, and of one, which is not squared
        return torch.linalg.vector_norm(x, dim=dims or None, keepdim=keepdim)
    parts = torch.view_as_real(x.conj() if x.is_conj() else x)
    found = torch.linalg.vector_norm(parts, dim=(*of, x.ndim), keepdim=keepdim)
    return found.squeeze(-1) if keepdim else found


class Magnitudes(NamedTuple):
    """Sizes of the rows and the columns of matrices."""

    rows: torch.Tensor  # shape (batch, m, 1): largest magnitudes of rows
    columns: torch.Tensor  # shape (batch, 1, n): and of columns
    sums: torch.Tensor  # shape (batch, m): 1-norms of rows
    # Shape (batch, n, 1): 2-norms of columns; infinite or zero where squares overflow or underflow.
    norms: torch.Tensor


class Ends(NamedTuple):
    """Sizes of systems, and of their largest and smallest rows and columns."""

    of_a: torch.Tensor  # shape (batch, 1): ||A|| in the infinity norm
    of_b: torch.Tensor  # shape (batch, k): largest magnitudes
    frobenius: torch.Tensor  # shape (batch,)
    # Shape (6,): the smallest of all rows and of all columns, the largest of them, the smallest column of b
    # that is not zero (1 where all are), and the largest one (where one is zero at least 1).
    ends: torch.Tensor


def magnitudes(a: torch.Tensor) -> Magnitudes:
    """Sizes of rows and columns of matrices (batch, m, n), by one pass on a CPU."""
    if a.is_cuda:
        norm = torch.linalg.vector_norm
        rows, columns = (norm(a, torch.inf, dim=dim, keepdim=True) for dim in (2, 1))
        return Magnitudes(rows, columns, norm(a, 1, dim=2), norm(a, dim=1)[..., None])
    height = max(1, BLOCK // max(1, len(a) * a.shape[2]))
    rows, columns, sums, squares = zip(*map(_of_block, a.split(height, 1)), strict=True)
    if len(rows) == 1:
        return Magnitudes(rows[0], columns[0], sums[0], squares[0].sqrt_()[..., None])
    return Magnitudes(
        torch.cat(rows, 1),
        torch.cat(columns, 1).amax(1, keepdim=True),
        torch.cat(sums, 1),
        torch.stack(squares).sum(0).sqrt_()[..., None],
    )


def _of_block(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
    size = a.abs()
    return size.amax(2, keepdim=True), size.amax(1, keepdim=True), size.sum(2), size.square_().sum(1)


def ends_of(sizes: Magnitudes, b: torch.Tensor) -> Ends:
    """Magnitudes that decide whether systems with square matrices need scaling, for B (batch, n, k)."""
    of_b = largest_magnitude(b, 1)
    ends = torch.stack([sizes.rows.flatten(), sizes.columns.flatten()]).aminmax(dim=1)
    ends_of_b = of_b.masked_fill(of_b == 0, 1.0).aminmax()
    return Ends(
        sizes.sums.amax(1)[:, None],
        of_b,
        torch.linalg.vector_norm(sizes.norms, dim=(1, 2)),
        torch.cat([x.reshape(-1) for x in (*ends, *ends_of_b)]),
    )
