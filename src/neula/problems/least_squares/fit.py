"""Statistics of linear fits, from a certified R: no inverse of ``A^H A`` is formed unless it is requested.

Fits whose rows are gone, or elsewhere, are numbers; those in memory are in
:mod:`neula.problems.least_squares.regression`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from neula.engines import FP64, select_engine
from neula.engines.formats import double_of, in_double
from neula.kernels.magnitudes import squares, two_norms
from neula.kernels.shift import shift
from neula.pipeline.call import Call
from neula.pipeline.gradients import stacked_problem
from neula.pipeline.inputs import Taken
from neula.pipeline.shapes import BatchedProblem
from neula.problems.least_squares.held_evidence import Held
from neula.problems.least_squares.problem import LeastSquaresOptions


class FitNumbers(NamedTuple):
    """Numbers from which statistics of P matrices are computed, except leverages and residuals."""

    rows: float
    map: torch.Tensor  # shape (P, n, q): M, the covariance of the scaled problem being M M^H
    effective: torch.Tensor  # shape (P,): sums of leverages
    free: torch.Tensor  # shape (P,): rows less these
    squares: torch.Tensor  # shape (P, K): squared norms of residuals, without the rows of the damping
    # of_a, of_b, int, shape (P, 1) and (P, K): exponents of the powers of two by which A and b are divided in
    # the scaled problem.
    of_a: torch.Tensor
    of_b: torch.Tensor

    def each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> FitNumbers:
        """Apply a function to each tensor."""
        return FitNumbers(self.rows, *map(function, self[1:]))

    @classmethod
    def joined(cls, fits: Sequence[FitNumbers]) -> FitNumbers:
        """Join the numbers of several matrices with equally many rows."""
        return cls(fits[0].rows, *map(torch.cat, zip(*(fit[1:] for fit in fits), strict=True)))


@dataclass(frozen=True)
class LinearFit:
    """A linear fit, as far as statistics need it."""

    call: Call
    shapes: BatchedProblem
    options: LeastSquaresOptions
    x: torch.Tensor  # shape (P, n, K): the solution
    norms: torch.Tensor  # shape (P, K): norms of its residuals
    source: Callable[[], FitNumbers] | None = None  # makes the numbers at the first request
    is_spread: bool = False  # over processes, all of which have to ask

    def __reduce__(self) -> Any:
        """Matrices do not travel with a result, but what statistics follow from does.

        One process that pickles a result would wait for the others.
        """
        if self.is_spread and "kept" not in vars(self):
            return _forgotten, ()
        try:
            device = self.call.first.tensor.device
            numbers = self.kept.each(lambda x: x.detach().to(device))
        except ValueError:
            return _forgotten, ()
        arrays = not isinstance(self._given(numbers.free), torch.Tensor)
        return _kept, (numbers, self.shapes.without_numbers(), arrays)

    @cached_property
    def kept(self) -> FitNumbers:
        """Numbers from which statistics are computed, except leverages and residuals."""
        assert self.source is not None
        return self.source()

    @cached_property
    def _variance(self) -> torch.Tensor:
        """Residual variances of the scaled problem, shape (P, K)."""
        kept, free = self.kept, self.kept.free[:, None]
        if not bool((free > 0).all()):
            raise ValueError(
                f"{kept.rows:.0f} rows and {kept.effective.max():.0f} parameters leave no degrees of freedom "
                "to estimate the variance of b from: pass absolute=True where it is known"
            )
        return kept.squares / free

    def _given(self, x: torch.Tensor) -> Any:
        return self.call.give_back(x.contiguous().resolve_conj(), double_of(x.dtype))

    def _scale(self, absolute: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Standard deviations of b, and binary exponents of what is made of them and of M, shape (P, K)."""
        of_a, of_b = self.kept.of_a, self.kept.of_b
        if absolute:
            return torch.ones_like(of_b, dtype=torch.float64), (-of_a).expand_as(of_b)
        return self._variance.sqrt(), of_b - of_a

    def _of_matrices(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape values of each matrix, shape (P, ...), to the user's batch, shape (*batch, ...)."""
        places = torch.arange(len(x), device=x.device)
        return x[self.shapes.of_members(places)]

    def covariance(self, x: Any, absolute: bool) -> Any:
        """Covariance matrices of the parameters."""
        deviation, exponents = self._scale(absolute)
        variance, exponents = (
            self.shapes.of_columns(y)[..., None, None] for y in (deviation.square(), exponents)
        )
        found = self._of_matrices(self.kept.map @ self.kept.map.mH)
        found = variance * (found if self.shapes.is_vector else found.unsqueeze(-3))
        return self._given(shift(shift(found, exponents), exponents))

    def standard_errors(self, x: Any, absolute: bool) -> Any:
        """Roots of the diagonals of the covariance matrices."""
        return self._given(self._errors(absolute))

    def _errors(self, absolute: bool) -> torch.Tensor:
        lengths, (deviation, exponents) = (
            two_norms(self.kept.map, 2),
            self._scale(absolute),
        )
        return self.shapes.solutions(shift(lengths[:, :, None] * deviation[:, None], exponents[:, None]))

    def confidence_intervals(self, x: Any, level: float, absolute: bool) -> Any:
        """Ends of intervals about x, standard errors times a quantile to either side."""
        return self._intervals(x, level, self._errors(absolute), None if absolute else self.kept.free)

    def _intervals(self, x: Any, level: float, errors: torch.Tensor, free: torch.Tensor | None) -> Any:
        """Intervals by Student's distribution for degrees of freedom of each matrix, or by the normal one."""
        from scipy.special import ndtri, stdtrit

        if self.kept.map.is_complex():
            raise ValueError(
                "confidence intervals are those of real parameters, and these are complex: use "
                "standard_errors(), or fit real and imaginary parts as real parameters"
            )
        tail = 0.5 + level / 2
        if free is None:
            quantiles = torch.full_like(self.kept.effective, float(ndtri(tail)))
        else:
            quantiles = torch.from_numpy(stdtrit(free.cpu().numpy(), tail)).to(errors)
        half = self._of_matrices(quantiles)[(..., *[None] * (1 if self.shapes.is_vector else 2))] * errors
        centre = torch.as_tensor(x, dtype=torch.float64, device=half.device).detach()
        return self._given(torch.stack([centre - half, centre + half], -1))

    def leverage(self, samples: int | None) -> Any:
        """Not without the rows."""
        raise ValueError(
            "leverages and residuals need the rows of A, which this result does not keep: solve with A in "
            "memory, in one process, and ask before the result is pickled"
        )

    def residual_variance(self, x: Any) -> Any:
        """Variance of each right-hand side; of a single one a number."""
        of_b = self.kept.of_b
        return self._number(self.shapes.of_columns(shift(shift(self._variance, of_b), of_b)))

    def effective_degrees_of_freedom(self) -> Any:
        """Sum of the leverages of each matrix; of a single one a number."""
        return self._number(self._of_matrices(self.kept.effective))

    def degrees_of_freedom(self) -> Any:
        """Rows less that sum for each matrix; of a single one a number."""
        return self._number(self._of_matrices(self.kept.free))

    def _number(self, x: torch.Tensor) -> Any:
        return self._given(x) if x.ndim else float(x)


def _forgotten() -> None:
    return None


def _kept(numbers: FitNumbers, shapes: BatchedProblem, arrays: bool) -> LinearFit:
    """A fit that was pickled: its numbers are arrays of NumPy or tensors."""
    like = numbers.map
    operand = Taken(like, torch.Tensor.numpy if arrays else torch.Tensor.detach, like)
    call = Call({"A": operand}, select_engine("cpu", like.device), torch.float64, FP64, False)
    nothing: Any = None
    return LinearFit(call, shapes, nothing, like, like, source=lambda: numbers)


def from_triangle(
    triangle: torch.Tensor,
    damping: torch.Tensor | None,
    rows: float,
    rcond: float,
    units: tuple[torch.Tensor, torch.Tensor],
) -> FitNumbers:
    """Numbers of one fit, of so many rows without those of the damping; a ValueError if A lacks full rank.

    ``triangle``: R of ``[A b]`` by Householder reflections, up to an orthogonal factor of its last k rows.
    ``units``: exponents of the powers of two by which columns of A and b were divided.
    """
    of_a, of_b = units
    n = len(of_a)
    r, z, s = triangle[:n, :n], triangle[:n, n:], triangle[n:, n:]
    whole = r if damping is None else torch.linalg.qr(torch.cat([r, damping.diag()]), mode="r")[1]
    if not bool((whole.diagonal().abs() > rcond * two_norms(whole, 0)).all()):
        raise ValueError(
            f"A of {rows:.0f} rows and {n} columns lacks full rank: its parameters have no covariance; leave "
            "columns out that depend on others, or pass damp="
        )
    inverse = torch.linalg.solve_triangular(whole, torch.eye(n, dtype=r.dtype, device=r.device), upper=True)
    squared, effective = squares(s).sum(0), r.real.new_full((), n)
    if damping is not None:
        damped = r @ inverse  # its singular values are filters
        inverse, effective = inverse @ damped.mH, squares(damped).sum()
        squared = squared + squares(z - r @ (inverse @ z)).sum(0)
    least = of_a.amin()
    return FitNumbers(
        rows,
        shift(inverse, (least - of_a)[:, None])[None],
        effective[None],
        (rows - effective)[None],
        squared[None],
        least.reshape(1, 1),
        of_b[None],
    )


def fit_held(
    call: Call, shapes: BatchedProblem, held: Held, x: torch.Tensor, norms: torch.Tensor
) -> LinearFit:
    """The fit of sums that were kept."""

    def numbers() -> FitNumbers:
        sums, excess = held.sums, held.excess
        damping = held.damping if held.options.damp else None
        units = held.exponents + sums.of_a + 2 * excess, sums.of_b
        found = from_triangle(
            sums.r, damping, sums.rows, held.options.certain_rcond((sums.rows, len(x[0]))), units
        )
        effective = found.effective * 4.0**-excess
        return found._replace(effective=effective, free=sums.rows - effective)

    return LinearFit(call, shapes, held.options, x, norms, source=numbers)


def fit_spread(
    call: Call, shapes: BatchedProblem, options: LeastSquaresOptions, x: torch.Tensor, norms: torch.Tensor
) -> LinearFit:
    """The fit of rows over processes, all of which have to ask for statistics: their R are merged then."""

    def numbers() -> FitNumbers:
        over_rows = options.over_rows
        with call.computing():
            a, b = (in_double(call.here(y)) for y in (shapes.matrices, shapes.columns))
            count = over_rows.count(a.shape[1])
            a, b = stacked_problem(a, b, options.weights, 0.0)
            r = over_rows.merged_r(torch.cat([a, b], 2), lambda rows: torch.linalg.qr(rows, mode="r")[1])
            n, k = a.shape[2], b.shape[2]
            damping = a.real.new_full((n,), options.damp) if options.damp else None
            zeros = torch.zeros(max(n, k), dtype=torch.int64, device=a.device)
            found = [from_triangle(one, damping, count, options.rcond, (zeros[:n], zeros[:k])) for one in r]
        return FitNumbers.joined(found)

    return LinearFit(call, shapes, options, x, norms, source=numbers, is_spread=True)
