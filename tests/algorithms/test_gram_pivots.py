"""Columns that Gram matrices pick: an orthonormal basis of all that is not below the tolerance."""

from __future__ import annotations

import math

import pytest
import torch
from tests.matrices import normal

from neula.algorithms.orthogonal import pivots
from neula.algorithms.orthogonal.pivots import basis_by_gram
from neula.algorithms.scaled_problems import ScaledProblems
from neula.algorithms.spectra.complete_orthogonal import complete_orthogonal
from neula.engines import CpuEngine

U = 2.0**-53


@pytest.fixture(autouse=True)
def _by_gram(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a kernel finds the pivots."""
    monkeypatch.setattr(pivots, "pivots_on_device", lambda a: True)


def with_singular_values(s: torch.Tensor, m: int) -> torch.Tensor:
    n = len(s)
    return torch.linalg.qr(normal(m, n))[0] * s @ torch.linalg.qr(normal(n, n, seed=1))[0]


def kahan(n: int, angle: float = 1.2) -> torch.Tensor:
    rows = torch.eye(n, dtype=torch.float64) - math.cos(angle) * torch.ones(n, n, dtype=torch.float64).triu(1)
    return math.sin(angle) ** torch.arange(n, dtype=torch.float64)[:, None] * rows


def gaussian_kernel(m: int, n: int) -> torch.Tensor:
    x = normal(m, 3)
    return torch.exp(-torch.cdist(x, x[:n]).square() / 32)


def powers(first: float, last: float, n: int) -> torch.Tensor:
    return torch.logspace(first, last, n, dtype=torch.float64)


MATRICES = {
    "well conditioned": lambda: normal(200, 60),
    "deficient": lambda: normal(200, 40) @ normal(40, 90, seed=2),
    "geometric": lambda: with_singular_values(powers(0, -18, 100), 250),
    "steps": lambda: with_singular_values(torch.cat([powers(0, -3, 40), 1e-9 * powers(0, -3, 40)]), 200),
    "kernel": lambda: gaussian_kernel(300, 200),
    "kahan": lambda: kahan(90),
    "units": lambda: normal(120, 30) * powers(-9, 9, 30),
    "repeated": lambda: normal(100, 20)[:, [0] * 15 + list(range(20))],
    "square": lambda: normal(70, 70),
}


@pytest.mark.parametrize("name", MATRICES)
def test_a_basis_of_what_is_not_below_the_tolerance(name: str) -> None:
    a = MATRICES[name]()
    m, n = a.shape
    tolerance = 1e-14
    q = basis_by_gram(a, tolerance)
    assert q is not None
    assert q.shape[1] <= n
    identity = torch.eye(q.shape[1], dtype=torch.float64)
    assert float((q.T @ q - identity).abs().max()) <= 8 * m**0.5 * U
    left = torch.linalg.vector_norm(a - q @ (q.T @ a), dim=0)
    longest = float(torch.linalg.vector_norm(a, dim=0).max())
    assert float(left.max()) <= (tolerance + 16 * m**0.5 * U) * longest


def test_what_has_no_basis() -> None:
    empty = basis_by_gram(torch.zeros(5, 3, dtype=torch.float64), 1e-14)
    assert empty is not None
    assert empty.shape == (5, 0)
    assert basis_by_gram(normal(3, 5), 1e-14) is None, "wide matrices are left to others"
    a = normal(20, 5)
    a[3, 2] = math.nan
    q = basis_by_gram(a, 1e-14)
    assert q is None or q.shape[1] <= 5


@pytest.mark.parametrize("name", ["kernel", "kahan", "deficient"])
def test_ranks_are_those_of_singular_values(name: str) -> None:
    """In columns of norm one, as far as anybody can tell where they fall without a gap."""
    a = MATRICES[name]()
    norms = torch.linalg.vector_norm(a, dim=0)
    rcond = max(a.shape) * 2 * U
    s = torch.linalg.svdvals(a / norms)
    expected = int((s > rcond * s[0]).sum())
    problem = ScaledProblems.from_arrays(a[None], normal(len(a), 1, seed=5)[None], None, 0.0)
    found = complete_orthogonal(problem, rcond, CpuEngine("cpu", "fp64"), 64)
    assert not isinstance(found, str)
    assert abs(found.rank - expected) <= (2 if found.doubt else 0)
