"""Derivatives of derivatives, in any order of modes, compared with those of plain arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.matrices import normal
from torch.autograd import forward_ad
from torch.autograd.functional import hessian as all_hessian
from torch.autograd.functional import jacobian as all_jacobian
from torch.func import hessian, jacfwd, jacrev, jvp, linearize, vmap

import neula
import neula.compat.torch as la

Function = Callable[[torch.Tensor], torch.Tensor]


A, B, EYE = normal(5, 3), normal(5, 2, seed=1), torch.eye(3, dtype=torch.float64)
CURVE = [normal(5, 3, seed=seed) for seed in (2, 3, 4)]
ONE, AT = torch.ones((), dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)


def inverse(a: torch.Tensor) -> torch.Tensor:
    """Cramer's rule, 3 x 3."""
    x, y, z = a.unbind(-2)
    columns = [torch.linalg.cross(*of) for of in ((y, z), (z, x), (x, y))]
    return torch.stack(columns, -1) / (x * columns[0]).sum()


def gram_schmidt(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found: list[torch.Tensor] = []
    for column in a.mT[: len(a)]:
        for q in found:
            column = column - q * (q @ column)
        found.append(column / (column @ column).sqrt())
    q = torch.stack(found, 1)
    return q, (q.mT @ a).triu()


def newton(a: torch.Tensor) -> torch.Tensor:
    """The orthogonal polar factor."""
    q, u = gram_schmidt(a)
    for _ in range(12):
        u = (u + inverse(u).mT) / 2
    return q @ u


def cholesky(a: torch.Tensor) -> torch.Tensor:
    """Of ``A^T A + I``: R of ``[A; I]``."""
    return gram_schmidt(torch.cat([a, EYE]))[1].mT


def normal_equations(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return inverse(a.mT @ a) @ (a.mT @ b)


def definite(a: torch.Tensor) -> torch.Tensor:
    return a.mT @ a + EYE


def both(factors: Any) -> torch.Tensor:
    return torch.cat([x.flatten() for x in tuple(factors)[:2]])


def of_free(solution: torch.Tensor) -> Function:
    """Least squares on the unknowns of a solution that are between 0 and 0.4, which is what moves."""
    free = (solution > 0) & (solution < 0.4)

    def solved(a: torch.Tensor) -> torch.Tensor:
        found = []
        for x, which, b in zip(solution.mT, free.mT, (B + a[:, :1].cos()).mT, strict=True):
            rest = torch.where(which, 0.0, x)
            mask = torch.diag(which.double())
            inner = mask @ a.mT @ a @ mask + EYE - mask
            found.append(rest + inverse(inner) @ mask @ a.mT @ (b - a @ rest))
        return torch.stack(found, 1)

    return solved


def positive(a: torch.Tensor) -> torch.Tensor:
    return neula.nnls(a, B + a[:, :1].cos()).x


def between(a: torch.Tensor) -> Any:
    return neula.lsq_linear(a, B + a[:, :1].cos(), bounds=(0.0, 0.4))


def squares(factors: Any) -> torch.Tensor:
    """Independent of signs of vectors."""
    return torch.cat([x.square().flatten() for x in factors])


SQUARE: Function = lambda a: inverse(a[:3]) @ (a[:3, :1].sin() + 1)  # noqa: E731

FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "matmul": (lambda a: neula.matmul(a.mT, a.sin()), lambda a: a.mT @ a.sin()),
    "cholesky": (lambda a: neula.cholesky(definite(a), upper=True).L, cholesky),
    "solve": (lambda a: neula.solve(a[:3], a[:3, :1].sin() + 1).x, SQUARE),
    "solve pos": (
        lambda a: neula.solve(definite(a), a[0], assume_a="pos").x,
        lambda a: inverse(definite(a)) @ a[0],
    ),
    "lstsq": (lambda a: neula.lstsq(a, a[:, :1].cos()).x, lambda a: normal_equations(a, a[:, :1].cos())),
    "minimum norm": (
        lambda a: neula.lstsq(a.mT, a[:3].cos()).x,
        lambda a: a @ inverse(a.mT @ a) @ a[:3].cos(),
    ),
    "damped and weighted": (
        lambda a: neula.lstsq(a, B, weights=1 + a[:, 0] ** 2, damp=0.3).x,
        lambda a: normal_equations(
            torch.cat([(1 + a[:, :1] ** 2) * a, 0.3 * EYE]), torch.cat([(1 + a[:, :1] ** 2) * B, 0 * B[:3]])
        ),
    ),
    "qr": (lambda a: both(neula.qr(a)), lambda a: both(gram_schmidt(a))),
    "qr of a wide matrix": (lambda a: both(neula.qr(a.mT)), lambda a: both(gram_schmidt(a.mT))),
    "tsqr": (lambda a: neula.tsqr(a).R, lambda a: gram_schmidt(a)[1]),
    "orth": (neula.orth, lambda a: gram_schmidt(a)[0]),
    "polar": (lambda a: both(neula.polar(a, side="right")), lambda a: both((newton(a), newton(a).mT @ a))),
    "eigh": (
        lambda a: squares(neula.eigh(definite(a), upper=True)),
        lambda a: squares(torch.linalg.eigh(definite(a))),
    ),
    "svd": (
        lambda a: squares(neula.svd(a, full_matrices=False)),
        lambda a: squares(torch.linalg.svd(a, full_matrices=False)),
    ),
    "svd of a wide matrix": (
        lambda a: squares(neula.svd(a.mT, full_matrices=False)),
        lambda a: squares(torch.linalg.svd(a.mT, full_matrices=False)),
    ),
    "svdvals": (neula.svdvals, torch.linalg.svdvals),
    "pinv": (neula.pinv, lambda a: inverse(a.mT @ a) @ a.mT),
    "nnls": (positive, of_free(neula.nnls(A, B + A[:, :1].cos()).x.clamp(max=0.39))),
    "lsq_linear": (lambda a: between(a).x, of_free(between(A).x)),
    "fun": (lambda a: between(a).fun, lambda a: a @ of_free(between(A).x)(a) - B - a[:, :1].cos()),
    "compat solve": (lambda a: la.solve(a[:3], a[:3, :1].sin() + 1), SQUARE),
    "compat qr": (lambda a: both(la.qr(a)), lambda a: both(gram_schmidt(a))),
}


def dual(f: Function) -> Function:
    def derivative(t: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(t, ONE))).tangent

    return derivative


