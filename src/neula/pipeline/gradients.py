"""Gradients: answers that were computed without autograd are attached to the graph of their input.

Every function here takes an answer and the input it was computed from, and returns the same numbers with a
gradient (``neula.pipeline.functions``), by the formulas of :mod:`neula.pipeline.derivatives`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from neula.engines.formats import in_double
from neula.kernels.cholesky.symmetric import hermitian_from_lower
from neula.kernels.precision import exact_matmul
from neula.pipeline.derivatives import Factorize, Multiply, Solve
from neula.pipeline.functions import (
    Answerer,
    CholeskyFunction,
    EigenvectorsFunction,
    LinearSystem,
    LogDeterminant,
    LUFunction,
    Polar,
    PowerFunction,
    ProductFunction,
    QRFunction,
    Solution,
    SymmetricFunction,
    TripletsFunction,
    no_answer,
)


def known(*answer: torch.Tensor, again: Callable[..., Any] = no_answer) -> Answerer:
    """An answerer for what has been computed already."""
    return Answerer(lambda *inputs: tuple(x.detach() for x in answer), again)


def attach_factors(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and R of ``A = Q R`` with the gradient of A.

    With ``M = R dR^H - dQ^H Q`` and C the Hermitian matrix that has the lower triangle of M, and the real
    part of its diagonal, ``dA = (dQ + Q C) R^-H`` [1]_. Of a wide matrix ``[X, Y] = Q [U, V]``, Q and U are
    the factors of X, and ``V = Q^H Y``.

    Shapes: a (..., m, n). ``q``, shape (..., m, k): with ``k = min(m, n)``. ``r``, shape (..., k, n): its
    leading k columns upper triangular with a real diagonal; where they are singular, the gradient is Inf or
    NaN. Returns q, r: in their common dtype, at least float32.

    References
    ----------
    .. [1] S. F. Walter, L. Lehmann, "Algorithmic differentiation of linear algebra functions with application
       in optimum experimental design", 2010; M. Seeger et al., "Auto-differentiating linear algebra", 2017.

    Examples
    --------
    >>> import torch
    >>> from neula.pipeline.gradients import attach_factors
    >>> A = torch.tensor([[3.0], [4.0]], requires_grad=True)
    >>> Q, R = attach_factors(A, torch.tensor([[0.6], [0.8]]), torch.tensor([[5.0]]))
    >>> torch.autograd.grad(R.sum(), A)[0].flatten()  # R is the norm of A
    tensor([0.6000, 0.8000])
    """
    dtype = reduce(torch.promote_types, (q.dtype, r.dtype, torch.float32))
    return QRFunction.apply(a.to(q.device, dtype), known(q.to(dtype), r.to(dtype)))


