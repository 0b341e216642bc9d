"""``||I - Q^T Q||_2`` as certificates have it, against exact Gram matrices and singular values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

import neula
from neula.certificates.bounds import orthogonality_2norm_bound
from neula.certificates.orthogonality import (
    DIRECTIONS,
    FAILURE,
    PROBES,
    QUANTILES,
    by_power_method,
    directions,
    gram_defect,
    margin,
    measured_again,
    power_margin,
)
from neula.certificates.qr import accepted_by, certificates_of, leading_losses, qr_certificate, qr_measures
from neula.engines import BF16, FP16, FP32, FP64
from neula.io.matrices import random_matrix
from neula.kernels.few_vectors.probes import spectral_norms

CPU = torch.device("cpu")
SPECTRA = {
    "one large": lambda n: torch.tensor([1.0] + [1e-3] * (n - 1)),
    "one small": lambda n: torch.tensor([1.0] * (n - 1) + [1e-6]),
    "two clusters": lambda n: torch.tensor([1.0] * (n // 4) + [0.3] * (n - n // 4)),
    "graded": lambda n: torch.logspace(0, -8, n),
    "of both signs": lambda n: torch.linspace(-1.0, 0.9, n),
    "equal": lambda n: torch.ones(n),
}
"""Eigenvalues of ``I - Q^T Q``, relative to the largest."""


PRODUCTS = range(2, 30)


def haar(m: int, n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(m, n, dtype=torch.float64, generator=generator))[0]


def with_loss(m: int, n: int, kind: str, norm: float, seed: int = 0) -> torch.Tensor:
    """Q with these eigenvalues of ``I - Q^T Q``: its singular values are ``sqrt(1 - lambda)``."""
    values = (1 - norm * SPECTRA[kind](n).double()).sqrt()
    return haar(m, n, seed) * values @ haar(n, n, seed + 1).T


def exact(q: Any) -> np.ndarray:
    """``||I - Q^T Q||_2`` by the singular values of Q in double precision."""
    values = np.linalg.svd(np.asarray(q, dtype=np.float64), compute_uv=False)
    return np.abs(1 - values**2).max(-1)


@pytest.mark.parametrize("vectors", QUANTILES)
def test_the_margin_fails_as_rarely_as_it_says(vectors: int) -> None:
    quantile = scipy.stats.chi2.ppf(FAILURE, vectors)
    assert QUANTILES[vectors] == pytest.approx(quantile, rel=1e-3)
    part = 0.5 if vectors == PROBES else 1.0  # of the norm
    assert margin(100, vectors) == pytest.approx(part / math.sqrt(quantile), rel=1e-3)


def hidden(q: int, factor: float) -> float:
    """Rho: what lies across the eigenvector is so many times as large where q products show 1 / factor."""
    t = factor**-2
    return (1 - t) * q * (q / (q - 1)) ** (q - 1) * t**-q


@pytest.mark.parametrize("n", [65, 100, 391, 1000, 4096, 30000])
def test_the_power_method_fails_as_rarely_as_it_says(n: int) -> None:
    """A part of ``1 / (1 + rho)`` along the eigenvector is enough; that has a Beta distribution."""
    total = 0.0
    for q in PRODUCTS:
        factor = power_margin(n, q)
        assert 1 < factor < (power_margin(n, q - 1) if q > 2 else math.inf)
        rho, z = hidden(q, factor), np.linspace(0, factor**-2, 100_001)
        assert (1 - factor**-2) / (z ** (q - 1) * (factor**-2 - z)).max() == pytest.approx(rho, rel=1e-6)
        total += scipy.stats.beta.cdf(1 / (1 + rho), 0.5, (n - 1) / 2) ** DIRECTIONS
    assert total <= FAILURE
    assert power_margin(n, PRODUCTS[-1]) < 1.3


@pytest.mark.parametrize("n", [100, 4096, 30000])
@pytest.mark.parametrize("enough", [0.6, 0.99, 5.0])
def test_the_power_method_from_the_worst_start_that_is_allowed(n: int, enough: float) -> None:
    """The least part along the eigenvector, with the rest where it hides it best, shows the norm, 1."""
    for q in PRODUCTS:
        factor = power_margin(n, q)
        rho, small = hidden(q, factor), math.sqrt((q - 1) / q) / factor
        e = torch.tensor([[1.0], [small]], dtype=torch.float64)
        start = torch.tensor([[1.0], [math.sqrt(rho)]], dtype=torch.float64)
        found = float(by_power_method(e * start, lambda v: e * v, n, enough))  # noqa: B023
        assert 1 - 1e-12 <= found < max(2, enough)
        assert (found <= enough) == (enough == 5.0)


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("n", [1, 3, 8, 9, 40, 200])
def test_estimates(kind: str, n: int) -> None:
    q = with_loss(2 * n + 5, n, kind, 0.3, seed=n)
    lost, norm, near = torch.eye(n) - q.T @ q, float(exact(q)), 1 + 1e-8  # 1 - sigma^2 cancels
    image = lost @ directions(n, CPU)
    upper = float(margin(n, DIRECTIONS) * spectral_norms(image))
    assert norm <= upper * near <= norm * max(DIRECTIONS**0.25, 6 * math.sqrt(n))
    assert norm / near <= float(spectral_norms(gram_defect(q[None]))) <= n**0.25 * norm * near
    for enough in (1e3, 0.299, 0.0):
        found = float(measured_again(q[None], enough))
        assert norm <= found * near
        assert found <= max(2 * norm * near, enough)


def test_a_batch_is_measured_again_together() -> None:
    """It ends when all are decided."""
    n, sizes = 100, (1e-3, 0.3, 0.02, 0.9)
    q = torch.stack([with_loss(150, n, kind, x) for kind, x in zip(SPECTRA, sizes, strict=False)])
    for enough in (1e3, 0.05, 0.0):
        found = measured_again(q, enough).numpy()
        assert ((found <= enough) == (exact(q) <= enough)).all()
        assert (found >= exact(q)).all()
        assert (found <= np.maximum(2 * exact(q), enough)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_losses_of_leading_columns(dtype: torch.dtype) -> None:
    """An average of all directions, or with powers the largest, of the first columns alone."""
    generator = torch.Generator().manual_seed(1)
    q = torch.linalg.qr(torch.randn(200, 80, dtype=dtype, generator=generator)).Q
    q[:, 70] += 0.3 * q[:, 3]
    lost = torch.eye(80, dtype=dtype) - q.mH @ q
    torch.testing.assert_close(gram_defect(q[None])[0], lost, rtol=0, atol=200 * 2.0**-53)
    average = float(torch.linalg.matrix_norm(lost)) / 80**0.5
    for powers, exact, near in ((0, average, 2.0), (12, float(torch.linalg.matrix_norm(lost, 2)), 1.01)):
        first, all_of_them = leading_losses(q, [60, 80], powers=powers).tolist()
        assert first <= 1e-14
        assert exact / near <= all_of_them <= exact * near


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("target", [BF16, FP16, FP32, FP64], ids=str)
@pytest.mark.parametrize("n", [5, 40, 100])
def test_a_certificate_accepts_by_the_2norm(kind: str, target: Any, n: int) -> None:
    """Half of the bound is accepted, or the other bound is missed; more than the bound never is."""
    m, bound = 3 * n, orthogonality_2norm_bound(target, n)
    dtype = torch.float32 if target in (BF16, FP16, FP32) else torch.float64
    r, scales = torch.eye(n, dtype=dtype), torch.ones(n, dtype=dtype)
    noise = 2 * n * torch.finfo(dtype).eps
    for part in (0.4, 1.02, 1.3, 2.2):
        q = with_loss(m, n, kind, part * bound, seed=n).to(dtype)
        found = qr_certificate(q, q, r, scales, target)
        norm = float(exact(q))
        assert found.orthogonality_2norm >= norm - noise
        assert found.orthogonality_2norm_bound <= 0.1
        if part < 1:
            assert found.accepted == (found.orthogonality <= found.orthogonality_bound)
        else:
            assert not found.accepted or norm <= found.orthogonality_2norm_bound + noise


@pytest.mark.parametrize("kind", SPECTRA)
def test_a_batch_has_the_same(kind: str) -> None:
    q = torch.stack([with_loss(60, 40, kind, part * 0.1, seed=i) for i, part in enumerate((0.0, 0.3, 2.5))])
    r, scales = torch.eye(40).double().expand(3, 40, 40), torch.ones(3, 40).double()
    measures = qr_measures(q, q, r, scales)
    found = certificates_of(measures.numpy(), measures.dtype, (60, 40), FP16)
    assert (found.orthogonality_2norm >= exact(q) - 1e-13).all()
    assert not found.accepted[2]
    assert accepted_by(measures, (60, 40), FP16).tolist() == found.accepted.tolist()
    if not found.accepted[:2].all():
        assert "in the 2-norm" in found.in_words


def certificates(result: Any) -> list[neula.QRCertificate]:
    return [result.certificate] if isinstance(result.certificate, neula.QRCertificate) else result.certificate


def check(result: Any, noise: float) -> None:
    """Each certified 2-norm is at least the exact one, and each certificate accepts its Q."""
    norms = np.atleast_1d(exact(result.Q))
    for norm, one in zip(norms.ravel(), certificates(result), strict=True):
        assert norm <= one.orthogonality_2norm + noise
        assert one.orthogonality_2norm_bound <= 0.1
        assert one.accepted
        assert norm <= one.orthogonality_2norm_bound + noise


SPECTRAL = ("geometric", "arithmetic", "cluster_small", "cluster_large")


def held_out(kind: str, *shape: int, accuracy: str, device: str = "cpu") -> torch.Tensor:
    dtype = torch.float64 if accuracy == "fp64" else torch.float32
    a = random_matrix(kind, *shape[-2:], cond=1e5, seed=3, dtype=dtype).to(device)
    return a.expand(shape).contiguous()


@pytest.mark.parametrize("kind", SPECTRAL)
@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("accuracy", ["bf16", "fp16", "tf32", "fp32", "fp64"])
@pytest.mark.parametrize("shape", [(160, 72), (2, 160, 72)])
def test_held_out_spectra(kind: str, engine: str, accuracy: str, shape: tuple[int, ...]) -> None:
    a = held_out(kind, *shape, accuracy=accuracy)
    check(neula.qr(a, accuracy=accuracy, engine=engine, strict=True), 72 * torch.finfo(a.dtype).eps)


def test_a_few_lost_columns_go_on_to_the_next_link() -> None:
    """One small singular value: of all directions one is lost, which a norm over sqrt(n) hides."""
    values = torch.ones(192, dtype=torch.float64)
    values[-1] = 3e-4
    a = (haar(320, 192, 5) * values @ haar(192, 192, 6).T).float()
    found = neula.qr(a, accuracy="fp16", engine="emulated")
    assert [(one.method, one.accepted) for one in found.attempts] == [
        ("rgsqrf fp16", False),
        ("rgsqrf fp16 + reortho", True),
    ]
    with pytest.warns(neula.AccuracyWarning, match=r"in the 2-norm at most \d\.\de-01 \(bound 1\.0e-01\)"):
        once = neula.qr(a, accuracy="tf32", engine="emulated", compute="fp16", algorithm="rgsqrf")
    assert float(exact(once.Q)) > 0.3
    assert once.certificate.orthogonality <= once.certificate.orthogonality_bound
    assert once.certificate.doubtful
    assert float(exact(once.Q)) <= once.certificate.orthogonality_2norm <= float(exact(once.Q)) * 2
    check(found, 0.0)


@pytest.mark.parametrize("shape", [(300, 100), (90, 70)])
def test_what_is_measured_is_what_is_returned(shape: tuple[int, int]) -> None:
    """Q in double precision has an orthogonality of 1e-15, and rounded to float32 one of 1e-8."""
    a = random_matrix("cluster_small", *shape, cond=1e12, seed=3, dtype=torch.float32)
    found = neula.qr(a, engine="emulated", algorithm="householder")
    assert found.attempts[-1].method == "householder fp64"
    assert 1e-9 < float(exact(found.Q)) <= found.certificate.orthogonality_2norm + 1e-14


@pytest.mark.parametrize("shape", [(60, 4), (60, 24), (30, 50), (3, 40, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_way_reports_it(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    a = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    noise = max(shape) * torch.finfo(dtype).eps
    results = [
        neula.qr(a),
        neula.qr(a, pivoting=True),
        neula.qr(a, engine="emulated"),
        neula.qr(a, "complete") if len(shape) == 2 else neula.qr(a),
        neula.qr(a, algorithm="householder"),
        neula.finish(neula.qr(a, wait=False)),
        *([neula.tsqr(a), neula.tsqr(a, engine="emulated")] if shape[-1] < 256 else []),
    ]
    for result in results:
        check(result, noise)
    raw = neula.qr(a, mode="raw")
    for one in certificates(raw):
        assert 0 < one.orthogonality_2norm <= one.orthogonality_2norm_bound
    assert exact(neula.orth(a)).max() <= 30 * min(shape[-2:]) * torch.finfo(dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SPECTRAL)
@pytest.mark.parametrize("accuracy", ["bf16", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize("shape", [(64, 32), (1000, 72), (1500, 600), (3, 300, 40), (3, 900, 300)])
def test_held_out_spectra_on_a_gpu(kind: str, accuracy: str, shape: tuple[int, ...]) -> None:
    a = held_out(kind, *shape, accuracy=accuracy, device="cuda")
    for wait in (True, False):
        found = neula.finish(neula.qr(a, accuracy=accuracy, strict=True, wait=wait))
        check(replace(found, Q=found.Q.cpu()), 2 * max(shape) * torch.finfo(a.dtype).eps)
