"""Small least-squares problems in one launch, from the matrix to the evidence.

In plain torch, the same steps (:mod:`neula.problems.least_squares.together` with R of a Gram matrix) is
hundreds of launches, each far longer than its arithmetic. Here one program has a problem to itself: it keeps
the Gram matrix, and then the inverse of its Cholesky factor, where it computes, and A near it. There are two
kernels, in Triton and, for more than 32 columns, in CUDA C++, where threads have rows to themselves where
residuals are added up, columns where gradients are, and read either from shared memory; NVRTC takes a third
of the time of Triton's compiler, which a program with one problem pays for. Where they do not run, nothing
takes their place but those steps.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import astuple, dataclass
from functools import lru_cache, partial
from typing import NamedTuple, Self

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.dispatch import trial
from neula.kernels.launch import multiprocessors, shared_memory
from neula.kernels.magnitudes import MODERATE

MAX_COLUMNS = 64
"""Columns of A at most: a Gram matrix of them takes half of the registers of a multiprocessor."""

FEW = 8
"""Problems for which nothing else is compiled than the kernel for the most columns."""

LEAST_COLUMNS = 8
"""Columns of the narrowest Gram matrix in the kernel."""

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

    # The largest elements of rows and columns are at least its reciprocal, and at most half of it;.
    near: float
    # And differ by this factor at most. Other systems are doubtful: theirs would be measured scaled.
    alike: float
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


def limits_on(
    device: torch.device, limits: RefinementLimits, square: SquareSystemLimits | None
) -> torch.Tensor:
    """All limits as float64 numbers where kernels read them: those of refinement, ``MODERATE``, and those of
    linear systems.
    """
    near, alike = (square.near, square.alike) if square else (0.0, 0.0)
    numbers = (*astuple(limits), MODERATE, near, alike)
    recorded = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return (_filled if recorded else _copied)(numbers, device)


@lru_cache(maxsize=64)
def _copied(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def _filled(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """A tensor of numbers, filled by launches that a graph can capture, without a copy from the host."""
    room = torch.empty(len(numbers), dtype=torch.float64, device=device)
    for place, number in zip(room, numbers, strict=True):
        place.fill_(number)
    return room


def columns_of(n: int) -> int:
    """Columns that matrices of n have in the kernel in Triton: a power of two, each compiled once."""
    return max(LEAST_COLUMNS, 1 << (n - 1).bit_length())


def in_cuda(n: int, count: int) -> bool:
    """Whether so many problems of n columns are for the kernel in CUDA C++.

    Of fewer columns the one in Triton takes a fourth of the time for thousands of problems, as long for a
    few, and three times as long to compile. Of more it takes 1.1 ms for 1000 of 200 x 50 on an H200, the
    other one 0.6.
    """
    return count <= FEW or columns_of(n) == MAX_COLUMNS


@trial("The kernel of small problems", "dozens of launches take its place")
def _tried(device: torch.device, columns: int, square: int, size: int) -> None:
    a = torch.eye(columns, dtype=torch.float64 if size == 8 else torch.float32, device=device)[None]
    a = a if columns == MAX_COLUMNS else a.expand(FEW + 1, -1, -1)
    limits = RefinementLimits(2.0**-54, 1, 0.25, 8.0, 2.0**-104, 2.0, 0.5, 1.0)
    solved(a, a[..., :1], a.dtype, limits, SquareSystemLimits(2.0, 2.0, definite=True) if square else None)


def takes(a: torch.Tensor, *, square: bool = False) -> bool:
    """Whether the kernel runs on the device of some matrices, and has room for them."""
    m, n = a.shape[1:]
    if not (0 < n <= min(m, MAX_COLUMNS) and a.is_cuda and a.dtype.is_floating_point):
        return False
    columns = MAX_COLUMNS if in_cuda(n, len(a)) else columns_of(n)
    return _tried.passed(a.device, columns, int(square), a.dtype.itemsize)


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
    if in_cuda(a.shape[2], len(a)):
        return seminormal_cuda(a, b, dtype, limits, square)
    from neula.kernels.small_problems.seminormal_triton import seminormal_triton

    return seminormal_triton(a, b, dtype, limits, square)


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
    kernel = compiled("seminormal", "seminormal", a.device, macros, shared_bytes=most)
    arguments = [
        *(a, b, found.x, found.numbers, found.forward_error, found.residual_norm, found.rank),
        *(found.doubtful, numbers, m, n, k, *a.stride(), *b.stride()),
        *(chunk, BITS[dtype], square is not None, square is not None and square.definite),
    ]
    kernel((count, 1, 1), (THREADS, 1, 1), arguments, shared_bytes(n, size, chunk))
    return found
