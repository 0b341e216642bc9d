"""Cholesky factors with inverses of diagonal blocks: reference and kernel against the same bounds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE

from neula.kernels.cholesky import cholesky_tiles
from neula.kernels.cholesky.cholesky_tiles import InvertedFactor, factor_inverted, lower_factor

U = 2.0**-53

Factor = Callable[[torch.Tensor, int], InvertedFactor]


BY = [
    "reference",
    "on_host",
    "on_host, many",
    *(pytest.param(by, marks=pytest.mark.gpu) for by in ("kernel", "many")),
]


@pytest.fixture(params=BY)
def factor(
    request: pytest.FixtureRequest, uninitialized_is_nan: None, monkeypatch: pytest.MonkeyPatch
) -> Factor:
    """The kernel as for a few tiles on the diagonal, and as for many."""
    if request.param == "reference":
        return factor_inverted.reference
    if "on_host" in request.param:
        request.getfixturevalue("tiles_on_host")
    if "many" in request.param:
        monkeypatch.setattr(cholesky_tiles, "FEW", 0)
    return factor_inverted.kernel


def lower_triangle(a: torch.Tensor) -> torch.Tensor:
    """With NaN above the diagonal, which nobody is to read."""
    above = torch.ones(a.shape, dtype=torch.bool).triu(1)
    return a.masked_fill(above, math.nan)[None].to(DEVICE)


def definite(n: int) -> torch.Tensor:
    g = torch.randn(n, n + 5, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    return g @ g.mT / n + 1e-3 * torch.eye(n, dtype=torch.float64)


@pytest.mark.parametrize(
    ("n", "width", "layout", "dtype"),
    [
        (1, 1, "block", torch.float64),
        (64, 64, "columns", torch.float32),
        (64, 64, "rows", torch.float64),
        (65, 128, "block", torch.float32),
        (65, 128, "columns", torch.float64),
        (150, 64, "rows", torch.float32),
        (150, 64, "columns", torch.float64),
        (150, 64, "block", torch.float64),
    ],
)
def test_factors_and_inverses(factor: Factor, n: int, width: int, layout: str, dtype: torch.dtype) -> None:
    exact, u = definite(n).to(DEVICE, dtype).double(), torch.finfo(dtype).eps / 2
    given = lower_triangle(exact.cpu()).to(dtype)
    room = torch.full((1, n + 5, n + 3), math.nan, dtype=dtype, device=DEVICE)
    a = {
        "rows": given,
        "columns": given.mT.clone(memory_format=torch.contiguous_format).mT,
        "block": room[:, 2 : n + 2, 3:].copy_(given),
    }[layout]
    before = a.clone()
    lower, inverses, order = factor(a, width)
    assert lower.dtype == inverses.dtype == dtype
    assert torch.equal(a.nan_to_num(7.0), before.nan_to_num(7.0))
    assert order.tolist() == [0]
    assert torch.equal(lower, lower.tril()), "exact zeros above the diagonal"
    lower, inverses = lower.double(), inverses.double()
    # Higham 2002, theorem 10.3; blocks of eight columns are inverted.
    size = lower[0].abs() @ lower[0].abs().mT
    assert ((lower[0] @ lower[0].mT - exact).abs() <= 2 * (n + 8) * u * size).all()
    width = inverses.shape[-1]
    for inverse, start in zip(inverses, range(0, n, width), strict=True):
        k = slice(start, min(start + width, n))
        found, block = inverse[0, : k.stop - start, : k.stop - start], lower[0, k, k]
        assert torch.equal(found, found.tril())
        error = (found @ block - torch.eye(len(block), dtype=block.dtype, device=DEVICE)).abs()
        # As for substitution: on the right, row by row.
        assert (error <= 8 * (n + 8) * u * (found.abs() @ block.abs())).all()


@pytest.mark.parametrize("kind", ["kernel", "graded", "nearly singular"])
def test_hard_matrices(factor: Factor, kind: str) -> None:
    """The residual is that of rounding errors even where blocks on the diagonal are nearly singular."""
    n = 150
    x = torch.linspace(0, 1, n, dtype=torch.float64)
    if kind == "kernel":
        a = torch.exp(-30 * (x[:, None] - x).square()) + 1e-13 * torch.eye(n, dtype=torch.float64)
    elif kind == "graded":
        d = torch.logspace(-60, 60, n, dtype=torch.float64)
        a = definite(n) * d[:, None] * d
    else:
        a = torch.ones(n, n, dtype=torch.float64) + 1e-12 * definite(n)
    lower, _, order = factor(lower_triangle(a), n)
    assert order.tolist() == [0]
    scale = a.diagonal().sqrt().to(DEVICE)
    error = (lower[0] @ lower[0].mT - a.to(DEVICE)).abs()
    assert (error <= 2 * n * U * scale[:, None] * scale).all()


@pytest.mark.parametrize(("index", "pivot"), [(0, -1.0), (63, math.nan), (64, 0.0)])
def test_the_first_minor_that_is_not_positive(factor: Factor, index: int, pivot: float) -> None:
    a = torch.eye(150, dtype=torch.float64)
    a[index, index], a[149, 149] = pivot, -1.0
    assert factor(lower_triangle(a), 150).order.tolist() == [index + 1]


class Taken:
    """Stand-in for a kernel of single matrices, which calls the reference."""

    @staticmethod
    def takes(a: torch.Tensor, width: int) -> bool:
        return len(a) == 1

    def __call__(self, a: torch.Tensor, width: int) -> InvertedFactor:
        assert a.shape[-1] in cholesky_tiles.ORDERS
        return factor_inverted.reference(a, width)


@pytest.mark.parametrize("shape", [(100, 100), (1, 100, 100), (2, 100, 100), (1, 30, 30)])
def test_a_factor_alone(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """By tiles or by the library."""
    monkeypatch.setattr(cholesky_tiles, "ORDERS", range(64, 128))
    monkeypatch.setattr(cholesky_tiles, "factor_inverted", Taken())
    n = shape[-1]
    a = definite(n)
    lower, order = lower_factor(a.expand(shape))
    norm = torch.linalg.matrix_norm
    assert (norm(lower @ lower.mT - a) <= 4 * n * U * norm(lower) ** 2).all()
    assert order.shape == shape[:-2]
    assert not order.any()
    assert lower_factor(torch.full(shape, -1.0, dtype=torch.float64))[1].eq(1).all()
