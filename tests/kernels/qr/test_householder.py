"""Householder QR of tiles by kernel and by reference: against the definition, and against each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from tests.devices import DEVICE, KERNEL, variants

from neula.io.matrices import random_matrix
from neula.kernels.qr import householder
from neula.kernels.qr.householder import (
    PRODUCTS,
    WIDTH,
    TileReflectors,
    apply_tiles,
    factor_tiles,
    product_named,
)

U = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
U16, U32 = 2.0**-11, U[torch.float32]

# n = 1, square, three blocks of columns, a last tile shorter than n (30 < 33), tiles of one row.
SHAPES = [(1, 1, 1, 1), (2, 7, 7, 7), (1, 44, 5, 20), (1, 48, 33, 48)]
# A single block of columns is factorized without products: one of them will do.
CASES = [(*s, product) for s in SHAPES for product in PRODUCTS if s[2] > WIDTH or product == "fp16_cor"]
EACH_PRODUCT = pytest.mark.parametrize("product", PRODUCTS)


Reflect = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Tiles(NamedTuple):
    factor: Callable[..., tuple[TileReflectors, torch.Tensor]]
    apply: Callable[..., torch.Tensor]


@pytest.fixture(params=["dispatch", KERNEL])
def tiles(request: pytest.FixtureRequest) -> Tiles:
    if request.param == "dispatch":
        return Tiles(factor_tiles, apply_tiles)
    pytest.importorskip("triton")
    return Tiles(factor_tiles.kernel, apply_tiles.kernel)


reflect_columns = variants(householder.reflect_columns)


def uniform(batch: int, m: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    matrices = [random_matrix("uniform", m, n, seed=7 * n + i) for i in range(batch)]
    return torch.stack(matrices).to(DEVICE, dtype)


def bound_of_columns(m: int, n: int, u: float = U32) -> float:
    """``4 (n + sqrt(m)) u``, as every QR, and the same for 4 roundings in the scale of a reflector."""
    return 4 * (n + math.sqrt(m) + 4) * u


def bound(m: int, n: int, product: str) -> float:
    """Of a tile: column by column as above, and for each block of columns its reflector, three products with
    ``|V|^2 = 2``, on the way there and on the way back. A product errs by ``2 u16`` for its rounded operands,
    with correction by ``8 u``: 2 for each operand, 4 for what is dropped. A unit that truncates after 16
    products takes up to ``2 u`` off each time.
    """
    one = 8 * U32 if product.endswith("_cor") else 2 * U16
    return bound_of_columns(m, n) + math.ceil(n / WIDTH) * 2 * 3 * 2 * (one + 2 * math.ceil(m / 16) * U32)


def identities(reflectors: TileReflectors) -> torch.Tensor:
    batch, _, n = reflectors.v.shape
    identity = torch.eye(n, dtype=reflectors.v.dtype, device=reflectors.v.device)
    return identity.repeat(batch, reflectors.t.shape[1], 1)


def check(a: torch.Tensor, height: int, tiles: Tiles, product: str) -> None:
    reflectors, r = tiles.factor(a, height, product)
    batch, m, n = a.shape
    blocks = math.ceil(m / height)
    assert (reflectors.v.shape, reflectors.v.dtype) == (a.shape, a.dtype)
    assert reflectors.t.shape == (batch, blocks, math.ceil(n / WIDTH), WIDTH, WIDTH)
    assert reflectors.height == height
    assert r.shape == (batch, blocks * n, n)
    q = tiles.apply(reflectors, identities(reflectors), product)
    assert q.shape == a.shape
    for x, y, z in zip(a.split(height, 1), q.split(height, 1), r.split(n, 1), strict=True):
        assert torch.equal(z, z.triu())
        check_factors(x, y, z, bound(height, n, product))


def check_factors(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor, limit: float) -> None:
    """``A = Q R``, and Q orthonormal; of a tile with fewer rows than columns its rows are, and nothing is
    left to the last rows of R.
    """
    a, q, r = a.double(), q.double(), r.double()
    m, n = a.shape[1:]
    norm = torch.linalg.matrix_norm
    assert (norm(a - q @ r) <= limit * norm(a)).all()
    identity = torch.eye(min(m, n), dtype=torch.float64, device=a.device)
    assert (norm((q.mT @ q if m >= n else q @ q.mT) - identity, 2) <= limit).all()
    assert not r[:, m:].any()


@pytest.mark.usefixtures("uninitialized_is_nan")
@pytest.mark.parametrize(("batch", "m", "n", "height", "product"), CASES)
def test_every_shape(tiles: Tiles, batch: int, m: int, n: int, height: int, product: str) -> None:
    a = uniform(batch, m, n)
    before = a.clone()
    check(a, height, tiles, product)
    assert torch.equal(a, before)


@EACH_PRODUCT
@pytest.mark.parametrize("n", [7, 40])
def test_applied_in_every_product(tiles: Tiles, n: int, product: str) -> None:
    """C is any matrix, of any strides; the rest of the columns of Q does not matter."""
    a = uniform(1, 60, n)
    reflectors, _ = factor_tiles.reference(a, 60, torch.matmul)
    c = uniform(1, n + 3, 2 * n)[:, 3:, ::2]
    v, t = reflectors.v.double(), reflectors.t.double()
    expected = torch.cat([c.double(), c.new_zeros(1, 60 - n, n)], 1)
    for p in reversed(range(math.ceil(n / WIDTH))):
        block = v[..., p * WIDTH : (p + 1) * WIDTH]
        width = block.shape[2]
        expected -= block @ (t[:, 0, p, :width, :width] @ (block.mT @ expected))
    q = tiles.apply(reflectors, c, product)
    norm = torch.linalg.matrix_norm
    assert norm(q - expected) <= bound(60, n, product) * norm(c)
    # Uncorrected it is the format that errs, and not only in theory.
    assert product.endswith("_cor") or norm(q - expected) > 100 * U32 * norm(c)


@pytest.mark.parametrize("product", ["fp16_cor", "tf32"])
def test_the_same_reflectors_as_the_reference(tiles: Tiles, product: str) -> None:
    """Reflectors are as sensitive as Q: their errors are those of the factorization times the condition."""
    a = uniform(1, 64, 25)
    found, r = tiles.factor(a, 64, product)
    expected, expected_r = factor_tiles.reference(a, 64, product_named(product))
    limit = bound(64, 25, product) * float(torch.linalg.cond(a.double())[0])
    norm = torch.linalg.matrix_norm
    assert norm(found.v - expected.v) <= limit * norm(expected.v)
    for start, t, expected_t in zip(range(0, 25, WIDTH), found.t[0, 0], expected.t[0, 0], strict=True):
        used = slice(25 - start), slice(25 - start)  # beyond that nothing reads T
        assert norm(t[used] - expected_t[used]) <= limit * norm(expected_t[used])
        assert torch.equal(t[used], t[used].triu())
    assert norm(r - expected_r) <= limit * norm(expected_r)
    assert torch.equal(found.v, found.v.tril())


def test_any_strides(tiles: Tiles) -> None:
    a = uniform(2, 40, 5)
    whole = torch.full((2, 90, 12), math.nan, device=DEVICE)
    whole[:, 10::2, 1:11:2] = a
    expected, expected_r = tiles.factor(a, 20, "fp16_cor")
    for view in (
        a.mT.contiguous().mT,
        whole[:, 10::2, 1:11:2],
        a.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    ):
        found, r = tiles.factor(view, 20, "fp16_cor")
        # A GPU gives threads other elements where strides differ, and adds in another order: 5 columns of
        # norm below sqrt(20), of which each is reflected by those before, with sums of 20 products.
        for x, y in ((found.v, expected.v), (found.t, expected.t), (r, expected_r)):
            assert float((x - y).abs().max()) <= 5 * 20 * 20**0.5 * 2.0**-24


def test_linearly_dependent_and_zero_columns(tiles: Tiles) -> None:
    a = uniform(3, 40, 20)
    a[0, :, [0, 7, 18]] = 0
    a[0, :, 19] = a[0, :, 3]
    a[1] = 0
    a[2, 5:] = 0
    check(a, 40, tiles, "fp16_cor")
    _, r = tiles.factor(a, 40, "fp16_cor")
    assert not r[0][:, [0, 7, 18]].any()
    assert not r[1].any()


def test_what_is_not_finite_stays_in_its_tile(tiles: Tiles) -> None:
    a = uniform(1, 60, 5)
    expected, expected_r = tiles.factor(a, 20, "fp16_cor")
    a[0, 25, 2] = math.nan
    found, r = tiles.factor(a, 20, "fp16_cor")
    assert r[0, 5:10].isnan().any()
    for clean, rows in ((slice(0, 20), slice(0, 5)), (slice(40, 60), slice(10, 15))):
        assert torch.equal(found.v[:, clean], expected.v[:, clean])
        assert torch.equal(r[:, rows], expected_r[:, rows])


def test_an_unknown_product() -> None:
    with pytest.raises(ValueError, match=r"unknown product 'fp8'.*'tf32', 'tf32_cor', 'fp16', 'fp16_cor'"):
        factor_tiles(uniform(1, 600, 2), 600, "fp8")


@pytest.mark.parametrize(("m", "n"), [(1, 1), (16, 16), (50, 13)])
@pytest.mark.parametrize("dtype", U, ids=str)
def test_columns_in_place_of_a_wider_matrix(
    reflect_columns: Reflect, m: int, n: int, dtype: torch.dtype
) -> None:
    whole = uniform(2, 2 * m + 3, n + 6, dtype)
    panel = whole[:, 3::2, 2 : n + 2]
    a, before = panel.double().clone(), whole.clone()
    t, r = reflect_columns(panel)
    v, t, r = panel.double(), t.double(), r.double()
    assert torch.equal(v, v.tril())
    for upper in (t, r):
        assert upper.shape == (2, n, n)
        assert torch.equal(upper, upper.triu())
    identity = torch.eye(m, dtype=torch.float64, device=DEVICE)
    check_factors(a, (identity - v @ t @ v.mT)[..., :n], r, bound_of_columns(m, n, U[dtype]))
    panel.copy_(before[:, 3::2, 2 : n + 2])
    assert torch.equal(whole, before)


def test_reflectors_have_the_length_they_should(reflect_columns: Reflect) -> None:
    """``|v|^2 = 2`` up to the sum of m squares and a few roundings; 0 where there is nothing to reflect."""
    panel = uniform(1, 60, 10)
    panel[..., 4] = 0
    reflect_columns(panel)
    squares = panel.double().square().sum(1)[0]
    assert squares[4] == 0
    rest = [j for j in range(10) if j != 4]
    assert ((squares[rest] - 2).abs() <= 2 * (math.sqrt(60) + 4) * U32).all()


@pytest.mark.parametrize("size", [1e-10, 1e-21, 1e-23])
def test_what_is_left_of_a_column_is_reflected_well_or_not_at_all(
    reflect_columns: Reflect, size: float
) -> None:
    """Squares of 1e-22 have few digits, and a reflector that is made of them would not be orthogonal."""
    panel = uniform(1, 60, 3) * size
    panel[:, 0] = 1
    panel[:, 1:, 0] = 0
    reflect_columns(panel)
    square = panel[..., 1].double().square().sum()
    assert square == 0 if size < 1e-13 else abs(square - 2) <= 2 * (math.sqrt(60) + 4) * U32


@EACH_PRODUCT
def test_products_by_name(product: str) -> None:
    """Rounded operands err by u16 each; in two parts by 2 u each, 4 u for what is dropped, and 1 u."""
    a, b = uniform(3, 40, 70), uniform(3, 70, 30)
    c = product_named(product)(a, b)
    assert c.dtype == torch.float32
    errors = (c.double() - a.double() @ b.double()).abs() / (a.double().abs() @ b.double().abs())
    assert errors.max() <= (9 * U32 if product.endswith("_cor") else 2.01 * U16)
    assert product.endswith("_cor") or errors.max() > 100 * U32


@pytest.mark.gpu
@EACH_PRODUCT
@pytest.mark.parametrize(
    ("batch", "m", "n", "height"),
    [(40, 256, 128, 256), (3, 5000, 100, 256), (1, 700, 256, 512), (2, 999, 31, 64)],
)
def test_large_on_a_gpu(batch: int, m: int, n: int, height: int, product: str) -> None:
    check(uniform(batch, m, n), height, Tiles(factor_tiles, apply_tiles), product)


@pytest.mark.gpu
@EACH_PRODUCT
@pytest.mark.parametrize("n", [31, 128])
def test_repeated_runs_are_identical(n: int, product: str) -> None:
    """A race or a read of what was not written would show: memory comes back filled with NaN."""
    a = uniform(200, 256, n)
    kept: list[torch.Tensor] | None = None
    for _ in range(20):
        reflectors, r = factor_tiles(a, 256, product)
        results = [reflectors.v, reflectors.t, r, apply_tiles(reflectors, r, product)]
        kept = kept or [x.clone() for x in results]
        assert all(torch.equal(x, y) for x, y in zip(results, kept, strict=True))
        for x in results:
            x.fill_(math.nan)
        del x, reflectors, r, results
