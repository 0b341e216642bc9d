"""Gradients of the public functions: against finite differences, and against those of torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import neula
import neula.compat.torch as la
from neula.io.matrices import random_matrix

U = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
REAL, COMPLEX = torch.float64, torch.complex128
Tensors = tuple[torch.Tensor, ...]

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
IDS = {"ids": lambda shape: "x".join(map(str, shape)) if isinstance(shape, tuple) else None}


def variable(*shape: int, seed: int = 0, device: str = "cpu", dtype=REAL) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=COMPLEX if dtype.is_complex else REAL)
    return x.to(device, dtype).requires_grad_()


def definite(a: torch.Tensor) -> torch.Tensor:
    """A matrix that stays Hermitian where elements of a are changed."""
    return a @ a.mH + torch.eye(a.shape[-2], dtype=a.dtype, device=a.device)


def qr(a: torch.Tensor) -> Tensors:
    return tuple(neula.qr(a))


def lstsq(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    return neula.lstsq(a, b, **options).x


def solve(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    return neula.solve(a, b, **options).x


def without_phases(u: torch.Tensor, s: torch.Tensor, vh: torch.Tensor) -> Tensors:
    return s, u.abs() ** 2, vh.abs() ** 2, (u * s.cos().unsqueeze(-2)) @ vh


def svd(a: torch.Tensor) -> Tensors:
    return without_phases(*neula.svd(a, full_matrices=False))


def eigh(a: torch.Tensor, **options: Any) -> Tensors:
    w, v = neula.eigh(a + a.mH, **options)
    return without_phases(v, w, v.mH)


COVARIANCE = definite(variable(5, 5, seed=7)).detach()
ROW, ONE = torch.ones(1, 3, dtype=REAL), torch.ones(1, dtype=REAL)

# Finite differences take two evaluations for each element.
MATRICES = [(1, 1), (3, 3), (5, 2), (2, 4), (2, 3, 2), (2, 1, 3, 2), (2, 2, 3), (0, 4, 3)]
SYSTEMS = [(1, 1), (4, 4), (2, 3, 3), (0, 3, 3)]
PROBLEMS = [(3, 3), (5, 2), (2, 4), (2, 4, 2), (2, 2, 3)]
PRODUCTS = [((3, 4), (4, 2)), ((2, 3, 4), (4, 2)), ((3, 4), (2, 4, 2)), ((2, 1, 3, 4), (5, 4, 2))]
PRODUCTS += [((0, 3, 4), (4, 2)), ((3, 4), (4,))]

FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    **{f"qr {shape}": (qr, (shape,)) for shape in MATRICES},
    **{
        f"complete {shape}": (lambda a: tuple(neula.qr(a, mode="complete")), (shape,))
        for shape in ((4, 4), (3, 5))
    },
    "qr of a transpose": (lambda a: qr(a.mT), ((3, 6),)),
    "qr of some columns": (lambda a: qr(a[::2, 1:]), ((10, 4),)),
    "qr of an expanded matrix": (lambda a: qr(a.expand(2, 5, 3)), ((5, 3),)),
    "r": (lambda a: neula.qr(a, mode="r").R, ((2, 3, 2),)),
    "tsqr": (lambda a: tuple(neula.tsqr(a)), ((6, 2),)),
    "orth": (neula.orth, ((2, 3, 2),)),
    "cholesky": (lambda a: neula.cholesky(definite(a)).L, ((2, 3, 3),)),
    "upper": (lambda a: neula.cholesky(definite(a), upper=True).U, ((3, 3),)),
    **{f"solve {shape}": (solve, (shape, shape[:-1])) for shape in SYSTEMS},
    **{f"solve {shape}, columns": (solve, (shape, (*shape[:-1], 2))) for shape in SYSTEMS},
    "solve a batch for a vector": (solve, ((2, 3, 3), (3,))),
    **{
        f"definite {shape}": (lambda a, b: solve(definite(a), b, assume_a="pos"), (shape, (*shape[:-1], 2)))
        for shape in SYSTEMS
    },
    "definite, vector": (lambda a, b: solve(definite(a), b, assume_a="pos"), ((4, 4), (4,))),
    **{f"lstsq {shape}": (lstsq, (shape, shape[:-1])) for shape in PROBLEMS},
    **{f"lstsq {shape}, columns": (lstsq, (shape, (*shape[:-1], 2))) for shape in PROBLEMS},
    **{
        f"weights {shape}, damp {damp}": (
            lambda a, b, c, damp=damp: lstsq(a, b, damp=damp, weights=0.5 + c.abs() ** 2),
            (shape, shape[:-1], shape[-2:-1]),
        )
        for shape, damp in (((6, 3), 0.7), ((3, 5), 0.7), ((2, 5, 3), 0.0))
    },
    "pinv": (neula.pinv, ((4, 3),)),
    "pinv of a wide matrix": (neula.pinv, ((2, 3),)),
    "polar": (lambda a: tuple(neula.polar(a, side="right")), ((4, 3),)),
    "polar of a wide matrix": (lambda a: neula.polar(a).U, ((2, 2, 3),)),
    "eigh": (eigh, ((2, 3, 3),)),
    "some of eigh": (lambda a: eigh(a, upper=True, subset_by_index=(1, 2)), ((4, 4),)),
    **{f"svd {shape}": (svd, (shape,)) for shape in ((4, 3), (2, 2, 3), (3, 3))},
    **{f"matmul {a} {b}": (neula.matmul, (a, b)) for a, b in PRODUCTS},
}
EAGER: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    **{
        f"svd_lowrank {shape}": (lambda a: without_phases(*neula.svd_lowrank(a, 2)), (shape,))
        for shape in ((6, 4), (4, 6))
    },
    "pivoting": (lambda a: tuple(neula.qr(a, pivoting=True))[:2], ((4, 3),)),
    "constraints": (lambda a, b: lstsq(a, b, constraints=(ROW, ONE)), ((5, 3), (5,))),
    "lu_factor": (lambda a: (neula.lu_factor(a).L, neula.lu_factor(a).U), ((3, 3),)),
    "lu_solve": (lambda a, b: neula.lu_solve(neula.lu_factor(a), b), ((3, 3), (3,))),
    "covariance": (lambda a, b: lstsq(a, b, covariance=COVARIANCE), ((5, 3), (5,))),
    "intercept": (lambda a, b: lstsq(a, b, intercept=True), ((5, 2), (5,))),
    "emulated": (lambda a, b: lstsq(a, b, engine="emulated"), ((5, 3), (5,))),
    "conjugated views": (lambda a, b: lstsq(a.mH[::2].mT.conj(), b.conj()), ((4, 6), (4,))),
    "imaginary parts": (lambda a, b: lstsq((1j * a).mH[::2].mT.conj().imag, b), ((4, 6), (4,))),
    "complex numbers of real ones": (lambda a, b: lstsq(a + 1j * a**2, b), ((5, 3), (5,))),
    "compat slogdet": (lambda a: tuple(la.slogdet(a))[1], ((3, 3),)),
    "compat det": (la.det, ((2, 3, 3),)),
    "compat inv": (la.inv, ((3, 3),)),
}
"""Functions that transforms of functions refuse, without forward mode."""

TRANSFORMED = (
    *("qr (1, 1)", "qr (5, 2)", "qr (2, 4)", "r", "tsqr", "orth", "cholesky", "upper", "pinv"),
    *("pinv of a wide matrix", "polar", "polar of a wide matrix", "eigh", "some of eigh"),
    *("solve (4, 4)", "solve (2, 3, 3), columns", "solve a batch for a vector", "definite, vector"),
    *("lstsq (5, 2)", "lstsq (5, 2), columns", "lstsq (2, 2, 3), columns", "weights (6, 3), damp 0.7"),
    *("svd (4, 3)", "svd (2, 2, 3)", "svd (3, 3)", "matmul (2, 3, 4) (4, 2)", "matmul (3, 4) (4,)"),
)
"""Of each function a shape or two, which transforms take as well."""

KINDS = {
    "real": (REAL,) * 3,
    "complex": (COMPLEX,) * 3,
    "real A": (REAL, COMPLEX, REAL),
    "real b": (COMPLEX, REAL, REAL),
}
CASES = [
    (name, kind)
    for name, (_, shapes) in (FUNCTIONS | EAGER).items()
    for kind in KINDS
    if kind in ("real", "complex") or (len(shapes) == 2 and name in FUNCTIONS)
]


def inputs_of(name: str, kind: str, device: str = "cpu") -> Tensors:
    shapes = (FUNCTIONS | EAGER)[name][1]
    given = zip(shapes, KINDS[kind], strict=False)
    return tuple(variable(*x, seed=seed, dtype=d, device=device) for seed, (x, d) in enumerate(given))


def check(function: Callable, *inputs: torch.Tensor, **options: Any) -> None:
    """Derivatives along random directions; sums on a GPU may change their order."""
    assert gradcheck(function, inputs, nondet_tol=1e-12, fast_mode=True, **options)
    assert gradgradcheck(function, inputs, nondet_tol=1e-12, fast_mode=True)


ON_GPU = ("qr (", "r", "orth", "lstsq", "solve", "definite", "matmul")


@pytest.mark.parametrize(
    ("name", "kind", "device"),
    [
        *((name, kind, "cpu") for name, kind in CASES),
        *(
            pytest.param(name, "real", "cuda", marks=pytest.mark.gpu)
            for name in FUNCTIONS
            if name.startswith(ON_GPU)
        ),
    ],
)
def test_finite_differences(name, kind, device):
    function = (FUNCTIONS | EAGER)[name][0]
    inputs = inputs_of(name, kind, device)
    torch.testing.assert_close(function(*inputs), function(*(x.detach() for x in inputs)))
    check(function, *inputs, check_forward_ad=name in FUNCTIONS and device == "cpu" and inputs[0].numel() > 0)


def gradients(loss: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, inputs))


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# ---------------------------------------------------------------- QR


def test_added_columns_have_no_gradient():
    a = variable(5, 3)
    with pytest.raises(ValueError, match=r"A of shape \(5, 3\).*mode='complete'.*pass mode='reduced'"):
        neula.qr(a, mode="complete")
    assert neula.qr(a.detach(), mode="complete").Q.shape == (5, 5)


def weighted(q: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(-1, 1, q.numel(), dtype=q.dtype, device=q.device).reshape(q.shape)
    return (weight * q).sum() + r.triu().sin().sum()


def weighted_by_torch(a: torch.Tensor) -> torch.Tensor:
    q, r = torch.linalg.qr(a)
    signs = r.diagonal(dim1=-2, dim2=-1).sign()
    return weighted(q * signs[..., None, :], signs[..., None] * r)


def solved_in_half_precision(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result = neula.solve(a, b, compute="fp16", engine="cuda" if a.is_cuda else "emulated")
    assert "fp64" not in result.method
    return result.x.sin().sum()


AGREEING: dict[str, tuple[Callable, Callable, int, float, tuple[tuple[int, ...], ...]]] = {
    # Both gradients have errors of c n u cond(A)^2 (R^-T of factors that are known to u cond(A)).
    **{
        f"qr {shape}": (lambda a: weighted(*neula.qr(a)), weighted_by_torch, 2, 10 * shape[-1], (shape,))
        for shape in ((300, 60), (4, 90, 40), (100, 100))
    },
    # Errors of the normal equations, c n u cond(A)^2, and their derivative has that factor once more.
    "lstsq": (
        lambda a, b: lstsq(a, b).sin().sum(),
        lambda a, b: torch.linalg.solve(a.mT @ a, a.mT @ b).sin().sum(),
        4,
        10 * 110,
        ((1000, 110), (1000, 2)),
    ),
    # x and y each with a backward error of sqrt(n) u, times the condition number.
    "solve": (
        solved_in_half_precision,
        lambda a, b: torch.linalg.solve(a, b).sin().sum(),
        1,
        10 * math.sqrt(200),
        ((200, 200), (200, 2)),
    ),
}
"""Ours, the same by torch, and a bound: a factor times a power of the condition number."""


@DEVICES
@pytest.mark.parametrize("name", AGREEING)
def test_agrees_with_torch(name, device):
    """On sizes at which R or the factors are of low precision, and QR does not begin with reflections."""
    ours, theirs, power, factor, shapes = AGREEING[name]
    inputs = [variable(*shape, seed=seed, device=device) for seed, shape in enumerate(shapes)]
    if name == "solve":  # on a GPU only what needs no interchanges is factorized in low precision
        dominant = inputs[0].detach() + 2 * 200**0.5 * torch.eye(200, device=device)
        inputs[0] = dominant.requires_grad_()
    cond = float(torch.linalg.cond(inputs[0].detach()).max())
    for x, y in zip(gradients(ours(*inputs), *inputs), gradients(theirs(*inputs), *inputs), strict=True):
        assert gap(x, y) <= factor * 2.0**-53 * cond**power


LOW: dict[str, tuple[Callable, int, float, tuple[tuple[int, ...], ...]]] = {
    # Q and R are known to u times their bound and cond(A), which R^-T brings in once more; the rest is the
    # rounding of incoming gradients and sums.
    "qr": (
        lambda a: neula.qr(a).R.sum() + 50 * (neula.qr(a).Q ** 3).sum(),
        2,
        6 * (2 + math.log2(6)) + 10,
        ((2, 50, 6),),
    ),
    # Rounded x (which the residual multiplies by |A|) and rounded results; everything else is in double.
    "lstsq": (lambda a, b: lstsq(a, b).sum(), 2, 4, ((50, 4), (50,))),
    "minimum norm": (lambda a, b: lstsq(a, b).sum(), 2, 4, ((4, 50), (4,))),
    # The backward error of x is 4 u, and x and the results are rounded; y is solved for in double.
    "solve": (lambda a, b: solve(a, b).sum(), 1, 6, ((20, 20), (20,))),
}


@pytest.mark.parametrize("dtype", U, ids=str)
@pytest.mark.parametrize(
    ("name", "device"), [*((name, "cpu") for name in LOW), pytest.param("qr", "cuda", marks=pytest.mark.gpu)]
)
def test_low_precision(name, dtype, device):
    function, power, factor, shapes = LOW[name]
    inputs = [variable(*x, seed=seed, dtype=dtype, device=device) for seed, x in enumerate(shapes)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    cond = float(torch.linalg.cond(exact[0].detach()).max())
    for x, y in zip(gradients(function(*inputs), *inputs), gradients(function(*exact), *exact), strict=True):
        assert x.dtype == dtype
        assert gap(x, y) <= factor * cond**power * U[dtype]


@pytest.mark.parametrize("format", ["fp16", "bf16"])
def test_a_named_accuracy_is_that_of_the_gradient(format):
    a = variable(200, 10)
    q = neula.qr(a, accuracy=format, engine="emulated").Q
    weight = variable(200, 10, seed=1).detach()
    found, expected = (gradients((weight * x).sum(), a)[0] for x in (q, neula.qr(a).Q))
    u, cond = neula.engines.FORMATS[format].u, float(torch.linalg.cond(a.detach()))
    assert 0 < gap(found, expected) <= (6 * (2 + math.log2(10)) + 10) * cond**2 * u


@pytest.mark.gpu
def test_operands_on_another_device_than_the_engine():
    a, b = variable(5, 3), variable(5, seed=1, device="cuda")
    check(lambda a: tuple(neula.qr(a, engine="cuda")), a)
    check(lambda a, b: neula.lstsq(a, b, engine="cuda").x, a, b)
    check(lambda a, b: neula.matmul(a.mT, b[:, None]), a, b)


def test_linearly_dependent_columns_have_no_finite_gradient():
    a = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
    assert not gradients(neula.qr(a).R.sum(), a)[0].isfinite().all()


def test_the_users_autocast_does_not_round_the_gradient():
    """Torch differentiates sums and powers here, which autocast leaves alone."""
    a = variable(40, 6, dtype=torch.float32)
    q, r = neula.qr(a)
    loss = (q**3).sum() + r.sum()
    (expected,) = torch.autograd.grad(loss, a, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = gradients(loss, a)
    assert torch.equal(found, expected)


# ---------------------------------------------------------------- least squares


def test_one_operand_alone():
    a, b = variable(6, 3), variable(6, seed=1)
    both = gradients(neula.lstsq(a, b).x.sum(), a, b)
    alone = gradients(neula.lstsq(a, b.detach()).x.sum(), a) + gradients(
        neula.lstsq(a.detach(), b).x.sum(), b
    )
    for x, y in zip(both, alone, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_a_solution_of_lower_rank_has_no_gradient():
    a = variable(6, 3).detach()
    a[:, 2] = a[:, 0] + a[:, 1]
    a.requires_grad_()
    b = variable(6, seed=1)
    result = neula.lstsq(a, b)
    assert result.rank == 2
    with pytest.raises(ValueError, match=r"A has rank 2, not 3.*pass damp="):
        result.x.sum().backward()
    gradients(neula.lstsq(a, b, damp=0.1).x.sum(), a, b)


def test_members_of_lower_rank_or_not_finite_leave_the_others_their_gradients():
    a = variable(4, 6, 3).detach()
    a[1, :, 2] = a[1, :, 0]
    a[3, 0, 0] = torch.nan
    a.requires_grad_()
    b = variable(4, 6, seed=1)
    with pytest.warns(neula.AccuracyWarning):
        x = neula.lstsq(a, b).x
    found = torch.autograd.grad(x[[0, 2]].cos().sum(), (a, b), retain_graph=True)
    alone = gradients(neula.lstsq(a[[0, 2]], b[[0, 2]]).x.cos().sum(), a, b)
    for mine, theirs in zip(found, alone, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"A\[1\] has rank 2, not 3"):
        x[1].sum().backward()


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("compute", ["fp16", "fp16_cor", "bf16", "fp32"])
def test_the_backward_pass_multiplies_in_the_same_arithmetic(compute):
    a, b = (variable(*shape, dtype=torch.float32) for shape in ((20, 30), (30, 10)))
    dc = variable(20, 10, seed=2, dtype=torch.float32).detach()
    how = {"compute": compute, "engine": "emulated"}
    da, db = torch.autograd.grad(neula.matmul(a, b, **how), (a, b), dc)
    assert torch.equal(da, neula.matmul(dc, b.detach().mT, **how))
    assert torch.equal(db, neula.matmul(a.detach().mT, dc, **how))


@pytest.mark.parametrize("dtype", U, ids=str)
def test_products_in_low_precision(dtype):
    a, b = variable(3, 20, 30, dtype=dtype), variable(30, 10, seed=1, dtype=torch.float32)
    da, db = gradients(neula.matmul(a, b).sum(), a, b)
    assert (da.dtype, db.dtype) == (dtype, torch.float32)
    # sum(A B) has the gradients 1 1^T B^T and A^T 1 1^T: sums of 10 and 60 numbers, then rounded.
    expected = (
        b.detach().double().sum(1).expand(3, 20, 30),
        a.detach().double().sum((0, 1))[:, None].expand(30, 10),
    )
    scale = b.detach().double().abs().sum(1), a.detach().double().abs().sum((0, 1))[:, None]
    assert ((da.double() - expected[0]).abs() <= (U[dtype] + 10 * U[torch.float32]) * scale[0]).all()
    assert ((db.double() - expected[1]).abs() <= 61 * U[torch.float32] * scale[1]).all()


# ---------------------------------------------------------------- linear systems


def test_the_backward_pass_solves_by_the_same_variant():
    """Factors in fp16 are enough for a solution to fp16, and not for its gradient, which is in double."""
    a = random_matrix("geometric", 100, 100, cond=1e10).requires_grad_()
    options = {"engine": "emulated", "compute": "fp16", "pivot": "partial"}
    b = variable(100, seed=1).detach()
    with pytest.warns(neula.IllConditionedWarning, match=r"fp16 accuracy.*no digit"):
        result = neula.solve(a, b, accuracy="fp16", **options)
    assert result.backward_error <= result.tolerance
    with pytest.warns(neula.AccuracyWarning, match=r"fp64 accuracy.*fp16 with pivoting"):
        result.x.sum().backward()


# ---------------------------------------------------------------- what has none, and says so


def test_nothing_is_attached_without_need():
    a, b = variable(5, 3), variable(5, seed=1)
    with torch.no_grad():
        answers = [*neula.qr(a), neula.lstsq(a, b).x, neula.matmul(a.mT, a), neula.orth(a)]
        answers.append(neula.solve(a[:3], b[:3]).x)
    a, b = a.detach(), b.detach()
    answers += [*neula.qr(a), neula.lstsq(a, b).x, neula.matmul(a.mT, a)]
    assert not any(x.requires_grad for x in answers)
    result = neula.qr(a.requires_grad_())
    assert result.Q.requires_grad
    assert result.R.requires_grad
    assert isinstance(result.certificate.residual, float)


def test_the_numbers_are_the_same():
    a, b = variable(40, 6), variable(40, seed=1)
    for function in (lambda a: neula.qr(a).Q, lambda a: neula.qr(a).R):  # what factorizes may not be the same
        torch.testing.assert_close(function(a).detach(), function(a.detach()), rtol=1e-13, atol=1e-14)
    for function in (
        lambda a, b: neula.lstsq(a, b).x,
        lambda a, b: neula.solve(a[:6], b[:6]).x,
        lambda a, b: neula.matmul(a.mT, a),
    ):
        assert torch.equal(function(a, b), function(a.detach(), b.detach()))


def test_factors_that_were_overwritten_are_an_error():
    a = variable(5, 3)
    q, r = neula.qr(a)
    loss = q.sum() + r.sum()
    with torch.no_grad():
        q.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_that_nobody_computes_are_not_lost():
    a, b = variable(5, 3), variable(5, seed=1)
    scalar = variable(1)
    fixed = a.detach()
    with pytest.raises(ValueError, match=r"A requires a gradient.*A.detach\(\)"):
        neula.lu_factor(a[:3], keep_a=False)
    with pytest.raises(ValueError, match=r"damp requires a gradient.*damp.detach\(\)"):
        neula.lstsq(fixed, b, damp=scalar)
    with pytest.raises(ValueError, match=r"A is no torch tensor: pass torch.as_tensor\(A\)"):
        neula.lstsq(np.ones((5, 3)), b)
    with pytest.raises(ValueError, match=r"A is no torch tensor: pass torch.as_tensor\(A\)"):
        neula.solve(np.eye(5), b)
    with pytest.raises(ValueError, match="A is no torch tensor"):
        neula.matmul(np.ones((2, 5)), a)


def test_forward_mode_is_refused_where_there_is_no_formula():
    a = variable(5, 3).detach()
    with forward_ad.dual_level(), pytest.raises(ValueError, match=r"A has a tangent.*unpack_dual"):
        neula.ridge_path(forward_ad.make_dual(a, a), a[:, 0], [1.0])


@pytest.mark.parametrize("name", TRANSFORMED)
def test_batches_that_torch_hides(name):
    """Along any dimension, of both operands or one; test_transforms.py has derivatives under transforms."""

    def f(*operands: torch.Tensor) -> Tensors:
        result = FUNCTIONS[name][0](*operands)
        return result if isinstance(result, tuple) else (result,)

    inputs = [x.detach() for x in inputs_of(name, "real")]
    batches = [torch.stack([x, 2 * x, x + 1], 1) for x in inputs]
    ways = [(1, 1), (1, None), (None, 1)] if len(inputs) == 2 else [(1,) * len(inputs)]
    for dims in ways:
        given = [x if d is None else batch for d, x, batch in zip(dims, inputs, batches, strict=True)]
        found = torch.func.vmap(f, in_dims=dims)(*given)
        alone = [
            f(*(x if d is None else x[:, i] for x, d in zip(given, dims, strict=True))) for i in range(3)
        ]
        for part, expected in zip(found, zip(*alone, strict=True), strict=True):
            torch.testing.assert_close(part, torch.stack(expected), rtol=1e-9, atol=1e-10)
