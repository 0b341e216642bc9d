"""Least squares with one matrix and several dampings: products are those of one matrix with all solutions."""

from __future__ import annotations

import torch

from neula.algorithms.krylov.batched_lstsq import Overdetermined
from neula.algorithms.krylov.passes import normal, residual_and_gradient, transposed
from neula.algorithms.orthogonal.r_only import householder_r
from neula.algorithms.scaling import two_product
from neula.kernels.doubled.doubled import Doubled, Pair, two_sum


class DampedProblems(Overdetermined):
    """``min ||A x - b||^2 + ||D x||^2`` for one A and a batch of diagonal matrices D, shape (batch, n, 1).

    A, shape (m, n), is float64, and at most 1 in magnitude. Right-hand sides, and residuals, have the rows of
    D below those of A; there b is zero.
    """

    def __init__(self, a: torch.Tensor, damps: torch.Tensor) -> None:
        self.damps = damps
        r = householder_r(a[None]).expand(len(damps), -1, -1)
        r = householder_r(torch.cat([r, torch.diag_embed(damps[..., 0])], 1))
        sizes = torch.hypot(torch.linalg.vector_norm(a, dim=0)[:, None], damps)
        super().__init__(a[None], r, columns=torch.where(sizes > 0, sizes, 1.0))

    def start(self, b: torch.Tensor) -> torch.Tensor:
        gradient = self._apart(transposed(self.t, self._together(b[:, : self.t.shape[1]])))
        return self.solve(self.coordinates(gradient))

    def residual(self, b: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """``b - A x`` for an unevaluated sum, shape (batch, m, k), in twice the working precision."""
        return self._apart(self._doubled_residual(b, high, low)[0])

    def _prepared(self, columns: torch.Tensor | None) -> Doubled:
        sizes = torch.linalg.vector_norm(self.t, dim=1)[..., None]  # those of A alone, not of each problem
        return Doubled.from_matrix(self.t, torch.where(sizes > 0, sizes, 1.0))

    def _normal(self, x: torch.Tensor) -> torch.Tensor:
        return self._apart(normal(self.t, self._together(x))) + self.damps.square() * x

    def _residual_and_gradient(self, x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        m = self.t.shape[1]
        known = residual_and_gradient(self.t, self._together(x), self._together(b[:, :m]))
        (residual, gradient), below = map(self._apart, known), b[:, m:] - self.damps * x
        return torch.cat([residual, below], 1), gradient + self.damps * below

    def _doubled_gradient(
        self, b: torch.Tensor, high: torch.Tensor, low: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.doubled is not None
        residual = self._doubled_residual(b, high, low)
        gradient, rest = map(self._apart, self.doubled.transposed_pair(*residual))
        # D^2 x as a sum of two numbers; the right-hand sides of these rows are zero.
        damps = self.damps.expand_as(high)
        image, lost = two_product(damps, high)
        lost = lost + damps * low
        again, lost_again = two_product(damps, image)
        gradient, error = two_sum(gradient, -again)
        gradient = gradient + (error + rest - lost_again - damps * lost)
        return torch.cat([self._apart(residual[0]), -image], 1), gradient

    def _doubled_residual(self, b: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> Pair:
        assert self.doubled is not None
        top = self._together(b[:, : self.t.shape[1]])
        return self.doubled.residual(self._together(high), top, self._together(low))

    def _together(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors of all problems side by side, shape (1, n, batch k)."""
        return x.movedim(0, 1).flatten(1)[None]

    def _apart(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`_together`."""
        return x[0].unflatten(1, (len(self.damps), -1)).movedim(1, 0)
