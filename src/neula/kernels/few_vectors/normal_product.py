"""``A X`` and ``A^T A X`` in one pass over a tall matrix, as iterations for least squares need them.

An H200 does 14 flops in float64 in the time of a byte without matrix units, so memory decides, and reading A
once instead of twice is the gain. A thread block goes through every so many blocks of whole rows, kept in
registers. A row of Y is a sum over all its threads; Z is summed in the registers of the thread that holds the
column.
"""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.few_vectors.one_pass_host import one_pass, pays
from neula.kernels.few_vectors.thin import thin_product
from neula.kernels.few_vectors.vectors_triton import load_vectors, store_vectors
from neula.kernels.launch import ceil_div, multiprocessors, next_power_of_2
from neula.kernels.precision import adjoint_times
from neula.kernels.triton_source import jit, tl

COLUMNS = 4096
"""Up to how many columns a few rows fit in the registers of a multiprocessor."""

NARROWEST = 160
"""1000000 rows of 200 columns take 0.49 ms on an H200, and 0.76 ms by two products of cuBLAS."""

ONE_WARP, SEVERAL = 256, 400
"""Rows of up to so many columns are added up in one or two warps, and from so many on by a thread block;
those between are filled up to 512 columns, half of them with nothing."""

ROWS = 4096
"""Rows below which two products of the library take no longer than launches."""

VECTORS = 5
"""More vectors would take more passes, or more registers than there are; fewer beyond a quarter, and half, of
:data:`COLUMNS`."""


@trial("The kernel of normal products", "A is read twice in its place")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, device=device, dtype=torch.float64)
    normal_product.kernel(one, one)


def fits(n: int) -> bool:
    """Whether rows of n columns are neither too short nor too long."""
    return NARROWEST <= n <= ONE_WARP or SEVERAL <= n <= COLUMNS


def vectors_at_once(n: int) -> int:
    """How many vectors the kernel multiplies a matrix of n columns by in one pass."""
    return VECTORS if 4 * n <= COLUMNS else VECTORS - 1 if 2 * n <= COLUMNS else VECTORS // 2


def _in_one_pass(a: torch.Tensor, x: torch.Tensor, b: torch.Tensor | None = None) -> bool:
    (m, n), k = a.shape, x.shape[1]
    in_registers = m >= max(n, ROWS) and fits(n) and 0 < k <= vectors_at_once(n)
    return in_registers and a.dtype == x.dtype == torch.float64 and a.stride(1) == 1


