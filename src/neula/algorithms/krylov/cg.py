"""Conjugate gradients for several right-hand sides at once, each with coefficients of its own.

Hestenes and Stiefel, "Methods of conjugate gradients for solving linear systems", J. Res. Nat. Bur. Standards
49, 1952, preconditioned: one product with A and one solve with its factors an iteration, and no basis to
keep.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import pad

from neula.algorithms.krylov.gmres import goes_on
from neula.kernels.small_problems.refining import over

Operator = Callable[[torch.Tensor], torch.Tensor]
"""Applies a matrix to the columns of another, shape (n, k)."""

Late = Callable[[], tuple[torch.Tensor, float] | None]
"""Right-hand sides that join now, shape (n, m), and their tolerance: m = 0 as long as they are not known.
None says that there will be none any more."""

Error = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From x and the residual, shape (n, k), how far each column is from being done, shape (k,)."""


def cg(
    operator: Operator,
    preconditioner: Operator,
    b: torch.Tensor,
    *,
    tolerance: float | torch.Tensor,
    max_iterations: int,
    late: Late | None = None,
    error: Error | None = None,
) -> tuple[torch.Tensor, int]:
    """Solve ``A x = b``, shape (n, k), until every column of the residual of the recurrence is small enough.

    A is Hermitian positive definite, and so is the ``preconditioner``, close to ``A^-1``. The ``tolerance``,
    shape (k,), is that of norms of residuals relative to b, or of what ``error`` makes of the columns of b.
    It ends earlier as soon as the rate of convergence says that ``max_iterations`` will not be enough.
    ``late`` is asked after each iteration for other right-hand sides, and iterations continue until all have
    joined: without them they might end before anything is seen of the smallest eigenvalues. Returns x, with
    more columns at the end where others have joined, and how often the operator was applied.

    Examples
    --------
    >>> a = torch.diag(torch.arange(1.0, 4.0, dtype=torch.float64))
    >>> b = torch.ones_like(a[:, :1])
    >>> x, iterations = cg(lambda p: a @ p, lambda r: r, b, tolerance=1e-12, max_iterations=9)
    >>> x[:, 0], iterations
    (tensor([1.0000, 0.5000, 0.3333], dtype=torch.float64), 3)
    """
    aim = torch.as_tensor(tolerance, dtype=b.dtype.to_real(), device="cpu").expand(b.shape[1]).numpy()
    x, residual = torch.zeros_like(b), b
    start, k = torch.linalg.vector_norm(b, dim=0), b.shape[1]
    solved = preconditioner(residual)
    direction, product = solved, inner(residual, solved)
    iterations = 0
    while iterations < max_iterations:
        image = operator(direction)
        iterations += 1
        # A column that is done has no direction left: zero over zero is zero.
        step = over(product, inner(direction, image))
        x = x + step * direction
        residual = residual - step * image  # not in place: a preconditioner may return its argument
        left = over(torch.linalg.vector_norm(residual, dim=0), start)
        if error is not None:
            left[:k] = error(x[:, :k], residual[:, :k])
        joining = None if late is None else late()
        # NaN ends it too: the caller measures what came of it. Residuals go up and down, so that the latest
        # rate says nothing.
        if joining is None and not goes_on(
            left.cpu().numpy(), aim, iterations, max_iterations, np.ones_like(aim)
        ):
            break
        if joining is not None and joining[0].shape[1]:
            others, theirs = joining
            count = others.shape[1]
            # A direction of zeros before, so that their first one is what the preconditioner makes of them.
            x, direction = (pad(y, (0, count)) for y in (x, direction))
            product = pad(product, (0, count), value=1.0)
            residual, aim = torch.cat([residual, others], 1), np.append(aim, np.full(count, theirs))
            start = torch.cat([start, torch.linalg.vector_norm(others, dim=0)])
        solved = preconditioner(residual)
        before, product = product, inner(residual, solved)
        direction = solved + over(product, before) * direction
    return x, iterations


def inner(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Real parts of the inner products ``x^H y`` of columns: all of them where y is a Hermitian A times x."""
    return (x.conj() * y).sum(0).real
