"""Steps that stay within bounds: variables that would leave are held, the others move.

D. P. Bertsekas, "Projected Newton methods for optimization problems with simple constraints", SIAM J. Control
Optim. 20, 1982. A variable at its bound is held while the gradient, or the step itself, points outside. The
step of the others is cut at the bounds, in one of two ways, whichever promises more: each variable by itself,
or all of them together at the first bound that is met.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.algorithms.nonlinear.damped import damped_steps, triangle


@dataclass(frozen=True)
class Bounds:
    # lower, upper, shape (batch, n): may be infinite.
    lower: torch.Tensor
    upper: torch.Tensor
    none: bool  # whether all are

    @classmethod
    def from_arrays(cls, lower: torch.Tensor, upper: torch.Tensor) -> Bounds:
        """Bounds, and whether there are any: determined once."""
        return cls(lower, upper, bool(lower.isneginf().all() and upper.isposinf().all()))

    def at(self, which: torch.Tensor) -> Bounds:
        return self if self.none else Bounds(self.lower[which], self.upper[which], self.none)

    def clip(self, x: torch.Tensor) -> torch.Tensor:
        """The nearest x within the bounds."""
        return x if self.none else torch.minimum(torch.maximum(x, self.lower), self.upper)

    def held(self, x: torch.Tensor, downhill: torch.Tensor) -> torch.Tensor:
        """Which variables are at a bound beyond which a direction leads."""
        if self.none:
            return torch.zeros_like(x, dtype=torch.bool)
        return ((x <= self.lower) & (downhill < 0)) | ((x >= self.upper) & (downhill > 0))


@dataclass(frozen=True)
class Quadratic:
    """Model ``||R p + c||^2 / 2`` of a sum of squares near a point, with the shape of its trust region."""

    r: torch.Tensor  # shape (batch, n, n)
    c: torch.Tensor  # shape (batch, n)
    scale: torch.Tensor  # shape (batch, n)

    def decrease(self, p: torch.Tensor) -> torch.Tensor:
        image = (self.r @ p[..., None])[..., 0]
        return -0.5 * (image * (2 * self.c + image)).sum(1)

    def steps(
        self, held: torch.Tensor, radius: torch.Tensor, damping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Damped steps in which some variables do not move."""
        r, c = without(self.r, self.c, held)
        p, damping = damped_steps(r, c, self.scale, radius, damping)
        return p.masked_fill(held, 0.0), damping


def without(r: torch.Tensor, c: torch.Tensor, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """R and c where some variables, a mask of shape (batch, n), are held: these have a row of the identity,
    and nothing to do with others.
    """
    if not bool(held.any()):
        return r, c
    moving = torch.cat([r.masked_fill(held[:, None, :], 0.0), c[..., None]], -1)
    fixed = torch.nn.functional.pad(torch.diag_embed(held.to(r.dtype)), (0, 1))
    return triangle(torch.cat([moving, fixed], -2))


def feasible_steps(
    x: torch.Tensor, model: Quadratic, bounds: Bounds, radius: torch.Tensor, damping: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Damped steps from x, within the bounds, that end within them; and the damping, shape (batch,)."""
    if bounds.none:
        return damped_steps(model.r, model.c, model.scale, radius, damping)
    gradient = (model.r.mT @ model.c[..., None])[..., 0]
    held = bounds.held(x, -gradient)
    while True:
        p, found = model.steps(held, radius, damping)
        # At least one variable with a gradient moves downhill, so not all are held in the end.
        more = bounds.held(x, p) & ~held
        if not bool(more.any()):
            break
        held |= more
    room = torch.where(p > 0, bounds.upper - x, bounds.lower - x)
    part = torch.where(p == 0, torch.inf, room / p).amin(1).clamp(max=1.0)
    together, apart = part[:, None] * p, bounds.clip(x + p) - x
    better = model.decrease(apart) >= model.decrease(together)
    return torch.where(better[:, None], apart, together), found
