"""One least-squares problem with bounds by block principal pivoting on its normal equations, in arrays.

The algorithm is that of :mod:`neula.algorithms.bounded.block_pivoting`. What differs is the overhead, and
that A is not factorized: sets of free variables are tried with parts of the Gram matrix, and the last one is
solved for by corrected seminormal equations, with residuals of A itself. It is held against the gradient of a
residual that is orthogonal to the free columns.

Variables are those of ``B = A D^-1``, D being the norms of the columns of A.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.linalg import lapack

from neula.algorithms.bounded.block_pivoting import PATIENCE
from neula.algorithms.lapack.products import WIDE, cholesky_factor, gram_matrix, in_double, products
from neula.algorithms.lapack.refinement import length
from neula.algorithms.lapack.triangle import TriangularFactor
from neula.engines import FP64
from neula.kernels.bounded_host import BoundedLimits, BoundedMinimum, Numbers
from neula.kernels.magnitudes import MODERATE

ROUGH = 2.0**-30
"""Components of gradients, relative to what they are sums of, that normal equations say nothing of."""

SETTLED = 2.0**-27
"""An update, relative to x, after which the next one, shorter by as much, is below one unit roundoff."""

STEPS = 4
"""Updates at most: with a factor that is good enough two do."""


def limits_of(sets: int) -> BoundedLimits:
    """What decides where so many sets of free variables may be tried."""
    return BoundedLimits(MODERATE, ROUGH, SETTLED, STEPS, PATIENCE, sets)


class Face:
    """Free variables, and the factor of their columns: ``L L^T = B_F^T B_F``.

    Parameters
    ----------
    free : array of int, shape (w,)
    gram : array, shape (w, w)
        ``B_F^T B_F``.
    large : bool
        Whether it is large (:mod:`neula.algorithms.lapack.products`).

    Attributes
    ----------
    free
    singular : bool
        Whether their columns are dependent: there is no factor.
    """

    def __init__(self, free: np.ndarray, gram: np.ndarray, *, large: bool) -> None:
        self.free, self._gram, self._large = free, gram, large
        lower = cholesky_factor(gram, large=large) if len(free) else gram
        self.singular, self._lower = lower is None, gram if lower is None else lower

    def solve(self, y: np.ndarray) -> np.ndarray:
        """``(B_F^T B_F)^-1 y``."""
        found: np.ndarray = y
        if self._large:
            columns = torch.from_numpy(y)[:, None]
            found = torch.cholesky_solve(columns, torch.from_numpy(self._lower))[:, 0].numpy()
        elif len(y):
            found = lapack.dpotrs(self._lower, y, lower=1)[0]
        return found

    def norms(self) -> tuple[float, float, float]:
        """``||B_F||`` and ``||L^-1||`` from above, and by how much the second may be too large."""
        norm, width = math.sqrt(length(self._gram.ravel())), len(self.free)
        if not width:
            return norm, 0.0, 1.0
        triangle = TriangularFactor(self._lower, np.ones(width), large=self._large)
        return norm, triangle.inverse_norm, triangle.margin


class Point(NamedTuple):
    """The minimum over the free variables, the others being at their bounds.

    Attributes
    ----------
    z : array, shape (n,)
        ``D x``.
    left : array, shape (n,)
        The gradient ``B^T (r - P r)``, P being the projector on the free columns.
    noise : float
        What of its components is due to rounding errors.
    residual : array, shape (m,)
        r; b where only normal equations are solved, which take no residual.
    gradient : array, shape (n,)
        ``B^T r``.
    projected : float
        ``||P r||``.
    """

    z: np.ndarray
    left: np.ndarray
    noise: float
    residual: np.ndarray
    gradient: np.ndarray
    projected: float


class Normal:
    """``min ||A x - b||`` with bounds by normal equations.

    Parameters
    ----------
    a : array, shape (m, n), m >= n
    b : array, shape (m,)
        float64.
    bounds : array, shape (2, n)
        Lower and upper ones.
    gram : array, shape (n, n)
        ``A^T A``.
    large : bool
        Whether A is large (:mod:`neula.algorithms.lapack.products`).

    Attributes
    ----------
    sizes : array, shape (n,)
        D.
    b_norm : float
    low, high : array, shape (n,)
        Bounds of ``D x``.
    whole : Face
        All variables.
    """

    whole: Face

    def __init__(
        self,
        a: np.ndarray,
        b: np.ndarray,
        bounds: np.ndarray,
        gram: np.ndarray,
        *,
        large: bool,
    ) -> None:
        self.shape, self.b, self.b_norm, self._large = a.shape, b, length(b), large
        self._a, self.sizes = products(a, large=large), np.sqrt(gram.diagonal())
        lower, upper = bounds
        self._bounds, self._places = np.array((lower, 0.0 * self.sizes, upper)), np.arange(len(gram))
        self._corners = self._bounds * self.sizes
        self.low, _, self.high = self._corners
        self._gram = gram / self.sizes / self.sizes[:, None]
        self._times_gram = products(self._gram, large=large and len(gram) >= WIDE).times
        self._right = self._a.transposed_times(b) / self.sizes

    @classmethod
    def factorize(cls, given: np.ndarray, b: np.ndarray, bounds: np.ndarray, *, large: bool) -> Normal | None:
        """The same; None where numbers are not moderate, and where columns are dependent."""
        a = in_double(given, large=large)
        gram = gram_matrix(a, large=large)
        squares = gram.diagonal().tolist()
        if not (min(squares) >= MODERATE**-2 and max(squares) <= MODERATE**2):
            return None
        found = cls(a, b, bounds, gram, large=large)
        whole = found.face(found._places)
        if whole is None or not (1 / MODERATE <= found.b_norm <= MODERATE and found._keeps_bounds()):
            return None
        found.whole = whole
        return found

    def _keeps_bounds(self) -> bool:
        """Whether all bounds but zero and infinite ones are moderate beside columns of norm 1."""
        count = (self._bounds != 0) & (np.abs(self._bounds) < math.inf)
        sizes = np.abs(self._corners[count])
        return not len(sizes) or 1 / MODERATE <= sizes.min() <= sizes.max() <= MODERATE

    def face(self, free: np.ndarray) -> Face | None:
        """Some variables; None where their columns are dependent."""
        rows = self._gram.take(free, 0)
        face = Face(free, rows.take(free, 1), large=self._large and len(free) >= WIDE)
        return None if face.singular else face

    def x(self, z: np.ndarray, at: np.ndarray) -> np.ndarray:
        """In the units of A, bounds being what they are there."""
        return np.where(at == 0, z / self.sizes, self._bounds[at + 1, self._places])

    @property
    def unbounded(self) -> np.ndarray:
        """The solution without bounds."""
        at = np.zeros_like(self._places)
        return self.x(self.exactly(self.whole, at).z, at)

    def roughly(self, face: Face, at: np.ndarray) -> Point:
        """The minimum over a face by normal equations alone.

        Parameters
        ----------
        face : Face
        at : array of int, shape (n,)
            -1 of variables at their lower bounds, 1 at their upper ones, 0 of free ones.
        """
        z = self._corners[at + 1, self._places]
        right = self._right - self._times_gram(z)
        z[face.free] = face.solve(right[face.free])
        left = self._right - self._times_gram(z)
        noise = ROUGH * (self.b_norm + len(z) ** 0.5 * length(z))
        return Point(z, left, noise, self.b, left, 0.0)

    def exactly(self, face: Face, at: np.ndarray) -> Point:
        """By corrected seminormal equations, with residuals of A."""
        z, free = self.roughly(face, at).z, face.free
        residual, gradient, update = self._evaluated(face, z, at)
        for _ in range(STEPS):
            settled = length(update) <= SETTLED * length(z)
            z[free] += update
            residual, gradient, update = self._evaluated(face, z, at)
            if settled:
                break
        projected = math.sqrt(max(0.0, update.dot(gradient[free])))
        whole = np.zeros(len(z))
        whole[free] = update
        left, of_residual = gradient - self._times_gram(whole), length(residual)
        u = 4 * len(z) ** 0.5 * FP64.u
        # A residual that is rounding errors has a gradient that says nothing.
        says = of_residual > u * (self.b_norm + float(np.abs(z).sum()))
        return Point(z, left, 2 * u * of_residual if says else math.inf, residual, gradient, projected)

    def infeasible(self, point: Point, at: np.ndarray) -> np.ndarray:
        """Free variables beyond their bounds, and others that are held back for nothing."""
        beyond = (point.z < self.low) | (point.z > self.high)
        return beyond | (at * point.left < -point.noise)

    def _evaluated(
        self, face: Face, z: np.ndarray, at: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The residual of x, its gradient, and the update of free variables."""
        residual, gradient = self._a.residual(self.b, self.x(z, at))
        gradient /= self.sizes
        return residual, gradient, face.solve(gradient[face.free])


