"""Numbers of a table of regression, and robust covariances, from the certified QR and the rows of A and b."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from neula.algorithms.scaled_problems import ScaledProblems
from neula.algorithms.scaling import binary_exponents
from neula.engines import FP64, select_engine
from neula.engines.formats import double_of, in_double
from neula.engines.random_vectors import gaussian
from neula.kernels.magnitudes import SQUARABLE_EXPONENT, squares, two_norms
from neula.kernels.shift import shift
from neula.pipeline.call import Call, restored
from neula.pipeline.gradients import stacked_problem
from neula.pipeline.inputs import Taken
from neula.pipeline.result.regression import Robust
from neula.pipeline.shapes import BatchedProblem
from neula.problems.least_squares.held_evidence import Held
from neula.problems.least_squares.problem import LeastSquaresOptions
from neula.problems.orthogonal.certified import certified_qr
from neula.problems.orthogonal.problem import QRFactors


class FitNumbers(NamedTuple):
    """Numbers from which statistics of P matrices are computed, except leverages and residuals."""

    rows: float
    map: torch.Tensor  # shape (P, n, q): M, the covariance of the scaled problem being M M^H
    effective: torch.Tensor  # shape (P,): sums of leverages
    free: torch.Tensor  # shape (P,): rows less these
    squares: torch.Tensor  # shape (P, K): squared norms of residuals, without the rows of the damping
    # int, shapes (P, 1) and (P, K): exponents of the powers of two by which A and b are divided
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
    lost: int = 0  # degrees of freedom that went before: means that were subtracted, rows that are no data
    centred: bool = False  # whether means were subtracted

    def __reduce__(self) -> Any:
        """Matrices do not travel with a result, but what statistics follow from does."""
        # One process that pickles a result would wait for the others.
        if self.is_spread and "kept" not in vars(self):
            return type(None), ()
        try:
            device = self.call.first.tensor.device
            numbers = self.kept._replace(free=self._free, effective=self._effective)
            numbers = numbers.each(lambda x: x.detach().to(device))
        except ValueError:
            return type(None), ()
        arrays = not isinstance(self._given(numbers.free), torch.Tensor)
        return _kept, (numbers, self.shapes.without_numbers(), arrays)

    @cached_property
    def kept(self) -> FitNumbers:
        """Numbers from which statistics are computed, except leverages and residuals."""
        assert self.source is not None
        return self.source()

    @property
    def _free(self) -> torch.Tensor:
        """Degrees of freedom, shape (P,)."""
        return self.kept.free - self.lost

    @property
    def _effective(self) -> torch.Tensor:
        """Sums of leverages, shape (P,)."""
        return self.kept.effective + self.centred

    @cached_property
    def _variance(self) -> torch.Tensor:
        """Residual variances of the scaled problem, shape (P, K)."""
        kept, free = self.kept, self._free[:, None]
        if not bool((free > 0).all()):
            taken = kept.effective.max() + self.lost
            raise ValueError(
                f"{kept.rows:.0f} rows and {taken:.0f} parameters leave no degrees of freedom "
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
        return x[self.shapes.of_members(torch.arange(len(x), device=x.device))]

    def covariance(self, absolute: bool, how: Robust | None = None) -> Any:
        """Covariance matrices of the parameters."""
        deviation, exponents = self._scale(absolute)
        variance, exponents = (
            self.shapes.of_columns(y)[..., None, None] for y in (deviation.square(), exponents)
        )
        found = self._of_matrices(self.kept.map @ self.kept.map.mH)
        found = variance * (found if self.shapes.is_vector else found.unsqueeze(-3))
        return self._given(shift(shift(found, exponents), exponents))

    def standard_errors(self, absolute: bool, how: Robust | None = None) -> Any:
        """Roots of the diagonals of the covariance matrices."""
        return self._given(self._errors(absolute, how))

    def _errors(self, absolute: bool, how: Robust | None) -> torch.Tensor:
        map, of_rows = _in_range(self.kept.map, (2,))  # columns of A may be of very different sizes
        lengths = shift(two_norms(map, 2), of_rows[..., 0])
        deviation, exponents = self._scale(absolute)
        return self.shapes.solutions(shift(lengths[:, :, None] * deviation[:, None], exponents[:, None]))

    def confidence_intervals(self, x: Any, level: float, absolute: bool, how: Robust | None = None) -> Any:
        """Ends of intervals about x, by Student's distribution or, if ``absolute``, by the normal one."""
        from scipy.special import ndtri, stdtrit

        if self.kept.map.is_complex():
            raise ValueError(
                "confidence intervals are those of real parameters, and these are complex: use "
                "standard_errors(), or fit real and imaginary parts as real parameters"
            )
        tail, errors, free = 0.5 + level / 2, self._errors(absolute, how), self._free
        if how is not None and how.groups is not None:
            free = torch.full_like(free, float(how.groups.max()))
        if absolute:
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

    def residual_variance(self) -> Any:
        """Variance of each right-hand side; of a single one a number."""
        of_b = self.kept.of_b
        return self._number(self.shapes.of_columns(shift(shift(self._variance, of_b), of_b)))

    def effective_degrees_of_freedom(self) -> Any:
        """Sum of the leverages of each matrix; of a single one a number."""
        return self._number(self._of_matrices(self._effective))

    def degrees_of_freedom(self) -> Any:
        """Rows less that sum for each matrix; of a single one a number."""
        return self._number(self._of_matrices(self._free))

    def _number(self, x: torch.Tensor) -> Any:
        return self._given(x) if x.ndim else float(x)


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
    """Numbers of one fit, of so many rows without those of the damping; a ValueError if A lacks full rank."""
    # ``triangle``: R of ``[A b]`` by Householder reflections, up to an orthogonal factor of its last k rows.
    # ``units``: exponents of the powers of two by which columns of A and b were divided.
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
        rcond = held.options.certain_rcond((sums.rows, len(x[0])))
        found = from_triangle(sums.r, damping, sums.rows, rcond, units)
        effective = found.effective * 4.0**-excess
        return found._replace(effective=effective, free=sums.rows - effective)

    return LinearFit(call, shapes, held.options, x, norms, source=numbers)


