"""Gram-Schmidt of tiles against its definition: the reference, and the kernel."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, KERNEL, variants

from neula.io.matrices import random_matrix
from neula.kernels.qr import mgs as module
from neula.kernels.qr.mgs import mgs, mgs_into, tallest_tile

DTYPES = [torch.float32, torch.float64]
SHAPES = [(1, 1), (5, 1), (7, 7), (33, 32), (100, 7), (129, 16)]

Qr = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def reference(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "mgs_into", mgs_into.reference)
        return mgs(tiles)


def kernel(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "mgs_into", mgs_into.kernel if tiles.numel() else mgs_into.reference)
        return mgs(tiles)


@pytest.fixture(params=["reference", KERNEL])
def qr(request: pytest.FixtureRequest) -> Qr:
    return reference if request.param == "reference" else kernel


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    count = math.prod(shape[:-2])
    tiles = [random_matrix("normal", *shape[-2:], seed=seed + i) for i in range(count)]
    return torch.stack(tiles).reshape(shape).to(DEVICE, dtype)


def check(
    tiles: torch.Tensor, q: torch.Tensor, r: torch.Tensor, passes: int = 1, cond: float | None = None
) -> None:
    """Every tile of a batch by definition, in float64.

    Residual ``4 n u`` a pass: up to n projections are subtracted from a column, each with a few roundings of
    at most ``u ||a_j||``. Orthogonality ``4 (n + sqrt(m)) u cond`` (Björck 1967; sums of m terms err by
    ``sqrt(m) u``), with the condition number of the last pass.
    """
    m, n = tiles.shape[-2:]
    u = torch.finfo(tiles.dtype).eps / 2
    assert (q.shape, r.shape) == (tiles.shape, (*tiles.shape[:-2], n, n))
    assert (q.dtype, r.dtype, q.device, r.device) == (tiles.dtype, tiles.dtype, tiles.device, tiles.device)
    assert torch.equal(r, r.triu()), "exact zeros below the diagonal"
    assert (r.diagonal(dim1=-2, dim2=-1) >= 0).all()
    a, q, r = tiles.double().cpu(), q.double().cpu(), r.double().cpu()
    error, size = torch.linalg.matrix_norm(a - q @ r), torch.linalg.matrix_norm(a)
    assert (error <= passes * 4 * n * u * size).all()
    loss = torch.linalg.matrix_norm(torch.eye(n, dtype=torch.float64) - q.mT @ q, 2)
    condition = torch.linalg.cond(a) if cond is None else cond
    assert (loss <= 4 * (n + math.sqrt(m)) * u * condition).all()


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_shape(qr: Qr, m: int, n: int, dtype: torch.dtype) -> None:
    tiles = normal(2, m, n, dtype=dtype)
    before = tiles.clone()
    q, r = qr(tiles)
    check(tiles, q, r)
    assert q.is_contiguous()
    assert r.is_contiguous()
    assert torch.equal(tiles, before)


@pytest.mark.parametrize("shape", [(2, 0, 5, 3), (4, 5, 0)])
def test_nothing_to_do(qr: Qr, shape: tuple[int, ...]) -> None:
    q, r = qr(torch.empty(shape, device=DEVICE))
    assert (q.shape, r.shape) == (shape, (*shape[:-2], shape[-1], shape[-1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cond", [1e2, 1e4])
def test_orthogonality_is_lost_in_proportion_to_the_condition(
    qr: Qr, dtype: torch.dtype, cond: float
) -> None:
    tiles = random_matrix("geometric", 200, 30, cond=cond, seed=3)[None].to(DEVICE, dtype)
    check(tiles, *qr(tiles))


def test_strided_views(qr: Qr) -> None:
    whole = normal(4, 60, 32)
    wide = normal(1, 120, 32)[0]
    for view in (
        whole[::2, ::3, 5:12],
        whole.mT[:, :, 7:15],
        whole[:, :12, 1:].mT[:, ::2],
        whole.permute(1, 0, 2)[:10, :, :3],
        whole[:1, :, :8].expand(3, 60, 8),
        whole.unflatten(1, (3, 20)).transpose(0, 1)[..., :7],
        wide.unflatten(0, (2, 60))[:, :, 8:16],  # rows of tiles in a row-major panel
        wide.T.contiguous().T.unflatten(0, (2, 60))[:, :, 8:16],  # and in a column-major one
    ):
        before = view.clone()
        check(view, *qr(view))
        assert torch.equal(view, before)


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_any_scale_whose_squares_are_in_range(qr: Qr, scale: float) -> None:
    tiles = normal(2, 256, 32) * scale
    check(tiles, *qr(tiles))


def test_r_is_unique() -> None:
    """The reference is the paper's loop, written out in float64."""
    a = normal(30, 6, dtype=torch.float64).cpu()
    q, r = a.clone(), torch.zeros(6, 6, dtype=torch.float64)
    for k in range(6):
        r[k, k] = q[:, k].square().sum().sqrt()
        q[:, k] /= r[k, k]
        for j in range(k + 1, 6):
            r[k, j] = q[:, k] @ q[:, j]
            q[:, j] -= r[k, j] * q[:, k]
    # Two computations with backward errors of 4 n u, amplified by cond < 3.
    bound = 2 * 3 * 4 * 6 * 2.0**-53
    computed_q, computed_r = mgs(a)
    assert torch.linalg.matrix_norm(computed_q - q) <= bound
    assert torch.linalg.matrix_norm(computed_r - r) <= bound * torch.linalg.matrix_norm(r)


