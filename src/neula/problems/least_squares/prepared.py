"""Least-squares problems as given, and one of them prepared for refinement in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import torch

from neula.algorithms.krylov.operators import LeastSquaresOperator
from neula.algorithms.orthogonal.r_only import lower_gram
from neula.algorithms.scaled_problems import ScaledProblems
from neula.algorithms.scaling import binary_exponents, power_of_two_scales
from neula.certificates.bounds import lstsq_bound
from neula.engines.formats import in_double
from neula.engines.graphs import called
from neula.kernels.magnitudes import SQUARABLE_EXPONENT
from neula.pipeline.batches import Batch
from neula.pipeline.chain import Answer
from neula.pipeline.inputs import check_finite
from neula.problems.least_squares.problem import LeastSquaresOptions, LeastSquaresSolutions


@dataclass(frozen=True)
class Largest:
    """Largest magnitudes in the columns of A and of b."""

    both: torch.Tensor  # shape (n + k,): one after the other: they are checked together
    n: int  # columns of A

    @property
    def of_a(self) -> torch.Tensor:
        """Largest elements of the columns of A, shape (n,)."""
        return self.both[: self.n]

    @property
    def of_b(self) -> torch.Tensor:
        """Largest elements of the columns of b, shape (k,)."""
        return self.both[self.n :]

    @cached_property
    def seen(self) -> Largest:
        """The magnitudes on the host; reading them synchronizes."""
        return Largest(self.both.cpu(), self.n)


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
    def bound(self) -> float:
        """Largest backward error of a solution that is accepted."""
        m, n = self.options.over_rows.count(self.a.shape[1]), self.a.shape[2]
        return lstsq_bound(self.options.target, min(self.options.rows(m, n), n))

    @property
    def prepared(self) -> PreparedProblem:
        """The only one, prepared."""
        if self.cache.prepared is None:
            a, b = self.a[0], in_double(self.b[0])
            if not self._is_read_as_given:
                a = in_double(a)
            self.cache.prepared = PreparedProblem.from_arrays(a, b, self.options, self.largest)
        return self.cache.prepared

    @property
    def _is_read_as_given(self) -> bool:
        """Whether the only A is converted each time it is multiplied: a copy of a large one in double
        precision takes twice its memory, and as much longer to read.
        """
        options, (_, m, n) = self.options, self.a.shape
        tuning = options.engine.tuning
        large = not tuning.lapack and 8 * m * n > tuning.replayed_bytes
        return large and options.weights is None and not options.damp and not options.is_wide(m, n)

    @cached_property
    def largest(self) -> Largest:
        """Largest magnitudes in the columns of the only A and b: a pass over A, not to be taken twice."""
        engine, over_rows = self.options.engine.alone, self.options.over_rows
        here = [engine.column_max(x[0]) for x in (self.a, self.b)]
        return Largest(over_rows.largest(torch.cat(here)), self.a.shape[2])

    @property
    def gram(self) -> torch.Tensor:
        """Lower triangle of ``A^H A`` of the only A in double precision, shape (n, n)."""
        if self.cache.gram is None:
            self.cache.gram = self.options.over_rows.total(lower_gram(in_double(self.a))[0])
        return self.cache.gram

    def check_finite(self) -> None:
        """Look for NaN and Inf in the only problem; the host waits once."""
        check_finite(self.a[0], self.largest.seen.of_a, "A", self.options.over_rows)
        check_finite(self.b[0].squeeze(-1), self.largest.seen.of_b, "b", self.options.over_rows)


Way = Callable[[LeastSquaresProblems, Answer[LeastSquaresSolutions] | None], Answer[LeastSquaresSolutions]]
"""Function of a link."""


@dataclass(frozen=True)
class PreparedProblem:
    """A problem in double precision."""

    # The tall matrix that is factorized: A with weights and damping, or the conjugate transpose of a wide A.
    operator: LeastSquaresOperator
    b: torch.Tensor  # shape (rows, k): its columns scaled by powers of two
    given_b: torch.Tensor  # shape (m, k): the same before weights and damping
    b_scales: torch.Tensor  # shape (k,)
    scales: torch.Tensor  # shape (n,): powers of two for the columns of the operator
    wide: bool  # whether the operator is the transpose
    options: LeastSquaresOptions
    # The problem with weights and damping, where numbers near the ends of the range had to be scaled first.
    scaled: ScaledProblems | None = None

    @classmethod
    def from_arrays(
        cls, a: torch.Tensor, b: torch.Tensor, options: LeastSquaresOptions, largest: Largest
    ) -> PreparedProblem:
        """Problems with numbers near the ends of the range are scaled first, in a copy.

        Shapes: a (m, n), b (m, k). ``largest``: of A and b.
        """
        over_rows = options.over_rows
        # Weights multiply, and so exponents add up.
        exponents = int(binary_exponents(largest.seen.of_a.double()).abs().amax())
        exponents += abs(math.frexp(options.damp)[1])
        if options.weights is not None:
            exponents += int(over_rows.largest(binary_exponents(options.weights.abs()).abs().amax()))
        if exponents <= SQUARABLE_EXPONENT:
            known = options.weights is None and not options.damp
            known = known and over_rows.count(a.shape[0]) >= a.shape[1]
            return cls._from_scaled(a, b, options, largest=largest if known else None)
        scaled = ScaledProblems.from_arrays(a[None], b[None], options.weights, options.damp, over_rows)
        if scaled.wide:  # the minimum-norm solution is that in given units
            scaled = scaled.with_columns(scaled.units)
        return cls._from_scaled(scaled.a[0], scaled.b[0], options, scaled)

    @classmethod
    def _from_scaled(
        cls,
        a: torch.Tensor,
        b: torch.Tensor,
        options: LeastSquaresOptions,
        scaled: ScaledProblems | None = None,
        largest: Largest | None = None,
    ) -> PreparedProblem:
        """Apply weights and damping, check the numbers, choose the scales.

        Shapes: a (m, n), b (m, k). ``scaled``: the problem that was scaled before, weights and damping
        applied. ``largest``: of the operator and b, where they are known: these are finite.
        """
        weights, damp = (options.weights, options.damp) if scaled is None else (None, 0.0)
        # Powers of two, so that norms of b and x neither overflow nor underflow.
        of_b = options.engine.column_max(b) if largest is None else largest.of_b.double()
        b_scales = power_of_two_scales(of_b)
        b = given_b = b * b_scales
        wide = options.over_rows.count(a.shape[0]) < a.shape[1] and not damp
        if wide:
            weighted = a if weights is None else a * weights[:, None]
            operator = LeastSquaresOperator(weighted.mH)
            b = b if weights is None else b * weights[:, None]
        else:
            # One GPU is busy for longer than its host launches; of several all wait for the slowest host.
            replay = options.engine.alone.replay if options.over_rows.spread else called
            operator = LeastSquaresOperator(a, weights, damp, options.over_rows, replay)
            b = operator.right_hand_side(b)
        if weights is not None:  # R of low precision solves for numbers near 1
            again = power_of_two_scales(options.engine.column_max(b))
            b, given_b, b_scales = b * again, given_b * again, b_scales * again
        if largest is not None:
            column_max = largest.of_a.double()
        else:  # A and b were finite when they were given
            column_max = operator.column_max(options.engine)
            check_finite(a, column_max, "A", options.over_rows)
            check_finite(b, options.engine.column_max(b), "b", options.over_rows)
        scales = power_of_two_scales(column_max)
        return cls(operator, b, given_b, b_scales, scales, wide, options, scaled)

    @property
    def rank(self) -> int:
        """Full rank."""
        return self.scales.numel()

    @property
    def bound(self) -> float:
        """Largest backward error of a solution that is accepted."""
        return lstsq_bound(self.options.target, min(self.operator.shape))

    def residual_norm(self, x: torch.Tensor) -> torch.Tensor:
        """``||b - A x||``, shape (k,)."""
        image = self.operator.rmatmul(x) if self.wide else self.operator.matmul(x)
        return self.options.over_rows.norms(self.b - image)[0]

    @cached_property
    def sizes_of_wide(self) -> torch.Tensor:
        """Norms of the columns of a wide A."""
        return nonzero_norms(torch.linalg.vector_norm(self.operator.a, dim=1))

    def unscale(self, x: torch.Tensor) -> torch.Tensor:
        """Solutions of the problem that was given."""
        x = x / self.b_scales
        return x if self.scaled is None else self.scaled.unscale(x)[0]

    def rescale(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`unscale`."""
        return (x if self.scaled is None else self.scaled.scale(x)[0]) * self.b_scales

    def unscale_residual(self, norm: torch.Tensor) -> torch.Tensor:
        """Norms of residuals of the problem that was given."""
        norm = norm / self.b_scales
        return norm if self.scaled is None else self.scaled.residual_norm(norm)[0]

    def exact(self, sizes: torch.Tensor) -> ScaledProblems:
        """The problem in numbers near 1, b as it is here, with what rounding weighted numbers has lost.

        ``sizes``, shape (n,): norms of the columns.
        """
        operator, over_rows = self.operator, self.options.over_rows
        if operator.weights is None and not operator.damp:
            scales, low = power_of_two_scales(sizes), self.scaled
            return ScaledProblems(
                a=(operator.a * scales)[None],
                a_low=None if low is None or low.a_low is None else low.a_low * scales,
                columns=(1 - binary_exponents(scales))[None, None],
                b=self.b[None],
                b_low=None if low is None or low.b_low is None else low.b_low * self.b_scales,
                b_columns=torch.zeros_like(self.b_scales, dtype=torch.int32)[None, None],
                wide=False,
                over_rows=over_rows,
            )
        weighted = operator.a[None], self.given_b[None], operator.weights, operator.damp
        return ScaledProblems.from_arrays(*weighted, over_rows).with_given_b()


def nonzero_norms(norms: torch.Tensor) -> torch.Tensor:
    """Norms of columns to divide by: 1 for zero columns."""
    return norms.masked_fill(norms == 0, 1.0)
