"""Cholesky factorization with products on a neural engine, stored in its low format.

The left-looking scheme of Lopez and Mary, "Mixed Precision LU Factorization on GPU Tensor Cores: Reducing
Data Movement and Memory Footprint" (algorithm 5.1), for symmetric positive definite matrices: a block column
is updated and factorized in a buffer of the storage precision, and rounded to the low format once, when it is
done. So the error has a term ``2u`` that does not grow with n, and only blocks of columns are ever stored in
single precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from neula.engines import Engine
from neula.kernels.precision import exact_matmul

PANEL = 256
"""Width of a block column."""

SHIFT = 4.0
"""Multiple of u by which the diagonal grows before factorization: rounding A to the format perturbs it by u
relative to its elements, which could cost a matrix that is barely positive definite its sign (Higham and
Pranesh, "Exploiting Lower Precision Arithmetic in Solving Symmetric Positive Definite Linear Systems and
Least Squares Problems", SIAM J. Sci. Comput. 43, 2021)."""

_SUBSTITUTION = 512
"""Rows of the factor that are widened at a time for substitutions."""


@dataclass(frozen=True)
class CholeskyFactor:
    """``A = L L^T``, about.

    Attributes
    ----------
    lower : Tensor, shape (n, n)
        L in its lower triangle; what is above the diagonal means nothing.
    storage : torch.dtype
        Precision of substitutions.
    """

    lower: torch.Tensor
    storage: torch.dtype

    @property
    def growth(self) -> float:
        """1: elements of L are at most the square root of those of A (Higham 2002, section 10.1)."""
        return 1.0

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        x = b.to(self.storage, copy=True)
        size = len(x) if self.lower.dtype == self.storage else _SUBSTITUTION
        starts = range(0, len(x), size)
        for start in starts:
            stop = start + size
            rest = x[start:stop] - exact_matmul(self._block(start, stop, 0, start), x[:start])
            x[start:stop] = torch.linalg.solve_triangular(
                self._block(start, stop, start, stop), rest, upper=False
            )
        for start in reversed(starts):
            stop = start + size
            rest = x[start:stop] - exact_matmul(self._block(stop, len(x), start, stop).T, x[stop:])
            x[start:stop] = torch.linalg.solve_triangular(
                self._block(start, stop, start, stop).T, rest, upper=True
            )
        return x.double()

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        return self.solve(b)

    def in_double(self) -> CholeskyFactor:
        return replace(self, storage=torch.float64)

    def _block(self, top: int, bottom: int, left: int, right: int) -> torch.Tensor:
        return self.lower[top:bottom, left:right].to(self.storage)


class NotPositiveDefiniteError(ArithmeticError):
    """A pivot is not positive: A, rounded to the format, is not positive definite.

    Attributes
    ----------
    order : int
        Of the leading minor that is not positive.
    """

    def __init__(self, order: int) -> None:
        super().__init__(f"the leading minor of order {order} is not positive")
        self.order = order


def cholesky(a: torch.Tensor, engine: Engine, *, panel: int = PANEL) -> CholeskyFactor:
    """Factorize ``A = L L^T``, in place.

    Parameters
    ----------
    a : Tensor, shape (n, n)
        Column-major in the engine's operand type; its lower triangle is read, and L takes its place.
        Elements should be scaled to the range of the format
        (:mod:`neula.algorithms.elimination.equilibrate`).
    engine : Engine
    panel : int
        Width of a block column.

    Returns
    -------
    CholeskyFactor

    Raises
    ------
    NotPositiveDefiniteError
        If a pivot is not positive.

    Examples
    --------
    >>> from neula.engines import EmulatedEngine
    >>> engine = EmulatedEngine(format="fp16")
    >>> a = engine.empty(2, 2).copy_(torch.tensor([[4.0, 2.0], [2.0, 5.0]]))
    >>> cholesky(a, engine).lower.tril()
    tensor([[2.0020, 0.0000],
            [0.9990, 2.0020]])
    """
    n = a.shape[0]
    low = engine.round(a, a)
    infos = []
    for start in range(0, n, panel):
        columns = slice(start, start + panel)
        column = engine.empty(n - start, min(panel, n - start)).copy_(low[start:, columns])
        column.diagonal().mul_(1 + SHIFT * engine.format.u)
        if start > 0:
            engine.gemm(low[start:, :start], low[columns, :start].T, column, alpha=-1.0, beta=1.0)
        infos.append(_factorize(column))
        engine.round(column, low[start:, columns])
    # Synchronizes once, at the end: where a block has no factor, what follows it is NaN.
    for block, info in enumerate(torch.stack(infos).tolist()):
        if info > 0:
            raise NotPositiveDefiniteError(block * panel + info)
    return CholeskyFactor(low, engine.storage)


def _factorize(column: torch.Tensor) -> torch.Tensor:
    """Turn an updated block column into one of L, in place; LAPACK's info."""
    width = column.shape[1]
    factor, info = torch.linalg.cholesky_ex(column[:width])
    column[:width] = factor.masked_fill_(info > 0, math.nan)
    column[width:] = torch.linalg.solve_triangular(factor, column[width:].T, upper=False).T
    return info
