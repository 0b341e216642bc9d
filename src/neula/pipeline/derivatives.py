"""Derivatives of answers, backward and forward: formulas alone, for real and complex numbers.

Every function here takes answers, and gradients of a loss with respect to them (backward) or changes of the
input (forward). All are differentiable operations, so that gradients have gradients, too.
``neula.pipeline.functions`` attaches them to graphs. The gradient of a real loss L with respect to a complex
number z is ``dL/dRe z + i dL/dIm z``, as in torch: a change of the input changes L by the real part of its
inner product with the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function, forward_ad

from neula.engines.formats import in_double
from neula.kernels.cholesky.symmetric import hermitian_from_lower
from neula.kernels.polar.svd import converged_eigh
from neula.kernels.precision import exact_matmul

Factorize = Callable[[torch.Tensor], Iterable[torch.Tensor]]
"""QR factorization ``A -> Q, R`` of batches in double precision, differentiable."""

Solve = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Solution of ``A x = b`` for batches in double precision, differentiable."""

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Product of batches, broadcast and differentiable."""

Pair = tuple[torch.Tensor, torch.Tensor]


# --- QR ---


def factors_backward(q: torch.Tensor, r: torch.Tensor, dq: torch.Tensor, dr: torch.Tensor) -> torch.Tensor:
    """Gradient of A from those of Q and R (:func:`neula.pipeline.gradients.attach_factors`)."""
    k = q.shape[-1]
    if r.shape[-1] > k:
        (u, v), (du, dv) = (x.tensor_split([k], -1) for x in (r, dr))
        dx = factors_backward(q, u, dq + exact_matmul(q, exact_matmul(v, dv.mH)), du)
        return torch.cat([dx, exact_matmul(q, dv)], -1)
    m = exact_matmul(r, dr.mH) - exact_matmul(dq.mH, q)
    right = dq + exact_matmul(q, hermitian_from_lower(m))
    return torch.linalg.solve_triangular(r.mH, right, upper=False, left=False)


def factors_forward(q: torch.Tensor, r: torch.Tensor, da: torch.Tensor) -> Pair:
    """Changes of Q and R.

    With ``W = Q^H dA R^-1`` and L its strictly lower triangle, ``Q^H dQ = L - L^H + i Im diag(W)`` is skew,
    and ``dR = (W - Q^H dQ) R`` is upper triangular with a real diagonal.
    """
    k = q.shape[-1]
    if r.shape[-1] > k:
        (u, v), (dx, dy) = (x.tensor_split([k], -1) for x in (r, da))
        dq, du = factors_forward(q, u, dx)
        dv = exact_matmul(dq.mH, exact_matmul(q, v)) + exact_matmul(q.mH, dy)
        return dq, torch.cat([du, dv], -1)
    scaled = torch.linalg.solve_triangular(r, da, upper=True, left=False)
    w = exact_matmul(q.mH, scaled)
    triangle = w.triu(1) + hermitian_from_lower(w).triu()
    return scaled - exact_matmul(q, triangle), exact_matmul(triangle, r)


# --- Cholesky ---


def cholesky_backward(lower: torch.Tensor, dl: torch.Tensor) -> torch.Tensor:
    """Gradient of A from that of L (:func:`neula.pipeline.gradients.attach_cholesky`)."""
    # P + P^H with the lower triangle P of L^H dL, its diagonal halved.
    symmetric = hermitian_from_lower(exact_matmul(lower.mH, dl.tril()))
    solve = torch.linalg.solve_triangular
    return 0.5 * solve(lower, solve(lower.mH, symmetric, upper=True), upper=False, left=False)


def cholesky_forward(lower: torch.Tensor, da: torch.Tensor) -> torch.Tensor:
    """Change of L: with ``M = L^-1 dA L^-H``, L times the lower triangle of M, its diagonal halved."""
    solve = torch.linalg.solve_triangular
    left = solve(lower, 0.5 * (da + da.mH), upper=False)
    m = solve(lower.mH, left, upper=True, left=False)
    return exact_matmul(lower, 0.5 * (m.tril() + m.tril(-1)))


# --- LU ---


def lu_backward(lower: torch.Tensor, upper: torch.Tensor, dl: torch.Tensor, du: torch.Tensor) -> torch.Tensor:
    """Gradient of A from those of L and U: ``L^-H (tril(L^H dL, -1) + triu(dU U^H)) U^-H``."""
    inner = exact_matmul(lower.mH, dl).tril(-1) + exact_matmul(du, upper.mH).triu()
    solve = torch.linalg.solve_triangular
    return solve(upper.mH, solve(lower.mH, inner, upper=True), upper=False, left=False)


def lu_forward(lower: torch.Tensor, upper: torch.Tensor, da: torch.Tensor) -> Pair:
    """Changes of L and U: with ``M = L^-1 dA U^-1``, L times the strict lower triangle, the rest times U."""
    solve = torch.linalg.solve_triangular
    m = solve(upper, solve(lower, da, upper=False), upper=True, left=False)
    return exact_matmul(lower, m.tril(-1)), exact_matmul(m.triu(), upper)


# --- linear systems ---


def system_backward(a: torch.Tensor, x: torch.Tensor, dx: torch.Tensor, solve: Solve) -> Pair:
    """Gradients of A and b, in double precision (:func:`neula.pipeline.gradients.attach_system`)."""
    y = solve(in_double(a).mH, in_double(dx))
    return -y @ in_double(x).mH, y


def system_forward(
    a: torch.Tensor, x: torch.Tensor, da: torch.Tensor | None, db: torch.Tensor | None, solve: Solve
) -> torch.Tensor:
    """Change of x: ``A^-1 (db - dA x)``."""
    return solve(in_double(a), changed_residual(x, da, db))


# --- least squares ---


def solution_backward(
    a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, dx: torch.Tensor, factorize: Factorize
) -> Pair:
    """Gradients of A and b, all in double precision (:func:`neula.pipeline.gradients.attach_solution`)."""
    solve = torch.linalg.solve_triangular
    if a.shape[-2] >= a.shape[-1]:
        q, r, a = _in_dtype_of(x, *factorize(a), a)
        c = solve(r.mH, dx, upper=False)
        y, z = q @ c, solve(r, c, upper=True)
        return (b - a @ x) @ z.mH - y @ x.mH, y
    q, r = _in_dtype_of(x, *factorize(a.mH))
    c = q.mH @ dx
    y = solve(r, c, upper=True)
    w = solve(r, solve(r.mH, b.to(x.dtype), upper=False), upper=True)
    return w @ (dx - q @ c).mH - y @ x.mH, y


def solution_forward(
    a: torch.Tensor,
    b: torch.Tensor,
    x: torch.Tensor,
    da: torch.Tensor | None,
    db: torch.Tensor | None,
    factorize: Factorize,
) -> torch.Tensor:
    """Change of x, all in double precision.

    ``A^+ (db - dA x)``, and of a tall matrix ``(A^H A)^-1 dA^H (b - A x)`` more, of a wide one
    ``(I - A^+ A) dA^H A^+H x``.
    """
    solve, rest = torch.linalg.solve_triangular, changed_residual(x, da, db).to(x.dtype)
    if a.shape[-2] >= a.shape[-1]:
        q, r, a = _in_dtype_of(x, *factorize(a), a)
        image = q.mH @ rest
        if da is not None:
            image = image + solve(r.mH, da.to(x.dtype).mH @ (b - a @ x), upper=False)
        return solve(r, image, upper=True)
    q, r = _in_dtype_of(x, *factorize(a.mH))
    dx = q @ solve(r.mH, rest, upper=False)
    if da is not None:
        y = da.to(x.dtype).mH @ solve(r, q.mH @ x, upper=True)
        dx = dx + y - q @ (q.mH @ y)
    return dx


def changed_residual(x: torch.Tensor, da: torch.Tensor | None, db: torch.Tensor | None) -> torch.Tensor:
    """``db - dA x`` in double precision."""
    x = in_double(x)
    change = torch.zeros_like(x[..., :1, :]) if db is None else in_double(db)
    return change if da is None else change - da.to(x.dtype) @ x


def _in_dtype_of(x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors in the dtype of x: complex ones of a real A with a complex right-hand side."""
    return tuple(y.to(x.dtype) for y in others)


