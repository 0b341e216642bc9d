"""Batches of low-rank approximations, and gradients: against finite differences and those of a whole SVD."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import neula

Triplets = tuple[torch.Tensor, ...]

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def variable(*shape: int, device: str = "cpu", decay: float = 1.0) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (x * decay ** torch.arange(shape[-1])).to(device).requires_grad_()


def of_singular_values(*s: float) -> torch.Tensor:
    """A matrix with 8 rows that has them, and a variable."""
    generator = torch.Generator().manual_seed(1)
    u, v = (torch.randn(n, n, generator=generator, dtype=torch.float64).svd().U for n in (8, len(s)))
    return ((u[:, : len(s)] * torch.tensor(s, dtype=torch.float64)) @ v.T).requires_grad_()


def without_signs(u: torch.Tensor, s: torch.Tensor, vh: torch.Tensor) -> Triplets:
    """Quantities that do not depend on the signs of singular vectors."""
    return s, u**2, vh**2, (u * s.cos().unsqueeze(-2)) @ vh


# --- batches ----------------------------------------------------------------------------------------------


@DEVICES
@pytest.mark.parametrize("shape", [(3, 30, 20), (2, 2, 20, 30), (1, 9, 9)])
def test_each_matrix_of_a_batch(shape: tuple[int, ...], device: str) -> None:
    a = variable(*shape, device=device, decay=0.8).detach()
    result = neula.svd_lowrank(a, 4)
    assert result.converged
    assert len(result.certificate) == np.prod(shape[:-2])
    exact = torch.linalg.svdvals(a.cpu())[..., :4].to(device)  # LAPACK's errors are smaller than cuSOLVER's
    assert bool(((result.s - exact).abs() <= result.errors + 1e-15 * exact).all())
    assert result.U.shape == (*shape[:-1], 4)
    flat = a.reshape(-1, *shape[-2:])
    alone = torch.stack([(x.U * x.s) @ x.Vh for x in (neula.svd_lowrank(one, 4) for one in flat)])
    together = (result.U * result.s.unsqueeze(-2)) @ result.Vh
    torch.testing.assert_close(together.reshape_as(alone), alone, rtol=0, atol=1e-12)


def test_a_tolerance_that_matrices_of_a_batch_need_different_ranks_for() -> None:
    a = np.stack([np.diag([4.0, 3.0, 1e-9]), np.diag([4.0, 1e-9, 1e-9])])
    result = neula.svd_lowrank(a, tol=1e-6)
    np.testing.assert_allclose(result.s, [[4, 3], [4, 1e-9]], rtol=1e-12)
    assert result.relative_error <= 1e-6


def test_which_matrix_of_a_batch_is_refused_or_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    a = np.ones((2, 3, 4))
    a[1, 2, 0] = np.nan
    with pytest.raises(ValueError, match=r"A\[1, 2, 0\] is nan"):
        neula.svd_lowrank(a, 1)
    rng = np.random.default_rng(0)
    a = np.stack([np.diag(0.5 ** np.arange(300.0)), np.linalg.qr(rng.standard_normal((300, 300)))[0]])
    with pytest.warns(neula.AccuracyWarning, match=r"for A\[1\]: .*missed"):
        result = neula.svd_lowrank(a, 2, algorithm="iteration", accuracy=1e-12)
    assert [each.accepted for each in result.certificate] == [True, False]


# --- gradients --------------------------------------------------------------------------------------------


@DEVICES
@pytest.mark.parametrize(
    ("shape", "rank"), [((6, 4), 2), ((4, 6), 2), ((5, 5), 5), ((7, 3), 3), ((2, 6, 4), 2), ((6, 1), 1)]
)
def test_derivatives_of_triplets(shape: tuple[int, ...], rank: int, device: str) -> None:
    a = variable(*shape, device=device)

    def function(a: torch.Tensor) -> Triplets:
        return without_signs(*neula.svd_lowrank(a, rank))

    assert gradcheck(function, (a,), check_forward_ad=True, fast_mode=True, nondet_tol=1e-12)
    assert gradgradcheck(function, (a,), fast_mode=True, nondet_tol=1e-10)


@DEVICES
@pytest.mark.parametrize("algorithm", ["iteration", "gram-svd"])
@pytest.mark.parametrize("shape", [(300, 200), (200, 300)])
def test_gradients_are_those_of_the_whole_svd(shape: tuple[int, ...], algorithm: str, device: str) -> None:
    a = variable(*shape, device=device, decay=0.9)
    weight = torch.linspace(1, 2, 5 * shape[1], dtype=torch.float64, device=device).reshape(5, -1)
    whole = torch.linalg.svd(a.cpu(), full_matrices=False)  # LAPACK's errors are smaller than cuSOLVER's
    found, exact = (
        torch.autograd.grad((u[:, :5] ** 2 @ weight + (vh[:5] ** 2 * weight).sum()).sum() + s[:5].sum(), a)[0]
        for u, s, vh in (neula.svd_lowrank(a, 5, algorithm=algorithm), (x.to(device) for x in whole))
    )
    assert float((found - exact).norm() / exact.norm()) <= 1e-10


UNDETERMINED = [((3, 3, 1), 2), ((3, 1, 1), 2), ((3, 1, 1 - 1e-13), 2), ((3, 1, 0), 3), ((3, 0, 0), 2)]


@pytest.mark.parametrize(("values", "rank"), UNDETERMINED)
def test_vectors_that_are_not_determined_have_no_gradient(values: tuple[float, ...], rank: int) -> None:
    """NaN, and never the derivative of an arbitrary choice; singular values have theirs."""
    a = of_singular_values(*values)
    U, s, Vh = neula.svd_lowrank(a, rank)
    (found,) = torch.autograd.grad(((U * s) @ Vh).sum(), a, retain_graph=True)
    assert bool(found.isnan().any())
    (found,) = torch.autograd.grad(s[0], a)
    assert found.isfinite().all()
    torch.testing.assert_close(found, U[:, :1].detach() @ Vh[:1].detach(), rtol=0, atol=1e-12)


def test_other_vectors_of_the_same_matrix_have_one() -> None:
    a = of_singular_values(4, 3, 1, 1)
    U, _, _ = neula.svd_lowrank(a, 2)
    exact = torch.linalg.svd(a, full_matrices=False).U[:, :2]
    for place in range(2):
        row = torch.arange(8.0, dtype=torch.float64)
        (found,) = torch.autograd.grad(row @ U[:, place] ** 2, a, retain_graph=True)
        change = torch.randn(8, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        near = [(a + step * change).detach() for step in (1e-5, -1e-5)]
        plus, minus = (torch.linalg.svd(x, full_matrices=False).U[:, place] ** 2 @ row for x in near)
        assert abs(float((found * change).sum()) - float(plus - minus) / 2e-5) <= 1e-6 * float(found.norm())
    torch.testing.assert_close(U.abs(), exact.abs(), rtol=0, atol=1e-12)
