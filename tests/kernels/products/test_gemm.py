"""Corrected products by kernel and by reference, against float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from tests.devices import DEVICE, HAS_GPU, KERNEL

from neula.kernels.precision import exact_matmul
from neula.kernels.products import gemm as module
from neula.kernels.products.gemm import (
    RUN,
    SplitProduct,
    configs,
    corrected_gemm,
    corrected_gram,
    corrected_projection,
    multiply_kept,
)
from neula.kernels.products.kept import ALIGNED, Kept, keep
from neula.kernels.products.parts import SCHEMES, UNCORRECTED, Scheme

U = 2.0**-24
SHAPES = [(1, 1, 1), (33, 17, 65), (64, 64, 128), (70, 64, 33)]

EACH_LOW = pytest.mark.parametrize("low", [-1.0, 0.0])
EACH_SCHEME = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


@pytest.fixture(params=["reference", KERNEL], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By which version of the functions that are dispatched."""
    if request.param == "kernel":
        pytest.importorskip("triton")
    for function in () if request.param == "dispatch" else (keep, multiply_kept):
        monkeypatch.setattr(function, "takes", lambda *_, **__: request.param == "kernel")
    return request.param


BY_KERNEL = pytest.mark.parametrize("way", [KERNEL], indirect=True)
DISPATCHED = pytest.mark.parametrize("way", ["dispatch"], indirect=True)


def uniform(m: int, n: int, seed: int, low: float = -1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(m, n, generator=generator) * (1 - low) + low).to(DEVICE)


def wide(m: int, n: int, seed: int, decades: float = 8.0) -> torch.Tensor:
    """Both signs, magnitudes of uniform logarithm from 10^-decades to 10^decades."""
    return 10 ** (decades * uniform(m, n, seed)) * uniform(m, n, seed + 1000).sign()


def errors(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``|C - A B| / (|A| |B|)`` in units of u."""
    a, b = a.double(), b.double()
    return (c.double() - a @ b).abs() / (a.abs() @ b.abs()) / U


def bound(k: int) -> float:
    """In units of u: 12 for splitting, the dropped product, corrections and scales, twice the square root
    of the number of sums to nearest, and for a run whatever a unit that truncates after each 8 products may
    lose.
    """
    return 12 + 2 * math.sqrt(k / RUN + 1) + 2 * RUN / 8


@EACH_SCHEME
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_every_shape(scheme: Scheme, m: int, n: int, k: int) -> None:
    a, b = uniform(m, k, 0), uniform(k, n, 1)
    before = a.clone(), b.clone()
    c = corrected_gemm(a, b, scheme)
    assert (c.shape, c.dtype, c.device, c.is_contiguous()) == ((m, n), torch.float32, a.device, True)
    assert errors(c, a, b).max() <= bound(k)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


@EACH_SCHEME
@pytest.mark.parametrize(("m", "n"), [(70, 33), (40, 200)])
def test_times_a_triangle(scheme: Scheme, m: int, n: int) -> None:
    """In place, as accurate as any product; what is left out is zero."""
    a, r = uniform(m, n, 0), uniform(n, n, 1).triu()
    found = a.clone()
    corrected_gemm(found, r, scheme, c=found, bound=1.0, triangular=True)
    assert errors(found, a, r).max() <= bound(n)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("fewest", [16, 1 << 26])
def test_gram_matrices(transposed: bool, fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A is split once, or in blocks of its rows; of G there is the lower triangle."""
    a = uniform(170, 200, 11).T if transposed else uniform(200, 170, 12)
    monkeypatch.setattr(module, "FEWEST_ELEMENTS", fewest)
    g = corrected_gram(a)
    assert g.stride() == (1, 170)
    assert errors(g, a.T, a).tril().max() <= bound(200)


def test_gram_matrices_of_scaled_columns_in_double_precision() -> None:
    """Columns whose units float32 does not hold are never in it as they are."""
    a = uniform(200, 33, 12).double()
    units = 2.0 ** torch.arange(-800, 850, 50, dtype=torch.float64, device=a.device)
    scales = 1 / units
    g = corrected_gram(a * units, scales=scales)
    assert errors(g, a.T.float(), a.float()).tril().max() <= bound(200)
    # Elements beyond what the scales promise are no numbers, and are noticed.
    beyond = a.clone()
    beyond[7, 3] = 1e6
    assert not corrected_gram(beyond * units, scales=scales)[3].isfinite().all()


@EACH_SCHEME
@pytest.mark.parametrize("size", [1e-42, 3e38])
def test_any_size_that_the_result_can_hold(scheme: Scheme, size: float) -> None:
    a, b = uniform(9, 20, 4) * size, uniform(20, 7, 5) / max(size, 1e-37)
    # Subnormal elements of A have few bits, of which none is lost.
    assert errors(corrected_gemm(a, b, scheme), a, b).max() <= bound(20)
    assert errors(corrected_gemm(b.T, a.T, scheme), b.T, a.T).max() <= bound(20)


def test_strided_operands() -> None:
    whole = uniform(90, 120, 6)
    left = [whole[:40, 5:75], whole.T[:40, 3:73], whole[::2, 50:], whole[:1, :70].expand(40, 70)]
    right = [whole[:70, 1:20], whole.T[10:80, :19], whole[3:73, ::7]]
    for a, b in itertools.product(left, right):
        assert errors(corrected_gemm(a, b), a, b).max() <= bound(70)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (1.0, 1.0), (0.3, -4.0)])
