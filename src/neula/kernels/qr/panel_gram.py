"""Panels in half precision: Gram matrix in two blocks of columns, what elimination leaves of it, products.

Cholesky QR of so many columns reads them once for all inner products, where Gram-Schmidt of one block against
the other would read both again; the second factor is that of the Schur complement. Products of numbers in
half precision are exact, and sums on the unit are short.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div, elements_at_a_time, multiprocessors, share
from neula.kernels.precision import exact_matmul
from neula.kernels.qr.tall import TallGramConfig, sum_of_blocks
from neula.kernels.triton_source import jit, tl

WIDTH = 128
"""Columns of a block."""

LOST = 2.0**-19
"""Part of a diagonal element that a pivot may owe to rounding errors, as in the kernel of a block."""


class PanelGram(NamedTuple):
    """Gram matrix of ``[A1 A2]``."""

    first: torch.Tensor  # shape (k, k): A1^T A1 in float64
    across: torch.Tensor  # shape (k, l): A1^T A2; none where there is no second block
    second: torch.Tensor  # shape (l, l): A2^T A2

    @classmethod
    def from_gram(cls, gram: torch.Tensor) -> PanelGram:
        """The blocks of a whole one."""
        return cls(gram[:WIDTH, :WIDTH], gram[:WIDTH, WIDTH:], gram[WIDTH:, WIDTH:])


@trial("The kernels of panels in half precision", "products in float64 take their place")
def _tried(device: torch.device) -> None:
    a = torch.eye(WIDTH + 1, dtype=torch.float16, device=device).T
    gram = panel_gram.kernel(a)
    eliminate.kernel(gram.first.float(), gram.across, gram.second, gram.across.float())


@kernel("panel_gram_triton", trial=_tried)
def panel_gram(a: torch.Tensor) -> PanelGram:
    """Inner products of the columns of a panel (m, n), float16, column-major and of up to 256 columns, as
    accurate as in float32, on a GPU by a Triton kernel.
    """
    left, right = a[:, :WIDTH].double(), a[:, WIDTH:].double()
    return PanelGram(left.mT @ left, left.mT @ right, right.mT @ right)


@kernel("eliminate_triton", trial=_tried)
def eliminate(
    inverse: torch.Tensor, across: torch.Tensor, second: torch.Tensor, r: torch.Tensor
) -> torch.Tensor:
    """``R12 = R11^-T G12`` into ``r``, and ``G22 - R12^T R12``, on a GPU by a Triton kernel.

    ``inverse`` is ``R11^-1`` in float32, ``across`` and ``second`` are float64. Diagonal elements of the
    result are at least what those of ``second`` may owe to rounding errors.
    """
    r.copy_(exact_matmul(inverse.mT, across.to(inverse.dtype)))
    rest = second - exact_matmul(r.mT, r).double()
    least = LOST * second.diagonal()
    rest.diagonal().copy_(torch.where(rest.diagonal() < least, least, rest.diagonal()))
    return rest


GRAM = TallGramConfig(128, 8, 3, 1)
"""8192 x 256 take 10.7 us, 131072 x 256 38."""

TILE = 32
"""Order of the tiles of a product of blocks."""


def panel_gram_triton(a):
    m, n = a.shape
    pairs = 1 if n <= WIDTH else 3
    rows, warps, stages, blocks = GRAM
    chunk = share(m, max(1, blocks * multiprocessors(a.device) // pairs), rows)
    count = ceil_div(m, chunk)
    parts = torch.empty(count, pairs * WIDTH, WIDTH, dtype=torch.float32, device=a.device)
    vector = elements_at_a_time(a)
    _gram_kernel[(count, pairs)](
        *(a, parts, m, n, chunk, a.stride(1)),
        *(rows, WIDTH, stages if vector > 1 else 1, vector),
        num_warps=warps,
    )
    total = torch.empty(pairs * WIDTH, WIDTH, dtype=torch.float64, device=a.device)
    first, *others = sum_of_blocks(parts, total).split(WIDTH)
    k, rest = min(n, WIDTH), max(0, n - WIDTH)
    across, second = others or (total[:, :0], total[:0, :0])
    return PanelGram(first[:k, :k], across[:k, :rest], second[:rest, :rest])


def eliminate_triton(inverse, across, second, r):
    rest = torch.empty(second.shape, dtype=torch.float64, device=r.device)
    _multiply(inverse, across, None, r)
    _multiply(r, r, second, rest)
    return rest


def _multiply(x: torch.Tensor, y: torch.Tensor, base: torch.Tensor | None, out: torch.Tensor) -> None:
    """``X^T Y``, or what is left of a base without it: two launches take half of the time of one for both."""
    m, n = out.shape
    _multiply_kernel[(ceil_div(m, TILE), ceil_div(n, TILE))](
        *(x, y, out if base is None else base, out, len(x), m, n),
        *(*x.stride(), *y.stride(), *(out if base is None else base).stride(), *out.stride()),
        *(WIDTH, TILE, base is not None, LOST),
        num_warps=4,
    )


@jit(do_not_specialize=["m", "n", "chunk"])
def _gram_kernel(
    a, parts, m, n, chunk, a_column,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Partial Gram matrices over some rows: of the first block of columns, or of the first and the second."""
    # Multiples of VECTOR, as the compiler has to see to move so many elements at a time.
    m, a_column, chunk = m // VECTOR * VECTOR, a_column // VECTOR * VECTOR, chunk // ROWS * ROWS
    first = tl.program_id(0).to(tl.int64) * chunk
    last = tl.minimum(first + chunk, m)
    i, k = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)
    left = (tl.program_id(1) // 2 * WIDTH + k)[None, :]
    right = ((tl.program_id(1) + 1) // 2 * WIDTH + k)[None, :]
    x_column, y_column = a + left.to(tl.int64) * a_column, a + right.to(tl.int64) * a_column
    total = tl.zeros((WIDTH, WIDTH), tl.float32)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + i
        x = tl.load(x_column + row, mask=(row < last) & (left < n), other=0.0)
        y = tl.load(y_column + row, mask=(row < last) & (right < n), other=0.0)
        total += tl.dot(tl.trans(x), y)  # by an ordinary addition, rounded to nearest: the unit truncates
    parts += (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * WIDTH * WIDTH
    tl.store(parts + k[:, None] * WIDTH + k[None, :], total)


@jit(do_not_specialize=["k", "m", "n"])
def _multiply_kernel(
    x, y, base, out, k, m, n,
    x_row, x_column, y_row, y_column, base_row, base_column, out_row, out_column,
    WIDTH: tl.constexpr, TILE: tl.constexpr, SUBTRACTS: tl.constexpr, LOST: tl.constexpr,
):  # fmt: skip
    """A tile of a product of matrices with at most WIDTH rows."""
    l = tl.arange(0, WIDTH)[:, None]  # noqa: E741
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)
    left = _loaded(x, l, i[None, :], x_row, x_column, k, m).to(tl.float32)
    right = _loaded(y, l, j[None, :], y_row, y_column, k, n).to(tl.float32)
    found = tl.dot(tl.trans(left), right, input_precision="tf32x3")
    i, j = i[:, None], j[None, :]
    if SUBTRACTS:
        before = _loaded(base, i, j, base_row, base_column, m, n)
        found = before - found.to(tl.float64)
        found = tl.where((i == j) & (found < LOST * before), LOST * before, found)
    tl.store(out + i * out_row + j * out_column, found, mask=(i < m) & (j < n))


@jit
def _loaded(x, i, j, row, column, rows, columns):
    return tl.load(x + i * row + j * column, mask=(i < rows) & (j < columns), other=0.0)
