"""The result of a truncated singular value decomposition."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic

from neula.pipeline.result import shown
from neula.pipeline.result.attempts import Attempt
from neula.pipeline.result.qr import QRResult
from neula.pipeline.result.shown import ArrayT


@dataclass(frozen=True, eq=False, repr=False)
class SVDResult(shown.Shown, Generic[ArrayT]):
    """``U, s, Vh = result``: a truncated singular value decomposition.

    Attributes
    ----------
    U : array, shape (m, k)
    s : array, shape (k,)
        Singular values, descending.
    Vh : array, shape (k, n)
    relative_error : float
        ``||A - U diag(s) Vh||_F / ||A||_F``, estimated from a few random vectors, or by Pythagoras from the
        norms of A and s, which is exact.
    errors : array, shape (k,)
        Bounds on the errors of the singular values: ``s[i]`` is not farther from the i-th largest singular
        value of A. Infinite where the triplets were not good enough to say so.
    certificate : SVDCertificate
        What was measured, and what was asked for.
    attempts : tuple of Attempt
        The chain that led here.
    engine : str
        The engine that multiplied.
    accuracy : str
        The accuracy that was asked for.
    converged : bool
        Whether the certificate is accepted.
    seconds : float
        Time of the call.
    passes : int
        How often A was read, if it was read in blocks; 0 if it was in memory.
    """

    U: ArrayT
    s: ArrayT
    Vh: ArrayT
    relative_error: float
    errors: ArrayT
    certificate: Any = None
    attempts: tuple[Attempt, ...] = ()
    engine: str = ""
    accuracy: str = ""
    converged: bool = False
    seconds: float = math.nan
    passes: int = 0

    @property
    def qr(self) -> QRResult[Any]:
        """What :class:`QRResult` says of a factorization, said of this one; without Q and R."""
        return QRResult(None, None, self.certificate, self.attempts, self.engine, self.accuracy)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.U, self.s, self.Vh))

    def __getitem__(self, index: int) -> Any:
        return (self.U, self.s, self.Vh)[index]

    def __len__(self) -> int:
        return 3

    def headline(self) -> str:
        """What is certified, in a line."""
        s: Any = self.s
        return f"rank {len(s)}, {shown.verdict(self.accuracy, converged=self.converged)}"

    def rows(self) -> shown.Rows:
        """What matters: the triplets, how they came about, and how good they are."""
        return {
            "U": shown.array(self.U),
            "s": shown.array(self.s),
            "Vh": shown.array(self.Vh),
            "errors of s": shown.array(self.errors),
            "relative error": f"{self.relative_error:.1e}",
            "method": shown.attempted(self.attempts),
            "certificate": str(self.certificate),
            "time": f"{shown.duration(self.seconds)}, engine {self.engine}",
        }.items()
