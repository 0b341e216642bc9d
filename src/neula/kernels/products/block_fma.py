"""Matrix products as the matrix units of GPUs sum them, bit by bit.

A unit adds ``block`` products and the running sum at a time (a block fused multiply-add). It aligns them to
the largest exponent among them, cuts off what is further right than the bits that it keeps, adds what is left
exactly, and truncates the sum to the 24 bits of fp32. The exponent of a product is the sum of those of its
factors: products are not normalized before they are aligned.

On a CPU the compiled core computes these sums, on a GPU a Triton kernel, which goes through the products that
are added at a time twice: for the largest exponent, then for the sum. The version in plain torch, which moves
every product through memory, is their reference.
"""

from __future__ import annotations

import math

import torch

from neula.kernels.core import core
from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div
from neula.kernels.triton_source import jit, tl

SINGLE = 24
"""Bits of a significand of fp32."""
TILE = 8
"""Columns of B that the compiled kernel has together."""
PRODUCTS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Products that torch makes at a time: what a cache holds, and what fills a GPU."""
SMALLEST = {torch.float32: 2.0**-100, torch.float64: 2.0**-900}
"""Keeps the last bit that alignment leaves from being zero where all products are."""
EACH = 1 << 18
"""Products from which on another thread is worth its start."""


def block_fma_product(
    a: torch.Tensor, b: torch.Tensor, *, block: int, extra_bits: int, min_exponent: int
) -> torch.Tensor:
    """``A B``, float64 numbers of fp32, summed as a matrix unit does, from zero; subnormal numbers of fp32
    are not truncated.

    A and B are float32 in the range of fp16, or float64: numbers whose products have at most 24 bits.
    ``block`` products are added at a time, with ``extra_bits`` of aligned significands beyond the 24 of fp32.
    Subnormal numbers of the operands' format have its ``min_exponent``, too.

    Examples
    --------
    Alignment to 1 cuts 2^-24 off unless the unit keeps another bit:

    >>> a, b = torch.tensor([[1.0, 2.0**-12]]), torch.tensor([[1.0], [-(2.0**-12)]])
    >>> for bits in (0, 1):
    ...     found = block_fma_product(a, b, block=2, extra_bits=bits, min_exponent=-14)
    ...     print(1 - float(found) == bits * 2.0**-24)
    True
    True
    """
    ulp = 2.0 ** (1 - SINGLE - extra_bits)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    compute = truncated_sums if a.device.type != "cpu" or core() is None else _compiled
    found = compute(a, b, block, ulp, min_exponent)
    lost = ~(found.isfinite() & _finite(a, -1) & _finite(b, -2))
    # Products with infinite operands and sums that overflow are those of any arithmetic.
    return torch.where(lost, a.double() @ b.double(), found) if bool(lost.any()) else found


def _finite(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Whether all numbers of a row (-1) or a column (-2) are finite."""
    return x.isfinite().all(dim, keepdim=True)


def _powers_of(x: torch.Tensor, min_exponent: int | None = None) -> torch.Tensor:
    """Largest power of two in each number, at least that of the smallest exponent; 0 for 0."""
    bits, mask = (torch.int64, 0x7FF << 52) if x.dtype == torch.float64 else (torch.int32, 0xFF << 23)
    powers = (x.contiguous().view(bits) & mask).view(x.dtype)
    if min_exponent is None:
        return powers
    return torch.where(x == 0, 0.0, powers.clamp_min(2.0**min_exponent))