@pytest.mark.parametrize(("where", "dtype"), [(0, torch.float32), (3, torch.float64), (6, torch.float32)])
def test_a_zero_column(qr: Qr, where: int, dtype: torch.dtype) -> None:
    """At the ends of the halves in which the kernel keeps the columns."""
    tiles = normal(2, 100, 7, dtype=dtype)
    tiles[0, :, where] = 0
    q, r = qr(tiles)
    assert not q[0, :, where].any()
    assert not r[0, where].any()
    assert not r[0, :, where].any()
    others = torch.arange(7) != where
    check(tiles[:1, :, others], q[:1, :, others].clone(), r[:1, others][:, :, others].clone())
    check(tiles[1:], q[1:], r[1:])


def test_fewer_rows_than_columns(qr: Qr) -> None:
    """Zero tiles that fill a batch up, and A = QR in any case."""
    tiles = torch.cat([normal(1, 4, 9), torch.zeros(1, 4, 9, device=DEVICE)])
    q, r = qr(tiles)
    error = torch.linalg.matrix_norm(tiles.double() - q.double() @ r.double())
    assert (error <= 4 * 9 * 2.0**-24 * torch.linalg.matrix_norm(tiles.double())).all()
    assert not q[1].any()
    assert not r[1].any()


@pytest.mark.parametrize(("bad", "where"), [(math.nan, 0), (-math.inf, 5)])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in the interpreter
def test_bad_numbers_stay_in_their_tile(qr: Qr, bad: float, where: int) -> None:
    tiles = normal(3, 50, 7)
    clean_q, clean_r = qr(tiles)
    tiles[1, 7, where] = bad
    q, r = qr(tiles)
    for i in (0, 2):
        assert torch.equal(q[i], clean_q[i])
        assert torch.equal(r[i], clean_r[i])
    assert torch.equal(r[1, :where, :where], clean_r[1, :where, :where])
    assert not torch.isfinite(r[1, where, where])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_tensors_go_to_the_kernel(dtype: torch.dtype) -> None:
    tiles = normal(5, 256, 32, dtype=dtype)
    assert mgs_into.runs(DEVICE)
    for computed, expected in zip(mgs(tiles), kernel(tiles), strict=True):
        assert torch.equal(computed, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n"), [(256, 32), (300, 40)])
def test_float32_is_float32(m: int, n: int) -> None:
    """Whatever the user's own products may be."""
    switch = torch.backends.cuda.matmul
    before, switch.fp32_precision = switch.fp32_precision, "tf32"
    try:
        tiles = normal(5, m, n)
        check(tiles, *mgs(tiles))
        check(tiles, *reference(tiles))
        assert switch.fp32_precision == "tf32"
    finally:
        switch.fp32_precision = before


@pytest.mark.gpu
def test_the_current_stream() -> None:
    """The tiles arrive late on a stream of its own: whoever works on another one factorizes zeros."""
    source = normal(100, 256, 32)
    tiles = torch.zeros_like(source)
    mgs(source)  # compiled before the clock runs
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        tiles.copy_(source)
        q, r = mgs(tiles)
    stream.synchronize()
    check(source, q, r)


@pytest.mark.gpu
def test_more_elements_than_32_bits_can_count() -> None:
    count = 2**31 // (256 * 32) + 100
    if torch.cuda.mem_get_info(DEVICE)[0] < 3 * 4 * count * 256 * 32:
        pytest.skip("needs 26 GB of GPU memory")
    few = normal(4, 256, 32)
    tiles = torch.zeros(count, 256, 32, device=DEVICE)
    tiles[:2], tiles[-2:] = few[:2], few[2:]
    q, r = mgs(tiles)
    expected_q, expected_r = mgs(few)
    assert torch.equal(torch.cat([q[:2], q[-2:]]), expected_q)
    assert torch.equal(torch.cat([r[:2], r[-2:]]), expected_r)
    assert not q[2:-2:1000].any()


into = variants(mgs_into, "dispatch", KERNEL)


def geometric(batch: int, m: int, n: int, cond: float, dtype: torch.dtype) -> torch.Tensor:
    tiles = [random_matrix("geometric", m, n, cond=cond, seed=i) for i in range(batch)]
    return torch.stack(tiles).to(DEVICE, dtype)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (32, 32), (40, 17)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_once(into, m: int, n: int, dtype: torch.dtype) -> None:
    tiles = geometric(3, m, n, 1e2, dtype)
    work, r = tiles.clone(), tiles.new_empty(3, n, n)
    into(work, work, r)
    check(tiles, work, r, cond=1e2)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (32, 32), (40, 17)])
