"""Derivatives of eigenvalues, singular values and their vectors, and of powers: as in ``derivatives``.

Those of vectors divide by differences of values. Where these are equal up to their errors, a quotient is zero
if the loss cannot depend on it, and NaN otherwise.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd import Function

from neula.algorithms.krylov.gmres import cg
from neula.pipeline.derivatives import Lyapunov, Pair, leading, pushing_forward

# --- eigenvalues and eigenvectors ---


def eigenvectors_backward(
    w: torch.Tensor,
    v: torch.Tensor,
    ties: torch.Tensor,
    dw: torch.Tensor,
    dv: torch.Tensor,
    negligible: float,
) -> torch.Tensor:
    """Gradient of A from those of w and V, in double precision (:func:`attach_eigenvectors`).

    ``negligible``: part of the sizes of gradients up to which a derivative along arbitrary rotations counts
    as zero.
    """
    inner = v.mH @ dv
    size = torch.linalg.vector_norm(dv, dim=-2)
    if v.is_complex():  # a loss that depends on arbitrary phases has no gradient
        phases = inner.diagonal(0, -2, -1).imag.abs() > negligible * size
        inner = torch.where(phases.unsqueeze(-2), math.nan, inner)
    turned = (inner - inner.mH) / 2
    settled = depends_on_subspaces(turned, dw, size, negligible)
    quotients = _by_gaps(turned, w, ties, (size != 0).unsqueeze(-2), settled)
    return v @ (quotients + torch.diag_embed(dw)) @ v.mH


def eigenvectors_forward(w: torch.Tensor, v: torch.Tensor, ties: torch.Tensor, da: torch.Tensor) -> Pair:
    """Changes of w and V, in double precision; those of vectors of equal eigenvalues are NaN unless zero."""
    inner = v.mH @ ((da + da.mH) / 2) @ v
    asked = torch.ones_like(w, dtype=torch.bool).unsqueeze(-2)
    return inner.diagonal(0, -2, -1).real, v @ _by_gaps(inner, w, ties, asked, inner == 0)


def depends_on_subspaces(
    turned: torch.Tensor, dw: torch.Tensor, size: torch.Tensor, negligible: float
) -> torch.Tensor:
    """For which pairs a loss depends neither on rotations of the two vectors nor on their values.

    If it depended on the values, as ``V diag(f(w)) V^H`` does, a derivative of f would be lost where these
    are equal.

    ``turned``, shape (..., k, k): derivatives along rotations. ``dw`` and ``size``, shape (..., k): gradients
    of values, and norms of those of vectors.
    """
    alike, sizes = dw == 0, size.unsqueeze(-1) + size.unsqueeze(-2)
    return alike.unsqueeze(-1) & alike.unsqueeze(-2) & (turned.abs() <= negligible * sizes)


def _by_gaps(
    x: torch.Tensor, w: torch.Tensor, ties: torch.Tensor, asked: torch.Tensor, settled: torch.Tensor
) -> torch.Tensor:
    """``x_ij / (w_j - w_i)`` without a diagonal (:func:`_quotient`)."""
    asked = (asked | asked.mH) & ~torch.eye(w.shape[-1], dtype=torch.bool, device=w.device)
    gaps, tie = w.unsqueeze(-2) - w.unsqueeze(-1), ties.unsqueeze(-1) + ties.unsqueeze(-2)
    return _quotient(x, gaps, tie, asked, settled)


def _quotient(
    x: torch.Tensor,
    gap: torch.Tensor,
    tie: torch.Tensor,
    asked: torch.Tensor,
    settled: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x / gap``; NaN if no digit of the gap is guaranteed, or 0 if these vectors are not needed.

    There x vanishes for ``U diag(s) V^H``, whose quotient does not, and for ``U V^H``, whose quotient does:
    it is 0 where that is settled, and its derivatives are NaN.
    """
    tied = gap.abs() <= tie
    instead = torch.where(asked, math.nan, 0.0)
    if settled is not None:
        instead = torch.where(asked & settled, OnceZero.apply(x), instead)
    return torch.where(tied, instead, x / torch.where(tied, 1.0, gap))


