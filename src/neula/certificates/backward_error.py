"""Normwise backward errors, of least-squares problems and of linear systems: which perturbation of the data
makes x exact. A refinement stops where it is small enough, and its result is judged by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from neula.engines.reduction import HERE, Reduction
from neula.kernels.small_problems.refining import over


@dataclass(frozen=True)
class Scale:
    """Norms against which errors are measured."""

    # Shape (n,): column scales D: every measure is that of the problem min ||(A D) y - b||, so that a column
    # in small units counts as much as one in large units.
    columns: torch.Tensor
    norm: float  # ||A D||_2
    # Smallest singular value of A R^-1, by which ||R^-H A^H r|| may be smaller than the projection of r on
    # the range of A.
    smallest: float = 1.0


@dataclass
class Measures:
    backward_error: torch.Tensor  # shape (k,)
    optimality: torch.Tensor  # shape (k,)

    def where(self, known: torch.Tensor) -> Measures:
        return Measures(*(x.masked_fill(~known, torch.inf) for x in (self.backward_error, self.optimality)))


@dataclass
class Norms:
    """Norms of each right-hand side from which all measures follow."""

    # residual, gradient, projected, shape (k,): ||r||, ||D A^H r|| and ||P r||, P the projector on the range
    # of A.
    residual: torch.Tensor
    gradient: torch.Tensor
    projected: torch.Tensor
    image: torch.Tensor  # shape (k,): ||A D||_2 ||D^-1 x||
    b: torch.Tensor  # shape (k,)

    @property
    def stacked(self) -> torch.Tensor:
        return torch.stack([self.residual, self.gradient, self.projected, self.image, self.b])

    def measures(self, norm: float | torch.Tensor) -> Measures:
        """Upper bounds on the normwise backward error of x, the smallest of three counting.

        ``norm`` is ``||A D||_2``. The perturbation ``E = -r r^H A / ||r||^2`` makes x exact and has norm
        ``||A^H r|| / ||r||`` (Stewart, 1977); changing b by the residual does so too; and the optimal
        perturbation is at most ``||P r|| / ||x||`` (Walden, Karlson, Sun, 1995).
        """
        optimality = over(self.gradient, norm * self.residual)
        consistent, projected = over(self.residual, self.image + self.b), over(self.projected, self.image)
        return Measures(torch.minimum(torch.minimum(optimality, consistent), projected), optimality)


def norms_of(
    scale: Scale,
    b: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    gradient: torch.Tensor,
    projected: torch.Tensor,
    over_rows: Reduction = HERE,
) -> Norms:
    """Norms of ``b``, ``x``, ``b - A x``, ``A^H (b - A x)`` and the projection of the residual.

    The projection on the range of A comes in coordinates: ``R^-H A^H r``, or ``U^H r`` with a basis U.
    """
    norm = torch.linalg.vector_norm
    residual_norm, b_norm = over_rows.norms(residual, b)
    return Norms(
        residual=residual_norm,
        gradient=norm(gradient * scale.columns[:, None], dim=0),
        projected=norm(projected, dim=0),
        image=scale.norm * norm(x / scale.columns[:, None], dim=0),
        b=b_norm,
    )


@dataclass(frozen=True)
class Scaling:
    """One of the scalings ``R A C`` of A in which errors are measured, R and C being diagonal."""

    norm: torch.Tensor  # shape (), of a batch (P, 1): ||R A C|| in the infinity norm
    # rows, columns, shape (n,) or (P, n): their diagonals; None for the identity.
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None

    def backward_error(self, b: torch.Tensor, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``||r|| / (||A|| ||x|| + ||b||)`` (Rigal and Gaches, 1967), shape (..., k)."""
        return over(self._image_norm(residual), self.norm * self._solution_norm(x) + self._image_norm(b))

    def condition_at_least(self, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``||A|| ||x|| / ||b||``, which the condition number exceeds if ``A x = b``, shape (..., k)."""
        return over(self.norm * self._solution_norm(x), self._image_norm(b))

    def _image_norm(self, b: torch.Tensor) -> torch.Tensor:
        return (b if self.rows is None else b * self.rows[..., None]).abs().amax(-2)

    def _solution_norm(self, x: torch.Tensor) -> torch.Tensor:
        return (x if self.columns is None else x / self.columns[..., None]).abs().amax(-2)


def backward_error(
    scalings: Sequence[Scaling], b: torch.Tensor, x: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    """The largest backward error over all scalings, shape (..., k); infinite where x is not finite."""
    errors = torch.stack([scaling.backward_error(b, x, residual) for scaling in scalings])
    return errors.amax(0).nan_to_num(math.inf, math.inf)