@pytest.mark.parametrize(("dtype", "cond"), [(torch.float32, 1e5), (torch.float64, 1e12)])
def test_twice_is_enough(into, m: int, n: int, dtype: torch.dtype, cond: float) -> None:
    """A condition number of up to ``1 / (c u)`` is repaired by the second pass; 2 is that of the first Q."""
    tiles = geometric(3, m, n, cond, dtype)
    q, r = torch.empty_like(tiles), tiles.new_empty(3, n, n)
    into(tiles, q, r, twice=True)
    check(tiles, q, r, passes=2, cond=2.0)


def test_columns_of_a_wider_matrix_and_blocks_of_its_r(into) -> None:
    whole = geometric(2, 64, 50, 1e1, torch.float32)
    work, r = whole.clone(), torch.full((2, 50, 50), 7.0, device=DEVICE)
    part = slice(20, 45)
    into(work[:, :, part], work[:, :, part], r[:, part, part])
    check(whole[:, :, part], work[:, :, part], r[:, part, part], cond=1e1)
    outside = torch.ones(50, 50, dtype=torch.bool, device=DEVICE)
    outside[part, part] = False
    assert (r[:, outside] == 7).all()
    others = [*range(20), *range(45, 50)]
    assert torch.equal(work[:, :, others], whole[:, :, others])


@pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_the_tallest_tiles(where: str) -> None:
    assert (tallest_tile(torch.float32), tallest_tile(torch.float64)) == (1024, 256)
    for dtype in DTYPES:
        for m in (tallest_tile(dtype), tallest_tile(dtype) + 1):
            tiles = geometric(2, m, 32, 1e1, dtype).to("cpu" if where == "cpu" else DEVICE)
            q, r = torch.empty_like(tiles), tiles.new_empty(2, 32, 32)
            mgs_into(tiles, q, r)
            check(tiles, q, r, cond=1e1)
