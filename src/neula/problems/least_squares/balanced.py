"""Weights, covariance, damping and constraints of a problem that is scaled by powers of two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from neula.algorithms.scaling import power_of_two_scales
from neula.kernels.shift import LIMIT, shift

ALIKE = 10
"""Columns whose sizes differ by fewer powers of two are not scaled before they are mixed by a null space."""

OF_ZERO = -4 * LIMIT
"""The exponent given to zero: less than that of any other number that occurs."""

DOMINATES = 40
"""Damping of ``2^40 ||A||`` leaves ``A^T A`` nothing of a solution in doubled arithmetic."""


@dataclass(frozen=True)
class Balanced:
    """``min ||A x - b||`` with columns of A and b whose largest elements are near 1.

    Attributes
    ----------
    a : Tensor, shape (..., m, n)
        Whitened and weighted, with the rows of the damping; attached to the graph of what was given.
    b : Tensor, shape (..., m, k)
    of_a : Tensor of int, shape (..., 1, n)
        Exponents by which the columns of A were divided; those of zero columns are ``OF_ZERO``.
    of_b : Tensor of int, shape (..., 1, k)
        Likewise.
    limited : Tensor of bool, shape (..., 1), or None
        Of which matrices the damping was limited; None for none.
    """

    a: torch.Tensor
    b: torch.Tensor
    of_a: torch.Tensor
    of_b: torch.Tensor
    limited: torch.Tensor | None = None

    @classmethod
    def from_arrays(
        cls,
        a: torch.Tensor,
        b: torch.Tensor,
        weights: torch.Tensor | None,
        damp: float,
        factor: torch.Tensor | None,
        *,
        limited: bool,
    ) -> Self:
        """Whiten, weigh, scale, and add the rows of the damping.

        Parameters
        ----------
        a : Tensor, shape (..., m, n)
        b : Tensor, shape (..., m, k)
        weights : Tensor, shape (m,), or None
        damp : float
        factor : Tensor, shape (m, m) or (m,), or None
            Lower Cholesky factor of a covariance, or standard deviations.
        limited : bool
            Whether damping far above A may be less: x is ``A^T b / damp^2``, up to ``||A||^2 / damp^2`` of
            itself, and is scaled by what the damping is divided by. There are no constraints then.
        """
        if factor is not None:
            weights = 1 / factor if factor.ndim == 1 else power_of_two_scales(factor.abs().amax(1))
        (a, of_a), (b, of_b) = _weighted(a, weights), _weighted(b, weights)
        if factor is not None and weights is not None and factor.ndim == 2:
            lower = factor * weights[:, None]
            a, b = (torch.linalg.solve_triangular(lower, x, upper=False) for x in (a, b))
        found = cls(a, b, of_a, of_b)
        found = found if factor is None or factor.ndim == 1 else found._rescaled()
        return found._damped(damp, limited=limited) if damp else found

    def _rescaled(self) -> Self:
        of_a, of_b = (exponents_of(x) for x in (self.a, self.b))
        a, b = power_of_two_times(self.a, -of_a), power_of_two_times(self.b, -of_b)
        return replace(self, a=a, b=b, of_a=self.of_a + of_a, of_b=self.of_b + of_b)

    def _damped(self, damp: float, *, limited: bool) -> Self:
        m, n = self.a.shape[-2:]
        fraction, exponent = torch.frexp(self.a.new_tensor(damp))
        excess = torch.zeros_like(self.of_a.sum(-1, keepdim=True))
        if limited and n:
            top = self.of_a.amax(-1, keepdim=True)
            excess = (exponent - top - DOMINATES - (m * n).bit_length()).clamp(min=0)
            excess = excess.masked_fill(top == OF_ZERO, 0)
        of_a = torch.maximum(self.of_a, exponent - excess)
        below = torch.diag_embed(shift(fraction.expand(of_a.shape), exponent - excess - of_a).squeeze(-2))
        a = torch.cat([power_of_two_times(self.a, self.of_a - of_a), below], -2)
        b = torch.cat([self.b, self.b.new_zeros(*self.b.shape[:-2], n, self.b.shape[-1])], -2)
        return replace(
            self,
            a=a,
            b=b,
            of_a=of_a + 2 * excess,
            limited=excess.squeeze(-2) > 0 if bool(excess.any()) else None,
        )

    @property
    def relative(self) -> torch.Tensor:
        """Exponents of the columns relative to the largest one, of all matrices, shape (n,): zeros where they
        are alike, and ``OF_ZERO`` of zero columns.
        """
        n = self.a.shape[-1]
        if not self.of_a.numel():
            return self.of_a.new_zeros(n)
        relative = (self.of_a - self.of_a.amax(-1, keepdim=True)).reshape(-1, n).amax(0)
        zero = (self.of_a == OF_ZERO).reshape(-1, n).all(0)
        alike = bool(((relative >= -ALIKE) | zero).all())
        return (torch.zeros_like(relative) if alike else relative).masked_fill(zero, OF_ZERO)

    def in_units(self, relative: torch.Tensor) -> Self:
        """The same, columns of A divided by the exponent of each matrix and these of all of them."""
        largest = self.of_a.amax(-1, keepdim=True) if self.of_a.numel() else self.of_a.sum(-1, keepdim=True)
        of_a = largest.masked_fill(largest == OF_ZERO, 0) + relative
        change = self.of_a - of_a
        a = power_of_two_times(self.a, change) if bool(change.any()) else self.a
        return replace(self, a=a, of_a=of_a)


def power_of_two_times(x: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """``x 2^e``, differentiable."""
    return shift.reference(x, exponents)


def exponents_of(x: torch.Tensor) -> torch.Tensor:
    """Binary exponents of the largest elements of columns, shape (..., 1, columns); 0 of zeros."""
    exponents = _exponents(x)
    return exponents.masked_fill(exponents == OF_ZERO, 0)


def lengths(x: torch.Tensor) -> torch.Tensor:
    """Norms of columns, shape (..., columns), whose squares may be out of range."""
    x = x.detach()
    largest = x.abs().amax(-2, keepdim=True) if x.shape[-2] else x.sum(-2, keepdim=True)
    return torch.linalg.vector_norm(x / largest.masked_fill(largest == 0, 1.0), dim=-2) * largest.squeeze(-2)


def _exponents(x: torch.Tensor) -> torch.Tensor:
    """Exponents of the largest finite elements of columns, shape (..., 1, columns); ``OF_ZERO`` for zeros."""
    exponents = torch.frexp(x.detach().nan_to_num(0.0, 0.0, 0.0))[1].masked_fill(x == 0, OF_ZERO)
    if not x.shape[-2]:
        return exponents.new_full((*x.shape[:-2], 1, x.shape[-1]), OF_ZERO)
    return exponents.amax(-2, keepdim=True)


def _weighted(x: torch.Tensor, weights: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """``diag(weights) X`` with scaled columns, and their exponents."""
    if weights is None:
        exponents = _exponents(x)
        return power_of_two_times(x, -exponents), exponents
    weights = weights.to(x.device, torch.float64).unsqueeze(-1)
    # By significands and exponents: neither the product nor its factors overflow.
    of_x, of_weights = (torch.frexp(y.detach().nan_to_num(0.0, 0.0, 0.0))[1] for y in (x, weights))
    product = power_of_two_times(x, -of_x) * power_of_two_times(weights, -of_weights)
    of_products = of_x + of_weights
    exponents = of_products.masked_fill(product == 0, OF_ZERO)
    exponents = exponents.amax(-2, keepdim=True) if x.shape[-2] else _exponents(x)
    return power_of_two_times(product, of_products - exponents), exponents