MODES: dict[str, Callable[[Function], Function]] = {
    "F": lambda f: lambda t: jvp(f, (t,), (ONE,))[1],
    "R": jacrev,
    "V": jacfwd,
    "D": dual,
    "L": lambda f: lambda t: linearize(f, t)[1](ONE),
}

ORDERS = ("FF", "RF", "VV", "DR", "RD", "FFF", "FRF")
"""The outermost mode first. Neither dual levels nor linearize can be nested in torch."""


def along(f: Function, modes: str) -> torch.Tensor:
    """A derivative of some order along a curve."""
    first, second, third = CURVE

    def point(t: torch.Tensor) -> torch.Tensor:
        return f(A + t * first + t**2 * second + t.sin() * third)

    for mode in reversed(modes):
        point = MODES[mode](point)
    return point(AT)


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).abs().max() / expected.abs().max()).detach())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_modes_in_any_order(name: str) -> None:
    """Rounding errors are far below the bound, and a lost tangent is far above it."""
    ours, plain = FUNCTIONS[name]
    expected = {order: along(plain, "R" * order) for order in (2, 3)}
    gaps = {modes: gap(along(ours, modes), expected[len(modes)]) for modes in ORDERS}
    assert max(gaps.values()) < 1e-9, gaps


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("name", ["qr", "solve", "nnls"])
def test_linearized(name: str) -> None:
    ours, plain = FUNCTIONS[name]
    assert gap(along(ours, "L"), along(plain, "R")) < 1e-9


