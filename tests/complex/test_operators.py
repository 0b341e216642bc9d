"""Complex numbers in torch.compile, torch.func and operators of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import neula
import neula.compat.torch as la

Tensors = tuple[torch.Tensor, ...]

REAL, COMPLEX = torch.float64, torch.complex128


def variable(*shape: int, seed: int = 0, dtype: torch.dtype = COMPLEX) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()


def definite(a: torch.Tensor) -> torch.Tensor:
    return a @ a.mH + torch.eye(a.shape[-2], dtype=a.dtype)


def two(
    left: tuple[int, ...], right: tuple[int, ...], first: Any = COMPLEX, second: Any = COMPLEX
) -> Tensors:
    return variable(*left, dtype=first), variable(*right, seed=1, dtype=second)


def weighted(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = neula.lstsq(a, b, damp=0.7, weights=0.5 + c**2).x
    return found


def without_phases(u: torch.Tensor, s: torch.Tensor, vh: torch.Tensor) -> Tensors:
    return s, u.abs() ** 2, vh.abs() ** 2, (u * s.cos().unsqueeze(-2)) @ vh


def of_eigh(a: torch.Tensor, **options: Any) -> Tensors:
    w, v = neula.eigh(a + a.mH, **options)
    return without_phases(v, w, v.mH)


FUNCTIONS: dict[str, tuple[Callable[..., Any], Tensors]] = {
    "qr": (lambda a: tuple(neula.qr(a)), (variable(5, 3),)),
    "qr 1": (lambda a: tuple(neula.qr(a)), (variable(1, 1),)),
    "qr of a wide matrix": (lambda a: tuple(neula.qr(a)), (variable(2, 4),)),
    "r": (lambda a: neula.qr(a, mode="r").R, (variable(2, 4, 3),)),
    "tsqr": (lambda a: tuple(neula.tsqr(a)), (variable(6, 2),)),
    "orth": (neula.orth, (variable(4, 3),)),
    "cholesky": (lambda a: neula.cholesky(definite(a)).L, (variable(2, 3, 3),)),
    "upper": (lambda a: neula.cholesky(definite(a), upper=True).U, (variable(3, 3),)),
    "solve": (lambda a, b: neula.solve(a, b).x, two((3, 3), (3, 2))),
    "solve pos": (lambda a, b: neula.solve(definite(a), b, assume_a="pos").x, two((3, 3), (3,))),
    "solve real A": (lambda a, b: neula.solve(a, b).x, two((3, 3), (3,), REAL)),
    "solve real b": (lambda a, b: neula.solve(a, b).x, two((2, 3, 3), (3,), COMPLEX, REAL)),
    "lstsq": (lambda a, b: neula.lstsq(a, b).x, two((5, 3), (5, 2))),
    "lstsq real A": (lambda a, b: neula.lstsq(a, b).x, two((5, 3), (5,), REAL)),
    "lstsq real b": (lambda a, b: neula.lstsq(a, b).x, two((5, 3), (5,), COMPLEX, REAL)),
    "minimum norm": (lambda a, b: neula.lstsq(a, b).x, two((2, 2, 4), (2, 2, 1))),
    "damped": (weighted, (*two((5, 3), (5,)), variable(5, seed=2, dtype=REAL))),
    "pinv": (neula.pinv, (variable(4, 3),)),
    "pinv of a wide matrix": (neula.pinv, (variable(2, 3),)),
    "polar": (lambda a: (neula.polar(a, side="right").U, neula.polar(a, side="right").H), (variable(4, 3),)),
    "polar of a wide matrix": (lambda a: neula.polar(a).U, (variable(2, 2, 3),)),
    "eigh": (of_eigh, (variable(2, 3, 3),)),
    "some of eigh": (lambda a: of_eigh(a, upper=True, subset_by_index=(1, 2)), (variable(4, 4),)),
    "svd": (lambda a: without_phases(*neula.svd(a, full_matrices=False)), (variable(4, 3),)),
    "svd of a wide matrix": (
        lambda a: without_phases(*neula.svd(a, full_matrices=False)),
        (variable(2, 2, 3),),
    ),
    "svd of a square matrix": (lambda a: without_phases(*neula.svd(a)), (variable(3, 3),)),
    "matmul": (neula.matmul, two((2, 3, 4), (4, 2))),
    "matmul real A": (neula.matmul, two((3, 4), (4,), REAL)),
    "matmul real B": (neula.matmul, two((3, 4), (4, 2), COMPLEX, REAL)),
}

ROW, ONE = torch.ones(1, 3, dtype=COMPLEX), torch.ones(1, dtype=COMPLEX)
COVARIANCE = definite(variable(5, 5, seed=7)).detach()


def signs(factors: Any) -> Tensors:
    found = factors.slogdet()
    return found.sign, found.logabsdet


EAGER: dict[str, tuple[Callable[..., Any], Tensors]] = {
    "svd_lowrank": (lambda a: without_phases(*neula.svd_lowrank(a, 2)), (variable(6, 4),)),
    "svd_lowrank of a wide matrix": (lambda a: without_phases(*neula.svd_lowrank(a, 2)), (variable(4, 6),)),
    "pivoting": (lambda a: tuple(neula.qr(a, pivoting=True))[:2], (variable(4, 3),)),
    "constraints": (lambda a, b: neula.lstsq(a, b, constraints=(ROW, ONE)).x, two((5, 3), (5,))),
    "lu_factor": (lambda a: (neula.lu_factor(a).L, neula.lu_factor(a).U), (variable(3, 3),)),
    "lu_solve": (lambda a, b: neula.lu_solve(neula.lu_factor(a), b), two((3, 3), (3,))),
    "slogdet": (lambda a: signs(neula.lu_factor(a)), (variable(2, 3, 3),)),
    "slogdet of qr": (lambda a: signs(neula.qr(a)), (variable(3, 3),)),
    "slogdet of cholesky": (lambda a: signs(neula.cholesky(definite(a))), (variable(3, 3),)),
    "inv_quad": (lambda a, b: neula.lu_factor(a).inv_quad(b).value, two((3, 3), (3,))),
    "diag_inverse": (lambda a: neula.cholesky(definite(a)).diag_inverse().value, (variable(3, 3),)),
    "solve of cholesky": (
        lambda a, b: neula.cholesky(definite(a), upper=True).solve(b).x,
        two((3, 3), (3, 2)),
    ),
    "covariance": (lambda a, b: neula.lstsq(a, b, covariance=COVARIANCE).x, two((5, 3), (5,))),
    "intercept": (lambda a, b: neula.lstsq(a, b, intercept=True).x, two((5, 2), (5,))),
    "emulated": (lambda a, b: neula.lstsq(a, b, engine="emulated").x, two((5, 3), (5,))),
    "views": (lambda a, b: neula.lstsq(a.mH[::2].mT.conj().imag, b.conj()).x, two((3, 8), (3,))),
    "complex of a real variable": (
        lambda t: neula.lstsq(torch.complex(t, t**2), t[:, 0] + 0j).x,
        (variable(5, 3, dtype=REAL),),
    ),
    "compat slogdet": (lambda a: tuple(la.slogdet(a)), (variable(3, 3),)),
    "compat det": (la.det, (variable(2, 3, 3),)),
    "compat inv": (la.inv, (variable(3, 3),)),
}


def real_loss(f: Callable[..., Any], *inputs: torch.Tensor) -> torch.Tensor:
    found = f(*inputs)
    total = torch.zeros((), dtype=REAL)
    for x in found if isinstance(found, tuple) else (found,):
        total = total + x.abs().square().sum() + (x * (1 + 2j)).real.sin().sum()
    return total


@pytest.mark.parametrize("name", FUNCTIONS)
def test_finite_differences(name: str) -> None:
    """Of the function that is computed without a gradient, too."""
    function, inputs = FUNCTIONS[name]
    torch.testing.assert_close(function(*inputs), function(*(x.detach() for x in inputs)))
    options: Any = {"check_forward_ad": True, "fast_mode": True, "nondet_tol": 1e-12}
    assert gradcheck(function, inputs, **options)
    assert gradgradcheck(function, inputs, fast_mode=True, nondet_tol=1e-12)


@pytest.mark.parametrize("name", EAGER)
def test_finite_differences_of_what_transforms_refuse(name: str) -> None:
    function, inputs = EAGER[name]
    assert gradcheck(function, inputs, fast_mode=True, check_forward_ad=name == "lu_factor", nondet_tol=1e-12)
    assert gradgradcheck(function, inputs, fast_mode=True, nondet_tol=1e-12)


@pytest.mark.parametrize("name", ["qr", "lstsq real A", "solve", "cholesky", "polar", "pinv"])
def test_single_precision(name: str) -> None:
    """Condition numbers are below ten: a few hundred units of rounding."""
    function, inputs = FUNCTIONS[name]
    narrow = {REAL: torch.float32, COMPLEX: torch.complex64}
    given = tuple(x.detach().to(narrow[x.dtype]).requires_grad_() for x in inputs)
    expected = torch.autograd.grad(real_loss(function, *inputs), inputs)
    found = torch.autograd.grad(real_loss(function, *given), given)
    for x, y, z in zip(found, expected, given, strict=True):
        assert x.dtype == z.dtype
        assert float((x - y).norm()) <= 1e-4 * float(y.norm())


def test_phases_of_singular_vectors_have_no_gradient() -> None:
    a = variable(6, 4)
    u, s, _ = neula.svd_lowrank(a, 2)
    assert bool(torch.autograd.grad(u.real.sum(), a, retain_graph=True)[0].isnan().any())
    assert bool(torch.autograd.grad(s.sum(), a)[0].isfinite().all())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms(name: str) -> None:
    """Gradients, batches and forward over reverse mode, of torch.func; those of autograd are known."""
    function, inputs = FUNCTIONS[name]
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
    a, b = (x.detach() for x in FUNCTIONS["lstsq real A"][1])
    with forward_ad.dual_level():
        change = torch.randn(5, 3, dtype=REAL, generator=torch.Generator().manual_seed(3))
        x = neula.lstsq(forward_ad.make_dual(a, change), b).x
        found = forward_ad.unpack_dual(x).tangent
    near = [neula.lstsq(a + step * change, b).x for step in (1e-6, -1e-6)]
    torch.testing.assert_close(found, (near[0] - near[1]) / 2e-6, rtol=1e-7, atol=1e-8)


# --- operators ---


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_values_and_gradients_of_a_compiled_function() -> None:
    def loss(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        matrix = 2 * a + 1j
        q, r = neula.qr(matrix)
        x, y = neula.lstsq(matrix, b, damp=0.1).x, neula.lstsq(matrix, c).x
        s = neula.cholesky(matrix.mH @ matrix, upper=True).U
        z = neula.solve(definite(q), b).x + neula.solve(definite(q).real, b).x
        parts = ((q**3).sum(), r.sin().sum(), s.exp().sum(), x.cos().sum(), y.cos().sum(), z.cos().sum())
        return torch.stack([part.real - part.imag for part in (*parts, neula.orth(matrix).sum())]).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    a, b, c = variable(2, 9, 4), variable(2, 9, 1, seed=1), variable(2, 9, 1, seed=2, dtype=REAL)
    expected, found = loss(a, b, c), compiled(a, b, c)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    gradients = torch.autograd.grad(found, (a, b, c))
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (a, b, c)), rtol=1e-10, atol=1e-10)
