"""Statistics of a fit, computed when they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from neula.errors import check_name


@dataclass(frozen=True, eq=False)
class Robust:
    """A covariance that does not rely on equal variances of b."""

    kind: str | None  # HC0 to HC3; None where there are groups
    groups: np.ndarray | None = None  # the number of the group of each row

    @classmethod
    def checked(cls, absolute: bool, kind: str | None, groups: Any) -> Self | None:
        """Check the options; None for the covariance that assumes equal variances.

        Raises
        ------
        ValueError
        """
        if kind is None and groups is None:
            return None
        if absolute or (kind is not None and groups is not None):
            raise ValueError("absolute=True, robust= and groups= exclude one another: pass one of them")
        if groups is None:
            check_name("robust", kind, ("HC0", "HC1", "HC2", "HC3"))
            return cls(kind)
        labels, places = np.unique(np.asarray(groups), return_inverse=True)
        if np.ndim(groups) != 1 or len(labels) < 2:
            raise ValueError(
                f"groups must be a vector with at least two different labels, got {len(labels)} in shape "
                f"{np.shape(groups)}"
            )
        return cls(None, places)


class Statistics:
    """Statistics of a linear fit; a part of :class:`LstsqResult`.

    They follow from a QR of A (with weights, damping, covariance and constraints) that is certified in double
    precision, which is made when the first of them is asked for. A and b must be unchanged since; the result
    keeps them. Incremental fits have R. A source is read once more. If rows are spread over processes, all
    processes have to ask. These results, and those that were pickled, have no leverages. Every number is in
    double precision. Leading dimensions are those of the batch, k counts right-hand sides, and has no
    dimension where b is a vector.
    """

    x: Any
    _fit: Any  # neula.problems.least_squares.fit.LinearFit, or None

    def covariance(self, *, absolute: bool = False, robust: str | None = None, groups: Any = None) -> Any:
        """Covariance matrix of the parameters, ``s^2 (A^H W A)^-1`` with ``W = diag(weights)^2`` or ``V^-1``.

        With damping that of the linear map from b to x, ``s^2 (A^H A + damp^2 I)^-1 A^H A (A^H A + damp^2
        I)^-1``: what noise does, not the bias. Of complex parameters it is ``E (x - E x) (x - E x)^H`` for
        errors of b with a mean of ``|e|^2`` of s^2.

        Parameters
        ----------
        absolute : bool, optional
            Take the covariance of b as given: s is 1, and not estimated from the residual. Weights are
            reciprocal standard deviations then.
        robust : {"HC0", "HC1", "HC2", "HC3"}, optional
            Robust to variances of b that differ from row to row (MacKinnon and White): the squared residual
            of each row estimates its variance, divided by ``1 - leverage`` with ``"HC2"``, by its square with
            ``"HC3"``; ``"HC1"`` multiplies by rows / degrees of freedom.
        groups : array_like, shape (m,), optional
            Robust to errors of b that are correlated within groups of rows (clustered), with the usual
            correction for few groups. Intervals and p values have as many degrees of freedom as there are
            groups, less one.

        Returns
        -------
        array of float64 or complex128, shape (..., n, n) or (..., k, n, n)

        Raises
        ------
        ValueError
            If A lacks full rank, or A or b have changed; with fewer than one degree of freedom; with
            ``"HC2"`` and ``"HC3"`` if the leverage of a row is 1; with ``robust`` or ``groups`` if the rows
            of A are gone.

        Examples
        --------
        >>> import numpy as np, neula
        >>> A = np.column_stack([np.ones(4), np.arange(4.0)])
        >>> result = neula.lstsq(A, np.array([0.0, 1.1, 1.9, 3.0]))
        >>> result.covariance().round(6)
        array([[ 0.0063, -0.0027],
               [-0.0027,  0.0018]])
        """
        if (how := Robust.checked(absolute, robust, groups)) is None:
            return self._known.covariance(self.x, absolute)
        return self._of_rows.robust_covariance(how)

    def standard_errors(
        self, *, absolute: bool = False, robust: str | None = None, groups: Any = None
    ) -> Any:
        """Standard errors of the parameters, roots of the diagonal of the covariance, which is not formed.

        Parameters
        ----------
        absolute, robust, groups : optional
            As for :meth:`covariance`.

        Returns
        -------
        array of float64, of the shape of x

        Raises
        ------
        ValueError
            As :meth:`covariance`.
        """
        if (how := Robust.checked(absolute, robust, groups)) is None:
            return self._known.standard_errors(self.x, absolute)
        return self._of_rows.robust_errors(how)

    def confidence_intervals(
        self, level: float = 0.95, *, absolute: bool = False, robust: str | None = None, groups: Any = None
    ) -> Any:
        """Intervals that hold each parameter with a probability, for errors of b that are normally
        distributed.

        Parameters
        ----------
        level : float, optional
            Between 0 and 1.
        absolute, robust, groups : optional
            As for :meth:`covariance`. With ``absolute=True`` the normal distribution in place of Student's.

        Returns
        -------
        array of float64, shape (*x.shape, 2)
            Lower and upper ends.

        Raises
        ------
        ValueError
            As :meth:`covariance`.
        """
        if not 0 < level < 1:
            raise ValueError(f"level must be between 0 and 1, got {level}")
        if (how := Robust.checked(absolute, robust, groups)) is None:
            return self._known.confidence_intervals(self.x, level, absolute)
        return self._of_rows.robust_intervals(self.x, level, how)

    def leverage(self, *, samples: int | None = None) -> Any:
        """Diagonal of the matrix that maps b to ``A x``: the influence of each row on its own fit.

        Parameters
        ----------
        samples : int, optional
            Estimate it from so many random vectors: a relative error of about ``sqrt(2 / samples)``, in a
            fraction of the time where n is large. By default exactly, in blocks of rows.

        Returns
        -------
        array of float64, shape (..., m)

        Raises
        ------
        ValueError
            As :meth:`covariance`.
        """
        if samples is not None and samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}")
        return self._known.leverage(samples)

    @property
    def residual_variance(self) -> Any:
        """``||r||^2 / degrees_of_freedom`` of weighted or whitened residuals, shape (...) or (..., k)."""
        return self._known.residual_variance(self.x)

    @property
    def degrees_of_freedom(self) -> Any:
        """Rows less the effective degrees of freedom of the fit: m - n without damping or constraints."""
        return self._known.degrees_of_freedom()

    @property
    def effective_degrees_of_freedom(self) -> Any:
        """The sum of leverages: n, less one for each independent constraint; with damping less than n."""
        return self._known.effective_degrees_of_freedom()

    @property
    def _of_rows(self) -> Any:
        """The fit with the rows of A and b, a ``RegressionFit``."""
        if not hasattr(self._known, "robust_covariance"):
            raise ValueError(
                "residuals, the table of regression and robust covariances need the rows of A and b, which "
                "this result does not keep: solve with all rows in memory, and ask before it is pickled"
            )
        return self._known

    @property
    def _known(self) -> Any:
        if self._fit is None:
            raise ValueError(
                "statistics need R, which this result does not keep: the fit was not accepted, A lacked full "
                "rank when the result was pickled, or not all processes asked before that; solve again"
            )
        return self._fit
