"""One function of NumPy and its Jacobian, for methods that ask for both, more than once at the same point.

Complex residuals are real ones here, the real part of each before its imaginary part.

The schemes are those of :mod:`neula.algorithms.nonlinear.differentiate`; here there are no bounds, and all
quotients of a Jacobian are taken at once, since of a small problem calls are most of the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from neula.algorithms.nonlinear.differentiate import (
    MEASURED,
    NEGLIGIBLE,
    PROBES,
    QUOTIENTS,
    SHORT,
    STEPS,
    noise,
)
from neula.algorithms.nonlinear.losses import Loss
from neula.kernels import scipy_linalg
from neula.kernels.magnitudes import MODERATE

Vectors = Callable[[np.ndarray], np.ndarray]
"""From x, shape (n,), to residuals, shape (m,), or to their Jacobian, shape (m, n)."""

DOUBLE, COMPLEX = np.dtype(np.float64), np.dtype(np.complex128)
EPS = float(np.finfo(DOUBLE).eps)

_FAR = {
    name: ([far for far, _ in pairs], np.array([by for _, by in pairs])) for name, pairs in QUOTIENTS.items()
}


def length(x: np.ndarray) -> float:
    """Euclidean norm of a vector whose squares neither overflow nor underflow."""
    return math.sqrt(x.dot(x))


class Unusual(Exception):
    """Not what this module is for: active bounds, residuals of another dtype, or numbers so large or so small
    that squares of their inverses overflow.
    """


class OneFunction:
    """Residuals and the transpose of their Jacobian, by derivatives that the caller knows, or by differences.

    The ``scheme`` of the latter may be changed on the way. The function may be called within bounds, and a
    loss may take the place of the squares of the residuals. ``norms`` and ``peaks`` are those of the columns
    of the Jacobian, at the last point and the largest ones so far; ``nfev`` and ``njev`` count calls for
    residuals, without those for differences, and for Jacobians.

    >>> function = OneFunction(lambda x: x**2, None, "5-point")
    >>> bool(abs(function.slopes(np.array([3.0]))[0, 0] - 6) < 1e-9)
    True
    """

    def __init__(
        self,
        call: Vectors,
        derivatives: Vectors | None,
        scheme: str,
        lower: np.ndarray | None = None,
        upper: np.ndarray | None = None,
        loss: Loss | None = None,
    ) -> None:
        self.scheme, self._loss = scheme, loss
        self.norms = self.peaks = np.zeros(1)
        self.nfev = self.njev = 0
        self._call, self._derivatives, self._lower, self._upper = call, derivatives, lower, upper
        self._typical: list[float] = []
        self._at = self._sloped_at = b""
        self._f = self._slopes = np.empty(0)
        self._dtype: np.dtype[Any] = DOUBLE  # of what the function returns

    def presented(self, x: np.ndarray) -> np.ndarray:
        """Numbers of the residuals, shape (..., m), as the function returns them."""
        return x.view(self._dtype)

    @property
    def noise(self) -> float:
        """Relative error of the columns of the Jacobian, from below."""
        return EPS if self._derivatives is not None else noise(self.scheme, EPS)

    def residuals(self, x: np.ndarray) -> np.ndarray:
        """Residuals at x, shape (m,). Raises Unusual, and a ValueError if their number changes."""
        place = x.tobytes()
        if place != self._at:
            # Copies: a function may keep what it is given, and write into the same memory each time.
            f = self._value(x.copy()).copy()
            if not (len(f) and scipy_linalg.blas.dnrm2(f) <= MODERATE):
                raise Unusual
            self._f, self._at = f, place
            self.nfev += 1
        return self._f

    def slopes(self, x: np.ndarray) -> np.ndarray:
        """The Jacobian's transpose at x, shape (n, m). Raises Unusual."""
        place = x.tobytes() + self.scheme.encode()
        if place != self._sloped_at:
            f = self.residuals(x)
            found = self._by_differences(x, f) if self._derivatives is None else self._given(x, f)
            self.norms = np.sqrt(np.einsum("nm,nm->n", found, found))
            if not all(1 / MODERATE <= size <= MODERATE for size in self.norms.tolist()):
                raise Unusual
            self.peaks = np.maximum(self.peaks, self.norms)
            self._slopes, self._sloped_at = found, place
            self.njev += 1
        return self._slopes

    def squared(self, x: np.ndarray) -> np.ndarray:
        """At x what is minimized by least squares."""
        f = self.residuals(x)
        return f if self._loss is None else self._loss.rooted(torch.from_numpy(f))[0].numpy()

    def squared_slopes(self, x: np.ndarray) -> np.ndarray:
        slopes = self.slopes(x)
        if self._loss is None:
            return slopes
        return slopes * self._loss.rooted(torch.from_numpy(self._f))[1].numpy()

    def cost(self, x: np.ndarray) -> float:
        """Half the sum of losses."""
        f = self.residuals(x)
        if self._loss is None:
            return 0.5 * length(f) ** 2
        return float(self._loss.cost(torch.from_numpy(f)))

    def weighted(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """Residuals and the transpose of their Jacobian as a Gauss-Newton step takes them, and their size."""
        f, slopes = self.residuals(x), self.slopes(x)
        if self._loss is None:
            return f, slopes, length(f)
        given = torch.from_numpy(f)
        rows, weights = (weight.numpy() for weight in self._loss.weights(given))
        return f * weights, slopes * rows, float(self._loss.size(given))

    def errors(self, x: np.ndarray, norms: np.ndarray, size: float) -> tuple[np.ndarray, np.ndarray]:
        """Errors of the columns of the weighted Jacobian, with these norms, and of their products with the
        weighted residuals, relative to the norms: of differences by how much shorter steps change them.
        """
        least = np.full(len(x), self.noise)
        if self._derivatives is not None:
            return least, least * size
        f = self.residuals(x)
        change = self._by_differences(x, f, SHORT) - self.slopes(x)
        if self._loss is not None:
            rows, weights = (weight.numpy() for weight in self._loss.weights(torch.from_numpy(f)))
            f, change = f * weights, change * rows
        columns = np.maximum(MEASURED * np.sqrt(np.einsum("nm,nm->n", change, change)) / norms, least)
        products = MEASURED * np.abs(change @ f) / norms + columns * (size / len(f) ** 0.5)
        return columns, np.maximum(products, least * size)

    def unexplained(self, x: np.ndarray) -> float:
        """Length of what changes residuals, other than the Jacobian, where x changes by nearly nothing."""
        f, slopes, worst = self.residuals(x), self.slopes(x), 0.0
        signed = np.where(np.arange(len(x)) % 2, -x, x)
        for probe in PROBES:
            point = x + probe * EPS * signed
            expected = (point - x) @ slopes
            left = length(self._value(point) - f - expected)
            worst = max(worst, left)
            if not 2 * left > length(expected):
                break
        return worst

    def _value(self, x: np.ndarray) -> np.ndarray:
        """Call the function at x, which it may keep."""
        if self._lower is not None and not ((x >= self._lower) & (x <= self._upper)).all():
            raise Unusual
        f = self._call(x)
        if type(f) is np.ndarray and f.dtype == DOUBLE and f.shape == self._f.shape:
            return f
        if type(f) is not np.ndarray or f.dtype not in (DOUBLE, COMPLEX) or f.ndim != 1:
            raise Unusual
        if f.dtype == COMPLEX:
            self._dtype, f = COMPLEX, np.ascontiguousarray(f).view(DOUBLE)
            if f.shape == self._f.shape:
                return f
        if self._at:
            raise ValueError(f"fun returned {len(self._f)} residuals before, and now {len(f)}")
        return f

    def _given(self, x: np.ndarray, f: np.ndarray) -> np.ndarray:
        assert self._derivatives is not None
        found = self._derivatives(x.copy())
        if type(found) is not np.ndarray or found.dtype != self._dtype or found.ndim != 2:
            raise Unusual
        slopes = found.T.copy().view(DOUBLE)
        if slopes.shape != (len(x), len(f)):
            raise Unusual
        return slopes

    def _by_differences(self, x: np.ndarray, f: np.ndarray, part: float = 1.0) -> np.ndarray:
        far, weights = _FAR[self.scheme]
        values = x.tolist()
        steps = self._steps(values, part)
        changes = np.empty((len(far), len(values), len(f)))
        for times, rows in zip(far, changes, strict=True):
            for j, step in enumerate(steps):
                point = x.copy()
                point[j] = values[j] + times * step
                rows[j] = self._value(point)
        with np.errstate(all="ignore"):  # the caller checks whether it is finite
            changes -= f
            found = changes[0] if len(far) == 1 else np.einsum("k,knm->nm", weights, changes)
            found /= np.array(steps)[:, None]
        return found

    def _steps(self, x: list[float], part: float) -> list[float]:
        """Steps as in :class:`~neula.algorithms.nonlinear.differentiate.Differences`, in Python numbers."""
        part, steps, known = part * EPS ** STEPS[self.scheme], [], self._typical or [0.0] * len(x)
        for j, value in enumerate(x):
            size = abs(value)
            known[j] = typical = max(size, known[j])
            size = size if size > NEGLIGIBLE * typical else typical or 1.0
            steps.append((value + math.copysign(part * size, value)) - value)
        self._typical = known
        return steps
