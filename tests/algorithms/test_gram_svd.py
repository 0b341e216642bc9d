"""Singular triplets from the Gram matrix against those that a matrix was made from."""

from __future__ import annotations

import math

import pytest
import torch

from neula.algorithms.spectra.gram_svd import gram_svd
from neula.engines import CpuEngine
from neula.io.matrices import SPECTRA, random_matrix, singular_values

U32 = 2.0**-24


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize(("dtype", "u"), [(torch.float32, U32), (torch.float64, 2.0**-53)])
def test_leading_triplets_are_as_accurate_as_the_matrix(kind: str, dtype: torch.dtype, u: float) -> None:
    m, n, k = 400, 80, 6
    a = random_matrix(kind, m, n, cond=30.0, seed=5).to(dtype)
    engine = CpuEngine("cpu", "fp64" if dtype == torch.float64 else "fp32")
    found = gram_svd(a, k, engine, 10 * n * u)
    # Exact for a matrix that differs by the residual: Weyl; sums of m products err by m u at most.
    bound = m * u
    assert found.residual <= 10 * n * u
    assert found.orthogonality <= bound
    assert found.norm == pytest.approx(float(a.double().norm()), rel=bound)
    truth = singular_values(kind, n, 30.0)[:k]
    assert float((found.s.double() - truth).abs().max()) <= bound * float(a.norm())
    u_found, v, wide = found.u.double(), found.v.double(), a.double()
    identity = torch.eye(k, dtype=torch.float64)
    assert float((v.T @ v - identity).norm()) <= bound
    assert float((wide @ v - u_found * found.s).norm()) <= bound * found.norm
    gap = float((wide.T @ u_found - v * found.s).norm()) / found.norm
    assert gap == pytest.approx(found.residual, abs=bound), "the residual is what it says"


def test_steps_on_the_matrix_itself_bring_back_what_the_gram_matrix_hides() -> None:
    """In single precision the Gram matrix knows singular values above 2e-4 only; the 8th is 1e-3 here."""
    a = random_matrix("geometric", 300, 64, cond=1e27, seed=2).float()
    k = 8
    found = gram_svd(a, k, CpuEngine("cpu", "fp32"), 20 * U32)
    assert found.residual <= 20 * U32
    truth = singular_values("geometric", 64, 1e27)[:k]
    assert float((found.s.double() - truth).abs().max()) <= 300 * U32


def test_what_cannot_be_found_is_not_a_number() -> None:
    """Nothing that is small enough for a bound comes out, since no bound is met by NaN."""
    engine = CpuEngine("cpu", "fp32")
    for a in (torch.zeros(30, 10), torch.full((30, 10), math.inf), torch.full((30, 10), 1e30)):
        found = gram_svd(a, 2, engine, 1e-5)
        assert math.isnan(found.residual)


def test_beyond_the_rank_singular_values_are_rounding_errors() -> None:
    a = torch.outer(torch.arange(1.0, 31.0), torch.arange(1.0, 11.0))
    found = gram_svd(a, 2, CpuEngine("cpu", "fp32"), 1e-5)
    assert float(found.s[0]) == pytest.approx(float(a.norm()), rel=1e-5)
    assert not float(found.s[1]) > 30 * U32 * float(a.norm())


def test_inputs_are_left_alone() -> None:
    a = random_matrix("normal", 100, 20).float()
    kept = a.clone()
    gram_svd(a, 3, CpuEngine("cpu", "fp32"), 1e-6)
    assert torch.equal(a, kept)
