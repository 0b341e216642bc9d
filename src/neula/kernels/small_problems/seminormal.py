"""Small least-squares problems in one launch, from the matrix to the evidence.

In plain torch, the same steps (:mod:`neula.problems.least_squares.together` with R of a Gram matrix) is
hundreds of launches, each far longer than its arithmetic. Here one program has a problem to itself, or a few:
registers hold matrices of the size of the Gram matrix, and blocks of rows of A pass through them a dozen
times, from a cache. The sums of residuals and gradients carry their rounding errors along
(:mod:`neula.kernels.doubled.doubled_triton`). Where the kernel does not run, nothing takes its place but
those steps.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import NamedTuple, Self

import torch

from neula.kernels.dispatch import trial
from neula.kernels.doubled.doubled_triton import add_pairs, product_error, two_sum
from neula.kernels.launch import ceil_div
from neula.kernels.magnitudes import MODERATE
from neula.kernels.small_problems.tiles_triton import (
    block_of,
    largest_of,
    least_of,
    length,
    most_of,
    product,
    projection_of,
    quotient,
    residual_of,
    rounded_to,
    smallest_of,
    solution_of,
    sum_over_rows,
    target_of,
    total,
)
from neula.kernels.triton_source import ALIGNED, jit, tl

MAX_COLUMNS = 64
"""Columns of A at most: a Gram matrix of them takes half of the registers of a multiprocessor."""

ROWS = 16
"""Rows of a block: the size of a product on matrix units, and four columns for each thread."""

PER_WARP = 8
"""Columns for each warp, and of the narrowest Gram matrix."""

TOGETHER = 8
"""Problems of the narrowest kind, which share a warp: on an H200 50000 of 16 x 6 take 0.20 ms, and 0.38 with
a warp for each, where most of what it does are sums over its threads."""

FEW_ROWS = 2
"""Rows of a block for the narrowest problems."""

REGISTERS = 128
"""Most registers of a thread, so that sixteen warps run on a multiprocessor: 1000 problems of 200 x 50
take 1.0 ms, and 1.25 with as many registers as the compiler likes."""

NAMES = (
    "doubtful",
    "residual",
    "refined_error",
    "backward_error",
    "forward_error",
    "condition_bound",
    "condition",
    "largest",
    "optimality",
    "rank",
    "zero",
)
"""Names of :attr:`SeminormalSolutions.numbers` of each problem, the first six as the verdict reads them
(:mod:`neula.certificates.verdict`): of several right-hand sides the worst."""


@dataclass(frozen=True)
class RefinementLimits:
    """Limits that stop refinement, and those within which updates show the error."""

    tolerance: float  # forward error at which refinement ends
    max_steps: int  # updates at most
    max_rate: float  # rate of convergence above which updates are not trusted to show the error
    rounding: float  # unit roundoffs, times the condition number, that a solve with factors errs by at most
    noise: float  # relative error of an operation in doubled precision
    floor: float  # multiple of the errors of the residual below which refinement has nothing to gain
    stagnation: float  # part of the error before that an update must leave at most to continue
    computed: float  # for the rounding errors of the bound itself


@dataclass(frozen=True)
class SquareSystemLimits:
    """Limits that differ for linear systems: backward errors are in the infinity norm, of A as given."""

    # The largest elements of rows and columns are at least its reciprocal, and at most half of it.
    max_scale: float
    # They differ by this factor at most. Other systems are doubtful: their errors would be measured scaled.
    max_ratio: float
    definite: bool  # whether those are doubtful, too, whose matrix has no Cholesky factor


class SeminormalSolutions(NamedTuple):
    """Solutions with their evidence, float64 where nothing else is said."""

    x: torch.Tensor  # shape (batch, n, k): rounded to the dtype that was requested
    # Shape (11, batch). Each row is one of NAMES; linear systems have a 1 in place of the optimality.
    # Problems whose norms are beyond 2^200 or below 2^-200 have infinite forward errors.
    numbers: torch.Tensor
    forward_error: torch.Tensor  # shape (batch, k)
    residual_norm: torch.Tensor  # shape (batch, k)
    rank: torch.Tensor  # int, shape (batch,): n
    doubtful: torch.Tensor  # bool, shape (batch,)

    @classmethod
    def empty(cls, count: int, n: int, k: int, device: torch.device) -> Self:
        """Room for so many."""
        shapes = ((count, n, k), (len(NAMES), count), (count, k), (count, k))
        x, numbers, forward_error, residual_norm = (
            torch.empty(shape, dtype=torch.float64, device=device) for shape in shapes
        )
        rank = torch.empty(count, dtype=torch.int64, device=device)
        return cls(x, numbers, forward_error, residual_norm, rank, rank.new_empty(count, dtype=torch.bool))


def columns_of(n: int) -> int:
    """Columns that matrices of n have in the kernel: a power of two, each compiled once."""
    return max(PER_WARP, 1 << (n - 1).bit_length())


@trial("The kernel of small problems", "dozens of launches take its place")
def _tried(device: torch.device, columns: int, square: int, size: int) -> None:
    a = torch.eye(columns, dtype=torch.float64 if size == 8 else torch.float32, device=device)[None]
    limits = RefinementLimits(2.0**-54, 1, 0.25, 8.0, 2.0**-104, 2.0, 0.5, 1.0)
    solved(a, a[..., :1], a.dtype, limits, SquareSystemLimits(2.0, 2.0, definite=True) if square else None)


def takes(a: torch.Tensor, *, square: bool = False) -> bool:
    """Whether the kernel is for some matrices, and runs on their device."""
    m, n = a.shape[1:]
    few = 0 < n <= min(m, MAX_COLUMNS) and a.is_cuda and a.dtype.is_floating_point
    return few and _tried.passed(a.device, columns_of(n), int(square), a.dtype.itemsize)


def solved(
    a: torch.Tensor,
    b: torch.Tensor,
    dtype: torch.dtype,
    limits: RefinementLimits,
    square: SquareSystemLimits | None = None,
) -> SeminormalSolutions:
    """Solve, refine and measure problems A (batch, m, n), m >= n, of at most :data:`MAX_COLUMNS` columns, and
    B (batch, m, k); queued on the current stream.

    x is rounded to ``dtype``; ``square`` says that the problems are linear systems.
    """
    # Triton 3.6 cannot lower products in double precision of what was loaded in half precision.
    a, b = (x.float() if x.dtype.itemsize < 4 else x for x in (a, b))
    # Machine code is made ahead for memory that is aligned, and other code takes up to 20 s to make.
    a, b = (x.clone() if x.data_ptr() % ALIGNED else x for x in (a, b))
    (count, m, n), k = a.shape, b.shape[2]
    found = SeminormalSolutions.empty(count, n, k, a.device)
    columns = columns_of(n)
    narrow = columns == PER_WARP
    together, rows = (TOGETHER, FEW_ROWS) if narrow else (1, ROWS)
    _seminormal[(ceil_div(count, together),)](
        *(a, b, found.x, found.numbers, found.forward_error, found.residual_norm, found.rank),
        *(found.doubtful.view(torch.uint8), m, n, k, count, *a.stride(), *b.stride()),
        1 - round(math.log2(torch.finfo(dtype).eps)),
        *(0, 0.0, 0.0) if square is None else (int(square.definite), square.max_scale, square.max_ratio),
        *astuple(limits),
        *(rows, columns, together, square is not None, a.is_cuda),
        num_warps=columns // PER_WARP,
        maxnreg=REGISTERS,
        # Contracted to a multiply-add, a sum of rounded products has another rounding error.
        enable_fp_fusion=False,
    )
    return found


UNIT = 2.0**-53

SIZES = ("m", "n", "k", "count", "a_batch", "a_row", "a_column", "b_batch", "b_row", "b_column")


# Otherwise it would be compiled anew for sizes that are 1 or divisible by 16.
@jit(do_not_specialize=[*SIZES, "definite", "significand"])
def _seminormal(
    a, b, to_x, numbers, to_forward, to_residual, to_rank, to_doubtful, m, n, k, count,
    a_batch, a_row, a_column, b_batch, b_row, b_column, significand, definite, max_scale: tl.float64,
    max_ratio: tl.float64, tolerance: tl.float64, max_steps: tl.float64, max_rate: tl.float64,
    rounding: tl.float64, noise: tl.float64, at_least: tl.float64, stagnation: tl.float64,
    computed: tl.float64,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr, SQUARE: tl.constexpr,
    FUSED: tl.constexpr,
):  # fmt: skip
    """Some problems: their matrices, and then one right-hand side after the other, of which the worst counts.

    Every array has three dimensions, the first of which counts problems and the second columns. The last
    program may have some that others have as well, and stores the same for them.
    """
    member = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)  # offsets may exceed 2^31
    member = tl.minimum(member, count - 1)[:, None, None]
    l = tl.arange(0, ROWS).to(tl.int64)[None, None, :]  # noqa: E741
    j = tl.arange(0, COLUMNS)[None, :, None]
    a += member * a_batch
    b += member * b_batch
    gram, size = _gram(a, m, n, l, a_row, a_column, COLUMNS, TOGETHER)
    a += j.to(tl.int64) * a_column
    inverse = _inverse(gram, n, COLUMNS)
    norm, norm_bound, inverse_norm, rate = _worth(gram, inverse, size, m, n, rounding, COLUMNS)

    zero = tl.zeros((TOGETHER, 1, 1), tl.float64)
    shortened, refined, backward, forward = zero, zero, zero, zero
    optimality, largest, rows = zero, zero, zero
    good, vanished = zero == 0.0, zero > 0.0
    if SQUARE:
        rows, moderate = _rows_of(a, m, n, l, j, a_row, max_scale, max_ratio, TOGETHER)
        good &= moderate
        if definite != 0:
            factor = _inverse(_whole(a, n, a_row, COLUMNS), n, COLUMNS)
            good &= length(factor) < float("inf")  # no pivot is negative or NaN
    for column in range(k):
        target = b + column * b_column
        high, low, left, b_norm, g, projected, r_norm, r_largest = _refined(
            a, target, inverse, size, norm_bound, inverse_norm, rate, m, n, l, j, a_row, b_row, tolerance,
            max_steps, noise, at_least, stagnation, FUSED,
        )  # fmt: skip
        rounded = rounded_to(high, significand)
        given_norm, b_largest = _given(a, target, rounded, m, n, l, j, a_row, b_row)
        of_x, lost, error = _errors(
            size, high, low, rounded, left, rate, b_norm, b_largest, max_rate, computed
        )
        if SQUARE:
            stewart = zero + 1.0
            small = quotient(r_largest, rows * largest_of(tl.abs(high)) + b_largest)
        else:
            stewart, small = _backward(g / size, projected, r_norm, norm, norm * of_x, b_norm, rate)
        shortened = most_of(shortened, quotient(given_norm, b_norm))
        biggest = largest_of(tl.abs(rounded))
        vanished |= (biggest == 0.0) & (error == 0.0)
        refined, forward = most_of(refined, small), most_of(forward, error)
        optimality = most_of(optimality, stewart)
        backward, largest = most_of(backward, small + lost), most_of(largest, biggest)
        tl.store(to_x + (member * n + j) * k + column, rounded, mask=j < n)
        tl.store(to_forward + member * k + column, error)
        tl.store(to_residual + member * k + column, given_norm)

    tl.store(to_rank + member, n.to(tl.int64))
    tl.store(to_doubtful + member, tl.where(good, 0, 1).to(tl.uint8))
    numbers += member
    tl.store(numbers, tl.where(good, 0.0, 1.0))
    tl.store(numbers + count, shortened)
    tl.store(numbers + 2 * count, refined)
    tl.store(numbers + 3 * count, backward)
    tl.store(numbers + 4 * count, forward)
    tl.store(numbers + 5 * count, norm_bound * inverse_norm)
    tl.store(numbers + 6 * count, norm * inverse_norm)
    tl.store(numbers + 7 * count, largest)
    tl.store(numbers + 8 * count, optimality)
    tl.store(numbers + 9 * count, n.to(tl.float64))
    tl.store(numbers + 10 * count, tl.where(vanished, 1.0, 0.0))


@jit
def _gram(a, m, n, l, row, column, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr):  # noqa: E741
    """``A^T A``, an identity where A has no columns, and the norms of the columns, as a row."""
    i, j = tl.arange(0, COLUMNS)[None, None, :], tl.arange(0, COLUMNS)[None, :, None]
    gram = tl.zeros((TOGETHER, COLUMNS, COLUMNS), tl.float64)
    down, right = a + i.to(tl.int64) * column, a + j.to(tl.int64) * column
    if COLUMNS < 16:
        for _ in range(m):
            x = tl.load(down, mask=i < n, other=0.0).to(tl.float64)
            gram = tl.fma(x, tl.load(right, mask=j < n, other=0.0).to(tl.float64), gram)
            down += row
            right += row
    else:
        for start in range(0, m, l.shape[2]):
            block = block_of(right, start, m, n, l, j, row)
            gram += product(tl.permute(block, 0, 2, 1), block)
    gram = tl.where((i < n) | (i != j), gram, 1.0)
    return gram, tl.sqrt(tl.sum(tl.where(i == j, gram, 0.0), axis=2, keep_dims=True))


@jit
def _inverse(gram, n, COLUMNS: tl.constexpr):
    """``R^-T`` of the Cholesky factor of a Gram matrix: what elimination makes of an identity.

    Columns that are eliminated make room for those of the inverse.
    """
    i, j = tl.arange(0, COLUMNS)[None, None, :], tl.arange(0, COLUMNS)[None, :, None]
    pivots = tl.full((gram.shape[0], 1, COLUMNS), 1.0, tl.float64)
    for step in range(n):
        row = tl.sum(tl.where(i == step, gram, 0.0), axis=2, keep_dims=True)
        pivot = tl.sum(tl.where(j == step, row, 0.0), axis=1, keep_dims=True)
        # Of a symmetric matrix, whose other half is not read.
        factor = tl.where(i > step, tl.permute(row, 0, 2, 1) / -pivot, 0.0)
        gram = tl.where(j == step, factor, tl.fma(factor, row, gram))
        pivots = tl.where(i == step, pivot, pivots)
    inverse = tl.where(i > j, gram, tl.where((i == j) & (i < n), 1.0, 0.0))
    return inverse * (1.0 / tl.sqrt(pivots))


@jit
def _worth(gram, inverse, size, m, n, of_solve, COLUMNS: tl.constexpr):
    """Norms and condition of B, which is A with columns of norm 1, and the quality of its factor.

    ``||B||_2`` from below and from above, by its norms of Frobenius and Schatten; ``||B^+||_2`` from above;
    and ``||I - W^T W||_F`` for ``W = A R^-1``, from above: that with the computed Gram matrix, and what the
    rounding errors of its inner products, and of this one, are at most.
    """
    i, j = tl.arange(0, COLUMNS)[None, None, :], tl.arange(0, COLUMNS)[None, :, None]
    columns = n.to(tl.float64)
    down = tl.sqrt(tl.sum(tl.where(i == j, gram, 0.0), axis=1, keep_dims=True))
    inner = tl.where((i < n) & (j < n), gram, 0.0)
    square = length(inner * (1.0 / down) * (1.0 / size))
    scaled = inverse * size
    of_inverse = tl.sqrt(length(product(tl.permute(scaled, 0, 2, 1), scaled)))
    error = product(product(inverse, inner), tl.permute(inverse, 0, 2, 1))
    error = tl.where((i == j) & (i < n), 1.0, 0.0) - error
    sums = tl.sum(tl.abs(scaled), axis=1, keep_dims=True)
    rounding = (m + 4 * n) * UNIT * total(sums * sums) + of_solve * UNIT * tl.sqrt(columns) * length(scaled)
    return square / tl.sqrt(columns), tl.sqrt(square), of_inverse, length(error) + rounding


@jit
def _refined(
    a, b, inverse, size, norm_bound, inverse_norm, rate, m, n, l, j, a_row, b_row,  # noqa: E741
    tolerance, max_steps, noise, at_least, stagnation, FUSED: tl.constexpr,
):  # fmt: skip
    """A solution as a sum of two numbers, the bound on its error, ``||b||``, and of its residual the
    gradient, the projection, the norm and the largest element.

    The last residual updates nothing.
    """
    high, b_norm = _start(a, b, inverse, m, n, l, j, a_row, b_row)
    low = tl.zeros_like(high)
    left = b_norm * 0.0 + float("inf")
    g, r_norm, r_largest = low, left, left
    projected = tl.zeros((inverse.shape[0], 1, inverse.shape[2]), tl.float64)
    active, step, going = b_norm >= 0.0, 0, True
    while going:
        g, r_norm, r_largest = _gradient(a, b, high, low, m, n, l, j, a_row, b_row, FUSED)
        going = (step < max_steps) & (tl.max(active.to(tl.int32)) > 0)
        active = active & going
        projected = projection_of(inverse, g)
        bounds = norm_bound * length(size * high) + b_norm + norm_bound * inverse_norm * r_norm
        floor = inverse_norm * noise * (m + n) * bounds
        better, rest = two_sum(high, solution_of(inverse, projected) + low)
        high, low = tl.where(active, better, high), tl.where(active, rest, low)
        bound = inverse_norm * rate / (1.0 - rate) * length(projected) + floor
        before, left = left, tl.where(active, bound, left)
        active = active & (left > tolerance * length(size * high)) & (left < stagnation * before)
        active = active & (left > at_least * floor)
        step += 1
    return high, low, left, b_norm, g, projected, r_norm, r_largest


@jit
def _errors(size, high, low, rounded, left, rate, b_norm, b_largest, max_rate, computed):
    """``||D x||``, what of x is lost when it becomes one number and is rounded, and the forward error."""
    of_x = length(size * high)
    of_low = quotient(length(size * low), of_x)
    of_rounding = quotient(length(size * (high - rounded)), of_x)
    error = quotient(left, of_x) + of_low
    error = computed * error / (1.0 - error)  # relative to the exact solution
    known = (rate <= max_rate) & (error >= 0.0) & (error < float("inf"))
    known &= (smallest_of(size) >= 1.0 / MODERATE) & (largest_of(size) <= MODERATE)
    known &= (b_largest == 0.0) | ((b_norm >= 1.0 / MODERATE) & (b_norm <= MODERATE))  # squares underflow
    return of_x, of_low + of_rounding, tl.where(known, error + of_rounding * (1 + error), float("inf"))


@jit
def _start(a, b, inverse, m, n, l, j, a_row, b_row):  # noqa: E741
    """The solution of the normal equations, and ``||b||``."""
    g = tl.zeros((inverse.shape[0], inverse.shape[1], l.shape[2]), tl.float64)
    square = tl.zeros((inverse.shape[0], 1, l.shape[2]), tl.float64)
    for start in range(0, m, l.shape[2]):
        block, target = block_of(a, start, m, n, l, j, a_row), target_of(b, start, m, l, b_row)
        g = tl.fma(block, target, g)
        square += target * target
    return solution_of(inverse, projection_of(inverse, sum_over_rows(g))), tl.sqrt(sum_over_rows(square))


@jit
def _gradient(a, b, high, low, m, n, l, j, a_row, b_row, FUSED: tl.constexpr):  # noqa: E741
    """``A^T (b - A (high + low))`` in doubled precision, rounded once, and of the residual the norm and the
    largest element.
    """
    g = tl.zeros((high.shape[0], high.shape[1], l.shape[2]), tl.float64)
    square = tl.zeros((high.shape[0], 1, l.shape[2]), tl.float64)
    g_low, largest = g, square
    for start in range(0, m, l.shape[2]):
        block, target = block_of(a, start, m, n, l, j, a_row), target_of(b, start, m, l, b_row)
        r, r_low = residual_of(block, target, high, low, FUSED)
        square += r * r
        largest = most_of(largest, tl.abs(r))
        terms = block * r
        g, lost = two_sum(g, terms)
        g_low += lost + (product_error(block, r, terms, FUSED) + block * r_low)
    g, g_low = tl.reduce((g, g_low), 2, add_pairs, keep_dims=True)
    return g + g_low, tl.sqrt(sum_over_rows(square)), largest_of(largest)


@jit
def _given(a, b, x, m, n, l, j, a_row, b_row):  # noqa: E741
    """``||b - A x||`` of x as it is returned, and the largest element of b."""
    square = tl.zeros((x.shape[0], 1, l.shape[2]), tl.float64)
    largest = square
    for start in range(0, m, l.shape[2]):
        block, target = block_of(a, start, m, n, l, j, a_row), target_of(b, start, m, l, b_row)
        r = target - tl.sum(block * x, axis=1, keep_dims=True)
        square += r * r
        largest = most_of(largest, tl.abs(target))
    return tl.sqrt(sum_over_rows(square)), largest_of(largest)


@jit
def _backward(scaled, projected, r_norm, norm, image, b_norm, rate):
    """Optimality, and the smallest of three perturbations that make the solution exact."""
    optimality = quotient(length(scaled), norm * r_norm)
    projection = quotient(length(projected), image * tl.where(rate < 1.0, 1.0 - rate, 0.0))
    return optimality, least_of(least_of(optimality, quotient(r_norm, image + b_norm)), projection)


@jit
def _rows_of(a, m, n, l, j, row, max_scale, max_ratio, TOGETHER: tl.constexpr):  # noqa: E741
    """The largest sum of magnitudes in a row, and whether rows and columns are of one size near 1."""
    total = tl.zeros((TOGETHER, 1, 1), tl.float64)
    most, least = total, total + float("inf")
    columns = tl.zeros((TOGETHER, j.shape[1], 1), tl.float64)
    for start in range(0, m, l.shape[2]):
        block = tl.abs(block_of(a, start, m, n, l, j, row))
        total = most_of(total, largest_of(tl.sum(block, axis=1, keep_dims=True)))
        largest = tl.max(block, axis=1, keep_dims=True)
        most, least = (
            tl.maximum(most, largest_of(largest)),
            tl.minimum(least, smallest_of(tl.where(start + l < m, largest, float("inf")))),
        )
        columns = tl.maximum(columns, tl.max(block, axis=2, keep_dims=True))
    narrowest = smallest_of(tl.where(j < n, columns, float("inf")))
    moderate = (tl.minimum(least, narrowest) >= 1.0 / max_scale) & (most <= max_scale / 2)
    return total, moderate & (most <= max_ratio * least) & (most <= max_ratio * narrowest)


@jit
def _whole(a, n, row, COLUMNS: tl.constexpr):
    """Square matrices, bordered by an identity."""
    i, j = tl.arange(0, COLUMNS)[None, None, :], tl.arange(0, COLUMNS)[None, :, None]
    found = tl.load(a + i.to(tl.int64) * row, mask=(i < n) & (j < n), other=0.0).to(tl.float64)
    return tl.where((i < n) | (i != j), found, 1.0)
