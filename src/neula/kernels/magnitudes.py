"""Largest magnitudes, fast on a CPU as well."""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.dispatch import kernel, trial

BLOCK = 1 << 16
"""Elements whose magnitudes stay in a cache while they are reduced in several ways."""

MODERATE = 2.0**200
"""Numbers up to this, and down to its reciprocal, have squares and quotients that float64 holds."""

SQUARABLE_EXPONENT = 400
SQUARABLE = 2.0**SQUARABLE_EXPONENT
"""Numbers up to this, and down to its reciprocal, have sums of squares that float64 holds."""

FEW = 16
"""Right-hand sides at most whose sizes one thread block finds."""


def largest_magnitude(x: torch.Tensor, dim: int | tuple[int, ...], *, keepdim: bool = False) -> torch.Tensor:
    """``max |x|`` along some dimensions; NaN and Inf come through.

    Of complex numbers it is that of their parts, which does not overflow.

    The norm in the library is one launch on a GPU, and on a CPU takes five times as long as two reductions
    that its vector units know (1000 x 1000 on an AMD EPYC: 3.8 ms and 0.7).

    Parameters
    ----------
    x : Tensor
    dim : int or tuple of int
    keepdim : bool

    Examples
    --------
    >>> largest_magnitude(torch.tensor([[1.0, -3.0], [2.0, 0.5]]), 1)
    tensor([3., 2.])
    """
    if x.is_complex():
        dims = [d % x.ndim for d in ((dim,) if isinstance(dim, int) else dim)]
        found = largest_magnitude(torch.view_as_real(x.resolve_conj()), (*dims, x.ndim), keepdim=keepdim)
        return found.squeeze(-1) if keepdim else found
    if x.is_cuda:
        return torch.linalg.vector_norm(x, torch.inf, dim=dim, keepdim=keepdim)
    return torch.maximum(x.amax(dim, keepdim=keepdim), x.amin(dim, keepdim=keepdim).neg_())


def squares(x: torch.Tensor) -> torch.Tensor:
    """``|x|^2`` of each element, real.

    Examples
    --------
    >>> squares(torch.tensor([3.0 + 4.0j]))
    tensor([25.])
    """
    return x.square() if not x.is_complex() else x.real.square().addcmul_(x.imag, x.imag)


def two_norms(x: torch.Tensor, *dims: int) -> torch.Tensor:
    """2-norms along some dimensions; of complex numbers as of their parts, for which the library on a CPU
    takes a fortieth of the time.

    Examples
    --------
    >>> two_norms(torch.tensor([[3.0 + 0j], [4.0j]]), 0)
    tensor([5.])
    """
    if x.is_complex():
        dims = (*(dim % x.ndim for dim in dims), x.ndim)
        x = torch.view_as_real(x.resolve_conj())
    return torch.linalg.vector_norm(x, dim=dims)


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


@trial("The kernels of sizes of rows and columns", "many launches of the library take their place")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, 1, dtype=torch.float64, device=device)
    ends_of.kernel(magnitudes.kernel(one), one)


@kernel(
    "neula.kernels.magnitudes_triton:magnitudes_triton",
    trial=_tried,
    when=lambda a: len(a) == 1 and a.numel() > 0 and a.dtype.itemsize >= 4,
)
def magnitudes(a: torch.Tensor) -> Magnitudes:
    """Sizes of rows and columns, by one pass on a CPU, and of one matrix on a GPU.

    Parameters
    ----------
    a : Tensor, shape (batch, m, n)

    Examples
    --------
    >>> magnitudes(torch.tensor([[[3.0, 0.0], [-4.0, 1.0]]])).norms
    tensor([[[5.],
             [1.]]])
    """
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


def _alone(sizes: Magnitudes, b: torch.Tensor) -> bool:
    single = len(b) == 1 and b.numel() > 0 and b.shape[2] <= FEW
    return single and b.dtype == sizes.sums.dtype == torch.float64 and b.shape[1] == sizes.columns.shape[2]


@kernel("neula.kernels.magnitudes_triton:ends_of_triton", trial=_tried, when=_alone)
def ends_of(sizes: Magnitudes, b: torch.Tensor) -> Ends:
    """Magnitudes that decide whether systems need scaling.

    Parameters
    ----------
    sizes : Magnitudes
        Of square matrices.
    b : Tensor, shape (batch, n, k)

    Examples
    --------
    >>> ones = torch.ones(1, 2, 2).double()
    >>> ends_of(magnitudes(4 * ones), ones).ends.tolist()
    [4.0, 4.0, 4.0, 4.0, 1.0, 1.0]
    """
    of_b = largest_magnitude(b, 1)
    ends = torch.stack([sizes.rows.flatten(), sizes.columns.flatten()]).aminmax(dim=1)
    ends_of_b = of_b.masked_fill(of_b == 0, 1.0).aminmax()
    return Ends(
        sizes.sums.amax(1)[:, None],
        of_b,
        torch.linalg.vector_norm(sizes.norms, dim=(1, 2)),
        torch.cat([x.reshape(-1) for x in (*ends, *ends_of_b)]),
    )
