"""The result of a polar decomposition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

from neula.pipeline.result import shown
from neula.pipeline.result.certified import CertifiedResult, Unpacked
from neula.pipeline.result.shown import ArrayT


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PolarResult(CertifiedResult, Unpacked, Generic[ArrayT]):
    """Polar factors of a matrix, or of a batch, with their measured errors: ``U, H = result``.

    A :class:`CertifiedResult`. For a batch, scalars describe the worst matrix, and arrays have one entry a
    matrix.

    Attributes
    ----------
    U : array, shape (..., m, n)
        The orthogonal factor, in the library, on the device and in the dtype of the input: orthonormal
        columns, or rows if there are fewer, except for directions that count as zero.
    H : array, shape (..., n, n) or (..., m, m), or None
        The symmetric positive semidefinite factor, where a side was named: ``A = U H`` or ``A = H U``.
    side : {"right", "left"} or None
    converged : bool
        Whether the decomposition is certified to the requested accuracy.
    rank : int
        The smallest of ``ranks``.
    residual : float
        Estimate of ``||A - U H||_F / ||A||_F`` from a few random vectors, with ``H = (U^H A + A^H U) / 2``.
    orthogonality : float
        Estimate of the largest distance of a singular value of U from 1, from a few Lanczos steps; from 0 or
        1 where the rank is not full.
    residual_bound, orthogonality_bound : float
        Largest accepted values.
    ranks : array of int64, shape (*batch,)
        How many singular values of U are 1.
    residuals, orthogonalities : array of float64, shape (*batch,)
    accepted : array of bool, shape (*batch,)
    """

    _arrays: ClassVar[str] = ".U and .H"

    U: ArrayT
    H: ArrayT | None
    side: str | None
    converged: bool
    rank: int
    residual: float
    orthogonality: float
    residual_bound: float
    orthogonality_bound: float
    ranks: Any
    residuals: Any
    orthogonalities: Any
    accepted: Any
    _pending: Callable[[], Any] | None = None

    def _member(self, place: int) -> PolarResult[Any]:
        """The decomposition of one matrix of a batch."""
        names = ("U", "H", "ranks", "residuals", "orthogonalities", "accepted")
        scalars = {"converged": "accepted", "rank": "ranks", "residual": "residuals"}
        return self._one_of(place, names, **scalars, orthogonality="orthogonalities")

    def _parts(self) -> tuple[Any, ...]:
        return self.U, self.H

    def _headline(self) -> str:
        return super()._headline() + shown.members(self.accepted)

    def _rows(self) -> shown.Rows:
        return {
            "U": shown.array(self.U),
            "H": shown.array(self.H),
            "rank": str(self.rank),
            "method": shown.attempted(self.attempts),
            "residual": f"{self.residual:.1e} (bound {self.residual_bound:.1e})",
            "orthogonality": f"{self.orthogonality:.1e} (bound {self.orthogonality_bound:.1e})",
            "time": f"{shown.duration(self.seconds)}, engine {self.engine}",
        }.items()
