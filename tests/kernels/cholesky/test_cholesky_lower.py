"""Cholesky factors of batches of symmetric matrices: every kernel and reference against the same bounds."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.devices import DEVICE

from neula.kernels.cholesky import cholesky as module
from neula.kernels.cholesky import cholesky_tiles
from neula.kernels.cholesky.cholesky import cholesky_apart, cholesky_lower
from neula.kernels.cholesky.cholesky_tiles import factor_batch

U = 2.0**-24

Factors = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""L, the order of the first minor that is not positive, and L^-T where the kernel computes it."""

Factorize = Callable[[torch.Tensor], Factors]


def in_place(a: torch.Tensor, factorize: Callable[[torch.Tensor], Any] = cholesky_lower.kernel) -> Factors:
    inverse, order = factorize(a)
    return a, order, inverse


def alone(a: torch.Tensor, factorize: Callable[[torch.Tensor], Any] = cholesky_apart.kernel) -> Factors:
    before = a.clone()
    lower, order = factorize(a)
    assert torch.equal(a.nan_to_num(7.0), before.nan_to_num(7.0))
    return lower, order, None


@pytest.fixture(scope="module")
def on_host(compiled_for_host: Callable[..., ctypes.CDLL]) -> Factorize:
    """The kernel in place, compiled for the CPU."""
    function = compiled_for_host("cholesky", BYTES=module.SHARED_BYTES).factorize_batch

    def factorize(a: torch.Tensor) -> Factors:
        inverse, order = torch.full(a.shape, math.nan), torch.full((len(a),), -1, dtype=torch.int32)
        strides = (a.stride(1), a.stride(2), a.stride(0))
        function(*pointers(a, a, inverse, order), len(a), a.shape[1], *strides, *strides, 1)
        return a, order, inverse

    return factorize


@pytest.fixture(scope="module")
def apart_on_host(compiled_for_host: Callable[..., ctypes.CDLL]) -> Factorize:
    """The kernel with room for so many columns, compiled for the CPU."""
    compiled = {
        width: compiled_for_host("cholesky", BYTES=module.shared_bytes(width), WIDTH=width).factorize_batch
        for width in (64, 128)
    }

    def factorize(a: torch.Tensor) -> Factors:
        count, n = a.shape[:2]
        lower, order = torch.full((count, n, n), math.nan), torch.full((count,), -1, dtype=torch.int32)
        strides = (a.stride(1), a.stride(2), a.stride(0))
        function = compiled[64 if n <= 64 else 128]
        function(*pointers(a, lower, lower, order), count, n, *strides, n, 1, n * n, 0)
        return lower, order, None

    return factorize


def pointers(*arrays: torch.Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(x.data_ptr()) for x in arrays]


WAYS: dict[str, Factorize] = {
    "in place, reference": lambda a: in_place(a, cholesky_lower.reference),
    "in place": in_place,
    "apart, reference": lambda a: alone(a, cholesky_apart.reference),
    "apart": alone,
    "tiles, reference": lambda a: alone(a, factor_batch.reference),
    "tiles": lambda a: alone(a, factor_batch.kernel),
}
HOST = ["on_host", "apart_on_host", "tiles_on_host"]
GPU = [pytest.param(way, marks=pytest.mark.gpu) for way in ("in place", "apart", "tiles")]


@pytest.fixture(params=[*(way for way in WAYS if "reference" in way), *HOST, *GPU])
def factorize(request: pytest.FixtureRequest) -> Factorize:
    if request.param not in HOST:
        return WAYS[request.param]
    chosen = request.getfixturevalue(request.param)
    return WAYS["tiles"] if request.param == "tiles_on_host" else chosen


def definite(count: int, n: int) -> torch.Tensor:
    """Well-conditioned float32 matrices with NaN above the diagonal, which nobody is to read."""
    generator = torch.Generator().manual_seed(n)
    g = torch.randn(count, n, 2 * n, generator=generator, dtype=torch.float64)
    above = torch.ones(n, n, dtype=torch.bool).triu(1)
    return (g @ g.mT / n).float().masked_fill(above, math.nan).to(DEVICE)


