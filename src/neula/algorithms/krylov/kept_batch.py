"""Batches of matrices that were factorized: kept by reference, and solved with together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from neula.algorithms.elimination.equilibrate import UNIFORM
from neula.algorithms.krylov.iterative_refinement import (
    BLURRED,
    CHANGED,
    CLEAR,
    FAR,
    FIRST,
    PROBES,
    KeptMatrix,
    direction,
    is_same,
)
from neula.algorithms.scaling import binary_exponents, power_of_two_scales
from neula.algorithms.spectra.inverse_norm import sampled_inverse_norm
from neula.certificates.backward_error import Scaling, backward_error
from neula.engines import Engine
from neula.engines.formats import double_of, in_double
from neula.engines.random_vectors import gaussian
from neula.kernels.magnitudes import largest_magnitude

STEPS = 4
"""Steps of classical refinement for all matrices; those that need more are solved with one by one."""


@dataclass(frozen=True, eq=False)
class KeptBatch:
    """The matrices of a batch that were factorized, each kept as a :class:`KeptMatrix`."""

    a: torch.Tensor  # shape (..., n, n)
    engine: Engine
    scales: torch.Tensor  # shape (..., 1, 1), on the CPU
    image: torch.Tensor  # shape (..., n, 1)

    @classmethod
    def from_matrices(cls, a: torch.Tensor, largest: torch.Tensor, engine: Engine) -> KeptBatch:
        """Remember matrices with their largest magnitudes, shape (...), on the CPU."""
        exponents = torch.frexp(largest.double())[1]
        powers = torch.where(exponents.abs() < FAR, 0, -exponents.sign() * (FAR + 100))
        scales = torch.ones_like(largest, dtype=torch.float64).ldexp(powers)[..., None, None]
        found = cls(a, engine, scales, scales)
        return replace(found, image=found._images(found.in_double()))

    @classmethod
    def stacked(cls, members: Sequence[KeptMatrix], a: torch.Tensor, engine: Engine) -> KeptBatch:
        *batch, n, _ = a.shape
        scales = torch.tensor([kept.scale for kept in members], dtype=torch.float64, device="cpu")
        images = [kept.image for kept in members]
        image = torch.stack(images) if images else a.new_empty(0, dtype=double_of(a.dtype))
        return cls(a, engine, scales.reshape(*batch, 1, 1), image.reshape(*batch, n, 1))

    def member(self, index: tuple[int, ...]) -> KeptMatrix:
        return KeptMatrix(self.a[index], self.engine, self.scales[index].item(), self.image[index])

    def in_double(self) -> torch.Tensor:
        """``scale A``."""
        a = in_double(self.a.to(self.engine.device))
        return a if bool((self.scales == 1.0).all()) else a * self.scales.to(a.device)

    def check(self) -> torch.Tensor:
        """``scale A`` in double precision, if all matrices are what they were, else a ValueError."""
        a = self.in_double()
        image = self._images(a)
        if not torch.equal(image, self.image):
            same = is_same(image, self.image, torch.linalg.vector_norm(a, 1, dim=-1))
            for index in (~same).nonzero().tolist()[:1]:
                raise ValueError(f"A[{', '.join(map(str, index))}] of the batch: {CHANGED}")
        return a

    def _images(self, a: torch.Tensor) -> torch.Tensor:
        return a @ direction(a.shape[-1], a.device).to(a.dtype)


class BatchSolutions(NamedTuple):
    """Solutions with the numbers of a :class:`RefinedSolution`."""

    x: torch.Tensor  # shape (P, n, K), in double precision
    backward_error: torch.Tensor  # shape (P,)
    condition: torch.Tensor  # shape (P,)
    complete: torch.Tensor  # shape (P,): whether these are those numbers


@dataclass(frozen=True)
class BatchSolver:
    """:func:`refined_solution` with accurate factors of many matrices, each step for all of them.

    Matrices and right-hand sides whose sizes are far from 1 are not scaled, and GMRES is not tried:
    ``complete`` is False for those that need it.
    """

    solve: Callable[[torch.Tensor], torch.Tensor]
    scalings: list[Scaling]  # with tensors of shape (P, 1), (P, n) and (P, n)
    condition: torch.Tensor  # shape (P,)
    known: torch.Tensor  # shape (P,)

    @classmethod
    def measured(
        cls, a: torch.Tensor, known: torch.Tensor, solve: Callable[[torch.Tensor], torch.Tensor]
    ) -> BatchSolver:
        """Measure the condition numbers of matrices, shape (P, n, n), of which some may be known to suit."""
        scalings, n = _scalings(a), a.shape[-1]
        plain, _, scaling = scalings
        assert scaling.rows is not None
        assert scaling.columns is not None
        b = gaussian(n, PROBES, a.dtype, a.device, seed=n) / scaling.rows[..., None]
        sizes = power_of_two_scales(b.abs().amax(-2, keepdim=True))
        found = cls(solve, [plain, scaling], known, known)
        z, errors = found._refined(a, b * sizes, FIRST / 4)
        inverse = sampled_inverse_norm(z / sizes / scaling.columns[..., None])
        condition = torch.fmax(scaling.norm[..., 0] * inverse, torch.ones_like(inverse))
        error = errors.amax(-1)
        clear = (error <= FIRST / 4) & (error <= CLEAR / condition) & (condition * error < BLURRED)
        return cls(solve, scalings, condition, known & clear)

    def __call__(self, a: torch.Tensor, b: torch.Tensor, aim: float) -> BatchSolutions:
        """Solutions for b, shape (P, n, K), with backward errors up to ``aim`` if that is possible."""
        x, errors = self._refined(a, b, aim)
        at_least = torch.stack([scaling.condition_at_least(b, x).amax(-1) for scaling in self.scalings])
        near = (binary_exponents(largest_magnitude(b, -2)).abs() <= FAR).all(-1)
        complete = self.known & near & (errors <= aim).all(-1)
        return BatchSolutions(x, errors.amax(-1), torch.maximum(self.condition, at_least.amin(0)), complete)

    def _refined(self, a: torch.Tensor, b: torch.Tensor, aim: float) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.solve(b)
        for step in range(STEPS + 1):
            residual = b - a @ x
            errors = backward_error(self.scalings, b, x, residual)
            finished = errors <= aim
            if step == STEPS or bool(finished.all()):
                break
            x = x + self.solve(residual).masked_fill(finished[..., None, :], 0.0)
        return x, errors


def _scalings(a: torch.Tensor) -> list[Scaling]:
    """The scalings of :meth:`KeptMatrix.scalings`; all equal the first one where no other is needed."""
    sizes = a.abs()
    row_norms = sizes.sum(-1)
    rows = power_of_two_scales(row_norms)
    columns = power_of_two_scales(largest_magnitude(rows[..., None] * a, -2))
    of_columns = power_of_two_scales(largest_magnitude(a, -2))
    uniform = torch.stack([x.amin(-1) >= UNIFORM * x.amax(-1) for x in (rows, columns)]).all(0)[..., None]
    rows, columns, of_columns = (x.masked_fill(uniform, 1.0) for x in (rows, columns, of_columns))
    pairs = (torch.ones_like(rows), of_columns), (rows, columns)
    norms = (((sizes @ c[..., None])[..., 0] * r).amax(-1, keepdim=True) for r, c in pairs)
    plain = Scaling(row_norms.amax(-1, keepdim=True))
    return [plain, *(Scaling(norm, *pair) for norm, pair in zip(norms, pairs, strict=True))]
