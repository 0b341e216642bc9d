"""Results of eigenvalue problems, and of powers of matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic

from neula.pipeline.result import shown
from neula.pipeline.result.certified import CertifiedResult, Unpacked
from neula.pipeline.result.deferred import Deferrable
from neula.pipeline.result.shown import ArrayT


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class EighResult(CertifiedResult, Unpacked, Generic[ArrayT]):
    """Eigenvalues and eigenvectors of Hermitian matrices: ``eigenvalues, eigenvectors = result``.

    A :class:`CertifiedResult`. For a batch, scalars describe the worst matrix, and arrays have one entry a
    matrix.

    Attributes
    ----------
    eigenvalues : array, shape (..., k)
        Ascending, in the library and on the device of the input, real.
    eigenvectors : array, shape (..., n, k), or None
        Column i belongs to ``eigenvalues[..., i]``; None if they were not requested.
    errors : array of float64, shape (..., k)
        Bounds on the errors of the eigenvalues: the i-th eigenvalue of A is not farther from the i-th one
        here. Infinite where eigenvectors are not orthonormal enough to say so.
    evidence : {"measured", "a priori"}
        Whether ``errors`` follow from measured residuals of eigenvectors, or from the backward stability of
        the algorithm, whose values alone agree with trace and norm of A. Of a part of the eigenvalues, the
        position of each in the spectrum is a priori.
    clusters : array of int64, shape (..., k), or None
        Eigenvalues with the same number are too close for eigenvectors of their own: only their common
        subspace is determined.
    gaps : array of float64, shape (..., k), or None
        Distance of the cluster of each eigenvalue to all eigenvalues outside of it.
    vector_errors : array of float64, shape (..., k), or None
        Bound on the sine of the largest angle between the computed and the exact subspace of the cluster;
        with B of angles in its inner product.
    residual : float
        ``||A V - V diag(w)||_F / ||A||_F``, rounding errors of the measurement included, before V is rounded
        to the dtype of A; of values alone the relative difference of trace or norm. With B the largest of
        ``||A v - w B v|| / ((||A||_F + |w| ||B||_F) ||v||)``.
    orthogonality : float
        Bound on ``||V^H V - I||_2``, likewise; with B on ``||V^H B V - I||_2``.
    residual_bound, orthogonality_bound : float
        Largest accepted values.
    converged : bool
        Whether the decomposition is certified to the requested accuracy.
    residuals, orthogonalities : array of float64, shape (*batch,)
    accepted : array of bool, shape (*batch,)
    """

    _arrays: ClassVar[str] = ".eigenvalues and .eigenvectors"

    eigenvalues: ArrayT
    eigenvectors: ArrayT | None
    errors: Any = Deferrable()  # noqa: RUF009
    evidence: str = "measured"
    clusters: Any = Deferrable(None)  # noqa: RUF009
    gaps: Any = Deferrable(None)  # noqa: RUF009
    vector_errors: Any = Deferrable(None)  # noqa: RUF009
    residual: float
    orthogonality: float
    residual_bound: float
    orthogonality_bound: float
    converged: bool
    residuals: Any = Deferrable()  # noqa: RUF009
    orthogonalities: Any = Deferrable()  # noqa: RUF009
    accepted: Any = Deferrable()  # noqa: RUF009

    def _parts(self) -> tuple[Any, ...]:
        return self.eigenvalues, self.eigenvectors

    def _headline(self) -> str:
        return super()._headline() + shown.members(self.accepted)

    def _rows(self) -> shown.Rows:
        rows = {
            "eigenvalues": shown.array(self.eigenvalues),
            "eigenvectors": shown.array(self.eigenvectors),
            f"errors ({self.evidence})": shown.array(self.errors),
            "method": shown.attempted(self.attempts),
            "residual": f"{self.residual:.1e} (bound {self.residual_bound:.1e})",
            "orthogonality": f"{self.orthogonality:.1e} (bound {self.orthogonality_bound:.1e})",
            "time": f"{shown.duration(self.seconds)}, engine {self.engine}",
        }
        if self.eigenvectors is None:
            del rows["orthogonality"]
        return rows.items()


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PowerResult(CertifiedResult, Generic[ArrayT]):
    """A power of Hermitian positive semidefinite matrices, a :class:`CertifiedResult`.

    Attributes
    ----------
    X : array, shape (..., n, n)
        ``A**p``, Hermitian, in the library, on the device and in the dtype of the input.
    power : float
        The exponent p.
    error : float
        Bound on ``||X - A**p||_F / ||X||_F``, the largest of ``errors``; infinite where no digit is
        guaranteed.
    residual : float
        ``||X X - A||_F / (||X||_F^2)`` of a square root, ``||X A X - I||_F / (||X||_F^2 ||A||_F)`` of an
        inverse square root, else ``||A V - V diag(w)||_F / ||A||_F``; the largest of ``residuals``.
    residual_bound : float
        The largest accepted one.
    converged : bool
        Whether all residuals are accepted, and a digit of each power is guaranteed: ``error`` <= 0.1.
    eigenvalues : array, shape (..., n)
        Of A, ascending.
    errors, residuals : array of float64, shape (*batch,)
    accepted : array of bool, shape (*batch,)
    """

    _arrays: ClassVar[str] = ".X"

    X: ArrayT
    power: float
    error: float
    residual: float
    residual_bound: float
    converged: bool
    eigenvalues: ArrayT
    errors: Any
    residuals: Any
    accepted: Any

    def _member(self, place: int) -> PowerResult[Any]:
        """The power of one matrix of a batch."""
        names = ("X", "eigenvalues", "errors", "residuals", "accepted")
        return self._one_of(place, names, converged="accepted", error="errors", residual="residuals")

    def _headline(self) -> str:
        return super()._headline() + shown.members(self.accepted)

    def _rows(self) -> shown.Rows:
        return {
            f"X = A**{self.power:g}": shown.array(self.X),
            "eigenvalues": shown.array(self.eigenvalues),
            "error": f"at most {self.error:.1e} of the norm of X",
            "method": shown.attempted(self.attempts),
            "residual": f"{self.residual:.1e} (bound {self.residual_bound:.1e})",
            "time": f"{shown.duration(self.seconds)}, engine {self.engine}",
        }.items()
