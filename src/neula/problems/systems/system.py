"""One linear system in double precision, and the scales in which it is factorized."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from neula.algorithms.elimination.equilibrate import TOP, Equilibration, equilibrate, equilibrate_symmetric
from neula.algorithms.elimination.factorization import mixed_lu
from neula.algorithms.scaling import binary_exponents, power_of_two_scales
from neula.certificates.backward_error import Scaling
from neula.certificates.bounds import solve_bound
from neula.engines import Engine, Format
from neula.engines.formats import in_double
from neula.kernels.few_vectors.symmetric_product import symmetric_sizes
from neula.kernels.magnitudes import magnitudes
from neula.pipeline.batches import SingleProblem
from neula.problems.systems.problem import SystemsOptions
from neula.problems.systems.scaled import ScaledSystems

LEADING = 256
"""Order of the leading block in which elimination without pivoting is tried before all of A."""

HARMLESS = 8.0
"""Growth in the leading block up to which A is taken for one that needs no pivoting, such as diagonally
dominant matrices (growth at most 2). Random matrices grow by hundreds there."""

SAFE_EXPONENT = 200
"""Elements between ``2^-200`` and ``2^200`` have products, and sums of squares, that float64 holds."""


@dataclass(frozen=True)
class EquilibratedSystem(SingleProblem):
    """A system in double precision."""

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
        """Solutions of the system that was given."""
        x = x / self.b_scales
        return x if self.scaled is None else self.scaled.unscale(x[None])[0]

    def rescale(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`unscale`."""
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
        """Choose the scales, measure the norms; numbers near the ends of the range are scaled in a copy.

        Shapes: a (n, n), b (n, k). ``check``: called where norms are not finite: raises an error if A or b is
        not.
        """
        a, b = in_double(a), in_double(b)
        b_max, largest = options.engine.column_max(b), None
        if options.positive:
            row_norms, sizes = symmetric_sizes(a)
        else:
            found = magnitudes(a[None])
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
    """Scales that undo what makes rows and columns of a symmetric matrix differ, its diagonal near
    ``2^TOP``.
    """
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
