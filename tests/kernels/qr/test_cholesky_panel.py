"""Panels in double precision: the definition, and the kernel in the interpreter or on a GPU."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.devices import DEVICE

from neula.io.matrices import random_matrix
from neula.kernels.qr.cholesky_panel import LOST, MAX_COLUMNS, cholesky_panel

U = 2.0**-53

Panel = Callable[..., None]


@pytest.fixture(params=["definition", "on_host", pytest.param("kernel", marks=pytest.mark.gpu)])
def panel(request: pytest.FixtureRequest) -> Panel:
    """On a CPU Triton's interpreter multiplies, and the factors are those of the kernel compiled for it."""
    if request.param == "definition":
        return cholesky_panel.reference
    pytest.importorskip("triton")
    from neula.kernels.qr import cholesky_panel as module

    if request.param == "kernel":
        return module.cholesky_panel_triton

    return partial(module.cholesky_panel_triton, factorize=request.getfixturevalue("factorize_on_host"))


@pytest.fixture(scope="module")
def factorize_on_host(compiled_for_host: Callable[..., ctypes.CDLL]) -> Callable[..., None]:
    function = compiled_for_host("cholesky_panel").factors

    def factorize(*arguments: torch.Tensor | int) -> None:
        tensors = [ctypes.c_void_p(x.data_ptr()) for x in arguments if isinstance(x, torch.Tensor)]
        kept = arguments[1]
        assert isinstance(kept, torch.Tensor)
        function(*tensors, len(kept), *arguments[len(tensors) :])

    return factorize


def geometric(m: int, n: int, *conditions: float) -> torch.Tensor:
    found = [random_matrix("geometric", m, n, cond=c, seed=i) for i, c in enumerate(conditions)]
    return torch.stack(found).to(DEVICE, torch.float64)


def check(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> None:
    """Two products and two triangles: ``4 n u`` each way; Q is that of a well-conditioned panel."""
    m, n = a.shape[1:]
    norm = torch.linalg.matrix_norm
    assert torch.equal(r, r.triu())
    assert (r.diagonal(dim1=1, dim2=2) >= 0).all()
    assert (norm(a - q @ r) <= 8 * n * U * norm(a)).all()
    identity = torch.eye(n, dtype=torch.float64, device=a.device)
    assert (norm(q.mT @ q - identity, 2) <= 8 * (n + math.sqrt(m)) * U).all()


@pytest.mark.parametrize(("m", "n"), [(1, 1), (32, 32), (65, 31), (300, 5)])
def test_every_shape(panel: Panel, m: int, n: int) -> None:
    a = geometric(m, n, 1.0, 1e3, 1e6)
    q, r = a.clone(), torch.full((3, n, n), 7.0, dtype=torch.float64, device=DEVICE)
    narrow = torch.full((3, m, n), 7.0, device=DEVICE).mT.contiguous().mT
    panel(q, r, narrow)
    check(a, q, r)
    assert torch.equal(narrow, q.float())


def test_columns_of_a_wider_matrix_and_blocks_of_its_r(panel: Panel) -> None:
    whole = geometric(90, 50, 1e1, 1e2)
    work, r = whole.clone(), torch.full((2, 50, 50), 7.0, dtype=torch.float64, device=DEVICE)
    panel(work[:, :, 20:40], r[:, 20:40, 20:40])
    check(whole[:, :, 20:40], work[:, :, 20:40], r[:, 20:40, 20:40])
    work[:, :, 20:40], r[:, 20:40, 20:40] = whole[:, :, 20:40], 7.0
    assert torch.equal(work, whole)
    assert (r == 7.0).all()


def test_columns_of_any_size(panel: Panel) -> None:
    """Pivots are lost beside their own diagonal elements."""
    scales = torch.logspace(-100, 100, 12, dtype=torch.float64, device=DEVICE)
    a = geometric(40, 12, 1e2, 1e4) * scales
    q, r = a.clone(), torch.empty(2, 12, 12, dtype=torch.float64, device=DEVICE)
    panel(q, r)
    check(a / scales, q, r / scales)


def test_columns_that_are_lost_become_unit_vectors(panel: Panel) -> None:
    a = geometric(80, 20, 1e1, 1e1, 1e12)
    a[0, :, 9], a[1, :, 19] = a[0, :, 2], a[1, :, :19].sum(1)
    q, r = a.clone(), torch.empty(3, 20, 20, dtype=torch.float64, device=DEVICE)
    panel(q, r)
    assert (torch.linalg.matrix_norm(a - q @ r) <= 8 * 20 * U * torch.linalg.matrix_norm(a)).all()
    # A pivot of the second pass that is not lost is right up to this part of it.
    assert ((torch.linalg.vector_norm(q, dim=1) - 1).abs() <= U / LOST).all()


def test_a_matrix_does_not_depend_on_its_neighbours(panel: Panel) -> None:
    a = geometric(70, MAX_COLUMNS, 1e1, 1e1, 1e1, 1e1)
    clean, clean_r = a.clone(), torch.empty(4, MAX_COLUMNS, MAX_COLUMNS, dtype=torch.float64, device=DEVICE)
    panel(clean, clean_r)
    a[1, 3, 4], a[2, :, 7] = math.nan, 0
    q, r = a.clone(), torch.empty_like(clean_r)
    panel(q, r)
    for i in (0, 3):
        assert torch.equal(q[i], clean[i])
        assert torch.equal(r[i], clean_r[i])
    assert r[1].isnan().any()
    assert not q[2, :, 7].any()
    assert r[2, 7, 7] == 0
    assert torch.isfinite(q[2]).all()


@pytest.mark.gpu
def test_dispatched_on_a_gpu() -> None:
    a = geometric(2048, 32, *[1e5] * 8)
    q, r = a.clone(), torch.empty(8, 32, 32, dtype=torch.float64, device=DEVICE)
    assert cholesky_panel.takes(q, r)
    cholesky_panel(q, r)
    check(a, q, r)
