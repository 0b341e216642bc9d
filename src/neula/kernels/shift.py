"""Multiplication by powers of two: what brings numbers near the ends of the range into its middle.

``x 2^e`` on a GPU in one launch, in CUDA C++.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from neula.kernels.cuda_source import compiled
from neula.kernels.dispatch import kernel, trial
from neula.kernels.products.parts import times_power_of_two

LIMIT = 2044
"""Exponents beyond this shift any float64 number out of its range."""


@trial("The kernel that multiplies by powers of two", "a dozen of the library's take its place")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, 2, device=device, dtype=torch.float64)
    shift.kernel(one, torch.ones(1, 1, 1, device=device, dtype=torch.int32))


def _is_one_launch(x: torch.Tensor, exponents: torch.Tensor) -> bool:
    """Up to three dimensions, not empty, and without a gradient for x."""
    return (
        max(x.ndim, exponents.ndim) <= 3
        and x.dtype == torch.float64
        and 0 not in (*x.shape, *exponents.shape)
        and not (x.requires_grad or forward_ad._current_level >= 0)
    )


@kernel("shift_cuda", trial=_tried, when=_is_one_launch)
def shift(x: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """``x 2^e`` in double precision, for exponents that broadcast with x, exact unless it is subnormal; Inf
    where it overflows. Differentiable.

    In two steps, since ``2^e`` alone may overflow where the product does not. Subnormal numbers are rounded
    in both, to one unit in the last place.
    """
    if x.is_complex():  # products of complex numbers would make NaN of Inf
        return torch.view_as_complex(shift(torch.view_as_real(x.resolve_conj()), exponents[..., None]))
    return times_power_of_two(x.double(), exponents)


THREADS = 256


def shift_cuda(x, exponents):
    if exponents.dtype.itemsize < 4:
        exponents = exponents.int()
    x, exponents = torch.broadcast_tensors(x, exponents)
    found = out = torch.empty_like(x)
    while x.ndim < 3:
        x, exponents, out = x[None], exponents[None], out[None]
    # In the order in which the result lies in memory, the last index runs fastest.
    order = sorted(range(3), key=out.stride, reverse=True)
    strides = (tensor.stride(i) for tensor in (x, exponents, out) for i in order)
    _, *sizes = (x.shape[i] for i in order)
    kernel = compiled("shift", "shift", x.device)
    arguments = [x, exponents, out, x.numel(), *sizes, *strides, exponents.itemsize, LIMIT]
    kernel((-(-x.numel() // THREADS), 1, 1), (THREADS, 1, 1), arguments)
    return found
