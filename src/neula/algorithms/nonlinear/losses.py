"""Robust losses: what residuals cost beyond a scale at which they begin to be outliers.

B. Triggs, P. McLauchlan, R. Hartley, A. Fitzgibbon, "Bundle adjustment: a modern synthesis", Vision
Algorithms: Theory and Practice, 1999, section 4.3: near a point the sum of losses has the gradient, and
nearly the second derivatives, of a sum of squares with scaled residuals and Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

FLATTEST = 1e-6
"""The curvature of a loss, relative to its slope, is at least this: that of an outlier may vanish or be
negative, and scaled residuals are as much larger as the root of it is small."""

Rho = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # a loss of squares, and its first two derivatives


def linear(z: torch.Tensor) -> Rho:
    return z, torch.ones_like(z), torch.zeros_like(z)


def soft_l1(z: torch.Tensor) -> Rho:
    """``rho(z) = 2 (sqrt(1 + z) - 1)``: a smooth absolute value."""
    t = 1 + z
    # Not ``2 (sqrt(1 + z) - 1)``, of which nothing is left where z is small.
    return z / (t.sqrt() + 1) * 2, t**-0.5, -0.5 * t**-1.5


def huber(z: torch.Tensor) -> Rho:
    """``rho(z) = z`` up to 1, ``2 sqrt(z) - 1`` beyond."""
    inside, t = z <= 1, z.clamp(min=1.0)
    return (
        torch.where(inside, z, 2 * t.sqrt() - 1),
        torch.where(inside, 1.0, t**-0.5),
        torch.where(inside, 0.0, -0.5 * t**-1.5),
    )


def cauchy(z: torch.Tensor) -> Rho:
    t = 1 + z
    return z.log1p(), 1 / t, -1 / t**2


def arctan(z: torch.Tensor) -> Rho:
    """``rho(z) = arctan(z)``: an outlier costs no more than so much."""
    t = 1 + z**2
    return z.arctan(), 1 / t, -2 * z / t**2


LOSSES: dict[str, Callable[[torch.Tensor], Rho]] = {
    "linear": linear,
    "soft_l1": soft_l1,
    "huber": huber,
    "cauchy": cauchy,
    "arctan": arctan,
}


@dataclass(frozen=True)
class Loss:
    """``C^2 rho((f / C)^2)`` of each residual f, with a scale C.

    >>> loss, f = Loss(huber, torch.tensor(2.0)), torch.tensor([[1.0, 4.0]])
    >>> loss.cost(f), loss.size(f)
    (tensor([6.5000]), tensor([3.]))
    >>> loss.rooted(f)[0].square().sum() / 2
    tensor(6.5000)
    """

    rho: Callable[[torch.Tensor], Rho] | None  # None for least squares
    scale: torch.Tensor  # broadcasts against residuals, shape (batch, m)

    def cost(self, f: torch.Tensor) -> torch.Tensor:
        """Half the sum of losses, shape (batch,)."""
        if self.rho is None:
            return 0.5 * f.square().sum(-1)
        return 0.5 * (self.scale**2 * self.rho((f / self.scale).square())[0]).sum(-1)

    def weights(self, f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors of the rows of the Jacobian, and of the residuals."""
        if self.rho is None:
            one = torch.ones_like(f)
            return one, one
        _, first, second = self.rho((f / self.scale).square())
        curvature = first + 2 * second * (f / self.scale).square()
        rows = torch.maximum(curvature, FLATTEST * first).sqrt()
        return rows, torch.where(rows > 0, first / rows, 0.0)

    def rooted(self, f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Residuals whose squares are the losses of f, with the signs of f, and their derivatives by f.

        For programs that minimize squares and nothing else.
        """
        if self.rho is None:
            return f, torch.ones_like(f)
        loss, slope, _ = self.rho((f / self.scale).square())
        found = torch.copysign(self.scale * loss.sqrt(), f)
        return found, torch.where(found != 0, slope * f / found, 1.0)

    def size(self, f: torch.Tensor) -> torch.Tensor:
        """Length of the residuals, each weighted by the slope of its loss, shape (batch,)."""
        if self.rho is None:
            return torch.linalg.vector_norm(f, dim=-1)
        slope = self.rho((f / self.scale).square())[1]
        return torch.linalg.vector_norm(slope.sqrt() * f, dim=-1)
