"""neula.svd_lowrank against the singular values that a matrix was made from."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

import neula
from neula.io.matrices import random_matrix, random_orthonormal, singular_values
from neula.problems.low_rank import links


@pytest.mark.parametrize("accuracy", ["fp32", "fp16", 1e-3])
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("shape", [(3, 3), (40, 5), (5, 900)])
def test_errors_count_the_rounding_of_the_matrix(shape, rank, accuracy):
    """Half a unit of float32, by which all elements change to one side."""
    A = np.zeros(shape)
    A[[0, 1, 2], [0, 1, 2]] = values = np.array([1.0, 0.5, 0.25]) * (1 + 0.99 * 2.0**-24)
    result = neula.svd_lowrank(A, rank, accuracy=accuracy)
    assert result.converged
    assert (np.abs(result.s - values[:rank]) <= result.errors).all()
    assert result.errors.max() <= 1e-6


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_rest_is_below_the_tolerance(dtype) -> None:
    """Also where singular values decay slowly, and the Gram matrix of R shows what is to be kept."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        q, p = (np.linalg.qr(rng.standard_normal((size, 140)))[0] for size in (280, 140))
        A = ((q * np.logspace(0, -rng.uniform(0.5, 3), 140)) @ p.T).astype(dtype)
        tol = 10.0 ** -rng.uniform(0.5, 2)
        u, s, vh = (x.astype(np.float64) for x in neula.svd_lowrank(A, tol=tol))
        size = np.linalg.norm(A.astype(np.float64))
        assert np.linalg.norm(A - (u * s) @ vh) <= tol * size * (1 + 1e-4)
        assert np.linalg.norm(A - (u[:, :-1] * s[:-1]) @ vh[:-1]) >= tol * size * (1 - 1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["geometric", "arithmetic", "cluster_small"])
