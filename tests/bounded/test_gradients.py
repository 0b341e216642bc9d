"""Derivatives of solutions within bounds, beside differences and those of least squares."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import neula
from neula.pipeline.gradients import known
from neula.problems.operators.bounded import BoundedFunction

GENERATOR = torch.Generator().manual_seed(3)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64).requires_grad_()


A, B, BATCH = normal(9, 4), normal(9, 3), normal(2, 9, 4)


def positive(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return neula.nnls(a, b).x


def between(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return neula.lsq_linear(a, b, (-0.2, 0.3)).x


def test_bounds_hold_some_unknowns() -> None:
    with torch.no_grad():
        for result in (neula.nnls(BATCH, B), neula.lsq_linear(BATCH, B, (-0.2, 0.3))):
            assert 0.2 < (result.active_mask == 0).double().mean() < 0.8


@pytest.mark.parametrize(
    ("solve", "a", "b"),
    [
        *((positive, a, b) for a, b in [(A, B), (A, B[:, 0]), (BATCH, B[:, 0]), (A, B[:, :0])]),
        *((between, a, b) for a, b in [(A, B), (BATCH, B[:, 0])]),
    ],
)
def test_beside_differences(solve, a, b) -> None:
    inputs = (a.detach().requires_grad_(), b.detach().requires_grad_())
    assert gradcheck(solve, inputs, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(solve, inputs, fast_mode=True)


def test_without_bounds_that_matter() -> None:
    wide = neula.lsq_linear(A, B, (-1e3, 1e3)).x
    usual = neula.lstsq(A, B).x
    for ours, theirs in zip(
        torch.autograd.grad(wide.square().sum(), (A, B)),
        torch.autograd.grad(usual.square().sum(), (A, B)),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-12)


def test_columns_of_any_size() -> None:
    """Derivatives scale as the columns do."""
    sizes = 10.0 ** torch.tensor([-120.0, -3.0, 40.0, 90.0], dtype=torch.float64)
    (plain,) = torch.autograd.grad(positive(A, B).sum(0) @ torch.ones(3).double(), A)
    scaled = (A.detach() * sizes).requires_grad_()
    x = positive(scaled, B) * sizes[:, None]
    (found,) = torch.autograd.grad(x.sum(), scaled)
    assert torch.allclose(found * sizes, plain, rtol=1e-10, atol=1e-12)


def test_numbers_are_those_without_a_gradient() -> None:
    for dtype in (torch.float32, torch.float64):
        a, b = A.detach().to(dtype), B.detach().to(dtype)
        x, rnorm = neula.nnls(a.requires_grad_(), b)
        assert x.requires_grad
        assert x.dtype == dtype
        assert torch.equal(x.detach(), neula.nnls(a.detach(), b).x)
        assert rnorm.requires_grad
        assert torch.equal(rnorm.detach(), neula.nnls(a.detach(), b).rnorm)


def test_what_has_no_gradient() -> None:
    twice, x = torch.ones(4, 2).double(), torch.full((2, 1), 0.5).double()
    attached = BoundedFunction.apply(twice.requires_grad_(), torch.ones(4, 1).double(), known(x, x < 0))[0]
    with pytest.raises(ValueError, match="have no gradient there"):
        attached.sum().backward()
    with pytest.raises(ValueError, match="gradient"):
        neula.lsq_linear(A, B, (torch.zeros(4, requires_grad=True), 1.0))


@pytest.mark.parametrize(("a", "b"), [(A, B), (A, B[:, 0]), (BATCH, B), (BATCH, B[:, 0])])
def test_all_that_depends_on_the_input(a, b) -> None:
    """Residuals, their norms, costs, and the solution without bounds, beside differences."""

    def known(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = neula.lsq_linear(a, b, (-0.2, 0.3))
        _, rnorm = neula.nnls(a, b)
        return result.fun, result.residual_norms, result.cost, result.unbounded_sol, rnorm

    inputs = (a.detach().requires_grad_(), b.detach().requires_grad_())
    assert all(x.requires_grad for x in known(*inputs))
    assert gradcheck(known, inputs, fast_mode=True)
    assert gradcheck(known, inputs, check_forward_ad=True, check_backward_ad=False, fast_mode=True)
    for x, y in zip(known(*inputs), known(a.detach(), b.detach()), strict=True):
        assert torch.equal(x.detach(), torch.as_tensor(y, dtype=torch.float64))
    assert isinstance(neula.nnls(a.detach(), b.detach()).rnorm, float) == (a.ndim == 2 and b.ndim == 1)


def test_members_with_nan_do_not_spoil_others() -> None:
    a = BATCH.detach().clone()
    a[1, 0, 0] = torch.nan
    a.requires_grad_()
    with pytest.warns(neula.AccuracyWarning):
        x = positive(a, B.detach())
    (gradient,) = torch.autograd.grad(x[0].sum(), a)
    (alone,) = torch.autograd.grad(positive(a[0], B.detach()).sum(), a)
    assert torch.allclose(gradient[0], alone[0])