@kernel("normal_product_triton", trial=_tried, when=_in_one_pass)
def normal_product(
    a: torch.Tensor, x: torch.Tensor, b: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``Y = A X``, or ``Y = B - A X`` where B is given, and ``A^H Y``; A may be in a narrower dtype than the
    others.

    On a GPU a Triton kernel computes both and reads A once, where A is float64, row-major and tall, on a CPU
    the compiled core does where A is large and float32; elsewhere they are two products.
    """
    if a.dtype != x.dtype and pays(a):
        return one_pass(a, x, b)
    y = product(a, x)
    if b is not None:
        y = b - y
    return y, transposed_product(a, y)


def product(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``A X``. MKL takes two thirds of the time where the columns of X are contiguous."""
    if a.dtype != x.dtype and pays(a):
        return one_pass(a, x, back=False)[0]
    if a.dtype != x.dtype:
        return thin_product(a, x)
    return a @ x.T.contiguous().T


@kernel("transposed_product_triton", trial=_tried, when=_in_one_pass)
def transposed_product(a: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``A^H Y``, by the same kernel: cuBLAS takes several times as long as memory does for tall A.

    ``Y^T A`` reads row-major A along its rows; MKL takes eight times as long for ``A^T Y`` with two columns.
    """
    if a.dtype != y.dtype and pays(a):
        return one_pass(a, None, y, image=False)[1]
    if a.dtype != y.dtype:
        return product(a.mH, y)
    if a.is_complex():
        return adjoint_times(a, y)
    return a.T @ y if y.shape[1] == 1 else (y.T @ a).T


def config(width: int, vectors: int) -> tuple[int, int, int, int]:
    """Elements of A at a time, warps, thread blocks for each multiprocessor, and loads in flight.

    Of wide rows a thread block has 64 KB at a time, of which three fit in shared memory: two on their way,
    one in use; half as many for more than two vectors, whose sums take registers as well. Those wait for one
    another once a vector: where registers last, another thread block works meanwhile (262144 rows of 1024
    columns, five vectors: 1.07 ms on an H200, and 1.65 by one of 8 warps). Rows that fit in the registers of
    one or two warps need not be added up through shared memory, for which all wait: 1000000 rows of 200
    columns take 0.49 ms for one vector, and 0.62 for four; with 8 warps 1.9.
    """
    if width <= ONE_WARP:
        return (2048, 2, 8, 3) if vectors <= 2 else (512, 1, 16, 3)
    if vectors <= 2:
        return 8192, 8, 1, 3
    return (2048, 4, 2, 4) if width <= 1024 else (4096, 8, 1, 3)


def normal_product_triton(a, x, b=None):
    k = x.shape[1]
    y = torch.empty(k, a.shape[0], dtype=a.dtype, device=a.device)
    return y.T, _launched(k, a, x.T.contiguous(), b, y)


def transposed_product_triton(a, y):
    return _launched(y.shape[1], a, None, y, None)


def _launched(
    k: int, a: torch.Tensor, x: torch.Tensor | None, b: torch.Tensor | None, y: torch.Tensor | None
) -> torch.Tensor:
    """``A^T Y``, shape (n, k), for the Y that X and B make, or that B is; vectors in X and in Y are rows."""
    m, n = a.shape
    width = max(32, next_power_of_2(n))
    tile, warps, blocks, stages = config(width, k)
    rows = max(1, tile // width)
    programs = min(blocks * multiprocessors(a.device), ceil_div(m, rows))
    sums = torch.empty(programs, k, n, dtype=a.dtype, device=a.device)
    b_strides = (0, 0) if b is None else b.stride()
    _normal_product[(programs,)](
        *(a, a if x is None else x, a if b is None else b, a if y is None else y, sums, m, n),
        *(a.stride(0), *b_strides, rows, width, k, x is not None, b is not None, stages, n == width),
        num_warps=warps,
    )
    return sums.sum(0).T


@jit(do_not_specialize=["m", "n", "b_row", "b_column"])
def _normal_product(
    a, x, b, y, sums, m, n, a_row, b_row, b_column,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, VECTORS: tl.constexpr, FROM_X: tl.constexpr,
    FROM_B: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Partial sums of ``A^T y`` over every so many blocks of rows."""
    m, b_column = m.to(tl.int64), b_column.to(tl.int64)  # offsets may exceed 2^31
    j = tl.arange(0, WIDTH)
    none = tl.zeros((ROWS,), tl.float64)
    totals, images = (tl.zeros((WIDTH,), tl.float64),) * VECTORS, (none,) * VECTORS
    if FROM_X:
        vectors = load_vectors(x + j, n, j < n, VECTORS, tl.float64)
    first = tl.program_id(0).to(tl.int64) * ROWS
    step = tl.num_programs(0).to(tl.int64) * ROWS
    for start in tl.range(first, m, step, num_stages=STAGES):
        i = start + tl.arange(0, ROWS)
        place = a + i[:, None] * a_row + j[None, :]
        if WHOLE:
            block = tl.load(place, mask=(i < m)[:, None], other=0.0)
        else:
            block = tl.load(place, mask=(i < m)[:, None] & (j < n)[None, :], other=0.0)
        b_place, y_place = b + i * b_row, y + i
        if FROM_X:
            images = _images(block, vectors, VECTORS)
        found = ()
        for v in tl.static_range(VECTORS):
            product = _product(
                block, images[v], b_place + v * b_column, y_place + v * m, i < m, FROM_X, FROM_B
            )
            found = found + (totals[v] + product,)
        totals = found
    store_vectors(sums + tl.program_id(0).to(tl.int64) * VECTORS * n + j, n, j < n, totals, VECTORS)


@jit
def _images(block, vectors, VECTORS: tl.constexpr):
    """Some rows times each vector, added up for all vectors at once: the warps wait for one another once."""
    products = ()
    for v in tl.static_range(VECTORS):
        products = products + (block * vectors[v][None, :],)
    if VECTORS == 1:
        images = (tl.sum(products[0], axis=1),)
    if VECTORS == 2:
        images = tl.reduce(products, 1, _add2)
    if VECTORS == 3:
        images = tl.reduce(products, 1, _add3)
    if VECTORS == 4:
        images = tl.reduce(products, 1, _add4)
    if VECTORS == 5:
        images = tl.reduce(products, 1, _add5)
    return images


@jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@jit
def _add5(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@jit
def _product(block, image, b, y, inside, FROM_X: tl.constexpr, FROM_B: tl.constexpr):
    """Contribution of some rows to ``A^T y``; their y is stored if it is computed here."""
    if FROM_X:
        if FROM_B:
            image = tl.load(b, mask=inside, other=0.0) - image
        tl.store(y, image, mask=inside)
    else:
        image = tl.load(b, mask=inside, other=0.0)
    return tl.sum(block * image[:, None], axis=0)
