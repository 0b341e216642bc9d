"""Systems by a Cholesky factor and its inverse, launched without a look at the numbers.

So a CUDA graph plays all of it back. A definite A is factorized itself, any other one by its normal
equations. A Gram matrix takes three times the operations of LU, but in a large product, and its Cholesky
factor needs no pivots: on an H200 an LU of order 1000 takes 2.2 ms, the two and an inverse of R 0.7. A step
with ``A^-1 = R^-1 R^-T A^T`` multiplies the error by ``u cond(A)^2``, which is measured; with residuals in
twice the working precision x becomes as accurate as it can be, up to a condition number of some 1e6.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from neula.algorithms.krylov.batched_lstsq import PROBES, cholesky_r
from neula.algorithms.krylov.doubled_refinement import refine_doubled
from neula.kernels.triangular_inverse import triangular_inverse
from neula.pipeline.border import Border
from neula.pipeline.chain import Answer
from neula.pipeline.progress import stage
from neula.problems.systems.direct import Factors, Square, SymmetricallyScaled, Systems, members_of
from neula.problems.systems.problem import Members, Options
from neula.problems.systems.scaled import Scaled

NORMAL_EQUATIONS = "cholesky of the normal equations fp64"
DEFINITE = "cholesky fp64, inverted"


@dataclass(frozen=True)
class _NormalEquations:
    """``R^T R = A^T A``, to solve systems with A.

    Attributes
    ----------
    a : Tensor, shape (batch, n, n)
    inverse : Tensor, shape (batch, n, n)
        That of R.
    """

    a: torch.Tensor
    inverse: torch.Tensor

    @classmethod
    def of(cls, a: torch.Tensor) -> _NormalEquations:
        """Of matrices that may turn out to be singular: then the inverse may be NaN."""
        return cls(a, triangular_inverse(cholesky_r(a), upper=True))

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        return self.inverse @ (self.inverse.mT @ (self.a.mT @ b))

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        return self.a @ (self.inverse @ (self.inverse.mT @ b))


def _definite(scaled: Scaled) -> Factors:
    """Those of matrices that may turn out not to be definite: then solutions are NaN."""
    found = SymmetricallyScaled.of(scaled)
    inverse = triangular_inverse(found.lower, upper=False)
    inverse = inverse.masked_fill((found.info > 0)[:, None, None], torch.nan)
    return found.solving(lambda b: inverse.mT @ (inverse @ b))


def solve_queued(systems: Systems, before: Answer[Members] | None) -> Answer[Members]:
    """All systems, as many at a time as fill the machine; those that this does not solve are not accepted."""
    options, (n, k) = systems.options, systems.b.shape[1:]
    label = DEFINITE if options.positive else NORMAL_EQUATIONS
    report, tuning = stage(options.progress, label), options.engine.tuning
    size = max(1, tuning.chunk_elements // (n * max(n, k)))
    # One small system takes the shape of others, so that one graph serves them all.
    few = len(systems) == 1 and n**3 <= tuning.bordered
    border = Border.around(n, n) if few else Border()

    def solved(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        members = _solved(a, b, options)
        return *members.tensors, members.measured()

    key = (label, options.max_iterations, options.target.name, options.dtype)
    parts, measured = [], []
    for start in range(0, len(systems), size):
        part = slice(start, start + size)
        inputs = border.put(systems.a[part], systems.b[part])
        *found, numbers = options.engine.replay(solved, inputs, key)
        members = Members(*found)
        parts.append(replace(members, x=border.take(members.x)))
        measured.append(numbers)
        report(min(1.0, (start + size) / len(systems)))
    numbers = measured[0] if len(measured) == 1 else torch.cat(measured, 1)
    return Answer(Members.joined(parts), label, iterations=_steps(options), measured=numbers)


def _solved(a: torch.Tensor, b: torch.Tensor, options: Options) -> Members:
    """Scale, factorize, refine and measure some systems without synchronizing."""
    scaled = Scaled.of(a, b, looks=False)
    factors = _definite(scaled) if options.positive else _NormalEquations.of(scaled.a)
    # Rounding errors of A^T r are magnified by the square of the condition number; probes that are unit
    # vectors may miss them, since A^T A has just the same.
    power = 1 if options.positive else 2
    system = Square(scaled.a, factors, scaled.norms, doubled=True, vectors=PROBES, power=power)
    found = refine_doubled(system, scaled.b, tolerance=options.digits, max_steps=_steps(options), look=False)
    return members_of(scaled, system, found, torch.ones_like(scaled.norms[:, 0, 0]), options)


def _steps(options: Options) -> int:
    return min(options.engine.tuning.blind_steps, options.max_iterations)
