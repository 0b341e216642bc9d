"""Scaling of rows and columns by powers of two, so that a matrix fits a narrow format ("squeezing").

Higham, Pranesh, Zounon, "Squeezing a Matrix into Half Precision, with an Application to Solving Linear
Systems", SIAM J. Sci. Comput. 41, 2019 (algorithms 2.3 to 2.5 and 3.1): with ``A_s = R A C``, a factorization
of ``A_s`` gives ``A^-1 b = C A_s^-1 R b``. R and C hold powers of two, so that only the last step, rounding
``A_s`` to the format, has errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from neula.algorithms.elimination.factorization import Wrapped
from neula.algorithms.elimination.lu_panels import blocks
from neula.algorithms.scaling import power_of_two_scales
from neula.engines import Engine

TOP = 4
"""The largest elements of the scaled matrix lie in ``[2**(TOP - 1), 2**TOP)``. In fp16 that leaves room for
growth by ``2**11``, the reciprocal of its unit roundoff, beyond which factors hold only errors; and
elements down to ``2**-17`` of the largest are still normal numbers. It is even, so that half of it scales the
rows and half the columns of a symmetric matrix."""

UNIFORM = 0.1
"""Rows or columns whose norms differ by less than a factor of ten stay as they are, as in LAPACK's laqge: a
matrix that is well scaled is read twice and not three times."""

_BLOCK = 1 << 24
"""Elements that are scaled at a time: their copy in float64 is small compared with the matrix, and fills a
GPU."""


STRIPS, LEAST = 8, 1024
"""Strips of rows of a triangle, which then has 9/16 of the elements of the square, and their rows at least:
each is a launch."""


@dataclass(frozen=True)
class Equilibration:
    """The diagonals of R and C in ``R A C``, all of them powers of two."""

    # rows, columns, shape (n,): float64.
    rows: torch.Tensor
    columns: torch.Tensor
    trivial: bool  # whether all rows have the same factor, and all columns

    def fill(self, out: torch.Tensor, a: torch.Tensor, engine: Engine) -> torch.Tensor:
        """Copy ``R A C`` into working storage: scaled in float64, the precision of A, and rounded once."""
        if self.trivial:
            return engine.fill(out, a, self.columns * self.rows[0])
        for target, block in zip(out.split(_rows_of(a)), scaled_rows(a, self.rows), strict=True):
            engine.fill(target, block, self.columns)
        return out

    def fill_lower(self, out: torch.Tensor, a: torch.Tensor, engine: Engine) -> torch.Tensor:
        """Write the scaled lower triangle of A into ``out``; elements above it may keep old values."""
        height = max(LEAST, -(-len(a) // STRIPS))
        for k in blocks(slice(0, len(a)), height):
            strip = replace(self, rows=self.rows[k], columns=self.columns[: k.stop])
            strip.fill(out[k, : k.stop], a[k, : k.stop], engine)
        return out

    def norm(self, a: torch.Tensor) -> torch.Tensor:
        """``||R A C||`` in the infinity norm."""
        return torch.stack([(b.abs() @ self.columns).amax() for b in scaled_rows(a, self.rows)]).amax()


@dataclass(frozen=True)
class Equilibrated(Wrapped):
    """A factorization of ``R A C`` as one of A.

    Right-hand sides are scaled to the same size, since the factors may solve in a format whose range a small
    residual would leave.
    """

    scales: Equilibration

    @property
    def symmetric(self) -> bool:
        return self.factors.symmetric and self.scales.rows is self.scales.columns

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        scaled = b * self.scales.rows[:, None]
        size = power_of_two_scales(scaled.abs().amax(0))
        return self.factors.solve(scaled * size) * self.scales.columns[:, None] / size

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        scaled = b * self.scales.columns[:, None]
        size = power_of_two_scales(scaled.abs().amax(0))
        return self.factors.solve_transposed(scaled * size) * self.scales.rows[:, None] / size


# item: L scaling
def equilibrate(
    a: torch.Tensor, row_norms: torch.Tensor, engine: Engine, largest: torch.Tensor | None = None
) -> Equilibration:
    """Scale rows by their 1-norms ``row_norms``, then columns by their largest elements ``largest``, if
    known.

    Rows of equal 1-norm have the smallest condition number in the infinity norm that scaling of rows can give
    (van der Sluis, "Condition numbers and equilibration of matrices", Numer. Math. 14, 1969). All are
    float64.

    >>> from neula.engines import EmulatedEngine
    >>> a = torch.tensor([[1e8, 2e8], [1e-9, 1e-9]], dtype=torch.float64)
    >>> scales = equilibrate(a, a.abs().sum(1), EmulatedEngine())
    >>> (scales.rows[:, None] * a * scales.columns).round(decimals=2)
    tensor([[ 5.9600, 11.9200],
            [ 8.5900,  8.5900]], dtype=torch.float64)
    """
    uniform_rows = _is_uniform(row_norms)
    if uniform_rows:
        rows = power_of_two_scales(row_norms.amax()).expand_as(row_norms)
        column_max = (engine.column_max(a) if largest is None else largest) * rows[0]
    else:
        rows = power_of_two_scales(row_norms)
        column_max = torch.stack([engine.column_max(block) for block in scaled_rows(a, rows)]).amax(0)
    uniform_columns = _is_uniform(column_max)
    columns = power_of_two_scales(column_max.amax().expand_as(column_max) if uniform_columns else column_max)
    return Equilibration(rows, columns * 2.0**TOP, uniform_rows and uniform_columns)


def equilibrate_symmetric(diagonal: torch.Tensor) -> Equilibration:
    """Scale rows and columns of a symmetric matrix symmetrically, so that its diagonal, positive, comes near
    ``2**TOP``.

    Elements of a positive definite matrix are then no larger than that, and within a factor of n the
    condition number is the smallest that scaling can give (van der Sluis, 1969).
    """
    uniform = _is_uniform(diagonal)
    size = diagonal.amax().expand_as(diagonal) if uniform else diagonal
    exponent = torch.frexp(size)[1]
    # Rounded down, so that no element exceeds 2**TOP; the halves of the exponents add up for the largest.
    scales = torch.ldexp(torch.ones_like(size), TOP // 2 - (exponent + 1) // 2)
    return Equilibration(scales, scales, uniform)


def scaled_rows(a: torch.Tensor, rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Blocks of rows of ``diag(rows) A``, one after the other."""
    height = _rows_of(a)
    return (
        block * scales[:, None] for block, scales in zip(a.split(height), rows.split(height), strict=True)
    )


def _rows_of(a: torch.Tensor) -> int:
    return max(1, _BLOCK // a.shape[1])


def _is_uniform(sizes: torch.Tensor) -> bool:
    smallest, largest = torch.stack([sizes.amin(), sizes.amax()]).tolist()
    return bool(smallest >= UNIFORM * largest)
