"""Singular triplets from the Gram matrix against those that a matrix was made from."""

from __future__ import annotations

import math

import pytest
import torch

from neula.algorithms.spectra.gram_svd import gram_svd
from neula.algorithms.spectra.ritz import Ritz
from neula.engines import CpuEngine
from neula.io.matrices import SPECTRA, random_matrix, singular_values

U32 = 2.0**-24


def triplets(a: torch.Tensor, rank: int, engine: CpuEngine, residual: float) -> tuple[Ritz, float]:
    found = gram_svd(a, rank, engine, engine, residual)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize(("dtype", "u"), [(torch.float32, U32), (torch.float64, 2.0**-53)])
def test_leading_triplets_are_as_accurate_as_the_matrix(kind: str, dtype: torch.dtype, u: float) -> None:
    m, n, k = 400, 80, 6
    a = random_matrix(kind, m, n, cond=30.0, seed=5).to(dtype)
    engine = CpuEngine("cpu", "fp64" if dtype == torch.float64 else "fp32")
    norm = float(a.double().norm())
    found, beyond = triplets(a, k, engine, 10 * n * u * norm)
    # Exact for a matrix that differs by the residual: Weyl; sums of m products err by m u at most.
    bound = m * u
    assert found.residual <= 10 * n * u * norm
    assert found.loss <= bound
    assert beyond == pytest.approx(float(singular_values(kind, n, 30.0)[k]), rel=1e-3)
    truth = singular_values(kind, n, 30.0)[:k]
    assert float((found.s.double() - truth).abs().max()) <= bound * float(a.norm())
    u_found, v, wide = found.u.double(), found.v.double(), a.double()
    identity = torch.eye(k, dtype=torch.float64)
    assert float((v.T @ v - identity).norm()) <= bound
    assert float((wide @ v - u_found * found.s).norm()) <= bound * norm
    gap = float((wide.T @ u_found - v * found.s).norm())
    assert gap == pytest.approx(found.residual, abs=bound * norm), "the residual is what it says"


def test_steps_on_the_matrix_itself_bring_back_what_the_gram_matrix_hides() -> None:
    """In single precision the Gram matrix knows singular values above 2e-4 only; the 8th is 1e-3 here."""
    a = random_matrix("geometric", 300, 64, cond=1e27, seed=2).float()
    k = 8
    norm = float(a.norm())
    found, _ = triplets(a, k, CpuEngine("cpu", "fp32"), 20 * U32 * norm)
    assert found.residual <= 20 * U32 * norm
    truth = singular_values("geometric", 64, 1e27)[:k]
    assert float((found.s.double() - truth).abs().max()) <= 300 * U32


def test_nothing_comes_of_a_gram_matrix_that_overflows() -> None:
    engine = CpuEngine("cpu", "fp32")
    for a in (torch.full((30, 10), math.inf), torch.full((30, 10), 1e30)):
        assert gram_svd(a, 2, engine, engine, 1e-5) is None


def test_beyond_the_rank_singular_values_are_rounding_errors() -> None:
    a = torch.outer(torch.arange(1.0, 31.0), torch.arange(1.0, 11.0))
    found, _ = triplets(a, 2, CpuEngine("cpu", "fp32"), 1e-5 * float(a.norm()))
    assert float(found.s[0]) == pytest.approx(float(a.norm()), rel=1e-5)
    assert not float(found.s[1]) > 30 * U32 * float(a.norm())
