"""Gradients: answers that were computed without autograd are attached to the graph of their input.

Every function here takes an answer and the input it was computed from, and returns the same numbers with a
gradient. The backward formulas are differentiable operations on what was saved, so that gradients have
gradients, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch
from torch.autograd import Function

from neula.kernels.precision import exact_matmul

Factorize = Callable[[torch.Tensor], Iterable[torch.Tensor]]
"""QR factorization ``A -> Q, R`` of batches in double precision, differentiable."""

Solve = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Solution of ``A x = b`` for batches in double precision, differentiable."""

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Product of batches, broadcast and differentiable."""


def attach_factors(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and R of ``A = Q R`` with the gradient of A.

    With ``M = R dR^T - dQ^T Q`` and C the symmetric matrix that has the lower triangle of M,
    ``dA = (dQ + Q C) R^-T`` [1]_. Of a wide matrix ``[X, Y] = Q [U, V]``, Q and U are the factors of X, and
    ``V = Q^T Y``.

    Parameters
    ----------
    a : Tensor, shape (..., m, n)
    q : Tensor, shape (..., m, k)
        With ``k = min(m, n)``.
    r : Tensor, shape (..., k, n)
        Its leading k columns upper triangular; where they are singular, the gradient is Inf or NaN.

    Returns
    -------
    q, r : Tensor
        In their common dtype, at least float32.

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
    return _Factors.apply(a.to(q.device, dtype), q.to(dtype), r.to(dtype))


def attach_cholesky(a: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """L of ``A = L L^T`` with the gradient of A [1]_, which is symmetric, as in torch.

    With P the lower triangle of ``L^T dL``, its diagonal halved, ``dA = L^-T (P + P^T) L^-1 / 2``.

    Parameters
    ----------
    a : Tensor, shape (..., n, n)
    lower : Tensor, shape (..., n, n)

    Returns
    -------
    Tensor, shape (..., n, n)
        At least float32.

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
    return _Cholesky.apply(a.to(lower.device, dtype), lower.to(dtype))


def attach_solution(
    a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, *, ranks: torch.Tensor, factorize: Factorize
) -> torch.Tensor:
    """Least-squares solution ``x = A^+ b`` with the gradients of A and b [1]_.

    With ``y = A^+T dx`` it is ``db = y``, and ``dA = (b - A x) z^T - y x^T`` where ``z = A^+ y``. For the
    shortest solution of a wide system, ``dA = w (dx - A^T y)^T - y x^T`` where ``w = A^+T x``. Both are
    computed in double precision through ``A = Q R``, or ``A^T = Q R``.

    Parameters
    ----------
    a : Tensor, shape (..., m, n)
    b : Tensor, shape (..., m, k)
    x : Tensor, shape (..., n, k)
    ranks : Tensor, shape (...)
        Of each matrix; zero where there is no solution.
    factorize : callable
        QR factorization in double precision of tall matrices; called in the backward pass, which raises a
        ValueError instead if a solution counts whose rank is below ``min(m, n)``.

    Returns
    -------
    Tensor, shape (..., n, k)

    References
    ----------
    .. [1] G. H. Golub, V. Pereyra, "The differentiation of pseudo-inverses and nonlinear least squares
       problems whose variables separate", 1973.
    """
    return _Solution.apply(a, b, x, ranks, factorize)


def attach_system(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, solve: Solve) -> torch.Tensor:
    """Solution ``x = A^-1 b`` of a linear system with the gradients of A and b [1]_.

    With ``A^T y = dx`` they are ``db = y`` and ``dA = -y x^T``.

    Parameters
    ----------
    a : Tensor, shape (..., n, n)
    b : Tensor, shape (..., n, k)
    x : Tensor, shape (..., n, k)
    solve : callable
        Solves for y in the backward pass.

    Returns
    -------
    Tensor, shape (..., n, k)

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
    return _System.apply(a, b, x, solve)


def attach_product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, multiply: Multiply) -> torch.Tensor:
    """``C = alpha A B`` with the gradients of A and B, ``alpha dC B^T`` and ``alpha A^T dC``.

    Parameters
    ----------
    a : Tensor, shape (..., m, k)
    b : Tensor, shape (..., k, n)
    c : Tensor, shape (..., m, n)
    multiply : callable
        How C was computed from A and B.

    Returns
    -------
    Tensor, shape (..., m, n)
    """
    if a.ndim > 2 and b.ndim == 2:
        # One product for the gradient of B, not a sum over the batch.
        rows = _Product.apply(a.flatten(0, -2), b, c.flatten(0, -2), multiply)
        return rows.reshape(c.shape)
    return _Product.apply(a, b, c, multiply)


def stacked_problem(
    a: torch.Tensor, b: torch.Tensor, weights: torch.Tensor | None, damp: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[diag(w) A; damp I]`` and ``[diag(w) b; 0]`` in double precision: least squares without options.

    Parameters
    ----------
    a : Tensor, shape (..., m, n)
    b : Tensor, shape (..., m, k)
    weights : Tensor, shape (m,), optional
    damp : float

    Returns
    -------
    a, b : Tensor
        Those that were given if there is neither.
    """
    if weights is not None:
        factors = weights.to(a.device, torch.float64).unsqueeze(-1)
        a, b = factors * a, factors * b
    if damp:
        batch, n = a.shape[:-2], a.shape[-1]
        eye = torch.eye(n, dtype=torch.float64, device=a.device)
        a = torch.cat([a.double(), (damp * eye).expand(*batch, n, n)], -2)
        b = torch.cat([b.double(), eye.new_zeros(*batch, n, b.shape[-1])], -2)
    return a, b


