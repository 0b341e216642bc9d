"""Least-squares problems by the corrected seminormal equations, one program a problem, in one launch.

What is kept in registers is of the size of the Gram matrix; rows of A pass through them in blocks, a dozen
times, and come from a cache. The sums of residuals and gradients carry their rounding errors along
(:mod:`neula.kernels.doubled_triton`).
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from neula.kernels.doubled_triton import add_pairs, product_error, two_sum
from neula.kernels.seminormal import MODERATE, Limits, Seminormal, Square, columns_of

SHORT = 16
"""Rows of the shortest block: what a product on matrix units takes."""

ELEMENTS = 1024
"""Of a block of rows at most, unless it has fewer rows than :data:`SHORT`."""

PER_WARP = 128
"""Elements of a Gram matrix for each warp, up to eight warps."""

REGISTERS = 128
"""Of a thread at most where a problem has a single warp, so that sixteen are under way on a multiprocessor.

On an H200 50000 problems of 16 x 6 take 0.37 ms, and 0.41 with as many registers as the compiler likes.
"""

DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def seminormal_triton(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, limits: Limits, square: Square | None = None
) -> Seminormal:
    """:func:`neula.kernels.seminormal.solved` by the kernel, queued on the current stream."""
    # Triton 3.6 cannot lower products in double precision of what was loaded in half precision.
    a, b = (x.float() if x.dtype.itemsize < 4 else x for x in (a, b))
    (count, m, n), k = a.shape, b.shape[2]
    found = Seminormal.empty(count, n, k, a.device)
    columns = columns_of(n)
    rows = max(SHORT, min(triton.next_power_of_2(m), ELEMENTS // columns))
    warps = max(1, min(8, columns * columns // PER_WARP))
    of_systems = (0.0, 0.0, False, False)
    if square is not None:
        of_systems = (square.near, square.alike, True, square.definite)
    with torch.cuda.device_of(a):
        _seminormal[(count,)](
            *(a, b, found.x, found.numbers, found.forward_error, found.residual_norm, found.rank),
            *(found.accepted.view(torch.uint8), m, n, k, count, *a.stride(), *b.stride()),
            *(limits.tolerance, limits.max_steps, rows, columns, DTYPES[dtype]),
            *(limits.max_rate, limits.rounding, limits.noise, limits.floor, limits.stagnation),
            *(limits.computed, limits.sure, MODERATE, *of_systems, a.is_cuda),
            num_warps=warps,
            maxnreg=REGISTERS if warps == 1 else None,
            # Contracted to a multiply-add, a sum of rounded products has another rounding error.
            enable_fp_fusion=False,
        )
    return found


UNIT = tl.constexpr(2.0**-53)


@triton.jit(
    do_not_specialize=[
        *("m", "n", "k", "count", "a_batch", "a_row", "a_column", "b_batch", "b_row", "b_column"),
        *("tolerance", "max_steps"),
    ]
)
def _seminormal(
    a, b, to_x, numbers, to_forward, to_residual, to_rank, to_accepted, m, n, k, count,
    a_batch, a_row, a_column, b_batch, b_row, b_column, tolerance, max_steps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr, MAX_RATE: tl.constexpr,
    ROUNDING: tl.constexpr, NOISE: tl.constexpr, FLOOR: tl.constexpr, STAGNATION: tl.constexpr,
    COMPUTED: tl.constexpr, SURE: tl.constexpr, MODERATE: tl.constexpr, NEAR: tl.constexpr,
    ALIKE: tl.constexpr, SQUARE: tl.constexpr, DEFINITE: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """A problem: its matrix, and then one right-hand side after the other, of which the worst counts."""
    member = tl.program_id(0).to(tl.int64)  # offsets may exceed 2^31
    l = tl.arange(0, ROWS).to(tl.int64)[:, None]  # noqa: E741
    j = tl.arange(0, COLUMNS)[None, :]
    a += member * a_batch + j.to(tl.int64) * a_column
    b += member * b_batch
    gram, size = _gram(a, m, n, l, j, a_row, COLUMNS)
    inverse = _inverse(gram, n, COLUMNS)
    norm, norm_bound, inverse_norm, rate = _worth(gram, inverse, size, m, n, ROUNDING, COLUMNS)

    zero = tl.zeros((), tl.float64)
    refined, forward, backward, optimality, largest, rows = zero, zero, zero, zero, zero, zero
    good, vanished = zero == 0.0, zero > 0.0
    if SQUARE:
        rows, near = _rows_of(a, m, n, l, j, a_row, NEAR, ALIKE)
        good &= near
    if DEFINITE:
        factor = _inverse(_whole(a, n, a_row, COLUMNS), n, COLUMNS)
        good &= _length(factor) < float("inf")  # no pivot is negative or NaN
    for column in range(k):
        target = b + column * b_column
        high, low, left, b_norm = _refined(
            *(a, target, inverse, size, norm_bound, inverse_norm, rate, m, n, l, j, a_row, b_row),
            *(tolerance, max_steps, NOISE, FLOOR, STAGNATION, FUSED),
        )
        rounded = _rounded(high, DTYPE)
        g, r_norm, r_largest, b_largest, given_norm = _residuals(
            a, target, high, low, rounded, m, n, l, j, a_row, b_row, FUSED
        )
        of_x, lost, error = _errors(
            *(size, high, low, rounded, left, rate, b_norm, b_largest, MAX_RATE, COMPUTED, MODERATE)
        )
        if SQUARE:
            stewart = zero + 1.0
            small = _over(r_largest, rows * tl.max(tl.abs(high)) + b_largest)
        else:
            projected = _project(inverse, g)
            stewart, small = _backward(g / size, projected, r_norm, norm, norm * of_x, b_norm, rate)
        good &= (error <= SURE) & (given_norm <= b_norm * (1.0 + (n if SQUARE else m + n) * UNIT))
        biggest = tl.max(tl.abs(rounded))
        vanished |= (biggest == 0.0) & (error == 0.0)
        refined, forward, optimality = (
            _most(refined, small),
            _most(forward, error),
            _most(optimality, stewart),
        )
        backward, largest = _most(backward, small + lost), _most(largest, biggest)
        tl.store(to_x + (member * n + j) * k + column, rounded, mask=j < n)
        tl.store(to_forward + member * k + column, error)
        tl.store(to_residual + member * k + column, given_norm)

    tl.store(to_rank + member, n.to(tl.int64))
    tl.store(to_accepted + member, tl.where(good, 1, 0).to(tl.uint8))
    numbers += member
    tl.store(numbers, tl.where(good, 1.0, 0.0))
    tl.store(numbers + count, refined)
    tl.store(numbers + 2 * count, forward)
    tl.store(numbers + 3 * count, backward)
    tl.store(numbers + 4 * count, norm * inverse_norm)
    tl.store(numbers + 5 * count, largest)
    tl.store(numbers + 6 * count, optimality)
    tl.store(numbers + 7 * count, n.to(tl.float64))
    tl.store(numbers + 8 * count, tl.where(vanished, 1.0, 0.0))


@triton.jit
def _gram(a, m, n, l, j, row, COLUMNS: tl.constexpr):  # noqa: E741
    """``A^T A``, an identity where A has no columns, and the norms of the columns, as a row."""
    i = tl.arange(0, COLUMNS)[:, None]
    gram = tl.zeros((COLUMNS, COLUMNS), tl.float64)
    for start in range(0, m, l.shape[0]):
        block = _block(a, start, m, n, l, j, row)
        gram += _product(tl.trans(block), block)
    gram = tl.where((i < n) | (i != j), gram, 1.0)
    return gram, tl.sqrt(tl.sum(tl.where(i == j, gram, 0.0), axis=0, keep_dims=True))


@triton.jit
def _inverse(gram, n, COLUMNS: tl.constexpr):
    """``R^-T`` of the Cholesky factor of a Gram matrix: what elimination makes of an identity."""
    i, j = tl.arange(0, COLUMNS)[:, None], tl.arange(0, COLUMNS)[None, :]
    inverse = tl.where((i == j) & (i < n), 1.0, 0.0).to(tl.float64)
    pivots = tl.full((COLUMNS, 1), 1.0, tl.float64)
    for step in range(n):
        row = tl.sum(tl.where(i == step, gram, 0.0), axis=0, keep_dims=True)
        done = tl.sum(tl.where(i == step, inverse, 0.0), axis=0, keep_dims=True)
        column = tl.sum(tl.where(j == step, gram, 0.0), axis=1, keep_dims=True)
        pivot = tl.sum(tl.where(j == step, row, 0.0), axis=1, keep_dims=True)
        factor = tl.where(i > step, column / pivot, 0.0)
        gram -= factor * row
        inverse -= factor * done
        pivots = tl.where(i == step, pivot, pivots)
    return inverse / tl.sqrt(pivots)


@triton.jit
def _worth(gram, inverse, size, m, n, ROUNDING: tl.constexpr, COLUMNS: tl.constexpr):
    """What is known of B, A with its columns divided by their norms, and of the factor.

    ``||B||_2`` from below and from above, by its norms of Frobenius and Schatten; ``||B^+||_2`` from above;
    and ``||I - W^T W||_F`` for ``W = A R^-1``, from above: that with the computed Gram matrix, and what the
    rounding errors of its inner products, and of this one, are at most.
    """
    i, j = tl.arange(0, COLUMNS)[:, None], tl.arange(0, COLUMNS)[None, :]
    columns = n.to(tl.float64)
    down = tl.sqrt(tl.sum(tl.where(i == j, gram, 0.0), axis=1, keep_dims=True))
    inner = tl.where((i < n) & (j < n), gram, 0.0)
    square = _length(inner / (down * size))
    scaled = inverse * size
    of_inverse = tl.sqrt(_length(_product(tl.trans(scaled), scaled)))
    error = tl.where((i == j) & (i < n), 1.0, 0.0) - _product(_product(inverse, inner), tl.trans(inverse))
    sums = tl.sum(tl.abs(scaled), axis=1, keep_dims=True)
    rounding = (m + 4 * n) * UNIT * _sum(sums * sums) + ROUNDING * UNIT * tl.sqrt(columns) * _length(scaled)
    return square / tl.sqrt(columns), tl.sqrt(square), of_inverse, _length(error) + rounding


@triton.jit
def _refined(
    a, b, inverse, size, norm_bound, inverse_norm, rate, m, n, l, j, a_row, b_row,  # noqa: E741
    tolerance, max_steps,
    NOISE: tl.constexpr, FLOOR: tl.constexpr, STAGNATION: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """A solution as a sum of two numbers, the bound on its error, and ``||b||``."""
    high, b_norm = _start(a, b, inverse, m, n, l, j, a_row, b_row)
    low = tl.zeros_like(high)
    left = b_norm * 0.0 + float("inf")
    active, step = b_norm >= 0.0, 0
    while active & (step < max_steps):
        g, r_norm = _gradient(a, b, high, low, m, n, l, j, a_row, b_row, FUSED)
        projected = _project(inverse, g)
        bounds = norm_bound * _length(size * high) + b_norm + norm_bound * inverse_norm * r_norm
        floor = inverse_norm * NOISE * (m + n) * bounds
        high, low = two_sum(high, _solve(inverse, projected) + low)
        before, left = left, inverse_norm * rate / (1.0 - rate) * _length(projected) + floor
        active = (left > tolerance * _length(size * high)) & (left < STAGNATION * before)
        active = active & (left > FLOOR * floor)
        step += 1
    return high, low, left, b_norm


@triton.jit
def _errors(
    size, high, low, rounded, left, rate, b_norm, b_largest,
    MAX_RATE: tl.constexpr, COMPUTED: tl.constexpr, MODERATE: tl.constexpr,
):  # fmt: skip
    """``||D x||``, what of x is lost when it becomes one number and is rounded, and the forward error."""
    of_x = _length(size * high)
    of_low = _over(_length(size * low), of_x)
    of_rounding = _over(_length(size * (high - rounded)), of_x)
    error = _over(left, of_x) + of_low
    error = COMPUTED * error / (1.0 - error)  # relative to the exact solution
    known = (rate <= MAX_RATE) & (error >= 0.0) & (error < float("inf"))
    known &= (tl.min(size) >= 1.0 / MODERATE) & (tl.max(size) <= MODERATE)
    known &= (b_largest == 0.0) | ((b_norm >= 1.0 / MODERATE) & (b_norm <= MODERATE))  # squares underflow
    return of_x, of_low + of_rounding, tl.where(known, error + of_rounding, float("inf"))


@triton.jit
def _start(a, b, inverse, m, n, l, j, a_row, b_row):  # noqa: E741
    """The solution of the normal equations, and ``||b||``."""
    g = tl.zeros_like(j).to(tl.float64)
    square = tl.zeros((), tl.float64)
    for start in range(0, m, l.shape[0]):
        block, target = _block(a, start, m, n, l, j, a_row), _target(b, start, m, l, b_row)
        g += tl.sum(block * target, axis=0, keep_dims=True)
        square += _sum(target * target)
    return _solve(inverse, _project(inverse, g)), tl.sqrt(square)


@triton.jit
def _gradient(a, b, high, low, m, n, l, j, a_row, b_row, FUSED: tl.constexpr):  # noqa: E741
    """``A^T (b - A (high + low))`` in doubled precision, rounded once, and the norm of the residual."""
    g, g_low = tl.zeros_like(high), tl.zeros_like(high)
    square = tl.zeros((), tl.float64)
    for start in range(0, m, l.shape[0]):
        block, target = _block(a, start, m, n, l, j, a_row), _target(b, start, m, l, b_row)
        r, r_low = _residual(block, target, high, low, FUSED)
        square += _sum(r * r)
        terms = block * r
        errors = product_error(block, r, terms, FUSED) + block * r_low
        part, part_low = tl.reduce((terms, errors), 0, add_pairs, keep_dims=True)
        g, lost = two_sum(g, part)
        g_low += lost + part_low
    return g + g_low, tl.sqrt(square)


@triton.jit
def _residuals(a, b, high, low, rounded, m, n, l, j, a_row, b_row, FUSED: tl.constexpr):  # noqa: E741
    """``A^T r``, ``||r||`` and the largest elements of r and b; ``||r||`` of the rounded solution."""
    g = tl.zeros_like(high)
    square = tl.zeros((), tl.float64)
    given, largest, of_b = square, square, square
    for start in range(0, m, l.shape[0]):
        block, target = _block(a, start, m, n, l, j, a_row), _target(b, start, m, l, b_row)
        r, _ = _residual(block, target, high, low, FUSED)
        square += _sum(r * r)
        largest, of_b = _most(largest, tl.max(tl.abs(r))), _most(of_b, tl.max(tl.abs(target)))
        g += tl.sum(block * r, axis=0, keep_dims=True)
        r += tl.sum(block * ((high - rounded) + low), axis=1, keep_dims=True)
        given += _sum(r * r)
    return g, tl.sqrt(square), largest, of_b, tl.sqrt(given)


@triton.jit
def _backward(scaled, projected, r_norm, norm, image, b_norm, rate):
    """Optimality, and the smallest of three perturbations that make the solution exact."""
    optimality = _over(_length(scaled), norm * r_norm)
    projection = _over(_length(projected), image * tl.where(rate < 1.0, 1.0 - rate, 0.0))
    return optimality, _least(_least(optimality, _over(r_norm, image + b_norm)), projection)


@triton.jit
def _rows_of(a, m, n, l, j, row, NEAR: tl.constexpr, ALIKE: tl.constexpr):  # noqa: E741
    """The largest sum of magnitudes in a row, and whether rows and columns are of one size near 1."""
    total, most = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    least = most + float("inf")
    columns = tl.zeros_like(j).to(tl.float64)
    for start in range(0, m, l.shape[0]):
        block = tl.abs(_block(a, start, m, n, l, j, row))
        total = _most(total, tl.max(tl.sum(block, axis=1)))
        largest = tl.max(block, axis=1, keep_dims=True)
        most, least = (
            tl.maximum(most, tl.max(largest)),
            tl.minimum(least, tl.min(tl.where(start + l < m, largest, float("inf")))),
        )
        columns = tl.maximum(columns, tl.max(block, axis=0, keep_dims=True))
    narrowest = tl.min(tl.where(j < n, columns, float("inf")))
    near = (tl.minimum(least, narrowest) >= 1.0 / NEAR) & (most <= NEAR / 2)
    return total, near & (most <= ALIKE * least) & (most <= ALIKE * narrowest)


@triton.jit
def _whole(a, n, row, COLUMNS: tl.constexpr):
    """A square matrix, bordered by an identity."""
    i, j = tl.arange(0, COLUMNS)[:, None], tl.arange(0, COLUMNS)[None, :]
    found = tl.load(a + i.to(tl.int64) * row, mask=(i < n) & (j < n), other=0.0).to(tl.float64)
    return tl.where((i < n) | (i != j), found, 1.0)


@triton.jit
def _block(a, start, m, n, l, j, row):  # noqa: E741
    """Some rows, zeros beyond the edges."""
    return tl.load(a + (start + l) * row, mask=(start + l < m) & (j < n), other=0.0).to(tl.float64)


@triton.jit
def _target(b, start, m, l, row):  # noqa: E741
    return tl.load(b + (start + l) * row, mask=start + l < m, other=0.0).to(tl.float64)


@triton.jit
def _sum(x):
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _length(x):
    return tl.sqrt(_sum(x * x))


@triton.jit
def _product(x, y):
    """``X Y``, on matrix units where these take so few."""
    if x.shape[1] < 16:
        found = tl.sum(x[:, :, None] * y[None, :, :], axis=1)
    else:
        found = tl.dot(x, y, input_precision="ieee", out_dtype=tl.float64)
    return found


@triton.jit
def _project(inverse, g):
    """``R^-T g``, a column from a row."""
    return tl.sum(inverse * g, axis=1, keep_dims=True)


@triton.jit
def _solve(inverse, p):
    """``R^-1 p``, a row from a column."""
    return tl.sum(inverse * p, axis=0, keep_dims=True)


@triton.jit
def _residual(block, target, high, low, FUSED: tl.constexpr):
    """``b - A (high + low)`` as a sum of two numbers."""
    terms = block * high
    total, errors = tl.reduce(
        (terms, product_error(block, high, terms, FUSED) + block * low), 1, add_pairs, True
    )
    r, lost = two_sum(target, -total)
    return two_sum(r, lost - errors)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    return x if tl.float64 == DTYPE else x.to(tl.float32).to(DTYPE).to(tl.float64)


@triton.jit
def _over(a, b):
    return tl.where(a == 0, 0.0, a / b)


@triton.jit
def _least(a, b):
    """NaN if one of them is."""
    return tl.where((a <= b) | (a != a), a, b)


@triton.jit
def _most(a, b):
    return tl.where((a >= b) | (a != a), a, b)
