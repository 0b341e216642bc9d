"""Small least-squares problems on a CPU, from the matrix to the evidence, by a kernel in C.

The arithmetic of one takes a microsecond or some, as two calls of NumPy do; in a batch it is done while a
matrix is in the cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from neula.kernels.host_matrices import address_of, place_of, pointer_to
from neula.kernels.host_source import load
from neula.kernels.magnitudes import MODERATE
from neula.kernels.seminormal import NAMES, RefinementLimits

NUMBERS = (*NAMES, "steps", "way")
"""What is said of each problem, how many updates were made, and the last :class:`SolutionMethod`."""


class SolutionMethod(IntEnum):
    """How a problem is solved: by the factor of a Gram matrix; by shifted Cholesky QR where columns are too
    dependent for that; the shortest solution by the factor for few rows, and by pivots for dependent columns.
    """

    GRAM = 0
    SHIFTED = 1
    FEW_ROWS = 2
    DEPENDENT = 3


class Probes(NamedTuple):
    """Along what the rate of convergence is measured where columns are dependent.

    Attributes
    ----------
    vectors : array, shape (n, p)
        Random, float64, without gaps, whose images are as long as the norm of Frobenius says. Where p
        columns or fewer count, unit vectors take their place.
    margin : float
        By how much they may understate it.
    rounding : float
        What rounding errors make of it, for each column and unit of ``||R^-1||``.
    """

    vectors: np.ndarray
    margin: float
    rounding: float


class SeminormalHostSolutions:
    """Solutions with their evidence: NaN where numbers are not moderate, or no R is good enough.

    Parameters
    ----------
    written : array of float64
        All that the kernel has.
    count, n, k : int
        Problems, unknowns and right-hand sides.

    Attributes
    ----------
    numbers : array
        Of each problem :data:`NUMBERS`, one behind the other.
    forward_error, residual_norm : array
        Of each problem those of its right-hand sides.
    x : array, shape (batch, n, k)
        Rounded to the dtype that was asked for.
    """

    def __init__(self, written: np.ndarray, count: int, n: int, k: int) -> None:
        each, size = k * count, n * k * count
        self.x = written[:size].reshape(count, n, k)
        self.numbers = written[size : -2 * each]
        self.forward_error, self.residual_norm = written[-2 * each : -each], written[-each:]


def available() -> bool:
    """Whether there is a compiler."""
    return _function() is not None


def solved(
    a: torch.Tensor,
    b: torch.Tensor,
    dtype: torch.dtype,
    limits: RefinementLimits,
    backward: float = np.inf,
    condition: float = np.inf,
    *,
    rcond: float = 0.0,
    rounding: float = np.inf,
    probes: Probes | None = None,
) -> SeminormalHostSolutions | None:
    """Solve, refine and measure some problems; None where there is too little memory, or no compiler.

    Parameters
    ----------
    a : Tensor, shape (batch, m, n) or (m, n), m > 0, n > 0
        On the host, float64 or float32, of any strides.
    b : Tensor, shape (batch, m, k) or (m, k)
        Likewise.
    dtype : torch.dtype
        float64 or float32, to which x is rounded.
    limits : RefinementLimits
    backward : float, optional
        What the verdict allows as a backward error: problems with few rows are refined until they reach it.
    condition : float, optional
        What it allows as a condition number, unless columns are dependent: other factors are not tried.
    rcond : float, optional
        Singular values below this, of columns in units of their norms, times the largest do not count. Where
        that is in doubt there is no solution.
    rounding : float, optional
        Nor where dependent columns leave more than this of others.
    probes : Probes, optional
        Without them no columns are taken to be dependent.

    Examples
    --------
    >>> import torch
    >>> from neula.kernels.seminormal import RefinementLimits
    >>> from neula.kernels.seminormal_host import solved
    >>> limits = RefinementLimits(2.0**-54, 3, 0.25, 8.0, 2.0**-104, 2.0, 0.5, 1.0)
    >>> found = solved(torch.tensor([[3.0], [4.0]]), torch.tensor([[6.0], [8.0]]), torch.float64, limits)
    >>> found is None or found.x.item()
    2.0
    """
    function, (m, n), k = _function(), a.shape[-2:], b.shape[-1]
    count = len(a) if a.ndim == 3 else 1
    found, sizes = np.empty((len(NUMBERS) + (2 + n) * k) * count), (ctypes.c_long * 4)(count, m, n, k)
    given = pointer_to(a), pointer_to(b), sizes, _numbers(limits, backward, condition, rcond, rounding)
    of_rate = None if probes is None else _ProbesStructure.from_probes(probes)
    if function is None or not function(*given, of_rate, dtype == torch.float32, address_of(found)):
        return None
    return SeminormalHostSolutions(found, count, n, k)


class _ProbesStructure(ctypes.Structure):
    _fields_ = (
        ("vectors", ctypes.c_void_p),
        ("count", ctypes.c_long),
        ("margin", ctypes.c_double),
        ("rounding", ctypes.c_double),
    )

    @classmethod
    def from_probes(cls, probes: Probes) -> ctypes.Array[_ProbesStructure]:
        """A pointer to them, while they are kept alive."""
        vectors, margin, rounding = probes
        return (cls * 1)(cls(place_of(vectors), vectors.shape[1], margin, rounding))


@lru_cache(maxsize=64)
def _numbers(limits: RefinementLimits, *others: float) -> ctypes.Array[ctypes.c_double]:
    """``RefinementLimits`` of the kernel."""
    of = limits
    return (ctypes.c_double * 12)(
        *(of.tolerance, of.max_steps, of.max_rate, of.noise, of.floor, of.stagnation, of.computed),
        *(MODERATE, *others),
    )


@lru_cache(maxsize=1)
def _function() -> Callable[..., int] | None:
    library = load("seminormal")
    return None if library is None else library.seminormal
