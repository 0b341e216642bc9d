"""Preconditioners R of one least-squares problem, and the condition numbers that they imply."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch

from neula.algorithms.orthogonal.householder import solve_by_householder
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.spectra.condition import expected_decay, extreme_singular_values
from neula.algorithms.spectra.gram import gram_r
from neula.algorithms.triangular.inverted import InvertedTuning
from neula.algorithms.triangular.triangular import BlockTriangular, UpperTriangular
from neula.engines import FP16
from neula.engines.reduction import Reduction
from neula.pipeline.chain import Declined
from neula.pipeline.progress import stage
from neula.problems.least_squares.prepared import PreparedProblem, nonzero_norms

FP16_GRAM_CONDITION = 300.0
"""A larger condition number of its R says that the Gram matrix is too coarse in fp16. Its rounding errors are
random and much smaller than ``cond^2 u``, but one with error correction costs no more than a few iterations.
"""

FP16_DECAY = 128.0
"""A diagonal of R that will fall by more, ``1 / (16 u)``, gives a QR in fp16 up half-way. With a geometric
spectrum that is a condition number of 2000, and the forty iterations or so that it would need take as long as
a better R."""

WELL_CONDITIONED = 1e5
"""Condition number up to which a direct solution is where iterations begin. Its backward error is larger than
theirs, and where the residual is large, the error of x grows with the square of the condition number."""

DOUBTFUL_ITERATIONS = 12
"""Iterations for an R in fp16 with a condition number above ``1/u``: its small singular values are mostly
rounding errors. A few of them cost a few iterations, many of them more than a better R takes.
"""


@dataclass(frozen=True)
class Preconditioner:
    """R of the scaled matrix, and what it says about its condition."""

    triangle: UpperTriangular  # shape (n, n)
    columns: torch.Tensor  # shape (n,): norms of the columns of R, which are those of the scaled matrix
    # Shape (2,): estimates of the largest and the smallest singular value of R with columns divided by their
    # norms.
    extremes: torch.Tensor
    # Whether they are those of A (Householder, double precision); those of any other R are only if A R^-1 is
    # well conditioned, which a problem with known solution shows.
    stable: bool = False

    @classmethod
    def from_factor(
        cls, r: torch.Tensor, triangle: UpperTriangular, *, stable: bool = False
    ) -> Preconditioner:
        """R as a matrix, and as it is solved with."""
        columns = nonzero_norms(torch.linalg.vector_norm(r, dim=0).double())
        return cls(triangle, columns, extreme_singular_values(r, triangle, columns), stable)


@dataclass(frozen=True)
class Limit:
    """How bad an R in a low precision may be, where a better one can be had."""

    condition: float
    iterations: int  # of the first solve with an R of a larger condition number
    decay: float = math.inf  # by how much its diagonal may fall

    def check_decay(self, n: int, diagonal: torch.Tensor) -> None:
        """Give an R of n columns up, by the diagonal of its first ones."""
        decay = expected_decay(diagonal, n)
        if math.isnan(decay):
            raise Declined("R is not finite")
        if decay > self.decay:
            raise Declined(
                f"the diagonal of R will fall by a factor of about {decay:.1e}: "
                "A is too ill-conditioned for an R in this precision"
            )


LIMITS = {
    ("cholesky", "fp16"): Limit(FP16_GRAM_CONDITION, 0),
    ("rgsqrf", "fp16"): Limit(1 / FP16.u, DOUBTFUL_ITERATIONS, FP16_DECAY),
}
"""By method and arithmetic."""


def fast_r(problem: PreparedProblem, method: str, compute: str, limit: Limit | None) -> Preconditioner:
    """R of the scaled matrix by ``"rgsqrf"`` or from the Gram matrix (``"cholesky"``).

    A GPU replays it if A is small and no progress is reported. Otherwise it ends early with
    :class:`~neula.pipeline.chain.Declined` where R will be worse than ``limit`` allows.
    """
    options, operator, n = problem.options, problem.operator, problem.scales.numel()
    engine = options.engine.using(compute)
    report = stage(options.progress, f"factorizing in {compute}")
    size = problem.b.element_size() * math.prod(operator.shape)
    played_back = size <= options.engine.replayed_bytes and options.progress is None
    on_columns = None if options.progress is None else lambda k: report((k / n) ** 2)
    over_rows = options.over_rows
    on_half = None if played_back or limit is None else partial(_check_half, limit, n, over_rows)

    def factorized(a: torch.Tensor, scales: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        same = replace(operator, a=a, weights=weights[0] if weights else None)
        if method == "cholesky":
            given = engine.is_complex and same.weights is None and not same.damp  # rounded as it is split
            r = gram_r(same.a, engine, scales) if given else gram_r(same.operand(engine, scales), engine)
        else:
            work = same.working(engine, scales)
            r = rgsqrf(work, engine, overwrite_a=True, on_columns=on_columns, on_half=on_half)[1]
        r = over_rows.agree(r)
        # Dozens of launches that know nothing of A, which may be too large for a graph, or on another device.
        return r, *options.engine.alone.replay(known_of, (r,), "preconditioner")

    def known_of(r: torch.Tensor) -> tuple[torch.Tensor, ...]:
        triangle = BlockTriangular.from_factor(r, options.engine.tuning[InvertedTuning].inverted)
        found = Preconditioner.from_factor(r, triangle)
        return triangle.inverses, found.columns, found.extremes

    inputs = (operator.a, problem.scales, *(() if operator.weights is None else (operator.weights,)))
    if played_back:
        key = ("lstsq", method, repr(engine), operator.damp)
        r, inverses, columns, extremes = options.engine.replay(factorized, inputs, key)
    else:
        r, inverses, columns, extremes = factorized(*inputs)
    report(1.0)
    return Preconditioner(BlockTriangular(r, inverses), columns, over_rows.agree(extremes))


def _check_half(limit: Limit, n: int, over_rows: Reduction, diagonal: torch.Tensor) -> None:
    limit.check_decay(n, over_rows.agree(diagonal))


def householder_r(problem: PreparedProblem) -> tuple[Preconditioner, torch.Tensor | None]:
    """R by the library's Householder reflections in double precision, and solutions by them.

    Solutions are None where they are to be found in another way: of minimum norm, or where the digits that
    iterations from zero add may be the only guaranteed ones.
    """
    report = stage(problem.options.progress, "factorizing in fp64")
    start, over_rows = None, problem.options.over_rows
    a = problem.operator.dense() * problem.scales
    if problem.wide or over_rows.spread:
        r = over_rows.merged_r(a, lambda rows: torch.linalg.qr(rows, mode="r")[1])
    else:
        x, r = solve_by_householder(a, problem.b)
        start = x * problem.scales[:, None]
    report(1.0)
    # The library's substitution is as stable as can be, and several times slower on a GPU.
    found = Preconditioner.from_factor(r, r, stable=True)
    found = replace(found, extremes=over_rows.agree(found.extremes))
    largest, smallest = found.extremes.tolist()
    return found, start if largest <= WELL_CONDITIONED * smallest else None