def check(lower: torch.Tensor, given: torch.Tensor) -> None:
    """Higham 2002, theorem 10.3: ``|A - L L^T|`` beside ``d d^T``, d^2 being the diagonal."""
    lower, exact = lower.double(), given.double().tril()
    exact = exact + exact.tril(-1).mT
    scale = exact.diagonal(dim1=1, dim2=2).sqrt()
    bound = (2 * exact.shape[1] + 4) * U * scale[:, :, None] * scale[:, None]
    assert ((lower @ lower.mT - exact).abs() <= bound).all()


@pytest.mark.parametrize("n", [1, 16, 33, 75, 128])
@pytest.mark.parametrize("layout", ["rows", "columns", "block"])
def test_factors_and_inverses(factorize: Factorize, n: int, layout: str) -> None:
    given = definite(2, n)
    room = torch.full((2, n + 5, n + 3), math.nan, device=DEVICE)
    a = {
        "rows": given.clone(),
        "columns": given.mT.clone(memory_format=torch.contiguous_format).mT,
        "block": room[:, 2 : n + 2, 3:],
    }[layout]
    lower, order, inverse = factorize(a.copy_(given))
    assert order.tolist() == [0, 0]
    assert torch.equal(lower, lower.tril()), "exact zeros above the diagonal"
    check(lower, given)
    if layout == "block":
        read = n * n if inverse is not None else n * (n + 1) // 2
        assert int(room.isnan().sum()) == room.numel() - 2 * read
    if inverse is not None:  # theorem 14.5
        assert torch.equal(inverse, inverse.triu())
        unity, wide = torch.eye(n, dtype=torch.float64, device=DEVICE), lower.double().mT
        error = (wide @ inverse.double() - unity).abs()
        assert (error <= (n + 4) * U * (wide.abs() @ inverse.double().abs())).all()


@pytest.mark.parametrize("index", [0, 16, 31, 40])
@pytest.mark.parametrize("pivot", [-1e-30, 0.0, math.nan])
def test_the_first_minor_that_is_not_positive(factorize: Factorize, index: int, pivot: float) -> None:
    a = torch.eye(41, device=DEVICE).repeat(3, 1, 1)
    a[1, index, index] = pivot
    a[1, 40, 40] = -1.0
    lower, order, _ = factorize(a)
    assert order.tolist() == [0, index + 1, 0]
    assert torch.equal(lower[::2], torch.eye(41, device=DEVICE).repeat(2, 1, 1))


def test_a_minor_that_becomes_negative_on_the_way(factorize: Factorize) -> None:
    a = definite(2, 50)
    a[1, 30, :30] = 100.0
    assert factorize(a)[1].tolist() == [0, 31]


def test_a_pivot_of_rounding_errors_is_said_by_the_kernel(on_host: Factorize) -> None:
    assert int(on_host(torch.ones(1, 20, 20))[1]) == 2


TILES = ["reference", "on_host", pytest.param("kernel", marks=pytest.mark.gpu)]


@pytest.fixture(params=TILES)
def by_tiles(request: pytest.FixtureRequest) -> Factorize:
    if request.param == "on_host":
        request.getfixturevalue("tiles_on_host")
    return WAYS["tiles, reference" if request.param == "reference" else "tiles"]


def test_one_matrix_for_all(by_tiles: Factorize) -> None:
    given = definite(1, 64)
    check(by_tiles(given.expand(3, 64, 64))[0], given.expand(3, 64, 64))


@pytest.mark.parametrize("scale", [2.0**-80, 2.0**80])
def test_numbers_far_from_one(by_tiles: Factorize, scale: float) -> None:
    """No scale is needed: neither elements of L nor their products exceed what A has."""
    check(by_tiles(definite(2, 70) * scale)[0], definite(2, 70) * scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_numbers_are_read_as_they_are(by_tiles: Factorize, dtype: torch.dtype) -> None:
    a = definite(2, 40).to(dtype)
    assert torch.equal(by_tiles(a)[0], by_tiles(a.float())[0])


def test_more_matrices_than_are_handed_out_at_a_time(
    by_tiles: Factorize, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cholesky_tiles, "AHEAD", 1)
    monkeypatch.setattr(cholesky_tiles, "FEW", 1)
    a = definite(7, 130)
    check(by_tiles(a)[0], a)