def test_a_few_singular_values_come_from_the_gram_matrix(kind, dtype):
    A = random_matrix(kind, 800, 80, cond=1e3).numpy().astype(dtype)
    sigma = singular_values(kind, 80, 1e3).numpy()
    result = neula.svd_lowrank(A, 10)
    U, s, Vh = result
    u = np.finfo(dtype).eps / 2
    assert result.qr.converged
    # The residual that is certified, relative to the norm of A, and sums of 800 products.
    bound = (3 * (2 + np.log2(80)) + 800) * u * np.linalg.norm(sigma)
    np.testing.assert_allclose(s, sigma[:10], atol=bound)
    assert np.abs(U.T @ U - np.eye(10)).max() <= 800 * u
    best = np.linalg.norm(sigma[10:]) / np.linalg.norm(sigma)
    error = np.linalg.norm(A - (U * s) @ Vh) / np.linalg.norm(A)
    assert error <= best + 800 * u
    assert result.relative_error == pytest.approx(error, rel=1e-2 if best > 0.05 else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("accuracy", ["fp16", "fp32"])
def test_the_gram_matrix_on_a_gpu(accuracy):
    A = random_matrix("geometric", 4096, 512, cond=1e3, device=torch.device("cuda")).float()
    result = neula.svd_lowrank(A, 32, accuracy=accuracy, algorithm="gram-svd")
    assert result.qr.converged
    sigma = singular_values("geometric", 512, 1e3)
    best = float(sigma[32:].norm() / sigma.norm())
    U, s, Vh = (x.double() for x in result)
    error = float((A.double() - (U * s) @ Vh).norm() / A.double().norm())
    # The error of the triplets enters squared, beside a truncation error of two thirds.
    bound = (2.0**-11 if accuracy == "fp16" else 2.0**-24) * 3 * (2 + np.log2(512))
    assert error <= best + bound**2 + 4096 * 2.0**-24
    assert result.relative_error == pytest.approx(error, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("accuracy", [None, "fp16", 1e-2, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_iterations_on_a_gpu(accuracy, dtype):
    A = with_spectrum(SPECTRA["gap"](2000), 5001).to("cuda", dtype)
    check(A, 20, accuracy, neula.svd_lowrank(A, 20, accuracy=accuracy), "subspace iteration")


SPECTRA = {
    "gap": lambda n: torch.cat([torch.logspace(0, -2, 20).double(), torch.full((n - 20,), 1e-4).double()]),
    "1/k": lambda n: 1 / torch.arange(1, n + 1).double(),
    "geometric": lambda n: 0.9 ** torch.arange(n).double(),
    "slow": lambda n: torch.arange(1, n + 1).double() ** -0.5,
    "flat": lambda n: 1 - 0.5 * torch.arange(n).double() / n,
    "equal": lambda n: torch.ones(n).double(),
    "cluster at the cut": lambda n: torch.where(torch.arange(n) < 15, 1.0, 0.3).double(),
    "rank 10": lambda n: torch.where(torch.arange(n) < 10, 0.5 ** torch.arange(n).double(), 0.0),
    "zero": lambda n: torch.zeros(n).double(),
    "arithmetic": lambda n: torch.linspace(1, 1e-6, n).double(),
}


def with_spectrum(s, m):
    """A matrix whose singular values end where they are too small to count."""
    generator = torch.Generator().manual_seed(4)
    k = max(1, int((s > 0).sum()))
    u, v = (random_orthonormal(rows, k, generator, torch.float64) for rows in (m, len(s)))
    return (u * s[:k]) @ v.T


def check(a, k, accuracy, result, method=""):
    """Everything that a result promises, by the singular values of A in float64."""
    assert result.converged
    assert method in result.attempts[-1].method
    wide, (u, s, vh) = a.double(), (x.double() for x in result)
    # On the host: cuSOLVER's Jacobi iterations err by more than what is certified, 6e-13 at 5001 x 2000.
    exact = torch.linalg.svdvals(wide.cpu()).to(a.device)
    norm, n = float(exact.norm()), min(a.shape)
    part = accuracy if isinstance(accuracy, float) else 0.0
    unit = torch.finfo(torch.float32 if part >= 2.0**-14 else a.dtype).eps / 2
    coarse = {"fp16": 2.0**-11, "fp32": 2.0**-24}.get(accuracy, unit)
    # What is certified, noise of the measurement included, and what the working precision adds here.
    noise = max(a.shape) ** 0.5 * 2.0**-53
    rounding = (3 * coarse * (2 + math.log2(n)) + noise + 10 * unit) * norm
    identity = torch.eye(k, dtype=torch.float64, device=a.device)
    for basis in (u, vh.T):
        assert float((basis.T @ basis - identity).norm()) <= 12 * coarse * (2 + math.log2(n)) * k**0.5
    allowed = (part * s + rounding).clamp_min(1e-300)
    for gaps in (wide @ vh.T - u * s, wide.T @ u - vh.T * s):
        assert float((torch.linalg.vector_norm(gaps, dim=0) / allowed).max()) <= 1.01
    errors = torch.as_tensor(result.errors, device=a.device)
    assert bool(((s - exact[:k]).abs() <= errors + 1e-14 * norm).all())
    # Of two residuals and two bases, each with its own rounding errors and noise.
    assert bool((errors <= 1.01 * (part * s + 6 * rounding)).all())
    left = float((wide - (u * s) @ vh).norm())
    assert left <= (1 + max(part, 1e-3)) * float(exact[k:].norm()) + 2 * rounding * k**0.5
    if left > 1e-3 * norm:
        assert result.relative_error == pytest.approx(left / norm, rel=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("accuracy", [None, 1e-2])
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [(450, 300), (301, 333)])
def test_every_spectrum(shape, spectrum, accuracy, dtype):
    tall = with_spectrum(SPECTRA[spectrum](min(shape)), max(shape))
    a = (tall if shape[0] >= shape[1] else tall.T).to(dtype)
    check(a, 20, accuracy, neula.svd_lowrank(a, 20, accuracy=accuracy, engine="cpu"))


@pytest.mark.parametrize("spectrum", ["gap", "1/k", "geometric", "rank 10"])
@pytest.mark.parametrize("rank", [1, 7, 20])
def test_iterations_do_where_singular_values_decay(spectrum, rank):
    a = with_spectrum(SPECTRA[spectrum](300), 500).float()
    for accuracy in (None, "fp16", 1e-2, 1e-3):
        result = neula.svd_lowrank(a, rank, accuracy=accuracy, engine="cpu")
        check(a, rank, accuracy, result, "subspace iteration")
        assert len(result.attempts) == 1


@pytest.mark.parametrize("spectrum", ["gap", "1/k", "slow"])
@pytest.mark.parametrize("accuracy", ["fp16", 1e-2])
def test_subspaces_from_half_precision(spectrum, accuracy):
    a = with_spectrum(SPECTRA[spectrum](150), 200).float()
    result = neula.svd_lowrank(a, 12, accuracy=accuracy, engine="emulated", algorithm="iteration")
    check(a, 12, accuracy, result, "subspace iteration fp16")


HALF = {"accuracy": "fp16", "engine": "emulated"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("spectrum", "rank", "options", "method"),
    [
        ("geometric", 5, {}, ""),
        ("geometric", 5, {"algorithm": "iteration"}, "subspace iteration"),
        ("geometric", 5, {"algorithm": "gram-svd"}, "gram-svd"),
        ("geometric", np.uint8(5), {"algorithm": "qr-svd"}, "+ svd"),
        # The paper's Table 4: half precision loses nothing where truncation dominates.
        *(("arithmetic", rank, HALF, "") for rank in (16, 64, 128)),
    ],
)
def test_every_dtype(spectrum, rank, options, method, dtype):
    """Narrow ones are computed in float32."""
    a = with_spectrum(SPECTRA[spectrum](160), 400).to(dtype)
    if dtype == torch.bfloat16:
        options = {name: x for name, x in options.items() if name != "accuracy"}
    result = neula.svd_lowrank(a, rank, **options)
    assert result.U.dtype == result.s.dtype == dtype
    assert method in result.attempts[-1].method
    assert "algorithm" not in options or len(result.attempts) == 1
    assert result.qr.converged
    check(a, int(rank), options.get("accuracy"), result)


def test_no_rank_is_none() -> None:
    U, s, Vh = neula.svd_lowrank(np.zeros((5, 3)), tol=0.1)
    assert (U.shape, s.shape, Vh.shape) == ((5, 0), (0,), (0, 3))


def test_where_the_gram_matrix_does_not_do_qr_takes_over(monkeypatch):
    monkeypatch.setattr(links, "gram_svd", lambda *given: None)
    result = neula.svd_lowrank(np.zeros((800, 80), dtype=np.float32), 2)
    assert [a.accepted for a in result.qr.attempts] == [False, True]
    assert result.qr.attempts[0].reason == "the Gram matrix overflows"
    assert result.s.tolist() == [0.0, 0.0]


def test_a_named_algorithm_is_given_back_where_it_misses() -> None:
    a = with_spectrum(SPECTRA["equal"](200), 200)
    with pytest.warns(neula.AccuracyWarning, match="larger singular values may have been missed"):
        result = neula.svd_lowrank(a, 5, algorithm="iteration")
    assert not result.converged
    with pytest.raises(neula.AccuracyError) as caught:
        neula.svd_lowrank(a, 5, algorithm="iteration", strict=True)
    assert caught.value.result.s.shape == (5,)


@pytest.mark.parametrize("shape", [(400, 300), (300, 400), (40, 30), (900, 90)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(shape, bad, rng):
    a = rng.standard_normal(shape)
    a[3, 5] = bad
    with pytest.raises(ValueError, match=r"A\[3, 5\] is (nan|inf)"):
        neula.svd_lowrank(a, 2)


@pytest.mark.parametrize("asked", [{"rank": 2}, {"tol": 0.3}, {}, {"rank": 2, "accuracy": 1e-2}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex128])
@pytest.mark.parametrize("shape", [(5, 20, 8), (2, 3, 8, 20), (1, 4, 4), (2, 20), (30, 300, 110)], ids=str)
def test_batches_and_the_rounding_of_what_is_returned(shape, dtype, asked):
    """Small matrices of a batch together, larger ones one by one, and errors of s in the dtype of A."""
    if min(shape) < 3 and asked.get("rank") == 2:
        asked = asked | {"rank": 1}
    scales = 10.0 ** torch.arange(-2, 3).repeat(7)[: shape[0]].reshape(-1, *[1] * (len(shape) - 1))
    exact = dtype if dtype.is_complex else torch.float64
    a = (scales * torch.randn(*shape, dtype=exact, generator=torch.Generator().manual_seed(3))).to(dtype)
    result = neula.svd_lowrank(a, **asked)
    assert result.converged
    u, s, vh = (x.to(exact) for x in result)
    true, k = torch.linalg.svdvals(a.to(exact)), s.shape[-1]
    rounding = 10 * min(shape[-2:]) * 2.0**-53 * true[..., :1]
    assert bool(((s.real - true[..., :k]).abs() <= result.errors + rounding).all())
    norm = true.square().sum(-1).sqrt()
    rest = true[..., k:].square().sum(-1).sqrt() / norm
    gap = (a.to(exact) - u * s[..., None, :] @ vh).flatten(-2).norm(dim=-1) / norm
    u = 40 * torch.finfo(torch.float32 if "accuracy" in asked and dtype.is_complex else dtype).eps
    assert bool((gap <= rest + u).all())
    assert float(gap.max()) == pytest.approx(result.relative_error, rel=1e-2, abs=u)
    if len(shape) > 2 and shape[1] < 300:  # together: of what is returned
        assert float(gap.max()) <= 1.001 * result.relative_error + 1e-14
    if "tol" in asked:  # as many as the matrix that needs most
        before = true[..., k - 1 :].square().sum(-1).sqrt()
        assert float((before / norm).max()) > 0.3 >= float(rest.max())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rank": 0}, r"rank must be a whole number from 1 to min\(m, n\) = 4, got 0"),
        ({"rank": 5}, "got 5"),
        ({"rank": 2.5}, "got 2.5"),
        ({"tol": 1.0}, "tol must be at least 0 and below 1, got 1.0"),
        ({"rank": 1, "tol": 0.1}, "rank or tol, not both"),
        ({"rank": 1, "accuracy": 1e-20}, r"a number from 4.4e-16, which torch.float64 can hold, to below 1"),
        ({"rank": 1, "accuracy": 1}, "to below 1, got 1"),
        ({"rank": 1, "accuracy": "fp12"}, "unknown accuracy 'fp12'"),
        ({"rank": 1, "algorithm": "lanczos"}, "unknown algorithm 'lanczos'"),
        ({"tol": 0.1, "algorithm": "iteration"}, "algorithm='iteration' needs a rank"),
    ],
)
def test_bad_parameters(kwargs, message, rng):
    with pytest.raises(ValueError, match=message):
        neula.svd_lowrank(rng.standard_normal((10, 4)), **kwargs)


@pytest.mark.parametrize("scale", [1e-30, 1e-25, 3e-24, 1e-22, 1e-18, 1e18])
def test_float32_of_any_size(scale: float) -> None:
    """Squares of the elements underflow, or nearly; relative accuracy does not depend on units."""
    a = random_matrix("normal", 300, 10) @ random_matrix("normal", 10, 200)
    exact = torch.linalg.svdvals(a)[:10]
    found = neula.svd_lowrank((a * scale).float(), rank=10, engine="cpu")
    # 3 u (2 + log2 n) of the largest, as certified.
    bound = 3 * 2.0**-24 * (2 + math.log2(200)) * float(exact[0])
    assert (found.s.double() / scale - exact).abs().max() <= bound


@pytest.mark.parametrize("algorithm", [None, "qr-svd", "gram-svd"])
def test_errors_of_float32_are_bounds(algorithm) -> None:
    """For the rounding errors of the SVD itself, too, and what singular vectors lack of orthogonality."""
    for seed in range(150):
        rng = np.random.default_rng(seed)
        m, n = int(rng.integers(5, 120)), int(rng.integers(5, 60))
        k = min(m, n)
        values = np.logspace(0, -rng.uniform(1, 8), k) if seed % 2 else np.ones(k)
        q, p = (np.linalg.qr(rng.standard_normal((size, k)))[0] for size in (m, n))
        A = ((q * values) @ p.T).astype(np.float32)
        rank = int(rng.integers(1, k + 1)) if algorithm == "gram-svd" else k
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", neula.AccuracyWarning)  # who names an algorithm gets it
            result = neula.svd_lowrank(A, rank, algorithm=algorithm)
        exact = np.linalg.svd(A.astype(np.float64), compute_uv=False)[:rank]
        if result.converged:
            assert (np.abs(result.s - exact) <= result.errors).all()


@pytest.mark.parametrize("shape", [(30, 20), (107, 110), (110, 107), (300, 40)])
def test_orthogonality_is_measured_of_what_is_returned(shape, rng):
    """``||U^T U - I||_F / sqrt(k)``, beside the same in double precision."""
    for _ in range(3):
        U, s, Vh = result = neula.svd_lowrank(rng.standard_normal(shape).astype(np.float32))
        losses = [np.linalg.norm(q.T.astype(float) @ q - np.eye(len(s))) for q in (U, Vh.T)]
        assert max(losses) / len(s) ** 0.5 <= 1.01 * result.certificate.orthogonality


@pytest.mark.parametrize("rank", [None, 2])
def test_small_rows_of_all_sizes_are_certified(rank, rng):
    """Where the sum of the bounds of QR and of the SVD of R exceeds the bound, the triplets are measured."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(150):
            m, n = rng.integers(2, 9, 2)
            A = rng.standard_normal((m, n)) + 1j * rng.standard_normal((m, n))
            A = (A * 10.0 ** rng.uniform(-8, 8, (m, 1))).astype(np.complex64)
            assert neula.svd_lowrank(A, rank).converged