@pytest.mark.parametrize("layout", ["rows", "columns", "gaps"])
def test_alpha_beta_and_a_result_in_place(alpha: float, beta: float, layout: str) -> None:
    a, b = uniform(37, 50, 7), uniform(50, 21, 8)
    whole = uniform(80, 50, 9)
    c = {
        "rows": whole[:37, :21].clone(),
        "columns": whole[:21, :37].clone().T,
        "gaps": whole[1:75:2, 4:46:2],
    }[layout]
    before = c.double()
    untouched = whole.clone()
    if beta == 0.0:
        c.fill_(math.nan)  # not read
    assert corrected_gemm(a, b, alpha=alpha, beta=beta, c=c) is c
    expected = alpha * (a.double() @ b.double()) + beta * before
    size = abs(alpha) * (a.double().abs() @ b.double().abs()) + abs(beta) * before.abs()
    assert ((c.double() - expected).abs() <= (bound(50) + 2) * U * size).all()
    if layout == "gaps":
        whole[1:75:2, 4:46:2] = untouched[1:75:2, 4:46:2]
    assert torch.equal(whole, untouched)


def test_a_result_over_an_operand() -> None:
    a, b = uniform(24, 24, 10), uniform(24, 24, 11)
    kept = a.clone()
    corrected_gemm(a, b, c=a)
    assert errors(a, kept, b).max() <= bound(24)


def test_zero_rows_and_columns() -> None:
    a, b = uniform(20, 30, 12), uniform(30, 20, 13)
    a[3], b[:, 5] = 0, 0
    c = corrected_gemm(a, b)
    assert not c[3].any()
    assert not c[:, 5].any()


@EACH_SCHEME
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(scheme: Scheme, bad: float) -> None:
    a, b = uniform(20, 30, 14), uniform(30, 20, 15)
    a[7, 11] = bad
    c = corrected_gemm(a, b, scheme)
    assert not c[7].isfinite().any()
    rest = [i for i in range(20) if i != 7]
    assert errors(c[rest], a[rest], b).max() <= bound(30)


def test_an_overflow_is_infinite() -> None:
    a, b = torch.full((3, 4), 1e20, device=DEVICE), torch.full((4, 2), -1e20, device=DEVICE)
    assert (corrected_gemm(a, b) == -math.inf).all()


