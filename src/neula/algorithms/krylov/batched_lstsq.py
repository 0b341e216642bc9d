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

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from neula.algorithms.krylov.doubled_refinement import DoubledEvaluation, FactoredProblems, Refinement
from neula.algorithms.krylov.passes import (
    doubled_gradient,
    in_one_pass,
    normal,
    normal_beside,
    residual_and_gradient,
    transposed,
)
from neula.algorithms.orthogonal.r_only import householder_r
from neula.algorithms.scaling import two_product
from neula.algorithms.spectra.inverse_norm import (
    EXPLICIT,
    inverse_norm,
    norm_of_triangle,
    schatten_bounds,
    schatten_bounds_of_gram,
)
from neula.certificates.backward_error import Measures, Norms
from neula.certificates.forward_error import COMPUTED, ESTIMATED, MAX_RATE, left_by_update
from neula.certificates.residuals import DOUBLED, FLOOR, STAGNATION, residual_noise
from neula.engines import FP64
from neula.engines.random_vectors import gaussian
from neula.engines.reduction import HERE, Reduction
from neula.kernels.doubled.doubled import Doubled, Pair, two_sum
from neula.kernels.doubled.doubled_normal import doubled_normal
from neula.kernels.magnitudes import two_norms
from neula.kernels.shift import shift
from neula.kernels.small_problems.refining import over, uncertainty
from neula.kernels.small_problems.seminormal import RefinementLimits
from neula.kernels.triangular_inverse import triangular_inverse

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


@dataclass(frozen=True)
class Triangles:
    """Measures of each R of a batch by itself."""

    # Shape (batch, n, n). R^-1: products with it take less time than triangular solves for single vectors.
    # None where the library solves.
    inverse: torch.Tensor | None
    # norm, norm_bound, shape (batch, 1): ||R D^-1||_2 from below and from above: from Schatten norms, within
    # n^(1/4), or estimated.
    norm: torch.Tensor
    norm_bound: torch.Tensor
    inverse_norm: torch.Tensor  # shape (batch, 1): ||D R^-1||_2 from above, likewise
    margin: float = 1.0  # by how much that may exceed the norm because it is estimated: 1, or ESTIMATED

    @classmethod
    def from_factor(
        cls, r: torch.Tensor, columns: torch.Tensor, gram: torch.Tensor | None = None
    ) -> Triangles:
        """For upper triangular R, shape (batch, n, n), and the diagonal of D, shape (batch, n, 1).

        The lower triangle of ``R^H R``, where it is known, spares a product.
        """
        inverse = triangular_inverse(r, upper=True)
        if gram is None:
            bounds = schatten_bounds(r / columns.mT, upper=True)
        else:
            bounds = schatten_bounds_of_gram(gram, columns)
        return cls(inverse, *bounds, schatten_bounds(columns * inverse, upper=True)[1])

    @classmethod
    def estimated(cls, r: torch.Tensor, columns: torch.Tensor) -> Triangles:
        """Estimate the norms by power methods, with D the column norms of R: no operation takes n^3."""
        norm = norm_of_triangle(r, columns)
        largest = (ESTIMATED * norm).clamp_max(r.shape[-1] ** 0.5)
        solves = partial(solved, r), partial(solved_transposed, r)
        inverse_norm_of = inverse_norm(*solves, columns, dtype=r.dtype)[0]
        return cls(None, norm, largest, ESTIMATED * inverse_norm_of[:, None], ESTIMATED)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors of triangles whose inverse is known."""
        assert self.inverse is not None
        return self.inverse, self.norm, self.norm_bound, self.inverse_norm


def are_solved(r: torch.Tensor) -> bool:
    """Whether the library solves with triangles sooner than it inverts them: large ones on a CPU."""
    return r.is_cpu and r.shape[-1] > EXPLICIT


def solved(r: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``R^-1 Y``."""
    return torch.linalg.solve_triangular(r, y, upper=True)


