"""Panels in half precision by kernel and by reference, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, KERNEL

from neula.io.matrices import random_matrix
from neula.kernels.cholesky.cholesky import cholesky_inverse
from neula.kernels.dispatch import Kernel
from neula.kernels.qr.panel_gram import LOST, PanelGram, eliminate, panel_gram
from neula.kernels.qr.tall import multiply_panel

U16, U32 = 2.0**-11, 2.0**-24
SUMS = 20
"""Errors in units of u: products are exact, a unit that truncates takes up to 2 u off after 16 of at most
128, and the few runs of so many are added to nearest."""

SHAPES = [(1, 1), (256, 128), (140, 129)]


def by_kernel(function: Kernel) -> Callable:
    pytest.importorskip("triton")

    return function.kernel


@pytest.fixture(params=["dispatch", KERNEL])
def chosen(request: pytest.FixtureRequest, sums_by_torch: None) -> Callable[[Kernel], Callable]:
    return (lambda function: function) if request.param == "dispatch" else by_kernel


def half(m: int, n: int, seed: int = 0) -> torch.Tensor:
    """Column-major."""
    return random_matrix("normal", m, n, seed=seed).to(DEVICE, torch.float16).T.contiguous().T


def whole(gram: PanelGram) -> torch.Tensor:
    top = torch.cat([gram.first, gram.across], 1)
    return torch.cat([top, torch.cat([gram.across.mT, gram.second], 1)])


def errors(found: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> float:
    """The largest error beside the size of what was summed, in units of u."""
    return float(((found.double() - expected).abs() / size / U32).nan_to_num(math.inf).max())


def check_gram(gram: PanelGram, a: torch.Tensor) -> None:
    assert {x.dtype for x in gram} == {torch.float64}
    wide = a.double()
    size = wide.abs().mT @ wide.abs()
    assert errors(whole(gram), wide.mT @ wide, size.clamp(min=1e-300)) <= SUMS


@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_gram_of_every_shape(chosen, m: int, n: int) -> None:
    a = half(m, n)
    check_gram(chosen(panel_gram)(a), a)


def test_gram_of_columns_of_any_size(chosen) -> None:
    """Subnormal numbers count in full, and squares of the largest ones do not overflow."""
    a = (half(300, 140).float() * 2.0 ** torch.linspace(-20, 13, 140, device=DEVICE)).half()
    a = a.T.contiguous().T
    check_gram(chosen(panel_gram)(a), a)


def test_gram_of_a_block_of_a_larger_matrix(chosen) -> None:
    """With columns that begin anywhere, between others that are not finite."""
    room = torch.full((140, 333), math.nan, dtype=torch.float16, device=DEVICE).T
    for rows, columns in ((slice(3, 300), slice(2, 139)), (slice(0, 328), slice(8, 136))):
        view = room[rows, columns]
        view.copy_(half(*view.shape))
        check_gram(chosen(panel_gram)(view), view)


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # the interpreter is NumPy
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gram_of_what_is_not_finite(chosen, bad: float) -> None:
    a = half(200, 135)
    a[137, 3] = a[30, 130] = bad
    gram = chosen(panel_gram)(a)
    assert not gram.first[3, 3].isfinite()
    assert not gram.across[3].isfinite().any()
    assert not gram.second[2].isfinite().any()


@pytest.mark.parametrize(("m", "n"), [(300, 129), (256, 256)])
@pytest.mark.parametrize("by_rows", [True, False])
def test_elimination(chosen, m: int, n: int, by_rows: bool) -> None:
    """Against the Cholesky factor in float64: products of 128 numbers, of which a unit takes three each."""
    gram = panel_gram.reference(half(m, n))
    factors = cholesky_inverse.reference(gram.first)
    r = torch.full(gram.across.shape, math.nan, device=DEVICE)
    r = r if by_rows else r.T.contiguous().T
    rest = chosen(eliminate)(factors.inverse, gram.across, gram.second, r)
    exact = factors.inverse.double().mT @ gram.across
    size = factors.inverse.double().abs().mT @ gram.across.abs()
    assert errors(r, exact, size) <= 32
    wide = r.double()
    assert errors(rest, gram.second - wide.mT @ wide, gram.second.abs() + wide.abs().mT @ wide.abs()) <= 64


def test_what_elimination_leaves_of_a_copy(chosen) -> None:
    """Nothing but rounding errors: diagonal elements are what those may be, and NaN stays."""
    a = half(300, 256)
    a[:, 128:] = a[:, :128]
    gram = panel_gram.reference(a)
    gram.second[5, 5] = math.nan
    factors = cholesky_inverse.reference(gram.first)
    rest = chosen(eliminate)(factors.inverse, gram.across, gram.second, torch.empty(128, 128, device=DEVICE))
    diagonal = rest.diagonal() / gram.second.diagonal()
    assert diagonal[5].isnan()
    diagonal[5] = LOST
    assert ((diagonal >= 0.999 * LOST) & (diagonal < 8 * LOST)).all()


@pytest.mark.parametrize(("m", "n"), [(7, 3), (256, 128), (333, 100)])
def test_products_of_panels(chosen, m: int, n: int) -> None:
    """Rounded to half precision once, whatever the size of the columns."""
    sizes = 2.0 ** torch.linspace(-12, 8, n, device=DEVICE)
    a = (half(m, n).float() * sizes).half().T.contiguous().T
    w = (random_matrix("normal", n, n, seed=2, dtype=torch.float32).to(DEVICE).triu() / n) / sizes[:, None]
    expected = a.double() @ w.double()
    chosen(multiply_panel)(a, w, torch.linalg.vector_norm(a.float(), dim=0))
    error = (a.double() - expected).abs() / (expected.abs() + 2.0**-13)
    assert float(error.max()) <= 1.01 * U16
