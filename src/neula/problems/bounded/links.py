"""The table of links for least squares with bounds.

Block pivoting takes a few exchanges, but columns have to be independent, and those of a wide matrix are not.
The active-set method always ends. Parts of a Gram matrix do for condition numbers up to 1e5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from neula.algorithms.bounded.active_set import ActiveSetSolution, active_set, block_pivoting
from neula.algorithms.bounded.free_sets import (
    SHARED,
    EqualityFactors,
    Factorize,
    FreeBatch,
    FreeSetFactors,
    Reduced,
    batches,
    by_cholesky,
    by_householder,
    minimize,
)
from neula.certificates.forward_error import ESTIMATED
from neula.certificates.kkt import KKTNorms
from neula.engines import FP64
from neula.kernels.magnitudes import SQUARABLE
from neula.kernels.small_problems.refining import over
from neula.pipeline.chain import Answer, Chain, Link, Row, Rule, Table, labelled
from neula.problems.bounded.problem import BoundedProblems, BoundedValues

SHORTEST = 0.5
"""Norm of a column at least: they are scaled to norms between this and 1."""


def values_of(problems: BoundedProblems, found: ActiveSetSolution, factorize: Factorize) -> BoundedValues:
    """Solutions rounded to the dtype of the result, and their evidence."""
    # ``factorize``: how columns of free variables are factorized: what is measured is as good as that.
    whole, reduced = problems.whole, problems.reduced
    low, high = reduced.low, reduced.high
    side = torch.where(found.x >= high, 1, torch.where(found.x <= low, -1, 0)).to(torch.int8)
    side = side.masked_fill(found.free, 0)
    x, rounded = found.x, whole.rounded(found.x, reduced.owner)
    residual, gradient, b = _residuals(problems, x)
    norms = reduced.of_each(reduced.norms)
    free = (side == 0) & (reduced.of_each(torch.linalg.vector_norm(reduced.r, dim=1)) > 0)
    known = _Known.measure(reduced, x, free, gradient, factorize)
    wrong = _wrong(known.gradient, side)
    left = _wrong(known.left, side).masked_fill(free, 0.0)
    pushed = torch.where(left == 0, known.left.abs() / norms, 0.0).masked_fill(free, torch.inf).amin(1)
    kkt = KKTNorms(
        residual=residual,
        wrong=_norm(wrong / norms),
        projected=known.projected,
        rest=_norm(left / norms),
        image=_norm(x * norms),
        b=b,
    )
    rounding = over(_norm((rounded - x) * norms), kkt.image)
    noise = kkt.noise(whole.a.shape[1:], (x * norms).abs().sum(1))
    violated = torch.zeros_like(noise)
    if reduced.equalities is not None:
        violated = over(reduced.left_of_equalities(x).abs(), reduced.sizes_of_equalities(x)).amax(1)
        noise = noise + reduced.noise(x, residual[:, None]).amax(1) / SHORTEST  # of the multipliers
    pushed = pushed - noise
    condition = _condition(kkt, known, pushed, reduced)
    corner = ~free.any(1) & (pushed > 0)
    forward_error = kkt.forward_error(ESTIMATED * condition, known.norm, rounding, corner)
    forward_error = forward_error + ESTIMATED * condition * violated + over(known.moved, kkt.image)
    zero = whole.without_b[problems.places] & ~x.any(1)
    # Squares of smaller norms, beside the largest right-hand side of the same matrix, underflow.
    sizable = (zero | (kkt.image + kkt.b >= 1 / SQUARABLE)) & whole.keeps_bounds[reduced.owner]
    return BoundedValues(
        x=rounded,
        side=side,
        wrong=wrong / norms,
        residual_norm=residual,
        backward_error=torch.maximum(kkt.backward_error, violated) + rounding,
        forward_error=torch.where(sizable, forward_error, torch.inf).nan_to_num(torch.inf, torch.inf),
        condition=condition,
        iterations=found.iterations,
    )


def _norm(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dim=1)


def _wrong(gradient: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
    """The gradient without the components that point out of the bounds."""
    gradient = torch.where(side > 0, gradient.clamp(max=0.0), gradient)
    return torch.where(side < 0, gradient.clamp(min=0.0), gradient)


def _residuals(problems: BoundedProblems, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norms of residuals, gradients ``A^T r`` and norms of b, by products with A itself, some at a time."""
    whole, norm = problems.whole, torch.linalg.vector_norm
    (count, m, _), k = whole.a.shape, whole.b.shape[2]
    size = max(1, 8 * whole.options.engine.tuning.chunk_elements // max(1, m))
    found = []
    for places, owner, part in zip(
        *(y.split(size) for y in (problems.places, problems.reduced.owner, x)), strict=True
    ):
        # Right-hand sides of a matrix, which are next to each other, are columns of one product.
        present, member, each = owner.unique_consecutive(return_inverse=True, return_counts=True)
        place = member, torch.arange(len(member), device=x.device) - (each.cumsum(0) - each)[member]
        a = whole.a if len(present) == count else whole.a[present]
        b, y = (x.new_zeros(len(present), int(each.max()), rows) for rows in a.shape[1:])
        b[place], y[place] = whole.b.mT[owner, places - owner * k], part
        r = torch.baddbmm(b.mT, a, y.mT, alpha=-1.0)
        found.append((norm(r, dim=1)[place], (r.mT @ a)[place], norm(b, dim=2)[place]))
    residual, gradient, b_norm = (torch.cat(parts) for parts in zip(*found, strict=True))
    return residual, gradient, b_norm


@dataclass
class _Known:
    """Measures from the columns of free variables."""

    projected: torch.Tensor  # shape (C,): norm of the residual's projection on their range
    gradient: torch.Tensor  # shape (C, n): with the multipliers of equality constraints
    left: torch.Tensor  # shape (C, n): the gradient without that
    # norm, inverse_norm, shape (C,): of these columns of R from below, and of its pseudoinverse; infinite
    # where they are dependent.
    norm: torch.Tensor
    inverse_norm: torch.Tensor
    moved: torch.Tensor  # shape (C,): ||D (x - x*)|| by errors of equality constraints alone

    @classmethod
    def measure(
        cls,
        problems: Reduced,
        x: torch.Tensor,
        free: torch.Tensor,
        gradient: torch.Tensor,
        factorize: Factorize,
    ) -> _Known:
        zero = gradient.new_zeros(len(gradient))
        # Without free variables nothing is projected, and no column can be ill-conditioned.
        found = cls(zero.clone(), gradient.clone(), gradient.clone(), zero + 1, zero + 1, zero.clone())
        for batch in batches(problems, free):
            found._take(problems, x, batch, factorize(problems, batch))
        return found

    def _take(self, problems: Reduced, x: torch.Tensor, batch: FreeBatch, factor: FreeSetFactors) -> None:
        """Note what one batch says."""
        rows, n = batch.rows, problems.n
        # Of more columns than rows a Gram matrix says so only up to its rounding errors.
        singular = factor.singular | ((batch.index < n).sum(1) > problems.r.shape[1])
        some, gradient = problems.at(rows), self.gradient[rows]
        if problems.equalities is not None:
            border = EqualityFactors.of_free(some, batch, factor)
            singular = singular | border.singular
            # Along free variables a projection has no rounding errors of E^T y, which are those of E.
            y, part = border.multipliers(batch.take(gradient)), border.projected(factor, batch.take(gradient))
            free = batch.spread(torch.ones_like(part), problems.n) > 0
            gradient = some.with_multipliers(gradient, y)
            gradient = torch.where(free, batch.spread(part, problems.n), gradient)
            self.gradient[rows], self.left[rows] = gradient, gradient
            left = some.left_of_equalities(x[rows]).abs() + FP64.u * some.sizes_of_equalities(x[rows])
            turned = FP64.u * (y.abs()[:, None] @ some.rows_of_equalities.abs())[:, 0]
            inverse = ESTIMATED * factor.inverse_norm()
            self.moved[rows] = inverse * (border.moved(left) + inverse * _norm(batch.take(turned)))
        image = factor.image(some, batch, batch.take(gradient))
        self.left[rows] -= some.back(image)
        self.projected[rows] = _norm(image).masked_fill(singular.expand(len(rows)), torch.inf)
        self.norm[rows] = factor.norm().masked_fill(singular, SHORTEST)
        self.inverse_norm[rows] = factor.inverse_norm().masked_fill(singular, torch.inf)

    @property
    def condition(self) -> torch.Tensor:
        """Estimated condition number of these columns, shape (C,)."""
        return (self.norm * self.inverse_norm).clamp(min=1.0)


def _condition(kkt: KKTNorms, known: _Known, pushed: torch.Tensor, problems: Reduced) -> torch.Tensor:
    """Condition numbers for Wedin's bound on ``||D (x - x*)|| / ||D x*||``, shape (C,)."""
    # They are those of the columns in which x and x* may differ: of all of them, unless the other variables
    # are pushed against their bounds by more than the residual may change: by ``pushed`` at least.
    certain = kkt.moved(known.norm, ESTIMATED * known.inverse_norm) < pushed
    condition = known.condition
    if not bool(certain.all()):
        condition = torch.where(certain, condition, _condition_of_all(problems))
    return condition


def _condition_of_all(problems: Reduced) -> torch.Tensor:
    """Condition numbers of the matrices of problems, shape (C,)."""
    if problems.r.shape[1] < problems.n:
        return problems.c.new_full((len(problems),), torch.inf)
    values = torch.linalg.svdvals(problems.r.nan_to_num())
    condition = values[:, 0] / values[:, -1]
    return torch.where(condition.isnan(), torch.inf, condition)[problems.owner]


Solution = Answer[BoundedValues]

EXCHANGES = 100
"""Most exchanges of block pivoting. Ten suffice for most problems. If rounding errors decide, more may not
terminate, and there may be as many single exchanges as sets."""


def by_block_pivoting(problems: BoundedProblems, before: Solution | None, *, label: str) -> Solution:
    """Exchange all infeasible variables at once, beginning with the unconstrained solution."""
    limit = problems.whole.options.max_iterations or EXCHANGES
    start, reduced = problems.whole.unbounded[problems.places], problems.reduced
    if reduced.equalities is not None:
        start = minimize(reduced, start, torch.ones_like(start, dtype=torch.bool), by_cholesky).x
    found = block_pivoting(reduced, start, max_iterations=limit, factorize=by_cholesky)
    return Answer(values_of(problems, found, by_cholesky), label, iterations=int(found.iterations.sum()))


def _start(problems: BoundedProblems, limit: int) -> torch.Tensor:
    """Solutions without bounds; SciPy's for a few problems on a CPU with lower bounds alone, if violated."""
    reduced, shortest = problems.reduced, problems.whole.unbounded[problems.places]
    lower, upper = (x.expand(len(reduced), -1) for x in (reduced.low, reduced.high))
    suited = len(reduced) < SHARED and lower.is_cpu and bool(lower.isfinite().all() & upper.isinf().all())
    if not suited or bool((shortest > lower).all()):
        return shortest
    from scipy.optimize import nnls

    found, right = lower.clone(), reduced.residual(lower)
    for i, owner in enumerate(reduced.owner.tolist()):
        try:
            found[i] += torch.from_numpy(nnls(reduced.r[owner].numpy(), right[i].numpy(), maxiter=limit)[0])
        except RuntimeError:  # too many steps
            return shortest
    return found


def by_active_set(
    problems: BoundedProblems, before: Solution | None, *, label: str, factorize: Factorize
) -> Solution:
    """One variable at a time, beginning with what was found before."""
    n = problems.reduced.n
    limit = problems.whole.options.max_iterations or max(10, 3 * n)
    start = _start(problems, limit) if before is None else before.values.x
    reduced = problems.reduced
    if reduced.equalities is None:
        found = active_set(reduced, start, max_iterations=limit, factorize=factorize)
    else:  # large weights show which variables are at bounds
        found = active_set(reduced.weighted(), start, max_iterations=limit, factorize=factorize)
        found = block_pivoting(reduced, found.x, max_iterations=limit, factorize=factorize)
    return Answer(values_of(problems, found, factorize), label, iterations=int(found.iterations.sum()))


BoundedLink = Link[BoundedProblems, BoundedValues]

Shape = tuple[int, int, int]
"""Rows, columns, and equality constraints."""


def chain(m: int, n: int, equalities: int = 0) -> Sequence[BoundedLink]:
    """Links for matrices of a shape, and for a number of equality constraints."""
    return Chain(TABLE, (m, n, equalities))


_when = Rule[Shape, bool]

_tall = _when(
    "at least as many rows as columns, or equality constraints",
    lambda case: case[0] >= case[1] or case[2] > 0,
)

_unconstrained = _when("no equality constraints", lambda case: not case[2])

_wide = _when("fewer rows than columns", lambda case: case[0] < case[1])

TABLE: Table[Shape] = (
    Row("block pivoting cholesky", labelled(by_block_pivoting), (_tall,)),
    Row("active set cholesky", labelled(by_active_set, factorize=by_cholesky), (_wide, _unconstrained)),
    Row("active set householder", labelled(by_active_set, improves=True, factorize=by_householder), ()),
)
"""Cheapest first."""
