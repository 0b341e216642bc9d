"""Cholesky factors of batches of symmetric matrices: reference and kernel against the same bounds."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, variants

from neula.kernels.cholesky import cholesky as module
from neula.kernels.cholesky.cholesky import LowerFactors, cholesky_apart, cholesky_lower

U = 2.0**-24

Factorize = Callable[[torch.Tensor], LowerFactors]


@pytest.fixture(scope="module")
def on_host(compiled_for_host: Callable[..., ctypes.CDLL]) -> Factorize:
    """The kernel, compiled for the CPU."""
    function = compiled_for_host("cholesky", BYTES=module.SHARED_BYTES).factorize_batch

    def factorize(a: torch.Tensor) -> LowerFactors:
        inverse = torch.full(a.shape, math.nan)
        order = torch.full((len(a),), -1, dtype=torch.int32)
        strides = (a.stride(1), a.stride(2), a.stride(0))
        places = [ctypes.c_void_p(x.data_ptr()) for x in (a, a, inverse, order)]
        function(*places, len(a), a.shape[1], *strides, *strides, 1)
        return LowerFactors(inverse, order)

    return factorize


factorize = variants(cholesky_lower, "reference", "on_host", pytest.param("kernel", marks=pytest.mark.gpu))


def definite(count: int, n: int) -> torch.Tensor:
    """Well-conditioned float32 matrices with NaN above the diagonal, which nobody is to read."""
    generator = torch.Generator().manual_seed(n)
    g = torch.randn(count, n, 2 * n, generator=generator, dtype=torch.float64)
    a = (g @ g.mT / n).float()
    above = torch.ones(n, n, dtype=torch.bool).triu(1)
    return a.masked_fill(above, math.nan).to(DEVICE)


def symmetric(a: torch.Tensor) -> torch.Tensor:
    lower = a.double().tril()
    return lower + lower.tril(-1).mT


@pytest.mark.parametrize("n", [1, 16, 33, 128])
@pytest.mark.parametrize("layout", ["rows", "columns", "block"])
def test_factors_and_inverses(factorize: Factorize, n: int, layout: str) -> None:
    given = definite(2, n)
    room = torch.full((2, n + 5, n + 3), math.nan, device=DEVICE)
    a = {
        "rows": given.clone(),
        "columns": given.mT.clone(memory_format=torch.contiguous_format).mT,
        "block": room[:, 2 : n + 2, 3:],
    }[layout]
    a.copy_(given)
    inverse, order = factorize(a)
    assert order.tolist() == [0, 0]
    assert torch.equal(a, a.tril()), "exact zeros above the diagonal"
    assert torch.equal(inverse, inverse.triu())
    lower, exact = a.double(), symmetric(given)
    scale = exact.diagonal(dim1=1, dim2=2).sqrt()
    # Higham 2002, theorems 10.3 and 14.5.
    assert ((lower @ lower.mT - exact).abs() <= (n + 4) * U * scale[:, :, None] * scale[:, None]).all()
    unity = torch.eye(n, dtype=torch.float64, device=DEVICE)
    error = (lower.mT @ inverse.double() - unity).abs()
    assert (error <= (n + 4) * U * (lower.mT.abs() @ inverse.double().abs())).all()
    if layout == "block":
        assert int(room.isnan().sum()) == room.numel() - 2 * n * n


@pytest.mark.parametrize("index", [0, 15, 16, 40])
@pytest.mark.parametrize("pivot", [-1e-30, 0.0, math.nan])
def test_the_first_minor_that_is_not_positive(factorize: Factorize, index: int, pivot: float) -> None:
    a = torch.eye(41, device=DEVICE).repeat(3, 1, 1)
    a[1, index, index] = pivot
    a[1, 40, 40] = -1.0
    order = factorize(a).order
    assert order.tolist() == [0, index + 1, 0]


def test_a_minor_that_becomes_negative_on_the_way(factorize: Factorize) -> None:
    a = definite(2, 50)
    a[1, 30, :30] = 100.0
    assert factorize(a).order.tolist() == [0, 31]


def test_a_pivot_of_rounding_errors_is_said_by_the_kernel(on_host: Factorize) -> None:
    assert int(on_host(torch.ones(1, 20, 20)).order) == 2


@pytest.mark.parametrize("by", ["reference", "on host", pytest.param("kernel", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("n", "width"), [(1, 64), (33, 64), (64, 64)])
def test_factors_in_memory_of_their_own(by: str, n: int, width: int, request: pytest.FixtureRequest) -> None:
    """On the host with room for so many columns."""
    a = definite(3, n)
    a[1, n - 1, n - 1] = -1.0
    before = a.clone()
    if by == "on host":
        a, before = a.cpu(), before.cpu()
        compiled = request.getfixturevalue("compiled_for_host")
        function = compiled("cholesky", BYTES=module.shared_bytes(width), WIDTH=width).factorize_batch
        lower, order = torch.full((3, n, n), math.nan), torch.full((3,), -1, dtype=torch.int32)
        places = [ctypes.c_void_p(x.data_ptr()) for x in (a, lower, lower, order)]
        function(*places, 3, n, n, 1, n * n, n, 1, n * n, 0)
    else:
        lower, order = (cholesky_apart.reference if by == "reference" else cholesky_apart.kernel)(a)
    assert torch.equal(a.nan_to_num(7.0), before.nan_to_num(7.0))
    assert order.tolist() == [0, n, 0]
    found = lower[::2].double()
    assert torch.equal(found, found.tril())
    exact = symmetric(a[::2])
    scale = exact.diagonal(dim1=1, dim2=2).sqrt()
    assert ((found @ found.mT - exact).abs() <= (n + 4) * U * scale[:, :, None] * scale[:, None]).all()
