"""Gradients of complex numbers in single precision and in torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.test_gradients import CASES, COMPLEX, FUNCTIONS, REAL, TRANSFORMED, Tensors, inputs_of, variable
from torch.autograd import forward_ad

import neula


def real_loss(f: Callable[..., Any], *inputs: torch.Tensor) -> torch.Tensor:
    found = f(*inputs)
    total = torch.zeros((), dtype=REAL)
    for x in found if isinstance(found, tuple) else (found,):
        total = total + x.abs().square().sum() + (x * (1 + 2j)).real.sin().sum()
    return total


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "complex") for name in ("qr (5, 2)", "solve (4, 4)", "cholesky", "polar", "pinv")),
        ("lstsq (5, 2)", "real A"),
    ],
)
def test_single_precision(name: str, kind: str) -> None:
    """Condition numbers are below ten: a few hundred units of rounding."""
    function, inputs = FUNCTIONS[name][0], inputs_of(name, kind)
    narrow = {REAL: torch.float32, COMPLEX: torch.complex64}
    given = tuple(x.detach().to(narrow[x.dtype]).requires_grad_() for x in inputs)
    expected = torch.autograd.grad(real_loss(function, *inputs), inputs)
    found = torch.autograd.grad(real_loss(function, *given), given)
    for x, y, z in zip(found, expected, given, strict=True):
        assert x.dtype == z.dtype
        assert float((x - y).norm()) <= 1e-4 * float(y.norm())


def test_phases_of_singular_vectors_have_no_gradient() -> None:
    a = variable(6, 4, dtype=COMPLEX)
    u, s, _ = neula.svd_lowrank(a, 2)
    assert bool(torch.autograd.grad(u.real.sum(), a, retain_graph=True)[0].isnan().any())
    assert bool(torch.autograd.grad(s.sum(), a)[0].isfinite().all())


@pytest.mark.parametrize(
    ("name", "kind"), [case for case in CASES if case[0] in TRANSFORMED and case[1] != "real"]
)
def test_transforms(name: str, kind: str) -> None:
    """Gradients, batches and forward over reverse mode, of torch.func; those of autograd are known."""
    function, inputs = FUNCTIONS[name][0], inputs_of(name, kind)
    places = tuple(range(len(inputs)))

    def derivative(*given: torch.Tensor) -> Tensors:
        return torch.func.grad(lambda *of: real_loss(function, *of), argnums=places)(*given)

    expected = torch.autograd.grad(real_loss(function, *inputs), inputs)
    given = tuple(x.detach() for x in inputs)
    found = derivative(*given)
    of_batch = torch.vmap(derivative)(*(torch.stack([x + 0.01, x]) for x in given))
    for x, y, z in zip(found, expected, of_batch, strict=True):
        assert x.dtype == y.dtype == z.dtype
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(z[1], y, rtol=1e-9, atol=1e-11)
    directions = tuple(variable(*x.shape, seed=5, dtype=x.dtype).detach() for x in given)
    changes = torch.func.jvp(derivative, given, directions)[1]
    variables = tuple(x.clone().requires_grad_() for x in given)
    first = torch.autograd.grad(real_loss(function, *variables), variables, create_graph=True)
    # The Hessian matrix is symmetric as a form of real and imaginary parts.
    inner = sum((x.conj() * y).real.sum() for x, y in zip(first, directions, strict=True))
    second = torch.autograd.grad(inner, variables)
    for x, y in zip(changes, second, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)


def test_forward_mode_of_a_real_direction() -> None:
    """A real A has real changes, also beside a complex b."""
    a, b = (x.detach() for x in inputs_of("lstsq (5, 2)", "real A"))
    with forward_ad.dual_level():
        change = torch.randn(5, 2, dtype=REAL, generator=torch.Generator().manual_seed(3))
        x = neula.lstsq(forward_ad.make_dual(a, change), b).x
        found = forward_ad.unpack_dual(x).tangent
    near = [neula.lstsq(a + step * change, b).x for step in (1e-6, -1e-6)]
    torch.testing.assert_close(found, (near[0] - near[1]) / 2e-6, rtol=1e-7, atol=1e-8)
