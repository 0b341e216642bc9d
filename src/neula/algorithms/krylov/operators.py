"""The matrix of a least-squares problem, applied without being formed.

Row weights and damping turn ``min ||A x - b||`` into ``min || [W A; damp I] x - [W b; 0] ||``. The stacked
matrix exists once, in the working storage that the factorization overwrites; refinement applies it from A.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.engines import Engine
from neula.engines.graphs import Replay, called
from neula.engines.reduction import HERE, Reduction
from neula.kernels.few_vectors.normal_product import normal_product, product, transposed_product
from neula.kernels.magnitudes import squares


@dataclass(frozen=True)
class LeastSquaresOperator:
    """``[diag(weights) A; damp I]``."""

    # Shape (m, n): in the precision of the vectors, or without weights in a narrower one: its products are in
    # theirs.
    a: torch.Tensor
    weights: torch.Tensor | None = None  # shape (m,)
    damp: float = 0.0
    # Where other rows of A are, if they are not all here; the rows of the damping are with the first.
    over_rows: Reduction = HERE
    replay: Replay = called  # runs the vector operations between two products, possibly from a graph

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the stacked matrix."""
        m, n = self.over_rows.count(self.a.shape[0]), self.a.shape[1]
        return (m + n if self.damp else m), n

    @property
    def stacked(self) -> bool:
        """Whether rows of a damping are here, below those of A."""
        return bool(self.damp) and self.over_rows.begins

    @property
    def _shape_here(self) -> tuple[int, int]:
        m, n = self.a.shape
        return (m + n if self.stacked else m), n

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it to the columns of x, shape (n, k)."""
        top = product(self.a, x)
        if self.weights is not None:
            top *= self.weights[:, None]
        return torch.cat([top, self.damp * x]) if self.stacked else top

    def rmatmul(self, y: torch.Tensor) -> torch.Tensor:
        """Apply its conjugate transpose to the columns of y, shape (m, k) or (m + n, k)."""
        return self.over_rows.total(self._rmatmul(y))

    def _rmatmul(self, y: torch.Tensor) -> torch.Tensor:
        top = y[: self.a.shape[0]]
        if self.weights is not None:
            top = top * self.weights[:, None]
        image = transposed_product(self.a, top)
        return image.add_(y[self.a.shape[0] :], alpha=self.damp) if self.stacked else image

    def normal(self, x: torch.Tensor, b: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """``Y = A X``, or ``B - A X`` where B is given, and ``A^H Y``, by a kernel in one pass over A."""
        y, image = self._normal(x, b)
        return y, self.over_rows.total(image)

    def normal_and_squares(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``A^H A X`` and the squared norms of the columns of ``A X``, in one message."""
        y, image = self._normal(x)
        image, of_y = self.over_rows.totals(image, squares(y).sum(0))
        return image, of_y

    def _normal(self, x: torch.Tensor, b: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if self.weights is None and not self.damp:
            return normal_product(self.a, x, b)
        y = self.matmul(x) if b is None else b - self.matmul(x)
        return y, self._rmatmul(y)

    def right_hand_side(self, b: torch.Tensor) -> torch.Tensor:
        """``[W b; 0]`` for b of shape (m, k)."""
        top = b if self.weights is None else b * self.weights[:, None]
        return torch.cat([top, top.new_zeros(self.a.shape[1], b.shape[1])]) if self.stacked else top

    def column_max(self, engine: Engine) -> torch.Tensor:
        """Largest magnitude in each column."""
        largest = engine.column_max(self._weighted())
        return largest.clamp_min(abs(self.damp)) if self.damp else largest

    def fill(self, engine: Engine, scales: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The stacked matrix with its columns scaled, in the engine's working storage or in ``out``."""
        m = self.a.shape[0]
        work = engine.empty(*self._shape_here) if out is None else out
        engine.fill(work[:m], self._weighted(), scales)
        if self.stacked:
            work[m:] = torch.diag(self.damp * scales)
        return work

    def working(self, engine: Engine, scales: torch.Tensor) -> torch.Tensor:
        """A scaled copy of A, padded to the engine's tile sizes, for recursive Gram-Schmidt to overwrite."""
        m, n = self._shape_here
        work = engine.padded(m, n, dtype=engine.working_dtype)
        self.fill(engine, scales, work[:m])
        return work

    def operand(self, engine: Engine, scales: torch.Tensor) -> torch.Tensor:
        """The stacked matrix with its columns scaled, as the engine's unit reads it, in row-major order."""
        out = torch.empty(self._shape_here, dtype=engine.operand_dtype, device=self.a.device)
        return self.fill(engine, scales, out)

    def dense(self) -> torch.Tensor:
        """The stacked matrix itself, or its rows here."""
        top = self._weighted()
        if not self.stacked:
            return top
        return torch.cat([top, self.damp * torch.eye(top.shape[1], dtype=top.dtype, device=top.device)])

    def _weighted(self) -> torch.Tensor:
        return self.a if self.weights is None else self.a * self.weights[:, None]
