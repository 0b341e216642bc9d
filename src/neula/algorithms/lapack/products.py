"""Products and factors of one matrix, by NumPy and SciPy or by torch.

For small matrices NumPy takes a part of the time of torch, since a call costs half a microsecond. For larger
ones its BLAS takes threads of its own, and so does SciPy's: for milliseconds after a call they wait busily,
and take the processor from the threads of another library. So one library has all that is large: torch,
whose threads reflect and do everything else, too. A kernel that shares them takes one pass over what does not
fit a cache, and reads single precision as it is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
import torch
from scipy.linalg import lapack

from neula.engines import Tuning
from neula.kernels.one_pass_host import OnePass, takes

WIDE = 128
"""Order from which on a square matrix may be large: smaller ones take no threads for a Cholesky
factorization, nor for products with a vector."""

ALONE = 1 << 16
"""Elements of a matrix up to which NumPy multiplies by one vector, or by four, without threads: those of its
BLAS would wait for the processor while torch's wait busily for more work."""

PASSED = {4: 1 << 17, 8: 1 << 21}
"""Elements, by their bytes, from which one pass over a matrix takes less than the library's products: in
double precision where it does not fit a cache, in single where a copy in double takes time."""

HALVED = 128
"""Columns from which on a Gram matrix is worth the calls of two halves."""


def is_large(elements: int, tuning: Tuning) -> bool:
    """Whether torch is to multiply with a matrix of so many, and to factorize it: of one thread NumPy makes
    more.
    """
    return elements >= tuning.in_torch and torch.get_num_threads() > 1


