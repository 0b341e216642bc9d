"""Random butterfly transforms: mixed rows and columns make pivoting unnecessary, with high probability.

Parker, "Random butterfly transformations with applications in computational linear algebra", UCLA, 1995;
Baboulin, Dongarra, Herrmann, Tomov, "Accelerating Linear System Solutions Using Randomization Techniques",
ACM Trans. Math. Softw. 39, 2013. A butterfly of order n is

    B = 1/sqrt(2) [ R0   R1 ]
                  [ R0  -R1 ]

with random diagonal R0 and R1; a recursive one of depth 2 is ``W = diag(B1, B2) B`` with B1 and B2 of order
n/2. Instead of A the matrix ``U^T A V`` is factorized, U and V being recursive butterflies. Nothing is
formed: ``W^T x`` costs about 4n operations, and ``U^T A V`` about ``8 n^2``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from neula.algorithms.elimination.factorization import Wrapped
from neula.engines import Engine
from neula.engines.random_vectors import remembered
from neula.kernels.lu.butterfly import mixed

DEPTH = 2
"""Levels of recursion. Two are enough in practice (Baboulin et al., section 4)."""


@dataclass(frozen=True)
class Butterfly:
    """A recursive butterfly W of depth 2, applied without being formed."""

    # Shape (2, n): R0 and R1 of the outer butterfly, then of the two inner ones, each divided by sqrt(2). n
    # is a multiple of 4.
    diagonals: torch.Tensor
    # weights, transposed, shape (4, 4, n / 4): what mixed of neula.kernels.lu.butterfly takes for W and W^T.
    weights: torch.Tensor
    transposed: torch.Tensor

    @classmethod
    def random(cls, n: int, seed: int, device: torch.device) -> Butterfly:
        """Diagonals ``exp(r / 20)`` with r uniform in (-1/2, 1/2): W is orthogonal within a few percent.

        The order n is a multiple of 4 (:func:`padded`). The user's random state stays untouched.
        """

        def drawn() -> torch.Tensor:
            generator = torch.Generator("cpu").manual_seed(seed)
            r = torch.rand(DEPTH, n, generator=generator, dtype=torch.float64, device="cpu") - 0.5
            return (r / 20).exp() / math.sqrt(2)

        def weights() -> torch.Tensor:
            return _weights(drawn())

        # Each is made on the host, and copied: whatever stream reads it finds it complete.
        key = "butterfly", n, seed, device
        return cls(
            remembered((*key, "diagonals"), lambda: drawn().to(device)),
            remembered((*key, "W"), lambda: weights().to(device)),
            remembered((*key, "W^T"), lambda: weights().transpose(0, 1).contiguous().to(device)),
        )

    def apply_(self, x: torch.Tensor) -> torch.Tensor:
        """``W x`` in place, for the columns of x, shape (n, k)."""
        return mixed(x, x, self.weights)

    def apply_transpose_(self, x: torch.Tensor) -> torch.Tensor:
        """``W^T x`` in place, for the columns of x, shape (n, k)."""
        return mixed(x, x, self.transposed)


def _weights(diagonals: torch.Tensor) -> torch.Tensor:
    """Weights that mix each row with the rows at the same place in the other quarters.

    An outer butterfly mixes two halves, the inner ones the quarters of each.
    """
    outer, inner = diagonals
    sign = diagonals.new_tensor([[1.0, 1.0], [1.0, -1.0]])
    # By the halves and the quarters of a result and of what it is made of.
    outer = sign[:, None, :, None, None] * outer.view(1, 1, 2, 2, -1)
    inner = sign[None, :, None, :, None] * inner.view(2, 1, 1, 2, -1)
    return (outer * inner).flatten(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class TwoSided:
    """The transform ``U^T A V`` of a matrix, padded by an identity to an order that butterflies have."""

    left: Butterfly
    right: Butterfly
    n: int

    @classmethod
    def random(cls, n: int, device: torch.device) -> TwoSided:
        """Fixed random butterflies for matrices of order n: the same matrix always has the same answer."""
        left, right = (Butterfly.random(padded(n), seed, device) for seed in (1, 2))
        return cls(left, right, n)

    def mixed(self, a: torch.Tensor, engine: Engine) -> torch.Tensor:
        """``U^T diag(A, I) V`` as a working matrix of order ``padded(n)``."""
        work = engine.empty(padded(self.n), padded(self.n))
        work[: self.n, : self.n] = a
        return self.apply_(work)

    def solve(self, solve_mixed: Callable[[torch.Tensor], torch.Tensor], b: torch.Tensor) -> torch.Tensor:
        """``A^-1 b`` from a solver of systems with ``U^T diag(A, I) V``."""
        right = mixed(b.new_empty(padded(self.n), b.shape[1]), b, self.left.transposed)
        return mixed(torch.empty_like(b), solve_mixed(right), self.right.weights)

    @property
    def mH(self) -> TwoSided:
        """The transform of the conjugate transpose, ``V^T A^H U``: butterflies are real."""
        return replace(self, left=self.right, right=self.left)

    def apply_(self, a: torch.Tensor, size: torch.Tensor | float = 1.0) -> torch.Tensor:
        """``U^T diag(A, size I) V`` in place, of a working matrix of order ``padded(n)`` that holds A."""
        a[self.n :] = 0
        a[:, self.n :] = 0
        a.diagonal()[self.n :] = size
        self.left.apply_transpose_(a)
        self.right.apply_transpose_(a.T)
        return a


@dataclass(frozen=True)
class Butterflied(Wrapped):
    """A factorization of ``U^T A V`` as one of A."""

    transform: TwoSided

    @property
    def symmetric(self) -> bool:
        return False

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        return self.transform.solve(self.factors.solve, b)

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        return self.transform.mH.solve(self.factors.solve_transposed, b)


def padded(n: int) -> int:
    """The next order that butterflies of depth 2 have: a multiple of 4."""
    return -(-n // 2**DEPTH) * 2**DEPTH
