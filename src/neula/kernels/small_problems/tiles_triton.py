"""Blocks of rows of several small matrices, and what is reduced of them.

Arrays have three dimensions: the first counts matrices, the second columns of A or unknowns, the third rows
of A. Loaded elements are distributed over threads by the first dimension, then by the second: neighbours in a
row of A are read together.
"""

from __future__ import annotations

from neula.kernels.doubled.doubled_triton import add_pairs, product_error, two_sum
from neula.kernels.triton_source import jit, tl


@jit
def block_of(a, start, m, n, l, j, row):  # noqa: E741
    """Some rows, zeros beyond the edges."""
    return tl.load(a + (start + l) * row, mask=(start + l < m) & (j < n), other=0.0).to(tl.float64)


@jit
def target_of(b, start, m, l, row):  # noqa: E741
    return tl.load(b + (start + l) * row, mask=start + l < m, other=0.0).to(tl.float64)


@jit
def sum_over_rows(x):
    return tl.sum(x, axis=2, keep_dims=True)


@jit
def total(x):
    return tl.sum(tl.sum(x, axis=2, keep_dims=True), axis=1, keep_dims=True)


@jit
def largest_of(x):
    return tl.max(tl.max(x, axis=2, keep_dims=True), axis=1, keep_dims=True)


@jit
def smallest_of(x):
    return tl.min(tl.min(x, axis=2, keep_dims=True), axis=1, keep_dims=True)


@jit
def length(x):
    return tl.sqrt(total(x * x))


@jit
def product(x, y):
    """``X Y``, on matrix units where these take so few."""
    if x.shape[1] < 16:
        i, j = tl.arange(0, x.shape[1])[None, None, :], tl.arange(0, x.shape[1])[None, :, None]
        found = tl.zeros((x.shape[0], y.shape[1], x.shape[2]), tl.float64)
        for step in range(x.shape[1]):
            column = tl.sum(tl.where(j == step, x, 0.0), axis=1, keep_dims=True)
            found = tl.fma(column, tl.sum(tl.where(i == step, y, 0.0), axis=2, keep_dims=True), found)
    else:
        x, y = tl.reshape(x, x.shape[1], x.shape[2]), tl.reshape(y, y.shape[1], y.shape[2])
        found = tl.dot(y, x, input_precision="ieee", out_dtype=tl.float64)
        found = tl.reshape(found, 1, y.shape[0], x.shape[1])
    return found


@jit
def projection_of(inverse, g):
    """``R^-T g``, a column from a row."""
    return tl.sum(inverse * g, axis=1, keep_dims=True)


@jit
def solution_of(inverse, p):
    """``R^-1 p``, a row from a column."""
    return tl.sum(inverse * p, axis=2, keep_dims=True)


@jit
def residual_of(block, target, high, low, FUSED: tl.constexpr):
    """``b - A (high + low)`` as a sum of two numbers."""
    terms = block * high
    total, errors = tl.reduce(
        (terms, product_error(block, high, terms, FUSED) + block * low), 1, add_pairs, True
    )
    r, lost = two_sum(target, -total)
    return two_sum(r, lost - errors)


@jit
def rounded_to(x, significand):
    """To float64, float32, float16 or bfloat16, whichever has so many bits."""
    single = x.to(tl.float32)
    half = tl.where(
        significand == 11, single.to(tl.float16).to(tl.float32), single.to(tl.bfloat16).to(tl.float32)
    )
    return tl.where(significand == 53, x, tl.where(significand == 24, single, half).to(tl.float64))


@jit
def quotient(a, b):
    return tl.where(a == 0, 0.0, a / b)


@jit
def least_of(a, b):
    """NaN if one of them is."""
    return tl.where((a <= b) | (a != a), a, b)


@jit
def most_of(a, b):
    return tl.where((a >= b) | (a != a), a, b)
