"""Bounds on what iterations may have missed, against singular values that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch

import neula
from neula.algorithms.spectra import subspace_iteration
from neula.certificates.forward_error import RARE
from neula.certificates.low_rank import VECTORS, SVDCertificate, largest_beyond, upper_bounds, visible
from neula.engines import CpuEngine
from neula.io import matrices

ENGINE = CpuEngine("cpu", "fp64")


def random_orthonormal(m: int, n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return matrices.random_orthonormal(m, n, generator, torch.float64)


def triplets(m: int, s: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix, and its leading singular vectors."""
    u, v = random_orthonormal(m, len(s), seed=1), random_orthonormal(len(s), len(s), seed=2)
    return (u * s) @ v.T, u[:, :k], v[:, :k]


@pytest.mark.parametrize("vectors", [2, 4, 8, 16])
def test_the_part_of_a_direction_that_random_vectors_see(vectors: int) -> None:
    for missed in (1e-3, RARE, 1e-9):
        exact = math.sqrt(scipy.stats.chi2.ppf(missed, vectors))
        assert 0.8 * exact <= visible(vectors, missed) <= exact


def test_random_vectors_see_as_much_as_is_said() -> None:
    g = torch.randn(20000, VECTORS, generator=torch.Generator().manual_seed(0))
    seen = (torch.linalg.vector_norm(g, dim=1) < visible(VECTORS, 1e-2)).double().mean()
    assert float(seen) <= 1.3e-2


@pytest.mark.parametrize("m", [90, 300])
@pytest.mark.parametrize("tail", ["flat", "decaying", "one", "none"])
def test_the_norm_of_what_is_left(tail: str, m: int) -> None:
    n, k = 90, 10
    i = torch.arange(n - k, dtype=torch.float64)
    rest = {"flat": 0 * i + 1, "decaying": 0.9**i, "one": (i == 0).double(), "none": 0 * i}[tail]
    a, u, v = triplets(m, torch.cat([torch.full((k,), 100.0, dtype=torch.float64), 0.5 * rest]), k)
    norm = float(0.5 * rest.max())
    once = largest_beyond(a, u, v, 0.5, 100.0, ENGINE)
    assert once.products == 1
    # Up to rounding errors of products with A.
    assert norm <= once.bound <= 20 * norm + 1e-12
    close = largest_beyond(a, u, v, 0.5, 0.55, ENGINE)
    if tail != "none":
        assert norm <= close.bound <= 0.55
    size = 0.5 * float(rest.norm())
    assert size / 3 <= close.size + 1e-13 <= 3 * size + 1e-12


def test_what_is_not_finite_has_no_bound() -> None:
    a, u, v = triplets(30, torch.ones(20, dtype=torch.float64), 2)
    assert largest_beyond(a * math.nan, u, v, 1.0, 2.0, ENGINE).bound == math.inf


def test_a_direction_that_was_missed_shows() -> None:
    s = 0.5 ** torch.arange(30, dtype=torch.float64)
    a, u, v = triplets(50, s, 8)
    # The third singular vector was not found; everything else converged.
    kept = torch.tensor([0, 1, 3, 4, 5, 6, 7])
    beyond = largest_beyond(a, u[:, kept], v[:, kept], float(s[7]), float(s[3]), ENGINE)
    assert beyond.bound >= float(s[2])
    bounds = upper_bounds(s[kept].numpy(), np.zeros((7, 7)), 5, beyond.bound, 0.0)
    assert bool(np.isinf(bounds).all())


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("noise", [1e-6, 1e-2, 0.2])
@pytest.mark.parametrize("by", ["eigenvalues", "norms"])
def test_upper_bounds_of_singular_values(seed: int, noise: float, by: str) -> None:
    """Ritz triplets of any subspace, whatever it is good for."""
    generator = torch.Generator().manual_seed(seed)
    m, n, width, rank = 60, 40, 12, 6
    s = 0.8 ** torch.arange(n, dtype=torch.float64)
    a, _, v = triplets(m, s, n)
    mixed = v[:, :width] + noise * torch.randn(n, width, generator=generator, dtype=torch.float64)
    v = torch.linalg.qr(mixed).Q
    u, ritz, w = torch.linalg.svd(a @ v, full_matrices=False)
    v = v @ w.T
    left = a.T @ u - v * ritz
    identity_m, identity_n = torch.eye(m, dtype=torch.float64), torch.eye(n, dtype=torch.float64)
    norm = float(torch.linalg.matrix_norm((identity_m - u @ u.T) @ a @ (identity_n - v @ v.T), 2))
    enough = np.full(rank, math.inf) if by == "norms" else None
    rest, above, margin = (left.T @ left).numpy(), norm * (1 + 1e-12), 0.1 * float(ritz[rank - 1])
    bounds = torch.from_numpy(upper_bounds(ritz.numpy(), rest, rank, above, margin, enough))
    assert bool((bounds >= s[:rank] * (1 - 1e-12)).all())
    assert bool((ritz[:rank] <= s[:rank] * (1 + 1e-12)).all())
    if noise < 1e-3:  # of second order
        # The norm of the residual is about sqrt(n width) noise, and its square is beside that of s.
        factor = 100 if by == "eigenvalues" else 10 * n * width
        assert bool((bounds <= s[:rank] * (1 + factor * noise**2) + 1e-12).all())


def test_nothing_is_accepted_that_may_have_been_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random block that happens to be orthogonal to a leading singular vector."""
    s = torch.cat([0.8 ** torch.arange(20, dtype=torch.float64), torch.full((580,), 1e-3).double()])
    a, _, v = triplets(600, s, 600)
    image = subspace_iteration.MixedPrecisionOperator.transposed_times

    def unlucky(operator, y):  # type: ignore[no-untyped-def]
        """Rounding errors would bring it back."""
        found = image(operator, y)
        return found - torch.outer(v[:, 0], v[:, 0] @ found)

    monkeypatch.setattr(subspace_iteration.MixedPrecisionOperator, "transposed_times", unlucky)
    with pytest.warns(neula.AccuracyWarning):
        result = neula.svd_lowrank(a, 5, algorithm="iteration")
    assert not result.converged
    result = neula.svd_lowrank(a, 5)
    assert [attempt.accepted for attempt in result.attempts] == [False, True]
    torch.testing.assert_close(result.s, s[:5], rtol=1e-12, atol=0)


def test_nan_meets_no_bound() -> None:
    for measures in ((math.nan, 0.0, 0.0), (0.0, math.nan, 0.0), (0.0, 0.0, math.nan)):
        assert not SVDCertificate(*measures, bound=1e-3, orthogonality_bound=1e-3).accepted
    found = SVDCertificate(1e-4, 1e-4, 1e-4, 1e-3, 1e-3)
    assert found.accepted
    assert "residual 1.0e-04 (bound 1.0e-03)" in str(found)