class OnceZero(Function):
    """Zero, whose derivative is unknown."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.where(gradient != 0, math.nan, gradient)

    @staticmethod
    def jvp(ctx: Any, change: torch.Tensor) -> torch.Tensor:
        return torch.where(change != 0, math.nan, change)

    @staticmethod
    def vmap(info: Any, dims: Any, x: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        return OnceZero.apply(x), dims[0]


# --- powers ---


def power_backward(
    x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, power: float, dx: torch.Tensor
) -> torch.Tensor:
    """Gradient of A from that of ``X = A^p``, both Hermitian (:func:`attach_power`).

    The derivative of a matrix function is its own adjoint.
    """
    return power_forward(x, w, v, power, dx)


def power_forward(
    x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, power: float, da: torch.Tensor
) -> torch.Tensor:
    """Change of ``X = A^p`` for a Hermitian change of A.

    ``X dX + dX X = dA`` for a square root; that of ``X^-1``, times X on both sides, for its inverse.
    """
    if abs(power) == 0.5:
        known = x.isfinite().flatten(-2).all(-1)[..., None, None]
        x = torch.where(known, x, torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))
        change = (
            Lyapunov.apply(x, da) if power > 0 else -x @ Lyapunov.apply(torch.linalg.inv_ex(x)[0], da) @ x
        )
        return torch.where(known, change, math.nan)
    return v @ (_divided_differences(w, power) * (v.mH @ FirstOrder.apply(da, x) @ v)) @ v.mH


def _divided_differences(w: torch.Tensor, power: float) -> torch.Tensor:
    """``(w_i^p - w_j^p) / (w_i - w_j)``, and ``p w_i^(p-1)`` for equal numbers, without cancellation."""
    larger = torch.maximum(w.unsqueeze(-1), w.unsqueeze(-2))
    if power == 0:
        return torch.zeros_like(larger)
    less = (w.unsqueeze(-1) - w.unsqueeze(-2)).abs() / torch.where(larger > 0, larger, 1.0)  # of the larger
    near = less < 1e-8
    quotient = -torch.expm1(power * torch.log1p(-less)) / torch.where(near, 1.0, less)
    return larger ** (power - 1) * torch.where(near, power * (1 - (power - 1) * less / 2), quotient)


class FirstOrder(Function):
    """The first of two, whose derivatives are of one order more than there is: they raise an error."""

    @staticmethod
    def forward(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        raise RuntimeError(
            "powers other than 1/2 and -1/2 have first derivatives only: write the power as square roots and "
            "products for higher ones"
        )

    @staticmethod
    def jvp(ctx: Any, *changes: Any) -> Any:
        return FirstOrder.backward(ctx, changes)

    @staticmethod
    def vmap(info: Any, dims: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, int]:
        return FirstOrder.apply(*leading(operands, dims)), 0


# --- leading singular triplets ---


Triplets = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def triplets_backward(
    a: torch.Tensor, triplets: Triplets, ties: torch.Tensor, gradients: Triplets, negligible: float
) -> torch.Tensor:
    """Gradient of A from those of U, s and V, in double precision (:func:`attach_triplets`)."""
    (u, s, v), (du, ds, dv) = triplets, gradients
    size = torch.linalg.vector_norm(du, dim=-2) + torch.linalg.vector_norm(dv, dim=-2)
    asked = ((du != 0).any(-2) | (dv != 0).any(-2)).unsqueeze(-2)
    left, right = (x.mH @ dx - dx.mH @ x for x, dx in ((u, du), (v, dv)))
    settled = depends_on_subspaces(left + right, ds, size, negligible)
    minus, plus = _by_pairs(left + right, left - right, s, ties, asked, settled)
    x, z = (dy - y @ (y.mH @ dy) for y, dy in ((u, du), (v, dv)))
    x, z = _beyond(a, triplets, ties, asked, x, z)
    return u @ (minus + plus + torch.diag_embed(ds)) @ v.mH + x @ v.mH + u @ z.mH


def triplets_forward(a: torch.Tensor, triplets: Triplets, ties: torch.Tensor, da: torch.Tensor) -> Triplets:
    """Changes of U, s and V, in double precision (:func:`attach_triplets`)."""
    u, s, v = triplets
    image, transposed = da @ v, da.mH @ u
    inner, asked = u.mH @ image, torch.ones_like(s, dtype=torch.bool).unsqueeze(-2)
    both = inner + inner.mH
    both = both - torch.diag_embed(both.diagonal(0, -2, -1))
    minus, plus = _by_pairs(both, inner - inner.mH, s, ties, asked, both == 0)
    x, z = _beyond(a, triplets, ties, asked, image - u @ inner, transposed - v @ inner.mH)
    return u @ (minus + plus) + x, inner.diagonal(0, -2, -1).real, v @ (minus - plus) + z


def _by_pairs(
    minus: torch.Tensor,
    plus: torch.Tensor,
    s: torch.Tensor,
    ties: torch.Tensor,
    asked: torch.Tensor,
    settled: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``minus_ij / (2 (s_j - s_i))`` and ``plus_ij / (2 (s_j + s_i))``."""
    sums, tie = s.unsqueeze(-1) + s.unsqueeze(-2), ties.unsqueeze(-1) + ties.unsqueeze(-2)
    both = (asked | asked.mH) & ~torch.eye(s.shape[-1], dtype=torch.bool, device=s.device)
    return _by_gaps(minus, s, ties, asked, settled) / 2, _quotient(plus, sums, tie, both) / 2


