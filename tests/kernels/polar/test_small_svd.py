"""Small singular value decompositions: reference and kernel against the same bounds."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, variants

from neula.io.matrices import random_matrix
from neula.kernels.polar import svd as module
from neula.kernels.polar.svd import MAX_ORDER, small_svd

U = 2.0**-53

Decompose = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def on_host(compiled_for_host: Callable[..., ctypes.CDLL]) -> Decompose:
    """The kernel, compiled for the CPU."""
    function = compiled_for_host("small_svd", BYTES=module.shared_bytes(MAX_ORDER)).decompose

    def decompose(r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        n = len(r)
        x, s = torch.full((n, n), math.nan).double(), torch.full((n,), math.nan).double()
        places = [ctypes.c_void_p(part.data_ptr()) for part in (r, x, s)]
        function(*places, n, *r.stride(), module.threads_for(n))
        return (r @ x.mT) / s, s, x.mT

    return decompose


KERNELS = ["on_host", pytest.param("kernel", marks=pytest.mark.gpu)]


kernel = variants(small_svd, *KERNELS)
decompose = variants(small_svd, "reference", *KERNELS)


def loss(x: torch.Tensor) -> float:
    return float(torch.linalg.matrix_norm(x.mT @ x - torch.eye(len(x), dtype=x.dtype, device=x.device), 2))


@pytest.mark.parametrize(
    ("n", "kind"),
    [(n, "normal") for n in (1, 2, 3, 33)] + [(16, x) for x in ("geometric", "one dominant", "transposed")],
)
def test_values_and_vectors(decompose: Decompose, n: int, kind: str) -> None:
    cond = 1e6
    if kind == "geometric":
        a = random_matrix("geometric", n + 4, n, cond=cond, seed=n, dtype=torch.float64)
    else:
        a = random_matrix("normal", n + 4, n, seed=n, dtype=torch.float64)
    if kind == "one dominant":
        a[:, 0] *= 1e5
    r = torch.linalg.qr(a.to(DEVICE)).R
    r = r.mT.contiguous().mT if kind == "transposed" else r
    w, s, x = decompose(r)
    exact = torch.linalg.svdvals(r)
    # Each rotation errs by a few u, and a pair of columns is rotated in each of some ten sweeps; between any
    # two of them 1e-14 is left.
    small = 1e-14 * n + 100 * n * U
    assert (s[:-1] >= s[1:]).all()
    assert ((s - exact).abs() <= small * exact[0]).all()
    assert loss(x) <= small
    assert float(torch.linalg.matrix_norm(w * s @ x.mT - r, 2)) <= small * float(exact[0])
    # A column of W = R X / s errs by what rounds to u s_1 beside s_i.
    assert loss(w) <= small + 100 * n * U * float(exact[0] / exact[-1])


def test_each_value_has_its_digits(kernel: Decompose) -> None:
    """Columns of R^T times powers of ten: Jacobi rotations find small values to their own precision."""
    scales = 10.0 ** -torch.linspace(0, 12, 12, dtype=torch.float64)
    r = torch.linalg.qr(random_matrix("normal", 20, 12, seed=1, dtype=torch.float64)).R
    found = kernel((scales[:, None] * r).to(DEVICE))[1].cpu()
    reversed_rows = torch.linalg.qr((scales[:, None] * r).mT).R
    exact = torch.linalg.svdvals(reversed_rows)
    assert torch.allclose(found[:6], exact[:6], rtol=1e-12)
    assert float(found.log().sum()) == pytest.approx(
        float((scales * r.diagonal().abs()).log().sum()), rel=1e-12
    )


def test_nan_shows(decompose: Decompose) -> None:
    r = torch.eye(9, dtype=torch.float64, device=DEVICE)
    r[2, 5] = math.nan
    assert bool(decompose(r)[1].isnan().all())


def test_zeros(kernel: Decompose) -> None:
    assert not kernel(torch.zeros(5, 5, dtype=torch.float64, device=DEVICE))[1].any()
    w, s, x = small_svd.reference(torch.zeros(5, 5, dtype=torch.float64))
    assert loss(w) == loss(x) == 0
    assert not s.any()
