"""Many small least-squares problems at once: every step is one launch for the whole batch.

The corrected seminormal equations (Björck, "Stability analysis of the method of seminormal equations for
linear least squares problems", Linear Algebra Appl. 88/89, 1987): with R of a QR factorization of A solve
``R^H R dx = A^H (b - A x)``, and repeat with the true residual. Q is not needed, so R may come from any
QR. With ``W = A R^-1`` a step multiplies the error by ``I - W^H W`` in the variables ``R x``: by
``u cond(A)`` for an R of unit roundoff u, by ``u cond(A)^2`` for one of the normal equations. Residuals and
gradients in twice the working precision make that the error of x
(:mod:`neula.algorithms.krylov.doubled_refinement`).

Whether a step does so is measured on random vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from neula.algorithms.krylov.doubled_refinement import DoubledEvaluation, FactoredProblems
from neula.algorithms.krylov.passes import (
    doubled_gradient,
    in_one_pass,
    normal,
    normal_beside,
    residual_and_gradient,
    transposed,
)
from neula.algorithms.krylov.triangles import Triangles, solved, solved_transposed
from neula.certificates.backward_error import Measures, Norms
from neula.certificates.forward_error import COMPUTED, ESTIMATED, MAX_RATE
from neula.certificates.residuals import DOUBLED, FLOOR, STAGNATION, residual_noise
from neula.engines import FP64
from neula.engines.random_vectors import gaussian
from neula.engines.reduction import HERE, Reduction
from neula.kernels.doubled.doubled import Doubled
from neula.kernels.doubled.doubled_normal import doubled_normal
from neula.kernels.small_problems.refining import uncertainty
from neula.kernels.small_problems.seminormal import RefinementLimits

PROBES = 8
"""Random vectors that show ``||I - W^H W||_F``; with up to as many columns they are the unit vectors, which
give it exactly."""

ROUNDING = 8.0
"""Unit roundoffs, times the condition number, that a solve with factors errs by at most."""

FEW = 4
"""Random vectors where products with a large matrix are what takes time."""

SHARED = 256
"""Random vectors of smaller problems are the first rows of these, since it takes time to draw them."""

PLAIN_STEPS = 2
"""With an R as accurate as float32 the second one leaves rounding errors."""

NEGLIGIBLE = 2.0**-27
"""Part of a residual that an update changes without a change of its norm: what an update removes is in the
range of A, and what stays orthogonal to it, so that squares add up."""

MARGIN = 3.0
"""An estimate of a Frobenius norm from :data:`PROBES` Gaussian vectors is below a third of it once in some
thousand cases where one direction dominates (chi-squared with 8 degrees of freedom), and never where many
contribute."""

MARGINS = {PROBES: MARGIN, FEW: 10.0}
"""By the number of vectors; an estimate from four is below a tenth as rarely as two in ten thousand."""


class FactoredTallMatrices(FactoredProblems):
    """A batch of tall matrices T with R of each.

    ``t``, shape (batch, rows, columns), rows >= columns: in double precision, parts at most 1 in magnitude,
    columns of comparable size. ``r``, shape (batch, columns, columns): upper triangular, in double precision;
    accurate to any format. ``inverse``, shape (batch, columns, columns), or None: ``R^-1``; None where the
    library solves. ``low``, shape (batch, rows, columns): what rounding T has lost. ``b_low``: what rounding
    the right-hand sides has lost. ``columns``, shape (batch, columns, 1): norms of the columns of T, where
    they are not of comparable size. ``doubled``: whether residuals are in twice the working precision.
    ``over_rows``: where other rows of T are. ``rhs``, shape (batch, rows, k): what T^H is applied to in the
    same pass. ``few``: whether few vectors measure the rate although more would take no pass more.
    ``inverse_norm``, shape (batch, 1): ``||D R^-1||_2`` from above, D being the norms of the columns: what
    rounding errors of a solve are measured by where there is no inverse. ``rate``, shape (batch,): ``||I -
    W^H W||_F`` from above, the rounding errors of its measurement included.
    """

    def __init__(
        self,
        t: torch.Tensor,
        r: torch.Tensor,
        inverse: torch.Tensor | None,
        low: torch.Tensor | None = None,
        b_low: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
        over_rows: Reduction = HERE,
        *,
        doubled: bool = True,
        rhs: torch.Tensor | None = None,
        few: bool = False,
        inverse_norm: torch.Tensor | None = None,
    ) -> None:
        self.t, self.low, self.b_low, self.over_rows = t, low, b_low, over_rows
        self.doubled = self._prepared(columns) if doubled else None
        self._r, self._inverse = r, inverse
        # As many on all processes: the rows of one may be too few for the kernel, and those of another not.
        few = few or not doubled or (not over_rows.spread and in_one_pass(t, FEW))
        count = FEW if few else PROBES
        z = probes(r.shape[-1], r.device, count, dtype=r.dtype)
        self._gradient: torch.Tensor | None = None
        y = self.solve(z)
        if rhs is None:
            image = over_rows.total(self._normal(y))
        else:
            image, self._gradient = over_rows.totals(*normal_beside(t, y, rhs))
        if inverse is not None:
            noise = _noise(r, inverse, columns)
        else:  # Frobenius norms from above
            assert inverse_norm is not None
            noise = ROUNDING * FP64.u * r.shape[-1] * inverse_norm[:, 0]
        self.rate = MARGINS[count] * torch.linalg.matrix_norm(z - self.coordinates(image)) + noise

    def _prepared(self, columns: torch.Tensor | None) -> Doubled:
        return Doubled.from_matrix(self.t, columns)

    def _normal(self, x: torch.Tensor) -> torch.Tensor:
        return normal(self.t, x)

    @property
    def _size(self) -> int:
        """Rows and columns; of complex matrices twice as many: products of each part are sums of as many."""
        return (1 + self.t.is_complex()) * (self.over_rows.count(self.t.shape[1]) + self.t.shape[2])

    def solve(self, y: torch.Tensor) -> torch.Tensor:
        """``R^-1 y``."""
        return solved(self._r, y) if self._inverse is None else self._inverse @ y

    def coordinates(self, g: torch.Tensor) -> torch.Tensor:
        """``R^-H g``."""
        return solved_transposed(self._r, g) if self._inverse is None else self._inverse.mH @ g


class Overdetermined(FactoredTallMatrices):
    """``min ||A x - b||`` for tall A.

    Parameters are those of the matrices A, whose columns are at most 1 in magnitude, and

    ``columns`` : Tensor, shape (batch, n, 1), optional
        The diagonal of D; the norms of the columns by default.
    ``triangles`` : Triangles, optional
        Of R, where they are known.
    ``rhs`` : Tensor, shape (batch, m, k), optional
        Right-hand sides whose gradient at zero is wanted: the pass over A that measures the rate computes it.
    ``half_precision`` : bool, optional
        Whether R comes from half-precision products: then the first steps are with residuals in working
        precision, which take half the time and leave no more.

    Shapes: columns (batch, n, 1). ``norm``, ``norm_bound``, shape (batch, 1): ``||B||_2`` for ``B = A D^-1``,
    from below and from above, from :class:`Triangles`. ``inverse_norm``, shape (batch, 1): ``||B^+||_2`` from
    above, likewise. ``condition``, ``condition_bound``, shape (batch,): condition number of B, estimated and
    from above.
    """

    def __init__(
        self,
        a: torch.Tensor,
        r: torch.Tensor,
        low: torch.Tensor | None = None,
        b_low: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
        over_rows: Reduction = HERE,
        *,
        doubled: bool = True,
        triangles: Triangles | None = None,
        rhs: torch.Tensor | None = None,
        half_precision: bool = False,
    ) -> None:
        if columns is None:
            (sizes,) = over_rows.norms(a, dim=1)
            columns = torch.where(sizes > 0, sizes, 1.0)[..., None]
        known = Triangles.from_factor(r, columns) if triangles is None else triangles
        super().__init__(
            *(a, r, known.inverse, low, b_low, columns, over_rows),
            doubled=doubled,
            rhs=rhs,
            few=half_precision and over_rows.spread,
            inverse_norm=known.inverse_norm,
        )
        self.columns, self._plain_steps = columns, PLAIN_STEPS if half_precision else 0
        self.norm, self.norm_bound, self.inverse_norm = known.norm, known.norm_bound, known.inverse_norm
        self.condition = (known.norm * known.inverse_norm)[:, 0] / known.margin
        self.condition_bound = torch.minimum(
            (known.norm_bound * known.inverse_norm)[:, 0], ESTIMATED * self.condition
        )

    def start(self, b: torch.Tensor) -> torch.Tensor:
        known = self._gradient
        gradient = self.over_rows.total(transposed(self.t, b)) if known is None else known
        x = self.solve(self.coordinates(gradient))
        for _ in range(self._plain_steps):
            gradient = self.over_rows.total(residual_and_gradient(self.t, x, b)[1])
            x = x + self.solve(self.coordinates(gradient))
        return self.over_rows.agree(x)

    def size(self, unknowns: torch.Tensor) -> torch.Tensor:
        return lengths(self.columns * unknowns)

    def evaluate(self, b: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> DoubledEvaluation:
        """``R^-1 R^-H A^H r``."""
        if self.doubled is None:  # rounding errors of the residual limit the accuracy
            residual, gradient = self._residual_and_gradient(high, b)
            gradient, *of_rows = self.over_rows.total_and_norms(gradient, b, residual, dim=1)
        else:
            residual, gradient = self._doubled_gradient(b, high, low)
            of_rows = list(self.over_rows.norms(b, residual, dim=1))
        projected = self.coordinates(gradient)
        noise = residual_noise(self._size, doubled=self.doubled is not None)
        b_norm, residual_norm = of_rows
        norms = lengths(projected), self.size(high), b_norm, residual_norm
        errors = uncertainty(norms, self.rate[:, None], self.norm_bound, self.inverse_norm, noise)
        update, left, floor = self.over_rows.agreed(self.solve(projected), *errors)
        return DoubledEvaluation(update, left, residual, floor)

    def _doubled_gradient(
        self, b: torch.Tensor, high: torch.Tensor, low: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.doubled is not None
        one = (self.t[0], high[0], low[0], b[0])
        if len(b) == 1 and self.low is None and doubled_normal.takes(*one):
            (residual, _), pair = doubled_normal(*one)
            return residual[None], self.over_rows.total_of_pairs(*pair)[None]
        known = self.doubled, b, high, low
        return doubled_gradient(*known, a_low=self.low, b_low=self.b_low, over_rows=self.over_rows)

    def _residual_and_gradient(self, x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return residual_and_gradient(self.t, x, b)

    def updated(
        self, b: torch.Tensor, unknowns: torch.Tensor, residual: torch.Tensor, update: torch.Tensor
    ) -> tuple[torch.Tensor, Measures]:
        residual, gradient = self._residual_and_gradient(update, residual)
        gradient, *of_rows = self.over_rows.total_and_norms(gradient, b, residual, dim=1)
        projected = lengths(self.coordinates(gradient)) / (1 - self.rate[:, None]).clamp_min(0)
        norms = self._norms(unknowns, of_rows, lengths(gradient / self.columns), projected)
        return residual, norms.measures(self.norm)

    def settled(
        self,
        b: torch.Tensor,
        unknowns: torch.Tensor,
        residual: torch.Tensor,
        update: torch.Tensor,
        left: torch.Tensor,
    ) -> tuple[torch.Tensor, Measures]:
        """Bound the measures of :meth:`updated` from above without a pass over A.

        The part of the residual in the range of A is A times the error of x, of which ``left`` is a bound.
        Measures are infinite unless the update is :data:`NEGLIGIBLE`, and the rate one to be trusted.
        """
        projected = self.norm_bound * left
        of_rows = self.over_rows.norms(b, residual, dim=1)
        norms = self._norms(unknowns, of_rows, self.norm_bound * projected, projected)
        measures = norms.measures(self.norm)
        negligible = self.norm_bound * self.size(update) <= NEGLIGIBLE * norms.residual
        known = negligible & (self.rate[:, None] <= MAX_RATE)
        return residual, measures.where(known)

    def _norms(
        self,
        unknowns: torch.Tensor,
        of_rows: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        projected: torch.Tensor,
    ) -> Norms:
        b_norm, residual_norm = of_rows
        return Norms(residual_norm, gradient, projected, self.norm * self.size(unknowns), b_norm)


def rate_of(t: torch.Tensor, r: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """``||I - W^H W||_F`` for ``W = T R^-1`` from above, shape (batch,).

    It is at least 1 where T lacks full rank, whatever R is.
    """
    z = probes(r.shape[-1], r.device, dtype=r.dtype)
    change = torch.linalg.matrix_norm(z - inverse.mH @ normal(t, inverse @ z))
    return MARGIN * change + _noise(r, inverse)


def _noise(r: torch.Tensor, inverse: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor:
    """Rounding errors of a solve, also where none happen to be in what is measured.

    They are those of the matrix with normalized columns; ``columns`` are the norms where they differ much.
    """
    if columns is not None:
        r, inverse = r / columns.mT, columns * inverse
    return ROUNDING * FP64.u * torch.linalg.matrix_norm(r) * torch.linalg.matrix_norm(inverse)


def lengths(x: torch.Tensor) -> torch.Tensor:
    """Norms of the columns of each matrix of a batch, shape (batch, k)."""
    return torch.linalg.vector_norm(x, dim=1)


def probes(
    n: int,
    device: torch.device,
    count: int = PROBES,
    *,
    unit: bool = True,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Vectors z with ``||A||_F^2 = E ||A z||_F^2``, shape (n, p): unit vectors if they are few, or ``count``
    Gaussian ones.

    They are no unit vectors where A times those is what was factorized, rounding errors included.
    """
    if unit and n <= PROBES:
        return torch.eye(n, dtype=dtype, device=device)
    return gaussian(max(SHARED, n), count, dtype, device, seed=1)[:n] / count**0.5


@lru_cache(maxsize=64)
def limits_of(tolerance: float, max_steps: int) -> RefinementLimits:
    """Limits of a refinement in one launch, equal to those of the refinement step by step."""
    return RefinementLimits(
        tolerance=tolerance,
        max_steps=max_steps,
        max_rate=MAX_RATE,
        rounding=ROUNDING,
        noise=DOUBLED,
        floor=FLOOR,
        stagnation=STAGNATION,
        computed=COMPUTED,
    )
