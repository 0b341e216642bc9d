"""The results of non-linear fits, with the statistics that follow from R."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

import numpy as np
import torch

from neula.engines.formats import double_of
from neula.pipeline.result import shown
from neula.pipeline.result.named import Named, as_numpy
from neula.pipeline.result.shown import ArrayT

ROWS = 1 << 16  # rows of the Jacobian that leverages are computed for at a time


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LeastSquaresResult(shown.Shown, Named, Generic[ArrayT]):
    """Minimum of a sum of squares, or of a batch: SciPy's fields, with the measured errors.

    Of a batch ``status``, ``nit``, ``refused``, ``rank`` and all floats are arrays of shape (*batch,), and
    ``converged``, ``success`` and ``message`` are those of all problems together.

    Attributes
    ----------
    x : array, shape (*batch, n)
        The minimum, in the library and on the device of ``x0``.
    cost : float
        Half the sum of squares, or of losses.
    fun : array, shape (*batch, m), or None
        Residuals at x, complex if the function is; None of a function that is called by blocks.
    jac : array, shape (*batch, m, n), or None
        Jacobian at x; with a loss scaled so that the real part of ``jac.conj().T @ jac`` stands for the
        Hessian matrix of the cost.
    grad : array, shape (*batch, n)
        Gradient of the cost.
    optimality : float
        Largest element of the gradient, without those of variables at a bound that it points out of.
    active_mask : array of int64, shape (*batch, n)
        -1 where x is at its lower bound, 1 at its upper one, else 0.
    nfev, njev : int
        Calls for residuals and for Jacobians, each for all problems of a batch; those for differences are
        not counted.
    status : int
        -2: stopped by the callback; 0: too many calls; 1: ``gtol``, 2: ``ftol``, 3: ``xtol``, 4: both of
        these.
    message : str
    success : bool
        Whether ``status`` is positive, as in SciPy.
    converged : bool
        Whether x is certified to be a stationary point with a Jacobian of full rank: ``stationarity`` is at
        most ``tolerance``, and at least one digit of x is guaranteed. Variables that a bound stops do not
        count.
    stationarity : float
        Relative change of the data for which x is exactly stationary.
    tolerance : float
        Largest accepted ``stationarity``.
    rank : int
        Numerical rank of the Jacobian with normalized columns, given the errors of differences; columns that
        lost their influence count as zero.
    determined : bool
        Whether the Jacobian is of full rank also with the variables that a bound stops: whether there are
        standard errors.
    condition : float
        Condition number of the Jacobian with normalized columns.
    forward_error : float
        Estimate of ``||D (x - x*)|| / ||D x*||``, x* being the minimum nearby and D the norms of the columns:
        the Gauss-Newton step at x, how fast those before it shrank, rounding errors, and measured errors of
        the residuals and of the Jacobian. Where x is zero it is 1, but 0 if residuals vanish or bounds stop
        all variables.
    digits : float
        ``-log10(forward_error)``, at most as many as the dtype of x holds; for a batch the fewest.
    nit : int
        Steps that were tried.
    refused : int
        Steps that were given up because ``fun`` or its Jacobian was not finite.
    R : array, shape (*batch, n, n)
        Triangular factor of ``jac``.
    observations : int
        Residuals of a problem; complex ones count twice.
    accepted : array of bool, shape (*batch,)
        Which problems have converged.
    engine : str
    seconds : float
        Time of the call.
    """

    _axis = -1
    _facts = ("converged", "message", "cost", "residual_variance", "degrees_of_freedom", "rank", "digits")

    x: ArrayT
    cost: Any
    fun: ArrayT | None
    jac: ArrayT | None
    grad: ArrayT
    optimality: Any
    active_mask: Any
    nfev: int
    njev: int
    status: Any
    message: str
    success: bool
    converged: bool
    stationarity: Any
    tolerance: float
    rank: Any
    determined: Any
    condition: Any
    forward_error: Any
    digits: float
    nit: Any
    refused: Any
    R: ArrayT
    observations: int
    accepted: Any
    engine: str = ""
    seconds: float = math.nan

    def _columns(self) -> dict[str, np.ndarray]:
        return _table(self)

    def __getitem__(self, name: str) -> Any:
        """A field by its name, as SciPy's results have it."""
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    @property
    def degrees_of_freedom(self) -> int:
        """Observations less variables."""
        return self.observations - int(self.x.shape[-1])  # type: ignore[attr-defined]

    @property
    def residual_variance(self) -> Any:
        """Twice the cost by the degrees of freedom; Inf where there are none."""
        free = self.degrees_of_freedom
        return 2 * self.cost / free if free > 0 else self.cost * 0 + math.inf

    def covariance(self, *, absolute: bool = False) -> ArrayT:
        """Covariance matrix of x to first order, ``s^2 (J^T J)^-1``, shape (*batch, n, n).

        Parameters
        ----------
        absolute : bool, optional
            Residuals are in units of their standard deviation, so that ``s`` is 1; by default it is
            estimated from them.

        Returns
        -------
        array
            Inf where J is not of full rank, or ``s`` cannot be estimated.
        """
        inverse, give = self._inverse(absolute)
        return give(_product(inverse))

    def standard_errors(self, *, absolute: bool = False) -> ArrayT:
        """Standard deviations of x, the roots of the diagonal of :meth:`covariance`, which is not formed."""
        inverse, give = self._inverse(absolute)
        return give(torch.linalg.vector_norm(inverse, dim=-1))

    def confidence_intervals(self, level: float = 0.95, *, absolute: bool = False) -> ArrayT:
        """Intervals that hold each variable with a probability, for errors that are normally distributed.

        Parameters
        ----------
        level : float, optional
        absolute : bool, optional
            As for :meth:`covariance`; the normal distribution in place of Student's.

        Returns
        -------
        array, shape (*batch, n, 2)
            Lower and upper ends, to first order.
        """
        from neula.pipeline.inputs import take

        taken = take(self.x, "x")
        errors = take(self.standard_errors(absolute=absolute), "errors").tensor
        half = quantile(level, math.inf if absolute else self.degrees_of_freedom) * errors
        return taken.wrap(torch.stack([taken.tensor - half, taken.tensor + half], -1))

    def leverage(self) -> ArrayT:
        """Leverage of each observation, between 0 and 1, shape (*batch, m).

        The squared norms of the rows of ``J R^-1``, in blocks of rows; up to 2 of complex observations.

        Raises
        ------
        ValueError
            If the Jacobian was not kept, since ``fun`` was called by blocks.
        """
        if self.jac is None:
            raise ValueError(
                "leverages need the Jacobian, which is not kept of a fun that is called by blocks"
            )
        from neula.pipeline.inputs import take  # which knows the results

        jac, r = take(self.jac, "jac", or_complex=True), take(self.R, "R").tensor
        r = r.to(double_of(jac.tensor.dtype))
        parts = [
            torch.linalg.solve_triangular(r, rows.to(r), upper=True, left=False).abs().square().sum(-1)
            for rows in jac.tensor.split(ROWS, dim=-2)
        ]
        return jac.wrap(torch.cat(parts, -1))

    def _inverse(self, absolute: bool) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        """``s R^-1`` in double precision, and the way back to the caller's library."""
        from neula.pipeline.inputs import take

        taken = take(self.R, "R")
        r = taken.tensor.double()
        identity = torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)
        inverse = torch.linalg.solve_triangular(r, identity.expand_as(r), upper=True)
        variance = torch.as_tensor(
            1.0 if absolute else self.residual_variance, dtype=r.dtype, device=r.device
        )
        inverse = inverse * variance.sqrt()[..., None, None]
        lost = ~torch.as_tensor(self.determined, device=r.device) | variance.isinf()
        return torch.where(lost[..., None, None], math.inf, inverse), taken.wrap

    def _headline(self) -> str:
        verdict = "certified" if self.converged else "NOT certified"
        return f"{verdict} to be stationary{shown.members(self.accepted)}, {shown.correct(self.digits)}"

    def _rows(self) -> shown.Rows:
        def worst(value: Any) -> str:
            return f"{float(np.max(np.asarray(value), initial=0.0)):.1e}"

        return {
            "x": shown.array(self.x),
            "message": self.message,
            "calls": f"{self.nfev} of fun, {self.njev} of its Jacobian",
            "cost": shown.numbers(np.atleast_1d(self.cost).ravel()),
            "stationarity": f"{worst(self.stationarity)} (tolerance {self.tolerance:.1e})",
            "forward error": f"{worst(self.forward_error)}, condition number {worst(self.condition)}",
            "time": f"{shown.duration(self.seconds)}, engine {self.engine}",
        }.items()


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CurveFitResult(shown.Shown, Named, Generic[ArrayT]):
    """Fitted parameters and their errors: ``popt, pcov = result``, as from ``scipy.optimize.curve_fit``.

    With ``full_output`` it unpacks into ``popt, pcov, infodict, mesg, ier``.

    Attributes
    ----------
    popt : array, shape (*batch, n)
        Parameters.
    pcov : array, shape (*batch, n, n)
        Their covariance matrix; Inf where it cannot be estimated.
    result : LeastSquaresResult
        Result of the fit, with residuals divided by their standard deviations.
    absolute_sigma : bool
    full_output : bool
    predict : callable or None
        From ``xdata`` to the model and its derivatives by the parameters, for :meth:`band`; None after
        pickling, which few models survive.
    """

    _answers: ClassVar[tuple[str, ...]] = ("popt",)
    _axis = -1
    _facts = ("absolute_sigma",)

    popt: ArrayT
    pcov: ArrayT
    result: LeastSquaresResult[ArrayT]
    absolute_sigma: bool
    full_output: bool
    predict: Callable[[Any], tuple[torch.Tensor, torch.Tensor]] | None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "predict": None}

    def __iter__(self) -> Iterator[Any]:
        yield self.popt
        yield self.pcov
        if self.full_output:
            yield {"nfev": self.result.nfev, "fvec": self.result.fun}
            yield self.result.message
            yield self.result.status

    def __len__(self) -> int:
        return 5 if self.full_output else 2

    def __getitem__(self, place: int) -> Any:
        return tuple(self)[place]

    @property
    def x(self) -> ArrayT:  # type: ignore[override]
        """The parameters, ``popt``."""
        return self.popt

    def _columns(self) -> dict[str, np.ndarray]:
        return _table(self)

    def to_dict(self) -> dict[str, Any]:
        """Parameters, errors and measures of the fit as numbers, lists and dictionaries of Python."""
        return {**self.result.to_dict(), **super().to_dict()}

    @property
    def converged(self) -> bool:
        """Whether the fit is certified."""
        return self.result.converged

    def standard_errors(self) -> ArrayT:
        """Standard deviations of the parameters."""
        return self.result.standard_errors(absolute=self.absolute_sigma)

    def confidence_intervals(self, level: float = 0.95) -> ArrayT:
        """Intervals that hold each parameter with a probability, shape (*batch, n, 2)."""
        return self.result.confidence_intervals(level, absolute=self.absolute_sigma)

    def band(self, xdata: Any, level: float = 0.95) -> tuple[ArrayT, ArrayT]:
        """The fitted curve, and half the width of the band that holds the true one, point by point.

        To first order: the model's derivatives by the parameters, times their covariance.

        Parameters
        ----------
        xdata : object
            Argument of the model.
        level : float, optional
            The probability.

        Returns
        -------
        y, half : array, shape (*batch, k)
            Of a complex model, the real part of ``half`` is that of ``y.real``, the imaginary part that of
            ``y.imag``.

        Raises
        ------
        ValueError
            If nothing is left of the model, after pickling.
        """
        if self.predict is None:
            raise ValueError(
                "the band needs the model, which pickles do not keep: compute it where it was fitted"
            )
        y, slopes = self.predict(xdata)
        inverse, give = self.result._inverse(self.absolute_sigma)
        inverse = inverse.to(slopes.device)
        parts = (slopes.real, slopes.imag) if y.is_complex() else (slopes,)
        spread = [torch.linalg.vector_norm(part.double() @ inverse, dim=-1) for part in parts]
        dof = math.inf if self.absolute_sigma else self.result.degrees_of_freedom
        return give(y), give(quantile(level, dof) * (torch.complex(*spread) if spread[1:] else spread[0]))

    def _headline(self) -> str:
        return self.result._headline()

    def _rows(self) -> shown.Rows:
        rest = [row for row in self.result._rows() if row[0] != "x"]
        return [
            ("popt", shown.array(self.popt)),
            ("standard errors", shown.array(self.standard_errors())),
            *rest,
        ]


def _table(result: Any) -> dict[str, np.ndarray]:
    """Estimates, standard errors and confidence intervals of the parameters of one problem."""
    if (found := result._coefficients()).ndim > 1:
        raise ValueError(f"a table is for one problem, and there are {found[0].size}")
    lower, upper = as_numpy(result.confidence_intervals()).T
    errors = as_numpy(result.standard_errors())
    return {"coefficient": found, "standard_error": errors, "lower": lower, "upper": upper}


def quantile(level: float, dof: float) -> float:
    """Standard deviations on either side that hold a part of Student's distribution.

    Raises
    ------
    ValueError
        For a level that is no probability.

    Examples
    --------
    >>> round(quantile(0.95, 10), 3), round(quantile(0.95, float("inf")), 3)
    (2.228, 1.96)
    """
    from scipy.special import ndtri, stdtrit

    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    if dof <= 0:
        return math.inf
    return float(ndtri((1 + level) / 2) if math.isinf(dof) else stdtrit(dof, (1 + level) / 2))


def _product(inverse: torch.Tensor) -> torch.Tensor:
    lost = inverse.isinf()
    return torch.where(lost, math.inf, inverse.masked_fill(lost, 0.0) @ inverse.masked_fill(lost, 0.0).mH)
