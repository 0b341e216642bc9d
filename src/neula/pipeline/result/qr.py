"""The result of a QR factorization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic

from neula.pipeline.result import shown
from neula.pipeline.result.certified import CertifiedResult, Unpacked
from neula.pipeline.result.deferred import Deferrable
from neula.pipeline.result.factored import Factored
from neula.pipeline.result.shown import ArrayT


@dataclass(frozen=True, eq=False, repr=False)
class QRResult(Factored[ArrayT], CertifiedResult, Unpacked, Generic[ArrayT]):
    """QR factors, with the certificate and attempts of a :class:`CertifiedResult`: ``Q, R = result``. For
    square matrices, with Q and without pivoting, it has the methods of :class:`Factored`.

    With column pivoting ``Q, R, P = result``, as from ``scipy.linalg.qr``; with ``mode="raw"`` ``H, tau =
    result``, as from ``torch.geqrf``.

    Attributes
    ----------
    Q, R : array
        The factors, in the library, on the device and in the dtype of the input.
        ``Q`` is ``None`` for ``mode="r"``, both are for ``mode="raw"``.
    certificate : QRCertificate or sequence of QRCertificate
        One for each matrix of a batch; not accepted where that holds NaN or Inf, and its factors are NaN.
    P : array of int64, shape (..., n), or None
        With column pivoting the order of the columns: ``A[:, P] = Q R``.
    H, tau : array, shape (..., m, n) and (..., min(m, n)), or None
        With ``mode="raw"`` R in the upper triangle and Householder vectors below, and their factors:
        ``Q = H_1 H_2 ...`` with ``H_j = I - tau_j v_j v_j^H``.
    accepted : array of bool, shape (*batch,), or None
        Whether each factorization is certified to the requested accuracy.
    """

    _arrays: ClassVar[str] = ".Q and .R"

    Q: ArrayT
    R: ArrayT
    certificate: Any = None
    P: ArrayT | None = None
    H: ArrayT | None = None
    tau: ArrayT | None = None
    accepted: Any = Deferrable(None)  # noqa: RUF009
    _pending: Callable[[], Any] | None = None
    _factors: Any = None

    def _parts(self) -> tuple[Any, ...]:
        if self.tau is not None:
            return self.H, self.tau
        return (self.Q, self.R) if self.P is None else (self.Q, self.R, self.P)

    def _member(self, place: int) -> QRResult[Any]:
        """The factors of one matrix of a batch."""
        found = self.certificate[place]
        attempts = self.attempts
        if attempts:
            attempts = (*attempts[:-1], replace(attempts[-1], accepted=found.accepted, reason=str(found)))
        factors: dict[str, Any] = {"Q": self.Q, "R": self.R, "P": self.P}
        of_one: dict[str, Any] = {name: None if x is None else x[place] for name, x in factors.items()}
        methods = None if self._factors is None else self._factors.of_member(place)
        of_one |= {"certificate": found, "attempts": attempts, "_factors": methods}
        return replace(self, **of_one)

    @property
    def converged(self) -> bool:
        """Whether the factorization is certified to the requested accuracy."""
        if not self.attempts and self.accepted is not None:  # not read yet
            return bool(self.accepted.all())
        return bool(self.attempts) and self.attempts[-1].accepted

    def _rows(self) -> shown.Rows:
        first, second, *_ = self._parts()
        names = ("Q", "R") if self.tau is None else ("H", "tau")
        return {
            names[0]: shown.array(first),
            names[1]: shown.array(second),
            "method": shown.attempted(self.attempts),
            "certificate": str(self.certificate),
            "time": f"{shown.duration(self.seconds)}, engine {self.engine}",
        }.items()