class MatrixProducts(Protocol):
    """A matrix, and what is done with it in double precision."""

    def times(self, x: np.ndarray) -> np.ndarray:
        """``A x``, of one vector or of a few."""

    def transposed_times(self, y: np.ndarray) -> np.ndarray:
        """``A^T y``, likewise."""

    def gram_times(self, x: np.ndarray) -> np.ndarray:
        """``A^T A x`` of a few vectors."""

    def residual(self, b: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``r = b - A x``, and ``A^T r``."""


class InNumPy:
    """A small matrix."""

    def __init__(self, a: np.ndarray) -> None:
        self._a = in_double(a, large=False)
        self.times = self._a.dot

    def transposed_times(self, y: np.ndarray) -> np.ndarray:
        """``A^T y``."""
        return y.dot(self._a) if y.ndim == 1 else self._a.T.dot(y)

    def gram_times(self, x: np.ndarray) -> np.ndarray:
        """``A^T A x``; vectors as rows take half of the time."""
        return x.T.dot(self._a.T).dot(self._a).T

    def residual(self, b: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``r = b - A x``, and ``A^T r``."""
        residual = b - self.times(x)
        return residual, residual.dot(self._a)


class InTwoPasses(ABC):
    """A matrix that is read once for a product, and once more for one with its transpose."""

    @abstractmethod
    def times(self, x: np.ndarray) -> np.ndarray:
        """``A x``."""

    @abstractmethod
    def transposed_times(self, y: np.ndarray) -> np.ndarray:
        """``A^T y``."""

    def gram_times(self, x: np.ndarray) -> np.ndarray:
        """``A^T A x``."""
        return self.transposed_times(self.times(x))

    def residual(self, b: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``r = b - A x``, and ``A^T r``."""
        residual = b - self.times(x)
        return residual, self.transposed_times(residual)


class InTorch(InTwoPasses):
    """A large matrix."""

    def __init__(self, a: np.ndarray) -> None:
        self._a = torch.from_numpy(a).double()

    def times(self, x: np.ndarray) -> np.ndarray:
        return _product(self._a, x)

    def transposed_times(self, y: np.ndarray) -> np.ndarray:
        return _product(self._a.mT, y)


class Turned(InTwoPasses):
    """A matrix by its transpose: one whose columns follow one another, by rows that do."""

    def __init__(self, transposed: MatrixProducts) -> None:
        self._transposed = transposed

    def times(self, x: np.ndarray) -> np.ndarray:
        return self._transposed.transposed_times(x)

    def transposed_times(self, y: np.ndarray) -> np.ndarray:
        return self._transposed.times(y)


def _product(a: torch.Tensor, x: np.ndarray) -> np.ndarray:
    vectors = torch.from_numpy(x)
    # Products of a few rows take a third of the time of those of a few columns in MKL.
    found: np.ndarray = (a.mv(vectors) if x.ndim == 1 else (vectors.mT @ a.mT).mT).numpy()
    return found


def products(a: np.ndarray, *, large: bool) -> MatrixProducts:
    """What multiplies with a matrix, of float32 or float64, in double precision."""
    if passed(a):
        return OnePass(a) if takes(a) else Turned(OnePass(a.T))
    return InTorch(a) if large and a.size > ALONE else InNumPy(a)


def passed(a: np.ndarray) -> bool:
    """Whether a matrix is multiplied with as it is, by a kernel; in double precision columns go to the
    library, whose passes are as many.
    """
    large = a.size >= PASSED.get(a.itemsize, math.inf)
    return large and (takes(a) or (a.dtype == np.float32 and takes(a.T)))


def in_double(a: np.ndarray, *, large: bool) -> np.ndarray:
    """A matrix in double precision, converted by all threads where it is large."""
    found: np.ndarray = torch.from_numpy(a).double().numpy() if large else a.astype(np.float64, copy=False)
    return found


def gram_matrix(a: np.ndarray, *, large: bool) -> np.ndarray:
    """``A^T A``."""
    if not large:
        return a.T.dot(a)  # which is symmetric: half of the operations
    gram = np.empty((a.shape[1], a.shape[1]), a.dtype)
    _fill(torch.from_numpy(a), torch.from_numpy(gram))
    return gram


def _fill(a: torch.Tensor, gram: torch.Tensor) -> None:
    """A Gram matrix by halves, of which one product is that of the other transposed."""
    half = a.shape[1] // 2
    if half < HALVED:
        torch.mm(a.mT, a, out=gram)
        return
    left, right = a[:, :half], a[:, half:]
    _fill(left, gram[:half, :half])
    _fill(right, gram[half:, half:])
    torch.mm(right.mT, left, out=gram[half:, :half])
    gram[:half, half:].copy_(gram[half:, :half].mT)


def cholesky_factor(gram: np.ndarray, *, large: bool, clean: bool = True) -> np.ndarray | None:
    """L, column-major; None where there is none.

    Parameters
    ----------
    gram : array, shape (n, n)
        Of which the lower triangle is read.
    large : bool
    clean : bool, optional
        Whether zeros are to be above the diagonal.
    """
    if large:
        lower, info = torch.linalg.cholesky_ex(torch.from_numpy(gram))
        return None if int(info) else lower.numpy()
    factorize = lapack.dpotrf if gram.dtype == np.float64 else lapack.spotrf
    found, info = factorize(gram, lower=1, clean=clean)
    return None if info else found


def lu_factors(a: np.ndarray, *, large: bool) -> tuple[np.ndarray, np.ndarray] | None:
    """LU with partial pivoting in the form of SciPy, column-major; None where a pivot vanishes."""
    if large:
        factors, pivots, info = torch.linalg.lu_factor_ex(torch.from_numpy(a))
        return None if int(info) else (factors.numpy(), pivots.numpy() - 1)
    factors, pivots, info = (lapack.dgetrf if a.dtype == np.float64 else lapack.sgetrf)(a)
    return None if info else (factors, pivots)


def factorize(a: torch.Tensor, pivots: torch.Tensor, *, large: bool) -> bool:
    """LU with partial pivoting in the place of a column-major matrix; False where a pivot vanishes.

    Parameters
    ----------
    a : Tensor, shape (n, n)
    pivots : Tensor, shape (n,)
        int32, which is written to: in the form of SciPy.
    large : bool
    """
    if large:
        info = torch.empty((), dtype=torch.int32, device="cpu")
        torch.linalg.lu_factor_ex(a, out=(a, pivots, info))
        pivots -= 1
        return not int(info)
    library = lapack.dgetrf if a.dtype == torch.float64 else lapack.sgetrf
    _, places, failed = library(a.numpy(), overwrite_a=True)
    pivots.copy_(torch.from_numpy(places))
    return not failed


def factorize_definite(a: torch.Tensor, *, large: bool) -> bool:
    """Cholesky's L in the place of the lower triangle of a column-major matrix; False where there is none."""
    if large:
        info = torch.empty((), dtype=torch.int32, device="cpu")
        torch.linalg.cholesky_ex(a, out=(a, info))
        return not int(info)
    library = lapack.dpotrf if a.dtype == torch.float64 else lapack.spotrf
    return not library(a.numpy(), lower=1, clean=0, overwrite_a=1)[1]
