"""Pivot rows by a tournament: reference and kernel against the same bounds.

The kernel is CUDA C++: its source also runs on a CPU, compiled by g++ (``tournament_on_host.cpp``).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.devices import DEVICE

from neula.io.matrices import random_matrix
from neula.kernels.lu import tournament as module
from neula.kernels.lu.tournament import TILE, WIDTH, PanelFactors, find_pivots_reference

U = 2.0**-24
SMALL = 64
"""Rows of a tile of the reference, so that there are several rounds."""

Play = Callable[[torch.Tensor, PanelFactors, int, int], None]


@pytest.fixture(scope="module")
def on_host(compiled_for_host: Callable[..., ctypes.CDLL]) -> Play:
    """The kernel, compiled for the CPU."""
    function = compiled_for_host("tournament", TILE=TILE).play

    def play(block: torch.Tensor, found: PanelFactors, start: int, count: int) -> None:
        tensors, numbers = module.arguments(block, found, start)
        function(*(ctypes.c_void_p(x.data_ptr()) for x in tensors), *numbers, count)

    return play


@pytest.fixture(params=["reference", "on_host", pytest.param("kernel", marks=pytest.mark.gpu)])
def play(request: pytest.FixtureRequest) -> Play:
    if request.param == "reference":
        return partial(find_pivots_reference, tile=SMALL)
    if request.param == "on_host":
        return request.getfixturevalue("on_host")
    return module.find_pivots_cuda


def padded(a: torch.Tensor) -> torch.Tensor:
    block = torch.zeros(len(a), WIDTH, device=DEVICE)
    block[:, : a.shape[1]] = a
    return block


def blank(m: int, r: int, low: torch.dtype = torch.float32) -> PanelFactors:
    """Nothing is known, and nothing is there to be read."""
    found = PanelFactors.for_panel(torch.empty(m, r, device=DEVICE), low)
    for blocks in (found.factors, found.l_inverses, found.u_inverses):
        blocks.fill_(math.nan)
    return found


@pytest.mark.parametrize(
    ("m", "count", "busy"),
    [
        *((1, 1, 0), (32, 32, 0), (50, 20, 7), (64, 32, 0), (65, 32, 1), (333, 32, 40)),
        *((2 * TILE + 5, 31, 3), (9 * TILE, 32, 5)),
    ],
)
def test_factors_and_inverses_of_pivot_rows(play: Play, m: int, count: int, busy: int) -> None:
    a = random_matrix("normal", m, count, dtype=torch.float32, seed=m).to(DEVICE)
    found, start = blank(m, 64), WIDTH
    taken = torch.randperm(m, generator=torch.Generator().manual_seed(1))[:busy].to(DEVICE)
    found.places[taken] = 0
    block = padded(a)
    play(block, found, start, count)
    assert torch.equal(block, padded(a))
    pivots = found.pivots[start : start + count].long()
    assert len(set(pivots.tolist())) == count
    assert not set(pivots.tolist()) & set(taken.tolist())
    assert found.places[pivots].tolist() == list(range(start, start + count))
    assert int((found.places < 0).sum()) == m - busy - count
    assert not found.workspace[len(found.workspace) // 2 :].any()
    lu, l_inverse, u_inverse = (x[1].double() for x in (found.factors, found.l_inverses, found.u_inverses))
    identity = torch.eye(WIDTH, dtype=torch.float64, device=DEVICE)
    lower, upper = lu.tril(-1) + identity, lu.triu()
    expected = identity.clone()
    expected[:count, :count] = a[pivots].double()
    # Higham, Theorem 9.3, with one more operation for the reciprocal of each pivot.
    assert ((lower @ upper - expected).abs() <= 2 * WIDTH * U * (lower.abs() @ upper.abs())).all()
    for triangle, inverse in ((lower, l_inverse), (upper, u_inverse)):
        residuals = (triangle @ inverse - identity).abs(), (inverse @ triangle - identity).abs()
        sizes = triangle.abs() @ inverse.abs(), inverse.abs() @ triangle.abs()
        # Section 14.2: small from the right or from the left.
        bounds = [bool((r <= 2 * WIDTH * U * s).all()) for r, s in zip(residuals, sizes, strict=True)]
        assert any(bounds)
    # Of pivot rows that beat each other in tiles of m / 2 rows, none of which has a multiplier above one.
    others = a[found.places < 0].double() @ u_inverse[:count, :count]
    assert others.numel() == 0 or float(others.abs().max()) <= 8
    # The kernel compares 16 bits of a significand.
    assert float(lower.abs().max()) <= 1 + 2.0**-15


def test_one_round_is_partial_pivoting(play: Play) -> None:
    a = random_matrix("normal", SMALL, WIDTH, dtype=torch.float32, seed=3).to(DEVICE)
    found = blank(SMALL, WIDTH)
    play(padded(a), found, 0, WIDTH)
    p, lower, upper = torch.linalg.lu(a.double().cpu())
    assert torch.equal(found.pivots.cpu(), p.T.argmax(1)[:WIDTH].int())
    factors = lower[:WIDTH].tril(-1) + upper
    assert torch.allclose(
        found.factors[0].double().cpu(), factors, rtol=0, atol=64 * U * float(upper.abs().max())
    )


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_inverses_are_those_of_rounded_factors(play: Play, low: torch.dtype) -> None:
    a = random_matrix("normal", 200, WIDTH, dtype=torch.float32, seed=5).to(DEVICE)
    exact, found = blank(200, WIDTH), blank(200, WIDTH, low)
    play(padded(a), exact, 0, WIDTH)
    play(padded(a), found, 0, WIDTH)
    assert torch.equal(found.pivots, exact.pivots)
    assert torch.equal(found.factors, exact.factors.to(low).float())
    upper, inverse = found.factors[0].double().triu(), found.u_inverses[0].double()
    residual = (inverse @ upper - torch.eye(WIDTH, dtype=torch.float64, device=DEVICE)).abs()
    other = (upper @ inverse - torch.eye(WIDTH, dtype=torch.float64, device=DEVICE)).abs()
    assert min(float(residual.max()), float(other.max())) <= 2 * WIDTH * U * float(
        (upper.abs() @ inverse.abs()).max()
    )


@pytest.mark.parametrize("m", [40, 300])
def test_ties_and_dependent_columns(play: Play, m: int) -> None:
    """A pivot is zero only where all of its column is."""
    a = torch.ones(m, 3, device=DEVICE)
    a[:, 1] = torch.arange(m, device=DEVICE) % 2
    a[:, 2] = a[:, 0]
    found = blank(m, 3)
    play(padded(a), found, 0, 3)
    assert len(set(found.pivots.tolist())) == 3
    assert found.factors[0].diagonal()[:3].tolist() in ([1, 1, 0], [1, -1, 0])
    assert found.factors.isfinite().all()
    assert not found.u_inverses.isfinite().all()


def test_tiles_of_zeros_do_not_hide_the_others(play: Play) -> None:
    a = torch.zeros(4 * TILE, 2, device=DEVICE)
    a[3 * TILE + 5, 0] = a[TILE + 7, 1] = 1e-6
    found = blank(len(a), 2)
    play(padded(a), found, 0, 2)
    assert found.pivots.tolist() == [3 * TILE + 5, TILE + 7]
    assert torch.allclose(found.u_inverses[0].diagonal()[:2], torch.tensor(1e6, device=DEVICE))


def test_nan_shows(play: Play) -> None:
    a = random_matrix("normal", 200, 8, dtype=torch.float32).to(DEVICE)
    a[123, 3] = math.nan
    found = blank(200, 8)
    play(padded(a), found, 0, 8)
    assert not found.factors.isfinite().all()


@pytest.mark.gpu
def test_rounds_leave_their_room_as_it_was() -> None:
    """The same numbers each time, also with as many rows as take three rounds."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    a = torch.randn(40 * TILE + 9, WIDTH, generator=generator, device=DEVICE)
    from neula.kernels.lu.tournament import find_pivots_cuda

    found = blank(len(a), WIDTH)
    seen = []
    for _ in range(5):
        found.places.fill_(-1)
        find_pivots_cuda(a, found, 0, WIDTH)
        seen.append(found.pivots.clone())
    assert all(torch.equal(pivots, seen[0]) for pivots in seen)
    assert not found.workspace[len(found.workspace) // 2 :].any()
    assert len(set(seen[0].tolist())) == WIDTH


@pytest.mark.parametrize("exponent", [-100, 112])
def test_bfloat16_in_any_unit(play: Play, exponent: int) -> None:
    """Powers of two change nothing but U."""
    a = random_matrix("normal", 100, WIDTH, dtype=torch.float32, seed=7).to(DEVICE)
    usual, found = blank(100, WIDTH, torch.bfloat16), blank(100, WIDTH, torch.bfloat16)
    play(padded(a), usual, 0, WIDTH)
    play(padded(a * 2.0**exponent), found, 0, WIDTH)
    assert torch.equal(found.pivots, usual.pivots)
    assert torch.equal(found.factors[0].tril(-1), usual.factors[0].tril(-1))
    assert torch.equal(found.factors[0].triu(), usual.factors[0].triu() * 2.0**exponent)