def solved_transposed(r: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``R^-H Y``."""
    return torch.linalg.solve_triangular(r.mH, y, upper=False)


class FactoredTallMatrices(FactoredProblems):
    """A batch of tall matrices T with R of each, accurate to any format.

    T, shape (batch, rows, columns), is in double precision, parts at most 1 in magnitude, and columns of
    comparable size unless their norms are given, shape (batch, columns, 1). ``low`` and ``b_low`` are what
    rounding T and the right-hand sides has lost. Without ``inverse``, ``R^-1``, the library solves, and the
    ``inverse_norm``, ``||D R^-1||_2`` from above, is what rounding errors of a solve are measured by. ``rhs``
    is what T^H is applied to in the pass that measures the ``rate``, shape (batch,): ``||I - W^H W||_F`` from
    above, the rounding errors of its measurement included.
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

    ``columns``, shape (batch, n, 1), are the diagonal of D, by default the norms of the columns. ``norm``,
    ``norm_bound``, shape (batch, 1): ``||B||_2`` for ``B = A D^-1``, from below and from above, as of
    ``triangles``; ``inverse_norm`` is ``||B^+||_2`` from above. With an R of ``half_precision`` products the
    first steps are with residuals in working precision, which take half the time and leave no more.
    """

    def __init__(
        self,
        a: torch.Tensor,
        r: torch.Tensor,
        columns: torch.Tensor | None = None,
        over_rows: Reduction = HERE,
        *,
        triangles: Triangles | None = None,
        half_precision: bool = False,
        **of_matrix: Any,
    ) -> None:
        if columns is None:
            (sizes,) = over_rows.norms(a, dim=1)
            columns = torch.where(sizes > 0, sizes, 1.0)[..., None]
        known = Triangles.from_factor(r, columns) if triangles is None else triangles
        of_matrix |= {"few": half_precision and over_rows.spread, "inverse_norm": known.inverse_norm}
        super().__init__(a, r, known.inverse, columns=columns, over_rows=over_rows, **of_matrix)
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

    def updated(self, at: Refinement) -> tuple[torch.Tensor, Measures]:
        residual, gradient = self._residual_and_gradient(at.change, at.residual)
        gradient, *of_rows = self.over_rows.total_and_norms(gradient, residual, at.b, dim=1)
        projected = lengths(self.coordinates(gradient)) / (1 - self.rate[:, None]).clamp_min(0)
        image, (residual_norm, b_norm) = self.norm * self.size(at.high), of_rows
        norms = Norms(residual_norm, lengths(gradient / self.columns), projected, image, b_norm)
        return residual, norms.measures(self.norm)

    def settled(self, at: Refinement) -> tuple[torch.Tensor, Measures]:
        """Bound the measures of :meth:`updated` from above without a pass over A.

        The part of the residual in the range of A is A times the error of x. Measures are infinite unless the
        update is :data:`NEGLIGIBLE`, and the rate one to be trusted.
        """
        projected = self.norm_bound * (at.left + self.size(at.low))
        residual_norm, b_norm = self.over_rows.norms(at.residual, at.b, dim=1)
        image = self.norm * self.size(at.high)
        norms = Norms(residual_norm, self.norm_bound * projected, projected, image, b_norm)
        negligible = self.norm_bound * self.size(at.change) <= NEGLIGIBLE * residual_norm
        known = negligible & (self.rate[:, None] <= MAX_RATE)
        return at.residual, norms.measures(self.norm).where(known)


class DampedProblems(Overdetermined):
    """``min ||A x - b||^2 + ||D x||^2`` for one A and a batch of diagonal matrices D, shape (batch, n, 1).

    A, shape (m, n), is float64, and at most 1 in magnitude. Right-hand sides, and residuals, have the rows of
    D below those of A; there b is zero.
    """

    def __init__(self, a: torch.Tensor, damps: torch.Tensor) -> None:
        self.damps = damps
        r = householder_r(a[None]).expand(len(damps), -1, -1)
        r = householder_r(torch.cat([r, torch.diag_embed(damps[..., 0])], 1))
        sizes = torch.hypot(two_norms(a, 0)[:, None], damps)
        super().__init__(a[None], r, columns=torch.where(sizes > 0, sizes, 1.0))

    def start(self, b: torch.Tensor) -> torch.Tensor:
        gradient = self._apart(transposed(self.t, self._together(b[:, : self.t.shape[1]])))
        return self.solve(self.coordinates(gradient))

    def residual(self, b: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """``b - A x`` for an unevaluated sum, shape (batch, m, k), in twice the working precision."""
        return self._apart(self._doubled_residual(b, high, low)[0])

    def _prepared(self, columns: torch.Tensor | None) -> Doubled:
        sizes = two_norms(self.t, 1)[..., None]  # those of A alone, not of each problem
        return Doubled.from_matrix(self.t, torch.where(sizes > 0, sizes, 1.0))

    def _normal(self, x: torch.Tensor) -> torch.Tensor:
        return self._apart(normal(self.t, self._together(x))) + self.damps.square() * x

    def _residual_and_gradient(self, x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        m = self.t.shape[1]
        known = residual_and_gradient(self.t, self._together(x), self._together(b[:, :m]))
        (residual, gradient), below = map(self._apart, known), b[:, m:] - self.damps * x
        return torch.cat([residual, below], 1), gradient + self.damps * below

    def _doubled_gradient(
        self, b: torch.Tensor, high: torch.Tensor, low: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.doubled is not None
        residual = self._doubled_residual(b, high, low)
        gradient, rest = map(self._apart, self.doubled.transposed_pair(*residual))
        # D^2 x as a sum of two numbers; the right-hand sides of these rows are zero.
        damps = self.damps.expand_as(high)
        image, lost = two_product(damps, high)
        lost = lost + damps * low
        again, lost_again = two_product(damps, image)
        gradient, error = two_sum(gradient, -again)
        gradient = gradient + (error + rest - lost_again - damps * lost)
        return torch.cat([self._apart(residual[0]), -image], 1), gradient

    def _doubled_residual(self, b: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> Pair:
        assert self.doubled is not None
        top = self._together(b[:, : self.t.shape[1]])
        return self.doubled.residual(self._together(high), top, self._together(low))

    def _together(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors of all problems side by side, shape (1, n, batch k)."""
        return x.movedim(0, 1).flatten(1)[None]

    def _apart(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`_together`."""
        return x[0].unflatten(1, (len(self.damps), -1)).movedim(1, 0)


class Underdetermined(FactoredTallMatrices):
    """``min ||x||`` subject to ``A x = b`` for wide A, T being ``A^H`` with scaled columns: ``x = T w``.

    Both x and w are refined (the augmented system): errors of x outside the range of T do not show in the
    residual of ``A x = b``. D holds the norms of the columns of A, up to a common factor; ``norm`` is ``||A
    D^-1||_2`` from below. Rows of A and b were divided by powers of two with the ``exponents``, shape (batch,
    1, m).
    """

    def __init__(
        self,
        t: torch.Tensor,
        r: torch.Tensor,
        columns: torch.Tensor,
        low: torch.Tensor | None = None,
        b_low: torch.Tensor | None = None,
        *,
        norm: torch.Tensor | None = None,
        exponents: torch.Tensor | None = None,
    ) -> None:
        self.inverse = triangular_inverse(r, upper=True)
        super().__init__(t, r, self.inverse, low, b_low)
        self.columns = columns
        self._norm = torch.ones_like(columns[:, 0]) if norm is None else norm
        self._exponents = torch.zeros_like(t[:, :1], dtype=torch.int64) if exponents is None else exponents
        of_r, of_inverse = (schatten_bounds(x, upper=True)[1] for x in (r, self.inverse))
        self._condition, self._left = of_r * of_inverse, left_by_update(self.rate[:, None], lifted=True)

    def start(self, b: torch.Tensor) -> torch.Tensor:
        w = self.solve(self.coordinates(b))
        return torch.cat([self.t @ w, w], 1)

    def solution(self, unknowns: torch.Tensor) -> torch.Tensor:
        return unknowns[:, : self.t.shape[1]]

    def size(self, unknowns: torch.Tensor) -> torch.Tensor:
        return lengths(self.columns * self.solution(unknowns))

    def evaluate(self, b: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> DoubledEvaluation:
        """Updates of x and of w, by solves with R."""
        n = self.t.shape[1]
        (x, w), (x_low, w_low) = high.tensor_split([n], 1), low.tensor_split([n], 1)
        assert self.doubled is not None
        outside, rest = self.doubled.residual(w, x, w_low)
        residual, residual_low = self.doubled.mH.residual(x, b, x_low)
        rest = rest + x_low
        if self.low is not None and self.b_low is not None:
            rest, residual_low = rest - self.low @ w, residual_low - self.low.mH @ x + self.b_low
        outside, residual = outside + rest, residual + residual_low
        inside = self.coordinates(residual + self.t.mH @ outside)
        dw = self.solve(inside)
        dx = self.t @ dw - outside
        sizes = lengths(x)
        noise = residual_noise(self._size, doubled=True) * self._condition
        wrong = self._left * (lengths(outside) + lengths(inside)) + noise * sizes
        return DoubledEvaluation(torch.cat([dx, dw], 1), self.columns.amax(1) * wrong, residual)

    def updated(self, at: Refinement) -> tuple[torch.Tensor, Measures]:
        """``||r|| / (||B|| ||D x|| + ||b||)``, rows in the units that were given (Rigal and Gaches, 1967).

        From above: where sums of slices lose what is small compared with the largest x, that is added to r.
        """
        residual = at.residual - self.t.mH @ self.solution(at.change)
        of_residual, of_b = (lengths(shift(x, self._exponents.mT)) for x in (residual, at.b))
        assert self.doubled is not None
        if self.doubled.cut:
            largest = self.solution(at.high).abs().amax(1)  # T is at most 1
            noise = residual_noise(self._size, doubled=True) * largest
            rows = lengths(shift(torch.ones_like(at.b[..., :1]), self._exponents.mT))
            of_residual = of_residual + noise * rows
        error = over(of_residual, self._norm * self.size(at.high) + of_b)
        return residual, Measures(error, error)


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
    return two_norms(x, 1)


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
