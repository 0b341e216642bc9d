"""Householder QR of tiles in WY representation, and the way back, for each level of the tree of TSQR.

Ootomo and Yokota, "TSQR on TensorCores with error correction" (2021): a batched QR of tiles of up to 256 x
128 whose products run on matrix units, each operand in one part or in two (error correction). Reflectors ``I
- v v^H`` are scaled so that ``|v|^2 = 2``; those of 16 columns become ``I - V T V^H`` (Schreiber and Van
Loan, "A Storage-Efficient WY Representation for Products of Householder Transformations", SIAM J. Sci. Stat.
Comput. 10, 1989). The kernel takes blocks of columns, which it keeps in registers, from left to right, each
reflected by all blocks before it (left-looking), so that a block is read and written once. The bound is the
latency of n dependent reflections in a tile, about a microsecond each.

Matrix products use the chosen function. The reflections inside a block of 16 columns multiply by one vector
at a time, which matrix units do not speed up; they are float32 throughout, unless a product for them is
given, as in the slides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from neula.errors import unknown_name
from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div, next_power_of_2
from neula.kernels.magnitudes import squares
from neula.kernels.phases import phases
from neula.kernels.products.parts import SCHEMES, parts_of, round_part
from neula.kernels.products.parts_triton import remainder, round_to_bits
from neula.kernels.qr.mgs import square_root
from neula.kernels.triton_source import jit, tl

WIDTH = 16
"""Columns of a block: what is reflected column by column before products take over. As many as a matrix unit
takes: with 32, 1024 tiles of 256 x 128 take 1.6 ms on an H200 instead of 1.0."""

MAX_HEIGHT = 512
"""Rows of the tallest tile that the kernels take. Twice the paper's, which halves the levels of a tree for
128 columns, and with them what sums that the unit truncates cost: on an H200 Q of 32768 x 128 in fp16_cor is
orthogonal to 0.9e-6 instead of 1.9e-6."""

PRODUCTS = ("tf32", "tf32_cor", "fp16", "fp16_cor")
"""Products of float32 matrices in the kernels."""

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A batch of small products, (batch, m, k) times (batch, k, n)."""


@dataclass(frozen=True)
class TileReflectors:
    """Orthogonal matrices of the tiles of some matrices."""

    # Shape (batch, m, n): Householder vectors in the place of the columns that they annihilate, zeros above.
    v: torch.Tensor
    # Shape (batch, blocks, ceil(n / 16), 16, 16): upper triangular: columns 16 p to 16 p + 15 of a tile make
    # the reflector I - V T V^H.
    t: torch.Tensor
    height: int  # rows of a tile; the last one of a matrix may be shorter


@trial("The reflector kernels", "plain torch takes their place, much slower")
def _tried(device: torch.device) -> None:
    ones = torch.ones(1, MAX_HEIGHT, WIDTH + 1, dtype=torch.float32, device=device)
    reflectors, _ = factor_tiles.kernel(ones, MAX_HEIGHT, "fp16_cor")
    apply_tiles.kernel(reflectors, ones[:, : WIDTH + 1], "fp16_cor")


