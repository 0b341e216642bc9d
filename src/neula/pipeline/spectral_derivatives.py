"""Derivatives of eigenvalues, singular values and their vectors, and of powers: as in ``derivatives``.

Those of vectors divide by differences of values. Where these are equal up to their errors, a quotient is zero
if the loss cannot depend on it, and NaN otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from neula.algorithms.krylov.gmres import cg
from neula.certificates.forward_error import SURE
from neula.engines.formats import in_double
from neula.kernels.cholesky.symmetric import hermitian_from_lower
from neula.pipeline.derivatives import (
    Attached,
    PrimalFunction,
    SymmetricFunction,
    Tensors,
    Wanted,
    lyapunov,
)

Tensor = torch.Tensor
Triplets = tuple[Tensor, Tensor, Tensor]


class EigenvectorsFunction(Attached):
    """Eigenvalues and eigenvectors, and as evidence bounds on the errors of the eigenvalues.

    ``dA = V (diag(dw) + F * (V^H dV)) V^H`` with ``F_ij = 1 / (w_j - w_i)`` (M. B. Giles, "Collected matrix
    derivative results for forward and reverse mode algorithmic differentiation", 2008, section 2.2.5). Where
    two eigenvalues are equal up to their errors, the quotient is zero if the loss depends on their subspace
    alone, and NaN otherwise. Derivatives of the quotients are those of :class:`Sylvester`.
    """

    answers = 2
    kept = (1, 3)

    @staticmethod
    def gradients(primal: PrimalFunction, wanted: Wanted, kept: Tensors, *gradients: Tensor) -> Tensors:
        (a, w, v, errors), (dw, dv) = map(in_double, kept), map(in_double, gradients)
        negligible = _negligible(gradients[1])
        inner, size = v.mH @ dv, torch.linalg.vector_norm(dv, dim=-2)
        if v.is_complex():  # a loss that depends on arbitrary phases has no gradient
            phases = inner.diagonal(0, -2, -1).imag.abs() > negligible * size
            inner = torch.where(phases.unsqueeze(-2), math.nan, inner)
        turned = (inner - inner.mH) / 2
        settled = depends_on_subspaces(turned, dw, size, negligible)
        apart = _apart(w, errors / SURE)
        t = _moving(w, v, apart, lambda: v.mH @ SymmetricFunction.apply(a, HERMITIAN)[0] @ v)
        quotients = _of_clusters(turned, t, apart, (size != 0).unsqueeze(-2), settled)
        return ((v @ (quotients + torch.diag_embed(dw)) @ v.mH).to(kept[2].dtype),)

    @staticmethod
    def pushed_forward(primal: PrimalFunction, kept: Tensors, *changes: Any) -> Tensors:
        (_, w, v, errors), da = map(in_double, kept), in_double(changes[0])
        inner = v.mH @ ((da + da.mH) / 2) @ v
        asked = torch.ones_like(w, dtype=torch.bool).unsqueeze(-2)
        dv = v @ _by_gaps(inner, w, errors / SURE, asked, inner == 0)
        return inner.diagonal(0, -2, -1).real.to(kept[1].dtype), dv.to(kept[2].dtype)


def _negligible(x: Tensor) -> float:
    """Part of the sizes of gradients up to which a derivative along arbitrary rotations counts as zero."""
    return torch.finfo(x.dtype).eps ** 0.5


def depends_on_subspaces(turned: Tensor, dw: Tensor, size: Tensor, negligible: float) -> Tensor:
    """For which pairs a loss depends neither on rotations of the two vectors nor on their values.

    If it depended on the values, as ``V diag(f(w)) V^H`` does, a derivative of f would be lost where these
    are equal.

    ``turned``, shape (..., k, k): derivatives along rotations. ``dw`` and ``size``, shape (..., k): gradients
    of values, and norms of those of vectors.
    """
    alike, sizes = dw == 0, size.unsqueeze(-1) + size.unsqueeze(-2)
    return alike.unsqueeze(-1) & alike.unsqueeze(-2) & (turned.abs() <= negligible * sizes)


def _by_gaps(x: Tensor, w: Tensor, ties: Tensor, asked: Tensor, settled: Tensor) -> Tensor:
    """``x_ij / (w_j - w_i)`` without a diagonal (as ``_quotient``)."""
    return _quotient(x, w.unsqueeze(-2) - w.unsqueeze(-1), _sums(ties), _of_others(asked), settled)


def _quotient(x: Tensor, gap: Tensor, tie: Tensor, asked: Tensor, settled: Tensor | None = None) -> Tensor:
    """``x / gap``; NaN if no digit of the gap is guaranteed, or 0 if these vectors are not needed.

    There x vanishes for ``U diag(s) V^H``, whose quotient does not, and for ``U V^H``, whose quotient does:
    it is 0 where that is settled, and its derivatives are NaN.
    """
    tied = gap.abs() <= tie
    instead = torch.where(asked, math.nan, 0.0)
    if settled is not None:
        instead = torch.where(asked & settled, OnceZero.apply(x, ZERO)[0], instead)
    return torch.where(tied, instead, x / torch.where(tied, 1.0, gap))


class OnceZero(Attached):
    kept = (0, 1)

    @staticmethod
    def gradients(primal: PrimalFunction, wanted: Wanted, kept: Tensors, *gradients: Tensor) -> Tensors:
        return (torch.where(gradients[0] != 0, math.nan, gradients[0]),)


class ZeroHere(Attached):
    """Zeros with the derivatives of x: ``x - x.detach()``, which batches of torch.autograd do not have."""

    kept = (0, 1)

    @staticmethod
    def gradients(primal: PrimalFunction, wanted: Wanted, kept: Tensors, *gradients: Tensor) -> Tensors:
        return gradients


ZERO = PrimalFunction(lambda x: (torch.zeros_like(x),))


HERMITIAN = PrimalFunction(lambda a: (hermitian_from_lower(a),))


def _apart(w: Tensor, ties: Tensor) -> Tensor:
    """Which pairs of values, in order, belong to different clusters; NaN stands alone."""
    between = ~((w[..., 1:] - w[..., :-1]).abs() <= ties[..., 1:] + ties[..., :-1])
    clusters = torch.nn.functional.pad(between.long().cumsum(-1), (1, 0))
    return clusters.unsqueeze(-1) != clusters.unsqueeze(-2)


def _moving(w: Tensor, v: Tensor, apart: Tensor, product: Callable[[], Tensor]) -> Tensor:
    """``diag(w)`` with the derivative of the blocks of a product that has these eigenvalues, in the dtype of
    V: within a cluster it need not stay diagonal.
    """
    known = torch.diag_embed(w.detach()).to(v.dtype)
    if not torch.is_grad_enabled():  # nobody asks for second derivatives
        return known
    return known + ZeroHere.apply(torch.where(apart, 0.0, product()), ZERO)[0]


def _of_clusters(x: Tensor, t: Tensor, apart: Tensor, asked: Tensor, settled: Tensor) -> Tensor:
    """``x_ij / (t_jj - t_ii)``; within clusters 0 if that is settled or not asked, and NaN otherwise.

    If x is zero there only by chance, its derivative is not that of a loss of subspaces, which shows in the
    next derivatives.
    """
    signs = torch.ones_like(apart, dtype=x.dtype)
    zero = ZeroHere.apply(x, ZERO)[0] * (signs.triu(1) - signs.tril(-1))
    instead = torch.where(_of_others(asked), torch.where(settled, zero, math.nan), 0.0)
    return torch.where(apart, Sylvester.apply(x, t, apart, DIFFERENCES)[0], instead)


def _solved(c: Tensor, t: Tensor, solved: Tensor, asked: Tensor, equation: PrimalFunction) -> Tensor:
    instead = torch.where(asked, math.nan, 0.0)
    return torch.where(solved, Sylvester.apply(c, t, solved, equation)[0], instead)


class Sylvester(Attached):
    """X of ``X T - sign T X = C`` for a Hermitian T, diagonal as it stands; zero where it is not ``solved``.

    The equation is its own adjoint.
    """

    operands = 3
    kept = (3, 1)

    @staticmethod
    def gradients(primal: PrimalFunction, wanted: Wanted, kept: Tensors, *gradients: Tensor) -> Any:
        _, t, solved, x = kept
        (z,), sign = Sylvester.apply(gradients[0], t, solved, primal), primal.again()
        of_t = -x.mH @ z
        return z, of_t + sign * (z @ x.mH) if sign else of_t, None

    @staticmethod
    def pushed_forward(primal: PrimalFunction, kept: Tensors, *changes: Any) -> Tensors:
        (_, t, solved, x), (dc, dt, _), sign = kept, changes, primal.again()
        right = torch.zeros_like(x) if dc is None else dc
        if dt is not None:
            right = right - x @ dt + (sign * (dt @ x) if sign else 0.0)
        return Sylvester.apply(right, t, solved, primal)


def _sylvester(sign: int) -> PrimalFunction:
    def call(c: Tensor, t: Tensor, solved: Tensor) -> Tensors:
        w = t.diagonal(0, -2, -1).real
        gaps = w.unsqueeze(-2) - sign * w.unsqueeze(-1) if sign else w.unsqueeze(-2)
        return (torch.where(solved, c / torch.where(solved, gaps, 1.0), 0.0),)

    return PrimalFunction(call, lambda: sign)


DIFFERENCES, SUMS, ALONE = map(_sylvester, (1, -1, 0))


class PowerFunction(Attached):
    """A power of a Hermitian matrix, and as evidence its eigenvalues and eigenvectors.

    ``dA = V (G * (V^H dX V)) V^H``, also for equal eigenvalues: G has the divided differences of ``w^p``
    (Daleckii and Krein). The derivative of a matrix function is its own adjoint. ``X dX + dX X = dA`` for a
    square root, which has gradients of any order; that of ``X^-1``, times X on both sides, for its inverse.
    """

    kept = (0, 3)

    @staticmethod
    def gradients(primal: PrimalFunction, wanted: Wanted, kept: Tensors, *gradients: Tensor) -> Tensors:
        (x, w, v), power, da = map(in_double, kept), primal.again(), in_double(gradients[0])
        da = (da + da.mH) / 2
        if abs(power) != 0.5:
            (da,) = FirstOrder.apply(da, x, FIRST)
            return ((v @ (_divided_differences(w, power) * (v.mH @ da @ v)) @ v.mH).to(kept[0].dtype),)
        known = x.isfinite().flatten(-2).all(-1)[..., None, None]
        x = torch.where(known, x, torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))
        change = lyapunov(x, da) if power > 0 else -x @ lyapunov(torch.linalg.inv_ex(x)[0], da) @ x
        return (torch.where(known, change, math.nan).to(kept[0].dtype),)


def _divided_differences(w: Tensor, power: float) -> Tensor:
    """``(w_i^p - w_j^p) / (w_i - w_j)``, and ``p w_i^(p-1)`` for equal numbers, without cancellation."""
    larger = torch.maximum(w.unsqueeze(-1), w.unsqueeze(-2))
    if power == 0:
        return torch.zeros_like(larger)
    less = (w.unsqueeze(-1) - w.unsqueeze(-2)).abs() / torch.where(larger > 0, larger, 1.0)  # of the larger
    near = less < 1e-8
    quotient = -torch.expm1(power * torch.log1p(-less)) / torch.where(near, 1.0, less)
    return larger ** (power - 1) * torch.where(near, power * (1 - (power - 1) * less / 2), quotient)


class FirstOrder(Attached):
    """The first of two, whose derivatives are of one order more than there is: they raise an error."""

    operands = 2

    @staticmethod
    def gradients(primal: PrimalFunction, wanted: Wanted, kept: Tensors, *gradients: Tensor) -> Tensors:
        raise RuntimeError(
            "powers other than 1/2 and -1/2 have first derivatives only: write the power as square roots and "
            "products for higher ones"
        )


FIRST = PrimalFunction(lambda x, other: (x.clone(),))


class TripletsFunction(Attached):
    """U, s and V^H of singular triplets, all or the leading ones, and as evidence bounds on the errors of s.

    Changes of U and V inside their subspaces divide by differences of singular values (J. Townsend,
    "Differentiating the singular value decomposition", 2016). Changes p and q out of them solve ``s p - D q
    = x`` and ``s q - D^H p = z``, where D is the rest of A, a column at a time. That divides by differences
    to the singular values that were not computed; conjugate gradients need only products with D. If no digit
    of a difference is guaranteed, or the loss depends on the common phase of a complex pair of singular
    vectors, gradients of U and V are NaN.
    """

    answers = 3
    kept = (1, 4)

    @staticmethod
    def gradients(primal: PrimalFunction, wanted: Wanted, kept: Tensors, *gradients: Tensor) -> Tensors:
        (a, u, s, vh, errors), (du, ds, dvh) = map(in_double, kept), map(in_double, gradients)
        v, dv = vh.mH, dvh.mH
        ties, negligible = errors / SURE, _negligible(gradients[0])
        size = torch.linalg.vector_norm(du, dim=-2) + torch.linalg.vector_norm(dv, dim=-2)
        if u.is_complex():
            # The common phase of a pair of vectors is arbitrary: a loss that depends on it has no gradient.
            moved = (u.conj() * du).sum(-2) + (v.conj() * dv).sum(-2)
            du = torch.where((moved.imag.abs() > negligible * size).unsqueeze(-2), math.nan, du)
            size = torch.linalg.vector_norm(du, dim=-2) + torch.linalg.vector_norm(dv, dim=-2)
        asked = ((du != 0).any(-2) | (dv != 0).any(-2)).unsqueeze(-2)
        left, right = (x.mH @ dx - dx.mH @ x for x, dx in ((u, du), (v, dv)))
        settled = depends_on_subspaces(left + right, ds, size, negligible)
        apart, sums = _apart(s, ties), ~(_sums(s) <= _sums(ties))
        t = _moving(s, v, apart, lambda: _hermitian(u.mH @ a @ v))
        inner = _of_clusters(left + right, t, apart, asked, settled)
        inner = inner + _solved(left - right, t, sums, _of_others(asked), SUMS)
        x, z = (dy - y @ (y.mH @ dy) for y, dy in ((u, du), (v, dv)))
        x, z = _beyond(a, (u, t, v), ties, asked, x, z)
        found = u @ (inner / 2 + torch.diag_embed(ds)) @ v.mH + x @ v.mH + u @ z.mH
        return (found.to(kept[0].dtype),)

    @staticmethod
    def pushed_forward(primal: PrimalFunction, kept: Tensors, *changes: Any) -> Tensors:
        (a, u, s, vh, errors), da = map(in_double, kept), in_double(changes[0])
        v = vh.mH
        image, transposed, ties = da @ v, da.mH @ u, errors / SURE
        inner, asked = u.mH @ image, torch.ones_like(s, dtype=torch.bool).unsqueeze(-2)
        both = inner + inner.mH
        both = both - torch.diag_embed(both.diagonal(0, -2, -1))
        minus, plus = _by_pairs(both, inner - inner.mH, s, ties, asked, both == 0)
        t = torch.diag_embed(s).to(u.dtype)
        x, z = _beyond(a, (u, t, v), ties, asked, image - u @ inner, transposed - v @ inner.mH)
        found = u @ (minus + plus) + x, inner.diagonal(0, -2, -1).real, (v @ (minus - plus) + z).mH
        return tuple(x.to(y.dtype) for x, y in zip(found, kept[1:4], strict=True))


def _by_pairs(
    minus: Tensor, plus: Tensor, s: Tensor, ties: Tensor, asked: Tensor, settled: Tensor
) -> tuple[Tensor, Tensor]:
    """``minus_ij / (2 (s_j - s_i))`` and ``plus_ij / (2 (s_j + s_i))``."""
    plus = _quotient(plus, _sums(s), _sums(ties), _of_others(asked))
    return _by_gaps(minus, s, ties, asked, settled) / 2, plus / 2


def _of_others(asked: Tensor) -> Tensor:
    """Pairs of different vectors of which one is asked."""
    return (asked | asked.mH) & ~torch.eye(asked.shape[-1], dtype=torch.bool, device=asked.device)


def _hermitian(x: Tensor) -> Tensor:
    return (x + x.mH) / 2


def _sums(s: Tensor) -> Tensor:
    return s.unsqueeze(-1) + s.unsqueeze(-2)


def _beyond(
    a: Tensor, triplets: Triplets, ties: Tensor, asked: Tensor, x: Tensor, z: Tensor
) -> tuple[Tensor, Tensor]:
    """Columns p and q with ``P T - D Q = X`` and ``Q T - D^H P = Z``, where ``D = A - U T V^H``, T being
    ``diag(s)``.
    """
    u, t, v = triplets
    known = ~(t.diagonal(0, -2, -1).real <= ties).unsqueeze(-2)
    if t.shape[-1] == min(a.shape[-2:]):  # D is zero, and so are x or z where U or V is square
        p, q = (
            torch.zeros_like(c) if c.shape[-2] == c.shape[-1] else _solved(c, t, known, asked, ALONE)
            for c in (x, z)
        )
        return p, q
    rest = a - u @ t @ v.mH
    (q,) = ShiftedGram.apply(rest, t @ t, z @ t + rest.mH @ x, BY_CG)
    return _solved(x + rest @ q, t, known, asked, ALONE), q


class ShiftedGram(Attached):
    """Y of ``Y S - D^H D Y = C``, for a diagonal S above the square of the norm of D: linear in C, and its
    own adjoint.
    """

    operands = 3
    kept = (2, 1)

    @staticmethod
    def gradients(primal: PrimalFunction, wanted: Wanted, kept: Tensors, *gradients: Tensor) -> Triplets:
        d, s, y = kept
        (z,) = ShiftedGram.apply(d, s, gradients[0], primal)
        return (d @ y) @ z.mH + (d @ z) @ y.mH, -y.mH @ z, z

    @staticmethod
    def pushed_forward(primal: PrimalFunction, kept: Tensors, *changes: Any) -> Tensors:
        (d, s, y), (dd, ds, dc) = kept, changes
        right = torch.zeros_like(y) if dc is None else dc
        if ds is not None:
            right = right - y @ ds
        if dd is not None:
            right = right + dd.mH @ (d @ y) + d.mH @ (dd @ y)
        return ShiftedGram.apply(d, s, right, primal)


def _by_cg(d: Tensor, s: Tensor, c: Tensor) -> Tensors:
    """By conjugate gradients; a column that does not converge, because its s is near ``||D||^2``, is NaN."""
    if d.ndim > 2:
        found = [_by_cg(*each)[0] for each in zip(d, s, c, strict=True)]
        return (torch.stack(found) if found else torch.zeros_like(c),)
    if not c.numel():
        return (torch.zeros_like(c),)

    squares = s.diagonal().real

    def times(y: Tensor) -> Tensor:
        return squares * y - d.mH @ (d @ y)

    # About 15 (1 - ||D||^2 / s)^(-1/2) iterations are needed.
    accurate = 1e-12
    y, _ = cg(times, lambda residual: residual, c, tolerance=accurate, max_iterations=1000)
    left = torch.linalg.vector_norm(c - times(y), dim=0)
    return (torch.where(left <= 100 * accurate * torch.linalg.vector_norm(c, dim=0), y, math.nan),)


BY_CG = PrimalFunction(_by_cg)
