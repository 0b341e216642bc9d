"""Products of float32 matrices on units that multiply narrower numbers, with corrections.

Ootomo and Yokota, "TSQR on TensorCores with error correction" (2021): an operand is the sum of a number of
the low format and a remainder, which is rounded to the low format as well, and the product of the two
remainders is dropped. Two things are added here, without which the result is not as accurate as a float32
product:

- *Range.* Rows of A and columns of B are scaled by powers of two so that their largest elements lie just
  below what the format holds, which leaves the most room for elements that are small compared with them.
- *Rounding.* Tensor cores truncate their sums to float32. Products of leading parts are therefore summed on
  the unit in short runs only, each from zero, and the runs are added to each other in float32, rounded to
  nearest. The corrections are smaller by a factor of ``2^11``, and so are the errors of summing them: they
  need no runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.products.parts import SCHEMES, Scheme, split_reference, unbalanced

Total = Callable[[torch.Tensor], object]
"""Adds to a product, in place, what rows that are elsewhere contribute to it."""

RUN = 64
"""Products that are summed on the unit before they are added outside."""

GRAM_COLUMNS = 256
"""Columns of a Gram matrix that plain torch multiplies at a time."""


@trial("The kernel for products", "slower products take its place")
def _tried(device: torch.device) -> None:
    ones = torch.ones(16, 16, dtype=torch.float32, device=device)
    corrected_gemm.kernel(ones, ones, SCHEMES["fp16_cor"])


@kernel(
    "neula.kernels.products.gemm_triton:gemm_triton",
    trial=_tried,
    when=lambda a, b, *_, **__: 0 not in (*a.shape, *b.shape),
)
def corrected_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scheme: Scheme = SCHEMES["fp16_cor"],
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: torch.Tensor | None = None,
    bound: float | torch.Tensor | None = None,
    triangular: bool = False,
) -> torch.Tensor:
    """``C = alpha A B + beta C`` in parts of a low format, about as accurate as a float32 product.

    On a GPU the Triton kernels compute it, elsewhere :func:`corrected_gemm_reference`.

    Parameters
    ----------
    a : Tensor, shape (m, k)
    b : Tensor, shape (k, n)
        float32, of any strides; not modified. An entry of C that depends on NaN or Inf is NaN or Inf.
    scheme : Scheme
    alpha, beta : float
        ``c`` is not read if ``beta`` is zero.
    c : Tensor, shape (m, n), optional
        float32, of any strides, written in place. It may overlap ``a`` and ``b``.
    bound : float or Tensor, optional
        Largest magnitude in ``a``, where it is known: a kernel then need not look for it in every row.
    triangular : bool
        Whether ``b`` is upper triangular: what a kernel then leaves out is nearly half of the products.

    Returns
    -------
    Tensor, shape (m, n)
        ``c``, or a new contiguous matrix.

    Examples
    --------
    >>> import torch
    >>> a = torch.tensor([[1 + 2.0**-20, 2.0**-25], [3e6, 4e6]])
    >>> bool((corrected_gemm(a, torch.eye(2)) == a).all())
    True
    """
    return corrected_gemm_reference(a, b, scheme, alpha=alpha, beta=beta, c=c)


@kernel(
    "neula.kernels.products.gemm_triton:corrected_projection_triton",
    trial=_tried,
    when=lambda q, a, *_, **__: 0 not in (*q.shape, *a.shape),
)
def corrected_projection(
    q: torch.Tensor,
    a: torch.Tensor,
    r: torch.Tensor,
    total: Total | None = None,
    *,
    bound: float,
    columns: int,
    scheme: Scheme = SCHEMES["fp16_cor"],
) -> None:
    """``R = Q^T A``, then ``A = A - Q R``, by :func:`corrected_gemm`; a kernel splits Q once for all of it.

    Parameters
    ----------
    q : Tensor, shape (m, k)
        float32, as all others, of any strides, as all others.
    a : Tensor, shape (m, n)
        Overwritten.
    r : Tensor, shape (k, n)
        Overwritten.
    total : callable, optional
        Called with R before A is changed, where Q and A are some rows of theirs.
    bound : float
        Largest magnitude in ``q``.
    columns : int
        Of A that are dealt with at a time, since their parts take as much memory as they do.
    scheme : Scheme

    Examples
    --------
    >>> import torch
    >>> a, r = torch.tensor([[3.0], [4.0]]), torch.empty(1, 1)
    >>> corrected_projection(torch.tensor([[1.0], [0.0]]), a, r, bound=1.0, columns=1)
    >>> a.T, r
    (tensor([[0., 4.]]), tensor([[3.]]))
    """
    for part, r_part in zip(a.split(columns, 1), r.split(columns, 1), strict=True):
        corrected_gemm_reference(q.T, part, scheme, c=r_part)
        if total is not None:
            total(r_part)
        corrected_gemm_reference(q, r_part, scheme, alpha=-1.0, beta=1.0, c=part)


@kernel(
    "neula.kernels.products.gemm_triton:gram_triton",
    trial=_tried,
    when=lambda a, *_, **__: 0 not in a.shape,
)
def corrected_gram(
    a: torch.Tensor, scheme: Scheme = SCHEMES["fp16_cor"], *, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """The lower triangle of ``A^T A`` by :func:`corrected_gemm`; what is above it means nothing.

    A kernel splits A once for all of it, which for a tall matrix takes as long as a third of the products,
    and leaves out tiles above the diagonal.

    Parameters
    ----------
    a : Tensor, shape (m, n)
        float32, of any strides; float64 with scales.
    scheme : Scheme
    scales : Tensor, shape (n,), optional
        Powers of two that make its columns at most 1: the Gram matrix is that of the scaled columns. A kernel
        looks for no largest element then, and elements beyond 4 overflow.

    Returns
    -------
    Tensor, shape (n, n)
        Column-major.

    Examples
    --------
    >>> import torch
    >>> corrected_gram(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tril()
    tensor([[10.,  0.],
            [14., 20.]])
    """
    a = a if scales is None else (a * scales).float()
    g = empty_gram(a)
    for start in range(0, a.shape[1], GRAM_COLUMNS):
        k = slice(start, start + GRAM_COLUMNS)
        corrected_gemm_reference(a[:, start:].T, a[:, k], scheme, c=g[start:, k])
    return g


def empty_gram(a: torch.Tensor) -> torch.Tensor:
    """Zeros in the shape of ``A^T A``, column-major."""
    return torch.zeros(a.shape[1], a.shape[1], dtype=torch.float32, device=a.device).T


def corrected_gemm_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scheme: Scheme = SCHEMES["fp16_cor"],
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: torch.Tensor | None = None,
    run: int = RUN,
) -> torch.Tensor:
    """:func:`corrected_gemm` in plain torch, on any device: a unit that sums ``run`` products exactly."""
    a_parts, a_exponents = split_reference(a, scheme)
    b_parts, b_exponents = split_reference(b.mT, scheme)
    total = product_of_parts(a_parts, b_parts, scheme, run)
    return combine(unbalanced(total, a_exponents, b_exponents), alpha, beta, c)


def product_of_parts(
    a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], scheme: Scheme, run: int = RUN
) -> torch.Tensor:
    """``A B^T`` of matrices in parts, float32, as a unit computes it that sums ``run`` products exactly."""
    total = torch.zeros(len(a[0]), len(b[0]), dtype=torch.float32, device=a[0].device)
    # In double: exact up to 2^-53, and no switch for float32 products has a say.
    for x, y in zip(a[0].split(run, 1), b[0].split(run, 1), strict=True):
        total += (x.double() @ y.double().mT).float()
    corrections = (a[i].double() @ b[j].double().mT for i, j in scheme.corrections)
    return total + (sum(corrections, total.new_zeros(())) * 2.0**-scheme.shift).float()


def combine(product: torch.Tensor, alpha: float, beta: float, c: torch.Tensor | None) -> torch.Tensor:
    """``alpha product + beta c``, written into ``c`` where there is one; it is not read if beta is zero."""
    result = product if alpha == 1.0 else alpha * product
    if c is None:
        return result
    return c.copy_(result if beta == 0.0 else result + beta * c.to(result.dtype))
