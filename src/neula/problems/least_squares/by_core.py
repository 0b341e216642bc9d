"""Small least-squares problems on a CPU, alone or in batches: by one call of the compiled core.

The judge of the chain accepts answers; rejected problems go to other links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch

from neula.algorithms.krylov.batched_lstsq import FEW as FEW_PROBES
from neula.algorithms.krylov.batched_lstsq import MARGINS, PROBES, ROUNDING, limits_of, probes
from neula.algorithms.krylov.doubled_refinement import MAX_STEPS
from neula.certificates.forward_error import ESTIMATED, wedin_factor
from neula.certificates.rank import rounding_of
from neula.engines import FP64
from neula.kernels.core import DTYPES
from neula.kernels.magnitudes import two_norms
from neula.kernels.small_problems import seminormal_host
from neula.kernels.small_problems.embedding import embedded, of_stacked_parts, stacked_parts
from neula.kernels.small_problems.seminormal_host import (
    NUMBERS,
    Probes,
    SeminormalHostSolutions,
    SolutionMethod,
)
from neula.pipeline.chain import Answer
from neula.pipeline.gradients import stacked_problem
from neula.pipeline.progress import stage
from neula.problems.least_squares.problem import (
    LeastSquaresAnswer,
    LeastSquaresOptions,
    LeastSquaresProblems,
    LeastSquaresSolutions,
    Way,
)

LARGEST, WIDEST = 1 << 18, 256
"""Elements, and columns or rows, of matrices up to which its one thread takes less time than a library with
several; so many also has the Gram matrix of columns that may be dependent."""

RIGHT = 1 << 20
"""Elements of a matrix, times right-hand sides, up to which these are refined one by one. More of them a
library multiplies by together, in less time unless products are in twice the precision."""

DOUBLED = 1 << 15
"""Elements of a matrix up to which products in twice the precision take less time here than in a library,
which cuts the matrix into slices."""

FEW = 16
"""Right-hand sides of one problem that are refined one by one, whatever its size."""

NEAR = 1 << 14
"""Elements up to which more vectors show how fast refinement of dependent columns converges: passes take less
time than calls of Python."""

LABEL = "cholesky fp64 + seminormal"

SHIFTED = "shifted cholesky fp64 + seminormal"
"""Label of the core where columns are too dependent for the factor of their Gram matrix."""

DEPENDENT = "pivoted cholesky fp64 + seminormal"
"""Label of the core where columns are dependent."""

LABELS = {
    SolutionMethod.GRAM: LABEL,
    SolutionMethod.SHIFTED: SHIFTED,
    SolutionMethod.FEW_ROWS: LABEL,
    SolutionMethod.DEPENDENT: DEPENDENT,
}

ELEMENTS = 1 << 22
"""Of the matrices that are solved in one call, which nothing interrupts."""


def suits(m: int, n: int, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for plain problems of a shape: for complex ones of twice that."""
    if dtype.is_complex:
        m, n, dtype = 2 * m, 2 * n, dtype.to_real()
    small = 0 < min(m, n) <= WIDEST and m * n <= LARGEST
    return small and dtype in DTYPES and seminormal_host.available()


def takes_right(k: int, m: int, n: int, options: LeastSquaresOptions) -> bool:
    """Whether k right-hand sides are refined one by one."""
    size = options.rows(m, n) * n * (4 if options.dtype.is_complex else 1)  # of real parts, embedded
    return k <= FEW or k * size <= RIGHT or (size <= DOUBLED and options.refines_doubled(m, n))


