"""The shortest solution of one least-squares problem with dependent columns, in NumPy and LAPACK.

Pivoted QR finds r independent columns: ``B P = Q R [I F]`` for ``B = A D^-1``, but for what is dropped, R
of order r and ``F = R^-1 R12``. Solutions have the coefficients ``c = [I F] P^T D x`` with ``R c = Q^T b``;
the shortest one is ``x = M (M^T M)^-1 c`` for ``M = D P [I F]^T``, whose columns span the rows of A. F has no
more digits than R leaves, nor has M. So x is made of the rows as they were given, ``x = A^T w`` with
``w = Q R^-T (M^T M)^-1 c``: it lies in their space whatever the errors of w, which is refined. Q is never
formed, since ``Q R`` are columns of B: these are seminormal equations (Björck, "Numerical Methods for Least
Squares Problems", SIAM, 1996).

What is dropped, ``||E|| = sigma_(r+1)``, counts by its square only, since the residual is made orthogonal to
``B P [I F]^T`` and not to r columns of B (Fierro and Bunch, "Bounding the subspaces from rank revealing
two-sided orthogonal decompositions", SIAM J. Matrix Anal. Appl. 16, 1995): the truncated problem is solved,
which singular values define, and not one that pivots define.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
from scipy.linalg import lapack

from neula.algorithms.krylov.batched_lstsq import FEW, MARGINS, PROBES, ROUNDING
from neula.algorithms.lapack.doubled import Pair, SlicedMatrix, two_sum
from neula.algorithms.lapack.independent import Independent, reflected
from neula.algorithms.lapack.products import WIDE, cholesky_factor, gram_matrix, in_double, products
from neula.algorithms.lapack.refinement import RefinedVectorSolution, ResidualEvaluation, length
from neula.algorithms.lapack.seminormal import ALIKE, SeminormalFactor
from neula.algorithms.lapack.vectors import probe_array
from neula.algorithms.spectra.rank_revealing import Spectrum
from neula.certificates.forward_error import MAX_RATE, enlarged, left_by_update, wedin_factor
from neula.certificates.residuals import projection_noise, quotient, residual_noise
from neula.engines import FP64
from neula.kernels.magnitudes import MODERATE


class Dependent(ABC):
    """``min ||x||`` among the solutions of ``min ||A x - b||``.

    Parameters
    ----------
    a : array, shape (m, n)
        float64, its columns scaled.
    columns : array, shape (n,)
        Norms of the columns as they were given, none of which is zero: the diagonal of D.
    found : Independent
    scales : array, shape (n,), or None
        Powers of two with which the columns of A were multiplied.
    large : bool
        Whether A is large (:mod:`neula.algorithms.lapack.products`).

    Attributes
    ----------
    scales : array, shape (n,), or None
    rate : float
        By how much a step makes errors smaller, from above.
    rank : int
    condition : float
        ``sigma_1 / sigma_r`` of B, estimated.
    """

    method = "pivoted householder fp64"

    def __init__(
        self,
        a: np.ndarray,
        columns: np.ndarray,
        found: Independent,
        *,
        scales: np.ndarray | None = None,
        large: bool,
    ) -> None:
        self.shape, self.rank, self.scales, self._found = a.shape, found.rank, scales, found
        self._a = products(a, large=large)
        self._columns = columns if scales is None else columns * scales
        self._largest = float(columns.max())
        self._spread = self._largest / float(columns.min())
        units, rest, r = columns[found.order] / self._largest, found.rest, found.rank
        self._of_columns = _shifted_factor(rest, np.ones(r), large=large)
        self._of_rows = _shifted_factor(rest * units[r:], units[:r] ** 2, large=large)
        self._growth = math.hypot(1.0, length(rest.ravel()))
        self._through = found.triangle.inverse_norm
        self.condition = max(1.0, found.norm * self._through / found.triangle.margin)
        self._condition_bound = found.norm_bound * self._through
        regular = self._of_columns is not None and self._of_rows is not None
        self.rate = self._measured_rate(FEW if large else PROBES) if regular else math.inf

    @staticmethod
    def factorize(
        given: np.ndarray,
        rcond: float,
        *,
        rounding: float = math.inf,
        doubled: bool,
        large: bool = False,
        factor: SeminormalFactor | None = None,
    ) -> Plain | Precise | None:
        """Factorize; None where the rank is in doubt, and where numbers are not moderate.

        Parameters
        ----------
        given : array, shape (m, n)
        rcond, rounding : float
            As :meth:`Independent.factorize` takes them.
        doubled : bool
            Whether products are to be in twice the working precision.
        large : bool
        factor : SeminormalFactor, optional
            R of A by reflections in double precision, if it is known.
        """
        a = in_double(given, large=large)
        columns = np.sqrt(np.einsum("ij,ij->j", a, a)) if factor is None else factor.columns
        if not (columns.min() >= 1 / MODERATE and columns.max() <= MODERATE):
            return None
        if factor is not None:
            core = factor.lower.T / columns
        else:
            core = a / columns
            core = reflected(core, large=large) if large or len(a) > a.shape[1] else core
        found = Independent.factorize(core, a.shape, rcond, rounding=rounding, large=large)
        if found is None:
            return None
        system = (Precise if doubled else Plain)(a, columns, found, large=large)
        return system if system.rate <= MAX_RATE else None

    @abstractmethod
    def _step(self, projected: np.ndarray) -> np.ndarray:
        """What ``Q^T r`` adds to x, of one vector or of a few."""

    def change(self, x: np.ndarray) -> np.ndarray:
        """``A x``."""
        return self._a.times(x)

    def size(self, x: np.ndarray) -> float:
        """``||D x||``."""
        return length(self._columns * x)

    def errors(self, b: np.ndarray, found: RefinedVectorSolution) -> tuple[float, float, float]:
        """Backward error, optimality and forward error of a refined solution, what is dropped included."""
        norm = self._found.norm
        gradient = self._a.transposed_times(found.residual)
        residual, image = length(found.residual), norm * found.size
        projected = enlarged(length(self._projected(gradient)), self.rate)
        optimality = quotient(length(gradient / self._columns), norm * residual)
        backward_error = min(optimality, residual / (image + length(b)), projected / image)
        return backward_error, optimality, found.forward_error + self._of_dropped(residual / image)

    def _of_dropped(self, ratio: float) -> float:
        """Relative error of x by what is dropped, for ``||r|| / (||B|| ||D x||)``.

        By so much the spaces of rows and of columns differ from those of singular vectors (Wedin,
        "Perturbation bounds in connection with singular value decomposition", BIT 12, 1972).
        """
        dropped = self._found.dropped * self._through
        turned = enlarged(enlarged(dropped * (dropped + self._of_rest), dropped), dropped)
        return turned * self._spread**2 * self._growth * (1 + wedin_factor(self._condition_bound, ratio))

    @property
    def _of_rest(self) -> float:
        """By how much rounding errors of F turn the space of the rows."""
        return self._condition_bound * Spectrum.rounding(sum(self.shape)) * self._growth

    def _floor(self, b: np.ndarray, x: np.ndarray, residual: np.ndarray, noise: float) -> float:
        """What rounding errors of products leave of ``Q^T r``."""
        sizes = self.size(x), length(b), length(residual)
        return projection_noise(noise, self._found.norm_bound, self._condition_bound, *sizes)

    def _projected(self, gradient: np.ndarray) -> np.ndarray:
        """``Q^T r`` by ``A^T r``, of one vector or of a few: ``R^-T (I + F F^T)^-1 [I F] P^T D^-1 A^T r``."""
        known, r = self._found, self.rank
        in_order = (gradient.T / self._columns).T[known.order]
        of_rows = in_order[:r] + known.rest.dot(in_order[r:])
        return known.triangle.solve_transposed(_solved(self._of_columns, of_rows))

    def _multipliers(self, projected: np.ndarray) -> np.ndarray:
        """``(M^T M)^-1 R^-1 Q^T r``, of one vector or of a few, in units of the largest column."""
        return _solved(self._of_rows, self._found.triangle.solve(projected))

    def _combined(self, multipliers: np.ndarray) -> np.ndarray:
        """``Q R^-T h``, of one vector or of a few: ``Q R`` are columns of B."""
        known = self._found
        v = known.triangle.solve(known.triangle.solve_transposed(multipliers))
        counting, x = known.order[: self.rank], np.zeros((self.shape[1], *v.shape[1:]))
        x[counting] = (v.T / self._columns[counting]).T
        return self._a.times(x)

    def _measured_rate(self, count: int) -> float:
        z = probe_array(self.rank, count, unit=self.rank <= PROBES)
        images = self._projected(self._a.gram_times(self._step(z)))
        rounding = ROUNDING * FP64.u * self.rank * self._through
        return MARGINS[count] * length((z - images).ravel(order="K")) + rounding


class Plain(Dependent):
    """With products in working precision: x is refined, by vectors that F makes rows of."""

    doubled = None

    _updates = 0.0
    """The sum of their sizes, for one right-hand side."""

    def start(self, b: np.ndarray) -> np.ndarray:
        """A first x, a sum of rows as they were given."""
        self._updates = 0.0
        multipliers = self._multipliers(self._projected(self._a.transposed_times(b)))
        return self._a.transposed_times(self._combined(multipliers)) / self._largest**2

    def evaluate(self, b: np.ndarray, high: np.ndarray, low: np.ndarray) -> ResidualEvaluation:
        """The residual of x, and what it adds to x."""
        residual, gradient = self._a.residual(b, high)
        projected = self._projected(gradient)
        update = self._step(projected)
        noise = residual_noise(sum(self.shape), doubled=False)
        floor = self._floor(b, high, residual, noise)
        # Errors that leave the space of the rows, where no step sees them: of the first x, of all updates.
        self._updates += self.size(update)
        of_rows = self._of_sums(high, noise) + self._of_rest * self._spread**2 * self._updates
        along = self._spread * self._through
        wrong = along * (left_by_update(self.rate, lifted=True) * length(projected) + floor) + of_rows
        return ResidualEvaluation(residual - self.change(update), update, wrong, along * floor + of_rows)

    def _of_sums(self, x: np.ndarray, noise: float) -> float:
        """Rounding errors of ``A^T w``, by the length of w."""
        known, r = self._found, self.rank
        y = (self._columns * x)[known.order]
        h = _solved(self._of_rows, y[:r] + known.rest.dot(y[r:]))
        return noise * known.norm_bound * length(known.triangle.solve_transposed(h))

    def _step(self, projected: np.ndarray) -> np.ndarray:
        """``D^-1 D M (M^T M)^-1 c``."""
        known, h = self._found, self._multipliers(projected)
        y = np.empty((self.shape[1], *h.shape[1:]))
        y[known.order] = np.concatenate([h, known.rest.T.dot(h)])
        return (y.T * (self._columns / self._largest**2)).T


class Precise(Dependent):
    """With products in twice the working precision: w is refined."""

    def __init__(self, a: np.ndarray, columns: np.ndarray, found: Independent, *, large: bool) -> None:
        scales, self._shrink = None, np.ones(1)
        if columns.max() > ALIKE * columns.min():  # all are cut into slices at the same places
            scales = np.ldexp(1.0, -np.frexp(columns)[1])
            a, self._shrink = a * scales, scales**-2
        super().__init__(a, columns, found, scales=scales, large=large)
        self.doubled = SlicedMatrix(a, float(self._columns.max()), large=large)

    def start(self, b: np.ndarray) -> np.ndarray:
        """A first w."""
        return self._raised(self._projected(self._a.transposed_times(b)))

    def lift(self, w: np.ndarray) -> Pair:
        """``A^T w``, for the scaled columns."""
        high, low = self.doubled.transposed_pair(w, np.zeros(len(w)))
        return two_sum(high * self._shrink, low * self._shrink)

    def solves(self, b: np.ndarray, residual: np.ndarray, size: float) -> bool:
        """Nothing is known of a residual that need not vanish."""
        return True

    def evaluate(self, b: np.ndarray, w: np.ndarray, high: np.ndarray, low: np.ndarray) -> ResidualEvaluation:
        """The residual of x, and what it adds to w."""
        noise, of_slices = residual_noise(sum(self.shape), doubled=True), self.doubled.error
        residual, rest = self.doubled.residual(high, low, b)
        projected = self._projected(self.doubled.gradient(residual, rest))
        of_gradient = self._through * length(residual) / float(self._columns.min())
        floor = self._floor(b, high, residual, noise) + of_slices * (length(high) + of_gradient)
        # Rounding errors of A^T w are those of x itself.
        of_rows = self._largest**2 * self._found.norm_bound * noise
        of_rows = (of_rows + float((self._columns * self._shrink).max()) * of_slices) * length(w)
        along = self._spread * self._through
        wrong = along * (left_by_update(self.rate, lifted=True) * length(projected) + floor) + of_rows
        return ResidualEvaluation(residual, self._raised(projected), wrong, along * floor + of_rows)

    def _raised(self, projected: np.ndarray) -> np.ndarray:
        """``w = Q R^-T (M^T M)^-1 R^-1 Q^T r``."""
        return self._combined(self._multipliers(projected)) / self._largest**2

    def _step(self, projected: np.ndarray) -> np.ndarray:
        return (self._a.transposed_times(self._raised(projected)).T * self._shrink).T


def _shifted_factor(f: np.ndarray, diagonal: np.ndarray, *, large: bool) -> np.ndarray | None:
    """Cholesky's L of ``diag + F F^T``."""
    gram = gram_matrix(f.T, large=large)
    gram[np.diag_indices(len(gram))] += diagonal
    return cholesky_factor(gram, large=large and len(gram) >= WIDE)


def _solved(lower: np.ndarray | None, x: np.ndarray) -> np.ndarray:
    """``(L L^T)^-1 x``, for one vector after another: a library takes longer for a few together."""
    if x.ndim == 2:
        return np.array([_solved(lower, column) for column in np.ascontiguousarray(x.T)]).T
    found: np.ndarray = lapack.dpotrs(lower, x, lower=1)[0]
    return found