class _Factors(Function):
    @staticmethod
    def forward(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q.detach(), r.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        q, r = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            return _gradient_of_matrix(q, r, *gradients), None, None


def _gradient_of_matrix(q: torch.Tensor, r: torch.Tensor, dq: torch.Tensor, dr: torch.Tensor) -> torch.Tensor:
    k = q.shape[-1]
    if r.shape[-1] > k:
        (u, v), (du, dv) = (x.tensor_split([k], -1) for x in (r, dr))
        dx = _gradient_of_matrix(q, u, dq + exact_matmul(q, exact_matmul(v, dv.mT)), du)
        return torch.cat([dx, exact_matmul(q, dv)], -1)
    m = exact_matmul(r, dr.mT) - exact_matmul(dq.mT, q)
    symmetric = m.tril() + m.tril(-1).mT
    right = dq + exact_matmul(q, symmetric)
    return torch.linalg.solve_triangular(r.mT, right, upper=False, left=False)


class _Cholesky(Function):
    @staticmethod
    def forward(a: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
        return lower.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (lower,) = ctx.saved_tensors
        with torch.autocast(lower.device.type, enabled=False):
            p = exact_matmul(lower.mT, gradient.tril()).tril()
            # P + P^T with the diagonal of P halved.
            symmetric = p + p.tril(-1).mT
            solve = torch.linalg.solve_triangular
            left = solve(lower.mT, symmetric, upper=True)
            return 0.5 * solve(lower, left, upper=False, left=False), None


class _Solution(Function):
    @staticmethod
    def forward(
        a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, ranks: torch.Tensor, factorize: Factorize
    ) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        a, b, _, ctx.ranks, ctx.factorize = inputs
        ctx.save_for_backward(a, b, output)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b, x = ctx.saved_tensors
        deficient = ctx.ranks.to(a.device) < min(a.shape[-2:])
        if bool(deficient.any()):
            _refuse_where(deficient & (dx != 0).flatten(-2).any(-1), ctx.ranks, a.shape)
            # Nobody asks for their gradients, which are zero: those of any matrix of full rank will do.
            instead = torch.eye(*a.shape[-2:], dtype=a.dtype, device=a.device)
            keep = ~deficient[..., None, None]
            a, b, x = (torch.where(keep, t, u) for t, u in ((a, instead), (b, 0.0), (x, 0.0)))
        system = a.double(), b.double(), x.double()
        da, db = _gradients_of_system(*system, dx.double(), ctx.factorize)
        return da.to(a.dtype), db.to(b.dtype), None, None, None


def _refuse_where(refused: torch.Tensor, ranks: torch.Tensor, shape: torch.Size) -> None:
    if not bool(refused.any()):
        return
    index = refused.nonzero()[0].tolist()
    name = f"A[{', '.join(map(str, index))}]" if index else "A"
    raise ValueError(
        f"{name} has rank {int(ranks[tuple(index)])}, not {min(shape[-2:])}, and the solution has no "
        "gradient where the rank can change: leave dependent columns out, or pass damp="
    )


def _gradients_of_system(
    a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, dx: torch.Tensor, factorize: Factorize
) -> tuple[torch.Tensor, torch.Tensor]:
    solve = torch.linalg.solve_triangular
    if a.shape[-2] >= a.shape[-1]:
        q, r = factorize(a)
        c = solve(r.mT, dx, upper=False)
        y, z = q @ c, solve(r, c, upper=True)
        return (b - a @ x) @ z.mT - y @ x.mT, y
    q, r = factorize(a.mT)
    c = q.mT @ dx
    y = solve(r, c, upper=True)
    w = solve(r, solve(r.mT, b, upper=False), upper=True)
    return w @ (dx - q @ c).mT - y @ x.mT, y


class _System(Function):
    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, solve: Solve) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        a, b, _, ctx.solve = inputs
        ctx.dtype_of_b = b.dtype
        ctx.save_for_backward(a, output)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, x = ctx.saved_tensors
        y = ctx.solve(a.double().mT, dx.double())
        da = (-y @ x.double().mT).to(a.dtype) if ctx.needs_input_grad[0] else None
        return da, y.to(ctx.dtype_of_b), None, None


class _Product(Function):
    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, multiply: Multiply) -> torch.Tensor:
        return c.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        a, b, _, ctx.multiply = inputs
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, dc: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        for_a, for_b = ctx.needs_input_grad[:2]
        da = ctx.multiply(dc, b.mT).sum_to_size(a.shape).to(a) if for_a else None
        db = ctx.multiply(a.mT, dc).sum_to_size(b.shape).to(b) if for_b else None
        return da, db, None, None