@kernel(
    "factor_tiles_triton",
    trial=_tried,
    when=lambda a, height, product, reflections=None: (
        not callable(product) and reflections is None and height <= MAX_HEIGHT
    ),
)
def factor_tiles(
    a: torch.Tensor, height: int, product: str | Product, reflections: Product | None = None
) -> tuple[TileReflectors, torch.Tensor]:
    """Householder QR of tiles of ``height`` rows, at least n, of matrices (batch, m, n) at least in single
    precision.

    On a GPU by one Triton kernel, one thread block a tile, if the product is named, which is for float32, and
    tiles are at most 512 rows high; else block by block, with :func:`reflect_columns`. ``reflections`` is the
    product of a block and a vector, float32 by default. Squares of the norms of columns should not overflow,
    and norms should be in the range of the product's format: what is shorter than 1e-12 in float32, or 1e-138
    in float64, counts as zero.

    Returns the reflectors, and R (batch, blocks * n, n): the triangular factors of the tiles one above the
    other. Their diagonals have any sign.
    """
    multiply = product if callable(product) else product_named(product)
    batch, m, n = a.shape
    blocks, panels = -(-m // height), -(-n // WIDTH)
    # Zero rows change nothing: the reflectors have zeros there.
    v = a.new_zeros(batch, blocks * height, n)
    v[:, :m] = a
    tiles = v.view(batch * blocks, height, n)
    t = a.new_zeros(len(tiles), panels, WIDTH, WIDTH)
    r = a.new_zeros(len(tiles), n, n)
    for p in range(panels):
        start, stop = p * WIDTH, min((p + 1) * WIDTH, n)
        panel, rest = tiles[:, start:, start:stop], tiles[:, start:, stop:]
        block = reflect_columns(panel, reflections) if reflections else reflect_columns(panel)
        t[:, p, : stop - start, : stop - start], r[:, start:stop, start:stop] = block
        rest -= _block_reflected(panel, block[0].mH, rest, multiply)
        r[:, start:stop, stop:] = rest[:, : stop - start]
        rest[:, : stop - start] = 0
    return (
        TileReflectors(v[:, :m], t.view(batch, blocks, panels, WIDTH, WIDTH), height),
        r.view(batch, blocks * n, n),
    )


@kernel(
    "apply_tiles_triton",
    trial=_tried,
    when=lambda reflectors, c, product: not callable(product) and reflectors.height <= MAX_HEIGHT,
)
def apply_tiles(reflectors: TileReflectors, c: torch.Tensor, product: str | Product) -> torch.Tensor:
    """``Q [C; 0]`` of each tile, one above the other, by a kernel where :func:`factor_tiles` has one; C
    (batch, blocks * n, n) has a matrix of n x n for each.
    """
    multiply = product if callable(product) else product_named(product)
    batch, m, n = reflectors.v.shape
    blocks, height = reflectors.t.shape[1], reflectors.height
    v = c.new_zeros(batch, blocks * height, n)
    v[:, :m] = reflectors.v
    v, t = v.view(batch * blocks, height, n), reflectors.t.flatten(0, 1)
    q = c.new_zeros(batch * blocks, height, n)
    q[:, :n] = c.reshape(batch * blocks, n, n)
    for p in reversed(range(t.shape[1])):
        block = v[..., p * WIDTH : (p + 1) * WIDTH]
        width = block.shape[2]
        q -= _block_reflected(block, t[:, p, :width, :width], q, multiply)
    return q.view(batch, blocks * height, n)[:, :m]


def _block_reflected(v: torch.Tensor, t: torch.Tensor, c: torch.Tensor, multiply: Product) -> torch.Tensor:
    """``V (T (V^H C))``: what a block reflector subtracts."""
    return multiply(v, multiply(t, multiply(v.mH, c)))


@kernel(
    "reflect_columns_triton",
    trial=_tried,
    when=lambda panel, multiply=None: multiply is None and panel.shape[1] <= MAX_HEIGHT,
)
def reflect_columns(
    panel: torch.Tensor, multiply: Product | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Householder QR of one block (batch, m, n) of at most 16 columns, column by column: they become the
    reflectors, and T and R (batch, n, n) are returned.

    ``multiply`` is the product of the panel and a vector, and of a vector and a row. Norms are in the panel's
    own precision.
    """
    batch, _, width = panel.shape
    negligible = negligible_square(panel.dtype)
    t, r = panel.new_zeros(batch, width, width), panel.new_zeros(batch, width, width)
    for k in range(width):
        x = panel[..., k : k + 1].clone()
        x[:, :k] = 0
        products = (x.conj() * panel).sum(1) if multiply is None else multiply(x.mH, panel)[:, 0]
        square, alpha = products[:, k].real if multiply is None else squares(x).sum((1, 2)), panel[:, k, k]
        square = torch.where(square < negligible, 0.0, square)
        norm = square.sqrt()
        beta = torch.where(alpha == 0, norm, -norm * phases(alpha))
        root = (norm * (norm + alpha.abs())).sqrt()
        scale = torch.where(root == 0, 0.0, 1 / root)
        x[:, k, 0] -= beta
        v = x * scale[:, None, None]
        # v^H V left of k, v^H A right of it.
        row = (products - beta.conj()[:, None] * panel[:, k]) * scale[:, None]
        right = row[:, None, k + 1 :]
        panel[..., k + 1 :] -= v * right if multiply is None else multiply(v, right)
        r[:, :k, k], r[:, k, k] = panel[:, :k, k], beta
        panel[..., k : k + 1] = v
        t[:, :k, k] = -(t[:, :k, :k] * row[:, None, :k].conj()).sum(2)
        t[:, k, k] = 1.0
    return t, r


def negligible_square(dtype: torch.dtype) -> float:
    """Squares of norms below this have lost digits to underflow: reflectors would not be orthogonal.

    At most ``sqrt(tiny) / u`` is then left of a column of norm 1, and counts as zero.
    """
    info = torch.finfo(dtype)
    return info.tiny / info.eps**2


def product_named(name: str) -> Product:
    """A product of :data:`PRODUCTS` in plain torch; sums are exact up to 2^-53, then rounded to float32."""
    if name not in PRODUCTS:
        raise unknown_name("product", name, PRODUCTS)
    scheme = SCHEMES[f"{name.removesuffix('_cor')}_cor"]

    def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        high, low = parts_of(x, partial(round_part, scheme=scheme), 2, 2.0**scheme.shift)
        return high.double(), low.double()

    def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        (x_high, x_low), (y_high, y_low) = split(x), split(y)
        total = x_high @ y_high
        if name.endswith("_cor"):
            total += (x_high @ y_low + x_low @ y_high) * 2.0**-scheme.shift
        return total.float()

    return multiply


BYTES_PER_WARP = 4096
"""Of a block of columns, 32 registers in each thread: on an H200 1024 tiles of 256 x 128 in fp16_cor take 1.0
and 0.6 ms with four warps, 1.1 and 1.1 with two."""

COLUMNS = 32
"""Columns of Q that a thread block computes."""


def factor_tiles_triton(a, height, product):
    batch, m, n = a.shape
    blocks, panels = ceil_div(m, height), ceil_div(n, WIDTH)
    v = torch.empty((batch, m, n), dtype=a.dtype, device=a.device)
    t = a.new_empty(batch, blocks, panels, WIDTH, WIDTH)
    r = a.new_empty(batch, blocks * n, n)
    _factor(a, v, t, r, height, product)
    return TileReflectors(v, t, height), r


def reflect_columns_triton(panel):
    batch, m, n = panel.shape
    t, r = panel.new_empty(batch, WIDTH, WIDTH), panel.new_empty(batch, n, n)
    _factor(panel, panel, t, r, m, "")
    return t[:, :n, :n], r


def _factor(
    a: torch.Tensor, v: torch.Tensor, t: torch.Tensor, r: torch.Tensor, height: int, product: str
) -> None:
    batch, m, n = a.shape
    rows, blocks = _padded(height), ceil_div(m, height)
    _factor_kernel[(batch * blocks,)](
        *(a, v, t, r, m, n, height, blocks, *a.stride(), *v.stride()),
        *(rows, WIDTH, product, n <= WIDTH, negligible_square(a.dtype)),
        num_warps=_warps(rows, a),
    )


def apply_tiles_triton(reflectors, c, product):
    v, t = reflectors.v, reflectors.t
    batch, m, n = v.shape
    q = torch.empty_like(v)
    rows = _padded(reflectors.height)
    _apply_kernel[(batch * t.shape[1], ceil_div(n, COLUMNS))](
        *(v, t, c, q, m, n, reflectors.height, t.shape[1], *c.stride()),
        *(rows, WIDTH, COLUMNS, product),
        num_warps=_warps(rows, v),
    )
    return q


def _padded(height: int) -> int:
    """Powers of two: each size is compiled once."""
    return max(32, next_power_of_2(height))


def _warps(rows: int, a: torch.Tensor) -> int:
    return max(1, rows * WIDTH * a.element_size() // BYTES_PER_WARP)


@jit(do_not_specialize=["m", "height", "blocks"])
def _factor_kernel(
    a, v, t, r, m, n, height, blocks, a_batch, a_row, a_column, v_batch, v_row, v_column,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PRODUCT: tl.constexpr, SINGLE: tl.constexpr,
    NEGLIGIBLE: tl.constexpr,
):  # fmt: skip
    """The reflectors and R of the tile of this program, of a single block of columns or of several."""
    tile = tl.program_id(0).to(tl.int64)  # offsets may exceed 2^31
    matrix, first = tile // blocks, (tile % blocks) * height
    here = tl.minimum(m - first, height)
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    k = tl.arange(0, WIDTH)[:, None]
    a += matrix * a_batch + (first + i) * a_row
    v += matrix * v_batch + (first + i) * v_row
    t += tile * tl.cdiv(n, WIDTH) * WIDTH * WIDTH
    r += tile * n * n + i.to(tl.int64) * n
    for start in range(0, n, WIDTH):
        inside = (i < here) & (start + j < n)
        p = tl.load(a + (start + j).to(tl.int64) * a_column, mask=inside, other=0.0)
        if not SINGLE:
            for before in range(0, start, WIDTH):
                block = tl.load(v + (before + j) * v_column, mask=i < here, other=0.0)
                # Of T^T: the factorization applies reflectors in their order, Q in the opposite one.
                transposed = tl.load(t + before * WIDTH + j * WIDTH + k)
                p -= _reflected(block, transposed, p, PRODUCT)
        p, transposed, diagonal = _reflect_columns(p, start, i, j, k, WIDTH, NEGLIGIBLE)
        upper = tl.where(i < start + j, p, tl.where(i == start + j, diagonal, 0.0))
        tl.store(r + start + j, upper, mask=(i < n) & (start + j < n))
        tl.store(v + (start + j) * v_column, tl.where(i < start + j, 0.0, p), mask=inside)
        tl.store(t + start * WIDTH + j * WIDTH + k, transposed)
        tl.debug_barrier()  # before other threads read V and T


@jit
def _reflect_columns(p, start, i, j, k, WIDTH: tl.constexpr, NEGLIGIBLE: tl.constexpr):
    """Reflect column by column: returns V with R above it, ``T^T``, and the diagonal of R.

    A column stays as it is when its turn has come, and becomes a reflector at the end: each step touches the
    block in multiply-adds only.
    """
    gram = tl.zeros((WIDTH, WIDTH), p.dtype)
    diagonal = tl.zeros((1, WIDTH), p.dtype)
    scales = tl.zeros((1, WIDTH), p.dtype)
    for step in range(WIDTH):
        pivot = i == start + step
        x = tl.where(i >= start + step, _column(p, j, step), 0.0)
        products = tl.sum(x * p, axis=0, keep_dims=True)
        top = tl.sum(tl.where(pivot, p, 0.0), axis=0, keep_dims=True)
        square, alpha = _column(products, j, step), _column(top, j, step)
        norm = square_root(tl.where(square < NEGLIGIBLE, 0.0, square))
        beta = tl.where(alpha > 0.0, -norm, norm)
        root = square_root(norm * (norm + tl.abs(alpha)))
        scale = tl.where(root == 0.0, 0.0, 1.0 / tl.where(root == 0.0, 1.0, root))
        row = (products - beta * top) * scale  # v^T x left of this column, v^T A right of it
        gram = tl.where(k == step, tl.where(j < step, row, 0.0), gram)
        diagonal = tl.where(j == step, beta, diagonal)
        scales = tl.where(j == step, scale, scales)
        p -= tl.where(pivot, x - beta, x) * tl.where(j > step, scale * row, 0.0)
    reflectors = tl.where(i == start + j, p - diagonal, p) * scales
    p = tl.where(i >= start + j, reflectors, p)
    return p, _inverse(gram * scales, k, j, WIDTH), diagonal


@jit
def _inverse(lower, k, j, WIDTH: tl.constexpr):
    """``(I + L)^-1`` of a strictly lower triangular L: blocks on the diagonal grow from 1 to WIDTH."""
    inverse = tl.where(k == j, 1.0, 0.0).to(lower.dtype)
    size = 1
    while size < WIDTH:
        below = (k // size == j // size + 1) & ((j // size) % 2 == 0)
        step = tl.dot(inverse, tl.where(below, lower, 0.0), input_precision="ieee", out_dtype=lower.dtype)
        inverse -= tl.dot(step, inverse, input_precision="ieee", out_dtype=lower.dtype)
        size *= 2
    return inverse


@jit(do_not_specialize=["m", "height", "blocks"])
def _apply_kernel(
    v, t, c, q, m, n, height, blocks, c_batch, c_row, c_column,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """Some columns of ``Q [C; 0]`` of a tile."""
    tile = tl.program_id(0).to(tl.int64)
    matrix, first = tile // blocks, (tile % blocks) * height
    here = tl.minimum(m - first, height)
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    k = tl.arange(0, WIDTH)[:, None]
    mine = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    c += matrix * c_batch + ((tile % blocks) * n + i) * c_row
    v += (matrix * m + first + i) * n
    t += tile * tl.cdiv(n, WIDTH) * WIDTH * WIDTH
    x = tl.load(c + mine.to(tl.int64) * c_column, mask=(i < n) & (mine < n), other=0.0)
    for panel in range(tl.cdiv(n, WIDTH)):
        start = (tl.cdiv(n, WIDTH) - 1 - panel) * WIDTH
        block = tl.load(v + start + j, mask=(i < here) & (start + j < n), other=0.0)
        triangle = tl.load(t + start * WIDTH + k * WIDTH + j)
        x -= _reflected(block, triangle, x, PRODUCT)
    tl.store(q + (matrix * m + first + i) * n + mine, x, mask=(i < here) & (mine < n))


@jit
def _reflected(v, t, c, PRODUCT: tl.constexpr):
    """``V (T (V^T C))``: what a block reflector subtracts."""
    # A matrix unit truncates its sums: those over rows are cut into runs, which are added outside.
    w = tl.sum(_multiply(tl.permute(_runs(v), (0, 2, 1)), _runs(c), PRODUCT), axis=0)
    return _multiply(v, _multiply(t, w, PRODUCT), PRODUCT)


@jit
def _runs(x):
    """Rows in groups of 32, as a third dimension."""
    return tl.reshape(x, (x.shape[0] // 32, 32, x.shape[1]))


@jit
def _multiply(x, y, PRODUCT: tl.constexpr):
    if PRODUCT == "fp16":
        z = tl.dot(x.to(tl.float16), y.to(tl.float16))
    elif PRODUCT == "tf32":
        z = tl.dot(round_to_bits(x, 11), round_to_bits(y, 11), input_precision="tf32")
    elif PRODUCT == "fp16_cor":
        x_high, y_high = x.to(tl.float16), y.to(tl.float16)
        x_low, y_low = remainder(x, x_high, 2048.0), remainder(y, y_high, 2048.0)
        small = tl.dot(x_low, y_high, tl.dot(x_high, y_low))
        z = tl.dot(x_high, y_high) + small * (1.0 / 2048.0)
    else:
        x_high, y_high = round_to_bits(x, 11), round_to_bits(y, 11)
        x_low, y_low = round_to_bits(x - x_high, 11), round_to_bits(y - y_high, 11)
        small = tl.dot(x_low, y_high, tl.dot(x_high, y_low, input_precision="tf32"), input_precision="tf32")
        z = tl.dot(x_high, y_high, input_precision="tf32") + small
    return z


@jit
def _column(a, j, k):
    """Column k, for all threads: registers have no index, but they can be summed under a mask."""
    return tl.sum(a * tl.where(j == k, 1.0, 0.0).to(a.dtype), axis=1, keep_dims=True)
