"""Residual and gradient of a least-squares problem in twice the working precision, in one pass over A."""

from __future__ import annotations

import torch

from neula.kernels.core import core, empty
from neula.kernels.dispatch import kernel, trial
from neula.kernels.doubled.doubled import (
    Doubled,
    Pair,
    as_complex,
    as_real,
    of_adjoint,
    real_vectors,
    two_sum,
)
from neula.kernels.few_vectors.normal_product import ROWS, fits
from neula.kernels.few_vectors.one_pass_host import EACH

# 1000000 rows of 200 columns take 0.72 ms on an H200, and 1.7 ms by two doubled products.
COLUMNS = 2048
"""Up to how many columns rows fit in the registers of a multiprocessor, with sums and their errors."""


@trial("The kernel of doubled gradients", "A is read twice in its place")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, device=device, dtype=torch.float64)
    doubled_normal.kernel(one, one, one, one)


def _in_one_pass(a: torch.Tensor, x: torch.Tensor, x_low: torch.Tensor, b: torch.Tensor) -> bool:
    m, n = a.shape
    return m >= max(n, ROWS) and fits(n) and n <= COLUMNS and x.shape[1] == 1 and a.stride(1) == 1


@kernel("neula.kernels.doubled.doubled_normal_triton:doubled_normal_triton", trial=_tried, when=_in_one_pass)
def doubled_normal(
    a: torch.Tensor, x: torch.Tensor, x_low: torch.Tensor | None, b: torch.Tensor
) -> tuple[Pair, Pair]:
    """``r = b - A (x + x_low)`` and ``A^H r``, each as a sum of two numbers.

    On a CPU the compiled core takes a tenth of the time of sliced products.

    Parameters
    ----------
    a : Tensor, shape (m, n)
        float64 or complex128, as all others.
    x, x_low : Tensor, shape (n, k)
        Without ``x_low`` it is zero.
    b : Tensor, shape (m, k)

    Returns
    -------
    residual : pair of Tensor, shape (m, k)
    gradient : pair of Tensor, shape (n, k)

    Examples
    --------
    >>> import torch
    >>> third = torch.tensor([[1 / 3]], dtype=torch.float64)
    >>> residual, gradient = doubled_normal(third, 3 * torch.ones_like(third), 0 * third, third**0)
    >>> residual[0].item() * 2**54, gradient[0].item() * 3 * 2**54
    (1.0, 1.0)
    """
    if a.is_complex():
        beside = None if x_low is None else real_vectors(x_low)
        (r, rest), of_r = doubled_normal(as_real(a), real_vectors(x), beside, as_real(b))
        return (as_complex(r), as_complex(rest)), two_sum(*of_adjoint(*of_r))
    if a.is_cpu and a.numel() and core() is not None:
        return _by_core(a, x, x_low, b)
    doubled = Doubled.from_matrix(a[None])
    high, low = doubled.residual(x[None], b[None], None if x_low is None else x_low[None])
    gradient, rest = doubled.transposed_pair(high, low)
    return (high[0], low[0]), (gradient[0], rest[0])


def _by_core(
    a: torch.Tensor, x: torch.Tensor, x_low: torch.Tensor | None, b: torch.Tensor
) -> tuple[Pair, Pair]:
    compiled, (m, n), k = core(), a.shape, x.shape[1]
    assert compiled is not None
    residual, gradient = empty(2, k, m), empty(2, k, n)
    low = None if x_low is None else x_low.mT.contiguous().numpy()
    threads = min(torch.get_num_threads(), a.numel() // EACH) or 1
    right = b.mT.contiguous().numpy()
    written = residual.numpy(), gradient.numpy()
    compiled.doubled_normal(a.numpy(), x.mT.contiguous().numpy(), low, right, *written, threads)
    return (residual[0].mT, residual[1].mT), (gradient[0].mT, gradient[1].mT)
