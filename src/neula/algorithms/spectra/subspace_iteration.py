"""Leading singular triplets by subspace iteration from a random block, accelerated by Chebyshev polynomials.

A block of random vectors, multiplied by A and by its transpose, holds the leading singular vectors the better
the larger their singular values are (Halko, Martinsson and Tropp, "Finding structure with randomness", SIAM
Rev. 53, 2011). Rayleigh-Ritz tells how good they are. Where that is not enough, a Chebyshev polynomial of
``A^T A`` that is small on what the block does not hold damps it far faster than powers do (Rutishauser,
"Simultaneous iteration method for symmetric matrices", Numer. Math. 16, 1970): the smallest Ritz value tells
up to where. Nothing is orthogonalized inside a polynomial, and there the host never waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from neula.algorithms.spectra.ritz import (
    Ritz,
    is_asynchronous,
    orthonormal,
    orthonormal_asynchronously,
    ritz_triplets,
)
from neula.engines import FP32, Engine
from neula.engines.random_vectors import gaussian

SEED = 1  # of the block to begin with
CONDITIONED = 0.1  # how far from orthonormal a block may be that is only multiplied
HEADROOM = 7  # powers of two between the norm of an operand and the largest number of its format
SAFETY = 3.0  # a polynomial is to damp more than the residual asks for by so much

MAGNIFIED = 0.75
"""Power of ``1/u`` by which a polynomial may magnify the first singular vector more than the last: a basis
takes rounding errors along the first out of the last as long as they are smaller than that."""

MAGNIFIED_LOW = 0.5  # the power in a low format
EPSILON = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class MixedPrecisionOperator:
    """A matrix in two arithmetics: one to find subspaces with, and one to find triplets in them."""

    a: torch.Tensor  # shape (m, n), m >= n: in the storage precision of exact
    low: torch.Tensor  # shape (m, n): the same as an operand of engine
    exact: Engine
    engine: Engine
    scale: float = 1.0  # the power of two by which low is multiplied

    @classmethod
    def from_matrix(
        cls, a: torch.Tensor, norm: float, exact: Engine, engine: Engine
    ) -> MixedPrecisionOperator:
        """A matrix of a Frobenius norm, rounded once for the products of ``engine``.

        In a format of small range it is scaled so that neither its elements overflow nor what it makes of
        vectors that are not much longer than 1.
        """
        if engine.format.max_exponent >= FP32.max_exponent or not norm > 0:
            return cls(a, engine.operand(a), exact, engine)
        exponent = engine.format.max_exponent - HEADROOM - math.frexp(norm)[1]
        scales = torch.full((a.shape[1],), 2.0**exponent, dtype=a.dtype.to_real(), device=a.device)
        low = engine.fill(engine.empty(*a.shape, dtype=engine.operand_dtype), a, scales)
        if engine.operand_dtype == engine.storage:  # kept in a wider dtype, and not rounded yet
            low = engine.operand(low)
        return cls(a, low, exact, engine, 2.0**exponent)

    @property
    def magnified(self) -> float:
        """Logarithm of what a polynomial may magnify one singular vector by more than another."""
        return -(MAGNIFIED if self.low is self.a else MAGNIFIED_LOW) * math.log(self.engine.format.u)

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """``A X`` times the scale, in the low arithmetic."""
        return self.engine.image(self.low, self.engine.operand(x))

    def transposed_times(self, y: torch.Tensor) -> torch.Tensor:
        """``A^H Y`` times the scale, in the low arithmetic."""
        return self.engine.inner(self.low, self.engine.operand(y))


def subspace_iteration(
    a: MixedPrecisionOperator,
    rank: int,
    width: int,
    excess: Callable[[Ritz], float],
    most: int,
) -> tuple[Ritz, int]:
    """The leading singular triplets, as good as ``excess`` wants them if that does not take too long.

    Once the singular values say that it would, no more is done.

    ``rank``: how many are wanted. ``width``: of the block: the more beyond the rank, the faster. ``excess``:
    by how much the errors of triplets are larger than they may be; at most 1 ends the iteration, NaN as well.
    ``most``: the largest worthwhile number of products by ``A^T A``. Returns Ritz: ``width`` triplets;
    those that ``excess`` has seen last; products by ``A^T A`` that they took.

    Examples
    --------
    >>> import torch
    >>> from neula.engines import CpuEngine
    >>> engine = CpuEngine("cpu", "fp64")
    >>> a = torch.diag(0.5 ** torch.arange(40, dtype=torch.float64))
    >>> error = lambda found: 1e9 * float(found.rest.diagonal()[:2].sum().sqrt())
    >>> operator = MixedPrecisionOperator.from_matrix(a, 2.0, engine, engine)
    >>> found, _ = subspace_iteration(operator, 2, 4, error, 20)
    >>> [round(s, 9) for s in found.s[:2].tolist()]
    [1.0, 0.5]
    """
    n = a.a.shape[1]
    start = gaussian(n, width, a.a.dtype, a.a.device, seed=SEED)
    block, products = a.transposed_times(_basis(a.times(start), a.exact)), 1
    while True:
        found = ritz_triplets(a.a, block, a.exact)
        products += 1
        factor = excess(found)
        degree, needed = _degrees(found.s.tolist(), rank, factor, a.magnified)
        if not factor > 1 or products + needed > most:
            return found, products
        block = _filtered(a, found, rank, degree)
        products += degree - 1


def _basis(image: torch.Tensor, engine: Engine) -> torch.Tensor:
    if not is_asynchronous(image, engine):
        return orthonormal(image, engine, loss=CONDITIONED)[0]

    def basis(image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (orthonormal_asynchronously(image, engine)[0].nan_to_num_(0.0),)  # without columns that vanish

    return engine.replay(basis, (image,), ("basis of an image", repr(engine)))[0]


def _degrees(s: list[float], rank: int, factor: float, magnified: float) -> tuple[int, float]:
    """Degree of the next polynomial, and the sum of all that are needed to damp by a factor.

    Rounding errors along the first vectors grow by ``T(s_1) / T(s_rank)`` relative to the others.
    The logarithm of that stays below a limit.
    """
    edge = _edge(s)
    first, last = _growth(s[0], edge), _growth(s[rank - 1], edge)
    if not (last > 0 and 1 < factor < math.inf):
        return 1, math.inf
    needed = max(1, math.ceil(math.log(2 * SAFETY * factor) / last))
    spread = first - last
    largest = int(magnified / spread) if 0 < spread < math.inf else needed
    return max(1, min(needed, largest)), needed


def _edge(s: list[float]) -> float:
    """Up to where polynomials damp: the smallest Ritz value, unless that consists of rounding errors."""
    return max(s[-1], EPSILON * s[0])


def _growth(s: float, edge: float) -> float:
    """Logarithm of what each degree magnifies s by, relative to singular values up to an edge."""
    return math.inf if edge == 0 else 2 * math.acosh(max(1.0, s / edge))


def _filtered(a: MixedPrecisionOperator, found: Ritz, rank: int, degree: int) -> torch.Tensor:
    """``T(2 A^H A / s_l^2 - 1) V`` for the Chebyshev polynomial T of a degree and the last value s_l.

    Each column is divided by what T makes of its own Ritz value, or of the last that is wanted, so that
    nothing overflows (the scaling of Zhou and Saad, "A Chebyshev-Davidson algorithm for large symmetric
    eigenproblems", SIAM J. Matrix Anal. Appl. 29, 2007).
    """
    v, image, s = found.v, found.image, found.s.numpy()
    if degree == 1:  # any polynomial of degree 1 leads to this space
        return image
    edge = _edge(s.tolist())

    def of_columns(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x).to(v.device, v.dtype.to_real())

    y = 2 * np.maximum(s / edge, s[rank - 1] / edge) ** 2 - 1
    weight, ratio = 4 / (edge * a.scale) ** 2, 1 / y
    before, block = v, image * of_columns(2 * s / edge**2 * ratio) - v * of_columns(ratio)
    for _ in range(degree - 1):
        following = 1 / (2 * y - ratio)
        product = a.transposed_times(a.times(block)).mul_(weight).sub_(block, alpha=2.0)
        product.mul_(of_columns(following)).sub_(before.mul(of_columns(following * ratio)))
        before, block, ratio = block, product, following
    return block
