"""One linear system in double precision, and the scales in which it is factorized."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from neula.algorithms.elimination.equilibrate import TOP, Equilibration, equilibrate, equilibrate_symmetric
from neula.algorithms.elimination.factorization import mixed_lu
from neula.algorithms.scaling import ScaledUnknowns, binary_exponents, power_of_two_scales
from neula.certificates.backward_error import Scaling
from neula.certificates.bounds import solve_bound
from neula.certificates.forward_error import SURE
from neula.certificates.verdict import Evidence, Limits
from neula.engines import Engine, Format
from neula.engines.formats import in_double
from neula.engines.graphs import kept
from neula.errors import of_batch
from neula.kernels.magnitudes import MODERATE, ends_of, largest_magnitude, magnitudes, two_norms
from neula.kernels.shift import LIMIT, shift
from neula.kernels.small_problems.refining import over
from neula.pipeline.batches import SingleProblem
from neula.pipeline.chain import Answer, Verdict, worst_of
from neula.problems.systems.problem import SystemsOptions, SystemsSolutions, in_words

ALIKE, NEAR = 3, 100
"""Exponents of rows and columns that stay as they are differ by less, and are no larger: scaling is a pass
over the matrix. Such numbers are near 1 in that float64 holds fourth powers of them."""


@dataclass(frozen=True)
class ScaledSystems(ScaledUnknowns):
    """Systems with rows and columns scaled by powers of two: elements near 1, whatever those of A are."""

    a: torch.Tensor  # shape (batch, n, n): R A C
    rows: torch.Tensor  # int, shape (batch, n, 1): exponents by which the rows were divided
    columns: torch.Tensor  # int, shape (batch, 1, n)
    b: torch.Tensor  # shape (batch, n, k): right-hand sides as they belong to a
    b_columns: torch.Tensor  # int, shape (batch, 1, k)
    # Shape (batch, n, 1). Norms of the columns of A, in the units of solutions with a: the diagonal of D.
    # Near 1.
    norms: torch.Tensor
    synchronizes: bool = True  # whether the host reads numbers to leave out what changes nothing
    given: bool = False  # whether nothing was scaled, since all numbers were near 1
    known_sizes: InfinityNorms | None = None  # norms of a and b, where they are known
    known_frobenius: torch.Tensor | None = None  # shape (batch,): ||R A C||_F, likewise

    @classmethod
    def from_arrays(cls, a: torch.Tensor, b: torch.Tensor, *, synchronizes: bool = True) -> ScaledSystems:
        """Scale columns by their largest elements, then rows; no column becomes much smaller by that."""
        if synchronizes and (found := cls.as_given(a, b)) is not None:
            return found
        a, b = in_double(a), in_double(b)
        columns = _alike(binary_exponents(largest_magnitude(a, 1, keepdim=True)))
        scaled = shift(a, -columns) if not synchronizes or bool(columns.any()) else a
        norms = two_norms(scaled, 1)[..., None]
        norms = torch.where(norms > 0, norms, 1.0)
        rows = _alike(binary_exponents(largest_magnitude(scaled, 2, keepdim=True)))
        if not synchronizes or bool(rows.any()):
            scaled = shift(a, -rows - columns)
        exponent = torch.where(b != 0, binary_exponents(b) - rows, -2 * LIMIT)
        b_columns = exponent.amax(1, keepdim=True)
        b_columns = torch.where(b_columns > -2 * LIMIT, b_columns, 0)
        return cls(scaled, rows, columns, shift(b, -rows - b_columns), b_columns, norms, synchronizes)

    @classmethod
    def as_given(cls, a: torch.Tensor, b: torch.Tensor) -> ScaledSystems | None:
        """The systems as they are, if all numbers are near 1; the host reads their sizes, once."""
        found, ends = cls.supposed(a, b)
        return found if near_one(ends.tolist()) else None

    @classmethod
    def supposed(cls, a: torch.Tensor, b: torch.Tensor) -> tuple[ScaledSystems, torch.Tensor]:
        """The systems as they are, and the sizes by which :func:`near_one` tells whether they may be."""
        a, b = in_double(a), in_double(b)
        sizes = magnitudes(a)
        ends = ends_of(sizes, b)
        return cls.again(a, b, sizes.norms, ends.of_a, ends.of_b, ends.frobenius), ends.ends

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.a, self.b, self.norms, *self.sizes

    @classmethod
    def again(
        cls,
        a: torch.Tensor,
        b: torch.Tensor,
        norms: torch.Tensor,
        size_of_a: torch.Tensor,
        size_of_b: torch.Tensor,
        frobenius: torch.Tensor | None = None,
    ) -> ScaledSystems:
        """Systems that stay as given, or others of their shapes; no number is read."""
        rows = _no_exponents(len(a), a.shape[1], 1, a.device)
        b_columns = _no_exponents(len(a), 1, b.shape[2], a.device)
        sizes = InfinityNorms(size_of_a, size_of_b)
        return cls(a, rows, rows.mT, b, b_columns, norms, True, True, sizes, frobenius)

    @cached_property
    def has_rows(self) -> bool:
        """Whether rows were scaled, as far as the host knows."""
        return not self.given and (not self.synchronizes or bool(self.rows.any()))

    @cached_property
    def trivial(self) -> bool:
        """Whether it is the systems as given, as far as the host knows."""
        return self.given or (not self.has_rows and not bool(self.columns.any()))

    @cached_property
    def frobenius(self) -> torch.Tensor:
        """``||R A C||_F``, shape (batch,); a pass over the matrix only where it was scaled."""
        if self.known_frobenius is not None:
            return self.known_frobenius
        return two_norms(self.norms, 1, 2) if self.given else torch.linalg.matrix_norm(self.a)

    @cached_property
    def units(self) -> torch.Tensor:
        """Rows of A relative to the largest, shape (batch, n, 1)."""
        return shift(torch.ones_like(self.norms), self.rows - self.rows.amax(1, keepdim=True))

    def backward_error(self, y: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The larger normwise backward error of A as given and with rows and columns scaled."""
        # In the infinity norm: ``||r|| / (||A|| ||x|| + ||b||)`` (Rigal and Gaches, 1967), shape (batch, k).
        scaled = self._sizes.backward_error(y, residual)
        if self.trivial:
            return scaled
        given = self._given.backward_error(shift(y, -self._relative.mT), self.units * residual)
        return torch.maximum(scaled, given)

    @cached_property
    def _relative(self) -> torch.Tensor:
        return self.columns - self.columns.amax(2, keepdim=True)

    @property
    def sizes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Norms in the infinity norm: of A, shape (batch, 1), and of b, shape (batch, k)."""
        return self._sizes.a, self._sizes.b

    @cached_property
    def _sizes(self) -> InfinityNorms:
        return InfinityNorms.measure(self.a, self.b) if self.known_sizes is None else self.known_sizes

    @cached_property
    def _given(self) -> InfinityNorms:
        """Infinity norms of A as given, up to one unit for all of it."""
        return InfinityNorms.measure(self.units * shift(self.a, self._relative), self.units * self.b)

    def relative_residual(self, residual: torch.Tensor) -> torch.Tensor:
        """``||r|| / ||b||`` of the systems that were given, shape (batch, k)."""
        pair = (residual, self.b) if self.given else (self.units * residual, self.units * self.b)
        return over(*(two_norms(x, 1) for x in pair))

    def symmetric(self) -> torch.Tensor:
        """Exponents with which rows and columns of a positive definite A are scaled."""
        # Its diagonal comes near 1, and then no element is larger.
        diagonal = self.a.diagonal(dim1=1, dim2=2).real
        exponents = binary_exponents(diagonal)[..., None] + self.rows + self.columns.mT
        return exponents.div(2, rounding_mode="floor")


def _no_exponents(count: int, m: int, n: int, device: torch.device) -> torch.Tensor:
    key = ("exponents", count, m, n, device)
    return kept(key, lambda: torch.zeros(count, m, n, dtype=torch.int64, device=device))


def near_one(ends: list[float]) -> bool:
    """Whether rows and columns are of one size, none of them zero, and b is neither huge nor tiny."""
    # Some matrices and right-hand sides are for :func:`_alike` to tell.
    # ``ends``: the smallest rows and columns, the largest ones, the smallest and the largest column of b.
    smallest, least, row, column, of_b, most_of_b = ends
    return (
        min(smallest, least) >= 2.0**-NEAR
        and max(row, column) <= 2.0 ** (NEAR - 1)
        and max(row / smallest, column / least) <= 2.0**ALIKE
        and of_b >= 1 / MODERATE
        and most_of_b <= MODERATE
    )


def _alike(exponents: torch.Tensor) -> torch.Tensor:
    """The exponents, but zero for matrices whose rows or columns have similar sizes near 1."""
    largest, smallest = exponents.amax((1, 2), keepdim=True), exponents.amin((1, 2), keepdim=True)
    return torch.where((largest - smallest <= ALIKE) & (largest.abs() <= NEAR), 0, exponents)


@dataclass(frozen=True)
class InfinityNorms:
    """Norms of systems in the infinity norm: of A, shape (batch, 1), and of b, shape (batch, k)."""

    # Of complex residuals it is the largest magnitude, of b and x in the denominator the largest part:
    # backward errors are not underestimated.

    a: torch.Tensor
    b: torch.Tensor

    @classmethod
    def measure(cls, a: torch.Tensor, b: torch.Tensor) -> InfinityNorms:
        return cls(torch.linalg.vector_norm(a, 1, dim=2).amax(1)[:, None], largest_magnitude(b, 1))

    def backward_error(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        size = self.a * largest_magnitude(x, 1) + self.b
        largest = residual.abs().amax(1) if residual.is_complex() else largest_magnitude(residual, 1)
        return over(largest, size).nan_to_num(torch.inf, torch.inf)


LEADING = 256  # order of the leading block in which elimination without pivoting is tried before all of A

HARMLESS = 8.0
"""Growth in the leading block up to which A is taken for one that needs no pivoting, such as diagonally
dominant matrices (growth at most 2). Random matrices grow by hundreds there."""

SAFE_EXPONENT = 200
"""Elements between ``2^-200`` and ``2^200`` have products, and sums of squares, that float64 holds."""


@dataclass(frozen=True)
class EquilibratedSystem(SingleProblem):
    a: torch.Tensor  # shape (n, n)
    b: torch.Tensor  # shape (n, k): with largest elements near 1
    sizes: torch.Tensor  # shape (n,): norms of the columns of A: the diagonal of D
    scales: Equilibration
    scalings: list[Scaling]  # scaling of the backward errors
    bound: float  # largest backward error of an answer that is accepted
    options: SystemsOptions
    b_scales: torch.Tensor
    scaled: ScaledSystems | None = None  # where it comes from if numbers are near the ends of the range
    _harmless: dict[Format, bool] = field(default_factory=dict, repr=False)
    # Estimates of the smallest eigenvalue, from factorizations that were given up.
    foreseen: list[float] = field(default_factory=list, repr=False)

    @property
    def units(self) -> torch.Tensor | float:
        """Rows of the matrix that was given, relative to those of ``a``."""
        return 1.0 if self.scaled is None else self.scaled.units[0]

    def unscale(self, x: torch.Tensor) -> torch.Tensor:
        x = x / self.b_scales
        return x if self.scaled is None else self.scaled.unscale(x[None])[0]

    def rescale(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.scaled is None else self.scaled.scale(x[None])[0]
        return x * self.b_scales

    def fill(self, engine: Engine) -> torch.Tensor:
        """The scaled matrix as the engine reads it."""
        return self.scales.fill(engine.empty(*self.a.shape, dtype=engine.operand_dtype), self.a, engine)

    @classmethod
    def from_arrays(
        cls,
        a: torch.Tensor,
        b: torch.Tensor,
        options: SystemsOptions,
        check: Callable[[], object] = lambda: None,
    ) -> EquilibratedSystem:
        """Choose the scales, measure the norms; numbers near the ends of the range are scaled in a copy."""
        # Shapes: a (n, n), b (n, k). ``check``: called where norms are not finite: raises an error if A or b
        # is not.
        a, b = in_double(a), in_double(b)
        found, b_max = magnitudes(a[None]), options.engine.column_max(b)
        row_norms, sizes, largest = found.sums[0], found.norms[0, :, 0], found.columns[0, 0]
        if not bool(torch.cat([row_norms, sizes, b_max]).isfinite().all()):
            check()
        diagonal = _positive_diagonal(a) if options.positive else None
        scaled = None
        exponents = binary_exponents(torch.cat([row_norms, sizes, b_max]).nan_to_num(math.inf)).abs().amax()
        if not bool(row_norms.isfinite().all() & sizes.isfinite().all()) or int(exponents) > SAFE_EXPONENT:
            scaled = ScaledSystems.from_arrays(a[None], b[None])
            a, b = scaled.a[0], scaled.b[0]
            found, b_max = magnitudes(a[None]), options.engine.column_max(b)
            row_norms, sizes, largest = found.sums[0], scaled.norms[0, :, 0], found.columns[0, 0]
        sizes = torch.where(sizes > 0, sizes, 1.0)
        # Powers of two, so that norms neither overflow nor underflow.
        b_scales = power_of_two_scales(b_max)
        if diagonal is not None:
            scales = equilibrate_symmetric(diagonal) if scaled is None else _symmetric_again(scaled)
        else:
            scales = equilibrate(a, row_norms, options.engine, largest)
        scalings = [Scaling(row_norms.amax())]
        if not scales.trivial:
            scalings.append(Scaling(scales.norm(a), scales.rows, scales.columns))
        bound = solve_bound(options.target, len(a))
        return cls(a, b * b_scales, sizes, scales, scalings, bound, options, b_scales, scaled)

    @property
    def device(self) -> torch.device:
        return self.a.device

    @property
    def smallest(self) -> float:
        """The smallest eigenvalue of A with a diagonal of ones, as factorizations that were given up say."""
        return min(self.foreseen, default=math.inf)

    def needs_no_pivoting(self, format: Format) -> bool:
        """Whether A seems to be one that needs no pivoting in this format, by its leading block."""
        if format not in self._harmless:
            m, engine = min(len(self.a), LEADING), self.options.engine.using(format)
            scales = replace(self.scales, rows=self.scales.rows[:m], columns=self.scales.columns[:m])
            leading = scales.fill(engine.empty(m, m), self.a[:m, :m], engine)
            self._harmless[format] = mixed_lu(leading, engine, pivoting=False).growth <= HARMLESS
        return self._harmless[format]


def _symmetric_again(scaled: ScaledSystems) -> Equilibration:
    """Scales that make rows and columns of a symmetric matrix equal again, its diagonal near ``2^TOP``."""
    exponents = scaled.symmetric()[0, :, 0]
    rows, columns = scaled.rows[0, :, 0] - exponents, scaled.columns[0, 0] - exponents
    common = rows.amax()
    one = torch.ones_like(exponents, dtype=torch.float64)
    rows, columns = torch.ldexp(one, rows - common), torch.ldexp(one, columns + common + TOP)
    return Equilibration(rows, columns, trivial=False)


def _positive_diagonal(a: torch.Tensor) -> torch.Tensor:
    diagonal = a.diagonal().real
    bad = (diagonal <= 0).nonzero()[:, 0]
    if len(bad):
        i = int(bad[0])
        raise np.linalg.LinAlgError(
            f"A is not positive definite: A[{i}, {i}] is {float(diagonal[i])}; solve it with assume_a='gen'"
        )
    return diagonal


LIBRARY = "lu fp64 with pivoting", "lu fp32 with pivoting", "cholesky fp64"
"""Factors of the library, which are as good as others: what they leave, others do."""


@dataclass(frozen=True)
class SystemsJudge:
    """Solutions are accepted by backward error, forward error and residual."""

    limits: Limits
    # Whether better factors may help a solution with a small backward error and no guaranteed digit.
    improves: bool = True

    @classmethod
    def for_shape(cls, n: int, options: SystemsOptions, *, improves: bool = True) -> SystemsJudge:
        return cls(options.limits(n), improves)

    def settled(self, largest: Sequence[float]) -> bool:
        """Whether all are accepted, from the largest of each number that was measured."""
        return bool(self.limits.accept(Evidence.from_numbers(largest)))

    def verdict(self, answer: Answer[SystemsSolutions], numbers: np.ndarray) -> Verdict:
        """Among solutions with a small enough residual, prefer the one with the most digits."""
        of = dict(zip(SystemsSolutions.names, numbers, strict=True))
        error, forward, growth = of["refined_error"], of["forward_error"], of["growth"]
        evidence, bound = Evidence.from_numbers(numbers), self.limits.backward_error
        accepted = self.limits.accept(evidence) & (not answer.doubt)
        penalty = np.array([~accepted, np.maximum(error, bound), forward])
        if answer.again:  # the next link replaces it
            penalty[:, ~accepted] = np.inf
        # Other factors than the library's do not reach more digits where residuals in twice the working
        # precision do not.
        enough = replace(self.limits, forward_error=SURE).accept(evidence) & (not answer.doubt)
        final = enough if self.improves or answer.again else enough | (error <= bound)
        if answer.label not in LIBRARY:
            final = accepted
        worst = worst_of(penalty)
        reason = in_words(error[worst], bound, forward.max(), answer.iterations, growth[worst])
        reason = ", ".join(filter(None, [reason, answer.doubt]))
        reason = of_batch(reason, int((~accepted).sum()), len(accepted), "systems")
        return Verdict(accepted, penalty, reason, final)
