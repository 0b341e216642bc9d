"""Whether a rank below full is doubtful, by exact singular vectors and an F test."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from flint import arb_mat, ctx
from scipy.special import betainc

from . import spectrum
from .exact import columns, norm
from .oracle import LeastSquares

GAP, FREEDOM, SIGNIFICANT = 10.0, 3, 1e-6

NEAR = 1.5
"""Factor that the gap, and what rounding makes of null vectors, may be off without a finding."""

SURE = 1e3
"""The same for the probability of the F test."""


@dataclass(frozen=True)
class Dropped:
    """Directions v that a rank drops: ``sizes`` are ``||B v||``, ``along`` the components of ``b - B y*``
    along ``B v`` relative to its norm, ``gap`` is ``sigma_rank / sigma_(rank + 1)``, ``rows`` counts those
    that do not vanish, and up to ``||B v|| = rounding`` a null vector of B may have become v.
    """

    rank: int
    rows: int
    gap: float
    sizes: np.ndarray
    along: np.ndarray
    rounding: float

    @classmethod
    def of(cls, truth: LeastSquares, rank: int, unit: float) -> Dropped | None:
        """Dropped directions of a problem stored with a unit roundoff; None for full rank.

        A real A has real singular vectors: each part of a complex b has an F test with as many rows as A.
        """
        truth = truth.in_arithmetic_of_a
        m, n = truth.shape
        s, fold = truth.singular_values, truth.fold
        if rank in (0, min(m, n)):
            return None
        bits, y = truth._solution(rank)
        with ctx.workprec(max(bits, spectrum.BITS)):
            b = truth._scaled(ctx.prec)
            residual = columns(arb_mat(truth._b) - b * y)
            wide = b.transpose() if m < n else b
            vectors = columns(spectrum.eigen(wide.transpose() * wide).vectors)[fold * rank : fold * min(m, n)]
            sizes, along = [], []
            for v in vectors:
                image = v if m < n else (b * arb_mat([[x] for x in v])).entries()
                sizes.append(float(norm((wide * arb_mat([[x] for x in v])).entries()) / norm(v)))
                along.append([_cosine(image, r) for r in residual])
        gap = s[rank - 1] / s[rank] if s[rank] else np.inf
        used = sum(
            any(int(x) for x in (*p, *q)) for p, q in zip(truth._a.tolist(), truth._b.tolist(), strict=True)
        )
        return cls(fold * rank, used, gap, np.array(sizes), np.array(along), 2 * n * unit)

    def doubtful(self, factor: float = 1.0, chance: float = 1.0) -> bool:
        """Whether the rank is, with numbers that are off by factors."""
        if self.gap < GAP * factor:
            return True
        real = self.sizes > self.rounding / factor
        freedom = self.rows - self.rank - int(real.sum())
        if not real.any() or freedom < FREEDOM:
            return False
        left = np.clip(1 - (self.along[real] ** 2).sum(0), 0.0, 1.0)
        return bool(betainc(freedom / 2, real.sum() / 2, left.min(initial=1.0)) < SIGNIFICANT * chance)

    @property
    def surely(self) -> bool:
        """Whether there has to be a warning."""
        return all(self.doubtful(factor, 1 / SURE) for factor in (1 / NEAR, NEAR))

    @property
    def perhaps(self) -> bool:
        """Whether a warning is no false alarm."""
        return any(self.doubtful(factor, SURE) for factor in (1 / NEAR, 1.0, NEAR))


def _cosine(x: list, y: list) -> float:
    """Of the angle between two vectors; 0 where one vanishes."""
    size = norm(x) * norm(y)
    product = sum((p * q for p, q in zip(x, y, strict=True)), 0)
    return float(product / size) if size > 0 else 0.0
