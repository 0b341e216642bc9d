"""What is kept of the rows of a least-squares problem, so that others can join them, or leave.

R of ``[A b]`` by Householder reflections, merged block by block, is what solutions come from. As evidence,
although A is gone, products with few columns are kept in twice the working precision: ``A^T (A G)`` for
random vectors G, and ``A^T b``. What R makes of the same vectors shows how far ``R^T R`` is from ``A^T A``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from neula.algorithms.krylov.streamed_lstsq import HouseholderSums
from neula.algorithms.orthogonal.cholesky_qr import upper_cholesky
from neula.algorithms.scaling import two_product
from neula.certificates.probes import PROBES
from neula.kernels.doubled import Doubled, Pair, two_sum

LEFT = 2.0**-20
"""Part of what is known along any direction that must be left when rows are removed: its rounding errors are
those of what was there, so that six of sixteen digits may go."""

BELOW_ZERO = 2.0**-40
"""By what part of itself a sum of squares may fall below zero for rounding errors, when rows are removed."""


@dataclass(frozen=True)
class HeldSums:
    """All that is kept of the rows; replaced, never changed.

    Attributes
    ----------
    r : Tensor, shape (n + k, n + k)
        ``[[R, Q^T b], [0, S]]``: R of [A b], up to an orthogonal factor of S.
    probes, probes_low : Tensor, shape (n, 4)
        ``A^T (A G)``, as an unevaluated sum.
    products, products_low : Tensor, shape (n, k)
        ``A^T b``.
    rows, updates : int
        How many rows there are, and how often R was changed.
    """

    r: torch.Tensor
    probes: torch.Tensor
    probes_low: torch.Tensor
    products: torch.Tensor
    products_low: torch.Tensor
    rows: int = 0
    updates: int = 0

    @classmethod
    def begin(cls, n: int, k: int, device: torch.device) -> HeldSums:
        """Sums over no rows."""
        shapes = ((n + k, n + k), (n, PROBES), (n, PROBES), (n, k), (n, k))
        zeros = [torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes]
        return cls(zeros[0], zeros[1], zeros[2], zeros[3], zeros[4])

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """R, ``Q^T b`` and S."""
        n = len(self.probes)
        return self.r[:n, :n], self.r[:n, n:], self.r[n:, n:]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, by name."""
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x for name, x in known.items() if isinstance(x, torch.Tensor)}

    def each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> HeldSums:
        """What a function makes of each tensor."""
        changed: dict[str, Any] = {name: function(x) for name, x in self.tensors.items()}
        return replace(self, **changed)

    def plus(self, other: HeldSums) -> HeldSums:
        """Sums over the rows of both."""
        n = len(self.probes)
        r = self._merged(other.r[:, :n], other.r[:, n:])
        return self._with(r, other, other.rows, max(1, other.updates))

    def plus_rows(self, a: torch.Tensor, b: torch.Tensor, vectors: torch.Tensor) -> HeldSums:
        """Those with more rows.

        Parameters
        ----------
        a : Tensor, shape (rows, n)
        b : Tensor, shape (rows, k)
        vectors : Tensor, shape (n, 4)
            G, the same each time.
        """
        if not len(a):
            return self
        return self._with(self._merged(a, b), _seen(a, b, vectors), len(a), 1)

    def minus_rows(self, a: torch.Tensor, b: torch.Tensor, vectors: torch.Tensor) -> HeldSums:
        """Those without some rows.

        With ``P = R^-T A^T`` of these rows, ``R'^T R' = R^T (I - P P^T) R``, so that ``R' = L R`` for the
        Cholesky factor ``L^T L = I - P P^T``, and ``L^T z' = z - P b`` for ``z = Q^T b``.

        Raises
        ------
        ValueError
            Where that is unstable, or the rows cannot have been among those that are there.
        """
        r, z, s = self.parts
        p = torch.linalg.solve_triangular(r.T, a.T, upper=False)
        identity = torch.eye(len(r), dtype=r.dtype, device=r.device)
        left = float(1 - torch.linalg.matrix_norm(p, 2) ** 2) if p.numel() else 1.0
        if not left >= LEFT:
            raise ValueError(
                f"without these {len(a)} rows {max(left, 0.0):.1e} of what is known along some direction "
                f"would be left, and rounding errors allow for {LEFT:.1e}: begin a new fit with the others"
            )
        lower = upper_cholesky(identity - p @ p.T)[0]
        expected = b - p.T @ z
        hidden = torch.linalg.solve_triangular(lower.T, p @ expected, upper=False)
        squares = s.T @ s
        rest = squares - expected.T @ expected - hidden.T @ hidden
        values, basis = torch.linalg.eigh(rest)
        sizes = (squares.diagonal() + (z.square()).sum(0) + b.square().sum(0)).sum()
        if bool((values < -BELOW_ZERO * sizes).any()):
            raise ValueError(f"these {len(a)} rows have larger residuals than all rows of the fit together")
        changed = torch.zeros_like(self.r)
        n = len(r)
        changed[:n, :n] = lower @ r
        changed[:n, n:] = torch.linalg.solve_triangular(lower.T, z - p @ b, upper=False)
        changed[n:, n:] = values.clamp_min(0).sqrt()[:, None] * basis.T
        gone = _seen(a, b, vectors).each(torch.neg)
        return self._with(changed, gone, -len(a), 1)

    def times(self, root: float) -> HeldSums:
        """Sums over the same rows times ``root``."""
        probes = _times(_times((self.probes, self.probes_low), root), root)
        products = _times(_times((self.products, self.products_low), root), root)
        return HeldSums(self.r * root, *probes, *products, self.rows, self.updates + 1)

    def _merged(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        merged = HouseholderSums(self.r, a.shape[1])
        merged.add(a, b)
        return merged.r

    def _with(self, r: torch.Tensor, other: HeldSums, rows: int, updates: int) -> HeldSums:
        probes = _sum((self.probes, self.probes_low), (other.probes, other.probes_low))
        products = _sum((self.products, self.products_low), (other.products, other.products_low))
        return HeldSums(r, *probes, *products, self.rows + rows, self.updates + updates)


def normal_product(a: torch.Tensor, x: torch.Tensor) -> Pair:
    """``A^T (A x)`` as an unevaluated sum, for A of shape (m, n)."""
    prepared = Doubled.of(a[None])
    high, low = prepared.residual(-x[None], a.new_zeros(1, len(a), x.shape[1]))
    return _pair(prepared.transposed_pair(high, low))


def _seen(a: torch.Tensor, b: torch.Tensor, vectors: torch.Tensor) -> HeldSums:
    """Products of some rows, without their R."""
    products = Doubled.of(a[None]).transposed_pair(b[None], torch.zeros_like(b[None]))
    return HeldSums(a, *normal_product(a, vectors), *_pair(products))


def _pair(parts: Pair) -> Pair:
    return two_sum(parts[0][0], parts[1][0])


def _sum(one: Pair, other: Pair) -> Pair:
    total, error = two_sum(one[0], other[0])
    return two_sum(total, error + (one[1] + other[1]))


def _times(pair: Pair, number: float) -> Pair:
    high, error = two_product(pair[0], torch.full_like(pair[0], number))
    return two_sum(high, error + number * pair[1])
