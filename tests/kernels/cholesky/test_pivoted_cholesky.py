"""Cholesky factors with diagonal pivoting: LAPACK's, the reference and the kernel."""

from __future__ import annotations

import pytest
import torch
from tests.devices import DEVICE, KERNEL

from neula.kernels.cholesky import pivoted_cholesky as module
from neula.kernels.cholesky.pivoted_cholesky import PivotedFactors, pivoted_cholesky

U = 2.0**-53


@pytest.fixture(params=["lapack", "reference", KERNEL], autouse=True)
def _by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "kernel":
        pytest.importorskip("triton")
    panel, takes = module.eliminate_panel, request.param != "lapack"
    monkeypatch.setattr(panel, "takes", lambda *_: takes, raising=False)
    if request.param == "reference":
        monkeypatch.setattr(type(panel), "kernel", property(lambda self: self.reference))


def gram(n: int, rank: int, *, seed: int = 0, decay: float = 1.0) -> torch.Tensor:
    """Of a matrix whose columns are in random units."""
    generator = torch.Generator().manual_seed(100 * n + rank + seed)
    b = torch.randn(2 * n, rank, generator=generator, dtype=torch.float64)
    b = b * decay ** torch.arange(rank) @ torch.randn(rank, n, generator=generator, dtype=torch.float64)
    return (b.T @ b).to(DEVICE)


def factored(g: torch.Tensor, tolerance: float) -> PivotedFactors:
    return pivoted_cholesky(g.clone(), tolerance)


@pytest.mark.parametrize(("n", "rank"), [(1, 1), (20, 20), (40, 3), (70, 64)])
def test_the_rank_shows(n: int, rank: int) -> None:
    g = gram(n, rank)
    size = float(g.diagonal().max())
    r, pivots, left = factored(g, 1e-10 * size)
    assert r.shape == (rank, n)
    assert len(set(pivots.tolist())) == rank
    assert left <= 1e-10 * size
    assert not r[:, pivots].tril(-1).any(), "upper triangular in the order of the pivots"
    # Higham 2002, theorem 10.14, with the growth of a matrix that does not reach the bound.
    assert float((r.T @ r - g).abs().max()) <= 8 * n * U * size + left
    diagonal = r.gather(1, pivots[:, None])[:, 0]
    below = r.square().flip(0).cumsum(0).flip(0)
    assert (diagonal.square()[:, None] * (1 + n * U) + 8 * n * U * size >= below).all(), (
        "the largest comes first"
    )


def test_nothing_is_found_below_the_tolerance() -> None:
    g = gram(50, 50, decay=0.5)
    size = float(g.diagonal().max())
    r, pivots, left = factored(g, 1e-6 * size)
    assert 0 < len(r) < 30
    assert left <= 1e-6 * size
    assert float(r.gather(1, pivots[:, None]).square().min()) > 1e-6 * size


def test_zero_has_rank_zero() -> None:
    r, pivots, left = factored(torch.zeros(5, 5, dtype=torch.float64, device=DEVICE), 0.0)
    assert r.shape == (0, 5)
    assert pivots.tolist() == []
    assert left == 0


def test_columns_that_a_cholesky_factorization_in_their_order_takes_for_independent() -> None:
    """The first columns are nearly dependent, the others not: without pivots their coefficients are huge."""
    generator = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(60, 20, generator=generator, dtype=torch.float64))[0]
    mixed = torch.randn(20, 30, generator=generator, dtype=torch.float64)
    b = (basis @ mixed).to(DEVICE)
    b[:, 1] = b[:, 0] + 1e-6 * b[:, 1]
    r, pivots, left = factored(b.T @ b, 1e-12)
    sizes = r.gather(1, pivots[:, None])[:, 0].square()
    assert len(r) == 20
    assert float(sizes.min()) > 1e6 * left
