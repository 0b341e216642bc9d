"""What factors say of a solution: condition and forward error of a large system."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.algorithms.elimination.equilibrate import Equilibration
from neula.algorithms.elimination.factorization import Factorization
from neula.algorithms.krylov.doubled_refinement import DOUBLED, MAX_RATE, add_to_pair
from neula.algorithms.krylov.iterative_refinement import Correction, Refined, gmres_refinement
from neula.algorithms.krylov.refinement import STAGNATION, over
from neula.algorithms.spectra.condition import random_direction
from neula.algorithms.spectra.inverse_norm import inverse_norm
from neula.engines import FP64
from neula.engines.random_vectors import gaussian
from neula.kernels.doubled import Doubled
from neula.problems.systems.problem import Options
from neula.problems.systems.scaled import Scaled

ESTIMATED = 3.0
"""Factor between an estimate of a norm by some steps of the power method and a bound on it."""

REDUCTION = 1e-8
"""What a correction is asked to leave of a residual in twice the working precision."""

SOLVED = 0.05
"""Frobenius norm of ``I - (LU)^-1 A`` up to which factors are said to solve with A. It is 1 for a singular
A; three Gaussian vectors show less than a twentieth of that once in ten thousand cases."""

VECTORS = 3
"""Random vectors by which that is estimated."""

PROBED = 0.1
"""What GMRES is asked to leave of the residual of the vector that shows the condition."""

BLOCK = 1 << 17
"""Elements whose squares stay in a cache until they are added up."""

UNCERTAIN = 3.0
"""Factor for a norm that one vector shows, which is not that of the inverse of A itself."""

ROUNDS, COSTLY = 3, 4096
"""Vectors that GMRES solves for, each the solution for the one before; one from that order on."""

UNSOLVED = 0.2
"""Part of its residual that is left if GMRES did not solve for it: A is singular, as far as it can tell."""

PASSES = 8
"""Corrections in twice the working precision at most; two or three do nearly always."""


@dataclass(frozen=True)
class Evidence:
    """Norms of A and of its inverse in the scaled matrix, in which rows in small units count as others do.

    Attributes
    ----------
    a : Tensor, shape (n, n)
    scales : Equilibration
    sizes : Tensor, shape (n, 1)
        Norms of the columns of A: the diagonal of D.
    norm : Tensor, shape ()
        Norm of ``R A D^-1``.
    inverse : Tensor, shape ()
        Estimate of ``||D A^-1 R^-1||_2``.
    condition : Tensor, shape ()
        That of ``B = A D^-1``, estimated.
    measured : Tensor, shape (k,), or None
        Forward errors, where they were measured.
    """

    a: torch.Tensor
    scales: Equilibration
    sizes: torch.Tensor
    norm: torch.Tensor
    inverse: torch.Tensor
    condition: torch.Tensor
    measured: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        a: torch.Tensor,
        factors: Factorization,
        scales: Equilibration,
        correct: Correction | None,
        max_iterations: int,
        sizes: torch.Tensor,
        scaled: Scaled | None = None,
    ) -> Evidence:
        """Norms by some solves with the factors.

        Parameters
        ----------
        a : Tensor, shape (n, n)
        factors : Factorization
        scales : Equilibration
        correct : Correction or None
            GMRES, where factors alone do not refine: their inverse is then smaller than that of A. It solves
            once for the vector that they enlarge most.
        max_iterations : int
        sizes : Tensor, shape (n,)
            The diagonal of D.
        scaled : Scaled, optional
            Where A comes from, if its rows and columns were scaled before.
        """
        sizes = sizes[:, None]
        rows, norm_of = scales.rows[:, None], torch.linalg.vector_norm
        if correct is None and not _solve(factors, a, scales):
            correct = gmres_refinement(a, factors)

        def measured(right: torch.Tensor) -> torch.Tensor:
            norm, vector = inverse_norm(factors.solve, factors.solve_transposed, sizes, right)
            if correct is None:
                return norm
            # What factors enlarge most need not be what A^-1 does; what that makes of it is nearer.
            for _ in range(ROUNDS if len(a) < COSTLY else 1):
                rhs = right * vector
                image = correct(rhs, PROBED, max_iterations)[0]
                solved = norm_of((rhs - a @ image) / right) <= UNSOLVED
                vector = sizes * image
                size = norm_of(vector)
                norm = torch.where(solved, torch.maximum(norm, size), torch.inf)
                vector = vector / size
            return UNCERTAIN * norm

        inverse = measured(1 / rows).nan_to_num(torch.inf, torch.inf)
        norm = _scaled_norm(a, scales.rows, sizes)
        if scales.trivial and scaled is None:
            condition = inverse * norm
        else:
            units = torch.ones_like(rows) if scaled is None else scaled.units[0]
            condition = measured(1 / units) * _scaled_norm(a, units[:, 0], sizes)
        condition = condition.nan_to_num(torch.inf, torch.inf).clamp_min(1.0)
        return cls(a, scales, sizes, norm, inverse, condition)

    def size(self, x: torch.Tensor) -> torch.Tensor:
        """``||D x||``, shape (k,)."""
        return torch.linalg.vector_norm(self.sizes * x, dim=0)

    def forward_error(self, b: torch.Tensor, refined: Refined) -> torch.Tensor:
        """Bound on ``||D (x - x*)|| / ||D x*||`` by the residual, shape (k,)."""
        if self.measured is not None:
            return self.measured
        rows = self.scales.rows[:, None]
        norm = torch.linalg.vector_norm
        size = self.size(refined.x)
        rounding = 2 * FP64.u * len(b) ** 0.5 * (self.norm * size + norm(rows * b, dim=0))
        residual = norm(rows * refined.residual, dim=0) + torch.where(size > 0, rounding, 0.0)
        error = over(ESTIMATED * self.inverse * residual, size).nan_to_num(torch.inf, torch.inf)
        return torch.where(self.is_regular, error, torch.inf)

    @property
    def is_regular(self) -> torch.Tensor:
        """Whether rounding errors leave no doubt of it, shape ()."""
        return 2 * FP64.u * len(self.a) ** 0.5 * ESTIMATED * self.inverse * self.norm <= MAX_RATE

    def refine_forward(
        self, b: torch.Tensor, start: Refined, correct: Correction, options: Options
    ) -> tuple[Refined, torch.Tensor]:
        """Correct x by residuals in twice the working precision; also returns bounds on its errors."""
        rows, columns = self.scales.rows[:, None], self.scales.columns[:, None]
        doubled = Doubled.of((self.a * rows * columns.mT)[None])
        unit = DOUBLED * len(b) ** 0.5
        norm = torch.linalg.vector_norm
        high, low = start.x, torch.zeros_like(start.x)
        before = torch.full_like(start.backward_error, torch.inf)
        best, error = start.x, before
        iterations = start.iterations
        for _ in range(PASSES + 1):
            y, y_low = (high / columns)[None], (low / columns)[None]
            scaled, rest = doubled.residual(y, (rows * b)[None], y_low)
            size = self.size(high)
            noise = unit * (self.norm * size + norm(rows * b, dim=0))
            found = over(ESTIMATED**2 * self.inverse * (norm(scaled[0], dim=0) + noise), size)
            improved = found < before
            best = torch.where(improved, high, best)
            error = torch.where(improved, found + over(self.size(low), size), error)
            if not bool(((found > options.digits) & (found < STAGNATION * before)).any()):
                break
            before = torch.minimum(before, found)
            step, taken = correct((scaled + rest)[0] / rows, REDUCTION, options.max_iterations)
            iterations += taken
            high, low = add_to_pair(high, low, step)
        error = torch.where(best.any(0), error, start.backward_error)
        residual = b - self.a @ best
        return (
            Refined(best, residual, start.backward_error, iterations, start.history),
            torch.where(self.is_regular, error, torch.inf),
        )


def _solve(factors: Factorization, a: torch.Tensor, scales: Equilibration) -> bool:
    """Whether the factors nearly solve with A: then their inverse is nearly that of A.

    By what is left of random vectors, in the variables of the scaled matrix.
    """
    columns = scales.columns[:, None]
    # Not unit vectors: right-hand sides that are columns of A are rounded as A was, and the errors cancel.
    z = columns * gaussian(len(a), VECTORS, a.dtype, a.device, seed=1) / VECTORS**0.5
    return bool(torch.linalg.matrix_norm((z - factors.solve(a @ z)) / columns) <= SOLVED)


def column_norms(a: torch.Tensor) -> torch.Tensor:
    """Norms of columns, 0 or infinite where squares underflow or overflow; row blocks stay in cache."""
    if a.is_cuda:
        return torch.linalg.vector_norm(a, dim=0)
    rows = max(1, BLOCK // a.shape[1])
    return torch.stack([block.square().sum(0) for block in a.split(rows)]).sum(0).sqrt()


def _scaled_norm(a: torch.Tensor, rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """``||R A D^-1||_2`` from below, by a step of the power method on a random vector."""
    image = rows[:, None] * (a @ (random_direction(len(a), a.dtype, a.device) / sizes))
    back = (a.mT @ (rows[:, None] * image)) / sizes
    return torch.linalg.vector_norm(back) / torch.linalg.vector_norm(image)
