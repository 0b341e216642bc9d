"""Products in twice the precision against exact ones: slices, and the kernel against the same bounds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import mpmath
import numpy as np
import pytest
import torch
from tests.devices import DEVICE, GPU, HAS_GPU, KERNEL, normal

from neula.kernels.doubled import doubled, doubled_cuda
from neula.kernels.doubled.doubled import Doubled, bits_of

HAS_UNITS = HAS_GPU and torch.cuda.get_device_capability() >= doubled.FP64_UNITS
UNITS = [*GPU, pytest.mark.skipif(HAS_GPU and not HAS_UNITS, reason="no matrix units for float64")]
U = 2.0**-53
BOUND = 8 * 2.0**-104
"""Of an error, relative to ``n max|a| max|x|``. Products of what is left after slicing, products of the
low part of x, and sums of rounding errors have rounding errors of a few ``U^2 = 2^-106`` each."""


WAYS = ["kept slices", "blocks", KERNEL, pytest.param("units", marks=UNITS)]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How products are computed; of kernels on a CPU with small pieces."""
    monkeypatch.setattr(doubled, "cuts", lambda *_: request.param not in ("kernel", "units"))
    if request.param == "units":
        on_units(request, monkeypatch)
    if request.param == "blocks":
        monkeypatch.setattr(doubled, "KEPT", 0)
        monkeypatch.setattr(doubled, "BLOCK", 20)
    if request.param == "kernel" and not HAS_GPU:
        monkeypatch.setattr(doubled_cuda, "compiled", request.getfixturevalue("compiled_on_host"))
        small = partial(doubled_cuda.doubled_product_cuda, least=3)
        monkeypatch.setattr(doubled, "doubled_product", small)
    return request.param


