"""Backward errors of least squares with bounds: how far from the conditions of Karush, Kuhn and Tucker.

A point within the bounds is a solution where the gradient ``A^T r`` vanishes for variables between their
bounds, and pushes the others against theirs. What is left of the gradient after that, w, has to be explained
away. As without bounds, each explanation is a perturbation of the data with which the point is an exact
solution, and the smallest counts. D are the norms of the columns of A, ``B = A D^-1``, and errors are
relative to B and b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from neula.kernels.refining import over


@dataclass(frozen=True)
class KKTNorms:
    """Norms of each problem from which its backward error follows.

    Attributes
    ----------
    residual : Tensor, shape (C,)
        ``||r||``.
    wrong : Tensor, shape (C,)
        ``||D^-1 w||``.
    projected : Tensor, shape (C,)
        ``||P r||``, P the projector on the range of the columns whose gradient should vanish; infinite where
        that is not known.
    rest : Tensor, shape (C,)
        ``||D^-1 w||`` of the residual ``r - P r``.
    image : Tensor, shape (C,)
        ``||D x||``, which is at most ``||B|| ||D x||``.
    b : Tensor, shape (C,)
    """

    residual: torch.Tensor
    wrong: torch.Tensor
    projected: torch.Tensor
    rest: torch.Tensor
    image: torch.Tensor
    b: torch.Tensor

    @property
    def backward_error(self) -> torch.Tensor:
        """The smallest of three perturbations that make x a solution, shape (C,).

        ``-r w^T / ||r||^2`` takes w away and leaves the direction of the residual as it is (Stewart 1977,
        applied to w). Without a residual there is no gradient at all. And where r is nearly orthogonal to the
        columns that it should be orthogonal to, a change of b by ``P r`` makes it so, and what w is left goes
        as in the first.

        Examples
        --------
        >>> one, zero = torch.ones(1), torch.zeros(1)
        >>> KKTNorms(one, 1e-9 * one, 1e-12 * one, zero, one, one).backward_error
        tensor([5.0000e-13])
        """
        size = self.image + self.b
        orthogonal = (self.residual.square() - self.projected.square()).clamp(min=0.0).sqrt()
        found = torch.stack(
            [
                over(self.wrong, self.residual),
                over(self.residual, size),
                over(self.projected, size) + over(self.rest, orthogonal),
            ]
        )
        return torch.where(found.isnan(), torch.inf, found).amin(0)


def backward_error_of(
    *, residual: float, wrong: float, projected: float, rest: float, image: float, b: float
) -> float:
    """The same of one problem by numbers.

    Examples
    --------
    >>> backward_error_of(residual=1.0, wrong=1e-9, projected=1e-12, rest=0.0, image=1.0, b=1.0)
    5e-13
    """
    if not wrong or not residual:
        return 0.0
    orthogonal, size = math.sqrt(max(residual**2 - projected**2, 0.0)), image + b
    of_rest = rest / orthogonal if orthogonal else math.inf if rest else 0.0
    return min(wrong / residual, residual / size, projected / size + of_rest)