# --- products ---


def product_backward(
    a: torch.Tensor, b: torch.Tensor, dc: torch.Tensor, multiply: Multiply, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of those operands that want one (:func:`neula.pipeline.gradients.attach_product`)."""
    da = for_operand(multiply(dc, b.mH), a) if wanted[0] else None
    db = for_operand(multiply(a.mH, dc), b) if wanted[1] else None
    return da, db


def for_operand(gradient: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
    """A gradient in the shape and the dtype of its operand: of a real one the real part."""
    if gradient.is_complex() and not operand.is_complex():
        gradient = gradient.real
    return gradient.sum_to_size(operand.shape).to(operand)


def product_forward(
    a: torch.Tensor, b: torch.Tensor, da: torch.Tensor | None, db: torch.Tensor | None, multiply: Multiply
) -> torch.Tensor:
    """Change of the product, ``dA B + A dB``, at least one of which there is."""
    parts = [multiply(da, b)] if da is not None else []
    if db is not None:
        parts.append(multiply(a, db))
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


# --- polar decomposition ---


def polar_backward(a: torch.Tensor, u: torch.Tensor, du: torch.Tensor) -> torch.Tensor:
    """Gradient of A, in double precision (:func:`neula.pipeline.gradients.attach_polar`)."""
    if a.shape[-2] < a.shape[-1]:
        return polar_backward(a.mH, u.mH, du.mH).mH
    h, inner = _symmetric(u.mH @ a), u.mH @ du
    y = Lyapunov.apply(h, inner - inner.mH)
    return u @ y + _divided(du - u @ inner, h)


def polar_forward(a: torch.Tensor, u: torch.Tensor, da: torch.Tensor) -> torch.Tensor:
    """Change of U, in double precision.

    ``U Y + (I - U U^H) dA H^-1`` of a tall matrix, where Y solves ``H Y + Y H = U^H dA - dA^H U``.
    """
    if a.shape[-2] < a.shape[-1]:
        return polar_forward(a.mH, u.mH, da.mH).mH
    h, inner = _symmetric(u.mH @ a), u.mH @ da
    return u @ Lyapunov.apply(h, inner - inner.mH) + _divided(da - u @ inner, h)


def _symmetric(h: torch.Tensor) -> torch.Tensor:
    return (h + h.mH) / 2


def _divided(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """``X H^-1``, without a look at whether H is singular.

    By the inverse: the forward derivative of torch's own ``solve`` has no derivative with respect to H.
    """
    return x @ torch.linalg.inv_ex(h)[0]


class Lyapunov(Function):
    """Y of ``H Y + Y H = K`` for a Hermitian positive definite H: linear in K, and its own adjoint.

    Eigenvectors have gradients that divide by differences of eigenvalues; Y divides by sums alone.
    """

    @staticmethod
    def forward(h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        values, vectors = converged_eigh(h)
        sums = values[..., :, None] + values[..., None, :]
        return vectors @ ((vectors.mH @ k @ vectors) / sums) @ vectors.mH

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Pair:
        h, y = ctx.saved_tensors
        z = Lyapunov.apply(h, gradient)
        return -(z @ y.mH + y.mH @ z), z

    @staticmethod
    def jvp(ctx: Any, dh: torch.Tensor | None, dk: torch.Tensor | None) -> torch.Tensor:
        with pushing_forward(ctx) as (h, y):
            right = torch.zeros_like(y) if dk is None else dk
            return Lyapunov.apply(h, right if dh is None else right - dh @ y - y @ dh)

    @staticmethod
    def vmap(info: Any, dims: Any, h: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, int]:
        return Lyapunov.apply(*leading((h, k), dims)), 0


# --- what all share ---


@contextmanager
def pushing_forward(ctx: Any) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors that a function has kept for its ``jvp``, whose formula is to have derivatives in turn.

    torch switches forward mode off in a ``jvp``, for this level and all around it: their tangents would be
    lost. Switched on again, the formula is one of this level's primals.
    """
    with forward_ad._set_fwd_grad_enabled(True):
        yield tuple(forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors)


def leading(operands: Sequence[torch.Tensor], dims: Sequence[int | None]) -> list[torch.Tensor]:
    """Matrices whose hidden dimensions come first, before as many others as the rules of NumPy ask for."""
    dims = dims[: len(operands)]
    most = max(x.ndim - (dim is not None) for x, dim in zip(operands, dims, strict=True))
    found = []
    for x, dim in zip(operands, dims, strict=True):
        if dim is not None:
            x = x.movedim(dim, 0)
            x = x.reshape(x.shape[0], *(1,) * (most + 1 - x.ndim), *x.shape[1:])
        found.append(x)
    return found