def on_units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All products are computed on matrix units, which a CPU plays."""
    if not HAS_GPU:
        monkeypatch.setattr(doubled_cuda, "compiled", request.getfixturevalue("compiled_on_host"))
    least = partial(doubled_cuda.sliced_product_cuda, least=doubled_cuda.CHUNK)
    for name in ("doubled_product", "many_products"):
        monkeypatch.setattr(doubled, name, least)


@pytest.fixture(autouse=True)
def exactly() -> Iterator[None]:
    """No sum made here has more bits."""
    with mpmath.workprec(1500):
        yield


def numbers(v: torch.Tensor) -> np.ndarray:
    """As numbers of mpmath, which are added and multiplied without rounding errors."""
    return np.vectorize(mpmath.mpf, otypes=[object])(v.cpu().numpy())


def powers_of_two(*exponents: int) -> torch.Tensor:
    """In a column; exactly, which powers on a GPU are not."""
    return torch.tensor([[2.0**e] for e in exponents], dtype=torch.float64, device=DEVICE)


def distances(parts: tuple[torch.Tensor, ...], expected: np.ndarray) -> torch.Tensor:
    """From the sum of the parts."""
    return torch.from_numpy(abs(sum(map(numbers, parts)) - expected).astype(float)).to(DEVICE)


def check_residual(
    of: Doubled, a: torch.Tensor, x: torch.Tensor, b: torch.Tensor, x_low: torch.Tensor | None = None
) -> None:
    """For each matrix and each right-hand side by itself."""
    high, low = of.residual(x, b, x_low)
    assert high.shape == low.shape == b.shape
    assert (low.abs() <= U * high.abs()).all()
    for i in range(len(a)):
        whole = numbers(x[i]) if x_low is None else numbers(x[i]) + numbers(x_low[i])
        size = a.shape[2] * a[i].abs().max() * x[i].abs().amax(0)
        error = distances((high[i], low[i]), numbers(b[i]) - numbers(a[i]) @ whole)
        assert (error <= BOUND * (size + b[i].abs())).all()


def check_transposed_product(of: Doubled, a: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    z = of.transposed_product(high, low)
    assert z.shape == (len(a), a.shape[2], high.shape[2])
    for i in range(len(a)):
        expected = numbers(a[i].mT) @ (numbers(high[i]) + numbers(low[i]))
        size = a.shape[1] * a[i].abs().max() * high[i].abs().amax(0)
        assert (distances((z[i],), expected) <= BOUND * size + U * z[i].abs()).all()


def check(a: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> None:
    """Both products, with right-hand sides that cancel and that do not."""
    of = Doubled.from_matrix(a)
    check_residual(of, a, x, b)
    check_residual(of, a, x, a @ x, 0.7 * U * x)
    check_transposed_product(of, a, b, 0.7 * U * b)


def graded(*shape: int) -> torch.Tensor:
    a = normal(*shape)
    return a * torch.logspace(0, -30, a.numel(), dtype=a.dtype, device=DEVICE).reshape(shape)


SHAPES = [(2, 7, 5, 1), (2, 1, 9, 3), (2, 9, 1, 3), (1, 1, 1, 1), (1, 3, 17, 5)]


@pytest.mark.usefixtures("way", "uninitialized_is_nan")
@pytest.mark.parametrize(("batch", "m", "n", "k"), SHAPES)
def test_accuracy(batch: int, m: int, n: int, k: int) -> None:
    check(normal(batch, m, n), normal(batch, n, k), normal(batch, m, k))


@pytest.mark.usefixtures("way")
def test_graded_matrices_and_vectors() -> None:
    a, x, b = graded(2, 7, 5), graded(2, 5, 2), graded(2, 7, 2)
    check(a, x, b)
    check(a.flip(1, 2), x, b)


@pytest.mark.usefixtures("way")
def test_views() -> None:
    a, x, b = normal(4, 20, 30), normal(2, 9, 4).mT[:, :, ::3], normal(2, 4, 6)[:, :, ::2]
    inside_out = normal(4, 4, 2).permute(2, 0, 1)
    for view in (a[2:, :4, :8:2], a.mT[2:, 5:9, :4], a[:1, 2:10:2, :4].expand(2, 4, 4)):
        check(view, x, b)
    check(inside_out, inside_out[:, :, :2], inside_out.mT[:, :, 2:])


@pytest.mark.usefixtures("way")
def test_sizes_of_matrices_and_vectors() -> None:
    """Each matrix and each vector is cut relative to its own largest element."""
    a = normal(3, 5, 4) * torch.tensor([1e-100, 1.0, 1e90], dtype=torch.float64, device=DEVICE)[:, None, None]
    sizes = torch.tensor([1e-140, 1.0, 0.0, 1e140], dtype=torch.float64, device=DEVICE)
    check(a, normal(3, 4, 4) * sizes, normal(3, 5, 4) * sizes)


@pytest.mark.parametrize("way", WAYS[2:], indirect=True)
def test_sizes_of_columns(way: str) -> None:
    """Kernels do not mind them, told of sizes where they cut: errors are relative to scaled columns."""
    sizes = torch.tensor([1e-80, 1e80, 1.0, 3e-10, 7e10, 0.0, 1e-150], dtype=torch.float64, device=DEVICE)
    scales = powers_of_two(-266, 266, 0, -32, 36, 0, -498)
    a, x, b = normal(1, 9, 7), normal(1, 7, 3), normal(1, 9, 3)
    a[..., 5] = 0
    of = Doubled.from_matrix(a * scales.mT, 0.7 * sizes[None, :, None])
    expected = Doubled.from_matrix(a).residual(x, b, 0.7 * U * x)
    high, low = of.residual(x / scales, b, 0.7 * U * x / scales)
    bound = BOUND * (7 * a.abs().amax() * x.abs().amax() + b.abs())
    assert (((high - expected[0]) + (low - expected[1])).abs() <= 2 * bound).all()
    z = of.transposed_product(b, 0.7 * U * b) / scales
    size = 9 * a.abs().amax() * b.abs().amax()
    difference = (z - Doubled.from_matrix(a).transposed_product(b, 0.7 * U * b)).abs()
    assert (difference <= 2 * (BOUND * size + U * z.abs())).all()


@pytest.mark.usefixtures("way")
def test_other_products() -> None:
    a, x, y = normal(2, 7, 5), normal(2, 5, 2), normal(2, 7, 2)
    of = Doubled.from_matrix(a)
    check_residual(of.mH, a.mT, y, a.mT @ y)
    check_residual(of.mH.mH, a, x, a @ x)
    check_transposed_product(of.mH, a.mT, x, 0.5 * U * x)
    assert torch.equal(of.product(x), of.mH.transposed_product(x, torch.zeros_like(x)))


@pytest.mark.usefixtures("way")
def test_zeros() -> None:
    zero = torch.zeros(1, 3, 3, dtype=torch.float64, device=DEVICE)
    b = normal(1, 3, 3)
    for a, x in ((zero, b), (b, zero)):
        high, low = Doubled.from_matrix(a).residual(x, b)
        assert torch.equal(high, b)
        assert torch.equal(low, zero)
        assert torch.equal(Doubled.from_matrix(a).product(x), zero)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("batch", "m", "n", "k"), [(0, 3, 2, 1), (2, 3, 2, 0), (2, 0, 3, 1), (2, 3, 0, 1)])
def test_empty(batch: int, m: int, n: int, k: int) -> None:
    of, b = Doubled.from_matrix(normal(batch, m, n)), normal(batch, m, k)
    high, low = of.residual(torch.zeros(batch, n, k, dtype=b.dtype, device=DEVICE), b)
    assert torch.equal(high, b)
    assert torch.equal(low, torch.zeros_like(b))
    z = of.transposed_product(torch.zeros_like(b), low)
    assert torch.equal(z, z.new_zeros(batch, n, k))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_where_it_is(bad: float) -> None:
    a, x, b = normal(3, 4, 5), normal(3, 5, 2), normal(3, 4, 2)
    expected = Doubled.from_matrix(a).residual(x, b), Doubled.from_matrix(a).transposed_product(b, U * b)
    a[1, 2, 3] = x[2, 0, 1] = bad
    high, low = Doubled.from_matrix(a).residual(x, b)
    z = Doubled.from_matrix(a).transposed_product(b, U * b)
    for got, before in ((high, expected[0][0]), (low, expected[0][1])):
        assert torch.equal(got[0], before[0])
        assert not got[1, 2].isfinite().any()
        assert torch.equal(got[2, :, 0], before[2, :, 0])
        assert not got[2, :, 1].isfinite().any()
    assert torch.equal(z[::2], expected[1][::2])
    assert not z[1, 3].isfinite().any()


@pytest.mark.parametrize("kept", [0, doubled.KEPT, pytest.param(None, marks=pytest.mark.gpu)])
def test_large_inner_dimension(kept: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No products cancel: all sums are as large as they may be."""
    if kept is not None:
        monkeypatch.setattr(doubled, "cuts", lambda *_: True)
        monkeypatch.setattr(doubled, "KEPT", kept)
    n, rows = 20000, 3 if kept is None else 1
    a, x, b = 1 - 0.1 * normal(1, rows, n).abs(), 2 - U * normal(1, n, 1).abs(), normal(1, rows, 1)
    of = Doubled.from_matrix(a)
    check_residual(of, a, x, b)
    check_residual(of, a, x, of.product(x), 0.7 * U * x)
    check_transposed_product(of.mH, a.mT, x, 0.7 * U * x)


