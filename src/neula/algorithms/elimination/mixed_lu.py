"""LU of a matrix that butterflies have mixed, without interchanges, in double precision.

Pivots are what takes the time of a library's LU on a GPU (order 3000 on an H200: 9.3 ms, and 1.4 without), and
of a mixed matrix elements grow by some ``n^1.5`` at most, with high probability: of sixteen digits a dozen or
so are left. That is more than residuals in twice the working precision, or a few steps of refinement, need.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.algorithms.elimination.butterfly import TwoSided, padded
from neula.algorithms.triangular.inverted import InvertedBlocks, inverted_factors
from neula.engines import Tuning
from neula.kernels.butterfly import mixed
from neula.kernels.lu_block import lu_unpivoted
from neula.kernels.magnitudes import largest_magnitude
from neula.kernels.refining import over


@dataclass(frozen=True)
class MixedInverses:
    """``U^T diag(A, s I) V = (L R)^T``, to solve systems with A by products.

    Attributes
    ----------
    lower, upper : InvertedBlocks
        L and R.
    transform : TwoSided
    growth : Tensor, shape (1,)
        Largest element of R by that of A.
    """

    lower: InvertedBlocks
    upper: InvertedBlocks
    transform: TwoSided
    growth: torch.Tensor

    @classmethod
    def of(cls, a: torch.Tensor, size: torch.Tensor, tuning: Tuning) -> MixedInverses:
        """Of a matrix that may turn out to be singular: then solutions are not finite.

        Parameters
        ----------
        a : Tensor, shape (n, n)
            float64.
        size : Tensor, shape ()
            Of the elements of A, which those that it is bordered with have as well.
        tuning : Tuning
        """
        transform = TwoSided.random(len(a), a.device)
        # The transpose is factorized: what is mixed by rows is stored by columns for the library.
        lu = lu_unpivoted(_mixed(a, size, transform).T)
        order = len(lu)
        width = 0 if order <= tuning.inverted_whole else tuning.inverted_width(order)
        largest = over(_largest(lu.triu()), _largest(a))
        return cls(*inverted_factors(lu, lu.dtype, width or order), transform, largest[None])

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        """``A^-1 b`` for the columns of b, shape (1, n, k)."""
        return self.transform.solve(lambda x: self.lower.mT.solved(self.upper.mT.solved(x)), b[0])[None]

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        """``A^-T b``."""
        return self.transform.mT.solve(lambda x: self.upper.solved(self.lower.solved(x)), b[0])[None]


def _mixed(a: torch.Tensor, size: torch.Tensor, transform: TwoSided) -> torch.Tensor:
    """``U^T diag(A, s I) V``, row-major."""
    n, order = len(a), padded(len(a))
    work = a.new_empty(order, order)
    if order > n:
        work[n:], work[:n, n:] = 0, 0
        work[:n, :n], work.diagonal()[n:] = a, size
        a = work
    mixed(work, a, transform.left.transposed)
    transform.right.apply_transpose_(work.T)
    return work


def _largest(a: torch.Tensor) -> torch.Tensor:
    return largest_magnitude(a, (0, 1))
