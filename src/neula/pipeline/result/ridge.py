"""The result of ridge regression with many dampings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from neula.pipeline.result import shown
from neula.pipeline.result.certified import CertifiedResult
from neula.pipeline.result.named import Named, as_numpy
from neula.pipeline.result.shown import ArrayT


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RidgePath(CertifiedResult, Named, Generic[ArrayT]):
    """Solutions of ``min ||A x - b||^2 + damp^2 ||x||^2`` for many dampings, and how well each predicts.

    A :class:`CertifiedResult`. With k right-hand sides arrays have one more dimension.

    Attributes
    ----------
    damps : array of float64, shape (p,)
    x : array, shape (p, n) or (p, n, k)
        In the library, on the device and in the dtype of the input.
    residual_norms, solution_norms : array of float64, shape (p,) or (p, k)
        ``||A x - b||`` and ``||x||``: the L-curve.
    effective_degrees_of_freedom : array of float64, shape (p,)
    gcv : array of float64, shape (p,) or (p, k)
        Generalized cross-validation, ``m ||A x - b||^2 / (m - effective degrees of freedom)^2``.
    leave_one_out : array of float64, shape (p,) or (p, k)
        Mean square of the error with which each row of b is predicted by the fit of all others, exactly.
    squared_errors : array of float64, shape (p, m) or (p, m, k)
        Squared errors whose mean is ``leave_one_out``.
    backward_errors : array of float64, shape (p,) or (p, k)
        Relative change of A and b (with the rows of damping below) for which each x is exact.
    forward_errors : array of float64, shape (p,) or (p, k)
        Bounds on ``||D (x - x*)|| / ||D x*||``, D being the norms of the columns of A with the damping below,
        as :func:`neula.lstsq` has them. Above 0.1 no digit is guaranteed.
    residual_norm_errors, gcv_errors, leave_one_out_errors : array of float64, shape (p,) or (p, k)
        Bounds on the relative errors of these numbers, for A, b and damps as they are stored.
    accepted : array of bool, shape (p,) or (p, k)
        Whether the backward error is small enough, and each of these has a guaranteed digit, or is zero to
        within rounding errors of b.
    tolerance : float
        Largest accepted backward error.
    converged : bool
        Whether all solutions are accepted.
    """

    _axis = 1
    _facts = ("converged", "accuracy", "damps", "residual_norms", "gcv", "leave_one_out", "forward_errors")

    damps: Any
    x: ArrayT
    residual_norms: Any
    solution_norms: Any
    effective_degrees_of_freedom: Any
    gcv: Any
    leave_one_out: Any
    squared_errors: Any
    backward_errors: Any
    forward_errors: Any
    residual_norm_errors: Any
    gcv_errors: Any
    leave_one_out_errors: Any
    accepted: Any
    tolerance: float
    converged: bool

    def best(self, by: str = "gcv") -> Any:
        """The index of the damping with the smallest error: a number, or one for each right-hand side.

        Parameters
        ----------
        by : {"gcv", "leave_one_out"}, optional
        """
        if by not in ("gcv", "leave_one_out"):
            raise ValueError(f"unknown error {by!r}: choose 'gcv' or 'leave_one_out'")
        found = np.nan_to_num(np.array(getattr(self, by).tolist()), nan=math.inf).argmin(0)
        return found if found.ndim else int(found)

    def _columns(self) -> dict[str, np.ndarray]:
        """A column for each damping."""
        found = self._coefficients()
        if found.ndim > 2:
            raise ValueError(f"a table is for one right-hand side, and there are {found.shape[2]}")
        return dict(zip((f"{damp:.6g}" for damp in as_numpy(self.damps)), found.T, strict=True))

    def _rows(self) -> shown.Rows:
        def largest(x: Any) -> float:
            return float(x.max()) if shown.count(x) else 0.0

        return {
            "x": shown.array(self.x),
            "damps": shown.numbers(self.damps),
            "effective dof": shown.numbers(self.effective_degrees_of_freedom),
            "method": shown.attempted(self.attempts),
            "backward error": f"{largest(self.backward_errors):.1e} (tolerance {self.tolerance:.1e})",
            "forward error": f"{largest(self.forward_errors):.1e}",
            "error of gcv": f"{largest(self.gcv_errors):.1e}",
            "error of leave_one_out": f"{largest(self.leave_one_out_errors):.1e}",
            "time": f"{shown.duration(self.seconds)}, engine {self.engine}",
        }.items()
