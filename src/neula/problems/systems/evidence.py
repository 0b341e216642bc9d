"""Condition and forward error of a large system from its factors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from neula.algorithms.elimination.equilibrate import Equilibration
from neula.algorithms.elimination.factorization import Factorization, Transposed
from neula.algorithms.krylov.driver import Refined, refine_sum
from neula.algorithms.krylov.gmres import gmres
from neula.algorithms.krylov.iterative_refinement import (
    ConcurrentProbes,
    ProbeSystems,
    Requests,
    UpdateSolver,
)
from neula.algorithms.scaling import power_of_two_scales
from neula.algorithms.spectra.condition import random_direction
from neula.algorithms.spectra.inverse_norm import (
    EXPLICIT,
    half_random,
    inverse_norm,
    schatten_bounds,
    symmetric_inverse_norm,
)
from neula.certificates.forward_error import ESTIMATED, MAX_RATE, measured_error
from neula.certificates.residuals import residual_noise
from neula.engines.random_vectors import gaussian
from neula.kernels.doubled.doubled import Doubled
from neula.kernels.magnitudes import two_norms
from neula.kernels.precision import adjoint_times
from neula.kernels.small_problems.refining import over
from neula.problems.systems.problem import SystemsOptions
from neula.problems.systems.system import ScaledSystems

REDUCTION = 1e-8  # reduction of a residual in twice the working precision by an update

SOLVED = 0.23
"""Frobenius norm of ``E = I - (LU)^-1 A`` up to which factors are said to solve with A. It is 1 for a
singular A; eight Gaussian vectors show less than this part of that once in ten thousand cases."""

SOLVED_TWICE = 0.02
"""Norm of ``E^2`` up to which they are said to do so as well, if that of E is below 1. Errors of a low format
lie in all directions, so that the norm of E grows with ``sqrt(n)``, but that of ``E^2`` stays small; and
``A^-1 = (I + E) (I - E^2)^-1 (LU)^-1``. For Cholesky factors E is similar to a symmetric matrix, and A^-1 at
most twice as large as their inverse if no eigenvalue exceeds 1/2: four vectors show less of one that does
once in ten thousand cases."""

VECTORS = 8  # random vectors by which these are estimated, and half of them for the second

PROBES = 6
"""Random vectors that show what the factors say of the norm of the inverse: with as many as two right-hand
sides in addition, the factors are read once."""

SEEN = 0.02
"""Times ``1 / sqrt(n)``, what GMRES may leave of a residual: a unit vector that is half random has more than
twice that along any one direction, such as the one that A^-1 enlarges most, in 95% of all cases."""

UNCERTAIN = 3.0  # factor for a norm that one vector shows, which is not that of the inverse of A itself

ROUNDS, COSTLY = 2, 4096
"""Steps of the power method by GMRES, each two solves; from that order on a single solve, which takes as long
as a quarter of the refinement."""

TRIES = 3
"""Calls of the refinement for one vector, whose space is at hand, so that most take a few iterations. It may
have ended for another right-hand side, and it makes residuals small in rows as they are scaled, where rows in
other units may need smaller ones."""

UNSOLVED = 0.5
"""Norm of ``I - B X`` up to which X is an inverse of B: that of B itself is then less than twice as large."""

Measure = Callable[[torch.Tensor], torch.Tensor]  # ``||D A^-1 diag(right)||_2`` for a diagonal, shape (n, 1)


@dataclass(frozen=True)
class SystemEvidence:
    """Norms of A and of its inverse in the scaled matrix, in which rows in small units count as others do."""

    a: torch.Tensor  # shape (n, n)
    scales: Equilibration
    sizes: torch.Tensor  # shape (n, 1): norms of the columns of A: the diagonal of D
    norm: torch.Tensor  # shape (): norm of R A D^-1
    inverse: torch.Tensor  # shape (): estimate of ||D A^-1 R^-1||_2
    condition: torch.Tensor  # shape (): that of B = A D^-1, estimated
    measured: torch.Tensor | None = None  # shape (k,): forward errors, where they were measured

    @classmethod
    def measure(
        cls,
        a: torch.Tensor,
        factors: Factorization,
        scales: Equilibration,
        update: UpdateSolver | None,
        max_iterations: int,
        sizes: torch.Tensor,
        scaled: ScaledSystems | None = None,
        probe: InverseProbe | None = None,
        solved: bool = True,
    ) -> SystemEvidence:
        """Norms by some solves with the factors; ``sizes`` is the diagonal of D."""
        # ``update`` is GMRES, where factors alone do not refine: their inverse is then not taken for that of
        # A; ``probe`` are random vectors that it has solved for, too. A comes from ``scaled``, if its rows
        # and columns were scaled before. If factors have not ``solved`` the system itself, they suffice for
        # no other right-hand side, and finding that out for large systems takes longer than the refinement.
        sizes = sizes[:, None]
        rows = scales.rows[:, None]
        if len(a) <= EXPLICIT:
            measured = _by_library(a, sizes)
        elif update is None and _solve(factors, a, scales):

            def measured(right: torch.Tensor) -> torch.Tensor:
                return inverse_norm(factors.solve, factors.solve_transposed, sizes, right, a.dtype)[0]
        elif solved or len(a) < COSTLY:
            measured = _by_gmres(a, factors, sizes, max_iterations, update, probe)
        else:
            measured = _unknown
        image = None if probe is None else probe.solved.along_image
        image = a @ direction(sizes, a.dtype) if image is None else image
        inverse = measured(1 / rows).nan_to_num(torch.inf, torch.inf)
        of_a = None if probe is None else probe.of_a
        norm = _scaled_norm(a, scales.rows, sizes, image) if of_a is None else of_a
        if scales.trivial and scaled is None:
            condition = inverse * norm
        else:
            units = torch.ones_like(rows) if scaled is None else scaled.units[0]
            condition = measured(1 / units) * _scaled_norm(a, units[:, 0], sizes, image)
        condition = condition.nan_to_num(torch.inf, torch.inf).clamp_min(1.0)
        return cls(a, scales, sizes, norm, inverse, condition)

    def size(self, x: torch.Tensor) -> torch.Tensor:
        return two_norms(self.sizes * x, 0)

    def forward_error(self, b: torch.Tensor, refined: Refined) -> torch.Tensor:
        """Bound on ``||D (x - x*)|| / ||D x*||`` by the residual, shape (k,)."""
        if self.measured is not None:
            return self.measured
        assert refined.residual is not None
        rows, size, norm = self.scales.rows[:, None], self.size(refined.x), torch.linalg.vector_norm
        rounding = residual_noise(self.terms, doubled=False) * (self.norm * size + norm(rows * b, dim=0))
        residual = norm(rows * refined.residual, dim=0) + torch.where(size > 0, rounding, 0.0)
        error = measured_error(ESTIMATED * self.inverse * residual, size)
        return torch.where(self.is_regular, error, torch.inf)

    @property
    def terms(self) -> int:
        """Products in a sum; in each part of a complex one twice as many."""
        return (1 + self.a.is_complex()) * len(self.a)

    @property
    def is_regular(self) -> torch.Tensor:
        """Whether rounding errors leave no doubt of it, shape ()."""
        return residual_noise(self.terms, doubled=False) * ESTIMATED * self.inverse * self.norm <= MAX_RATE

    def refine_forward(
        self, b: torch.Tensor, start: Refined, update: UpdateSolver, options: SystemsOptions
    ) -> tuple[Refined, torch.Tensor]:
        """Update x by residuals in twice the working precision; also returns bounds on its errors."""
        rows, columns = self.scales.rows[:, None], self.scales.columns[:, None]
        doubled = Doubled.from_matrix((self.a * rows * columns.mT)[None])
        unit = residual_noise(self.terms, doubled=True, random=True)
        norm = torch.linalg.vector_norm

        def evaluate(high: torch.Tensor, low: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scaled, rest = doubled.residual((high / columns)[None], (rows * b)[None], (low / columns)[None])
            size = self.size(high)
            noise = unit * (self.norm * size + norm(rows * b, dim=0))
            error = over(ESTIMATED**2 * self.inverse * (norm(scaled[0], dim=0) + noise), size)
            return error[None], (scaled + rest)[0] / rows

        def solve(residual: torch.Tensor) -> tuple[torch.Tensor, int]:
            return update(residual, REDUCTION, options.max_iterations)

        best = refine_sum(start.x, evaluate, solve, size=self.size, tolerance=options.digits)
        (x,), measures = best.vectors, start.measures
        error = torch.where(x.any(0), best.numbers[0].to(b.device), start.backward_error)
        residual, iterations = b - self.a @ x, start.iterations + best.iterations
        refined = Refined(x, measures, residual=residual, iterations=iterations, history=start.history)
        return refined, torch.where(self.is_regular, error, torch.inf)


def _unknown(right: torch.Tensor) -> torch.Tensor:
    return right.new_tensor(torch.inf)


def _by_library(a: torch.Tensor, sizes: torch.Tensor) -> Measure:
    """Norms from an explicit inverse X of ``B = S A D^-1`` in double precision, which are bounds."""
    # S scales rows to sizes near 1, which those of a definite A need not have when A has a diagonal of ones.
    # ``B X = I - P`` says that ``B^-1 = X (I - P)^-1``, however X was computed.
    b = a / sizes.mT
    rows = power_of_two_scales(b.abs().amax(1))[:, None]
    b = rows * b
    identity = torch.eye(len(a), dtype=a.dtype, device=a.device)
    x = torch.linalg.lu_solve(*torch.linalg.lu_factor_ex(b)[:2], identity)
    norm = torch.linalg.matrix_norm
    terms = (1 + a.is_complex()) * len(a)
    rounding = residual_noise(terms, doubled=False) * norm(b) * norm(x)
    left = norm(identity - b @ x) + rounding

    def measured(right: torch.Tensor) -> torch.Tensor:
        # P is small in the units of S; in others it may be larger, and so may what it stands for.
        size = schatten_bounds((x * (rows * right).mH)[None])[1][0, 0]
        return torch.where(left <= UNSOLVED, size / (1 - left), torch.inf)

    return measured


@dataclass
class InverseProbe:
    """A vector that is to show the norm of ``D A^-1 diag(right)`` once it is solved for."""

    # The direction that A^-1 enlarges most may differ from that of the factors, and GMRES may leave it in the
    # residual: so half of the vector is random, and residuals must be smaller than its component in any
    # direction.

    right: torch.Tensor  # shape (n, 1)
    sizes: torch.Tensor  # shape (n, 1)
    vector: torch.Tensor  # shape (n, 1): of norm 1
    norm: torch.Tensor  # shape (): what the factors say
    solved: ProbeSystems  # for diag(right) times the vector
    # Shape (): the norm of diag(right)^-1 A D^-1, where that was measured on the way.
    of_a: torch.Tensor | None = None

    @classmethod
    def from_factors(
        cls,
        factors: Factorization,
        right: torch.Tensor,
        sizes: torch.Tensor,
        dtype: torch.dtype,
        unrequested: int = 0,
    ) -> InverseProbe:
        """Before anything is solved for with A itself; with some random vectors in addition, if requested."""
        n = len(sizes)
        norm, vector = inverse_norm(factors.solve, factors.solve_transposed, sizes, right, dtype)
        vector = half_random(vector)
        others = right * gaussian(n, unrequested, vector.dtype, vector.device, seed=20030112)
        solved = ProbeSystems(right * vector, SEEN / n**0.5, others, direction(sizes, dtype))
        return cls(right, sizes, vector, norm, solved)

    def shown(self, a: torch.Tensor) -> torch.Tensor | None:
        """The norm, within a factor of :data:`UNCERTAIN`; None where the vector is not solved for."""
        x, image = self.solved.x, self.solved.image
        if x is None:
            return None
        if image is None:
            image = a @ x
        if not self.solves(image, self.right, self.vector):
            return None
        return UNCERTAIN * torch.maximum(self.norm, two_norms(self.sizes * x))

    def solves(self, image: torch.Tensor, right: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        """Whether x solves ``A x = diag(right) vector`` well enough, in the rows as scaled, given ``A x``."""
        return two_norms(vector - image / right) <= self.solved.reduction

    def solve(self, a: torch.Tensor, update: UpdateSolver, max_iterations: int) -> None:
        """Solve by refinement, again if the remaining error is too large."""
        solved = self.solved
        x = torch.zeros_like(solved.b) if solved.x is None else solved.x
        image = a @ x if solved.image is None else solved.image
        for _ in range(TRIES):
            residual = solved.b - image
            left = float(two_norms(residual / self.right))
            if not left > solved.reduction:
                break
            x = x + update(residual, solved.reduction / left, max_iterations)[0]
            image = a @ x
        solved.x, solved.image = x, image


def _by_gmres(
    a: torch.Tensor,
    factors: Factorization,
    sizes: torch.Tensor,
    max_iterations: int,
    update: UpdateSolver | None,
    probe: InverseProbe | None,
) -> Measure:
    """Norms by the power method, the solves of which are those of GMRES."""

    def measured(right: torch.Tensor) -> torch.Tensor:
        start = probe
        if start is None or start.solved.x is None or not torch.equal(start.right, right):
            start = InverseProbe.from_factors(factors, right, sizes, a.dtype)
        if update is not None and len(a) >= COSTLY:
            start.solve(a, update, max_iterations)
        if (shown := start.shown(a)) is not None:
            return shown
        norm, vector, hidden = start.norm, start.vector, start.solved.reduction
        exact = factors.in_double()
        pairs = ((a, exact), (a.mH, Transposed(exact)))
        for _ in range(ROUNDS):
            for (matrix, solver), left, scale in zip(pairs, (sizes, right), (right, sizes), strict=True):
                vector = vector / two_norms(vector)
                image = _by_preconditioned_gmres(matrix, solver, scale, vector, hidden, max_iterations)
                solved = start.solves(matrix @ image, scale, vector)
                vector = left * image
                size = torch.maximum(norm, two_norms(vector))
                norm = torch.where(solved, size, torch.inf)
        return UNCERTAIN * norm

    return measured


def _by_preconditioned_gmres(
    a: torch.Tensor,
    factors: Factorization,
    scale: torch.Tensor,
    b: torch.Tensor,
    tolerance: float,
    max_iterations: int,
) -> torch.Tensor:
    """``A^-1 diag(scale) b``; residuals are measured without the scale, which may range over many decades."""
    z, _ = gmres(
        lambda z: (a @ factors.solve(scale * z)) / scale,
        b,
        tolerance=tolerance / 2,  # its own residual differs from the true one
        max_iterations=max_iterations,
    )
    return factors.solve(scale * z)


def _solve(factors: Factorization, a: torch.Tensor, scales: Equilibration) -> bool:
    """Whether the factors nearly solve with A: then their inverse is nearly that of A."""
    # By what is left of random vectors, in the variables of the scaled matrix.
    columns = scales.columns[:, None]
    # Not unit vectors: right-hand sides that are columns of A are rounded as A was, and the errors cancel.
    z = columns * gaussian(len(a), VECTORS, a.dtype, a.device, seed=1) / VECTORS**0.5
    z = z - factors.solve(a @ z)
    left = float(torch.linalg.matrix_norm(z / columns))
    if not SOLVED < left < 1:
        return left <= SOLVED
    z = 2**0.5 * z[:, : VECTORS // 2]
    z = z - factors.solve(a @ z)
    return bool(torch.linalg.matrix_norm(z / columns) <= SOLVED_TWICE)


def direction(sizes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``D^-1`` times a random vector."""
    return random_direction(len(sizes), dtype, sizes.device) / sizes


