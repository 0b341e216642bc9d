"""Copies from row-major to column-major order: users have the one, factorizations work in the other."""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial

SMALLEST = 1 << 16
"""Elements below which the library's copy takes no longer than a launch."""


@trial("The kernels of transposed copies", "the library's take three times as long")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, device=device, dtype=torch.float64)
    transposed_copy.kernel(one.half(), one, one[0])
    transpose_in_place.kernel(one)


def _changes_the_order(out: torch.Tensor, a: torch.Tensor, scales: torch.Tensor | None = None) -> bool:
    """Or scales columns, or widens numbers, in a matrix on a GPU that is large enough."""
    transposed = a.ndim == 2 and a.stride(0) > a.stride(1) and out.stride(0) < out.stride(1)
    widened = a.ndim == 2 and a.itemsize < out.itemsize
    return (transposed or widened or scales is not None) and a.is_cuda and a.numel() >= SMALLEST


@kernel("neula.kernels.transposed_copy_triton:transposed_copy_triton", trial=_tried, when=_changes_the_order)
def transposed_copy(out: torch.Tensor, a: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """``out = a diag(scales)`` in the dtype of ``out``, on a GPU by a Triton kernel.

    Unless neither the order changes, nor columns are scaled or numbers widened, what the library does at full
    speed.

    Parameters
    ----------
    out, a : Tensor, shape (m, n)
        Of any floating dtypes and strides; ``out`` is overwritten, and may be ``a``.
    scales : Tensor, shape (n,), optional
        Products are rounded to the wider of its dtype and that of ``a``, then to that of ``out``.

    Returns
    -------
    Tensor, shape (m, n)
        ``out``.

    Examples
    --------
    >>> import torch
    >>> transposed_copy(torch.empty(2, 2).T, torch.ones(2, 2), torch.tensor([1.0, 2.0]))
    tensor([[1., 2.],
            [1., 2.]])
    """
    return out.copy_(a) if scales is None else torch.mul(a, scales, out=out)


@kernel("neula.kernels.transposed_copy_triton:transpose_in_place_triton", trial=_tried)
def transpose_in_place(a: torch.Tensor) -> torch.Tensor:
    """Exchange ``a[i, j]`` and ``a[j, i]``: from column-major to row-major order, and back.

    Parameters
    ----------
    a : Tensor, shape (n, n)
        Of any floating dtype and strides; overwritten.

    Returns
    -------
    Tensor, shape (n, n)
        The former ``a`` transposed: ``a.T``.

    Examples
    --------
    >>> import torch
    >>> a = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> transpose_in_place(a)
    tensor([[1., 2.],
            [3., 4.]])
    >>> a
    tensor([[1., 3.],
            [2., 4.]])
    """
    a.copy_(a.T.clone())
    return a.T
