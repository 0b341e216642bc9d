"""Projections: reference and kernels against float64, by the bound of float32 products."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, GPU, variants

from neula.io.matrices import random_matrix
from neula.kernels.qr.projection import project_out

U = 2.0**-24

Project = Callable[..., None]


project = variants(project_out, "reference", "dispatch", pytest.param("kernel", marks=GPU))


def by_columns(a: torch.Tensor) -> torch.Tensor:
    return a.float().to(DEVICE).mT.contiguous().mT


def operands(m: int, k: int, n: int) -> tuple[torch.Tensor, ...]:
    q = torch.linalg.qr(random_matrix("normal", m, k, seed=1)).Q
    room = torch.full((n + 3, k + 5), math.nan, device=DEVICE).mT[:k, :n]
    return by_columns(q), by_columns(random_matrix("uniform", m, n, seed=2)), room


@pytest.mark.parametrize(("m", "k", "n"), [(8, 1, 1), (256, 128, 64), (261, 33, 70)])
def test_every_shape(project: Project, m: int, k: int, n: int) -> None:
    """Errors are of the order of a few u of the norms of columns: random, of sums of at most 64 products on
    the unit, and rounded to nearest outside of it.
    """
    q, a, r = operands(m, k, n)
    before, wide = a.double(), q.double()
    project(q, a, r)
    expected = wide.mT @ before
    norms = torch.linalg.vector_norm(before, dim=0)
    # 2 u for splitting each operand, 4 for the dropped product, 5 for the sums of 64.
    assert ((r.double() - expected).abs() <= 12 * U * norms).all()
    errors = torch.linalg.vector_norm(a.double() - (before - wide @ r.double()), dim=0)
    assert (errors <= 12 * U * norms).all()


def test_what_is_left_is_orthogonal(project: Project) -> None:
    q, a, r = operands(300, 40, 30)
    project(q, a, r)
    assert (q.double().mT @ a.double()).abs().max() <= 24 * U * math.sqrt(300)


def test_nan_comes_out(project: Project) -> None:
    q, a, r = operands(300, 40, 30)
    a[7, 11] = math.nan
    project(q, a, r)
    assert a.isnan().any(0).nonzero().tolist() == [[11]]


def test_rows_that_are_elsewhere(project: Project) -> None:
    q, a, r = operands(200, 20, 30)
    whole, before = q.double().mT @ a.double(), a.double()
    there = 2 * whole.float()
    project(q, a, r, lambda r: r.add_(there))
    assert float((r.double() - 3 * whole).norm()) <= 20 * U * float(whole.norm())
    expected = before - q.double() @ (3 * whole)
    assert float((a.double() - expected).norm()) <= 20 * U * float(before.norm() + whole.norm())