@pytest.mark.parametrize("way", [pytest.param("units", marks=UNITS)], indirect=True)
@pytest.mark.parametrize("positive", [False, True])
def test_slices_in_registers_err_by_less_than_certificates_assume(way: str, positive: bool) -> None:
    """By ``(m + n) 2^-104`` times norms, where A has as many rows as columns, each of norm 1 or so."""
    n = doubled.INNER
    a, x = normal(1, 3, n), normal(1, n, 3)
    if positive:
        a, x = a.abs(), x.abs()
    b = a @ x
    residual = Doubled.from_matrix(a).residual(x, b)
    error = distances((residual[0][0], residual[1][0]), numbers(b[0]) - numbers(a[0]) @ numbers(x[0]))
    lengths = torch.linalg.vector_norm(a[0], dim=1)[:, None] * torch.linalg.vector_norm(x[0], dim=0)
    assert (error <= 2 * n**0.5 * 2.0**-104 * lengths).all()
    chunks = a[0].abs().unflatten(1, (-1, 32)).amax(2) @ x[0].abs().unflatten(0, (-1, 32)).amax(1)
    assert (error <= 2.0**-87 * chunks).all()


@pytest.mark.parametrize("way", ["units"], indirect=True)
@pytest.mark.parametrize("tiles", [1, 2, 3])
def test_a_trial_tells_rows_columns_and_vectors_apart(
    way: str, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = doubled_cuda.sliced_product_cuda

    def turned(a: torch.Tensor, x: torch.Tensor, *more: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return right(a, x.flip(2), *more)

    monkeypatch.setattr(doubled, "many_products", SimpleNamespace(kernel=right))
    doubled._tried_on_units.launch(DEVICE, tiles)
    monkeypatch.setattr(doubled, "many_products", SimpleNamespace(kernel=turned))
    with pytest.raises(ArithmeticError, match="multiplied wrongly"):
        doubled._tried_on_units.launch(DEVICE, tiles)


@pytest.mark.parametrize("inner", [1, 2, 5, 50, 1000, 20000, 10**6])
def test_sums_of_products_of_slices_are_exact(inner: int) -> None:
    bits = bits_of(inner)
    assert 5 * inner * 4**bits <= 4 * 2**53 < 5 * inner * 4 ** (bits + 1)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "m", "n"), [(1, 5000, 300), (1, 300, 5000), (70, 50, 5), (3, 257, 129)])
