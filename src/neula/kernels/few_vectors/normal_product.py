"""``A X`` and ``A^T A X`` in one pass over a tall matrix: what an iteration for least squares needs of it."""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.few_vectors.mixed_product import subtract_product
from neula.kernels.few_vectors.one_pass_host import OnePass, pays
from neula.kernels.precision import adjoint_times

COLUMNS = 4096
"""Up to how many columns a few rows fit in the registers of a multiprocessor."""

NARROWEST = 160
"""1000000 rows of 200 columns take 0.49 ms on an H200, and 0.76 ms by two products of cuBLAS."""

ONE_WARP, SEVERAL = 256, 400
"""Rows of up to so many columns are added up in one or two warps, and from so many on by a thread block;
those between are filled up to 512 columns, half of them with nothing."""

ROWS = 4096
"""Rows below which two products of the library take no longer than launches."""

VECTORS = 5
"""More vectors would take more passes, or more registers than there are; fewer beyond a quarter, and half, of
:data:`COLUMNS`."""


@trial("The kernel of normal products", "A is read twice in its place")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, device=device, dtype=torch.float64)
    normal_product.kernel(one, one)


def fits(n: int) -> bool:
    """Whether rows of n columns are neither too short nor too long."""
    return NARROWEST <= n <= ONE_WARP or SEVERAL <= n <= COLUMNS


def vectors_at_once(n: int) -> int:
    """How many vectors the kernel multiplies a matrix of n columns by in one pass."""
    return VECTORS if 4 * n <= COLUMNS else VECTORS - 1 if 2 * n <= COLUMNS else VECTORS // 2


def _in_one_pass(a: torch.Tensor, x: torch.Tensor, b: torch.Tensor | None = None) -> bool:
    (m, n), k = a.shape, x.shape[1]
    in_registers = m >= max(n, ROWS) and fits(n) and 0 < k <= vectors_at_once(n)
    return in_registers and a.dtype == x.dtype == torch.float64 and a.stride(1) == 1


@kernel(
    "neula.kernels.few_vectors.normal_product_triton:normal_product_triton", trial=_tried, when=_in_one_pass
)
def normal_product(
    a: torch.Tensor, x: torch.Tensor, b: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``Y = A X``, or ``Y = B - A X`` where B is given, and ``A^H Y``.

    On a GPU a Triton kernel computes both and reads A once, where A is float64, row-major and tall, on a CPU
    the compiled core does where A is large and float32; elsewhere they are two products.

    Parameters
    ----------
    a : Tensor, shape (m, n)
        In the dtype of the others, or a narrower one.
    x : Tensor, shape (n, k)
    b : Tensor, shape (m, k), optional

    Returns
    -------
    y : Tensor, shape (m, k)
    z : Tensor, shape (n, k)

    Examples
    --------
    >>> import torch
    >>> normal_product(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2, 1))
    (tensor([[3.],
            [7.]]), tensor([[24.],
            [34.]]))
    """
    if a.dtype != x.dtype and pays(a):
        found = OnePass(a.numpy()).residual(None if b is None else b.numpy(), x.numpy())
        return torch.from_numpy(found[0]), torch.from_numpy(found[1])
    y = product(a, x)
    if b is not None:
        y = b - y
    return y, transposed_product(a, y)


def product(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``A X``. MKL takes two thirds of the time where the columns of X are contiguous."""
    if a.dtype != x.dtype and pays(a):
        return torch.from_numpy(OnePass(a.numpy()).times(x.numpy()))
    if a.dtype != x.dtype:
        return subtract_product(a, -x, x.new_zeros(len(a), x.shape[1]))
    return a @ x.T.contiguous().T


@kernel(
    "neula.kernels.few_vectors.normal_product_triton:transposed_product_triton",
    trial=_tried,
    when=_in_one_pass,
)
def transposed_product(a: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``A^H Y``, by the same kernel: cuBLAS takes several times what memory does for tall A.

    ``Y^T A`` reads row-major A along its rows; MKL takes eight times as long for ``A^T Y`` with two columns.

    Parameters
    ----------
    a : Tensor, shape (m, n)
    y : Tensor, shape (m, k)
    """
    if a.dtype != y.dtype and pays(a):
        return torch.from_numpy(OnePass(a.numpy()).transposed_times(y.numpy()))
    if a.dtype != y.dtype:
        return product(a.mH, y)
    if a.is_complex():
        return adjoint_times(a, y)
    return a.T @ y if y.shape[1] == 1 else (y.T @ a).T