@EACH_LOW
def test_one_part(low: float) -> None:
    """Uncorrected, but scaled: operands are rounded to 11 bits, and nothing overflows."""
    a, b = uniform(70, 100, 40, low) * 1e7, uniform(100, 90, 41, low) * 1e-9
    c = corrected_gemm(a, b, UNCORRECTED)
    assert bound(100) < errors(c, a, b).max() <= 2.01 * 2**13 + bound(100)


@EACH_SCHEME
@BY_KERNEL
@pytest.mark.parametrize("transposed", [False, True])
def test_parts_are_those_of_the_reference(scheme: Scheme, transposed: bool) -> None:
    x = wide(70, 150, 16)
    x[3], x[4, 4] = 0, 2.0**20
    x = x.T if transposed else x
    (m, k), largest = x.shape, x.abs().amax(1)
    room, expected = (Kept.empty(m, -(-k // ALIGNED) * ALIGNED, largest, scheme) for _ in range(2))
    for each, split in ((room, keep.kernel), (expected, keep.reference)):
        each.parts.fill_(math.nan)
        split(x, each)
    assert torch.equal(room.parts, expected.parts)
    assert torch.equal(Kept.from_matrix(x, scheme).parts, expected.parts[:, :, :k])
    assert not expected.parts[:, :, k:].any()


@EACH_SCHEME
@BY_KERNEL
def test_every_configuration(scheme: Scheme) -> None:
    m, k, n = (130, 140, 70) if HAS_GPU else (70, 64, 33)
    a, b = uniform(m, k, 17), uniform(k, n, 18)
    product = SplitProduct(Kept.from_matrix(a, scheme), Kept.from_matrix(b.T, scheme))
    for config in configs(scheme):
        for pieces in (1, 3):
            c = torch.full((m, n), math.nan, device=DEVICE)
            product(c, 1.0, 0.0, config, pieces)
            assert errors(c, a, b).max() <= bound(k)


@BY_KERNEL
@pytest.mark.parametrize("pieces", [2, 40])
def test_pieces_of_a_long_k(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More pieces than runs as well: some have nothing to sum."""
    monkeypatch.setattr(SplitProduct, "pieces", lambda *_: pieces)
    a, b = uniform(20, 1000, 19), uniform(1000, 20, 20)
    c = uniform(20, 20, 21)
    before = c.double()
    corrected_gemm(a, b, alpha=2.0, beta=3.0, c=c)
    assert errors((c.double() - 3 * before) / 2, a, b).max() <= bound(1000) + 20


@BY_KERNEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("m", "k", "n", "columns"), [(150, 70, 90, 50), (33, 16, 20, 20), (17, 5, 3, 2)])
def test_a_projection_splits_its_columns_once(
    monkeypatch: pytest.MonkeyPatch, m: int, k: int, n: int, columns: int, dtype: torch.dtype
) -> None:
    """And reads what it has split in both directions; elements up to the bound do not overflow.

    Whatever dtype the user has made the default.
    """
    taken: list[tuple[int, ...]] = []
    split = Kept.from_matrix

    def counted(x: torch.Tensor, **options: Any) -> Kept:
        taken.append(tuple(x.shape))
        return split(x, **options)

    monkeypatch.setattr(Kept, "from_matrix", counted)
    q, a = uniform(m, k, 44).T.contiguous().T, uniform(m, n, 45).T.contiguous().T
    q[0, 0] = 1.5
    r = torch.full((n, k), math.nan, device=DEVICE).T
    expected, found = a.clone(), []
    torch.set_default_dtype(dtype)
    try:
        corrected_projection(q, a, r, found.append, bound=1.5, columns=columns)
    finally:
        torch.set_default_dtype(torch.float32)
    assert errors(r, q.T, expected).max() <= bound(m)
    left = expected.double() - q.double() @ r.double()
    size = expected.double().abs() + q.double().abs() @ r.double().abs()
    assert ((a.double() - left).abs() / size).max() <= 2.0**-24 * bound(k)
    assert taken.count((k, m)) == 1
    assert sum(part.shape[1] for part in found) == n


@DISPATCHED
@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_nothing_to_do(m: int, n: int, k: int) -> None:
    c = corrected_gemm(torch.empty(m, k, device=DEVICE), torch.empty(k, n, device=DEVICE))
    assert c.shape == (m, n)
    assert not c.any()


@pytest.mark.gpu
@DISPATCHED
def test_the_kernel_is_taken() -> None:
    x, y = Kept.from_matrix(uniform(200, 300, 24)), Kept.from_matrix(uniform(100, 300, 25))
    assert multiply_kept.runs(DEVICE)
    for found in (multiply_kept, multiply_kept.kernel):
        assert errors(
            found(torch.empty(200, 100, device=DEVICE), x, y, alpha=1.0, beta=0.0),
            uniform(200, 300, 24),
            uniform(100, 300, 25).T,
        ).max() <= bound(300)


@pytest.mark.gpu
@DISPATCHED
@EACH_SCHEME
@EACH_LOW
@pytest.mark.parametrize(("m", "n", "k"), [(4096, 4096, 4096), (300, 500, 100_000), (100_001, 130, 129)])
def test_as_accurate_as_cublas(scheme: Scheme, low: float, m: int, n: int, k: int) -> None:
    """In short sums there are few roundings, and more of them here: hence another constant."""
    a, b = uniform(m, k, 26, low), uniform(k, n, 27, low)
    c = torch.full((m, n), math.nan, device=DEVICE)
    corrected_gemm(a, b, scheme, c=c)
    reference = a.double() @ b.double()
    error, peer = ((x.double() - reference).norm() / reference.norm() for x in (c, exact_matmul(a, b)))
    assert error <= (1.5 if k >= 4096 else 4) * peer
    assert errors(c, a, b).max() <= bound(k)


@pytest.mark.gpu
@DISPATCHED
@EACH_SCHEME
def test_sixteen_decades_as_accurate_as_cublas(scheme: Scheme) -> None:
    a, b = wide(2048, 4096, 28), wide(4096, 1024, 29)
    c = corrected_gemm(a, b, scheme)
    assert errors(c, a, b).max() <= 4 * errors(exact_matmul(a, b), a, b).max()


@pytest.mark.gpu
@DISPATCHED
def test_the_unit_truncates_and_the_kernel_does_not_let_it() -> None:
    """On positive matrices one sum over all of k is far worse than the bound, which the kernel meets."""
    k = 65536
    a, b = uniform(512, k, 30, 0.0), uniform(k, 512, 31, 0.0)
    scheme = SCHEMES["fp16_cor"]
    assert errors(corrected_gemm(a, b), a, b).max() <= bound(k)
    x, y = Kept.from_matrix(a, scheme).parts[0], Kept.from_matrix(b.mT, scheme).parts[0]
    at_once = torch.mm(x, y.mT, out_dtype=torch.float32)
    assert errors(at_once, x, y.mT).max() > bound(k)


@pytest.mark.gpu
@DISPATCHED
def test_tiles_fill_the_gpu() -> None:
    """Where any do; those of a tiny product are small."""
    from neula.kernels.launch import multiprocessors

    scheme, device = SCHEMES["fp16_cor"], torch.device("cuda", torch.cuda.current_device())
    for m, n in ((16, 16), (1000, 600), (1024, 1024), (4096, 4096), (20000, 128)):
        product = SplitProduct(*(Kept.from_matrix(uniform(rows, 64, rows), scheme) for rows in (m, n)))
        filling = [x for x in configs(scheme) if product.tiles(x) >= multiprocessors(device)]
        smallest = [x for x in configs(scheme) if x.rows * x.columns == 64 * 64]
        assert module._filling(product) in (filling or smallest)
