"""Solutions of minimum norm of many small problems at once: the augmented system, refined.

Steps are those of :mod:`neula.algorithms.krylov.batched_lstsq`, one launch for the whole batch.
"""

from __future__ import annotations

import torch

from neula.algorithms.krylov.batched_lstsq import FactoredTallMatrices, lengths
from neula.algorithms.krylov.doubled_refinement import DoubledEvaluation
from neula.algorithms.spectra.inverse_norm import schatten_bounds
from neula.certificates.backward_error import Measures
from neula.certificates.forward_error import left_by_update
from neula.certificates.residuals import residual_noise
from neula.kernels.shift import shift
from neula.kernels.small_problems.refining import over
from neula.kernels.triangular_inverse import triangular_inverse


class Underdetermined(FactoredTallMatrices):
    """``min ||x||`` subject to ``A x = b`` for wide A, T being ``A^H`` with scaled columns: ``x = T w``.

    Both x and w are refined (the augmented system): errors of x outside the range of T do not show in the
    residual of ``A x = b``. The diagonal of D, ``columns`` of shape (batch, n, 1), are the norms of the
    columns of A, up to a common factor; ``norm``, shape (batch, 1), is ``||A D^-1||_2`` from below, by
    default 1. Rows of A, and b with them, were divided by powers of two with the ``exponents``, shape (batch,
    1, m).
    """

    def __init__(
        self,
        t: torch.Tensor,
        r: torch.Tensor,
        columns: torch.Tensor,
        low: torch.Tensor | None = None,
        b_low: torch.Tensor | None = None,
        *,
        norm: torch.Tensor | None = None,
        exponents: torch.Tensor | None = None,
    ) -> None:
        self.inverse = triangular_inverse(r, upper=True)
        super().__init__(t, r, self.inverse, low, b_low)
        self.columns = columns
        self._norm = torch.ones_like(columns[:, 0]) if norm is None else norm
        self._exponents = torch.zeros_like(t[:, :1], dtype=torch.int64) if exponents is None else exponents
        of_r, of_inverse = (schatten_bounds(x, upper=True)[1] for x in (r, self.inverse))
        self._condition, self._left = of_r * of_inverse, left_by_update(self.rate[:, None], lifted=True)

    def start(self, b: torch.Tensor) -> torch.Tensor:
        w = self.solve(self.coordinates(b))
        return torch.cat([self.t @ w, w], 1)

    def solution(self, unknowns: torch.Tensor) -> torch.Tensor:
        return unknowns[:, : self.t.shape[1]]

    def size(self, unknowns: torch.Tensor) -> torch.Tensor:
        return lengths(self.columns * self.solution(unknowns))

    def evaluate(self, b: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> DoubledEvaluation:
        """Updates of x and of w, by solves with R."""
        n = self.t.shape[1]
        (x, w), (x_low, w_low) = high.tensor_split([n], 1), low.tensor_split([n], 1)
        assert self.doubled is not None
        outside, rest = self.doubled.residual(w, x, w_low)
        residual, residual_low = self.doubled.mH.residual(x, b, x_low)
        rest = rest + x_low
        if self.low is not None and self.b_low is not None:
            rest, residual_low = rest - self.low @ w, residual_low - self.low.mH @ x + self.b_low
        outside, residual = outside + rest, residual + residual_low
        inside = self.coordinates(residual + self.t.mH @ outside)
        dw = self.solve(inside)
        dx = self.t @ dw - outside
        sizes = lengths(x)
        noise = residual_noise(self._size, doubled=True) * self._condition
        wrong = self._left * (lengths(outside) + lengths(inside)) + noise * sizes
        return DoubledEvaluation(torch.cat([dx, dw], 1), self.columns.amax(1) * wrong, residual)

    def updated(
        self, b: torch.Tensor, unknowns: torch.Tensor, residual: torch.Tensor, update: torch.Tensor
    ) -> tuple[torch.Tensor, Measures]:
        """``||r|| / (||B|| ||D x|| + ||b||)``, rows in the units that were given (Rigal and Gaches, 1967).

        From above: where sums of slices lose what is small compared with the largest x, that is added to r.
        """
        residual = residual - self.t.mH @ self.solution(update)
        of_residual, of_b = (lengths(shift(x, self._exponents.mT)) for x in (residual, b))
        assert self.doubled is not None
        if self.doubled.cut:
            largest = self.solution(unknowns).abs().amax(1)  # T is at most 1
            noise = residual_noise(self._size, doubled=True) * largest
            rows = lengths(shift(torch.ones_like(b[..., :1]), self._exponents.mT))
            of_residual = of_residual + noise * rows
        error = over(of_residual, self._norm * self.size(unknowns) + of_b)
        return residual, Measures(error, error)
