"""Results of decompositions into eigenvalues, singular values and polar factors, and of powers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

from neula.pipeline.result import shown
from neula.pipeline.result.factorizations import QRResult
from neula.pipeline.result.shown import ArrayT, CertifiedResult, Deferrable, Unpacked


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

    _answers: ClassVar[tuple[str, ...]] = ("eigenvalues", "eigenvectors")

    eigenvalues: ArrayT
    eigenvectors: ArrayT | None
    errors: Any = Deferrable()  # noqa: RUF009
    evidence: str = "measured"
    clusters: Any = Deferrable(None)  # noqa: RUF009
    gaps: Any = Deferrable(None)  # noqa: RUF009
    vector_errors: Any = Deferrable(None)  # noqa: RUF009
    residual: float
    orthogonality: float
    residual_bound: float = math.nan
    orthogonality_bound: float = math.nan
    converged: bool
    residuals: Any = Deferrable()  # noqa: RUF009
    orthogonalities: Any = Deferrable()  # noqa: RUF009
    accepted: Any = Deferrable()  # noqa: RUF009

    def _parts(self) -> tuple[Any, ...]:
        return self.eigenvalues, self.eigenvectors

    def _rows(self) -> shown.Rows:
        measured = ("residual",) if self.eigenvectors is None else ("residual", "orthogonality")
        errors = {f"errors ({self.evidence})": shown.array(self.errors)}
        return self._lines(errors, self._bounded(*measured))


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

    _answers: ClassVar[tuple[str, ...]] = ("X",)

    X: ArrayT
    power: float
    error: float
    residual: float
    residual_bound: float
    converged: bool
    eigenvalues: ArrayT
    errors: Any = Deferrable()  # noqa: RUF009
    residuals: Any = Deferrable()  # noqa: RUF009
    accepted: Any = Deferrable()  # noqa: RUF009

    def _member(self, place: int) -> PowerResult[Any]:
        names = ("X", "eigenvalues", "errors", "residuals", "accepted")
        return self._one_of(place, names, converged="accepted", error="errors", residual="residuals")

    def _rows(self) -> shown.Rows:
        found = {
            f"X = A**{self.power:g}": shown.array(self.X),
            "eigenvalues": shown.array(self.eigenvalues),
            "error": f"at most {self.error:.1e} of the norm of X",
        }
        return self._lines(found, self._bounded("residual"), answers=())


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SVDResult(CertifiedResult, Unpacked, Generic[ArrayT]):
    """Singular values and vectors, all or leading ones, a :class:`CertifiedResult`: ``U, s, Vh = result``.

    Attributes
    ----------
    U : array, shape (..., m, k)
    s : array, shape (..., k)
        Singular values, descending.
    Vh : array, shape (..., k, n)
    relative_error : float
        ``||A - U diag(s) Vh||_F / ||A||_F``, estimated from a few random vectors, or by Pythagoras from the
        norms of A and s, which is exact; of :func:`neula.svd` ``||A V - U diag(s)||_F / ||A||_F``, of wide
        matrices that of their adjoints, rounding errors of the measurement included, before U and V are
        rounded to the dtype of A. Of a batch the largest.
    errors : array, shape (..., k)
        Bounds on the errors of the singular values: ``s[i]`` is not farther from the i-th largest singular
        value of A. Infinite where the triplets were not good enough to say so.
    certificate : SVDCertificate or sequence of SVDCertificate
        The measured errors and their bounds, one for each matrix of a batch.
    converged : bool
        Whether all certificates are accepted.
    gaps, clusters, vector_errors : array, shape (..., k), or None
        Of :func:`neula.svd` alone: singular values with the same number in ``clusters`` are too close for
        vectors of their own, ``gaps`` is the distance of a cluster to all other singular values (and to zero
        if A is not square), and ``vector_errors`` a bound on the sine of the largest angle between its
        computed and its exact singular subspaces.
    accepted : array of bool, shape (*batch,), or None
        Of :func:`neula.svd`: which matrices are certified.
    passes : int
        How often A was read, if it was read in blocks; 0 if it was in memory.
    evidence : {"measured", "a priori"}
        What ``errors`` follow from: without vectors, from the backward stability of the algorithm.
    """

    _answers: ClassVar[tuple[str, ...]] = ("U", "s", "Vh")

    U: ArrayT
    s: ArrayT
    Vh: ArrayT
    relative_error: float
    errors: Any = Deferrable(None)  # noqa: RUF009
    certificate: Any = Deferrable(None)  # noqa: RUF009
    converged: bool = False
    gaps: Any = Deferrable(None)  # noqa: RUF009
    clusters: Any = Deferrable(None)  # noqa: RUF009
    vector_errors: Any = Deferrable(None)  # noqa: RUF009
    accepted: Any = Deferrable(None)  # noqa: RUF009
    passes: int = 0
    evidence: str = "measured"

    @property
    def qr(self) -> QRResult[Any]:
        """The orthogonality and attempts of this factorization as a :class:`QRResult` without Q and R."""
        known = {"attempts": self.attempts, "engine": self.engine, "accuracy": self.accuracy}
        return QRResult(None, None, self.certificate, **known)

    def _parts(self) -> tuple[Any, ...]:
        return self.U, self.s, self.Vh

    def _headline(self) -> str:
        s: Any = self.s
        # The rank of the approximation; the rank of A is not decided.
        count = f"rank {s.shape[-1]}" if self.accepted is None else f"{s.shape[-1]} singular values"
        return f"{count}, {super()._headline()}"

    def _rows(self) -> shown.Rows:
        found = self.certificate
        if isinstance(found, list):  # of a batch that of the matrix that exceeds its bounds most
            found = max(found, key=lambda x: max(x.excess), default="")
        errors = {f"errors ({self.evidence})": shown.array(self.errors)}
        errors["relative error"] = f"{self.relative_error:.1e}"
        return self._lines(errors, {"certificate": str(found)})


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
        Estimate of ``||A - U H||_F / ||A||_F`` from a few random vectors, with ``H = (U^H A + A^H U) / 2``,
        before U and H are rounded to the dtype of the input. That rounding adds at most u for H and
        ``sqrt(min(m, n)) u`` for U, where u is the unit roundoff of the dtype.
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

    _answers: ClassVar[tuple[str, ...]] = ("U", "H")

    U: ArrayT
    H: ArrayT | None
    side: str | None
    converged: bool
    rank: int
    residual: float
    orthogonality: float
    residual_bound: float = math.nan
    orthogonality_bound: float = math.nan
    ranks: Any = Deferrable()  # noqa: RUF009
    residuals: Any = Deferrable()  # noqa: RUF009
    orthogonalities: Any = Deferrable()  # noqa: RUF009
    accepted: Any = Deferrable()  # noqa: RUF009

    def _member(self, place: int) -> PolarResult[Any]:
        names = ("U", "H", "ranks", "residuals", "orthogonalities", "accepted")
        scalars = {"converged": "accepted", "rank": "ranks", "residual": "residuals"}
        return self._one_of(place, names, **scalars, orthogonality="orthogonalities")

    def _parts(self) -> tuple[Any, ...]:
        return self.U, self.H

    def _rows(self) -> shown.Rows:
        return self._lines({"rank": str(self.rank)}, self._bounded("residual", "orthogonality"))
