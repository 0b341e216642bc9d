"""Formulas of derivatives in complex numbers: against finite differences and against those of torch.

A gradient of a real loss with respect to z is ``dL/dRe z + i dL/dIm z``, the convention of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from neula.pipeline import gradients

Tensors = tuple[torch.Tensor, ...]

DOUBLE = {"real": torch.float64, "complex": torch.complex128}


def variable(*shape: int, seed: int = 0, dtype: torch.dtype = torch.complex128) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()


def exact_qr(a: torch.Tensor) -> Tensors:
    """With a positive diagonal, differentiable by torch (of a wide matrix through its leading columns)."""
    k = min(a.shape[-2:])
    q, r = torch.linalg.qr(a[..., :k])
    phases = torch.sgn(r.diagonal(0, -2, -1)).detach()
    q, r = q * phases[..., None, :], phases.conj()[..., :, None] * r
    return q, torch.cat([r, q.mH @ a[..., k:]], -1)


def factors(a: torch.Tensor) -> Tensors:
    return gradients.attach_factors(a, *exact_qr(a.detach()))


def definite(a: torch.Tensor) -> torch.Tensor:
    return a @ a.mH + torch.eye(a.shape[-1], dtype=a.dtype)


def cholesky(a: torch.Tensor) -> torch.Tensor:
    return gradients.attach_cholesky(a, torch.linalg.cholesky(a.detach()))


def lu(a: torch.Tensor) -> Tensors:
    p, _, _ = torch.linalg.lu(a.detach())
    rows = p.mH @ a
    _, lower, upper = torch.linalg.lu(rows.detach(), pivot=True)
    return gradients.attach_lu(rows, lower, upper)


def exact_lu(a: torch.Tensor) -> Tensors:
    return tuple(torch.linalg.lu(a)[1:])


def both_complex(a: torch.Tensor, b: torch.Tensor) -> Tensors:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def solve(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return gradients.attach_system(a, b, exact_solve(a, b).detach(), exact_solve)


def exact_solve(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve(*both_complex(a, b))


def lstsq(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    ranks = torch.full(a.shape[:-2], min(a.shape[-2:]))
    x = exact_lstsq(a, b).detach()
    return gradients.attach_solution(a, b, x, ranks=ranks, factorize=exact_qr)


def exact_lstsq(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = both_complex(a, b)
    if a.shape[-2] >= a.shape[-1]:
        return torch.linalg.solve(a.mH @ a, a.mH @ b)
    return a.mH @ torch.linalg.solve(a @ a.mH, b)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return gradients.attach_product(a, b, exact_matmul(a, b).detach(), exact_matmul)


def exact_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.matmul(*both_complex(a, b))


def exact_polar(a: torch.Tensor) -> Tensors:
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    return u @ vh, vh.mH @ (s[..., None] * vh)


def polar(a: torch.Tensor) -> Tensors:
    ranks = torch.full(a.shape[:-2], min(a.shape[-2:]))
    u, h = gradients.attach_polar(a, exact_polar(a.detach())[0], "right", ranks=ranks)
    return u, h  # type: ignore[return-value]


def exact_svd(a: torch.Tensor, rank: int = 2) -> Tensors:
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    return u[..., :rank], s[..., :rank], vh.mH[..., :rank]


def svd(a: torch.Tensor, rank: int = 2) -> Tensors:
    u, s, v = exact_svd(a.detach(), rank)
    return gradients.attach_triplets(a, u, s, v, errors=1e-14 * s)


def without_phases(triplets: Tensors) -> Tensors:
    u, s, v = triplets
    return s, u.abs() ** 2, (v * v.conj()).real, (u * s.cos().unsqueeze(-2)) @ v.mH


def inverse(a: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(a)


def logdet(a: torch.Tensor) -> torch.Tensor:
    return gradients.attach_logdet(a, torch.linalg.slogdet(a.detach()).logabsdet, inverse)


def complex_logdet(a: torch.Tensor) -> torch.Tensor:
    sign, value = torch.linalg.slogdet(a.detach())
    return gradients.attach_logdet(a, torch.complex(value, sign.angle()), inverse)


def exact_complex_logdet(a: torch.Tensor) -> torch.Tensor:
    sign, value = torch.linalg.slogdet(a)
    return torch.complex(value, sign.angle())


def one(*shape: int) -> Tensors:
    return (variable(*shape),)


def two(left: tuple[int, ...], right: tuple[int, ...], *kinds: str) -> Tensors:
    first, second = (DOUBLE[kind] for kind in kinds or ("complex", "complex"))
    return variable(*left, dtype=first), variable(*right, seed=1, dtype=second)


MIXED = (("complex", "complex"), ("real", "complex"), ("complex", "real"))

CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Tensors]] = {
    **{
        f"qr {shape}": (factors, exact_qr, one(*shape))
        for shape in [(1, 1), (3, 3), (5, 2), (2, 4), (2, 4, 3)]
    },
    "cholesky": (lambda a: cholesky(definite(a)), lambda a: torch.linalg.cholesky(definite(a)), one(2, 3, 3)),
    "cholesky 1": (lambda a: cholesky(definite(a)), lambda a: torch.linalg.cholesky(definite(a)), one(1, 1)),
    "lu": (lu, exact_lu, one(4, 4)),
    **{f"solve {'/'.join(k)}": (solve, exact_solve, two((3, 3), (3, 2), *k)) for k in MIXED},
    "solve broadcast": (solve, exact_solve, two((3, 3), (2, 3, 2))),
    **{
        f"lstsq {shape} {'/'.join(k)}": (lstsq, exact_lstsq, two(shape, (shape[0], 2), *k))
        for k in MIXED
        for shape in [(5, 3), (2, 4), (3, 3)]
    },
    **{f"matmul {'/'.join(k)}": (matmul, exact_matmul, two((2, 3, 4), (4, 2), *k)) for k in MIXED},
    "matmul broadcast": (matmul, exact_matmul, two((3, 4), (2, 4, 2))),
    "polar tall": (polar, exact_polar, one(5, 3)),
    "polar square": (polar, exact_polar, one(2, 3, 3)),
    "polar wide": (lambda a: polar(a)[0], lambda a: exact_polar(a)[0], one(2, 4)),
    **{
        f"svd {shape} {rank}": (
            lambda a, rank=rank: without_phases(svd(a, rank)),
            lambda a, rank=rank: without_phases(exact_svd(a, rank)),
            one(*shape),
        )
        for shape, rank in [((6, 4), 2), ((5, 5), 5), ((2, 6, 4), 2), ((6, 1), 1)]
    },
    "logdet": (logdet, lambda a: torch.linalg.slogdet(a).logabsdet, one(2, 3, 3)),
    "log of a complex determinant": (complex_logdet, exact_complex_logdet, one(3, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_finite_differences(name: str) -> None:
    function, _, inputs = CASES[name]
    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=name[:3] != "svd")
    assert gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_torch(name: str) -> None:
    """Also for purely real and purely imaginary numbers, and views that are conjugated or have strides."""
    ours, plain, inputs = CASES[name]

    def loss(function: Callable[..., Any], given: list[torch.Tensor]) -> list[torch.Tensor]:
        found = function(*given)
        outputs = found if isinstance(found, tuple) else (found,)
        total: Any = 0
        for place, x in enumerate(outputs):
            weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(place), dtype=x.dtype)
            total = total + (weight * x).sum().abs().square() + (weight * x).real.sin().sum()
        return list(torch.autograd.grad(total, given))

    def strided(x: torch.Tensor) -> torch.Tensor:
        return x.detach().repeat_interleave(2, -1)[..., ::2].mT.contiguous().mT

    variants = [
        [x.detach() for x in inputs],
        [strided(x).conj() for x in inputs],
        [x.detach().real.to(x.dtype) for x in inputs],
        [x.detach() * 1j if x.is_complex() else x.detach() for x in inputs],
    ]
    for given in variants:
        found, expected = (loss(f, [x.clone().requires_grad_() for x in given]) for f in (ours, plain))
        for x, y, z in zip(found, expected, given, strict=True):
            assert x.dtype == z.dtype
            assert float((x - y).norm()) <= 1e-9 * float(y.norm()), name


def test_a_loss_that_depends_on_the_phase_of_singular_vectors_has_no_gradient() -> None:
    """Torch's svd raises an error; here it is NaN, as between equal singular values."""
    a = variable(5, 3)
    u, s, v = svd(a)
    (found,) = torch.autograd.grad(u.real.sum() + s.sum(), a, retain_graph=True)
    assert bool(found.isnan().any())
    (found,) = torch.autograd.grad((u[:, 0].conj() * v[0, 0]).sum().abs() + s.sum(), a)
    assert bool(found.isfinite().all())
    real = variable(5, 3, dtype=torch.float64)
    (found,) = torch.autograd.grad(svd(real)[0].sum(), real)
    assert bool(found.isfinite().all())


def first(x: Any) -> torch.Tensor:
    found: torch.Tensor = (x[0] if isinstance(x, tuple) else x) + 0.5
    return found


def test_single_precision() -> None:
    """Gradients have the dtype of their operands, and the accuracy of it."""
    for name, (ours, _, inputs) in CASES.items():
        if "svd" in name or "logdet" in name or "lu" in name or "/" in name:
            continue
        narrow = [x.detach().to(torch.complex64).requires_grad_() for x in inputs]
        outputs = ours(*narrow), ours(*inputs)
        weights = torch.arange(1.0, 100.0)
        losses = ((y.abs().flatten() * weights[: y.numel()]).sum() for y in map(first, outputs))
        found, exact = (
            torch.autograd.grad(loss, given) for loss, given in zip(losses, (narrow, inputs), strict=True)
        )
        for x, y in zip(found, exact, strict=True):
            assert x.dtype == torch.complex64
            assert float((x - y).norm()) <= 1e-3 * float(y.norm()), name