def fit_spread(
    call: Call, shapes: BatchedProblem, options: LeastSquaresOptions, x: torch.Tensor, norms: torch.Tensor
) -> LinearFit:
    """The fit of rows over processes, all of which have to ask for statistics: their R are merged then."""

    @restored
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


UNCHANGED = 1e-10
"""Largest relative change of a recomputed norm of a difference: rounding errors are far smaller."""


@dataclass(frozen=True)
class RegressionFit(LinearFit):
    """A linear fit with the rows of A and b."""

    rows: int | None = None  # How many rows are data; those below are damping. None: all that were given.
    # Shape (n, q), a null space: unknowns by those of the problem solved, whose matrix the shapes have.
    basis: torch.Tensor | None = None
    # Of the powers of two by which A, shape (P, 1, 1), and b, shape (P, 1, K), were divided before.
    exponents: tuple[torch.Tensor, torch.Tensor] | None = None
    # Of the covariance of b: lower Cholesky factor, shape (m, m), or standard deviations, shape (m,).
    factor: torch.Tensor | None = None

    # --- what was solved ---

    @cached_property
    def _scaled(self) -> ScaledProblems:
        """Weighted and damped problem, each matrix in its own units: as given if float64 holds squares."""
        double = double_of(self.x.dtype)
        a, b = (self.call.here(y).to(double) for y in (self.shapes.matrices, self.shapes.columns))
        a, b = stacked_problem(a, b, self.options.weights, self.options.damp)
        (a, of_a), (b, of_b) = _in_range(a, (1, 2)), _in_range(b, (1,))
        if self.exponents is not None:
            of_a, of_b = of_a + self.exponents[0], of_b + self.exponents[1]
        return ScaledProblems(a, None, of_a, b, None, of_b, wide=False)

    @property
    def _data(self) -> int:
        """Rows that are data."""
        given = self.options.observations if self.rows is None else self.rows
        return self.shapes.matrices.shape[1] if given is None else given

    @cached_property
    @restored
    def _factors(self) -> QRFactors:
        """QR of the stacked matrix. Raises ValueError if A lacks full rank."""
        with self.call.computing():
            found = certified_qr(self._scaled.a, self.call.engine)
            diagonal = found.r.diagonal(dim1=1, dim2=2).abs()
            least = self.options.rcond * two_norms(found.r, 1)[:, : diagonal.shape[1]]
            full = found.r.shape[1] == found.r.shape[2] and bool((diagonal > least).all())
        if not full:
            raise ValueError(
                f"A of shape {tuple(self.call.first.tensor.shape)} lacks full rank: its parameters have no "
                "covariance; leave columns out that depend on others, or pass damp="
            )
        return found

    @cached_property
    def _inverse(self) -> torch.Tensor:
        """``R^-1``, by which ``Q^H b`` becomes x, shape (P, n, q)."""
        r = self._factors.r
        identity = torch.eye(r.shape[2], dtype=r.dtype, device=r.device).expand_as(r)
        inverse = torch.linalg.solve_triangular(r, identity, upper=True)
        return inverse if self.basis is None else self.basis @ inverse

    @cached_property
    def kept(self) -> FitNumbers:
        """Numbers of the fit; damped, the map is less than ``R^-1``."""
        q, data, map, beside = self._factors.q, self._data, self._inverse, self._beside
        effective = q.real.new_full((len(q),), q.shape[2])
        if q.shape[1] > data:
            # The triangle of a QR of the rows that are data is as good as they are.
            map = map @ torch.linalg.qr(q[:, :data], mode="r")[1].mH
            effective = squares(q[:, :data]).sum((1, 2))
        free = data - effective if beside is None else squares(beside[:, :data]).sum((1, 2))
        self._check_unchanged()
        left = squares(self._errors_of_rows).sum(1)
        units = self._scaled.columns[:, 0], self._scaled.b_columns[:, 0]
        return FitNumbers(float(data), map, effective, free, left, *units)

    @cached_property
    def _beside(self) -> torch.Tensor | None:
        """Orthonormal vectors that span what is orthogonal to Q, shape (P, M, M - n), where their part in the
        rows that are data is as small as the damping: differences from one would lose it.
        """
        q = self._factors.q
        if q.shape[1] == self._data or q.shape[2] < self._data:
            return None
        return torch.linalg.qr(q, mode="complete")[0][..., q.shape[2] :]

    @cached_property
    def _residuals(self) -> torch.Tensor:
        """``b - A x`` with weights, by the projection on the range of A, shape (P, M, K)."""
        b, q = self._scaled.b, self._factors.q
        if self._beside is not None:
            return self._beside @ (self._beside.mH @ b)
        left = b - q @ (q.mH @ b)
        return left - q @ (q.mH @ left)

    def _check_unchanged(self) -> None:
        """A and b are those that were solved."""
        given, norm = self._scaled, torch.linalg.vector_norm
        a, b, x = given.a, given.b, given.scale(self.x)
        changed = (norm(b - a @ x, dim=1) - shift(self.norms, -given.b_columns[:, 0])).abs()
        size = norm(b, dim=1) + norm(norm(a, dim=1)[..., None] * x, dim=1)
        if not bool((changed <= UNCHANGED * size).all()):
            raise ValueError("A or b has changed since it was solved: solve again, or keep a copy")

    def leverage(self, samples: int | None) -> Any:
        """Squared norms of rows of Q, or of their images of random vectors."""
        a, r = self._scaled.a, self._factors.r
        mixed = torch.eye(r.shape[2], dtype=r.dtype, device=r.device)
        if samples is not None:
            mixed = gaussian(r.shape[2], samples, r.dtype, r.device, seed=2) / math.sqrt(samples)
        inverse = torch.linalg.solve_triangular(r, mixed.expand(len(r), *mixed.shape), upper=True)
        parts = [squares(block @ inverse).sum(2) for block in self._blocks(a[:, : self._data])]
        found = torch.cat(parts, 1) if parts else a.real.new_zeros(len(a), 0)
        return self._given(self._of_matrices(found + self._of_mean))

    @property
    def _of_mean(self) -> torch.Tensor | float:
        """Leverages by the mean that was subtracted, shape (1, m)."""
        return squares(self._ones)[..., 0] if self.centred else 0.0

    def _blocks(self, a: torch.Tensor) -> Iterator[torch.Tensor]:
        size = max(1, 8 * self.call.engine.tuning.chunk_elements // max(1, len(a) * a.shape[2]))
        return iter(a.split(size, 1)) if a.shape[1] else iter(())

    # --- rows, whitened: with weights, or multiplied by the inverse factor of the covariance of b ---

    def _whitened(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows times the weights or the whitening factor, shape (P, m, K)."""
        if self.call.weights is not None:
            return self._weights[:, None] * rows
        if self.factor is None:
            return rows
        if self.factor.ndim == 1:
            return rows / self.factor[: self._data, None]
        lower = self.factor[: self._data, : self._data]
        return torch.linalg.solve_triangular(lower, rows, upper=False)

    @property
    def _weights(self) -> torch.Tensor:
        assert self.call.weights is not None
        return self.call.here(self.call.weights.tensor).double()[: self._data]

    @cached_property
    def _b(self) -> torch.Tensor:
        """Data of b as given, divided by powers of two where squares need it, shape (P, m, K)."""
        given = self.call.here(self.call.tensors[1]).to(double_of(self.x.dtype))
        given = given[..., None] if self.shapes.is_vector else given
        return shift(replace(self.shapes, b=given).columns[:, : self._data], -self._scaled.b_columns)

    @property
    def _errors_of_rows(self) -> torch.Tensor:
        """Whitened residuals of the data, in the same units."""
        return self._residuals[:, : self._data]

    def whitened_residuals(self) -> Any:
        """``W (b - A x)``, as b has a shape."""
        self._check_unchanged()
        return self._in_units(self._errors_of_rows)

    def residuals(self, x: Any) -> Any:
        """``b - A x``, as b has a shape."""
        self._check_unchanged()
        left = self._errors_of_rows
        if self.call.weights is not None:
            w = self._weights[:, None]
            left = left / torch.where(w == 0, 1.0, w)
        elif self.factor is not None:
            factor = self.factor[: self._data]
            left = factor[:, None] * left if factor.ndim == 1 else factor[:, : self._data] @ left
        left = self.shapes.solutions(shift(left, self._scaled.b_columns))
        if self.call.weights is not None and bool((self._weights == 0).any()):
            double = double_of(self.x.dtype)
            a, b = (self.call.here(y).to(double) for y in self.call.tensors)
            x = torch.as_tensor(x, dtype=double, device=a.device).detach()
            zero = self._weights == 0
            if self.shapes.is_vector:
                left = torch.where(zero, (b - (a @ x[..., None])[..., 0])[..., : self._data], left)
            else:
                left = torch.where(zero[:, None], (b - a @ x)[..., : self._data, :], left)
        return self._given(left)

    def _in_units(self, rows: torch.Tensor) -> Any:
        return self._given(self.shapes.solutions(shift(rows, self._scaled.b_columns)))

    # --- sums of squares ---

    @cached_property
    def _ones(self) -> torch.Tensor:
        """A constant, whitened, of length one, shape (1, m, 1)."""
        ones = self._whitened(self._b.new_ones(1, self._data, 1))
        return ones / two_norms(ones, 1, keepdim=True)

    @cached_property
    def _constant(self) -> torch.Tensor:
        """Whether A x may be any constant, shape (P, 1): 1 or 0."""
        q = self._factors.q
        ones = torch.nn.functional.pad(self._ones, (0, 0, 0, q.shape[1] - self._data))
        outside = two_norms(ones - q @ (q.mH @ ones), 1)
        a = replace(self.shapes, a=self.call.here(self.call.first.tensor)).matrices[:, : self._data]
        column = ((a == a[:, :1]) & (a != 0)).all(1).any(1) & (self.basis is None)
        return ((outside <= UNCHANGED) | column[:, None]).double()

    @cached_property
    def _centred(self) -> torch.Tensor:
        """Whitened b, without its mean where A x may be any constant, shape (P, m, K)."""
        b, ones = self._whitened(self._b), self._ones
        same = (self._b == self._b[:, :1]).all(1, keepdim=True) & (self._constant[:, None] > 0)
        return b.masked_fill(same, 0.0) - ~same * self._constant[:, None] * ones * (ones.mH @ b)

    @cached_property
    def _sums(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sums of squares of residuals, of b, and of fitted values, the latter without means, (P, K) each."""
        self._check_unchanged()
        fitted = self._factors.q[:, : self._data].mH @ self._centred
        left, given = self._errors_of_rows, self._centred
        return squares(left).sum(1), squares(given).sum(1), squares(fitted).sum(1)

    def numbers(self) -> dict[str, Any]:
        """Regression table by name; a number each, or arrays of shape (*batch,) or (*batch, k)."""
        return {name: self._number(self.shapes.of_columns(x)) for name, x in self._measures.items()}

    @cached_property
    def _measures(self) -> dict[str, torch.Tensor]:
        """Numbers of the table, shape (P, 1) or (P, K)."""
        from scipy.special import fdtrc

        if self.x.is_complex():
            raise ValueError(
                "the numbers of a regression table are those of real numbers, and x is complex: use "
                "covariance(), standard_errors() and residual_variance"
            )
        of_residuals, of_b, of_fitted = self._sums
        m, p, free = self._data, self.kept.effective[:, None] + self.lost, self._free[:, None]
        constant, model = self._constant, self.kept.effective[:, None] - self._constant
        r_squared = 1 - of_residuals / of_b
        r_squared = torch.where(of_b > 0, r_squared, math.nan)  # nothing is to be explained
        f = torch.where(model > 0, (of_fitted / model) / (of_residuals / free), math.nan)
        if self.basis is not None or self._factors.q.shape[1] > m:
            f = torch.full_like(f, math.nan)
        tail = fdtrc(model.cpu().numpy(), free.cpu().numpy(), f.cpu().numpy())
        likelihood = -m / 2 * (torch.log(2 * math.pi * of_residuals / m) + 1)
        units = m * math.log(2) * self._scaled.b_columns[:, 0].double()
        likelihood = likelihood - self._log_scale - units
        return {
            "r_squared": r_squared,
            "adjusted_r_squared": 1 - (m - constant - self.lost) / free * (1 - r_squared),
            "f_statistic": f,
            "f_p_value": torch.from_numpy(tail).to(f),
            "log_likelihood": likelihood,
            "aic": 2 * p - 2 * likelihood,
            "bic": math.log(max(m, 1)) * p - 2 * likelihood,
            "model_degrees_of_freedom": model.expand_as(f),
        }

    @property
    def _log_scale(self) -> Any:
        """Half of the logarithm of the determinant of the covariance of b, up to s."""
        if self.call.weights is not None:
            return -self._weights.abs().log().sum()
        if self.factor is None:
            return 0.0
        diagonal = self.factor if self.factor.ndim == 1 else self.factor.diagonal()
        return diagonal[: self._data].abs().log().sum()

    # --- robust covariances ---

    def _robust(self, how: Robust) -> torch.Tensor:
        """``M S M^H``, S being the sum of squared residuals times rows of Q, shape (P, K, n, n)."""
        self._check_unchanged()
        q, left = self._factors.q[:, : self._data], self._errors_of_rows
        if how.groups is not None:
            meat = self._of_groups(q, left, torch.from_numpy(how.groups).to(q.device))
        else:
            errors = squares(left)
            if how.kind == "HC1":
                errors = errors * (self._data / self._free[:, None, None])
            elif how.kind in ("HC2", "HC3"):
                rest = 1 - squares(q).sum(2) - self._of_mean
                if bool((rest <= UNCHANGED).any()):
                    row = int((rest <= UNCHANGED).nonzero()[0, 1])
                    raise ValueError(
                        f"row {row} has leverage 1, and {how.kind} divides by 1 - leverage: pass robust='HC1'"
                    )
                errors = errors / rest[..., None] ** (1 if how.kind == "HC2" else 2)
            meat = torch.stack([q.mH @ (s[..., None] * q) for s in errors.unbind(2)], 1)
        return self._inverse[:, None] @ meat @ self._inverse.mH[:, None]

    def _of_groups(self, q: torch.Tensor, left: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """Products of sums over groups, with the correction for few of them, shape (P, K, q, q)."""
        if len(groups) != self._data:
            raise ValueError(f"groups must have shape ({self._data},), one a row, got ({len(groups)},)")
        count = int(groups.max()) + 1
        correction = count / (count - 1) * (self._data - 1) / self._free[:, None, None, None]
        sums = torch.stack([q * one.conj()[..., None] for one in left.unbind(2)], 1)
        scores = sums.new_zeros(*sums.shape[:2], count, q.shape[2]).index_add(2, groups, sums)
        return correction * (scores.mH @ scores)

    def covariance(self, absolute: bool, how: Robust | None = None) -> Any:
        """Covariance matrices of the parameters, if ``how`` says so from squared residuals."""
        if how is None:
            return super().covariance(absolute)
        found, exponents = self._robust(how), self._exponents[..., None, None]
        found = shift(shift(found, exponents), exponents)
        p, k, n, _ = found.shape
        given = self.shapes.solutions(found.reshape(p, k, n * n).mT)  # k last, where there is one
        given = given if self.shapes.is_vector else given.movedim(-1, -2)
        return self._given(given.unflatten(-1, (n, n)))

    def _errors(self, absolute: bool, how: Robust | None) -> torch.Tensor:
        if how is None:
            return super()._errors(absolute, how)
        roots = self._robust(how).diagonal(dim1=2, dim2=3).real.clamp(min=0).sqrt()
        return self.shapes.solutions(shift(roots, self._exponents[..., None]).mT)

    @property
    def _exponents(self) -> torch.Tensor:
        """Binary exponents of x of the scaled problem, shape (P, K)."""
        return self._scaled.b_columns[:, 0] - self._scaled.columns[:, 0]


def _in_range(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """X by powers of two along dimensions where float64 does not hold squares of it, and their exponents."""
    if not x.numel():
        return x, x.real.sum(dims, keepdim=True).int()
    exponents = binary_exponents(torch.linalg.vector_norm(x, math.inf, dim=dims, keepdim=True))
    exponents = exponents.masked_fill(exponents.abs() <= SQUARABLE_EXPONENT, 0)
    return shift(x, -exponents) if bool(exponents.any()) else x, exponents