def attach_cholesky(a: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """L of ``A = L L^H`` with the gradient of A [1]_, which is Hermitian, as in torch.

    With P the lower triangle of ``L^H dL``, its diagonal halved, ``dA = L^-H (P + P^H) L^-1 / 2``.

    Shapes: a (..., n, n), lower (..., n, n). Returns shape (..., n, n): at least float32.

    References
    ----------
    .. [1] I. Murray, "Differentiation of the Cholesky decomposition", 2016, formula 10.

    Examples
    --------
    >>> import torch
    >>> from neula.pipeline.gradients import attach_cholesky
    >>> A = torch.tensor([[4.0]], requires_grad=True)
    >>> L = attach_cholesky(A, torch.tensor([[2.0]]))
    >>> torch.autograd.grad(L.sum(), A)[0]  # of a square root
    tensor([[0.2500]])
    """
    dtype = torch.promote_types(lower.dtype, torch.float32)
    return CholeskyFunction.apply(a.to(lower.device, dtype), known(lower.to(dtype)))[0]


def attach_lu(a: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """L and U of ``A = L U``, rows of A being interchanged already, with the gradient of A."""
    return LUFunction.apply(a, known(lower, upper))


def attach_symmetric(a: torch.Tensor, symmetric: torch.Tensor) -> torch.Tensor:
    """A Hermitian matrix, made of one triangle of A, with a Hermitian gradient of A, as in torch."""
    return SymmetricFunction.apply(a.to(symmetric.dtype), known(symmetric))[0]


def attach_logdet(
    a: torch.Tensor, logdet: torch.Tensor, inverse: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """``log |det A|`` with the gradient of A, ``A^-H`` (Giles 2008, section 2.2.4), from a differentiable
    ``inverse``, called in the backward pass.

    A complex ``logdet`` is ``log |det A|`` plus i times the argument of the determinant.
    """
    return LogDeterminant.apply(a, known(logdet, again=inverse))[0]


def attach_polar(
    a: torch.Tensor, u: torch.Tensor, side: str | None, *, ranks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """U, and H of one side, of ``A = U H`` or ``A = H U`` with the gradient of A.

    Of a tall A ``dA = U Y + (I - U U^H) dU H^-1``, where Y solves ``H Y + Y H = U^H dU - dU^H U``: only sums
    of singular values are divided by [1]_. H is ``(U^H A + A^H U) / 2``, differentiated as such.

    Shapes: u (..., m, n). ``a``, shape (..., m, n): of full rank. ``side``, one of {"right", "left"}.
    ``ranks``, shape (...): below ``min(m, n)`` gradients are NaN. Returns u, shape (..., m, n): at least
    float32; h.

    References
    ----------
    .. [1] C. S. Kenney, A. J. Laub, "Polar decomposition and matrix sign function condition estimates", SIAM
       J. Sci. Stat. Comput. 12, 1991.

    Examples
    --------
    >>> import torch
    >>> from neula.pipeline.gradients import attach_polar
    >>> A = torch.tensor([[3.0], [4.0]], requires_grad=True)
    >>> U, H = attach_polar(A, torch.tensor([[0.6], [0.8]]), "right", ranks=torch.tensor(1))
    >>> torch.autograd.grad(H.sum(), A)[0].flatten()  # H is the norm of A
    tensor([0.6000, 0.8000])
    """
    dtype = torch.promote_types(u.dtype, torch.float32)
    a = a.to(u.device, dtype)
    u, _ = Polar.apply(a, known(u.to(dtype), ranks))
    return u, None if side is None else symmetric_part(a, u, side)


def attach_eigenvectors(
    a: torch.Tensor, w: torch.Tensor, v: torch.Tensor, *, errors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues w and eigenvectors V of a Hermitian A with its gradient, which is Hermitian, as in torch.

    ``dA = V (diag(dw) + F * (V^H dV)) V^H`` with ``F_ij = 1 / (w_j - w_i)`` [1]_. Where two eigenvalues are
    equal up to their errors, the quotient is zero if the loss depends on their subspace alone, and NaN
    otherwise; second derivatives are NaN there.

    Shapes: a (..., n, n), w, v (..., n) and (..., n, n). ``errors``, shape (..., n): bounds on the errors of
    w. Returns w, v: at least float32.

    References
    ----------
    .. [1] M. B. Giles, "Collected matrix derivative results for forward and reverse mode algorithmic
       differentiation", 2008, section 2.2.5.

    Examples
    --------
    >>> import torch
    >>> from neula.pipeline.gradients import attach_eigenvectors
    >>> A = torch.tensor([[4.0]], requires_grad=True)
    >>> known = torch.tensor([4.0]), torch.tensor([[1.0]])
    >>> w, V = attach_eigenvectors(A, *known, errors=torch.tensor([1e-6]))
    >>> torch.autograd.grad(w.sum(), A)[0]
    tensor([[1.]])
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    answer = w.to(v.device, dtype.to_real()), v.to(dtype), errors.to(v.device)
    found = EigenvectorsFunction.apply(a.to(v.device, dtype), known(*answer))
    return found[0], found[1]


def attach_pencil(
    a: torch.Tensor, b: torch.Tensor, w: torch.Tensor, v: torch.Tensor, *, errors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues and eigenvectors of ``A V = B V diag(w)`` with the gradients of A and B.

    They are those of ``L^-1 A L^-H`` with ``B = L L^H`` (:func:`attach_eigenvectors`).

    Shapes: w, v, errors (..., n), (..., n, n) and (..., n). ``a``, ``b``, shape (..., n, n): of which lower
    triangles are read.
    """
    wide = (in_double(x.to(v.device)) for x in (a, b))
    a, b = (attach_symmetric(x, hermitian_from_lower(x.detach())).to(in_double(v).dtype) for x in wide)
    lower = attach_cholesky(b, torch.linalg.cholesky(b.detach()))
    solve = torch.linalg.solve_triangular
    c = solve(lower, solve(lower, a, upper=False).mH, upper=False)
    w, y = attach_eigenvectors(c, w, exact_matmul(lower.detach().mH, in_double(v)), errors=errors)
    return w, solve(lower.mH, y, upper=True)


def attach_power(
    a: torch.Tensor, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, power: float
) -> torch.Tensor:
    """``X = A^p`` of a Hermitian A with its gradient, ``V (G * (V^H dX V)) V^H``, also for equal eigenvalues.

    G has the divided differences of ``w^p`` (Daleckii and Krein). Square roots and inverse square roots have
    gradients of any order, by Lyapunov equations; other powers have first derivatives.

    Shapes: a, x (..., n, n). ``w``, ``v``, shape (..., n) and (..., n, n): eigenvalues and eigenvectors of A.
    Returns shape (..., n, n): at least float32.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    return PowerFunction.apply(a.to(x.device, dtype), known(x.to(dtype), w, v, again=lambda: power))[0]


def attach_triplets(
    a: torch.Tensor, u: torch.Tensor, s: torch.Tensor, v: torch.Tensor, *, errors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """U, s and V of the leading singular triplets ``A V = U diag(s)`` with the gradient of A.

    Changes of U and V inside their subspaces divide by differences of singular values [1]_. Changes p and q
    out of them solve ``s p - D q = x`` and ``s q - D^H p = z``, where D is the rest of A, column by column.
    That divides by differences to the singular values that were not computed; conjugate gradients need only
    products with D. If no digit of a difference is guaranteed, or the loss depends on the common phase of a
    complex pair of singular vectors, gradients of U and V are NaN.

    Shapes: u, s, v (..., m, k), (..., k) and (..., n, k). ``a``, shape (..., m, n): with ``m >= n``.
    ``errors``, shape (..., k): bounds on the errors of s. Returns u, s, v: at least float32.

    References
    ----------
    .. [1] J. Townsend, "Differentiating the singular value decomposition", 2016.

    Examples
    --------
    >>> import torch
    >>> from neula.pipeline.gradients import attach_triplets
    >>> A = torch.tensor([[3.0], [4.0]], requires_grad=True)
    >>> known = torch.tensor([[0.6], [0.8]]), torch.tensor([5.0]), torch.tensor([[1.0]])
    >>> U, s, V = attach_triplets(A, *known, errors=torch.tensor([1e-6]))
    >>> torch.autograd.grad(s.sum(), A)[0].flatten()  # s is the norm of A
    tensor([0.6000, 0.8000])
    """
    dtype = torch.promote_types(u.dtype, torch.float32)
    answer = u.to(dtype), s.to(u.device, dtype.to_real()), v.to(u.device, dtype)
    found = TripletsFunction.apply(a.to(u.device, dtype), known(*answer, errors.to(u.device)))
    return found[0], found[1], found[2]


def symmetric_part(a: torch.Tensor, u: torch.Tensor, side: str) -> torch.Tensor:
    """``(U^H A + A^H U) / 2``, or for the left side ``(A U^H + U A^H) / 2``, differentiable."""
    h = exact_matmul(u.mH, a) if side == "right" else exact_matmul(a, u.mH)
    return (h + h.mH) / 2


def attach_solution(
    a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, *, ranks: torch.Tensor, factorize: Factorize
) -> torch.Tensor:
    """Least-squares solution ``x = A^+ b`` with the gradients of A and b [1]_.

    With ``y = A^+H dx`` it is ``db = y``, and ``dA = (b - A x) z^H - y x^H`` where ``z = A^+ y``. For the
    minimum-norm solution of a wide system, ``dA = w (dx - A^H y)^H - y x^H`` where ``w = A^+H x``. Both are
    computed in double precision through ``A = Q R``, or ``A^H = Q R``. Of a real operand beside a complex one
    the gradient is the real part.

    Shapes: a (..., m, n), b (..., m, k), x (..., n, k). ``ranks``, shape (...): of each matrix; zero where
    there is no solution. ``factorize``: QR factorization in double precision of tall matrices; called in the
    backward pass, which raises a ValueError instead if a solution counts whose rank is below ``min(m, n)``.
    Returns shape (..., n, k).

    References
    ----------
    .. [1] G. H. Golub, V. Pereyra, "The differentiation of pseudo-inverses and nonlinear least squares
       problems whose variables separate", 1973.
    """
    return Solution.apply(a, b, known(x, ranks, again=factorize))[0]


def attach_system(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, solve: Solve) -> torch.Tensor:
    """Solution ``x = A^-1 b`` of a linear system with the gradients of A and b [1]_.

    With ``A^H y = dx`` they are ``db = y`` and ``dA = -y x^H``.

    Shapes: a (..., n, n), b (..., n, k), x (..., n, k). ``solve``: solves for y in the backward pass. Returns
    shape (..., n, k).

    References
    ----------
    .. [1] M. B. Giles, "Collected matrix derivative results for forward and reverse mode algorithmic
       differentiation", 2008, section 2.3.1.

    Examples
    --------
    >>> import torch
    >>> from neula.pipeline.gradients import attach_system
    >>> A = torch.tensor([[4.0]], requires_grad=True)
    >>> x = attach_system(A, torch.tensor([[2.0]]), torch.tensor([[0.5]]), torch.linalg.solve)
    >>> torch.autograd.grad(x.sum(), A)[0]  # of 2 / A
    tensor([[-0.1250]])
    """
    return LinearSystem.apply(a, b, known(x, again=solve))[0]


def attach_product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, multiply: Multiply) -> torch.Tensor:
    """``C = alpha A B`` with the gradients of A and B, ``alpha dC B^H`` and ``alpha A^H dC``.

    Shapes: a (..., m, k), b (..., k, n), c (..., m, n). ``multiply``: how C was computed from A and B.
    Returns shape (..., m, n).
    """
    if a.ndim > 2 and b.ndim == 2:
        # One product for the gradient of B, not a sum over the batch.
        return ProductFunction.apply(a.flatten(0, -2), b, known(c.flatten(0, -2), again=multiply))[0].reshape(
            c.shape
        )
    return ProductFunction.apply(a, b, known(c, again=multiply))[0]


def stacked_problem(
    a: torch.Tensor, b: torch.Tensor, weights: torch.Tensor | None, damp: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[diag(w) A; damp I]`` and ``[diag(w) b; 0]`` in double precision: least squares without options.

    Shapes: a (..., m, n), b (..., m, k), weights (m,). Returns a, b: those that were given if there is
    neither.
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
