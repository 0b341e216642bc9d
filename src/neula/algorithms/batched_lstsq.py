"""Many small least-squares problems at once: every step is one launch for the whole batch.

The corrected seminormal equations (Björck, "Stability analysis of the method of seminormal equations for
linear least squares problems", Linear Algebra Appl. 88/89, 1987): with R of a QR factorization of A solve
``R^T R dx = A^T (b - A x)``, and repeat with the true residual. Q is not needed, so R may come from any QR.
With ``W = A R^-1`` a step multiplies the error by ``I - W^T W``, of size ``u cond(A)`` for an R of unit
roundoff u, and ``u cond(A)^2`` for one of the normal equations; what remains are the rounding errors of the
residual, as with a stable direct solver.

Whether a step does so is measured: one more right-hand side travels along, whose solution is known.

Right-hand sides and solutions are rows here, not columns: products and norms then read memory along its rows,
which takes half the time on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from neula.algorithms.batched_qr import batched_qr
from neula.algorithms.cholesky_qr import upper_cholesky
from neula.algorithms.refinement import STAGNATION, Measures, Norms, over

MAX_STEPS = 10
"""A known solution that comes back to 1e-5 within so many steps does so at a rate of about 1/2 or better."""

SMALLEST = 0.5**0.5
"""Smallest singular value of ``A R^-1`` at that rate, the norm of ``I - W^T W`` being 1/2."""


@dataclass(frozen=True)
class BatchedSolution:
    """Outcome of :func:`refine_batch`.

    Attributes
    ----------
    x : Tensor, shape (batch, k, n)
    measures : Measures
        Tensors of shape (batch, k).
    residual : Tensor, shape (batch, k, m)
        ``b - A x``.
    probe_error : Tensor, shape (batch,)
        Relative error of the known solution, in the variables ``R x``.
    steps : int
    """

    x: torch.Tensor
    measures: Measures
    residual: torch.Tensor
    probe_error: torch.Tensor
    steps: int


class System(Protocol):
    """What is solved with R: :class:`Overdetermined` or :class:`Underdetermined`."""

    def expand(self, z: torch.Tensor) -> torch.Tensor:
        """The x with coordinates z."""

    def image(self, x: torch.Tensor) -> torch.Tensor:
        """The right-hand side of which x is the solution."""

    def evaluate(
        self, b: torch.Tensor, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, Measures]:
        """Coordinates of the correction that the residual asks for, and how good x is."""


class _Factored:
    """A batch of tall matrices A with R of each.

    Parameters
    ----------
    a : Tensor, shape (batch, m, n), m >= n
        float64, columns of comparable size.
    r : Tensor, shape (batch, n, n)
        Upper triangular, float64; accurate to any format.

    Attributes
    ----------
    inverse : Tensor, shape (batch, n, n)
        ``R^-1``: products with it take less time than triangular solves for single vectors.
    norm : Tensor, shape (batch, 1)
        ``||A||_2`` from below: ``||A||_4^2 / ||A||_F`` with the Schatten 4-norm, which is at least
        ``sqrt(2 / (1 + sqrt(n)))`` of it.
    condition : Tensor, shape (batch,)
        Condition number from above: ``||R||_F ||R^-1||_F``, at most n times as large.
    """

    def __init__(self, a: torch.Tensor, r: torch.Tensor) -> None:
        self.a = a
        identity = torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)
        self.inverse = torch.linalg.solve_triangular(r, identity, upper=True)
        norm = torch.linalg.matrix_norm
        size = norm(r)
        self.norm = over(norm(r.mT @ r), size)[:, None]
        self.condition = size * norm(self.inverse)


class Overdetermined(_Factored):
    """``min ||A x - b||``; the coordinates of x are ``R x``."""

    def expand(self, z: torch.Tensor) -> torch.Tensor:
        """``R^-1 z``."""
        return z @ self.inverse.mT

    def image(self, x: torch.Tensor) -> torch.Tensor:
        """``A x``."""
        return x @ self.a.mT

    def evaluate(
        self, b: torch.Tensor, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, Measures]:
        """``R^-T A^T r``, and backward error and optimality of each right-hand side."""
        gradient = residual @ self.a
        projected = gradient @ self.inverse
        norms = Norms(
            residual=_lengths(residual),
            gradient=_lengths(gradient),
            projected=_lengths(projected) / SMALLEST,
            image=self.norm * _lengths(x),
            b=_lengths(b),
        )
        return projected, norms.measures(self.norm)


class Underdetermined(_Factored):
    """``min ||x||`` subject to ``A^T x = b``: x is in the range of A, and has coordinates ``R^-T A^T x``."""

    def expand(self, z: torch.Tensor) -> torch.Tensor:
        """``A R^-1 z``."""
        return (z @ self.inverse.mT) @ self.a.mT

    def image(self, x: torch.Tensor) -> torch.Tensor:
        """``A^T x``."""
        return x @ self.a

    def evaluate(
        self, b: torch.Tensor, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, Measures]:
        """``R^-T r``, and ``||r|| / (||A|| ||x|| + ||b||)`` of each right-hand side."""
        error = over(_lengths(residual), self.norm * _lengths(x) + _lengths(b))
        return residual @ self.inverse, Measures(error, error)


def refine_batch(
    system: System,
    b: torch.Tensor,
    *,
    unknowns: int,
    tolerance: float,
    probe_tolerance: float,
    max_steps: int = MAX_STEPS,
    look: bool = True,
) -> BatchedSolution:
    """Solve and refine until each right-hand side meets the tolerance, or a step does not help it.

    A right-hand side that is done stays as it is: its solution does not depend on the rest of the batch.

    Parameters
    ----------
    system : System
    b : Tensor, shape (batch, k, m)
        float64.
    unknowns : int
        Columns of R.
    tolerance : float
        What backward error and optimality should be; the latter is out of reach where the residual is nothing
        but rounding errors.
    probe_tolerance : float
        What the relative error of the known solution should be.
    max_steps : int
    look : bool
        Stop when nothing is left to refine; without, the host does not wait for the device.

    Returns
    -------
    BatchedSolution
        NaN where R is singular or a problem holds NaN or Inf. Other problems are not affected.

    Examples
    --------
    >>> import torch
    >>> from neula.algorithms.batched_lstsq import Overdetermined, refine_batch
    >>> a = torch.tensor([[[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]], dtype=torch.float64)
    >>> b = torch.tensor([[[1.0, 3.0, 5.0]]], dtype=torch.float64)
    >>> system = Overdetermined(a, torch.linalg.qr(a, mode="r")[1])
    >>> found = refine_batch(system, b, unknowns=2, tolerance=1e-15, probe_tolerance=1e-5)
    >>> bool((found.x.flatten() - torch.tensor([1.0, 2.0])).abs().max() < 1e-14)
    True
    """
    known = _known_solution(unknowns, b.device)
    b = torch.cat([b, system.image(system.expand(known.expand(len(b), -1, -1)))], 1)
    residual = b
    x = system.expand(b.new_zeros(*b.shape[:2], unknowns))
    correction, measures = system.evaluate(b, x, residual)
    active = torch.ones_like(measures.optimality, dtype=torch.bool)
    best = torch.full_like(measures.optimality, torch.inf).expand(2, -1, -1)
    recovered = torch.zeros_like(known)
    steps = 0
    while steps < max_steps and (not look or bool(active.any())):
        steps += 1
        correction = torch.where(active[..., None], correction, 0.0)
        x = x + system.expand(correction)
        recovered = recovered + correction[:, -1:]
        residual = b - system.image(x)
        correction, measures = system.evaluate(b, x, residual)
        probe_error = _lengths(recovered - known) / _lengths(known)
        merits = _merits(measures, tolerance, probe_error / probe_tolerance)
        active &= (merits > 1).any(0) & (merits < STAGNATION * best).any(0)
        best = torch.minimum(best, merits)
    found = Measures(measures.backward_error[:, :-1], measures.optimality[:, :-1])
    return BatchedSolution(x[:, :-1], found, residual[:, :-1], probe_error[:, 0], steps)


def cholesky_r(a: torch.Tensor) -> torch.Tensor:
    """R of the normal equations: accurate to ``u cond(A)^2`` relative to its smallest singular value.

    One product and one small factorization. NaN where the Gram matrix is not positive definite.

    Parameters
    ----------
    a : Tensor, shape (batch, m, n)
        float64.
    """
    r, info = upper_cholesky(a.mT @ a)
    return r.masked_fill((info > 0)[:, None, None], torch.nan)


def householder_r(a: torch.Tensor) -> torch.Tensor:
    """R by the library's Householder reflections, in the precision of A, shape (batch, m, n)."""
    return torch.linalg.qr(a, mode="r")[1]


def gram_schmidt_r(a: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """R by :func:`batched_qr` in float32 or float64, returned in the precision of A, shape (batch, m, n)."""
    return batched_qr(a.to(dtype), overwrite_a=dtype != a.dtype)[1].to(a.dtype)


def _merits(measures: Measures, tolerance: float, probe: torch.Tensor) -> torch.Tensor:
    """Backward error and optimality of each right-hand side as multiples of what is asked for, not below 1.

    Shape (2, batch, k + 1); of the known solution it is the error that counts, in both places.
    """
    both = torch.stack([measures.backward_error, measures.optimality]) / tolerance
    both[..., -1:] = probe
    return both.clamp_min(1.0)


def _lengths(x: torch.Tensor) -> torch.Tensor:
    """Norms of the rows of each matrix of a batch."""
    return torch.linalg.vector_norm(x, dim=2)


@cache
def _known_solution(n: int, device: torch.device) -> torch.Tensor:
    """A random direction, shape (1, 1, n), kept for CUDA graphs, which read it where it was when they were
    recorded; the caller's random state stays untouched.
    """
    generator = torch.Generator("cpu").manual_seed(1)
    return torch.randn(1, 1, n, generator=generator, dtype=torch.float64, device="cpu").to(device)
