"""Linear systems with factors, refined with residuals in twice the working precision."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, Protocol

import torch

from neula.algorithms.krylov.batched_lstsq import MARGIN, ROUNDING, lengths, probes
from neula.algorithms.krylov.doubled_refinement import FactoredProblems, Refinement, Trusting
from neula.algorithms.spectra.inverse_norm import SharedSolves, inverse_norm, norm_of
from neula.certificates.backward_error import Measures
from neula.certificates.forward_error import ESTIMATED
from neula.certificates.residuals import residual_noise
from neula.engines import FP64
from neula.kernels.doubled.doubled import Doubled
from neula.kernels.small_problems.refining import over
from neula.kernels.small_problems.systems import Trust


class Factors(Protocol):
    """Factors of the matrices of a batch."""

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        """``A^-1 b``."""

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        """``A^-H b``."""


class Images(NamedTuple):
    """Measurements of matrices before they are factorized."""

    z: torch.Tensor  # shape (batch, n, p): random vectors
    norm: torch.Tensor  # shape (batch,): ||A D^-1||, estimated
    images: torch.Tensor  # shape (batch, n, p): A Z

    @classmethod
    def from_matrix(cls, a: torch.Tensor, sizes: torch.Tensor, *, vectors: int, unit: bool) -> Images:
        """Multiply matrices, shape (batch, n, n), given the sizes of their columns, by some random vectors.

        These are no unit vectors where A times those is made of what was factorized, rounding errors
        included, as ``A^T A`` is.
        """
        z = probes(a.shape[-1], a.device, vectors, unit=unit, dtype=a.dtype).expand(len(a), -1, -1)
        return cls(z, *norm_of(a, sizes, vectors=z))


class FactoredSystems(FactoredProblems):
    """Linear systems with factors, for :mod:`neula.algorithms.krylov.doubled_refinement`.

    Factors are read four times for the norm of the inverse. Beside that they show how well they solve, find
    the first solutions, and what to update these by: ten columns take a GPU hardly longer than one.

    ``sizes``, shape (batch, n, 1), are the diagonal of D, and ``norm``, shape (batch,), is ``||A||_F``.
    Solves with factors magnify rounding errors u by a ``power`` of the condition number.
    """

    def __init__(
        self,
        a: torch.Tensor,
        factors: Factors,
        sizes: torch.Tensor,
        b: torch.Tensor,
        norm: torch.Tensor,
        measured: Images,
        *,
        doubled: bool,
        u: float = FP64.u,
        power: int = 1,
    ) -> None:
        self.a, self.factors, self.sizes, self.power = a, factors, sizes, power
        self.doubled = Doubled.from_matrix(a) if doubled else None
        z, self.scaled_norm, images = measured
        solves = SharedSolves(factors.solve, self._first_steps(b, z, images))
        inverse = inverse_norm(solves, factors.solve_transposed, sizes, dtype=a.dtype)[0]
        solves.finish()
        largest, smallest = sizes.amax((1, 2)), sizes.amin((1, 2))
        condition = torch.minimum(norm, ESTIMATED * self.scaled_norm * largest) * inverse / smallest
        # Rounding errors of a solve, also where none happen to be in what is measured.
        self.rate = MARGIN * self._left + ROUNDING * u * condition**power
        wrong = (largest * self.rate / (1 - self.rate))[:, None]
        self.condition = inverse * self.scaled_norm.clamp_min(1.0)  # columns have norm 1
        terms = (1 + a.is_complex()) * a.shape[-1]
        noise = residual_noise(terms, doubled=doubled, random=True)
        self._trust = Trust(sizes, wrong, inverse[:, None], norm[:, None], lengths(b), noise)

    def _first_steps(
        self, b: torch.Tensor, z: torch.Tensor, images: torch.Tensor
    ) -> Generator[torch.Tensor, torch.Tensor, None]:
        """Yield the right-hand sides that are solved before any norm is known."""
        found = yield torch.cat([images, b], 2)
        self._left = torch.linalg.matrix_norm(z - found[..., : z.shape[2]])
        self._start = found[..., z.shape[2] :]
        residual = self._residual(b, self._start)
        self._first = residual, (yield residual)

    def start(self, b: torch.Tensor) -> torch.Tensor:
        return self._start

    def size(self, unknowns: torch.Tensor) -> torch.Tensor:
        return lengths(self.sizes * unknowns)

    def evaluate(self, b: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> Trusting:
        """``A^-1 r`` by the factors."""
        if high is self._start:
            residual, update = self._first
        else:
            residual = self._residual(b, high, low)
            update = self.factors.solve(residual)
        return Trusting(update, residual, self._trust)

    def _residual(self, b: torch.Tensor, high: torch.Tensor, low: torch.Tensor | None = None) -> torch.Tensor:
        # Without doubled products low is below the rounding errors of the residual.
        return b - self.a @ high if self.doubled is None else self.doubled.residual(high, b, low)[0]

    def updated(self, at: Refinement) -> tuple[torch.Tensor, Measures]:
        """Normwise, in the matrix as it is scaled."""
        residual, trust = at.residual - self.a @ at.change, self._trust
        error = over(lengths(residual), trust.norm * lengths(at.high) + trust.length)
        return residual, Measures(error, error)
