"""QR of one small matrix in one launch: factors and measures, by the reference and by the kernel."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE

from neula.io.matrices import random_matrix
from neula.kernels.cuda_source import laid_out
from neula.kernels.small_problems import small_qr as module
from neula.kernels.small_problems.small_qr import SmallQR, small_qr

ENOUGH = {torch.float32: 2.0**-27, torch.float64: 2.0**-50}
SHAPES = [(64, 32), (1, 1), (17, 16), (130, 33), (200, 7)]

Factorize = Callable[[torch.Tensor], SmallQR]


@pytest.fixture
def on_host(compiled_for_host: Callable[..., ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs on the CPU."""

    def compiled(name: str, function: str, device: torch.device, macros: str, shared_bytes: int) -> Callable:
        real = macros.split()[-1]
        if real not in LIBRARIES:
            LIBRARIES[real] = compiled_for_host(name, REAL=real, BYTES=shared_bytes)

        def launch(grid: tuple, block: tuple, arguments: list, shared: int) -> None:
            assert shared <= shared_bytes
            room, _ = laid_out(arguments)
            LIBRARIES[real].launch_small_qr(grid[0], block[0], ctypes.c_char_p(ctypes.addressof(room)))

        return launch

    monkeypatch.setattr(module, "compiled", compiled)
    monkeypatch.setattr(module, "shared_memory", lambda device: LARGEST)


LARGEST = 227 << 10
"""Shared memory of a thread block of an H200."""

LIBRARIES: dict[str, ctypes.CDLL] = {}
"""The kernel for the CPU, by the type of its matrices."""


@pytest.fixture(params=["reference", "on_host", pytest.param("kernel", marks=pytest.mark.gpu)])
def factorize(request: pytest.FixtureRequest) -> Factorize:
    if request.param == "on_host":
        request.getfixturevalue("on_host")
    function = small_qr.reference if request.param == "reference" else module.small_qr_cuda

    def factorized(a: torch.Tensor) -> SmallQR:
        batch = a if a.ndim == 3 else a[None]
        return SmallQR(
            *(x.cpu().view(*a.shape[:-2], *x.shape[1:]) for x in function(batch.to(DEVICE), ENOUGH[a.dtype]))
        )

    return factorized


def normal(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(m, n, dtype=torch.float64, generator=torch.Generator().manual_seed(m)).to(dtype)


def check(found: SmallQR, a: torch.Tensor, most: float = 8.0) -> None:
    """The measures are those of these factors, and small."""
    q, r, a = found.q.double(), found.r.double(), a.double()
    u, n = torch.finfo(found.q.dtype).eps / 2, a.shape[1]
    residual = torch.linalg.matrix_norm((a - q @ r) / torch.linalg.vector_norm(a, dim=0)) / n**0.5
    lost = torch.eye(n).double() - q.T @ q
    loss, largest = torch.linalg.matrix_norm(lost) / n**0.5, float(torch.linalg.matrix_norm(lost, 2))
    expected, rounding = torch.stack([residual, loss]), a.shape[0] ** 0.5 * 2.0**-52
    torch.testing.assert_close(found.measures[:2], expected, rtol=1e-6, atol=rounding)
    assert largest - 2 * rounding <= found.measures[2] <= n**0.25 * (largest + 2 * rounding)
    assert (found.measures[:2] <= most * u).all()
    assert torch.equal(found.r, found.r.triu())
    assert (found.r.diagonal() > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_factors(factorize: Factorize, m: int, n: int, dtype: torch.dtype) -> None:
    a = normal(m, n, dtype)
    check(factorize(a), a)


@pytest.mark.parametrize("layout", ["columns", "block", "reversed"])
def test_views(factorize: Factorize, layout: str) -> None:
    a = normal(40, 20, torch.float64)
    room = torch.full((50, 47), math.nan, dtype=a.dtype)
    view = {"columns": a.T.contiguous().T, "block": room[3:43, 5:45:2], "reversed": a[:, ::2]}[layout]
    if layout == "block":
        view.copy_(a)
    check(factorize(view), view)


@pytest.mark.parametrize(
    ("dtype", "cond"), [(torch.float32, 1e6), (torch.float64, 1e6), (torch.float64, 3e7)]
)
@pytest.mark.parametrize("kind", ["geometric", "arithmetic"])
def test_ill_conditioned(factorize: Factorize, dtype: torch.dtype, cond: float, kind: str) -> None:
    a = torch.as_tensor(random_matrix(kind, 60, 30, cond=cond)).to(dtype)
    # Products with an inverse leave a residual that grows, far more slowly than the condition number.
    check(factorize(a), a, most=8.0 if dtype == torch.float32 else 1e3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batches(factorize: Factorize, dtype: torch.dtype) -> None:
    """Each as if it was alone, whatever becomes of the others."""
    a = normal(60, 30, dtype).view(2, 15, 60).mT
    a[0, 3, 4] = math.nan
    found = factorize(a)
    assert not (found.measures[0] <= 1.0).any()
    check(SmallQR(*(x[1] for x in found)), a[1])


def test_graded_columns(factorize: Factorize) -> None:
    a = normal(50, 20, torch.float64) * torch.logspace(-40, 40, 20, dtype=torch.float64)
    check(factorize(a), a)
    a = (normal(50, 20, torch.float64) * torch.logspace(-30, 30, 20, dtype=torch.float64)).float()
    check(factorize(a), a)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a: a[3, 4].fill_(math.nan),
        lambda a: a[3, 4].fill_(math.inf),
        lambda a: a[:, 4].zero_(),
        lambda a: a[:, 4].copy_(a[:, 2]),
        lambda a: a.mul_(1e-170),
        lambda a: a.mul_(1e170),
        lambda a: a[:, 4].mul_(1e-163),
    ],
    ids=["nan", "inf", "zero", "twice", "tiny", "huge", "a tiny column"],
)
def test_what_is_not_known_is_not_claimed(factorize: Factorize, spoil: Callable) -> None:
    a = normal(20, 6, torch.float64)
    spoil(a)
    measures = factorize(a).measures
    good = (measures[:2] <= 1e-14).all()
    assert not good or torch.isfinite(a).all()
    if good:
        check(factorize(a), a)


def test_too_ill_conditioned_for_a_gram_matrix(factorize: Factorize) -> None:
    """Whatever comes of it, its measures say so."""
    for cond in (1e9, 1e12, 1e16):
        a = torch.as_tensor(random_matrix("geometric", 60, 30, cond=cond))
        found = factorize(a)
        if (found.measures[:2] <= 1e-12).all():
            check(found, a, most=1e4)


def test_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "shared_memory", lambda device: LARGEST)
    for shape in ((64, 32), (64, 64), (150, 64), (300, 40), (1, 1)):
        assert module.fits(torch.empty(2, *shape)), shape
        assert module.fits(torch.empty(2, *shape).double()), shape
        assert not module.fits(torch.empty(3, *shape)), shape
    for shape in ((32, 64), (0, 0), (5, 0), (100, 65), (400, 64), (100000, 3)):
        assert not module.fits(torch.empty(1, *shape)), shape
    assert not module.fits(torch.empty(1, 64, 32, dtype=torch.float16))
