"""Gradients: answers that were computed without autograd are attached to the graph of their input.

Every function here takes an answer and the input it was computed from, and returns the same numbers with a
gradient, by the formulas of a class of :mod:`neula.pipeline.derivatives` or ``spectral_derivatives``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from neula.engines.formats import in_double
from neula.kernels.cholesky.symmetric import hermitian_from_lower
from neula.kernels.precision import exact_matmul
from neula.pipeline import derivatives as dense
from neula.pipeline import spectral_derivatives as spectral

Tensor = torch.Tensor

Solve = Callable[[Tensor, Tensor], Tensor]  # differentiable ``A^-1 b``, or ``A b``


def known(*answer: Tensor, again: Callable[..., Any] = dense.no_answer) -> dense.PrimalFunction:
    return dense.PrimalFunction(lambda *inputs: tuple(x.detach() for x in answer), again)


def _single(x: Tensor) -> torch.dtype:
    """The dtype of an answer, at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def attach_factors(a: Tensor, q: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Q and R of ``A = Q R`` with the gradient of A, in their common dtype, at least float32.

    The leading min(m, n) columns of R, shape (..., min(m, n), n), are upper triangular with a real diagonal;
    where they are singular, the gradient is Inf or NaN.
    """
    dtype = reduce(torch.promote_types, (q.dtype, r.dtype, torch.float32))
    return dense.QRFunction.apply(a.to(q.device, dtype), known(q.to(dtype), r.to(dtype)))


def attach_cholesky(a: Tensor, lower: Tensor) -> Tensor:
    """L of ``A = L L^H`` with the gradient of A, which is Hermitian, as in torch; at least float32."""
    dtype = _single(lower)
    return dense.CholeskyFunction.apply(a.to(lower.device, dtype), known(lower.to(dtype)))[0]


def attach_lu(a: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """L and U of ``A = L U``, rows of A being interchanged already, with the gradient of A."""
    return dense.LUFunction.apply(a, known(lower, upper))


def attach_symmetric(a: Tensor, symmetric: Tensor) -> Tensor:
    """A Hermitian matrix, made of one triangle of A, with a Hermitian gradient of A, as in torch."""
    return dense.SymmetricFunction.apply(a.to(symmetric.dtype), known(symmetric))[0]


def attach_logdet(a: Tensor, logdet: Tensor, inverse: Callable[[Tensor], Tensor]) -> Tensor:
    """``log |det A|`` with the gradient of A, from a differentiable ``inverse``, called in the backward pass.

    A complex ``logdet`` is ``log |det A|`` plus i times the argument of the determinant.
    """
    return dense.LogDeterminant.apply(a, known(logdet, again=inverse))[0]


def attach_polar(a: Tensor, u: Tensor, side: str | None, *, ranks: Tensor) -> tuple[Tensor, Tensor | None]:
    """U, at least float32, and H of one side, ``A = U H`` or ``A = H U``, with the gradient of A.

    H is ``(U^H A + A^H U) / 2``, differentiated as such. Where ``ranks``, shape (...), are below ``min(m,
    n)``, gradients are NaN.
    """
    dtype = _single(u)
    a = a.to(u.device, dtype)
    u, _ = dense.Polar.apply(a, known(u.to(dtype), ranks))
    return u, None if side is None else symmetric_part(a, u, side)


def symmetric_part(a: Tensor, u: Tensor, side: str) -> Tensor:
    """``(U^H A + A^H U) / 2``, or for the left side ``(A U^H + U A^H) / 2``, differentiable.

    On a CPU it is summed in double precision, so that it has the residual of U.
    """
    dtype = u.dtype
    if u.is_cpu:
        a, u = in_double(a), in_double(u)
    h = exact_matmul(u.mH, a) if side == "right" else exact_matmul(a, u.mH)
    return ((h + h.mH) / 2).to(dtype)


def attach_eigenvectors(a: Tensor, w: Tensor, v: Tensor, *, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues w and eigenvectors V of a Hermitian A, at least float32, with its gradient, which is
    Hermitian, as in torch.

    ``errors`` bound those of w.
    """
    dtype = _single(v)
    answer = w.to(v.device, dtype.to_real()), v.to(dtype), errors.to(v.device)
    found = spectral.EigenvectorsFunction.apply(a.to(v.device, dtype), known(*answer))
    return found[0], found[1]


def attach_pencil(a: Tensor, b: Tensor, w: Tensor, v: Tensor, *, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of ``A V = B V diag(w)`` with the gradients of A and B, of which lower
    triangles are read.

    They are those of ``L^-1 A L^-H`` with ``B = L L^H`` (:func:`attach_eigenvectors`).
    """
    wide = (in_double(x.to(v.device)) for x in (a, b))
    a, b = (attach_symmetric(x, hermitian_from_lower(x.detach())).to(in_double(v).dtype) for x in wide)
    lower = attach_cholesky(b, torch.linalg.cholesky(b.detach()))
    solve = torch.linalg.solve_triangular
    c = solve(lower, solve(lower, a, upper=False).mH, upper=False)
    w, y = attach_eigenvectors(c, w, exact_matmul(lower.detach().mH, in_double(v)), errors=errors)
    return w, solve(lower.mH, y, upper=True)


def attach_power(a: Tensor, x: Tensor, w: Tensor, v: Tensor, power: float) -> Tensor:
    """``X = A^p`` of ``A = V diag(w) V^H``, at least float32, with its gradient.

    Square roots and inverse square roots have gradients of any order; other powers have first derivatives.
    """
    dtype, again = _single(x), lambda: power
    return spectral.PowerFunction.apply(a.to(x.device, dtype), known(x.to(dtype), w, v, again=again))[0]


def attach_triplets(a: Tensor, u: Tensor, s: Tensor, v: Tensor, *, errors: Tensor) -> dense.Tensors:
    """U, s and V of the leading singular triplets ``A V = U diag(s)`` of a tall A, at least float32, with its
    gradient.

    ``errors`` bound those of s.
    """
    dtype = _single(u)
    answer = u.to(dtype), s.to(u.device, dtype.to_real()), v.mH.to(u.device, dtype).resolve_conj()
    given = a.to(u.device, dtype), known(*answer, errors.to(u.device))
    u, s, vh, _ = spectral.TripletsFunction.apply(*given)
    return u, s, vh.mH


def attach_solution(a: Tensor, b: Tensor, x: Tensor, *, ranks: Tensor, factorize: dense.Factorize) -> Tensor:
    """Least-squares solution ``x = A^+ b`` with the gradients of A and b; of a real operand with a complex
    one the gradient is the real part.

    ``ranks``, shape (...): zero where there is no solution. ``factorize``: QR factorization in double
    precision of tall matrices; called in the backward pass, which raises a ValueError instead if a solution
    counts whose rank is below ``min(m, n)``.
    """
    return dense.Solution.apply(a, b, known(x, ranks, again=factorize))[0]


def attach_system(a: Tensor, b: Tensor, x: Tensor, solve: Solve) -> Tensor:
    """``x = A^-1 b`` with the gradients of A and b, by a differentiable ``solve`` in double precision."""
    return dense.LinearSystem.apply(a, b, known(x, again=solve))[0]


def attach_product(a: Tensor, b: Tensor, c: Tensor, multiply: Solve) -> Tensor:
    """``C = A B``, computed by ``multiply``, with the gradients of A and B."""
    if a.ndim > 2 and b.ndim == 2:  # one product for the gradient of B, not a sum over the batch
        return attach_product(a.flatten(0, -2), b, c.flatten(0, -2), multiply).reshape(c.shape)
    return dense.ProductFunction.apply(a, b, known(c, again=multiply))[0]


def stacked_problem(a: Tensor, b: Tensor, weights: Tensor | None, damp: float) -> tuple[Tensor, Tensor]:
    """``[diag(w) A; damp I]`` and ``[diag(w) b; 0]`` in double precision: least squares without options.

    Those that were given if there is neither.
    """
    if weights is not None:
        factors = weights.to(a.device, torch.float64).unsqueeze(-1)
        a, b = factors * a, factors * b
    if damp:
        batch, n = a.shape[:-2], a.shape[-1]
        eye = torch.eye(n, dtype=torch.float64, device=a.device)
        a = torch.cat([in_double(a), (damp * eye).expand(*batch, n, n)], -2)
        b = torch.cat([in_double(b), eye.new_zeros(*batch, n, b.shape[-1])], -2)
    return a, b