@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("columns", [False, True])
def test_what_a_gpu_takes(
    batch: int, m: int, n: int, k: int, columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = normal(batch, n, m).mT if columns else normal(batch, m, n)
    x, b = normal(batch, n, k), normal(batch, m, k)
    assert doubled.doubled_product.runs(DEVICE)
    of = Doubled.from_matrix(a)
    assert of.slices is None
    high, low = of.residual(x, a @ x, U * x)
    z = of.transposed_product(b, U * b)
    assert torch.equal(of.residual(x, a @ x, U * x)[0], high)
    monkeypatch.setattr(doubled, "cuts", lambda *_: True)
    of = Doubled.from_matrix(a)
    expected = of.residual(x, a @ x, U * x)
    size = a.abs().amax((1, 2))[:, None, None]
    assert (low.abs() <= U * high.abs()).all()
    difference = ((high - expected[0]) + (low - expected[1])).abs()
    assert (difference <= 2 * BOUND * n * size * x.abs().amax(1, keepdim=True)).all()
    difference = (z - of.transposed_product(b, U * b)).abs()
    assert (difference <= 2 * (BOUND * m * size * b.abs().amax(1, keepdim=True) + U * z.abs())).all()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_UNITS, reason="no matrix units for float64")
@pytest.mark.parametrize("k", [3, 8, 20, 50])
def test_what_matrix_units_take(k: int) -> None:
    """With columns of different sizes; what they make of it is the same in each call."""
    m, n = 70001, 401
    sizes = powers_of_two(*range(-200, 201))
    a, x, b = normal(1, m, n), normal(1, n, k), normal(1, m, k)
    of, high_of = Doubled.from_matrix(a * sizes.mT, sizes[None]), Doubled.from_matrix(a).residual(x, b, U * x)
    assert doubled.many_products.takes(a, x)
    high, low = of.residual(x / sizes, b, U * x / sizes)
    z = of.transposed_product(b, U * b) / sizes
    again = of.residual(x / sizes, b, U * x / sizes)
    assert torch.equal(high, again[0])
    assert torch.equal(low, again[1])
    assert (low.abs() <= U * high.abs()).all()
    size = a.abs().max() * x.abs().amax(1, keepdim=True)
    difference = ((high - high_of[0]) + (low - high_of[1])).abs()
    assert (difference <= 2 * BOUND * (n * size + b.abs())).all()
    expected = Doubled.from_matrix(a).transposed_product(b, U * b)
    size = a.abs().max() * b.abs().amax(1, keepdim=True)
    assert ((z - expected).abs() <= 2 * (BOUND * m * size + U * z.abs())).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [False, True])
def test_nothing_waits_for_the_gpu(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    a, x, b = normal(2, 50, 20), normal(2, 20, 2), normal(2, 50, 2)
    monkeypatch.setattr(doubled, "cuts", lambda *_: not kernel)
    Doubled.from_matrix(a).residual(x, b)  # compiles
    Doubled.from_matrix(a).transposed_product(b, U * b)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        high, low = Doubled.from_matrix(a).residual(x, b)
        Doubled.from_matrix(a).transposed_product(high, low)
    finally:
        torch.cuda.set_sync_debug_mode(before)
