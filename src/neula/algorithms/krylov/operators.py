"""The matrix of a least-squares problem, applied without being formed.

Row weights and damping turn ``min ||A x - b||`` into ``min || [W A; damp I] x - [W b; 0] ||``. The stacked
matrix exists once, in the working storage that the factorization overwrites; refinement applies it from A.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.engines import Engine
from neula.kernels.normal_product import normal_product, product, transposed_product


@dataclass(frozen=True)
class LeastSquaresOperator:
    """``[diag(weights) A; damp I]``.

    Attributes
    ----------
    a : Tensor, shape (m, n)
    weights : Tensor, shape (m,), or None
    damp : float
    """

    a: torch.Tensor
    weights: torch.Tensor | None = None
    damp: float = 0.0

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the stacked matrix."""
        m, n = self.a.shape
        return (m + n if self.damp else m), n

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it to the columns of x, shape (n, k)."""
        top = product(self.a, x)
        if self.weights is not None:
            top *= self.weights[:, None]
        return torch.cat([top, self.damp * x]) if self.damp else top

    def rmatmul(self, y: torch.Tensor) -> torch.Tensor:
        """Apply its transpose to the columns of y, shape (m, k) or (m + n, k)."""
        top = y[: self.a.shape[0]]
        if self.weights is not None:
            top = top * self.weights[:, None]
        image = transposed_product(self.a, top)
        return image.add_(y[self.a.shape[0] :], alpha=self.damp) if self.damp else image

    def normal(self, x: torch.Tensor, b: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """``Y = A X``, or ``B - A X`` where B is given, and ``A^T Y``, by a kernel in one pass over A."""
        if self.weights is None and not self.damp:
            return normal_product(self.a, x, b)
        y = self.matmul(x) if b is None else b - self.matmul(x)
        return y, self.rmatmul(y)

    def right_hand_side(self, b: torch.Tensor) -> torch.Tensor:
        """``[W b; 0]`` for b of shape (m, k)."""
        top = b if self.weights is None else b * self.weights[:, None]
        return torch.cat([top, top.new_zeros(self.a.shape[1], b.shape[1])]) if self.damp else top

    def column_max(self, engine: Engine) -> torch.Tensor:
        """Largest magnitude in each column."""
        largest = engine.column_max(self._weighted())
        return largest.clamp_min(abs(self.damp)) if self.damp else largest

    def fill(self, engine: Engine, scales: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The stacked matrix with its columns scaled, in the engine's working storage or in ``out``."""
        m = self.a.shape[0]
        work = engine.empty(*self.shape) if out is None else out
        engine.fill(work[:m], self._weighted(), scales)
        if self.damp:
            work[m:] = torch.diag(self.damp * scales)
        return work

    def operand(self, engine: Engine, scales: torch.Tensor) -> torch.Tensor:
        """The stacked matrix with its columns scaled, as the engine's unit reads it, in row-major order."""
        out = torch.empty(self.shape, dtype=engine.operand_dtype, device=self.a.device)
        return self.fill(engine, scales, out)

    def dense(self) -> torch.Tensor:
        """The stacked matrix itself."""
        top = self._weighted()
        if not self.damp:
            return top
        return torch.cat([top, self.damp * torch.eye(top.shape[1], dtype=top.dtype, device=top.device)])

    def _weighted(self) -> torch.Tensor:
        return self.a if self.weights is None else self.a * self.weights[:, None]