def by_core(
    problems: LeastSquaresProblems, before: LeastSquaresAnswer | None, *, label: str, together: Way
) -> LeastSquaresAnswer:
    """Solve all problems by the core; many right-hand sides are faster otherwise."""
    options = problems.options
    m, n = problems.a.shape[1:]
    if not takes_right(problems.b.shape[2], m, n, options):
        return together(problems, before)
    report, parts, steps, used = stage(options.progress, label), [], 0, 0
    special = options.damp or options.weights is not None
    size = max(1, ELEMENTS // (m * n))
    for a, b in problems.chunks(size):
        if special:
            a, b = stacked_problem(a, b, options.weights, options.damp)
        found = _solved(a, b, options)
        if found is None:
            return together(problems, before)
        known, (taken, ways) = found.numbers[:-2], found.numbers[-2:]
        if options.weights is not None:
            count_rounded_weights(a, found)
        parts.append((found.x, known, found.forward_error, found.residual_norm))
        solved = ways[known[0] == 0]
        steps, used = max(steps, int(max(taken))), max(used, int(max(solved, default=0)))
        report(min(1.0, len(parts) * size / len(problems)))
    x, numbers, forward_error, residual_norm = parts[0] if len(parts) == 1 else _joined(parts)
    values = LeastSquaresSolutions.from_numbers(
        torch.from_numpy(x), numbers, forward_error=forward_error, residual_norm=residual_norm
    )
    return Answer(values, LABELS[SolutionMethod(used)], iterations=steps, measured=numbers)


def _joined(parts: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    x, numbers, forward_error, residual_norm = zip(*parts, strict=True)
    return *map(np.concatenate, (x, forward_error)), np.concatenate(numbers, 1), np.concatenate(residual_norm)


def count_rounded_weights(a: torch.Tensor, found: SeminormalHostSolutions) -> None:
    """Let errors be those of the problem whose weighted elements are not rounded."""
    # Rounding them is a perturbation of A and b by one unit roundoff (Wedin's bound), for columns that are
    # independent: it turns the rows, which determine the minimum-norm solution if they are dependent. With
    # columns of norm 1 that of A has a Frobenius norm of at most ``sqrt(n) u``, and A a norm of at least 1.
    of = dict(zip(LeastSquaresSolutions.names, found.numbers[:-2], strict=True))  # views
    n = a.shape[-1]
    sizes = two_norms(a, 1).numpy()
    with np.errstate(all="ignore"):  # not accepted unless finite
        image = np.linalg.norm(sizes[:, :, None] * found.x, axis=1)
        condition = ESTIMATED * np.maximum(of["condition"], 1.0)[:, None]
        found.forward_error += condition * FP64.u * wedin_factor(condition, found.residual_norm / image)
    of["forward_error"][:] = found.forward_error.max(1)
    of["backward_error"] += n**0.5 * FP64.u
    of["doubtful"][of["rank"] < n] = 1.0


def takes(m: int, n: int, options: LeastSquaresOptions) -> bool:
    """Whether problems of a shape are for the core, which rounds weighted elements."""
    exact = options.weights is None or not (options.forward or options.is_wide(m, n))
    return exact and _are_here(options) and suits(options.rows(m, n), n, options.dtype)


def takes_dependent(m: int, n: int, options: LeastSquaresOptions) -> bool:
    """Whether the core finds the rank of tall matrices that begin otherwise sooner than other ways do."""
    plain = options.weights is None and not options.damp and not takes(m, n, options)
    in_reach = n <= m and n**2 <= LARGEST and m * n <= ELEMENTS and not options.dtype.is_complex
    return plain and in_reach and _are_here(options) and suits(n, 1, options.dtype)


def _are_here(options: LeastSquaresOptions) -> bool:
    """Whether problems are on a CPU, and left to a chain."""
    here = options.engine.tuning.lapack and options.engine.device.type == "cpu"
    return here and not options.named and not options.over_rows.spread


def kernel_for(
    m: int, n: int, options: LeastSquaresOptions
) -> Callable[[np.ndarray, np.ndarray, np.ndarray], bool] | None:
    """The core's function for problems of m rows, those of damping included: ``seminormal_host.prepared``."""
    limits = limits_of(options.digits, min(MAX_STEPS, options.max_iterations))
    verdict = options.limits((m, n))
    rcond, rounding = options.rcond, rounding_of(n, options.unit)
    if options.dtype.is_complex:
        m, n = 2 * m, 2 * n
        # Twice the rows have twice the rounding errors: what is dropped is below rcond all the same.
        rcond, rounding = 2 * rcond, min(2 * rounding, rcond)
    return seminormal_host.prepared(
        *(options.dtype.to_real(), limits, verdict.backward_error, verdict.condition),
        rcond=rcond,
        rounding=rounding,
        probes=_probes(n, m * n <= NEAR) if n**2 <= LARGEST else None,
    )


def _solved(a: torch.Tensor, b: torch.Tensor, options: LeastSquaresOptions) -> SeminormalHostSolutions | None:
    a, b = (x if x.dtype.to_real() in DTYPES else x.double() for x in (a, b))
    count, k, (m, n) = len(a), b.shape[-1], a.shape[-2:]
    solve, order = kernel_for(m, n, options), (1 + a.is_complex()) * n
    matrices, right = (
        (embedded(a.numpy()), stacked_parts(b.numpy())) if a.is_complex() else (a.numpy(), b.numpy())
    )
    written = np.empty(seminormal_host.size_of(count, order, k))
    if solve is None or not solve(matrices, right, written):
        return None
    found = SeminormalHostSolutions(written, count, order, k)
    if a.is_complex():
        found.x, ranks = of_stacked_parts(found.x), found.numbers[NUMBERS.index("rank")]
        np.maximum(found.numbers[0], ranks % 2, out=found.numbers[0])  # half of a complex direction counts
        ranks /= 2
    return found


@lru_cache(maxsize=WIDEST)
def _probes(n: int, near: bool) -> Probes:
    count = PROBES if near else FEW_PROBES
    vectors = probes(n, torch.device("cpu"), count, unit=False).numpy()
    return Probes(vectors, MARGINS[count], ROUNDING * FP64.u)
