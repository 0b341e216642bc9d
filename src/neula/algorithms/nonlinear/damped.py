"""Steps of Levenberg and Marquardt from the triangular factor of a Jacobian.

J. J. Moré, "The Levenberg-Marquardt algorithm: implementation and theory", Numerical Analysis, Lecture Notes
in Mathematics 630, 1978. With ``J = Q R`` and ``c = Q^T f`` a step minimizes ``||R p + c||`` within ``||D p||
<= radius``. It is ``p(lambda)``, the solution of least squares with the matrix ``[R; sqrt(lambda) D]``, for
the one damping lambda at which it reaches the radius. Each trial of a lambda is a QR of that small matrix:
``J^T J``, whose condition number is the square of that of J, is never formed.
"""

from __future__ import annotations

import torch

CLOSE = 0.1  # the length of a step may differ from the radius by this part of it
TRIALS = 10  # of a damping; Newton's method on the reciprocal of the length takes two on average
norm = torch.linalg.vector_norm


def damped_steps(
    r: torch.Tensor, c: torch.Tensor, scale: torch.Tensor, radius: torch.Tensor, damping: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Minimize ``||R p + c||`` subject to ``||D p|| <= radius``, for each problem of a batch.

    R is upper triangular, and may be singular; ``scale`` is the diagonal of D, and ``damping`` an initial
    guess. Returns p, within 1.1 times the radius, and the damping: zero where the Gauss-Newton step is short
    enough.

    >>> r, c = torch.eye(2).double()[None], torch.tensor([[3.0, 4.0]]).double()
    >>> one = torch.ones(1).double()
    >>> p, damping = damped_steps(r, c, torch.ones(1, 2).double(), one, 0 * one)
    >>> bool(abs(norm(p) - 1) <= CLOSE), bool(abs(damping - 4) < 1)
    (True, True)
    """
    b = r / scale[:, None, :]
    q = -upper_solve(b, c)
    length = norm(q, dim=1)
    # Not "longer": of a singular R it is NaN.
    todo = (~(length <= (1 + CLOSE) * radius)).nonzero()[:, 0]
    found = torch.zeros_like(radius)
    if len(todo):
        q[todo], found[todo] = _on_the_boundary(
            b[todo], c[todo], radius[todo], damping[todo], q[todo], length[todo]
        )
    return q / scale, found


def upper_solve(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``R^-1 c`` of each problem of a batch."""
    return torch.linalg.solve_triangular(r, c[..., None], upper=True)[..., 0]


def triangle(stack: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """R and ``Q^T c`` of matrices with c as their last column, by reflections; shape (batch, m, n + 1)."""
    m, n = stack.shape[-2], stack.shape[-1] - 1
    if m < n:
        stack = torch.nn.functional.pad(stack, (0, 0, 0, n - m))
    # Not ``torch.linalg.qr``, whose ``triu`` starts all threads of a CPU for a few elements.
    r, order = torch.geqrf(stack)[0][:, :n], torch.arange(n, device=stack.device)
    return r[:, :, :n].masked_fill(order < order[:, None], 0.0), r[:, :, n].clone()


def _on_the_boundary(
    b: torch.Tensor,
    c: torch.Tensor,
    radius: torch.Tensor,
    damping: torch.Tensor,
    newton: torch.Tensor,
    length: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the damping, between bounds that close in on it (Moré's section 5)."""
    tiny = torch.finfo(b.dtype).tiny
    gradient = norm((b.mT @ c[..., None])[..., 0], dim=1)
    upper = (gradient / radius).clamp(min=tiny)
    slope = _slope(b, newton, length)
    lower = torch.nan_to_num((length - radius) / (radius * slope), 0.0, 0.0, 0.0)
    damping = torch.minimum(torch.maximum(damping, lower), upper)
    damping = torch.where(damping > 0, damping, torch.nan_to_num(gradient / length, 0.0, 0.0, 0.0))
    steps, before = torch.zeros_like(c), length - radius
    todo = torch.arange(len(c), device=c.device)
    for _ in range(TRIALS):
        damping[todo] = torch.where(damping[todo] > 0, damping[todo], (1e-3 * upper[todo]).clamp(min=tiny))
        s, d = _damped_factor(b[todo], c[todo], damping[todo])
        q = -upper_solve(s, d)
        steps[todo] = q
        size = norm(q, dim=1)
        excess = size - radius[todo]
        # A step that is too short and becomes shorter: the gradient is orthogonal to where it would grow.
        short = (lower[todo] == 0) & (excess <= before[todo]) & (before[todo] < 0)
        left = ~((excess.abs() <= CLOSE * radius[todo]) | short | (q == 0).all(1) | ~size.isfinite())
        before[todo] = excess
        lower[todo] = torch.where(excess > 0, torch.maximum(lower[todo], damping[todo]), lower[todo])
        upper[todo] = torch.where(excess < 0, torch.minimum(upper[todo], damping[todo]), upper[todo])
        next_one = damping[todo] + excess / (radius[todo] * _slope(s, q, size))
        todo = todo[left]
        if not len(todo):
            break
        damping[todo] = torch.maximum(lower[todo], torch.nan_to_num(next_one[left], 0.0, 0.0, 0.0))
    return steps, damping


def _slope(s: torch.Tensor, q: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """``||S^-T q||^2 / ||q||^2``: how the length of a step answers to the damping."""
    direction = q / length[:, None]
    w = torch.linalg.solve_triangular(s.mT, direction[..., None], upper=False)[..., 0]
    return norm(w, dim=1).square()


def _damped_factor(
    b: torch.Tensor, c: torch.Tensor, damping: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triangular factor of ``[B; sqrt(lambda) I]``, and the right-hand side that belongs to it."""
    n = b.shape[-1]
    stack = b.new_zeros(len(b), 2 * n, n + 1)
    stack[:, :n, :n], stack[:, :n, n] = b, c
    stack[:, n:, :n].diagonal(dim1=1, dim2=2).copy_(damping.sqrt()[:, None].expand(-1, n))
    return triangle(stack)


def picked(x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """The entries of the problems ``which``; x itself if these are all."""
    return x if which.shape[0] == x.shape[0] else x[which]


def placed(x: torch.Tensor, which: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A tensor like x with other values for problems ``which``; of all of them the values themselves."""
    return values if which.shape[0] == x.shape[0] else x.index_copy(0, which, values)
