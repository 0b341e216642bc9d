"""The result of a truncated singular value decomposition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from neula.pipeline.result.qr import QRResult


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
        ``||A - U diag(s) Vh||_F / ||A||_F``, estimated from a few random vectors, or by Pythagoras from the
        norms of A and s, which is exact.
    qr : QRResult
        The factorization behind it, with its certificate (its ``Q`` and ``R`` are dropped). Where the
        triplets come from the Gram matrix of A, the certificate is theirs: its residual is
        ``||A^T U - V diag(s)||_F / ||A||_F``, its orthogonality that of U.
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
