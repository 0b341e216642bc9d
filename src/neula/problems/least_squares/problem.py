"""Options of a least-squares problem, the problems, and their measured solutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from neula.certificates.bounds import lstsq_bound
from neula.certificates.forward_error import SURE
from neula.certificates.verdict import Evidence, Limits
from neula.engines import FP64
from neula.errors import counted
from neula.pipeline import solutions
from neula.pipeline.chain import Answer, Verdict
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
        """Whether problems of m rows are refined with residuals in twice the working precision unasked.

        Those of minimum norm always are: they need the augmented system. Of others none are if ``plain``.
        """
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

    def verdict(self, answer: Answer[LeastSquaresSolutions], numbers: np.ndarray) -> Verdict:
        """Among solutions with a small enough backward error, prefer the one with the most digits.

        The SVD improves what was found before, and has the last word.
        """
        of, evidence = (
            dict(zip(LeastSquaresSolutions.names, numbers, strict=True)),
            Evidence.from_numbers(numbers),
        )
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

    def _of_one(self, of: dict[str, np.ndarray], answer: Answer[LeastSquaresSolutions]) -> str:
        forward = f"forward error {of['forward_error'][0]:.1e}"
        if answer.label == SVD:
            error, rank, condition = (of[name][0] for name in ("backward_error", "rank", "condition"))
            known = f"{forward}, rank {rank:.0f}, condition number {condition:.1e}"
            doubt = f", {answer.doubt}" if answer.doubt else ""
        else:
            error, known = of["refined_error"][0], f"{forward}, {counted(answer.iterations, 'iteration')}"
            doubt = f"; {answer.doubt}" if answer.doubt else ""
        return f"backward error {error:.1e} (bound {self.limits.backward_error:.1e}), {known}{doubt}"
