"""Numerical rank from R alone, and the coordinates in which the columns of A are orthonormal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from neula.algorithms.spectra.inverse_norm import schatten_bounds
from neula.algorithms.spectra.rank_revealing import RowSpace, Spectrum
from neula.certificates.forward_error import enlarged, least_squares_error
from neula.certificates.rank import rank_doubt, rounding_of
from neula.kernels.small_problems.refining import over
from neula.kernels.triangular_inverse import triangular_inverse

CLEAR = 8.0
"""Singular values within this factor of the threshold leave the rank in doubt: rounding errors move them."""


@dataclass(frozen=True)
class Coordinates:
    """A matrix C for which ``W = A C`` has nearly orthonormal columns.

    With full rank C is ``R^-1``, else it goes into the space of the rows that count.
    """

    inverse: torch.Tensor  # shape (n, r): C
    # Shape (n, r). A times it is an orthonormal basis orthogonal to the residual of a solution: C at full
    # rank. Otherwise C has a part in the dropped space, along which there is a residual.
    projector: torch.Tensor
    # Shape (n, r): what the coordinates of Q^H b are taken in, where that is not all of it.
    left: torch.Tensor | None
    columns: torch.Tensor  # shape (n, 1): norms of the columns of A, 1 where they are zero: the diagonal of D
    # norm, norm_bound: ||B||_2 for B = A D^-1, from below and from above.
    norm: float
    norm_bound: float
    inverse_norm: float  # ||B^+||_2 from above
    size: float  # ||B||_F ||B^+||_F, by which rounding errors of C grow
    doubt: str = ""  # why the rank is not certain
    shortest: Shortest | None = None  # of less than full rank: which of all solutions is meant

    @property
    def rank(self) -> int:
        """Columns of C."""
        return self.inverse.shape[1]

    @property
    def condition(self) -> float:
        """Condition number of B, or of what of it counts, from above."""
        return (
            self.norm_bound * self.inverse_norm if self.shortest is None else self.shortest.spectrum.condition
        )

    @classmethod
    def from_factor(cls, r: torch.Tensor) -> Coordinates:
        """Coordinates from an upper triangular R of full rank."""
        norms = torch.linalg.vector_norm(r, dim=0)
        columns = torch.where(norms > 0, norms, 1.0)[:, None]
        inverse = triangular_inverse(r[None], upper=True)[0]
        return cls._from_inverse(inverse, None, columns, r / columns.T)

    @classmethod
    def of_any_rank(
        cls,
        r: torch.Tensor,
        right: tuple[torch.Tensor, torch.Tensor],
        rcond: float,
        count: int,
        unit: float,
        scales: torch.Tensor | None = None,
    ) -> Coordinates:
        """Coordinates from an R, shape (n, n), of any rank; singular values of ``R D^-1`` below a part
        ``rcond`` are zero.

        ``right`` is the part of ``Q^H b`` that belongs to R, and what has the length of the rest, in as many
        columns. A has ``count`` rows, in a format of unit roundoff ``unit``. Its columns were multiplied by
        powers of two, the ``scales``, shape (n,): the minimum-norm solution is that without them.
        """
        norms = torch.linalg.vector_norm(r, dim=0)
        columns = torch.where(norms > 0, norms, 1.0)[:, None]
        b = r / columns.T
        u, s, vh = torch.linalg.svd(b)
        threshold = float(rcond * s[0]) if len(s) else 0.0
        rank = int((s > threshold).sum())
        if rank == r.shape[1]:
            found = cls.from_factor(r)
            near = not float(s[-1]) > CLEAR * threshold
            return found if not near else replace(found, doubt=_no_gap(s, rank))
        shortest = Shortest.from_svd(s, vh[:rank].mH, norms, count, scales)
        inverse = shortest.space.shortest(torch.diag(1 / s[:rank]).to(r.dtype)) / columns
        found = replace(
            cls._from_inverse(inverse, u[:, :rank], columns, b),
            projector=vh[:rank].mH / s[:rank] / columns,
            shortest=shortest,
        )
        gap = float(s[rank]) * CLEAR <= threshold and (rank == 0 or float(s[rank - 1]) >= CLEAR * threshold)
        if not gap or not rank:
            return found if gap else replace(found, doubt=_no_gap(s, rank))
        along, norm = u[:, rank:].mH @ right[0], torch.linalg.vector_norm
        # Rounding errors turn the left singular vectors, and so mix in what counts of b.
        mixed = shortest.spectrum.angle * norm(right[0], dim=0)
        length = norm(torch.cat([along, right[1], mixed[None]]), dim=0)
        noise = max(rounding_of(len(s), unit), Spectrum.rounding(count + len(s)) * float(s[0]))
        doubt = rank_doubt(float(s[rank - 1]), s[rank:], along, length, rank, count, noise)
        return replace(found, doubt=doubt)

    @classmethod
    def _from_inverse(
        cls, inverse: torch.Tensor, left: torch.Tensor | None, columns: torch.Tensor, b: torch.Tensor
    ) -> Coordinates:
        norm, norm_bound = schatten_bounds(b[None])
        inverse_norm = schatten_bounds((columns * inverse)[None])[1]
        sizes = torch.linalg.matrix_norm(b) * torch.linalg.matrix_norm(columns * inverse)
        found = torch.stack([norm[0, 0], norm_bound[0, 0], inverse_norm[0, 0], sizes]).tolist()
        return cls(inverse, inverse, left, columns, *found)

    def of_b(self, z: torch.Tensor) -> torch.Tensor:
        """Coordinates of the solution, shape (r, k), for ``Q^H b``."""
        return z if self.left is None else self.left.mH @ z

    def length(self, x: torch.Tensor) -> torch.Tensor:
        """``||D x||`` of each column."""
        return torch.linalg.vector_norm(self.columns * x, dim=-2)

    def error(
        self, x: torch.Tensor, measured: torch.Tensor, backward_error: torch.Tensor, ratio: torch.Tensor
    ) -> torch.Tensor:
        """Bound on ``||D (x - x*)|| / ||D x*||`` for a solution whose error in the range of C was
        ``measured``.

        X has the shape (n, k), all others (k,); ``ratio`` is ``||r|| / (||B|| ||D x||)``.
        """
        if not self.rank:
            return torch.zeros_like(measured)
        if self.doubt:
            return torch.full_like(measured, torch.inf)
        if self.shortest is None:
            return measured
        # Below full rank that range depends on rounding errors, too.
        by_formula = least_squares_error(self.condition, backward_error, ratio)
        error = measured + self.shortest.error(self.columns * x, by_formula, ratio)
        return enlarged(error, error)


@dataclass(frozen=True)
class Shortest:
    """The minimum-norm solution, and how it depends on the row space."""

    space: RowSpace
    v: torch.Tensor  # shape (n, r): orthonormal basis of the rows of B that count
    spectrum: Spectrum

    @classmethod
    def from_svd(
        cls, s: torch.Tensor, v: torch.Tensor, norms: torch.Tensor, count: int, scales: torch.Tensor | None
    ) -> Shortest:
        """Minimum-norm map from singular values and vectors, column norms, and scales of the columns."""
        # Zero columns take no part, whatever their scales.
        units = (norms > 0).double() if scales is None else torch.where(norms > 0, 1 / scales, 0.0)
        sizes = norms * over(units, units.amax())
        return cls(
            RowSpace(v, over(sizes, sizes.amax())),
            v,
            Spectrum.from_singular_values(s, v.shape[1], count + len(v)),
        )

    def error(self, y: torch.Tensor, relative: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
        """Relative error of ``y = D x`` by those of its coefficients and of the space."""
        relative = torch.maximum(relative, self.spectrum.coefficient_error(ratio))
        return self.space.error(self.v.mH @ y, y, relative, self.spectrum.angle)


def _no_gap(s: torch.Tensor, rank: int) -> str:
    around = ", ".join(f"{float(x):.1e}" for x in s[max(0, rank - 1) : rank + 1] / s[0])
    return f"rank {rank} is ambiguous: relative singular values next to the threshold are {around}"
