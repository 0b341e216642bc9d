"""Small eigenvalue problems: reference and kernel against the same bounds."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, variants

from neula.kernels.spectra import small_eigh as module
from neula.kernels.spectra.small_eigh import small_eigh

Decompose = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

F32, F64, C64, C128 = torch.float32, torch.float64, torch.complex64, torch.complex128


@pytest.fixture
def on_host(compiled_for_host: Callable[..., ctypes.CDLL]) -> Decompose:
    """The kernel, compiled for the CPU."""

    def decompose(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count, n, _ = a.shape
        function = compiled_for_host("small_eigh", **module.macros_for(n, a.dtype)).decompose
        w, v = torch.full((count, n), math.nan, dtype=a.dtype.to_real()), torch.full_like(a, math.nan)
        function(*(ctypes.c_void_p(x.data_ptr()) for x in (a, w, v)), count, n)
        return w, v

    return decompose


KERNELS = ["on_host", pytest.param("kernel", marks=pytest.mark.gpu)]


kernel = variants(small_eigh, *KERNELS)
decompose = variants(small_eigh, "reference", *KERNELS)


def matrices(kind: str, count: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Exactly symmetric or Hermitian."""
    generator, exact = torch.Generator().manual_seed(n), C128 if dtype.is_complex else F64
    a = torch.randn(count, n, n, dtype=exact, generator=generator)
    place = torch.arange(n, dtype=F64)
    spectra = {
        "graded": 10.0 ** -(8 * place / n),
        "equal": (place < n / 2).double(),
        "opposite": (-1.0) ** place,
        "one": (place == 0).double(),
        "one and noise": torch.where(place == 0, 1.0, 1e-5 * place / n),
        "negative": -(place == 0).double(),
        "zero": 0 * place,
    }
    if kind in spectra:
        q = torch.linalg.qr(a).Q
        a = (q * spectra[kind]) @ q.mH
    if kind == "diagonal":
        a = torch.diag_embed(a[:, 0].real).to(exact)
    if kind == "large":
        a = a * (torch.finfo(dtype).max / (10 * n))
    if kind == "small":
        a = a * torch.finfo(dtype).tiny
    a = (a + a.mH).to(dtype) / 2
    return a.to(DEVICE)


def assert_decomposed(a: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> None:
    """In double precision, scaled; each column is rotated some 6 n times, each time from u on, and the shift
    is up to ``1.25 n^(1/4)`` times the norm.
    """
    n, u = a.shape[-1], torch.finfo(a.dtype).eps / 2
    exact = C128 if a.is_complex() else F64
    a, w, v = a.to(exact), w.double(), v.to(exact)
    largest = a.abs().amax((1, 2)).clamp_min(torch.finfo(F64).tiny)[:, None]
    a, w = a / largest[..., None], w / largest
    size = torch.linalg.matrix_norm(a).clamp_min(torch.finfo(F64).tiny)[:, None]
    a, w = a / size[..., None], w / size
    error = 30 * max(n, 4) ** 0.5 * u
    eye = torch.eye(n, dtype=exact, device=a.device)
    assert (w.diff(dim=1) >= 0).all()
    assert float(torch.linalg.matrix_norm(v.mH @ v - eye, 2).max()) <= error
    assert float(torch.linalg.matrix_norm(a @ v - v * w[:, None], 2).max()) <= error
    assert float((w - torch.linalg.eigvalsh(a)).abs().max()) <= error


@pytest.mark.parametrize("dtype", [F32, F64, C64, C128])
@pytest.mark.parametrize(
    ("kind", "count", "n"),
    [("normal", 3, n) for n in (1, 2, 5, 31)]
    + [("normal", 70, 3), ("normal", 1, 32)]
    + [(kind, 2, 12) for kind in ("graded", "equal", "opposite", "one", "negative", "zero", "diagonal")],
)
def test_values_and_vectors(decompose: Decompose, kind: str, count: int, n: int, dtype: torch.dtype) -> None:
    a = matrices(kind, count, n, dtype)
    assert_decomposed(a, *decompose(a))


@pytest.mark.parametrize(
    ("n", "dtype"),
    [(33, F32), (64, F32), (65, F32), (128, F32), (33, F64), (64, F64), (33, C64), (64, C64), (32, C128)],
)
def test_long_columns(kernel: Decompose, n: int, dtype: torch.dtype) -> None:
    a = matrices("one and noise" if n in (33, 128) else "normal", 2, n, dtype)
    assert_decomposed(a, *kernel(a))


@pytest.mark.parametrize("dtype", [F32, F64, C64])
@pytest.mark.parametrize("kind", ["large", "small"])
def test_ends_of_the_range(kernel: Decompose, kind: str, dtype: torch.dtype) -> None:
    a = matrices(kind, 2, 6, dtype)
    scale = 1.0 if kind == "large" else 2.0**20
    w, v = kernel(a)
    assert_decomposed(a * scale, w * scale, v)


def test_others_of_a_batch_do_not_see_nan(kernel: Decompose) -> None:
    a = matrices("normal", 5, 3, F32)
    a[1, 2, 2], a[3, 0, 1] = math.nan, math.inf
    w, v = kernel(a)
    assert bool(w[[1, 3]].isnan().all())
    assert bool(v[[1, 3]].isnan().all())
    good = torch.tensor([0, 2, 4], device=a.device)
    assert_decomposed(a[good], w[good], v[good])
