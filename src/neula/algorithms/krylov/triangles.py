"""Triangular factors of least-squares problems: what each says by itself, and solves with it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from neula.algorithms.spectra.inverse_norm import (
    EXPLICIT,
    inverse_norm,
    norm_of_triangle,
    schatten_bounds,
    schatten_bounds_of_gram,
)
from neula.certificates.forward_error import ESTIMATED
from neula.kernels.triangular_inverse import triangular_inverse


@dataclass(frozen=True)
class Triangles:
    """Measures of each R of a batch by itself."""

    # Shape (batch, n, n). R^-1: products with it take less time than triangular solves for single vectors.
    # None where the library solves.
    inverse: torch.Tensor | None
    # norm, norm_bound, shape (batch, 1): ||R D^-1||_2 from below and from above: from Schatten norms, within
    # n^(1/4), or estimated.
    norm: torch.Tensor
    norm_bound: torch.Tensor
    inverse_norm: torch.Tensor  # shape (batch, 1): ||D R^-1||_2 from above, likewise
    margin: float = 1.0  # by how much that may exceed the norm because it is estimated: 1, or ESTIMATED

    @classmethod
    def from_factor(
        cls, r: torch.Tensor, columns: torch.Tensor, gram: torch.Tensor | None = None
    ) -> Triangles:
        """For upper triangular R, shape (batch, n, n), and the diagonal of D, shape (batch, n, 1).

        The lower triangle of ``R^H R``, where it is known, spares a product.
        """
        inverse = triangular_inverse(r, upper=True)
        if gram is None:
            bounds = schatten_bounds(r / columns.mT, upper=True)
        else:
            bounds = schatten_bounds_of_gram(gram, columns)
        return cls(inverse, *bounds, schatten_bounds(columns * inverse, upper=True)[1])

    @classmethod
    def estimated(cls, r: torch.Tensor, columns: torch.Tensor) -> Triangles:
        """Estimate the norms by power methods, with D the column norms of R: no operation takes n^3."""
        norm = norm_of_triangle(r, columns)
        largest = (ESTIMATED * norm).clamp_max(r.shape[-1] ** 0.5)
        solves = partial(solved, r), partial(solved_transposed, r)
        inverse_norm_of = inverse_norm(*solves, columns, dtype=r.dtype)[0]
        return cls(None, norm, largest, ESTIMATED * inverse_norm_of[:, None], ESTIMATED)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors of triangles whose inverse is known."""
        assert self.inverse is not None
        return self.inverse, self.norm, self.norm_bound, self.inverse_norm


def are_solved(r: torch.Tensor) -> bool:
    """Whether the library solves with triangles sooner than it inverts them: large ones on a CPU."""
    return r.is_cpu and r.shape[-1] > EXPLICIT


def solved(r: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``R^-1 Y``."""
    return torch.linalg.solve_triangular(r, y, upper=True)


def solved_transposed(r: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``R^-H Y``."""
    return torch.linalg.solve_triangular(r.mH, y, upper=False)
