"""A fit by MINPACK, and the steps after it: to the accuracy that rounding errors allow.

MINPACK is Moré's own program of the method in :mod:`neula.algorithms.nonlinear.levenberg_marquardt`. It stops
by the cost, as every trust region does; :mod:`neula.algorithms.nonlinear.gauss_newton` says why steps
continue. Here they are corrected by C. G. Broyden, "A class of methods for solving nonlinear simultaneous
equations", Math. Comp. 19, 1965: what a Gauss-Newton step leaves is nearly the same multiple each time, which
two steps tell, and each step that is saved is a Jacobian.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import leastsq

from neula.algorithms.nonlinear.gauss_newton import MOST, NEAR, STAGNANT, allowed_cost, rounded_step
from neula.algorithms.nonlinear.levenberg_marquardt import BOTH, FIRST_RADIUS, FTOL, GTOL, XTOL, Tolerances
from neula.algorithms.nonlinear.one_function import EPS, OneFunction, Unusual, length
from neula.kernels import scipy_linalg

TINY = EPS**0.75  # part of x that a step must be longer than, if errors of the Jacobian may be all that it is
STATUS = {1: FTOL, 2: XTOL, 3: BOTH, 4: GTOL}  # of MINPACK's numbers for the tests that are passed


@dataclass(frozen=True)
class Near:
    """One problem near x: what :class:`~neula.algorithms.nonlinear.levenberg_marquardt.Linearization` has."""

    x: np.ndarray  # shape (n,)
    cost: float
    slopes: np.ndarray  # shape (n, m): transpose of the Jacobian
    r: np.ndarray  # shape (n, n): with anything below the diagonal
    c: np.ndarray  # shape (n,)
    gradient: np.ndarray  # shape (n,)
    norms: np.ndarray  # shape (n,)
    size: float  # ||f||; with a loss that of residuals weighted by its slope
    far: float  # ||D x||, D being the norms of the columns
    step: np.ndarray  # shape (n,): of Gauss and Newton
    length: float  # ||D step||
    rounding: float  # how long that may be because of rounding errors alone, from below
    noise: float  # the same of errors of the Jacobian

    @classmethod
    def at(cls, function: OneFunction, x: np.ndarray) -> Near:
        """Linearize a function. Raises Unusual where it is not finite, and for columns of the Jacobian that
        are zero or surely dependent.
        """
        f, slopes, size = function.weighted(x)
        n, m = slopes.shape
        stack = np.empty((n + 1, m))
        stack[:n], stack[n] = slopes, f
        factors = scipy_linalg.lapack.dgeqrf(stack.T, overwrite_a=1)[0]
        r, c = factors[:n, :n], factors[:n, n]
        with np.errstate(all="ignore"):
            norms = np.sqrt(np.einsum("nm,nm->n", slopes, slopes))
            # The condition number is at least the reciprocal of this.
            least = float((np.abs(np.diagonal(r)) / norms).min())
            if not least > EPS:
                raise Unusual
            step = scipy_linalg.lapack.dtrtrs(r, -c)[0]
            far, long, cost = length(norms * x), length(norms * step), function.cost(x)
            rounding = rounded_step(far, size, least, EPS)
            noise = function.noise * n**0.5 * size / (least * least)
            gradient = slopes @ f
        return cls(x, cost, slopes, r, c, gradient, norms, size, far, step, long, rounding, noise)

    @property
    def relative(self) -> float:
        """Length of the step as a part of x; where that is zero of where the step leads."""
        return self.length / self.far if self.far > 0 else float(self.length > 0)

    @property
    def ends(self) -> bool:
        """Whether no step leads further: errors are as long, or it is too long to end with."""
        least = max(self.rounding, min(self.noise, TINY * self.far))
        return not self.length > least or (self.far > 0 and not self.relative <= NEAR)

    def exceeded_by(self, cost: float) -> bool:
        """Whether a cost is larger, beyond the rounding errors that it may have."""
        return not cost <= allowed_cost(self.cost, self.far, self.size, EPS)


def minimized(function: OneFunction, x: np.ndarray, tolerances: Tolerances) -> tuple[np.ndarray, int]:
    """The minimum near x where MINPACK stops, and the test that was passed. Raises Unusual if none was."""
    x, _, _, _, passed = leastsq(
        function.squared,
        x,
        Dfun=function.squared_slopes,
        full_output=True,
        col_deriv=True,
        ftol=tolerances.ftol,
        xtol=tolerances.xtol,
        gtol=tolerances.gtol,
        maxfev=tolerances.max_nfev,
        factor=FIRST_RADIUS,
    )
    if passed not in STATUS:
        raise Unusual
    return x, STATUS[passed]


def polished(function: OneFunction, x: np.ndarray) -> tuple[Near, float]:
    """Continue while steps shrink and the cost does not rise; may raise Unusual.

    Returns where that ends, and the rate: by what Gauss-Newton steps shrink, the most that was seen; zero
    where nothing was left to gain.
    """
    here, rate, inverse = Near.at(function, x), 0.0, np.eye(len(x))
    scale = here.norms
    for _ in range(MOST):
        if here.ends:
            return here, rate
        step = inverse @ (scale * here.step)
        trial = here.x + step / scale
        if here.exceeded_by(function.cost(trial)):
            return here, rate
        there = Near.at(function, trial)
        change = scale * (there.step - here.step)
        rate = max(rate, length(step + change) / length(step))
        if not (rate <= STAGNANT and there.length <= STAGNANT * here.length):
            return there, rate
        answer = inverse @ change
        fall = -float(step @ answer)
        if fall > (1 - STAGNANT) * float(step @ step):
            inverse += (step + answer)[:, None] * (step @ inverse / fall)
        here = there
    return here, rate
