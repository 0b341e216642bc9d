"""Statistics of linear fits whose rows are gone: from R, ``Q^H b`` and the norms of residuals."""

from __future__ import annotations

import torch

from neula.engines.formats import in_double
from neula.kernels.magnitudes import squares
from neula.kernels.shift import shift
from neula.pipeline.call import Call
from neula.pipeline.gradients import stacked_problem
from neula.pipeline.shapes import BatchedProblem
from neula.problems.least_squares.fit import FitNumbers, KeptFit
from neula.problems.least_squares.held_evidence import Held
from neula.problems.least_squares.problem import LeastSquaresOptions


def from_triangle(
    triangle: torch.Tensor,
    damping: torch.Tensor | None,
    rows: float,
    rcond: float,
    units: tuple[torch.Tensor, torch.Tensor],
) -> FitNumbers:
    """Numbers of one fit.

    ``triangle``, shape (n + k, n + k): R of ``[A b]`` by Householder reflections, up to an orthogonal factor
    of its last k rows. ``damping``, shape (n,): of each column. ``rows``: of A, without those of the damping.
    ``units``, shape (n,) and (k,): exponents of the powers of two by which columns of A and b were divided.
    Raises ValueError if A lacks full rank.
    """
    of_a, of_b = units
    n = len(of_a)
    r, z, s = triangle[:n, :n], triangle[:n, n:], triangle[n:, n:]
    whole = r if damping is None else torch.linalg.qr(torch.cat([r, damping.diag()]), mode="r")[1]
    if not bool((whole.diagonal().abs() > rcond * torch.linalg.vector_norm(whole, dim=0)).all()):
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


def fit_held(call: Call, shapes: BatchedProblem, held: Held, x: torch.Tensor, norms: torch.Tensor) -> KeptFit:
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

    return KeptFit(call, shapes, held.options, x, norms, source=numbers)


def fit_spread(
    call: Call, shapes: BatchedProblem, options: LeastSquaresOptions, x: torch.Tensor, norms: torch.Tensor
) -> KeptFit:
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

    return KeptFit(call, shapes, options, x, norms, source=numbers, is_spread=True)
