"""Refined singular value decompositions: rounding errors, whatever LAPACK leaves."""

from __future__ import annotations

import pytest
import torch

from neula.algorithms.spectra import qr_svd as module
from neula.algorithms.spectra.qr_svd import refined_svd
from neula.io.matrices import SPECTRA, random_matrix

U = 2.0**-53


def errors(a: torch.Tensor, u: torch.Tensor, s: torch.Tensor, vh: torch.Tensor) -> tuple[float, float]:
    """``||A V - U S||`` in units of A, and the larger loss of orthogonality."""
    identity, norm = torch.eye(len(s), dtype=a.dtype), torch.linalg.matrix_norm
    lost = max(norm(u.T @ u - identity), norm(vh @ vh.T - identity))
    return float(norm(a @ vh.T - u * s) / norm(a)), float(lost)


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (24, 24), (60, 24), (200, 60)])
def test_rounding_errors_of_products_are_left(kind: str, m: int, n: int) -> None:
    a = random_matrix(kind, m, n, cond=1e6)
    u, s, vh = refined_svd(a)
    residual, lost = errors(a, u, s, vh)
    # Inner products of n and m numbers, for n columns.
    assert residual <= (n**0.5 + 4) * U
    assert lost <= n * (m**0.5 + 4) * U
    assert (s.diff() <= 0).all()
    assert (s >= 0).all()


def test_what_a_worse_method_leaves_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of 1e-10, as Jacobi's method with few sweeps has them, end as their squares."""
    a = random_matrix("arithmetic", 50, 30, cond=1e2)
    noise = [1e-10 * random_matrix("normal", *shape, seed=i) for i, shape in enumerate(((50, 30), (30, 30)))]

    def poor(a: torch.Tensor) -> module.Factors:
        u, s, vh = torch.linalg.svd(a, full_matrices=False)
        return u + u @ (u.T @ noise[0]), s, vh + noise[1]

    monkeypatch.setattr(module, "svd", poor)
    residual, lost = errors(a, *refined_svd(a))
    assert max(errors(a, *poor(a))) > 1e-10
    assert residual <= (30**0.5 + 4) * U
    assert lost <= 30 * (50**0.5 + 4) * U


def test_equal_and_vanishing_singular_values() -> None:
    for s in (torch.ones(12), torch.tensor([3.0, 2.0, 2.0, 0.0, 0.0]), torch.zeros(4)):
        q = torch.linalg.qr(random_matrix("normal", len(s), len(s)))[0]
        a = (q * s.double()) @ q.T.flip(0)
        u, found, vh = refined_svd(a)
        residual, lost = errors(a + (a == 0) * 0.0, u, found, vh)
        assert torch.allclose(found, s.double(), rtol=0, atol=1e-15)
        assert lost <= 1e-14
        assert not residual > 1e-15  # NaN for zero
