"""Products of float32 matrices on units that multiply narrower numbers, with corrections.

Ootomo and Yokota, "TSQR on TensorCores with error correction" (2021): an operand is the sum of a number of
the low format and a remainder, which is rounded to the low format as well, and the product of the two
remainders is dropped. Two things are added here, without which the result is not as accurate as a float32
product.

Range: rows of A and columns of B are scaled by powers of two so that their largest elements lie just below
what the format holds, which leaves the most room for elements that are small compared with them.

Rounding: tensor cores truncate their sums to float32. Products of leading parts are therefore summed on the
unit in short runs only, each from zero, and the runs are added to each other in float32, rounded to nearest.
The corrections are smaller by a factor of ``2^11``, and so are the errors of summing them: they need no runs.

Triton would turn ``total += tl.dot(a, b)`` into ``total = tl.dot(a, b, total)``, and has no option against
it; but it leaves a product alone that asks for a bounded number of inexact sums, and for these operands that
number has no other effect. The running sum, the sum of corrections and that of the current run are three
accumulators of 64 registers a thread for a tile of 128 x 128 and eight warps: a larger tile does not fit, and
a smaller one reads its operands too often.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div, multiprocessors, share
from neula.kernels.products.kept import ALIGNED, Kept, keep
from neula.kernels.products.parts import SCHEMES, Scheme, unbalanced
from neula.kernels.products.parts_triton import exponents_of, times_power_of_two
from neula.kernels.triton_source import Tiles, jit, tl

Total = Callable[[torch.Tensor], object]
"""Adds to a product, in place, what rows that are elsewhere contribute to it."""

RUN = 64
"""Products that are summed on the unit before they are added outside."""

ROW_BLOCKS, FEWEST_ELEMENTS = 4, 1 << 26
"""Blocks of rows of a Gram matrix's A that are split at a time, of so many elements at least: parts take as
many bytes as what they are parts of, and launches take time."""


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
    """``C = alpha A B + beta C`` of float32 matrices in parts of a low format, about as accurate as a float32
    product.

    An entry of C that depends on NaN or Inf is NaN or Inf. C, which is not read if ``beta`` is zero, is
    written in place, or is a new contiguous matrix; it may overlap A and B.

    A kernel need not look for the largest magnitude in every row of A where a ``bound`` is known, and leaves
    out nearly half of the products if B is upper ``triangular``.

    Examples
    --------
    >>> a = torch.tensor([[1 + 2.0**-20, 2.0**-25], [3e6, 4e6]])
    >>> bool((corrected_gemm(a, torch.eye(2)) == a).all())
    True
    """
    x, y = Kept.from_matrix(a, scheme, bound), Kept.from_matrix(b.mT, scheme)
    c = a.new_empty(len(a), b.shape[1]) if c is None else c
    return multiply_kept(c, x, y, alpha=alpha, beta=beta, triangular=triangular)


def corrected_projection(
    q: torch.Tensor,
    a: torch.Tensor,
    r: torch.Tensor,
    total: Total | None = None,
    *,
    bound: float,
    columns: int,
) -> None:
    """``R = Q^T A``, then ``A = A - Q R``, of float32 matrices like :func:`corrected_gemm`; Q is split once
    for all of it.

    ``total`` is called with R before A is changed, where Q and A are some rows of theirs. ``bound`` is the
    largest magnitude in Q. So many ``columns`` of A are dealt with at a time, since their parts take as much
    memory as they do.

    Examples
    --------
    >>> a, r = torch.tensor([[3.0], [4.0]]), torch.empty(1, 1)
    >>> corrected_projection(torch.tensor([[1.0], [0.0]]), a, r, bound=1.0, columns=1)
    >>> a.T, r
    (tensor([[0., 4.]]), tensor([[3.]]))
    """
    across = Kept.from_matrix(q.T, bound=bound)
    for part, r_part in zip(a.split(columns, 1), r.split(columns, 1), strict=True):
        # Without gaps: what is sent need not be copied before and after.
        image = r_part if total is None else r_part.new_empty(r_part.mT.shape).mT
        multiply_kept(image, across, Kept.from_matrix(part.mT), alpha=1.0, beta=0.0)
        if total is not None:
            total(image)
            r_part.copy_(image)
        multiply_kept(part, across.mT, Kept.from_matrix(image.mT), alpha=-1.0, beta=1.0)


def corrected_gram(a: torch.Tensor, *, scales: torch.Tensor | None = None) -> torch.Tensor:
    """The lower triangle of ``A^T A``, column-major, like :func:`corrected_gemm`; what is above it means
    nothing.

    A is split once for all of it, which for a tall matrix takes as long as a third of the products, and a
    kernel leaves out tiles above the diagonal. With ``scales`` (n,), powers of two that make the columns of
    A, then also float64, at most 1, the Gram matrix is that of the scaled columns: nothing looks for the
    largest element then, and elements beyond 4 overflow.

    Examples
    --------
    >>> corrected_gram(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tril()
    tensor([[10.,  0.],
            [14., 20.]])
    """
    m, n = a.shape
    g = torch.zeros(n, n, dtype=torch.float32, device=a.device).T
    fewest = ceil_div(FEWEST_ELEMENTS, max(1, n) * ALIGNED) * ALIGNED
    for some in a.split(max(fewest, share(m, ROW_BLOCKS, ALIGNED))):
        whole = Kept.from_matrix(some.mT, scales=scales)
        multiply_kept(g, whole, whole, alpha=1.0, beta=1.0, lower=True)
    return g


@trial("The kernel for products", "slower products take its place")
def _tried(device: torch.device) -> None:
    one = torch.ones(ALIGNED, ALIGNED, dtype=torch.float32, device=device)
    kept = Kept.empty(ALIGNED, ALIGNED, one[0])
    keep.kernel(one, kept)
    multiply_kept.kernel(one, kept, kept, alpha=1.0, beta=0.0)


@kernel("multiply_kept_triton", trial=_tried, when=lambda c, x, y, **_: 0 not in (*c.shape, x.parts.shape[2]))
def multiply_kept(
    c: torch.Tensor,
    x: Kept,
    y: Kept,
    *,
    alpha: float,
    beta: float,
    spare: int | None = None,
    lower: bool = False,
    triangular: bool = False,
) -> torch.Tensor:
    """``C = alpha X Y^T + beta C`` for X (m, k) and Y (n, k), about as accurate as a float32 product.

    C, float32 and overwritten, is not read if ``beta`` is zero, where it may be narrower. A kernel adds
    nothing to tiles above the diagonal if only the ``lower`` triangle of C counts, and leaves out products
    if Y^T is upper ``triangular``. Its tiles fill the GPU, unless so many multiprocessors are to be left to
    others (``spare``): then they are the widest ones.

    Examples
    --------
    >>> kept = Kept.from_matrix(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> multiply_kept(torch.ones(2, 2), kept, kept, alpha=1.0, beta=-1.0)
    tensor([[ 4., 10.],
            [10., 24.]])
    """
    product = product_of_parts([*x.parts], [*y.parts], x.scheme)
    return combine(unbalanced(product, x.exponents, y.exponents), alpha, beta, c)


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


GROUP = 8
"""Tiles of C are taken in bands of so many rows of tiles, whose operands stay in the cache."""

MIN_PIECE = 1024
"""A long k is cut into pieces for several thread blocks, but not into shorter ones."""


class GemmConfig(NamedTuple):
    """How the product is cut up."""

    # rows, columns: the tile of C of a thread block.
    rows: int
    columns: int
    run: int  # products that are summed on the unit before they are added outside; what is loaded at a time
    # warps, stages: warps of a thread block, and loads in flight.
    warps: int
    stages: int


def configs(scheme: Scheme) -> list[GemmConfig]:
    """How products may be cut up, what is best for large ones first."""
    run = 128 // scheme.dtype.itemsize
    if scheme.parts == 1:
        return [
            GemmConfig(128, 256, run, 8, 3),
            GemmConfig(128, 128, run, 8, 4),
            GemmConfig(64, 64, run, 4, 3),
        ]
    less = scheme.parts - 2  # a third part needs the memory of a stage
    return [
        GemmConfig(128, 128, run, 8, 3 - less),
        GemmConfig(64, 128, run, 4, 2),
        GemmConfig(64, 64, run, 4, 3 - less),
        GemmConfig(64, 64, run // 2, 4, 2),
    ]


def multiply_kept_triton(c, x, y, *, alpha, beta, spare=None, lower=False, triangular=False):
    product = SplitProduct(x, y, lower=lower, triangular=triangular)
    if spare is None:
        config = _filling(product)
        return product(c, alpha, beta, config, product.pieces(config))
    config = first_that_runs(c.device, x.scheme, tuple(configs(x.scheme)))
    return product(c, alpha, beta, config, product.pieces(config, waves=1, spare=spare), spare)


class SplitProduct:
    """Split operands, and what it takes to multiply them.

    ``lower``: nothing is added to tiles of C above the diagonal; ``triangular``: B is upper triangular.
    """

    def __init__(self, a: Kept, b: Kept, *, lower: bool = False, triangular: bool = False) -> None:
        self.a, self.b, self.scheme = a, b, a.scheme
        self.lower, self.triangular = lower, triangular
        self.shape = (a.parts.shape[1], b.parts.shape[1])
        self.k = a.parts.shape[2]

    def tiles(self, config: GemmConfig) -> int:
        """How many there are with something to multiply."""
        down, across = ceil_div(self.shape[0], config.rows), ceil_div(self.shape[1], config.columns)
        if not self.lower:
            return down * across
        return sum(min(across, ceil_div((i + 1) * config.rows, config.columns)) for i in range(down))

    def pieces(self, config: GemmConfig, waves: int = 2, spare: int = 0) -> int:
        """Into how many pieces k should be cut so that every multiprocessor has something to do."""
        if not self.a.parts.is_cuda:
            return 1
        blocks = waves * (multiprocessors(self.a.parts.device) - spare)
        return max(1, min(self.k // MIN_PIECE, blocks // self.tiles(config)))

    def __call__(
        self, c: torch.Tensor, alpha: float, beta: float, config: GemmConfig, pieces: int, spare: int = 0
    ) -> torch.Tensor:
        if pieces == 1:
            self._launch(c[None], alpha, beta, config, spare)
            return c
        sums = torch.empty((pieces, *self.shape), dtype=torch.float32, device=c.device)
        self._launch(sums, 1.0, 0.0, config, spare)
        return combine(sums.sum(0), alpha, beta, c)

    def _launch(self, c: torch.Tensor, alpha: float, beta: float, config: GemmConfig, spare: int) -> None:
        """Products of the pieces of k into the matrices of ``c``."""
        m, n = self.shape
        piece = share(self.k, len(c), config.run)
        descriptors = (
            *self._descriptors(self.a, [config.rows, config.run]),
            *self._descriptors(self.b, [config.columns, config.run]),
        )
        tiles = ceil_div(m, config.rows) * ceil_div(n, config.columns)
        # Where multiprocessors are to stay free, a thread block on each other one goes from tile to tile.
        programs = min(tiles, multiprocessors(c.device) - spare) if spare else tiles
        _gemm_kernel[(programs, len(c))](
            *descriptors,
            *(c, self.a.largest, self.b.largest, alpha, beta, m, n, self.k, piece),
            *c.stride(),
            *(self.scheme.parts, self.scheme.shift, self.scheme.top, beta != 0.0, self.a.by_columns),
            *(not c.is_cuda, config.rows, config.columns, config.run, GROUP, programs < tiles),
            *(self.lower, self.triangular),
            num_warps=config.warps,
            num_stages=config.stages,
        )

    def _descriptors(self, operand: Kept, block: list[int]) -> list[Any]:
        """Descriptors of three parts; None for missing parts."""
        parts, block = (operand.parts.mT, block[::-1]) if operand.by_columns else (operand.parts, block)
        descriptors = [Tiles(part, tuple(block)) for part in parts]
        return descriptors + [None] * (3 - len(descriptors))


def _filling(product: SplitProduct) -> GemmConfig:
    """The widest tile of which there are as many as multiprocessors, or more; else the smallest one.

    On an H200 the fastest one for all shapes from 16^3 to 16384^3, within a few percent.
    """
    device, candidates = product.a.parts.device, configs(product.scheme)
    fewest = multiprocessors(device) if device.type == "cuda" else 0
    full = [config for config in candidates if product.tiles(config) >= fewest]
    small = sorted((c for c in candidates if c not in full), key=lambda c: c.rows * c.columns)
    return first_that_runs(device, product.scheme, (*full, *small))


@lru_cache(maxsize=128)
def first_that_runs(device: torch.device, scheme: Scheme, candidates: tuple[GemmConfig, ...]) -> GemmConfig:
    """The first configuration that this GPU has the shared memory and the registers for."""
    *others, last = candidates
    if device.type != "cuda":  # the interpreter: small tiles take less time
        return configs(scheme)[-1]
    one = Kept.from_matrix(torch.ones(ALIGNED, ALIGNED, dtype=torch.float32, device=device), scheme)
    for config in others:
        with contextlib.suppress(Exception):
            room = torch.empty(ALIGNED, ALIGNED, dtype=torch.float32, device=device)
            SplitProduct(one, one)(room, 1.0, 0.0, config, 1)
            return config
    return last


@jit(do_not_specialize=["m", "n", "k", "piece", "stride_piece"])
def _gemm_kernel(
    a1_parts, a2_parts, a3_parts, b1_parts, b2_parts, b3_parts, c, a_largest, b_largest, alpha, beta, m, n,
    k, piece, stride_piece, stride_row, stride_column,
    PARTS: tl.constexpr, SHIFT: tl.constexpr, TOP: tl.constexpr, ADDS: tl.constexpr, BY_COLUMNS: tl.constexpr,
    WIDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr, GROUP: tl.constexpr,
    SEVERAL: tl.constexpr, LOWER: tl.constexpr, TRIANGULAR: tl.constexpr,
):  # fmt: skip
    """A tile of C, or of one of the matrices whose sum is C; or several, one after the other."""
    if SEVERAL:
        for tile in range(tl.program_id(0), tl.cdiv(m, ROWS) * tl.cdiv(n, COLUMNS), tl.num_programs(0)):
            _tile(
                tile, a1_parts, a2_parts, a3_parts, b1_parts, b2_parts, b3_parts, c, a_largest, b_largest,
                alpha, beta, m, n, k, piece, stride_piece, stride_row, stride_column, PARTS, SHIFT, TOP, ADDS,
                BY_COLUMNS, WIDEN, ROWS, COLUMNS, RUN, GROUP, LOWER, TRIANGULAR,
            )  # fmt: skip
    else:
        _tile(
            tl.program_id(0), a1_parts, a2_parts, a3_parts, b1_parts, b2_parts, b3_parts, c, a_largest,
            b_largest, alpha, beta, m, n, k, piece, stride_piece, stride_row, stride_column, PARTS, SHIFT,
            TOP, ADDS, BY_COLUMNS, WIDEN, ROWS, COLUMNS, RUN, GROUP, LOWER, TRIANGULAR,
        )  # fmt: skip


@jit
def _tile(
    tile, a1_parts, a2_parts, a3_parts, b1_parts, b2_parts, b3_parts, c, a_largest, b_largest, alpha, beta, m,
    n, k, piece, stride_piece, stride_row, stride_column,
    PARTS: tl.constexpr, SHIFT: tl.constexpr, TOP: tl.constexpr, ADDS: tl.constexpr, BY_COLUMNS: tl.constexpr,
    WIDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr, GROUP: tl.constexpr,
    LOWER: tl.constexpr, TRIANGULAR: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    first = tile // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    row = (first + tile % (GROUP * across) % height) * ROWS
    column = tile % (GROUP * across) // height * COLUMNS
    start = tl.program_id(1) * piece
    stop = tl.minimum(start + piece, k)
    if LOWER:
        stop = tl.where(column >= row + ROWS, start, stop)
    if TRIANGULAR:
        stop = tl.minimum(stop, column + COLUMNS)

    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    small = tl.zeros((ROWS, COLUMNS), tl.float32)
    for l in range(start, stop, RUN):  # noqa: E741
        a1 = _load(a1_parts, row, l, BY_COLUMNS, WIDEN)
        b1 = _load(b1_parts, column, l, False, WIDEN).T
        if PARTS == 1:
            total = tl.dot(a1, b1, total)
        else:
            a2 = _load(a2_parts, row, l, BY_COLUMNS, WIDEN)
            b2 = _load(b2_parts, column, l, False, WIDEN).T
            # The bound keeps Triton from adding to the total on the matrix unit, which truncates.
            run = tl.dot(a1, b1, input_precision="tf32", max_num_imprecise_acc=RUN)
            small = tl.dot(a1, b2, small, input_precision="tf32")
            small = tl.dot(a2, b1, small, input_precision="tf32")
            total += run
        if PARTS == 3:
            a3 = _load(a3_parts, row, l, BY_COLUMNS, WIDEN)
            b3 = _load(b3_parts, column, l, False, WIDEN).T
            small = tl.dot(a2, b2, small, input_precision="tf32")
            small = tl.dot(a1, b3, small, input_precision="tf32")
            small = tl.dot(a3, b1, small, input_precision="tf32")
    total += small * (1.0 / (1 << SHIFT))

    i, j = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    a_exponents = exponents_of(tl.load(a_largest + i, mask=i < m, other=0.0)) - TOP
    b_exponents = exponents_of(tl.load(b_largest + j, mask=j < n, other=0.0)) - TOP
    # Beyond 2^-252 nothing is left of sums below 2^100.
    exponents = tl.minimum(tl.maximum(a_exponents[:, None] + b_exponents[None, :], -252), 252)
    total = alpha * times_power_of_two(total, exponents)
    c += tl.program_id(1).to(tl.int64) * stride_piece
    c += i.to(tl.int64)[:, None] * stride_row + j.to(tl.int64)[None, :] * stride_column
    inside = (i < m)[:, None] & (j < n)[None, :]
    if ADDS:
        total += beta * tl.load(c, mask=inside, other=0.0)
    tl.store(c, total, mask=inside)


@jit
def _load(parts, row, column, BY_COLUMNS: tl.constexpr, WIDEN: tl.constexpr):
    """A block of parts, zeros beyond the edges; in float32 for the interpreter, which has no bf16 product."""
    block = parts.load([column, row]).T if BY_COLUMNS else parts.load([row, column])
    return block.to(tl.float32) if WIDEN else block
