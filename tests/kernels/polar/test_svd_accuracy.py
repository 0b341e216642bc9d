"""Singular value decompositions as accurate as LAPACK's, whoever computes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from neula.io.matrices import random_matrix
from neula.kernels.polar import svd as module
from neula.kernels.polar.svd import converged_eigh, converged_eigvalsh, svd


@pytest.mark.parametrize("shape", [(1, 1), (60, 60), (300, 100), (100, 300)])
@pytest.mark.parametrize("condition", [1.0, 1e12, pytest.param(1e300, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_as_accurate_as_lapack(shape: tuple[int, int], condition: float, device: str) -> None:
    m, n = shape
    a = random_matrix("geometric", max(m, n), min(m, n), cond=condition)
    a = (a if m >= n else a.T).to(device)
    u, s, vh = svd(a)
    k, identity = min(m, n), torch.eye(min(m, n), dtype=a.dtype, device=device)
    bound = 8 * k * 2**-53
    assert (u.shape, s.shape, vh.shape) == ((m, k), (k,), (k, n))
    assert torch.linalg.matrix_norm(u.T @ u - identity) <= bound
    assert torch.linalg.matrix_norm(vh @ vh.T - identity) <= bound
    assert torch.linalg.matrix_norm(a - u * s @ vh) <= bound * torch.linalg.matrix_norm(a)
    assert (s.diff() <= 0).all()
    assert (torch.linalg.svdvals(a.cpu()) - s.cpu()).abs().max() <= bound * s[0].cpu()


def test_factors_that_are_not_are_noticed() -> None:
    a = random_matrix("normal", 30, 30)
    u, s, vh = torch.linalg.svd(a)
    assert module._accurate(a, u, s, vh)
    assert module._accurate(0 * a, u, 0 * s, vh)
    for wrong in (
        (u * (1 + 1e-13), s, vh),
        (u, s * (1 + 1e-13), vh),
        (u, s, vh * (1 + 1e-13)),
        (u, s, vh * torch.nan),
    ):
        assert not module._accurate(a, *wrong)


def test_eigenvalues_where_divide_and_conquer_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def gives_up(a: torch.Tensor) -> torch.Tensor:
        raise torch.linalg.LinAlgError("the algorithm failed to converge")

    a = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 3, 7, 7)))
    a = a + a.mT  # symmetric
    expected = torch.linalg.eigvalsh(a)
    monkeypatch.setattr(torch.linalg, "eigh", gives_up)
    monkeypatch.setattr(torch.linalg, "eigvalsh", gives_up)
    values, vectors = converged_eigh(a)
    bound = 8 * 7 * 2.0**-53 * a.norm()
    assert (values - expected).abs().max() <= bound
    assert (converged_eigvalsh(a) - expected).abs().max() <= bound
    assert (a @ vectors - vectors * values[..., None, :]).norm() <= bound
    with pytest.raises(torch.linalg.LinAlgError):
        converged_eigh(a * torch.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_roots_of_gram_matrices_have_the_digits_of_single_precision(dtype: torch.dtype) -> None:
    n = 40
    parts = [random_matrix("geometric", 60, n, cond=1e12, seed=seed) for seed in (1, 2)]
    a = (torch.complex(*parts) if dtype.is_complex else parts[0]).to(dtype)
    exact = torch.linalg.svdvals(a.to(torch.complex128))
    found = module._roots_of_gram(a)
    assert bool((found.diff() <= 0).all())
    # Eigenvalues of the Gram matrix err by n u, and roots of those near zero by the root of that.
    assert float((found.double() - exact).abs().max()) <= (2 * n * 2.0**-53) ** 0.5 * float(exact[0])
