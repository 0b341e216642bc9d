"""A solution of rows that are gone, and what is known of it by products that were kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from neula.algorithms.krylov.batched_lstsq import MARGINS
from neula.algorithms.krylov.coordinates import Coordinates
from neula.algorithms.krylov.held_sums import HeldSums, normal_product
from neula.algorithms.scaling import binary_exponents
from neula.certificates.bounds import lstsq_bound
from neula.certificates.forward_error import enlarged, measured_error, residual_ratio
from neula.certificates.probes import PROBES, gaussian_probes
from neula.certificates.residuals import residual_noise
from neula.engines import FP64
from neula.kernels.magnitudes import SQUARABLE, largest_magnitude
from neula.kernels.refining import over
from neula.kernels.shift import shift
from neula.pipeline.chain import Answer
from neula.problems.least_squares.problem import LeastSquaresOptions, LeastSquaresSolutions, SingleProblem
from neula.problems.least_squares.scaled import DOMINATES

LONGEST = 8.0
"""Elements of a random vector exceed this once in 1e15 cases."""


@dataclass
class Held(SingleProblem):
    """A fit that is held open, as a problem.

    Attributes
    ----------
    sums : HeldSums
    exponents : Tensor of int, shape (n,)
        Of two, by which columns were divided, beside what the sums were.
    options : LeastSquaresOptions
    """

    sums: HeldSums
    exponents: torch.Tensor
    options: LeastSquaresOptions

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.sums.r.device

    @property
    def bound(self) -> float:
        """Largest backward error: reflections of n columns err by ``n u``, and updates add up like noise."""
        n = len(self.exponents)
        return lstsq_bound(self.options.target, n) + 4 * n * max(1, self.sums.updates) ** 0.5 * FP64.u

    def solved(
        self, problems: Held, before: Answer[LeastSquaresSolutions] | None
    ) -> Answer[LeastSquaresSolutions]:
        """The solution by R, and how far ``R^T [R z]`` is from ``A^T [A b]``."""
        options, n = self.options, len(self.exponents)
        r, z, s = self._damped()
        count, units = max(self.sums.rows, n), shift(torch.ones_like(r[0]), -self.exponents)
        rcond = options.certain_rcond((count, n))
        of = Coordinates.of_any_rank(r, (z, s), rcond, count, options.unit, units)
        x = of.inverse @ (z if of.left is None else of.left.T @ z)
        if options.damp:  # which may hide what is above it
            x = x + of.inverse @ self._rest(of, x)
        size, b = of.length(x), (z.square().sum(0) + s.square().sum(0)).sqrt()
        distance, noise = self._distance(of)
        wrong = torch.linalg.vector_norm(self._rest(of, x), dim=0) + of.inverse_norm * self._noise(of, x, b)
        uncertain = (MARGINS[PROBES] * distance + noise) * of.inverse_norm
        rate = uncertain * of.inverse_norm
        error = of.inverse_norm * (wrong + uncertain * size)
        error = over(enlarged(error, rate), size)
        norms, scale = torch.linalg.vector_norm(s, dim=0), max(of.norm, torch.finfo(torch.float64).tiny)
        relative = torch.full_like(size, distance / scale / scale)
        error = of.error(x, error, relative, residual_ratio(norms, of.norm, size))
        of_x = self.sums.of_b[None] - (self.exponents + self.sums.of_a)[:, None] - 2 * self._excess
        given = shift(x, of_x)
        error = error + over(of.length(x - shift(given, -of_x)), size)
        error = measured_error(error, 1.0, rate=rate)
        error = torch.where(self._moderate(r, torch.cat([z, s])), error, math.inf)
        products = self.sums.products - r.T @ z
        of_products = torch.linalg.vector_norm(products / of.columns, dim=0)
        of_sums = over(of_products, scale * b).amax()
        backward = torch.maximum(of_sums, b.new_tensor(distance / scale / scale))[None]
        members = LeastSquaresSolutions(
            x=given[None],
            forward_error=error[None],
            backward_error=backward,
            condition=backward.new_tensor([max(1.0, of.condition)]),
            refined_error=backward,
            residual=over(norms, b).amax()[None],
            condition_bound=torch.zeros_like(backward),
            doubtful=torch.full_like(backward, bool(of.doubt), dtype=torch.bool),
            residual_norm=shift(norms, self.sums.of_b)[None],
            optimality=over(wrong, of.norm * norms).amax()[None],
            rank=torch.full_like(backward, of.rank, dtype=torch.int64),
        )
        return Answer(members, "householder fp64, held open", of.doubt)

    def _damped(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """R, z and S with the rows of the damping."""
        parts = self.sums.parts
        if not self.options.damp:
            return parts
        n, k = parts[1].shape
        r = self.sums.r
        below = torch.cat([self._damping.diag(), r.new_zeros(n, k)], 1)
        r = torch.linalg.qr(torch.cat([r, below]), mode="r")[1]
        return r[:n, :n], r[:n, n:], r[n:, n:]

    @cached_property
    def _excess(self) -> int:
        """By what power of two damping is divided that is far above A: x is then ``A^T b / damp^2``."""
        fraction, exponent = math.frexp(self.options.damp)
        largest = largest_magnitude(self.sums.parts[0], (0, 1))
        if not fraction:
            return 0
        least = exponent - self.sums.of_a - int(self.exponents.max())
        return max(0, least - int(binary_exponents(largest)) - DOMINATES - len(self.exponents).bit_length())

    @cached_property
    def _damping(self) -> torch.Tensor:
        """Of each column, in the units of the sums, shape (n,)."""
        fraction, exponent = math.frexp(self.options.damp)
        exponents = exponent - self._excess - self.sums.of_a - self.exponents
        return shift(torch.full_like(self.sums.r[0, : len(self.exponents)], fraction), exponents)

    def _moderate(self, *parts: torch.Tensor) -> torch.Tensor:
        """Which right-hand sides, in the last matrix, are moderate, as all other columns are, shape (k,).

        Zero is.
        """
        sizes = [largest_magnitude(x, 0) for x in parts]
        *others, right = ((x == 0) | ((x >= 1 / SQUARABLE) & (x <= SQUARABLE)) for x in sizes)
        for moderate in others:
            right = right & moderate.all()
        return right

    def _noise(self, of: Coordinates, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """What rounding errors make of ``D^-1 (A^T b - (R^T R + damp^2 I) x)``, from above, shape (k,).

        Those of doubled products are relative to the largest element of a matrix, also in its small columns.
        """
        n, spread = len(x), of.columns.max() / of.columns.min()
        image = (1 + n**0.5) * of.norm_bound * of.length(x)
        damped = self._damping.square()[:, None] * x
        of_damping = 4 * FP64.u * torch.linalg.vector_norm(damped / of.columns, dim=0)
        of_a = torch.linalg.matrix_norm(self.sums.parts[0] / of.columns.T)
        rounded = 2 * self.sums.roundings * FP64.u * n**0.5 * of_a
        return (self._unit * spread + rounded) * (b + image) + of_damping

    @property
    def _unit(self) -> float:
        """Rounding errors of an element of a doubled product, times the root of the number of elements."""
        n = len(self.exponents)
        return residual_noise(self.sums.rows + 2 * n, doubled=True) * n**0.5

    def _distance(self, of: Coordinates) -> tuple[float, float]:
        """``||D^-1 (A^T A - R^T R) D^-1||_F``, estimated, and what rounding errors of products hide of it.

        D is at least as large as what the vectors see.
        """
        vectors = gaussian_probes(len(self.exponents), self.device)
        high, low = normal_product(self.sums.parts[0], vectors)
        difference = (self.sums.probes - high) + (self.sums.probes_low - low)
        seen = torch.linalg.matrix_norm(difference / of.columns) / PROBES**0.5
        sizes, largest = of.columns[:, 0], of.columns.max()
        images = largest * of.norm_bound * max(1, self.sums.rows) ** 0.5
        images = images + largest / of.columns.min() * sizes.sum()
        seen, noise = torch.stack([seen, self._unit * LONGEST * images]) / sizes.min()
        return float(seen), float(noise)

    def _rest(self, of: Coordinates, x: torch.Tensor) -> torch.Tensor:
        """``P^T (A^T b - (R^T R + damp^2 I) x)``."""
        high, low = normal_product(self.sums.parts[0], x)
        rest = (self.sums.products - high) + (self.sums.products_low - low)
        return of.projector.T @ (rest - self._damping.square()[:, None] * x)
