"""Least-squares problems of up to 64 columns by the corrected seminormal equations: a thread block for each.

CUDA rather than Triton: threads have rows to themselves where residuals are added up, columns where gradients
are, and read either from shared memory; what Triton makes adds across threads for each block of rows. NVRTC
takes a third of the time of Triton's compiler, which a program with one problem pays for.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.launch import multiprocessors, shared_memory
from neula.kernels.small_problems.seminormal import (
    MAX_COLUMNS,
    RefinementLimits,
    SeminormalSolutions,
    SquareSystemLimits,
    limits_on,
)

THREADS = 256

SIDE = 16
"""Columns of a tile: so many are read at a time, also behind the last row."""

RESERVED = 1024
"""Bytes of shared memory that each thread block takes besides."""

BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Bits of the significand of the dtype that solutions are rounded to."""


def shared_bytes(n: int, itemsize: int, rows: int) -> int:
    """Shared memory for so many rows of n elements at a time, as ``Place`` in the kernel says."""
    square = MAX_COLUMNS * (MAX_COLUMNS + 1)
    vectors = square + 7 * MAX_COLUMNS + 2 * (MAX_COLUMNS + 1) + THREADS // 32
    return 8 * (vectors + max(square, 2 * THREADS, 2 * rows)) + itemsize * (rows * (n | 1) + SIDE)


def rows_at_a_time(m: int, n: int, itemsize: int, room: int) -> int:
    """Rows that fit into ``room`` bytes of shared memory at a time; all of them if possible."""
    if shared_bytes(n, itemsize, m) <= room:
        return m
    return max(1, bisect_right(range(m), room, key=partial(shared_bytes, n, itemsize)) - 1)


def seminormal_cuda(
    a: torch.Tensor,
    b: torch.Tensor,
    dtype: torch.dtype,
    limits: RefinementLimits,
    square: SquareSystemLimits | None = None,
) -> SeminormalSolutions:
    """:func:`neula.kernels.small_problems.seminormal.solved` by the kernel, queued on the current stream.

    Raises
    ------
    ImportError
        Without a torch that compiles CUDA.
    """
    if a.dtype != b.dtype or a.dtype.itemsize < 4:
        a, b = a.double(), b.double()
    a, b = (x if max(x.stride()) < 1 << 31 else x.contiguous() for x in (a, b))
    (count, m, n), k, size = a.shape, b.shape[2], a.element_size()
    found = SeminormalSolutions.empty(count, n, k, a.device)
    most = shared_memory(a.device)
    half = most // 2 - RESERVED  # two thread blocks hide one another's waits
    halved = count > multiprocessors(a.device) and shared_bytes(n, size, min(m, MAX_COLUMNS)) <= half
    chunk = rows_at_a_time(m, n, size, half if halved else most)
    if square is not None and chunk < m:
        raise RuntimeError(f"{most} bytes of shared memory are too few for a matrix of order {m}")
    macros = f"#define REAL {'double' if size == 8 else 'float'}\n"
    numbers = limits_on(a.device, limits, square)
    with torch.cuda.device_of(a):
        kernel = compiled("seminormal", "seminormal", a.device, macros, shared_bytes=most)
        arguments = [
            *(a, b, found.x, found.numbers, found.forward_error, found.residual_norm, found.rank),
            *(found.doubtful, numbers, m, n, k, *a.stride(), *b.stride()),
            *(chunk, BITS[dtype], square is not None, square is not None and square.definite),
        ]
        kernel((count, 1, 1), (THREADS, 1, 1), arguments, shared_bytes(n, size, chunk))
    return found
