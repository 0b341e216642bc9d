"""The two passes of Cholesky QR over a tall matrix: its Gram matrix, and its product with a small one.

Both in fp16 with error correction (Ootomo and Yokota, "TSQR on TensorCores with error correction", 2021), so
that they run at the speed of memory, with sums in float32 whose errors do not grow with the number of rows.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial

COLUMNS = (64, 128, 256)
"""Up to how many columns the kernels have a configuration: with more, W does not fit on the chip."""

PANEL_COLUMNS = 128
"""Up to how many columns a block of rows is multiplied at once, and can take the place of what it was."""

_CHUNK = 1 << 22
"""Elements that are converted to float64 at a time."""


@trial("The kernels for tall matrices", "products in float64 take their place")
def _tried(device: torch.device, columns: int) -> None:
    a = torch.eye(columns, dtype=torch.float32, device=device)
    tall_product.kernel(a, tall_gram.kernel(a), a[0].double())


def _fits(a: torch.Tensor, *_: torch.Tensor | None) -> bool:
    return a.dtype == torch.float32 and a.shape[1] <= COLUMNS[-1]


def _width(a: torch.Tensor, *_: torch.Tensor | None) -> int:
    return next(columns for columns in COLUMNS if a.shape[1] <= columns)


@kernel("neula.kernels.qr.tall_gram_triton:tall_gram_triton", trial=_tried, when=_fits, variant=_width)
def tall_gram(a: torch.Tensor) -> torch.Tensor:
    """``A^H A`` as accurate as a float32 product, on a GPU by a Triton kernel, elsewhere in float64.

    Parameters
    ----------
    a : Tensor, shape (m, n), n <= 256
        float32, of any strides. Each column should be of about the same size all along: where elements are
        larger by a factor of 256 than in a sample of some thousand rows, the result may be infinite, and
        where they are smaller by a factor of ``2**20`` they lose bits.

    Returns
    -------
    Tensor, shape (n, n)
        float64, symmetric.

    Examples
    --------
    >>> import torch
    >>> tall_gram(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[10., 14.],
            [14., 20.]], dtype=torch.float64)
    """
    gram = a.new_zeros(a.shape[1], a.shape[1], dtype=torch.promote_types(a.dtype, torch.float64))
    for block in _blocks(a):
        gram += block.mH @ block
    return gram


@kernel("neula.kernels.qr.tall_product_triton:tall_product_triton", trial=_tried, when=_fits, variant=_width)
def tall_product(a: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """``A W`` as accurate as a float32 product, on a GPU by a Triton kernel, elsewhere in float64.

    Parameters
    ----------
    a : Tensor, shape (m, n), n <= 256
        float32, of any strides.
    w : Tensor, shape (n, n)
        float32 or float64, upper triangular: what lies below is not read.
    sizes : Tensor, shape (n,)
        Likewise, at least the largest magnitude of each column of ``a``, best not many times as large: scales
        for the kernel.

    Returns
    -------
    Tensor, shape (m, n)
        float32, contiguous, or column-major like an ``a`` of up to 128 columns. NaN where ``w`` is.
    """
    w = w.to(torch.promote_types(w.dtype, torch.float64)).triu()
    return torch.cat([(block @ w).to(a.dtype) for block in _blocks(a)])


@kernel("neula.kernels.qr.tall_gram_triton:tall_half_gram_triton", trial=_tried, when=_fits, variant=_width)
def half_gram(a: torch.Tensor) -> torch.Tensor:
    """A matrix whose symmetric part is :func:`tall_gram`, all that a Cholesky factorization needs."""
    return tall_gram.reference(a)


@kernel(
    "neula.kernels.qr.tall_product_triton:multiply_panel_triton",
    trial=_tried,
    when=lambda a, *_: _fits(a) and a.shape[1] <= PANEL_COLUMNS and a.stride(0) == 1,
    variant=_width,
)
def multiply_panel(
    a: torch.Tensor, w: torch.Tensor, norms: torch.Tensor, low: torch.Tensor | None = None
) -> None:
    """``A W`` in place of A, as accurate as a float32 product, and rounded to a narrower type in ``low``.

    Parameters
    ----------
    a : Tensor, shape (m, n), n <= 128
        float32, column-major: ``a.stride(0)`` is 1.
    w : Tensor, shape (n, n)
        float32, upper triangular: what lies below is not read.
    norms : Tensor, shape (n,)
        float32, of the columns of ``a``: scales for the kernel.
    low : Tensor, shape (m, n), optional
        float16 or bfloat16, column-major.
    """
    a.copy_(tall_product.reference(a, w, norms))
    if low is not None:
        low.copy_(a)


def _blocks(a: torch.Tensor) -> list[torch.Tensor]:
    wide = torch.promote_types(a.dtype, torch.float64)
    return [block.to(wide) for block in a.split(max(1, _CHUNK // a.shape[1]))]