@pytest.mark.parametrize("name", FUNCTIONS)
def test_batches_of_derivatives(name: str) -> None:
    """Of torch.autograd as well as of torch.func, and of batches."""
    ours, plain = FUNCTIONS[name]

    def loss(f: Function) -> Function:
        return lambda a: (f(a).sin() + f(a) ** 2).sum()

    def of_batched_gradients(f: Function) -> torch.Tensor:
        a = A.clone().requires_grad_()
        y = f(a)
        seeds = torch.eye(y.numel(), dtype=y.dtype).reshape(-1, *y.shape)
        (found,) = torch.autograd.grad(y, a, seeds, is_grads_batched=True)
        return found.reshape(*y.shape, *a.shape)

    near = torch.stack([A, A + 0.01])
    first = all_jacobian(plain, A)
    second = all_hessian(loss(plain), A)
    of_batch = torch.stack([first, all_jacobian(plain, A + 0.01)])
    outer = "forward-mode"
    found = {
        "vectorized": (all_jacobian(ours, A, vectorize=True), first),
        "vectorized forward": (all_jacobian(ours, A, vectorize=True, strategy=outer), first),
        "batched gradients": (of_batched_gradients(ours), first),
        "chunks": (jacrev(ours, chunk_size=4)(A), first),
        "vectorized hessian": (all_hessian(loss(ours), A, vectorize=True), second),
        "mixed hessian": (all_hessian(loss(ours), A, vectorize=True, outer_jacobian_strategy=outer), second),
        "hessian": (hessian(loss(ours))(A), second),
        "forward hessian": (jacfwd(jacfwd(loss(ours)))(A), second),
        "vmap": (vmap(ours)(near), torch.stack([plain(a) for a in near])),
        "vmap within": (jacfwd(lambda e: vmap(ours)(near + e))(torch.zeros_like(A)), of_batch),
        "vmap around": (vmap(jacrev(ours))(near), of_batch),
    }
    gaps = {way: gap(*of) for way, of in found.items()}
    assert max(gaps.values()) < 1e-9, gaps


REFUSED: dict[str, tuple[Function, str]] = {
    "svd_lowrank": (lambda a: neula.svd_lowrank(a, 2).U, "hides an operand of svd_lowrank"),
    "lu_factor": (lambda a: neula.lu_factor(a[:3]).LU, "hides an operand of lu_factor"),
    "ridge_path": (lambda a: neula.ridge_path(a, B, [1.0]).x, "hides an operand of ridge_path"),
    "full matrices": (lambda a: neula.svd(a).s, "hides an operand of svd"),
    "an interval": (
        lambda a: neula.eigvalsh(definite(a), subset_by_value=(0.0, 9.0)),
        "hides an operand of eigh",
    ),
    "pivoting": (lambda a: neula.qr(a, pivoting=True).R, "hides an operand of qr"),
    "a list": (lambda a: neula.lstsq([a, a], [B, B]).x, "hides an operand of lstsq"),
    "constraints": (
        lambda a: neula.lstsq(a, B[:, 0], constraints=(EYE[:1], EYE[0, :1])).x,
        "hides an operand of lstsq",
    ),
    "constraints that vary": (
        lambda a: neula.lstsq(A, B[:, 0], constraints=(a[:1], EYE[0, :1])).x,
        "hides an operand of lstsq",
    ),
    "damp": (lambda a: neula.lstsq(A, B, damp=a[0, 0] ** 2).x, "damp"),
    "bounds": (lambda a: neula.lsq_linear(A, B, (a[0] - 9, 9.0)).x, "lower bound"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_lost_is_refused(name: str) -> None:
    function, match = REFUSED[name]
    for transform in (jacfwd, jacrev, lambda f: lambda a: vmap(f)(a[None])):
        with pytest.raises(ValueError, match=match):
            transform(function)(A)


def test_lists_of_tensors_do_not_lose_derivatives() -> None:
    with pytest.raises(ValueError, match=r"A is a list of tensors.*pass torch.stack\(A\)"):
        neula.lstsq([A.clone().requires_grad_()], [B])
    with forward_ad.dual_level(), pytest.raises(ValueError, match="A is a list of tensors"):
        neula.lstsq([forward_ad.make_dual(A, A)], [B])
