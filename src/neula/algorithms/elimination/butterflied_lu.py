"""LU of a matrix that butterflies have mixed, without interchanges, in double precision.

Pivots are what takes the time of a library's LU on a GPU (order 3000 on an H200: 9.3 ms, and 1.4 without).
Elements of a mixed matrix grow by some ``n^1.5`` at most, with high probability: of sixteen digits a dozen or
so are left. That is more than residuals in twice the working precision, or a few steps of refinement, need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from neula.algorithms.elimination.butterfly import TwoSided, padded
from neula.algorithms.elimination.lu_panels import blocks
from neula.algorithms.triangular.inverted import InvertedBlocks, InvertedTuning, inverted_factors
from neula.engines import Tuning
from neula.kernels.lu.butterfly import mixed
from neula.kernels.lu.lu_block import lu_unpivoted
from neula.kernels.magnitudes import largest_magnitude
from neula.kernels.precision import exact_matmul
from neula.kernels.small_problems.refining import over
from neula.kernels.triangular_inverse import triangular_inverses

STRIP = 2048
"""Columns of which the largest element is looked for at a time."""


@dataclass(frozen=True)
class ButterfliedInverses:
    """``U^T diag(A, s I) V = (L R)^T``, to solve systems with A by products."""

    # Inverse of a small matrix, shape (n, n), which costs less than it would to read two factors; of others L
    # and R.
    solver: torch.Tensor | tuple[InvertedBlocks, InvertedBlocks]
    transform: TwoSided
    magnified: torch.Tensor  # shape (): largest element of R by that of A
    narrow: ClassVar[bool] = False
    symmetric: ClassVar[bool] = False

    @classmethod
    def factorize(cls, a: torch.Tensor, size: torch.Tensor, tuning: Tuning) -> ButterfliedInverses:
        """Factorize A, in double precision; solutions are not finite if A is singular.

        Elements of A, and those that it is bordered with, are about ``size``.
        """
        transform = TwoSided.random(len(a), a.device)
        # The transpose is factorized: what is mixed by rows is stored by columns for the library.
        lu = lu_unpivoted(_mixed(a, size, transform).T)
        magnified, order = over(_largest_of_upper(lu), _largest(a)), len(lu)
        width = 0 if order <= tuning[InvertedTuning].inverted_whole else tuning[InvertedTuning].width(order)
        if not width:
            return cls(_inverse(lu, transform), transform, magnified)
        # Without pivots blocks on the diagonal may be ill-conditioned.
        return cls(inverted_factors(lu, lu.dtype, width, refining=True), transform, magnified)

    @property
    def growth(self) -> float:
        """Largest growth of elements; reading it synchronizes with the GPU."""
        return float(self.magnified)

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        """``A^-1 b`` for the columns of b, shape (n, k)."""
        if isinstance(self.solver, torch.Tensor):
            return exact_matmul(self.solver, b)
        lower, upper = (factor.mT for factor in self.solver)
        return self.transform.solve(lambda x: lower.solved(upper.solved(x)), b)

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        """``A^-H b``."""
        if isinstance(self.solver, torch.Tensor):
            return exact_matmul(self.solver.mH, b)
        # The factors are those of the transpose.
        lower, upper = self.solver
        return self.transform.mH.solve(
            lambda x: upper.solved(lower.solved(x.conj_physical())).conj_physical(), b
        )

    def in_double(self) -> ButterfliedInverses:
        """Return the same factors: they already solve in double precision."""
        return self


def _inverse(lu: torch.Tensor, transform: TwoSided) -> torch.Tensor:
    """``A^-1 = V (L R)^-T U^T``, the transpose of ``U R^-1 L^-1 V^T``."""
    lower, upper = triangular_inverses(lu)
    found = exact_matmul(upper, lower)
    transform.left.apply_(found)
    transform.right.apply_(found.T)
    return found[: transform.n, : transform.n].T


def _mixed(a: torch.Tensor, size: torch.Tensor, transform: TwoSided) -> torch.Tensor:
    """``U^T diag(A, s I) V``, row-major."""
    n, order = len(a), padded(len(a))
    work = a.new_empty(order, order)
    if order > n:
        work[:n, :n] = a
        return transform.apply_(work, size)
    mixed(work, a, transform.left.transposed)  # no copy
    transform.right.apply_transpose_(work.T)
    return work


def _largest_of_upper(lu: torch.Tensor) -> torch.Tensor:
    """In strips, copies of which are small compared with a large matrix."""
    strips = list(blocks(slice(0, len(lu)), STRIP))
    return torch.stack([_largest(lu[: k.stop, k].triu(-k.start)) for k in strips]).amax()


def _largest(a: torch.Tensor) -> torch.Tensor:
    return largest_magnitude(a, (0, 1))
