"""One linear system by LAPACK's factors, with its evidence by a kernel in C, in few passes.

The bounds are those of :mod:`neula.algorithms.lapack.squares`. How well factors solve is measured on the
random vectors that the norm of the inverse is known from.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from neula.algorithms.krylov.batched_lstsq import FEW, MARGINS, probes
from neula.algorithms.krylov.doubled_refinement import COMPUTED, MAX_RATE
from neula.algorithms.lapack.compiled import NAMES, Solved
from neula.algorithms.lapack.products import factorize
from neula.algorithms.lapack.square import ALIKE, MODERATE
from neula.kernels.host_source import load

LANES, GROUP, BESIDE = 8, 5, 10
"""Of ``kernels/factored.c``: lanes of the widest vector, columns that are solved for together, and columns
beside solutions, residuals and updates."""


class _Limits(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_double)
        for name in ("moderate", "alike", "max_rate", "margin", "computed", "largest_error", "bound")
    ]


class _System(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in ("n", "k", "wide")),
        *((name, ctypes.c_void_p) for name in ("a", "factors")),
        *((name, ctypes.c_long) for name in ("a_is_float", "factors_are_float")),
        *((name, ctypes.c_void_p) for name in ("pivots", "b", "vectors")),
        *((name, ctypes.c_long) for name in ("updates", "x_is_float")),
        *((name, ctypes.c_void_p) for name in ("room", "x", "known")),
        ("limits", ctypes.POINTER(_Limits)),
    ]


def solved_by_factors(
    a: torch.Tensor,
    b: torch.Tensor,
    dtype: torch.dtype,
    largest_error: float,
    bound: float,
    *,
    single: bool,
    large: bool,
) -> Solved | None:
    """Solve by LU with partial pivoting; with factors in single precision update once.

    None where there is no compiler, or a pivot vanishes.

    Parameters
    ----------
    a : Tensor, shape (n, n)
        float64 or float32, with contiguous rows.
    b : Tensor, shape (n, k)
    dtype : torch.dtype
        Of the result.
    largest_error, bound : float
        A forward error, and a backward one, up to which the solution is accepted.
    single : bool
        Whether to factorize in single precision.
    large : bool
        As of :mod:`neula.algorithms.lapack.products`.
    """
    library = _kernel()
    if library is None:
        return None
    n, k = b.shape
    wide = -(-n // LANES) * LANES + LANES
    columns = BESIDE + 3 * -(-(FEW + k) // GROUP) * GROUP
    vectors, sides = _vectors(n), b.mT.to(torch.float64).contiguous()
    factors = torch.empty(n, n, dtype=torch.float32 if single else torch.float64)
    pivots, room = torch.empty(n, dtype=torch.int32), torch.empty(columns * wide, dtype=torch.float64)
    x, known = torch.empty(k, n, dtype=torch.float64), torch.empty(len(NAMES) + k, dtype=torch.float64)
    limits = _Limits(MODERATE, ALIKE, MAX_RATE, MARGINS[FEW], COMPUTED, largest_error, bound)
    system = _System(
        *(n, k, wide, a.data_ptr(), factors.data_ptr(), a.dtype == torch.float32, single),
        *(pivots.data_ptr(), sides.data_ptr(), vectors.data_ptr(), single, dtype == torch.float32),
        *(room.data_ptr(), x.data_ptr(), known.data_ptr(), ctypes.pointer(limits)),
    )
    given = ctypes.byref(system)
    largest = library.copy_and_look(given)
    if not factorize(factors.mT, pivots, large=large):
        return None
    library.solve_factored(given, largest)
    return Solved(x.mT, known)


@lru_cache(maxsize=1)
def _kernel() -> ctypes.CDLL | None:
    library = load("factored")
    if library is not None:
        library.copy_and_look.argtypes, library.copy_and_look.restype = [ctypes.c_void_p], ctypes.c_double
        library.solve_factored.argtypes = [ctypes.c_void_p, ctypes.c_double]
    return library


@lru_cache(maxsize=64)
def _vectors(n: int) -> torch.Tensor:
    """Random vectors as rows: those that show the norm of the inverse, then one to look at A with."""
    here = torch.device("cpu")
    return torch.cat([probes(n, here, count, unit=False) for count in (FEW, 1)], 1).mT.contiguous()
