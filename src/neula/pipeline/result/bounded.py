"""The results of least squares with bounds, which unpack as SciPy's do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from neula.pipeline.result import shown
from neula.pipeline.result.certified import Unpacked
from neula.pipeline.result.deferred import Deferrable
from neula.pipeline.result.named import Named
from neula.pipeline.result.shown import ArrayT
from neula.pipeline.result.solution import SolutionResult


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BoundedResult(SolutionResult[ArrayT], Named, Generic[ArrayT]):
    """Solution of least squares with bounds, or of many: a :class:`SolutionResult`, and where x is at a
    bound.

    The backward error is that of the conditions of Karush, Kuhn and Tucker: x is within its bounds, and exact
    for A and b changed by so much. Scalars describe the worst problem, arrays each right-hand side.

    Attributes
    ----------
    condition : float
        Of those columns of A, normalized, whose variables may be between their bounds.
    accepted, backward_errors, conditions, forward_errors : array, shape (*batch,) or (*batch, k)
    residual_norms : array of float64, shape (*batch,) or (*batch, k)
        ``||b - A x||``.
    active_mask : array of int64, of the shape of x
        -1 at the lower bound, 1 at the upper one, 0 between them.
    is_variable : bool
        Whether somebody differentiates: norms and the cost of a single problem are tensors then, too.
    """

    residual_norms: Any = Deferrable(None)  # noqa: RUF009
    active_mask: Any = Deferrable(None)  # noqa: RUF009
    is_variable: bool = False

    @property
    def residual_norm(self) -> Any:
        """A number for a single problem, an array otherwise, or if a gradient is required."""
        of_all = self.residual_norms
        return of_all if of_all.ndim or self.is_variable else float(of_all)

    def _rows(self) -> shown.Rows:
        at_bounds = int((self.active_mask != 0).sum())
        return self._rows_with("", {"at bounds": f"{at_bounds} of {shown.count(self.x)} unknowns"})


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class NNLSResult(BoundedResult[ArrayT], Unpacked, Generic[ArrayT]):
    """Nonnegative solution and its errors: ``x, rnorm = result``, as from ``scipy.optimize.nnls``."""

    @property
    def rnorm(self) -> Any:
        """``||b - A x||``, as :attr:`residual_norm`."""
        return self.residual_norm

    def _parts(self) -> tuple[Any, ...]:
        return self.x, self.rnorm


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LsqLinearResult(BoundedResult[ArrayT], Generic[ArrayT]):
    """Solution within bounds: SciPy's fields, as attributes and as ``result["x"]``, with the measured errors.

    Attributes
    ----------
    cost : float or array of float64, shape (*batch,) or (*batch, k)
        ``||A x - b||^2 / 2``.
    fun : array, of the shape of b
        ``A x - b``.
    optimality : float
        The largest component of the gradient that no bound forbids to follow, of the worst problem.
    unbounded_sol : array, of the shape of x
        The solution without bounds; zeros where the columns of A are dependent.
    nit : int
        Exchanges between bounds; of several problems the most that one took. 0 where the solution without
        bounds is within them.
    status : int
        3: the solution without bounds is within them; 1: the conditions hold; 0: they do not.
    message : str
    """

    cost: Any
    fun: ArrayT
    optimality: float
    unbounded_sol: ArrayT
    nit: int
    status: int
    message: str

    @property
    def success(self) -> bool:
        """Whether the conditions hold; ``converged`` also requires a guaranteed digit of x."""
        return self.status > 0

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except (AttributeError, TypeError):
            raise KeyError(name) from None
