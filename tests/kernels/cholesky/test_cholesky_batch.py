"""Cholesky factors of batches: reference and kernel by tiles against the same bounds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE

from neula.kernels.cholesky import cholesky_tiles as module
from neula.kernels.cholesky.cholesky_tiles import BatchFactors, factor_batch

U = 2.0**-24

Factor = Callable[[torch.Tensor], BatchFactors]


@pytest.fixture(params=["reference", "on_host", pytest.param("kernel", marks=pytest.mark.gpu)])
def factor(request: pytest.FixtureRequest) -> Factor:
    if request.param == "reference":
        return factor_batch.reference
    if request.param == "on_host":
        request.getfixturevalue("tiles_on_host")
    return factor_batch.kernel


def definite(count: int, n: int) -> torch.Tensor:
    """Well-conditioned float32 matrices with NaN above the diagonal, which nobody is to read."""
    generator = torch.Generator().manual_seed(n)
    g = torch.randn(count, n, 2 * n, generator=generator, dtype=torch.float64)
    above = torch.ones(n, n, dtype=torch.bool).triu(1)
    return (g @ g.mT / n).float().masked_fill(above, math.nan).to(DEVICE)


@pytest.mark.parametrize("n", [1, 64, 75])
@pytest.mark.parametrize("layout", ["rows", "columns", "block", "one for all"])
def test_factors(factor: Factor, n: int, layout: str) -> None:
    """``|A - L L^T| <= gamma |L| |L^T|`` (Higham 2002, theorem 10.3), and products with inverses."""
    given = definite(2, n)
    room = torch.full((2, n + 5, n + 3), math.nan, device=DEVICE)
    a = {
        "rows": given,
        "columns": given.mT.clone(memory_format=torch.contiguous_format).mT,
        "block": room[:, 2 : n + 2, 3:].copy_(given),
        "one for all": given[:1].expand(3, n, n),
    }[layout]
    before = a.clone()
    lower, order = factor(a)
    assert torch.equal(a.nan_to_num(7.0), before.nan_to_num(7.0))
    assert order.tolist() == [0] * len(a)
    assert torch.equal(lower, lower.tril()), "exact zeros above the diagonal"
    wide, exact = lower.double(), a.double().tril()
    exact = exact + exact.tril(-1).mT
    size = wide.abs() @ wide.abs().mT
    assert ((wide @ wide.mT - exact).abs() <= (2.1 + 2 * n) * U * size).all()


def test_numbers_far_from_one(factor: Factor) -> None:
    """No scale is needed: neither elements of L nor their products exceed what A has."""
    for scale in (2.0**-80, 2.0**80):
        a = definite(2, 70) * scale
        lower = factor(a)[0].double() / scale**0.5
        exact = definite(2, 70).double().tril()
        error = (lower @ lower.mT).tril() - exact
        assert (error.abs() <= 150 * U * (lower.abs() @ lower.abs().mT)).all()


@pytest.mark.parametrize("index", [0, 31, 32, 70])
@pytest.mark.parametrize("pivot", [-1.0, 0.0, math.nan])
def test_the_first_minor_that_is_not_positive(factor: Factor, index: int, pivot: float) -> None:
    a = torch.eye(75, device=DEVICE).repeat(3, 1, 1)
    a[1, index, index] = pivot
    a[1, 74, 74] = -1.0
    assert factor(a).order.tolist() == [0, index + 1, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_numbers_are_read_as_they_are(factor: Factor, dtype: torch.dtype) -> None:
    a = definite(2, 40).to(dtype)
    assert torch.equal(factor(a).lower, factor(a.float()).lower)


def test_more_matrices_than_are_handed_out_at_a_time(factor: Factor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AHEAD", 1)
    monkeypatch.setattr(module, "FEW", 1)
    a = definite(7, 130)
    found = factor(a).lower.double()
    exact = a.double().tril()
    error = (found @ found.mT).tril() - exact
    assert (error.abs() <= 300 * U * (found.abs() @ found.abs().mT)).all()
