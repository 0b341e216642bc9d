"""``x 2^e`` on a GPU in one launch: each number is read and written once, and exponents are broadcast."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from neula.kernels.shift import LIMIT

BLOCK = 1024


def shift_triton(x: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """:func:`neula.kernels.shift.shift` by the kernel, queued on the current stream."""
    x, exponents = torch.broadcast_tensors(x, exponents)
    found = out = torch.empty_like(x)
    while x.ndim < 3:
        x, exponents, out = x[None], exponents[None], out[None]
    # In the order in which the result lies in memory, the last index runs fastest.
    order = sorted(range(3), key=out.stride, reverse=True)
    strides = (tensor.stride(i) for tensor in (x, exponents, out) for i in order)
    sizes = tuple(x.shape[i] for i in order)
    with torch.cuda.device_of(x):
        grid = (triton.cdiv(x.numel(), BLOCK),)
        _shift_kernel[grid](x, exponents, out, x.numel(), *sizes[1:], *strides, LIMIT, BLOCK)
    return found


# Otherwise it would be compiled anew for every combination of sizes that are 1 or divisible by 16.
@triton.jit(
    do_not_specialize=[
        *("count", "columns", "depth", "x_0", "x_1", "x_2", "e_0", "e_1", "e_2", "out_0", "out_1", "out_2")
    ]
)
def _shift_kernel(
    x, exponents, out, count, columns, depth,
    x_0, x_1, x_2, e_0, e_1, e_2, out_0, out_1, out_2,
    LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    k = place % depth
    j = place // depth % columns
    i = place // depth // columns
    exponent = tl.load(exponents + i * e_0 + j * e_1 + k * e_2, mask=inside, other=0).to(tl.int64)
    exponent = tl.minimum(tl.maximum(exponent, -LIMIT), LIMIT)
    half = exponent >> 1
    shifted = tl.load(x + i * x_0 + j * x_1 + k * x_2, mask=inside, other=0.0) * _power_of_two(half)
    tl.store(out + i * out_0 + j * out_1 + k * out_2, shifted * _power_of_two(exponent - half), mask=inside)


@triton.jit
def _power_of_two(exponent):
    """By its bits, for exponents of normal numbers."""
    return ((exponent + 1023) << 52).to(tl.float64, bitcast=True)
