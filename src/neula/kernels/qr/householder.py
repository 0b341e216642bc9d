"""Householder QR of tiles in WY representation, and the way back: what TSQR needs on each level of its tree.

Ootomo and Yokota, "TSQR on TensorCores with error correction" (2021): a batched QR of tiles of up to 256 x
128 whose products run on matrix units, each operand in one part or in two (error correction). Reflectors
``I - v v^H`` are scaled so that ``|v|^2 = 2``; those of 16 columns become ``I - V T V^H`` (Schreiber and Van
Loan, "A Storage-Efficient WY Representation for Products of Householder Transformations", SIAM J. Sci. Stat.
Comput. 10, 1989). The kernel takes blocks of columns from left to right, each reflected by all blocks before
it (left-looking), so that a block is read and written once.

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
from neula.kernels.magnitudes import squares
from neula.kernels.phases import phases
from neula.kernels.products.parts import SCHEMES, parts_of, round_part

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
    "neula.kernels.qr.householder_triton:factor_tiles_triton",
    trial=_tried,
    when=lambda a, height, product, reflections=None: (
        not callable(product) and reflections is None and height <= MAX_HEIGHT
    ),
)
def factor_tiles(
    a: torch.Tensor, height: int, product: str | Product, reflections: Product | None = None
) -> tuple[TileReflectors, torch.Tensor]:
    """Householder QR of tiles of ``height`` rows.

    On a GPU by one Triton kernel, one thread block a tile, if the product is named and tiles are at most 512
    rows high; else block by block, with :func:`reflect_columns`.

    Parameters
    ----------
    a : Tensor, shape (batch, m, n)
        At least in single precision, of any strides; not modified. Squares of the norms of columns should not
        overflow, and norms should be in the range of the product's format: what is shorter than 1e-12 in
        float32, or 1e-138 in float64, counts as zero.
    height : int
        At least n. The last tile of a matrix may have fewer rows than columns.
    product : {"tf32", "tf32_cor", "fp16", "fp16_cor"} or callable
        Of a block by a block; the named ones are for float32.
    reflections : callable, optional
        Product of a block and a vector, if ``product`` is callable; float32 by default.

    Returns
    -------
    reflectors : TileReflectors
    r : Tensor, shape (batch, blocks * n, n)
        The triangular factors of the tiles one above the other. Their diagonals have any sign.
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
        rest -= _reflected(panel, block[0].mH, rest, multiply)
        r[:, start:stop, stop:] = rest[:, : stop - start]
        rest[:, : stop - start] = 0
    return (
        TileReflectors(v[:, :m], t.view(batch, blocks, panels, WIDTH, WIDTH), height),
        r.view(batch, blocks * n, n),
    )


@kernel(
    "neula.kernels.qr.householder_triton:apply_tiles_triton",
    trial=_tried,
    when=lambda reflectors, c, product: not callable(product) and reflectors.height <= MAX_HEIGHT,
)
def apply_tiles(reflectors: TileReflectors, c: torch.Tensor, product: str | Product) -> torch.Tensor:
    """``Q [C; 0]`` of each tile, by a kernel where :func:`factor_tiles` has one.

    Parameters
    ----------
    reflectors : TileReflectors
    c : Tensor, shape (batch, blocks * n, n)
        For each tile a matrix of n x n, one above the other.
    product : {"tf32", "tf32_cor", "fp16", "fp16_cor"} or callable

    Returns
    -------
    Tensor, shape (batch, m, n)
        The tiles one above the other.
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
        q -= _reflected(block, t[:, p, :width, :width], q, multiply)
    return q.view(batch, blocks * height, n)[:, :m]


def _reflected(v: torch.Tensor, t: torch.Tensor, c: torch.Tensor, multiply: Product) -> torch.Tensor:
    """``V (T (V^H C))``: what a block reflector subtracts."""
    return multiply(v, multiply(t, multiply(v.mH, c)))


@kernel(
    "neula.kernels.qr.householder_triton:reflect_columns_triton",
    trial=_tried,
    when=lambda panel, multiply=None: multiply is None and panel.shape[1] <= MAX_HEIGHT,
)
def reflect_columns(
    panel: torch.Tensor, multiply: Product | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Householder QR of one block of columns, column by column.

    Parameters
    ----------
    panel : Tensor, shape (batch, m, n), m >= n, n <= 16
        Its columns become the reflectors.
    multiply : callable, optional
        Product of the panel and a vector, and of a vector and a row. Norms are in the panel's own precision.

    Returns
    -------
    T, R : Tensor, shape (batch, n, n)
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
        row = (products - beta.conj()[:, None] * panel[:, k]) * scale[
            :, None
        ]  # v^H V left of k, v^H A right of it
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