def _compiled(a: torch.Tensor, b: torch.Tensor, block: int, ulp: float, min_exponent: int) -> torch.Tensor:
    (*batch, m, k), n = a.shape, b.shape[-1]
    count, whole, tiles = math.prod(batch), -(-k // block) * block, -(-n // TILE)
    # Zeros as the last products of the last block change nothing.
    left = a.new_zeros(count, m, whole, dtype=torch.float64)
    left[..., :k] = a.reshape(count, m, k)
    right = b.new_zeros(count, whole, tiles * TILE, dtype=torch.float64)
    right[:, :k, :n] = b.reshape(count, k, n)
    right = right.view(count, whole, tiles, TILE).transpose(1, 2)
    both = (torch.stack((x, _powers_of(x, min_exponent))).numpy() for x in (left, right.contiguous()))
    a_pair, b_pair = both
    c = left.new_empty(count, tiles, m, TILE)
    threads = max(1, min(torch.get_num_threads(), c.numel() * whole // EACH))
    compiled = core()
    assert compiled is not None
    compiled.block_fma(a_pair, b_pair, c.numpy(), block, ulp, threads)
    return c.transpose(1, 2).reshape(*batch, m, tiles * TILE)[..., :n]


@trial("The kernel that emulates matrix units", "plain torch takes its place, much slower")
def _tried(device: torch.device) -> None:
    ones = torch.ones(1, 2, 2, dtype=torch.float32, device=device)
    truncated_sums.kernel(ones, ones, 2, 2.0**-24, -14)


@kernel("truncated_sums_triton", trial=_tried)
def truncated_sums(
    a: torch.Tensor, b: torch.Tensor, block: int, ulp: float, min_exponent: int
) -> torch.Tensor:
    """:func:`block_fma_product` of finite numbers; ``ulp`` is the last bit of an aligned 1."""
    rows = max(1, PRODUCTS[a.device.type] // max(1, block * b.shape[-1] * math.prod(b.shape[:-2])))
    powers = _powers_of(b, min_exponent)
    parts = [_some_rows(part, b, powers, block, ulp, min_exponent) for part in a.split(rows, -2)]
    return torch.cat(parts, -2) if parts else a.new_zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float64)


def _some_rows(
    a: torch.Tensor, b: torch.Tensor, b_powers: torch.Tensor, block: int, ulp: float, min_exponent: int
) -> torch.Tensor:
    total = a.new_zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float64)
    a_powers = _powers_of(a, min_exponent)
    for k in range(0, a.shape[-1], block):
        run = slice(k, k + block)
        largest = (a_powers[..., run, None] * b_powers[..., None, run, :]).amax(-2)
        quantum = torch.maximum(largest.double(), _powers_of(total)).mul_(ulp).clamp_min_(SMALLEST[a.dtype])
        products = a[..., run, None] * b[..., None, run, :]
        products.mul_(quantum.reciprocal().to(a.dtype).unsqueeze(-2)).trunc_()
        total.div_(quantum).trunc_().add_(products.sum(-2, dtype=torch.float64)).mul_(quantum)
        total = (total.view(torch.int64) & ~((1 << 29) - 1)).view(torch.float64)
    return total


ROWS, COLUMNS, WARPS = 32, 64, 4
"""Tile of a thread block: 16 elements a thread, whose sums take 100 of its registers."""


def truncated_sums_triton(a, b, block, ulp, min_exponent):
    (*batch, m, k), n = a.shape, b.shape[-1]
    total = a.new_zeros((*batch, m, n), dtype=torch.float64)
    if total.numel() * k:
        x, y = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (a, b))
        _truncated[(ceil_div(m, ROWS), ceil_div(n, COLUMNS), len(x))](
            *(x, y, total, m, n, k, block, *x.stride(), *y.stride()),
            *(ulp, 2.0**min_exponent, SMALLEST[a.dtype], ROWS, COLUMNS),
            num_warps=WARPS,
        )
    return total


@jit
def _powers(x, LEAST: tl.constexpr):
    """Largest power of two in each number, at least that of the smallest exponent; 0 for 0."""
    if x.dtype == tl.float64:
        power = (x.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(tl.float64, bitcast=True)
    else:
        power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(x == 0.0, 0.0, tl.maximum(power, LEAST))


@jit
def _whole(x):
    """The integer part, toward zero, which is below ``2^31`` for single precision."""
    if x.dtype == tl.float64:
        return x.to(tl.int64)
    return x.to(tl.int32).to(tl.int64)


@jit(do_not_specialize=["m", "n", "k", "block"])
def _truncated(
    a, b, c, m, n, k, block,
    a_batch, a_row, a_column, b_batch, b_row, b_column,
    ULP: tl.constexpr, LEAST: tl.constexpr, SMALLEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Align the products of a block and the sum, add what is left of them, truncate."""
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    left, right = a + batch * a_batch + i * a_row, b + batch * b_batch + j * b_column
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    for first in range(0, k, block):
        last = tl.minimum(first + block, k)
        largest = tl.zeros((ROWS, COLUMNS), a.dtype.element_ty)
        for term in range(first, last):
            x = _powers(tl.load(left + term * a_column, mask=i < m, other=0.0), LEAST)
            y = _powers(tl.load(right + term * b_row, mask=j < n, other=0.0), LEAST)
            largest = tl.maximum(largest, x[:, None] * y[None, :])
        power = (total.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(tl.float64, bitcast=True)
        quantum = tl.maximum(tl.maximum(largest.to(tl.float64), power) * ULP, SMALLEST)
        # 2^-e of 2^e, by its bits: a division takes longer than a block of products.
        inverse = (0x7FE0000000000000 - quantum.to(tl.int64, bitcast=True)).to(tl.float64, bitcast=True)
        scale = inverse.to(a.dtype.element_ty)
        whole = _whole(total * inverse)
        for term in range(first, last):
            x = tl.load(left + term * a_column, mask=i < m, other=0.0)
            y = tl.load(right + term * b_row, mask=j < n, other=0.0)
            whole += _whole(x[:, None] * y[None, :] * scale)
        total = whole.to(tl.float64) * quantum
        total = (total.to(tl.int64, bitcast=True) & -536870912).to(tl.float64, bitcast=True)
    place = c + (batch * m + i[:, None]) * n + j[None, :]
    tl.store(place, total, mask=(i < m)[:, None] & (j < n)[None, :])
