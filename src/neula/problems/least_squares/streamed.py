"""Least squares of a matrix that is read in blocks: one pass makes R, one or two more refine and measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from neula.algorithms.krylov.doubled_refinement import Refinement
from neula.algorithms.krylov.streamed_lstsq import (
    Coordinates,
    GramSums,
    HouseholderSums,
    RefinementSums,
    SummedGradient,
    SummedProblem,
)
from neula.algorithms.scaling import ScaledUnknowns, binary_exponents, power_of_two_scales
from neula.certificates.bounds import Accuracy, lstsq_bound, target_format
from neula.certificates.forward_error import MAX_RATE
from neula.engines import FP64, Engine, select_engine
from neula.engines.complex import over
from neula.engines.formats import double_of
from neula.io.sources import Source, row_blocks
from neula.kernels.magnitudes import SQUARABLE, two_norms
from neula.pipeline.batches import SingleProblem
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer, Declined, Link, Run, Unanswered, run_chain
from neula.pipeline.inputs import Taken
from neula.pipeline.progress import Progress
from neula.pipeline.result import LstsqResult
from neula.pipeline.shapes import broadcast_system
from neula.pipeline.solutions import Report
from neula.pipeline.streaming import Block, Reader, StreamTuning, check_rows, source_of, torch_dtype
from neula.problems.least_squares.problem import (
    LeastSquaresAnswer,
    LeastSquaresJudge,
    LeastSquaresOptions,
    LeastSquaresSolutions,
)
from neula.problems.least_squares.regression import FitNumbers, LinearFit, from_triangle
from neula.problems.least_squares.run import LeastSquaresOutcome, collect
from neula.problems.least_squares.together import summed_members

MOST_PASSES = 3
"""Over A: where it does not fit into memory, reading it is what takes time."""

GRAM_RATE = 1e-5
"""Largest ``u cond(A)^2`` for an R of the Gram matrix: two updates then leave rounding errors."""

LARGEST_SCALE = 2.0**1022
"""A power of two that has a reciprocal, too: subnormal columns stay a little smaller."""

Step = Callable[[torch.Tensor, torch.Tensor], None]
"""Function of a pass for some rows of A and b."""


def lstsq_streamed(
    A: Any,
    b: Any,
    *,
    algorithm: str | None,
    compute: str | None,
    damp: float,
    weights: Any,
    rcond: float | None,
    certify: str,
    progress: Progress | None,
    **asked: Any,
) -> LstsqResult:
    """:func:`neula.lstsq` for a source of rows; names and numbers are checked already."""
    if algorithm not in (None, "householder") or compute is not None:
        named = f"algorithm={algorithm!r}" if compute is None else f"compute={compute!r}"
        raise ValueError(f"{named} needs A in memory: leave it out, or load A first")
    b_source, b_taken = source_of(b, "b")
    sources = {"A": row_blocks(A), "b": b_source}
    _check_shapes(sources["A"], sources["b"], damp)
    if weights is not None:
        sources["weights"] = source_of(weights, "weights")[0]
        m, given = sources["A"].shape[0], sources["weights"].shape
        if given != (m,):
            raise ValueError(f"weights must have shape ({m},), one for each row of A, got {given}")
    call = _begun(sources, b_taken, asked["engine"], asked["accuracy"], asked["strict"])
    a, right = (x.tensor for x in call.operands.values())
    options = LeastSquaresOptions.of_call(
        *(call, a.dtype, a.shape, rcond),
        algorithm=algorithm,
        damp=damp,
        max_iterations=MOST_PASSES,
        forward=certify == "forward",
        progress=progress,
    )
    with call.computing():
        problem = Streamed.from_sources(sources, options)
        run = _solved(problem)
    shapes, values = broadcast_system(a, right), run.found
    report = Report(call, shapes, options, run)
    fit = LinearFit(
        call, shapes, options, values.x, values.residual_norm, source=partial(_numbers_of, call, problem)
    )
    result = collect(report, passes=problem.reader.passes, fit=fit)
    return LeastSquaresOutcome.from_report(result, report).reported(call)


def _numbers_of(call: Call, problem: Streamed) -> FitNumbers:
    """Numbers for statistics: the source is read once more, for R by Householder reflections."""
    with call.computing():
        triangle, rows = problem.triangle()
        exponents, damp, n = -(binary_exponents(problem.scales).long() - 1), problem.options.damp, problem.n
        damping = damp * problem.scales[:n] if damp else None
        rcond = problem.options.certain_rcond((rows, n))
        return from_triangle(triangle, damping, rows, rcond, (exponents[:n], exponents[n:]))


def _check_shapes(a: Source, b: Source, damp: float) -> None:
    if len(a.shape) != 2:
        raise ValueError(f"A must be one matrix, and its source has shape {a.shape}")
    m, n = a.shape
    if len(b.shape) not in (1, 2) or b.shape[0] != m:
        raise ValueError(f"A has {m} rows, and b has shape {b.shape}: it must be ({m},) or ({m}, k)")
    if 0 in (m, n) or 0 in b.shape:
        raise ValueError(
            f"A of shape {a.shape} and b of shape {b.shape} have no numbers to read: pass arrays"
        )
    if m < n and not damp:
        raise ValueError(
            f"A has {m} rows, fewer than its {n} columns: solutions of minimum norm need A in memory; load "
            "it, or pass damp="
        )


def _begun(
    sources: dict[str, Source], b: Taken | None, engine: str | Engine, accuracy: Accuracy | None, strict: bool
) -> Call:
    """The call, with operands that have shapes and dtypes, and no numbers; the answer is like b."""
    device = torch.device("cpu") if b is None else b.tensor.device
    wrap = torch.Tensor.numpy if b is None else b.wrap
    operands = {}
    for name in ("A", "b"):
        given = torch_dtype(sources[name].dtype, name, or_complex=True)
        operands[name] = Taken.without_numbers(sources[name].shape, given, wrap, device)
    dtype = torch.promote_types(*(taken.tensor.dtype for taken in operands.values()))
    n = sources["A"].shape[1]
    target = target_format(accuracy, dtype, lambda target: lstsq_bound(target, n))
    return Call(operands, over(select_engine(engine, device), dtype), dtype, target, strict)


def _solved(problem: Streamed) -> Run[LeastSquaresSolutions]:
    options = problem.options
    judge = LeastSquaresJudge.for_shape(problem.reader.count, problem.n, options, together=False)
    try:
        return run_chain(chain_streamed(options), problem, judge)
    except Unanswered as reason:
        raise ArithmeticError(str(reason)) from None


def chain_streamed(options: LeastSquaresOptions) -> list[Link[Streamed, LeastSquaresSolutions]]:
    """Links for a matrix that is read in blocks."""
    ways = {"cholesky fp64 + seminormal": by_gram, "householder fp64 + seminormal": by_householder}
    return [
        Link(label, partial(answer, label=label))
        for label, answer in ways.items()
        if options.algorithm is None or label.startswith(options.algorithm)
    ]


@dataclass
class Streamed(SingleProblem, ScaledUnknowns):
    """One problem, whose rows are read in passes."""

    reader: Reader  # of A, b, and weights if there are any
    options: LeastSquaresOptions
    # n, k: columns of A, and of b.
    n: int
    k: int
    # Shape (n + k,): the largest magnitude in each column of A and b that was read so far, weighted.
    largest: torch.Tensor
    scales: torch.Tensor = field(init=False)  # shape (n + k,): powers of two by which they are multiplied

    def __post_init__(self) -> None:
        self.scales = torch.ones_like(self.largest)

    @classmethod
    def from_sources(cls, sources: dict[str, Source], options: LeastSquaresOptions) -> Streamed:
        n, k = sources["A"].shape[1], math.prod(sources["b"].shape[1:])
        device, size = options.engine.device, options.engine.tuning[StreamTuning].streamed_bytes
        # With fewer rows than columns a block would not make up for the merging of its R.
        each = double_of(options.dtype).itemsize
        reader = Reader(sources, device, max(size // (each * (n + k)), n, 1), options.progress)
        return cls(reader, options, n, k, torch.zeros(n + k, dtype=torch.float64, device=device))

    @property
    def is_vector(self) -> bool:
        """Whether b was given as one."""
        return len(self.reader.sources["b"].shape) == 1

    @property
    def device(self) -> torch.device:
        return self.options.engine.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the computation: float64 or complex128."""
        return double_of(self.options.dtype)

    @property
    def doubled(self) -> bool:
        """Whether residuals are in twice the working precision."""
        return self.options.forward or self.options.engine.tuning[StreamTuning].streams_doubled

    def triangle(self) -> tuple[torch.Tensor, int]:
        """R of ``[A b]`` by Householder reflections, without damping, and how many rows it is of."""
        sums = HouseholderSums.begin(self.n, self.k, self.device, self.dtype)
        self.visit("standard errors", sums.add, damped=False)
        return sums.whole, self.reader.count

    def visit(self, what: str, step: Step, rescale: Step | None = None, *, damped: bool = True) -> None:
        """One pass: ``step`` takes all rows of A and b, weighted and scaled, then those of the damping."""
        # ``rescale`` in a first pass changes what was summed, where columns of A and b are too large, or
        # small.
        for block in self.reader.read(what):
            a, b = self._weighted(block)
            if rescale is not None:
                self._look(a, b, block.first, rescale)
            if bool((self.scales != 1).any()):
                a.mul_(self.scales[: self.n])
                b.mul_(self.scales[self.n :])
            step(a, b)
        for rows in self._damping() if damped else ():
            step(rows, rows.new_zeros(len(rows), self.k))

    def _weighted(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        (a, b), weights = (x.to(self.dtype) for x in block.rows[:2]), block.rows[2:]
        b = b.reshape(len(b), self.k)
        for w in weights:
            check_rows(w, "weights", block.first)
            a.mul_(w[:, None])
            b.mul_(w[:, None])
        return a, b

    def _look(self, a: torch.Tensor, b: torch.Tensor, first: int, rescale: Step) -> None:
        """Refuse NaN and Inf; keep squares of what is summed in the range of float64."""
        column_max = self.options.engine.using(FP64).column_max
        of_a, of_b = column_max(a), column_max(b)
        if not bool(torch.isfinite(of_a).all()):
            check_rows(a, "A", first)
        if not bool(torch.isfinite(of_b).all()):
            check_rows(b.squeeze(1) if self.is_vector else b, "b", first)
        self.largest = torch.maximum(self.largest, torch.cat([of_a, of_b]))
        extreme = (self.largest > SQUARABLE) | ((self.largest < 1 / SQUARABLE) & (self.largest > 0))
        if bool(extreme.any()) or bool((self.scales != 1).any()):
            wanted = torch.where(extreme, power_of_two_scales(self.largest), 1.0)
            self.change(wanted, rescale)

    def change(self, scales: torch.Tensor, rescale: Step) -> None:
        """Take other scales, also in what was summed."""
        factors = scales / self.scales
        rescale(factors[: self.n], factors[self.n :])
        self.scales = scales

    def _damping(self) -> Iterator[torch.Tensor]:
        """Rows of ``damp I``, some at a time."""
        n, damp = self.n, self.options.damp
        for start in range(0, n if damp else 0, self.reader.rows):
            rows = torch.zeros(min(self.reader.rows, n - start), n, dtype=self.dtype, device=self.device)
            rows.diagonal(start).copy_(damp * self.scales[start : start + len(rows)])
            yield rows

    def normalize(self, norms: torch.Tensor, rescale: Step) -> None:
        """Columns of A, and b, of norms near 1: products in twice the precision are only as good as that."""
        if self.doubled:
            wanted = self.scales * power_of_two_scales(norms)
            self.change(wanted.clamp(1 / LARGEST_SCALE, LARGEST_SCALE), rescale)

    def refine(self, coordinates: Coordinates, start: torch.Tensor, label: str) -> LeastSquaresAnswer:
        """Passes with updates from the coordinates ``start``, until x is accepted, or no pass is left."""

        def visited(x: torch.Tensor, low: torch.Tensor) -> SummedGradient:
            sums = RefinementSums(coordinates, x, low, self.doubled, "weights" in self.reader.sources)
            self.visit("refinement", sums.add)
            return sums.summed()

        system, history = SummedProblem(coordinates, visited), list[float]()
        refinement = Refinement(system, start[None], 0.0)
        limits = self.options.limits((self.reader.count, self.n))
        while True:
            refinement.advance(refinement.steps + 1, refinement.steps + 1)
            members = summed_members(self, system, refinement.solution(), self.options)
            history.append(float(members.refined_error))
            good = bool(limits.accept(members.evidence))
            if good or self.reader.passes == MOST_PASSES or not bool(system.rate <= MAX_RATE):
                break
        return Answer(members, label, coordinates.doubt, iterations=refinement.steps, history=tuple(history))

    @property
    def columns(self) -> torch.Tensor:  # type: ignore[override]
        """Exponents by which columns of A are divided, shape (1, n)."""
        return 1 - binary_exponents(self.scales[: self.n])[None]

    @property
    def b_columns(self) -> torch.Tensor:  # type: ignore[override]
        """Exponents by which right-hand sides are divided, shape (1, k)."""
        return 1 - binary_exponents(self.scales[self.n :])[None]


def by_gram(problem: Streamed, before: LeastSquaresAnswer | None, *, label: str) -> LeastSquaresAnswer:
    """R of the Gram matrix, which takes half the operations of a QR; for moderate condition numbers."""
    sums = GramSums.begin(problem.n, problem.k, problem.device, problem.dtype)
    problem.visit("Gram matrix", sums.add, sums.rescale)
    norms = torch.cat([sums.gram.diagonal().real, sums.squares]).sqrt()
    problem.normalize(norms, sums.rescale)
    r = sums.r()
    if r is None:
        raise Declined("the Gram matrix is not positive definite: A is too ill-conditioned for it")
    coordinates = Coordinates.from_factor(r)
    condition = coordinates.condition
    certain = problem.options.limits((problem.reader.count, problem.n)).full_rank(condition)
    if not (FP64.u * condition**2 <= GRAM_RATE and certain):
        raise Declined(f"condition number up to {condition:.1e}, which the Gram matrix squares")
    return problem.refine(coordinates, coordinates.inverse.mH @ sums.products, label)


def by_householder(problem: Streamed, before: LeastSquaresAnswer | None, *, label: str) -> LeastSquaresAnswer:
    """R by Householder reflections, for any condition number; minimum-norm solutions below full rank."""
    if problem.reader.passes > MOST_PASSES - 2:
        raise Declined(f"it takes two passes, and {problem.reader.passes} of {MOST_PASSES} are made")
    sums = HouseholderSums.begin(problem.n, problem.k, problem.device, problem.dtype)
    problem.visit("Householder reflections", sums.add, sums.rescale if not problem.reader.passes else None)
    r, z, s = sums.parts()
    norms = torch.cat([two_norms(r, 0), torch.cat([z, s]).norm(dim=0)])
    problem.normalize(norms, sums.rescale)
    r, *right = sums.parts()
    if not bool(torch.isfinite(r).all()):
        raise Declined("R is not finite")
    count, n = problem.reader.count, problem.n
    rcond = problem.options.certain_rcond((count, n))
    unit, z = problem.options.unit, right[0]
    coordinates = Coordinates.of_any_rank(r, (z, right[1]), rcond, count, unit, problem.scales[:n])
    return problem.refine(coordinates, coordinates.of_b(z), label)
