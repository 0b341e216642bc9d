"""The result of a Cholesky factorization."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from neula.pipeline.result.attempts import Attempt


@dataclass(frozen=True)
class CholeskyResult:
    """``A = L L^T``, or ``U^T U``, of a matrix or of a batch of them, with the measured evidence.

    Of a batch the single numbers are those of the worst matrix; the arrays have one for each.

    Attributes
    ----------
    factor : array, shape (..., n, n)
        L, or with ``upper=True`` U, in the library, on the device and in the dtype of the input; zero in the
        other triangle.
    upper : bool
        Which of the two it is.
    converged : bool
        Whether the factorization is certified to the accuracy asked for.
    residual : float
        Estimate of ``||A - L L^T||_F / ||A||_F`` from a few random vectors, in higher precision than that of
        the accuracy, rows and columns of A being scaled alike to a diagonal near one.
    bound : float
        What ``residual`` was asked to be.
    residuals : array of float64, shape (*batch,)
    accepted : array of bool, shape (*batch,)
    attempts : tuple of Attempt
        The chain that led here; the last one is the accepted one, if any was accepted.
    engine : str
        The engine that multiplied.
    accuracy : str
        The accuracy that was asked for.
    """

    factor: Any = field(repr=False)
    upper: bool
    converged: bool
    residual: float
    bound: float
    residuals: Any = field(repr=False)
    accepted: Any = field(repr=False)
    attempts: tuple[Attempt, ...] = ()
    engine: str = ""
    accuracy: str = ""

    @property
    def L(self) -> Any:
        """The lower factor; with ``upper=True`` the transpose of U."""
        return _transposed(self.factor) if self.upper else self.factor

    @property
    def U(self) -> Any:
        """The upper factor; without ``upper=True`` the transpose of L."""
        return self.factor if self.upper else _transposed(self.factor)


def _transposed(x: Any) -> Any:
    """Of the last two dimensions, as the library of the array has it."""
    return x.mT if hasattr(x, "mT") else x.swapaxes(-2, -1)
