"""neula.svd_lowrank against the singular values that a matrix was made from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import neula
from neula.io.matrices import random_matrix, singular_values


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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["geometric", "arithmetic", "cluster_small"])
def test_a_few_singular_values_come_from_the_gram_matrix(kind, dtype):
    A = random_matrix(kind, 500, 80, cond=1e3).numpy().astype(dtype)
    sigma = singular_values(kind, 80, 1e3).numpy()
    result = neula.svd_lowrank(A, 10)
    U, s, Vh = result
    u = np.finfo(dtype).eps / 2
    assert [a.method for a in result.qr.attempts] == [f"gram-svd {'fp32' if dtype == np.float32 else 'fp64'}"]
    assert result.qr.converged
    # The residual that is certified, relative to the norm of A, and sums of 500 products.
    bound = (3 * (2 + np.log2(80)) + 500) * u * np.linalg.norm(sigma)
    np.testing.assert_allclose(s, sigma[:10], atol=bound)
    assert np.abs(U.T @ U - np.eye(10)).max() <= 500 * u
    best = np.linalg.norm(sigma[10:]) / np.linalg.norm(sigma)
    error = np.linalg.norm(A - (U * s) @ Vh) / np.linalg.norm(A)
    assert error <= best + 500 * u
    assert result.relative_error == pytest.approx(error, rel=1e-2 if best > 0.05 else 1)


def test_where_the_gram_matrix_does_not_do_qr_takes_over():
    A = np.zeros((40, 12), dtype=np.float32)
    U, s, Vh = result = neula.svd_lowrank(A, 2)
    assert [a.accepted for a in result.qr.attempts] == [False, True]
    assert result.qr.attempts[0].method == "gram-svd fp32"
    assert (U.shape, s.tolist(), Vh.shape) == ((40, 2), [0.0, 0.0], (2, 12))


def test_a_wide_matrix_is_the_transpose_of_a_tall_one():
    A = random_matrix("geometric", 300, 40, cond=100.0).numpy()
    tall, wide = neula.svd_lowrank(A, 5), neula.svd_lowrank(A.T, 5)
    np.testing.assert_allclose(wide.s, tall.s, rtol=1e-12)
    np.testing.assert_allclose((wide.U * wide.s) @ wide.Vh, ((tall.U * tall.s) @ tall.Vh).T, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("accuracy", ["fp16", "fp32"])
def test_low_rank_on_a_gpu(accuracy):
    A = random_matrix("geometric", 4096, 512, cond=1e3, device=torch.device("cuda")).float()
    result = neula.svd_lowrank(A, 32, accuracy=accuracy)
    assert result.qr.attempts[0].method == ("gram-svd fp16" if accuracy == "fp16" else "gram-svd fp16_cor")
    assert result.qr.converged
    sigma = singular_values("geometric", 512, 1e3)
    best = float(sigma[32:].norm() / sigma.norm())
    U, s, Vh = (x.double() for x in result)
    error = float((A.double() - (U * s) @ Vh).norm() / A.double().norm())
    # The error of the triplets enters squared, beside a truncation error of two thirds.
    bound = (2.0**-11 if accuracy == "fp16" else 2.0**-24) * 3 * (2 + np.log2(512))
    assert error <= best + bound**2 + 4096 * 2.0**-24
    assert result.relative_error == pytest.approx(error, rel=1e-3)


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


def test_an_unsigned_rank(rng):
    A = rng.standard_normal((100, 40))
    assert neula.svd_lowrank(A, rank=np.uint8(5)).s.shape == (5,)


@pytest.mark.parametrize("scale", [1e-30, 1e-25, 3e-24, 1e-22, 1e-18, 1e18])
def test_float32_of_any_size(scale: float) -> None:
    """Squares of the elements underflow, or nearly; relative accuracy does not depend on units."""
    a = random_matrix("normal", 300, 10) @ random_matrix("normal", 10, 200)
    exact = torch.linalg.svdvals(a)[:10]
    found = neula.svd_lowrank((a * scale).float(), rank=10, engine="cpu")
    # 3 u (2 + log2 n) of the largest, as certified.
    bound = 3 * 2.0**-24 * (2 + math.log2(200)) * float(exact[0])
    assert (found.s.double() / scale - exact).abs().max() <= bound