def _beyond(
    a: torch.Tensor,
    triplets: Triplets,
    ties: torch.Tensor,
    asked: torch.Tensor,
    x: torch.Tensor,
    z: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns p and q with ``s p - D q = x`` and ``s q - D^H p = z``, where ``D = A - U diag(s) V^H``."""
    u, s, v = triplets
    if s.shape[-1] == min(a.shape[-2:]):  # D is zero, and so are x or z where U or V is square
        gap, tie = s.unsqueeze(-2), ties.unsqueeze(-2)
        p, q = (
            torch.zeros_like(c) if c.shape[-2] == c.shape[-1] else _quotient(c, gap, tie, asked)
            for c in (x, z)
        )
        return p, q
    rest, s = a - u @ (s.unsqueeze(-1) * v.mH), s.unsqueeze(-2)
    q = ShiftedGram.apply(rest, s, s * z + rest.mH @ x)
    return _quotient(x + rest @ q, s, ties.unsqueeze(-2), asked), q


class ShiftedGram(Function):
    """Y of ``Y diag(s)^2 - D^H D Y = C``, for s above the norm of D: linear in C, and its own adjoint.

    By conjugate gradients; a column that does not converge, because its s is too close to that norm, is NaN.
    """

    @staticmethod
    def forward(d: torch.Tensor, s: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        if d.ndim > 2:
            found = [ShiftedGram.forward(*each) for each in zip(d, s, c, strict=True)]
            return torch.stack(found) if found else torch.zeros_like(c)
        if not c.numel():
            return torch.zeros_like(c)

        def times(y: torch.Tensor) -> torch.Tensor:
            return s * s * y - d.mH @ (d @ y)

        # About 15 (1 - (norm / s)^2)^(-1/2) iterations are needed.
        accurate = 1e-12
        y, _ = cg(times, lambda residual: residual, c, tolerance=accurate, max_iterations=1000)
        left = torch.linalg.vector_norm(c - times(y), dim=0)
        return torch.where(left <= 100 * accurate * torch.linalg.vector_norm(c, dim=0), y, math.nan)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:2], output)
        ctx.save_for_forward(*inputs[:2], output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Triplets:
        d, s, y = ctx.saved_tensors
        z = ShiftedGram.apply(d, s, gradient)
        return (d @ y) @ z.mH + (d @ z) @ y.mH, -2 * s * (y * z.conj()).real.sum(-2, keepdim=True), z

    @staticmethod
    def jvp(
        ctx: Any, dd: torch.Tensor | None, ds: torch.Tensor | None, dc: torch.Tensor | None
    ) -> torch.Tensor:
        with pushing_forward(ctx) as (d, s, y):
            right = torch.zeros_like(y) if dc is None else dc
            if ds is not None:
                right = right - 2 * s * ds * y
            if dd is not None:
                right = right + dd.mH @ (d @ y) + d.mH @ (dd @ y)
            return ShiftedGram.apply(d, s, right)