def block_pivoting(problem: Normal, limits: BoundedLimits, *, of_all: bool = False) -> BoundedMinimum | None:
    """Exchange all infeasible variables at once, beginning with the solution without bounds.

    None where columns of free variables are dependent, and where there is no end.

    Parameters
    ----------
    problem : Normal
    limits : BoundedLimits
    of_all : bool, optional
        Whether the solution without bounds is asked for.
    """
    z = problem.roughly(problem.whole, np.zeros(len(problem.sizes), np.intp)).z
    at = _sides(z >= problem.high, z <= problem.low)
    minimum, best, patience = problem.roughly, len(at) + 1, limits.patience
    for sets in range(1, int(limits.sets) + 1):
        free = (at == 0).nonzero()[0]
        face = problem.face(free) if len(free) < len(at) else problem.whole
        if face is None:
            return None
        point = minimum(face, at)
        wrong = problem.infeasible(point, at)
        number = int(np.count_nonzero(wrong))
        if number == 0 and minimum == problem.roughly:
            minimum = problem.exactly
            point = minimum(face, at)
            wrong = problem.infeasible(point, at)
            number = int(np.count_nonzero(wrong))
        if number == 0:
            return _measured(problem, face, point, at, sets, of_all=of_all)
        best, patience = (number, limits.patience) if number < best else (best, patience - 1)
        if patience < 0:  # all at once lead nowhere
            wrong[: wrong.nonzero()[0][-1]] = False
        at = np.where(wrong, _sides(point.z > problem.high, point.z < problem.low), at)
    return None


def _sides(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.subtract(above, below, dtype=np.intp)


def _measured(
    problem: Normal, face: Face, point: Point, at: np.ndarray, sets: int, *, of_all: bool
) -> BoundedMinimum:
    push = at * point.left
    wrong = np.where(at == 0, point.gradient, np.minimum(at * point.gradient, 0.0))
    norm, inverse_norm, margin = face.norms()
    norm_of_all, inverse_norm_of_all, _ = problem.whole.norms()
    numbers = Numbers(
        sets=sets,
        width=len(face.free),
        b=problem.b_norm,
        residual=length(point.residual),
        gradient=length(wrong),
        optimality=float(np.abs(wrong * problem.sizes).max()),
        projected=point.projected,
        rest=length(np.minimum(push, 0.0)),
        image=length(point.z),
        sum=float(np.abs(point.z).sum()),
        pushed=float(push[at != 0].min(initial=math.inf)),
        norm=norm,
        inverse_norm=inverse_norm,
        norm_of_all=norm_of_all,
        inverse_norm_of_all=inverse_norm_of_all,
        margin=margin,
    )
    x = problem.x(point.z, at)
    return BoundedMinimum(numbers, x, at, problem.sizes, problem.unbounded if of_all else x[:0])