def _scaled_norm(
    a: torch.Tensor, rows: torch.Tensor, sizes: torch.Tensor, image: torch.Tensor
) -> torch.Tensor:
    """``||R A D^-1||_2`` from below by a step of the power method, given ``A D^-1`` times a random vector."""
    image = rows[:, None] * image
    back = adjoint_times(a, rows[:, None] * image) / sizes
    return two_norms(back) / two_norms(image)


def probe_on_the_way(
    rows: torch.Tensor, sizes: torch.Tensor, dtype: torch.dtype
) -> tuple[InverseProbe, ConcurrentProbes]:
    """A probe that conjugate gradients find in their first two iterations, and solve for in the others."""
    # ``rows`` and ``sizes``, shape (n, 1): scales of the rows of A, and norms of its columns. ``dtype``: of
    # A. Returns ``solved``: for :func:`~neula.algorithms.krylov.iterative_refinement.cg_refinement`, which
    # fills the probe.
    right = 1 / rows
    nothing = right[:, :0].to(dtype)

    def products() -> Requests:
        image = yield direction(sizes, dtype)
        solved.along_image = image
        image = rows * image
        back = (yield rows * image) / sizes
        probe.of_a = two_norms(back) / two_norms(image)

    def solves() -> Requests:
        probe.norm, vector = yield from symmetric_inverse_norm(sizes, right, PROBES, dtype)
        probe.vector = half_random(vector)
        if bool(probe.vector.isfinite().all()):  # or it would end the iterations of all
            solved.b = right * probe.vector

    solved = ConcurrentProbes(
        nothing, SEEN / len(sizes) ** 0.5, nothing, products=products(), solves=solves()
    )
    probe = InverseProbe(right, sizes, nothing, right.new_tensor(torch.inf), solved)
    return probe, solved
