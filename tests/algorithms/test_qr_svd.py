"""QR-SVD and truncation against the SVD and the theorem of Eckart and Young."""

import pytest
import torch

from neula.algorithms.spectra.qr_svd import qr_svd, truncate
from neula.io.matrices import SPECTRA, random_matrix

U64 = 2.0**-53


def norm(x: torch.Tensor) -> float:
    return float(torch.linalg.matrix_norm(x.double()))


@pytest.mark.parametrize(("m", "n"), [(1, 1), (300, 1), (33, 33), (257, 129), (300, 7)])
def test_without_truncation_it_is_the_svd(m: int, n: int) -> None:
    a = random_matrix("normal", m, n)
    u, s, vh = qr_svd(*torch.linalg.qr(a))
    assert (u.shape, s.shape, vh.shape) == ((m, n), (n,), (n, n))
    identity = torch.eye(n, dtype=torch.float64)
    # Backward stable: multiples of n u (and of the square root of m for inner products).
    bound = 8 * (n + m**0.5) * U64
    assert norm(a - u * s @ vh) <= bound * norm(a)
    assert norm(u.T @ u - identity) <= bound * n**0.5
    assert norm(vh @ vh.T - identity) <= bound * n**0.5
    assert (s.diff() <= 0).all()
    assert (torch.linalg.svdvals(a) - s).abs().max() <= bound * s[0]


@pytest.mark.parametrize("rank", [0, 1, 5, 20, 39, 40, 41, 1000])
def test_truncation_by_rank_is_optimal(rank: int) -> None:
    a = random_matrix("geometric", 120, 40, cond=1e4)
    u, s, vh = qr_svd(*torch.linalg.qr(a), rank=rank)
    k = min(rank, 40)
    assert (u.shape, s.shape, vh.shape) == ((120, k), (k,), (k, 40))
    optimum = float(torch.linalg.svdvals(a)[k:].square().sum().sqrt())
    assert norm(a - u * s @ vh) == pytest.approx(optimum, abs=8 * 60 * U64 * norm(a))


@pytest.mark.parametrize("tol", [0.5, 1e-1, 1e-3, 1e-6])
@pytest.mark.parametrize("kind", SPECTRA)
def test_truncation_by_tolerance_is_the_smallest_that_does(tol: float, kind: str) -> None:
    a = random_matrix(kind, 120, 40, cond=1e4, seed=1)
    q, r = torch.linalg.qr(a)
    u, s, vh = qr_svd(q, r, tol=tol)
    assert norm(a - u * s @ vh) <= tol * norm(a) * (1 + 1e-10)
    if len(s):
        u, s, vh = qr_svd(q, r, rank=len(s) - 1)
        assert norm(a - u * s @ vh) > tol * norm(a) * (1 - 1e-10)


def test_truncate_counts() -> None:
    s = torch.tensor([4.0, 3.0, 0.0], dtype=torch.float64)  # norm 5, rests 3, 0, 0
    assert truncate(s, None, None) == 3
    assert truncate(s, 2, None) == 2
    assert truncate(s, 9, None) == 3
    assert truncate(s, None, 0.0) == 2
    assert truncate(s, None, 0.59) == 2
    assert truncate(s, None, 0.61) == 1
    assert truncate(s, None, 1.0) == 0
    assert truncate(s, 1, 0.0) == 1, "a rank that is given counts"


@pytest.mark.parametrize("cond", [10.0, 1e3, 1e6])
def test_an_r_in_single_precision(cond: float) -> None:
    """By the Gram matrix in double precision where that does, by the SVD where it does not."""
    a = random_matrix("geometric", 200, 60, cond=cond).float()
    q, r = torch.linalg.qr(a)
    u, s, vh = qr_svd(q, r)
    assert u.dtype == s.dtype == vh.dtype == torch.float32
    bound = 8 * (60 + 200**0.5) * 2.0**-24
    assert norm(a - u * s @ vh) <= bound * norm(a)
    identity = torch.eye(60)
    assert norm(u.T @ u - identity) <= bound * 60**0.5
    assert norm(vh @ vh.T - identity) <= bound * 60**0.5
    assert float((torch.linalg.svdvals(a.double()) - s).abs().max()) <= bound * float(s[0])
