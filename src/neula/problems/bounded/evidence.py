"""Measure solutions within bounds, with A and b themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.algorithms.bounded.block_pivoting import ActiveSetSolution
from neula.algorithms.bounded.free_sets import EqualityFactors, Factorize, FreeBatch, FreeSetFactors, batches
from neula.algorithms.bounded.reduced import Reduced
from neula.certificates.forward_error import ESTIMATED
from neula.certificates.kkt import KKTNorms
from neula.kernels.magnitudes import SQUARABLE
from neula.kernels.small_problems.refining import over
from neula.problems.bounded.problem import BoundedProblems, BoundedValues

SHORTEST = 0.5
"""Norm of a column at least: they are scaled to norms between this and 1."""


@dataclass(frozen=True)
class _BoundedResiduals:
    """Residuals of the problems themselves, not of R."""

    norm: torch.Tensor  # shape (C,)
    gradient: torch.Tensor  # shape (C, n): A^T r
    b: torch.Tensor


def values_of(problems: BoundedProblems, found: ActiveSetSolution, factorize: Factorize) -> BoundedValues:
    """Solutions rounded to the dtype of the result, and their evidence.

    ``factorize``: how columns of free variables are factorized: what is measured is as good as that.
    """
    whole, reduced = problems.whole, problems.reduced
    low, high = reduced.low, reduced.high
    side = torch.where(found.x >= high, 1, torch.where(found.x <= low, -1, 0)).to(torch.int8)
    side = side.masked_fill(found.free, 0)
    x, rounded = found.x, whole.rounded(found.x, reduced.owner)
    residuals = _residuals(problems, x)
    norms = reduced.of_each(reduced.norms)
    free = (side == 0) & (reduced.of_each(torch.linalg.vector_norm(reduced.r, dim=1)) > 0)
    known = _Known.measure(reduced, free, residuals.gradient, factorize)
    wrong = _wrong(known.gradient, side)
    left = _wrong(known.left, side).masked_fill(free, 0.0)
    pushed = torch.where(left == 0, known.left.abs() / norms, 0.0).masked_fill(free, torch.inf).amin(1)
    kkt = KKTNorms(
        residual=residuals.norm,
        wrong=_norm(wrong / norms),
        projected=known.projected,
        rest=_norm(left / norms),
        image=_norm(x * norms),
        b=residuals.b,
    )
    rounding = over(_norm((rounded - x) * norms), kkt.image)
    noise = kkt.noise(whole.a.shape[1:], (x * norms).abs().sum(1))
    violated = torch.zeros_like(noise)
    if (equalities := reduced.equalities) is not None:
        rows = equalities.of_each(reduced.owner)
        sizes = (rows.abs() @ x.abs()[..., None])[..., 0] + equalities.right.abs()
        violated = over(reduced.left_of_equalities(x).abs(), sizes).amax(1)
        noise = noise + reduced.noise(x, residuals.norm[:, None]).amax(1) / SHORTEST  # of the multipliers
    pushed = pushed - noise
    condition = _condition(kkt, known, pushed, reduced)
    corner = ~free.any(1) & (pushed > 0)
    forward_error = kkt.forward_error(ESTIMATED * condition, known.norm, rounding, corner)
    forward_error = forward_error + ESTIMATED * condition * violated
    zero = whole.without_b[problems.places] & ~x.any(1)
    # Squares of smaller norms, relative to the largest right-hand side of the same matrix, underflow.
    sizable = (zero | (kkt.image + kkt.b >= 1 / SQUARABLE)) & whole.keeps_bounds[reduced.owner]
    return BoundedValues(
        x=rounded,
        side=side,
        wrong=wrong / norms,
        residual_norm=residuals.norm,
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


def _residuals(problems: BoundedProblems, x: torch.Tensor) -> _BoundedResiduals:
    """Residuals and gradients by products with A, some right-hand sides at a time."""
    whole, owner = problems.whole, problems.reduced.owner
    count, m, _ = whole.a.shape
    norm, b_norm, gradient = x.new_empty(len(x)), x.new_empty(len(x)), torch.empty_like(x)
    k = whole.b.shape[2]
    size = max(1, 8 * whole.options.engine.tuning.chunk_elements // max(1, m))
    for place in range(count):
        mine = (owner == place).nonzero()[:, 0] if count > 1 else torch.arange(len(x), device=x.device)
        for rows in mine.split(size):
            b = whole.b[place, :, problems.places[rows] - place * k]
            r = torch.addmm(b, whole.a[place], x[rows].T, alpha=-1.0)
            norm[rows] = torch.linalg.vector_norm(r, dim=0)
            b_norm[rows] = torch.linalg.vector_norm(b, dim=0)
            gradient[rows] = r.T @ whole.a[place]
    return _BoundedResiduals(norm, gradient, b_norm)


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

    @classmethod
    def measure(
        cls, problems: Reduced, free: torch.Tensor, gradient: torch.Tensor, factorize: Factorize
    ) -> _Known:
        zero = gradient.new_zeros(len(gradient))
        # Without free variables nothing is projected, and no column can be ill-conditioned.
        found = cls(zero.clone(), gradient.clone(), gradient.clone(), zero + 1, zero + 1)
        for batch in batches(problems, free):
            found._take(problems, batch, factorize(problems, batch))
        return found

    def _take(self, problems: Reduced, batch: FreeBatch, factor: FreeSetFactors) -> None:
        """Note what one batch says."""
        rows, n = batch.rows, problems.n
        # Of more columns than rows a Gram matrix says so only up to its rounding errors.
        singular = factor.singular | ((batch.index < n).sum(1) > problems.r.shape[1])
        some, gradient = problems.at(rows), self.gradient[rows]
        if problems.equalities is not None:
            border = EqualityFactors.of_free(some, batch, factor)
            singular = singular | border.singular
            gradient = some.with_multipliers(gradient, border.multipliers(batch.take(gradient)))
            self.gradient[rows], self.left[rows] = gradient, gradient
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
    """Condition numbers for Wedin's bound on ``||D (x - x*)|| / ||D x*||``, shape (C,).

    They are those of the columns in which x and x* may differ: of all of them, unless the other variables are
    pushed against their bounds by more than the residual may change: by ``pushed`` at least.
    """
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
