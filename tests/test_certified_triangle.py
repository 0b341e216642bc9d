"""R and ``Q^T B`` without Q are those of a QR, and are only believed where what is measured says so."""

from __future__ import annotations

import pytest
import torch

from neula.engines import EmulatedEngine, select_engine
from neula.problems.orthogonal import certified
from neula.problems.orthogonal.certified import certified_triangle

CPU = select_engine("cpu", torch.device("cpu"))
U = 2.0**-53


def conditioned(m: int, n: int, condition: float, count: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(m + n)
    a = torch.randn(count, m, n, generator=generator, dtype=torch.float64)
    u, _, vt = torch.linalg.svd(a, full_matrices=False)
    return u * torch.logspace(0, -torch.tensor(condition).log10(), min(m, n), dtype=torch.float64) @ vt


@pytest.mark.parametrize("condition", [1.0, 1e4, 1e9, 1e14])
@pytest.mark.parametrize(
    ("m", "n", "k", "count"), [(60, 20, 1, 1), (33, 33, 2, 1), (50, 7, 3, 2), (9, 20, 1, 1)]
)
def test_as_good_as_householder(condition, m, n, k, count) -> None:
    a = conditioned(m, n, condition, count)
    b = torch.randn(count, m, k, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = certified_triangle(a, b, CPU)
    assert found.accepted
    assert found.r.shape == (count, min(m, n), n)
    assert torch.equal(found.r, found.r.triu())
    # Backward stable: [R c] is the triangle of data that differ by a modest multiple of n u, so that products
    # are right to that, relative to norms (Higham, section 19.3).
    error = 8 * n**1.5 * U
    norm = torch.linalg.matrix_norm
    assert bool((norm(found.r.mT @ found.r - a.mT @ a) <= error * norm(a) ** 2).all())
    assert bool((norm(found.r.mT @ found.c - a.mT @ b) <= error * norm(a) * norm(b)).all())


def test_only_well_conditioned_ones_go_without_q() -> None:
    def method(a: torch.Tensor, k: int = 1) -> str:
        return certified_triangle(a, torch.ones(1, len(a[0]), k).double(), CPU).attempts[-1].method

    assert method(conditioned(60, 20, 1e3)).endswith("without Q")
    # Columns are normalized.
    assert method(conditioned(60, 20, 1e3) * 10.0 ** torch.linspace(-100, 100, 20).double()).endswith(
        "without Q"
    )
    for a in (conditioned(60, 20, 1e10), torch.zeros(1, 6, 3).double(), torch.ones(1, 6, 3).double()):
        assert not method(a).endswith("without Q")
    assert not method(conditioned(60, 20, 1e3), k=20).endswith("without Q")


def test_a_wrong_triangle_is_noticed(monkeypatch) -> None:
    a = conditioned(60, 20, 10.0)
    usual = torch.linalg.qr

    def wrong(x: torch.Tensor, mode: str = "reduced"):
        q, r = usual(x, mode=mode)
        if mode == "r":
            r[:, 3, 4] += 0.3
        return q, r

    monkeypatch.setattr(certified.torch.linalg, "qr", wrong)
    found = certified_triangle(a, a[:, :, :1], CPU)
    assert found.accepted
    assert (
        (found.r.mT @ found.r - a.mT @ a).abs().max() <= 8 * 20**1.5 * U * torch.linalg.matrix_norm(a) ** 2
    ).all()


@pytest.mark.parametrize("compute", ["fp16", "fp32"])
def test_by_a_coarse_gram_matrix(compute) -> None:
    """R from a coarse Gram matrix, as for large ones on a GPU, is as good as Householder's, or given up."""
    coarse = EmulatedEngine().using(compute)
    for condition in (1.0, 100.0, 1e6):
        a = conditioned(200, 30, condition) * 2.0 ** torch.arange(-15, 15)
        b = torch.randn(1, 200, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        found = certified._by_cholesky(a, b, coarse)
        assert (found is None) == (condition == 1e6)
        if found is not None:
            d = torch.linalg.vector_norm(a, dim=1, keepdim=True)
            error = 8 * 30**1.5 * U
            assert ((found.r.mT @ found.r - a.mT @ a) / d / d.mT).abs().max() <= error
            assert ((found.r.mT @ found.c - a.mT @ b) / d.mT).abs().max() <= error * torch.linalg.norm(b)
            assert torch.equal(found.r, found.r.triu())


def test_nan() -> None:
    a = conditioned(12, 3, 10.0, count=2)
    a[1, 4, 1] = torch.nan
    found = certified_triangle(a, a[:, :, :1], CPU)
    assert not found.accepted
    assert found.r[1].isnan().all()
    assert found.r[0].isfinite().all()
