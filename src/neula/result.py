"""What the solvers return: the answer, and the evidence that it is one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


class AccuracyWarning(UserWarning):
    """The result is the best that was found, but it is not certified to the accuracy asked for."""


@dataclass(frozen=True)
class Attempt:
    """One link of the chain: what was tried, and what its certificate said.

    Attributes
    ----------
    method : str
        The algorithm and its arithmetic, e.g. ``"rgsqrf fp16 + cgls"``.
    accepted : bool
        Whether the measured certificate met the accuracy asked for.
    reason : str
        The measured numbers, in words.
    """

    method: str
    accepted: bool
    reason: str


@dataclass(frozen=True)
class QRCertificate:
    """Measured quality of a QR factorization, in the scaling in which every column has norm near 1.

    Attributes
    ----------
    residual : float
        Estimate of ``||A - Q R||_F / ||A||_F`` from a few random vectors.
    orthogonality : float
        Estimate of ``||I - Q^T Q||_F / sqrt(n)`` from a few random vectors.
    residual_bound, orthogonality_bound : float
        What was asked for.
    """

    residual: float
    orthogonality: float
    residual_bound: float
    orthogonality_bound: float

    @property
    def accepted(self) -> bool:
        """Whether both measures meet their bounds (NaN never does)."""
        return self.residual <= self.residual_bound and self.orthogonality <= self.orthogonality_bound

    def __str__(self) -> str:
        return (
            f"residual {self.residual:.1e} (bound {self.residual_bound:.1e}), "
            f"orthogonality {self.orthogonality:.1e} (bound {self.orthogonality_bound:.1e})"
        )


@dataclass(frozen=True)
class QRResult:
    """``Q, R = result`` as with ``torch.linalg.qr``; the rest says how it was made and how good it is.

    Attributes
    ----------
    Q, R : array
        The factors, in the library, on the device and in the dtype of the input.
        ``Q`` is ``None`` for ``mode="r"``.
    certificate : QRCertificate or sequence of QRCertificate
        One for each matrix of a batch.
    attempts : tuple of Attempt
        The chain that led here; the last one is the accepted one, if any was accepted.
    engine : str
        The engine that multiplied.
    accuracy : str
        The accuracy that was asked for.
    """

    Q: Any = field(repr=False)
    R: Any = field(repr=False)
    certificate: Any = None
    attempts: tuple[Attempt, ...] = ()
    engine: str = ""
    accuracy: str = ""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.Q, self.R))

    def __getitem__(self, index: int) -> Any:
        return (self.Q, self.R)[index]

    def __len__(self) -> int:
        return 2

    @property
    def converged(self) -> bool:
        """Whether the factorization is certified to the accuracy asked for."""
        return bool(self.attempts) and self.attempts[-1].accepted


@dataclass(frozen=True)
class LstsqResult:
    """Solution of a least-squares problem with the measured evidence.

    Attributes
    ----------
    x : array, shape (n,) or (n, k)
        The solution, in the library, on the device and in the dtype of the input.
    converged : bool
        Whether the measured backward error meets the accuracy asked for.
    iterations : int
        Refinement iterations, over all attempts.
    backward_error : float
        Upper bound on the relative perturbation of ``A`` and ``b`` for which ``x`` is exact (with a
        low-precision R one of its terms is an estimate); the worst right-hand side counts.
    optimality : float
        ``||A^T r|| / (||A|| ||r||)`` in the column-scaled matrix; the worst right-hand side counts.
    tolerance : float
        What ``backward_error`` was asked to be.
    residual_norm : float or list of float
        ``||b - A x||`` of each right-hand side (with damping and weights, of the augmented problem).
    rank : int
        Numerical rank of ``A``, with damping of the stacked matrix; where it is below the largest possible
        one, the minimum-norm solution was computed.
    history : tuple of float
        The backward error at every restart, first to last.
    factorization : str
        What the accepted attempt did, e.g. ``"rgsqrf fp16 + cgls"``.
    attempts : tuple of Attempt
        The chain that led here; the last one is the accepted one, if any was accepted.
    engine : str
        The engine that multiplied.
    accuracy : str
        The accuracy that was asked for.
    """

    x: Any
    converged: bool
    iterations: int
    backward_error: float
    optimality: float
    tolerance: float
    residual_norm: Any
    rank: int
    history: tuple[float, ...] = ()
    factorization: str = ""
    attempts: tuple[Attempt, ...] = ()
    engine: str = ""
    accuracy: str = ""


@dataclass(frozen=True)
class SVDResult:
    """``U, s, Vh = result``: a truncated singular value decomposition.

    Attributes
    ----------
    U : array, shape (m, k)
    s : array, shape (k,)
        Singular values, descending.
    Vh : array, shape (k, n)
    relative_error : float
        Estimate of ``||A - U diag(s) Vh||_F / ||A||_F`` from a few random vectors.
    qr : QRResult
        The factorization behind it, with its certificate (its ``Q`` and ``R`` are dropped).
    """

    U: Any = field(repr=False)
    s: Any
    Vh: Any = field(repr=False)
    relative_error: float
    qr: QRResult = field(repr=False)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.U, self.s, self.Vh))

    def __getitem__(self, index: int) -> Any:
        return (self.U, self.s, self.Vh)[index]

    def __len__(self) -> int:
        return 3
