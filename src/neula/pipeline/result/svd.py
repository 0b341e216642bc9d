"""The result of a truncated singular value decomposition."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic

from neula.pipeline.result import shown
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
    qr : QRResult
        The factorization behind it, with its certificate (its ``Q`` and ``R`` are dropped). Where the
        triplets come from the Gram matrix of A, the certificate is theirs: its residual is
        ``||A^T U - V diag(s)||_F / ||A||_F``, its orthogonality that of U.
    seconds : float
        Time of the call.
    """

    U: ArrayT
    s: ArrayT
    Vh: ArrayT
    relative_error: float
    qr: QRResult[Any]
    seconds: float = math.nan

    def __iter__(self) -> Iterator[Any]:
        return iter((self.U, self.s, self.Vh))

    def __getitem__(self, index: int) -> Any:
        return (self.U, self.s, self.Vh)[index]

    def __len__(self) -> int:
        return 3

    def headline(self) -> str:
        """What is certified, in a line."""
        s: Any = self.s
        return f"rank {len(s)}, {shown.verdict(self.qr.accuracy, converged=self.qr.converged)}"

    def rows(self) -> shown.Rows:
        """What matters: the triplets, how they came about, and how good they are."""
        return {
            "U": shown.array(self.U),
            "s": shown.array(self.s),
            "Vh": shown.array(self.Vh),
            "relative error": f"{self.relative_error:.1e}",
            "method": shown.attempted(self.qr.attempts),
            "certificate": str(self.qr.certificate),
            "time": f"{shown.duration(self.seconds)}, engine {self.qr.engine}",
        }.items()
