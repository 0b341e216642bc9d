"""neula.svd_lowrank against the singular values that a matrix was made from."""

from __future__ import annotations

import numpy as np
import pytest

import neula
from neula.matrices import random_matrix, singular_values


@pytest.mark.parametrize("shape", [(400, 60), (60, 400), (60, 60), (9, 1)])
@pytest.mark.parametrize("rank", [1, 5, None])
def test_truncation_is_optimal(shape, rank):
    k = min(shape)
    if rank is not None and rank > k:
        pytest.skip("rank above min(m, n)")
    A = random_matrix("arithmetic", *shape, cond=1e6).numpy()
    sigma = singular_values("arithmetic", k, 1e6).numpy()
    result = neula.svd_lowrank(A, rank)
    U, s, Vh = result
    kept = k if rank is None else rank
    assert U.shape == (shape[0], kept)
    assert Vh.shape == (kept, shape[1])
    np.testing.assert_allclose(s, sigma[:kept], atol=1e-13)
    np.testing.assert_allclose(U.T @ U, np.eye(kept), atol=1e-12)
    np.testing.assert_allclose(Vh @ Vh.T, np.eye(kept), atol=1e-12)
    best = np.linalg.norm(sigma[kept:])
    assert np.linalg.norm(A - U * s @ Vh) <= best + 1e-12


@pytest.mark.parametrize("tol", [0.5, 1e-2, 1e-6])
def test_rank_from_a_tolerance_is_the_smallest_that_meets_it(tol):
    A = random_matrix("geometric", 300, 80, cond=1e8).numpy()
    sigma = singular_values("geometric", 80, 1e8).numpy()
    U, s, Vh = neula.svd_lowrank(A, tol=tol)
    tail = np.linalg.norm(A - U * s @ Vh) / np.linalg.norm(A)
    assert tail <= tol * (1 + 1e-6)
    assert np.linalg.norm(sigma[len(s) - 1 :]) > tol * np.linalg.norm(sigma)


@pytest.mark.parametrize("rank", [16, 64, 128])
def test_half_precision_loses_nothing_where_truncation_dominates(rank):
    """The paper's Table 4: the same quality from a half-precision QR."""
    A = random_matrix("arithmetic", 1200, 160, cond=1e6).numpy()
    sigma = singular_values("arithmetic", 160, 1e6).numpy()
    U, s, Vh = neula.svd_lowrank(A, rank, accuracy="fp16", engine="emulated")
    error = np.linalg.norm(A - U * s @ Vh) / np.linalg.norm(A)
    best = np.linalg.norm(sigma[rank:]) / np.linalg.norm(sigma)
    # Rounding errors of the QR, orthogonal to the truncation error in expectation, add at most themselves.
    assert best - 1e-12 <= error <= best + 30 * 2.0**-11


def test_estimated_error_is_near_the_true_one(rng):
    A = rng.standard_normal((300, 40)).astype(np.float32)
    U, s, Vh = result = neula.svd_lowrank(A, 10)
    truth = np.linalg.norm(A - U * s @ Vh) / np.linalg.norm(A)
    assert truth / 2 < result.relative_error < truth * 2
    assert result.qr.converged
    assert U.dtype == s.dtype == Vh.dtype == np.float32


def test_zero_matrix():
    U, s, Vh = neula.svd_lowrank(np.zeros((5, 3)), tol=0.1)
    assert (U.shape, s.shape, Vh.shape) == ((5, 0), (0,), (0, 3))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rank": 0}, r"rank must be a whole number from 1 to min\(m, n\) = 4, got 0"),
        ({"rank": 5}, "got 5"),
        ({"rank": 2.5}, "got 2.5"),
        ({"tol": 1.0}, "tol must be at least 0 and below 1, got 1.0"),
        ({"rank": 1, "tol": 0.1}, "rank or tol, not both"),
    ],
)
def test_bad_parameters(kwargs, message, rng):
    with pytest.raises(ValueError, match=message):
        neula.svd_lowrank(rng.standard_normal((10, 4)), **kwargs)


def test_one_matrix_at_a_time(rng):
    with pytest.raises(ValueError, match=r"one matrix at a time, got shape \(2, 5, 3\)"):
        neula.svd_lowrank(rng.standard_normal((2, 5, 3)), 1)
