"""Options of a least-squares problem, the problems, and their measured solutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import torch

from neula.algorithms.krylov.cgls import LeastSquaresOperator
from neula.algorithms.orthogonal.r_only import lower_gram
from neula.algorithms.scaled_problems import ScaledProblems
from neula.algorithms.scaling import ScaledUnknowns, binary_exponents, power_of_two_scales
from neula.certificates.bounds import lstsq_bound
from neula.certificates.forward_error import SURE
from neula.certificates.verdict import Evidence, Limits
from neula.engines import FP64, format_of
from neula.engines.formats import in_double
from neula.engines.graphs import called
from neula.errors import counted
from neula.kernels.magnitudes import SQUARABLE_EXPONENT, two_norms
from neula.kernels.shift import shift
from neula.pipeline import solutions
from neula.pipeline.batches import Batch
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer, Verdict
from neula.pipeline.gradients import stacked_problem
from neula.pipeline.inputs import check_finite
from neula.pipeline.shapes import BatchedProblem
from neula.pipeline.solutions import FORWARD, Solutions

HALF = 1e-8
"""Forward error at which half of the digits are guaranteed: below it, another link is not worth its time."""


@dataclass(frozen=True)
class LeastSquaresTuning:
    """Which link comes first, by the size of a problem."""

    together: int  # m n^2 up to which each step is taken for all problems, with an R in double precision
    svd: int  # m n^2 up to which open problems go to the SVD at once
    doubled_elements: float  # elements up to which residuals have twice the working precision unasked
    small_r: tuple[str, ...]  # where R of small problems comes from, in the order to try


def in_words(bound: float, error: float, forward: float) -> str:
    """The reason in an attempt: backward and forward error."""
    return f"backward error {error:.1e} (bound {bound:.1e}), forward error {forward:.1e}"


def default_rcond(shape: Sequence[int], unit: float) -> float:
    """Rounding errors of the double-precision factorization, or of the data where those are larger."""
    return max(max(shape[-2:]) * 2.0**-52, 2 * unit)


@dataclass(frozen=True, kw_only=True)
class LeastSquaresOptions(solutions.SolutionOptions):
    """Options of a least-squares problem."""

    algorithm: str | None = None
    compute: str | None = None  # arithmetic of R, where it is named
    damp: float = 0.0
    weights: torch.Tensor | None = None  # shape (m,)
    rcond: float
    unit: float = FP64.u  # unit roundoff of the format in which A is stored
    observations: int | None = None  # rows that are data, those below are damping; None: all

    @classmethod
    def of_call(
        cls, call: Call, dtype: torch.dtype, shape: Sequence[int], rcond: float | None, **given: Any
    ) -> Self:
        """Options for matrices of a shape that were given in a dtype."""
        unit = format_of(dtype).u
        known: dict[str, Any] = {
            "engine": call.engine,
            "target": call.target,
            "dtype": call.dtype,
            "unit": unit,
        }
        return cls(**known, rcond=default_rcond(shape, unit) if rcond is None else rcond, **given)

    def certain_rcond(self, shape: Sequence[int]) -> float:
        """Singular values above it make the rank certain: rounding errors look like small ones."""
        return max(self.rcond, max(shape[-2:]) * FP64.u)

    def limits(self, shape: Sequence[int], forward_error: float | None = None) -> Limits:
        """Limits of the evidence for matrices of m rows and n columns."""
        bound = lstsq_bound(self.target, self.full_rank(*shape[-2:]))
        largest = self.largest_error if forward_error is None else forward_error
        return Limits.for_shape(shape, bound, largest, self.rcond)

    @property
    def named(self) -> bool:
        """Whether there is one variant to compute, and no chain."""
        return self.algorithm is not None or self.compute is not None

    def refines_doubled(self, m: int, n: int, *, plain: bool = False) -> bool:
        """Whether problems of m rows are refined with residuals in twice the working precision unasked."""
        # Those of minimum norm always are: they need the augmented system. Of others none are if ``plain``.
        few = not plain and self.rows(m, n) * n <= self.engine.tuning[LeastSquaresTuning].doubled_elements
        return few or self.forward or self.is_wide(m, n)

    def is_wide(self, m: int, n: int) -> bool:
        """Whether a minimum-norm solution is requested: fewer rows than columns, no damping."""
        return m < n and not self.damp

    def full_rank(self, m: int, n: int) -> int:
        """The largest rank of a matrix, damping stacked below it."""
        return min(self.rows(m, n), n)

    def rows(self, m: int, n: int) -> int:
        """Rows of a matrix, damping stacked below it."""
        return m + n if self.damp else m

    def first_error(self, m: int, n: int) -> float:
        """Forward error up to which no other link is tried: for few rows bounds of the first links depend on
        the units of the columns, and those of the SVD do not.
        """
        return min(max(HALF, FORWARD * self.target.u), self.largest_error) if m < n else self.largest_error


@dataclass(frozen=True)
class LeastSquaresSolutions(Solutions):
    """Solutions of least-squares problems."""

    residual_norm: torch.Tensor  # shape (batch, k)
    optimality: torch.Tensor  # shape (batch,): the worst right-hand side counts
    rank: torch.Tensor  # shape (batch,)

    names: ClassVar[tuple[str, ...]] = (*Solutions.names, "optimality", "rank", "zero")
    columns: ClassVar[tuple[str, ...]] = (*Solutions.columns, "residual_norm")
    dtypes: ClassVar[dict[str, torch.dtype]] = {**Solutions.dtypes, "rank": torch.int64}

    @property
    def zeros(self) -> torch.Tensor:
        """Mask where x is zero and guaranteed exact, shape (batch, k)."""
        return ~self.x.any(1) & (self.forward_error == 0)

    def numbers(self) -> list[torch.Tensor]:
        """The numbers called :attr:`names`, shape (batch,) each."""
        return [*super().numbers(), self.optimality, self.rank.double(), self.zeros.any(1).double()]


LeastSquaresAnswer = Answer[LeastSquaresSolutions]


def norms_of(residual_norm: torch.Tensor, shapes: BatchedProblem) -> float | list[float]:
    """A number, or those of all right-hand sides."""
    norms: list[float] = shapes.of_columns(residual_norm).flatten().tolist()
    return norms[0] if len(norms) == 1 else norms


NO_GAP = ", no gap"
"""End of the label where singular values fall through the threshold without one: no link has a digit."""

SVD = "svd fp64"
"""Label of the link that has the last word."""


@dataclass(frozen=True)
class LeastSquaresJudge:
    """Solutions are accepted by their evidence; of links that found some, which one is best."""

    limits: Limits
    enough: float  # forward error up to which no other link is tried, even if more digits were requested
    together: bool  # whether problems were solved together

    @classmethod
    def for_shape(cls, m: int, n: int, options: LeastSquaresOptions, *, together: bool) -> LeastSquaresJudge:
        """The judge of problems of one shape."""
        # Links for one problem refine as far as can be.
        enough = options.first_error(m, n) if together else SURE
        return cls(options.limits((m, n)), enough, together)

    def settled(self, largest: Sequence[float]) -> bool:
        """Whether all are accepted, and none is zero, from the largest of each number that was measured."""
        evidence, zero = Evidence.from_numbers(largest), largest[LeastSquaresSolutions.names.index("zero")]
        return bool(self.limits.accept(evidence) and evidence.forward_error <= self.enough and zero == 0)

    def verdict(self, answer: LeastSquaresAnswer, numbers: np.ndarray) -> Verdict:
        """Among solutions with a small enough backward error, prefer the one with the most digits."""
        # The SVD improves what was found before, and has the last word.
        of = dict(zip(LeastSquaresSolutions.names, numbers, strict=True))
        evidence = Evidence.from_numbers(numbers)
        accepted = self.limits.accept(evidence) & (not answer.doubt)
        enough = replace(self.limits, forward_error=self.enough).accept(evidence) & (not answer.doubt)
        superseded = np.full_like(of["doubtful"], answer.label != SVD)
        error = np.maximum(of["refined_error"], self.limits.backward_error)
        penalty = np.array([~accepted, superseded, error, of["forward_error"]])
        reason = (
            self._of_batch(of, accepted, len(answer.values)) if self.together else self._of_one(of, answer)
        )
        settled = answer.judged or answer.label.endswith(NO_GAP)
        return Verdict(accepted, penalty, reason, enough | settled)

    def _of_batch(self, of: dict[str, np.ndarray], accepted: np.ndarray, count: int) -> str:
        error = of["backward_error"]
        missed, doubtful = int((~accepted).sum()), int((error[~accepted] <= self.limits.backward_error).sum())
        return self.reason(error.max(), of["forward_error"].max(), count, missed, doubtful)

    def reason(self, error: float, forward: float, count: int, missed: int = 0, doubtful: int = 0) -> str:
        """The largest backward and forward errors in words, of problems some of which may be rejected."""
        worst = in_words(self.limits.backward_error, error, forward)
        if count == 1:
            return worst + (", its rank or digits in doubt" if doubtful else "")
        doubts = f"{doubtful} for doubts about their rank or digits"
        return f"{missed} of {count} problems rejected, {doubts}; the worst: {worst}"

    def _of_one(self, of: dict[str, np.ndarray], answer: LeastSquaresAnswer) -> str:
        forward = f"forward error {of['forward_error'][0]:.1e}"
        if answer.label == SVD:
            error, rank, condition = (of[name][0] for name in ("backward_error", "rank", "condition"))
            known = f"{forward}, rank {rank:.0f}, condition number {condition:.1e}"
            doubt = f", {answer.doubt}" if answer.doubt else ""
        else:
            error, known = of["refined_error"][0], f"{forward}, {counted(answer.iterations, 'iteration')}"
            doubt = f"; {answer.doubt}" if answer.doubt else ""
        return f"backward error {error:.1e} (bound {self.limits.backward_error:.1e}), {known}{doubt}"


@dataclass(eq=False)
class Cache:
    """Results of links for a single problem, kept until a link that needs the memory sets them to None."""

    prepared: PreparedProblem | None = None
    gram: torch.Tensor | None = None


@dataclass(frozen=True)
class LeastSquaresProblems(Batch):
    """A batch of problems as given; one problem is a batch of one."""

    a: torch.Tensor  # shape (batch, m, n)
    b: torch.Tensor  # shape (batch, m, k)
    options: LeastSquaresOptions
    # Int. Which of them are meant: all, by default. Others are not copied before they are worked on.
    places: torch.Tensor | None = None
    # Each object has its own.
    cache: Cache = field(init=False, repr=False, compare=False, default_factory=Cache)

    def __len__(self) -> int:
        return (self.a if self.places is None else self.places).shape[0]

    def at(self, places: torch.Tensor) -> Self:
        """Some of them."""
        return replace(self, places=places if self.places is None else self.places[places])

    def one(self, place: int) -> LeastSquaresProblems:
        """One of all, a view; the only one itself, with what is known of it."""
        if len(self.a) == 1 and self.places is None:
            return self
        return LeastSquaresProblems(self.a[place : place + 1], self.b[place : place + 1], self.options)

    def chunks(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A and b of so many at a time: views of all, copies of some."""
        if size >= len(self) and self.places is None:
            yield self.a, self.b
            return
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            where = part if self.places is None else self.places[part]
            yield self.a[where], self.b[where]

    @property
    def prepared(self) -> PreparedProblem:
        """The only one, prepared."""
        if self.cache.prepared is None:
            a = self.a[0] if self._is_read_as_given else in_double(self.a[0])
            self.cache.prepared = PreparedProblem.from_arrays(a, in_double(self.b[0]), self)
        return self.cache.prepared

    @property
    def _is_read_as_given(self) -> bool:
        """Whether the only A is converted at each product: a copy has twice the bytes, and takes longer."""
        options, (_, m, n) = self.options, self.a.shape
        tuning = options.engine.tuning
        large = not tuning.lapack and 8 * m * n > tuning.replayed_bytes
        return large and options.weights is None and not options.damp and not options.is_wide(m, n)

    @cached_property
    def largest(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest magnitudes in the columns of the only A and b: a pass over A, not to be taken twice."""
        engine = self.options.engine.alone
        here = torch.cat([engine.column_max(x[0]) for x in (self.a, self.b)])
        of_a, of_b = self.options.over_rows.largest(here).tensor_split([self.a.shape[2]])
        return of_a, of_b

    @cached_property
    def largest_seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The magnitudes on the host; reading them synchronizes."""
        of_a, of_b = torch.cat(self.largest).cpu().tensor_split([self.a.shape[2]])
        return of_a, of_b

    @property
    def gram(self) -> torch.Tensor:
        """Lower triangle of ``A^H A`` of the only A in double precision, shape (n, n)."""
        if self.cache.gram is None:
            self.cache.gram = self.options.over_rows.total(lower_gram(in_double(self.a))[0])
        return self.cache.gram

    def check_finite(self) -> None:
        """Look for NaN and Inf in the only problem; the host waits once."""
        check_finite(self.a[0], self.largest_seen[0], "A", self.options.over_rows)
        check_finite(self.b[0].squeeze(-1), self.largest_seen[1], "b", self.options.over_rows)


Way = Callable[[LeastSquaresProblems, LeastSquaresAnswer | None], LeastSquaresAnswer]
"""Function of a link."""


@dataclass(frozen=True)
class PreparedProblem(ScaledUnknowns):
    """A problem in double precision."""

    # The tall matrix that is factorized: A with weights and damping, or the conjugate transpose of a wide A.
    operator: LeastSquaresOperator
    b: torch.Tensor  # shape (rows, k): its columns scaled by powers of two
    # int, shape (1, 1, n), (1, 1, k): exponents by which columns of A and of b were divided.
    columns: torch.Tensor
    b_columns: torch.Tensor
    scales: torch.Tensor  # shape (n,): powers of two for the columns of the operator
    wide: bool  # whether the operator is the transpose
    options: LeastSquaresOptions
    # The problem with weights and damping, where numbers near the ends of the range had to be scaled first,
    # or what rounding weighted numbers loses counts.
    scaled: ScaledProblems | None = None

    @classmethod
    def from_arrays(cls, a: torch.Tensor, b: torch.Tensor, given: LeastSquaresProblems) -> PreparedProblem:
        """Apply weights and damping, in a copy, and choose the scales; A and b are finite."""
        options = given.options
        over_rows, weights, damp, scaled = options.over_rows, options.weights, options.damp, None
        wide = options.is_wide(over_rows.count(a.shape[0]), a.shape[1])
        # Weights multiply, and so exponents add up.
        exponents = int(binary_exponents(given.largest_seen[0].double()).abs().amax())
        exponents += abs(math.frexp(damp)[1])
        if weights is not None:
            exponents += int(over_rows.largest(binary_exponents(weights.abs()).abs().amax()))
        special = weights is not None or damp
        if exponents > SQUARABLE_EXPONENT or (special and options.forward):
            scaled = ScaledProblems.from_arrays(a[None], b[None], weights, damp, over_rows)
            if wide:  # the minimum-norm solution is that in given units
                scaled = scaled.with_columns(scaled.units)
            a, b = scaled.a[0], scaled.b[0]
        elif special:
            a, b = stacked_problem(a, b, weights, damp if over_rows.begins else 0.0)
        # One GPU is busy for longer than its host launches; of several all wait for the slowest host.
        replay = options.engine.alone.replay if over_rows.spread else called
        operator = LeastSquaresOperator(a.mH) if wide else LeastSquaresOperator(a, over_rows, replay)
        of_a, of_b = (x.double() for x in given.largest)
        if special or wide or scaled is not None:
            of_a, of_b = (options.engine.column_max(x) for x in (operator.a, b))
        # Powers of two, so that norms of b and x neither overflow nor underflow.
        b_scales = power_of_two_scales(of_b)
        b_columns = 1 - binary_exponents(b_scales)[None, None]
        columns = torch.zeros_like(b_columns[..., :1]).expand(1, 1, a.shape[1])
        if scaled is not None:
            columns, b_columns = scaled.columns, scaled.b_columns + b_columns
        scales = power_of_two_scales(of_a)
        return cls(operator, b * b_scales, columns, b_columns, scales, wide, options, scaled)

    @property
    def rank(self) -> int:
        """Full rank."""
        return self.scales.numel()

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the operator; rows of a damping are not counted as rows of all processes are."""
        rows, n = self.operator.shape
        return rows + n if self.options.damp and self.options.over_rows.spread else rows, n

    @cached_property
    def sizes_of_wide(self) -> torch.Tensor:
        """Norms of the columns of a wide A."""
        return nonzero_norms(two_norms(self.operator.a, 1))

    def exact(self, sizes: torch.Tensor) -> ScaledProblems:
        """The problem, with columns of such norms, in numbers near 1, and what rounding has lost."""
        scales, low = power_of_two_scales(sizes), self.scaled
        return ScaledProblems(
            a=(self.operator.a * scales)[None],
            a_low=None if low is None or low.a_low is None else low.a_low * scales,
            columns=(1 - binary_exponents(scales))[None, None],
            b=self.b[None],
            b_low=None
            if low is None or low.b_low is None
            else shift(low.b_low, low.b_columns - self.b_columns),
            b_columns=torch.zeros_like(self.b_columns),
            wide=False,
            over_rows=self.options.over_rows,
        )


def nonzero_norms(norms: torch.Tensor) -> torch.Tensor:
    """Norms of columns to divide by: 1 for zero columns."""
    return norms.masked_fill(norms == 0, 1.0)
