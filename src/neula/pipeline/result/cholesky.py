"""The result of a Cholesky factorization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

from neula.pipeline.result import shown
from neula.pipeline.result.certified import CertifiedResult
from neula.pipeline.result.deferred import Deferrable
from neula.pipeline.result.factored import Factored, in_words
from neula.pipeline.result.shown import ArrayT


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CholeskyResult(Factored[ArrayT], CertifiedResult, Generic[ArrayT]):
    """Cholesky factor of a matrix, or of a batch: a :class:`CertifiedResult` with ``L``, ``U = L^H`` and the
    methods of :class:`Factored`.

    For a batch, scalars describe the worst matrix, and arrays have one entry a matrix.

    Attributes
    ----------
    factor : array, shape (..., n, n)
        L, or with ``upper=True`` U, in the library, on the device and in the dtype of the input; zero in the
        other triangle.
    upper : bool
        Which of the two it is.
    converged : bool
        Whether the factorization is certified to the requested accuracy.
    residual : float
        Estimate of ``||A - L L^H||_F / ||A||_F`` from a few random vectors, in higher precision than that of
        the accuracy, for A scaled symmetrically to a diagonal near one.
    bound : float
        Largest accepted ``residual``.
    residuals : array of float64, shape (*batch,)
    accepted : array of bool, shape (*batch,)
    jitter : float, or array of float64, shape (*batch,)
        What was added to the diagonal of A, with ``jitter="auto"``; an array where a matrix of a batch needs
        it, else 0. The factor, what is measured of it and all methods are those of the sum.
    """

    _arrays: ClassVar[str] = ".L"

    factor: ArrayT
    upper: bool
    converged: bool
    residual: float
    bound: float
    residuals: Any
    accepted: Any = Deferrable()  # noqa: RUF009
    jitter: Any = 0.0
    _pending: Callable[[], Any] | None = None
    _factors: Any = None

    @property
    def L(self) -> ArrayT:
        """The lower factor; with ``upper=True`` the conjugate transpose of U."""
        return _transposed(self.factor) if self.upper else self.factor

    @property
    def U(self) -> ArrayT:
        """The upper factor; without ``upper=True`` the conjugate transpose of L."""
        return self.factor if self.upper else _transposed(self.factor)

    @property
    def _has_jitter(self) -> bool:
        return not isinstance(self.jitter, float) or self.jitter > 0

    def _headline(self) -> str:
        return super()._headline() + shown.members(self.accepted)

    def _rows(self) -> shown.Rows:
        return {
            "U" if self.upper else "L": shown.array(self.factor),
            "method": shown.attempted(self.attempts)
            + (f", jitter {in_words(self.jitter)}" if self._has_jitter else ""),
            "residual": f"{self.residual:.1e} (bound {self.bound:.1e})",
            "time": f"{shown.duration(self.seconds)}, engine {self.engine}",
        }.items()


def _transposed(x: Any) -> Any:
    """The conjugate transpose of the last two dimensions, as the library of the array has it."""
    if hasattr(x, "mH"):
        return x.mH
    turned = x.mT if hasattr(x, "mT") else x.swapaxes(-2, -1)
    return turned.conj() if "complex" in str(x.dtype) else turned
