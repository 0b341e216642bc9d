"""A solution of rows that are gone, and what is known of it by products that were kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from neula.algorithms.krylov.batched_lstsq import MARGINS, ROUNDING
from neula.algorithms.krylov.doubled_refinement import Refinement
from neula.algorithms.krylov.held_sums import HeldSums, normal_product
from neula.algorithms.krylov.streamed_lstsq import Coordinates, SummedGradient, SummedProblem
from neula.algorithms.scaled_problems import DOMINATES
from neula.algorithms.scaling import ScaledUnknowns, binary_exponents
from neula.certificates.backward_error import Measures
from neula.certificates.bounds import lstsq_bound
from neula.certificates.forward_error import enlarged
from neula.certificates.orthogonality import PROBES, gaussian_probes
from neula.certificates.residuals import residual_noise, settled
from neula.engines import FP64
from neula.kernels.magnitudes import SQUARABLE, largest_magnitude, squares, two_norms
from neula.kernels.shift import shift
from neula.kernels.small_problems.refining import over
from neula.pipeline.batches import SingleProblem
from neula.pipeline.chain import Answer
from neula.problems.least_squares.problem import LeastSquaresAnswer, LeastSquaresOptions
from neula.problems.least_squares.together import summed_members

LONGEST = 8.0
"""Elements of a random vector exceed this once in 1e15 cases."""


@dataclass
class Held(SingleProblem, ScaledUnknowns):
    """An incremental fit as a problem."""

    sums: HeldSums
    # int, shape (n,): of two, by which columns were divided, besides those of the sums.
    exponents: torch.Tensor
    options: LeastSquaresOptions

    @property
    def device(self) -> torch.device:
        return self.sums.r.device

    @property
    def bound(self) -> float:
        """Largest backward error: reflections of n columns err by ``n u``, and updates add up like noise."""
        n = len(self.exponents)
        return lstsq_bound(self.options.target, n) + 4 * n * max(1, self.sums.updates) ** 0.5 * FP64.u

    def solved(self, problems: Held, before: LeastSquaresAnswer | None) -> LeastSquaresAnswer:
        """The solution by R, updated where that helps, and how far ``R^H [R z]`` is from ``A^H [A b]``."""
        # R and ``Q^H b`` have the backward errors of one perturbed problem, R and the sums have not: an
        # update that is no longer than the uncertainty of ``A^T A`` makes x worse. Longer ones occur where
        # damping is far above A, and hides it.
        options, n = self.options, len(self.exponents)
        r, z, s = self._damped()
        count, units = max(self.sums.rows, n), shift(torch.ones_like(r[0].real), -self.exponents)
        rcond = options.certain_rcond((count, n))
        of = Coordinates.of_any_rank(r, (z, s), rcond, count, options.unit, units)
        start, b = of.of_b(z), (squares(z).sum(0) + squares(s).sum(0)).sqrt()
        distance, uncertain = self._distance(of)
        rate = uncertain * of.inverse_norm
        # Below full rank R leaves some of Q^T b.
        rest = [s] if of.left is None else [s, z - of.left @ start]

        def summed(x: torch.Tensor, low: torch.Tensor) -> SummedGradient:
            projected, floor = self._projected(of, x, low), of.inverse_norm * self._noise(of, x, b)
            length = two_norms(projected, 0)
            kept = settled(length, floor + uncertain * of.length(x))
            floor = enlarged(torch.where(kept, length + floor, floor), rate)
            known = two_norms(torch.cat(rest), 0), b, floor
            return SummedGradient(
                torch.where(kept, 0.0, projected), rate + ROUNDING * FP64.u * of.size, *known
            )

        system, steps = SummedProblem(of, summed), 2 if options.damp else 1
        refinement = Refinement(system, start[None], 0.0)
        refinement.advance(steps, steps)
        found, scale = refinement.solution(), max(of.norm, torch.finfo(torch.float64).tiny)
        products = two_norms((self.sums.products - r.mH @ z) / of.columns, 0)
        backward = over(products, scale * b).clamp_min(distance / scale / scale)
        wrong = over(refinement.left, of.inverse_norm)
        error = found.forward_error + enlarged(rate, rate)
        error = torch.where(self._moderate(r, torch.cat([z, s])), enlarged(error, error), math.inf)
        measures = Measures(backward[None], over(wrong, of.norm * found.residual))
        found = replace(found, measures=measures, forward_error=error)
        members = summed_members(self, system, found, options)
        return Answer(members, "householder fp64, incremental", of.doubt)

    @cached_property
    def columns(self) -> torch.Tensor:  # type: ignore[override]
        """Exponents by which columns of A were divided, with what damping far above A was, shape (1, n)."""
        return (self.exponents + self.sums.of_a + 2 * self.excess)[None]

    @property
    def b_columns(self) -> torch.Tensor:  # type: ignore[override]
        """Exponents by which right-hand sides were divided, shape (1, k)."""
        return self.sums.of_b[None]

    def _damped(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """R, z and S with the rows of the damping."""
        parts = self.sums.parts
        if not self.options.damp:
            return parts
        n, k = parts[1].shape
        r = self.sums.r
        below = torch.cat([self.damping.diag(), r.new_zeros(n, k)], 1)
        r = torch.linalg.qr(torch.cat([r, below]), mode="r")[1]
        return r[:n, :n], r[:n, n:], r[n:, n:]

    @cached_property
    def excess(self) -> int:
        """Power of two by which damping far above A is divided: x is then ``A^T b / damp^2``."""
        fraction, exponent = math.frexp(self.options.damp)
        largest = largest_magnitude(self.sums.parts[0], (0, 1))
        if not fraction:
            return 0
        least = exponent - self.sums.of_a - int(self.exponents.max())
        return max(0, least - int(binary_exponents(largest)) - DOMINATES - len(self.exponents).bit_length())

    @cached_property
    def damping(self) -> torch.Tensor:
        """Damping of each column, in the units of the sums, shape (n,)."""
        fraction, exponent = math.frexp(self.options.damp)
        exponents = exponent - self.excess - self.sums.of_a - self.exponents
        return shift(torch.full_like(self.sums.r[0, : len(self.exponents)].real, fraction), exponents)

    def _moderate(self, *parts: torch.Tensor) -> torch.Tensor:
        """Which right-hand sides, in the last matrix, are moderate, as all other columns are, shape (k,)."""
        # Zero is.
        sizes = [largest_magnitude(x, 0) for x in parts]
        *others, right = ((x == 0) | ((x >= 1 / SQUARABLE) & (x <= SQUARABLE)) for x in sizes)
        for moderate in others:
            right = right & moderate.all()
        return right

    def _noise(self, of: Coordinates, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Upper bound on the rounding errors of ``D^-1 (A^H b - (R^H R + damp^2 I) x)``, shape (k,)."""
        # Those of doubled products are relative to the largest element of a matrix, also in its small
        # columns.
        n, spread = len(x), of.columns.max() / of.columns.min()
        image = (1 + n**0.5) * of.norm_bound * of.length(x)
        damped = self.damping.square()[:, None] * x
        of_damping = 4 * FP64.u * two_norms(damped / of.columns, 0)
        of_a = torch.linalg.matrix_norm(self.sums.parts[0] / of.columns.T)
        rounded = 2 * self.sums.roundings * FP64.u * n**0.5 * of_a
        return (self._unit * spread + rounded) * (b + image) + of_damping

    @property
    def _unit(self) -> float:
        """Rounding errors of an element of a doubled product, times the root of the number of elements."""
        n, terms = len(self.exponents), 2 if self.sums.r.is_complex() else 1
        return residual_noise(terms * (self.sums.rows + 2 * n), doubled=True) * n**0.5

    def _distance(self, of: Coordinates) -> tuple[float, float]:
        """``||D^-1 (A^H A - R^H R) D^-1||_F``, estimated, and a bound on it times ``||B^+||``, with what
        rounding errors of products hide.
        """
        # D is at least as large as what the vectors see.
        vectors = gaussian_probes(len(self.exponents), self.device)
        high, low = normal_product(self.sums.parts[0], vectors)
        difference = (self.sums.probes - high) + (self.sums.probes_low - low)
        seen = torch.linalg.matrix_norm(difference / of.columns) / PROBES**0.5
        sizes, largest = of.columns[:, 0], of.columns.max()
        images = largest * of.norm_bound * max(1, self.sums.rows) ** 0.5
        images = images + largest / of.columns.min() * sizes.sum()
        distance, noise = (torch.stack([seen, self._unit * LONGEST * images]) / sizes.min()).tolist()
        return distance, (MARGINS[PROBES] * distance + noise) * of.inverse_norm

    def _projected(self, of: Coordinates, x: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """``P^H (A^H b - (R^H R + damp^2 I) x)`` for an unevaluated sum x."""
        product = normal_product(self.sums.parts[0], x, low)
        rest = (self.sums.products - product[0]) + (self.sums.products_low - product[1])
        return of.projector.mH @ (rest - self.damping.square()[:, None] * (x + low))
