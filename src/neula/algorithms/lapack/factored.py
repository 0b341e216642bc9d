"""One linear system by LU factors, with its evidence by a kernel in C, in few passes.

The bounds are those of :mod:`neula.algorithms.lapack.squares`. How well factors solve is measured on the
random vectors that the norm of the inverse is known from.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from neula.algorithms.krylov.batched_lstsq import FEW, MARGINS, probes
from neula.algorithms.lapack.compiled import NAMES, CompiledSolutions
from neula.algorithms.lapack.products import factorize, factorize_definite
from neula.algorithms.lapack.square import ALIKE, MODERATE
from neula.certificates.forward_error import COMPUTED, MAX_RATE
from neula.kernels.host_matrices import empty
from neula.kernels.host_source import load

LANES, GROUP, BESIDE, MOST_THREADS = 8, 6, 4, 64
"""Of ``kernels/factored.c``: lanes of the widest vector, columns that are multiplied by together, columns
beside solutions, residuals, updates and two of each thread, and how many of these there may be."""

BLOCK, MOST_BLOCKS, LINE = 32, 128, 64
"""Of ``kernels/lu_blocks.h``: columns of a block, how many blocks there may be, and bytes of a line of the
cache."""

THREADED = 1 << 16
"""Elements from which on several threads take less time than one, order 256: those of torch's pool, which
wait for work, begin within some microseconds."""


class _SystemLimitsStructure(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in ("moderate", "alike", "max_rate", "margin", "computed")]


class _SystemStructure(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in ("n", "k", "threads", "wide")),
        *((name, ctypes.c_void_p) for name in ("a", "factors")),
        *((name, ctypes.c_long) for name in ("apart", "a_is_float", "factors_are_float")),
        *((name, ctypes.c_void_p) for name in ("pivots", "b", "vectors")),
        *((name, ctypes.c_long) for name in ("updates", "x_is_float")),
        *((name, ctypes.c_void_p) for name in ("room", "x", "known")),
        ("limits", ctypes.POINTER(_SystemLimitsStructure)),
    ]


def solved_by_factors(
    a: torch.Tensor,
    b: torch.Tensor,
    dtype: torch.dtype,
    *,
    single: bool,
    large: bool,
    in_blocks: int = 0,
    definite: bool = False,
) -> CompiledSolutions | None:
    """Solve by LU with partial pivoting, or by a Cholesky factor; of single precision update once.

    None where there is no compiler, where a pivot vanishes, and where A is not definite.

    Parameters
    ----------
    a : Tensor, shape (n, n)
        float64 or float32, with contiguous rows.
    b : Tensor, shape (n, k)
    dtype : torch.dtype
        Of the result.
    single : bool
        Whether to factorize in single precision.
    large : bool
        As of :mod:`neula.algorithms.lapack.products`.
    in_blocks : int, optional
        Order up to which the kernel makes LU factors, too, instead of LAPACK.
    definite : bool, optional
        Whether A is symmetric and to be positive definite.
    """
    library = _kernel()
    if library is None:
        return None
    n, k = b.shape
    wide = -(-n // LANES) * LANES + LANES
    threads = min(torch.get_num_threads(), MOST_THREADS) if n * n >= THREADED else 1
    columns = BESIDE + 2 * threads + 3 * -(-(k + FEW + 1) // GROUP) * GROUP
    vectors, sides = _vectors(n), empty(k, n).copy_(b.mT)
    blocked = not definite and n <= min(in_blocks, BLOCK * MOST_BLOCKS)
    factors, apart = _room_of_factors(n, torch.float32 if single else torch.float64, blocked=blocked)
    pivots, room = torch.empty(n, dtype=torch.int32, device="cpu"), empty(columns * wide)
    x, known = empty(k, n), empty(len(NAMES) + k)
    system = _SystemStructure(
        *(n, k, threads, wide, a.data_ptr(), factors.data_ptr(), apart, a.dtype == torch.float32, single),
        *(pivots.data_ptr(), sides.data_ptr(), vectors.data_ptr(), single, dtype == torch.float32),
        *(room.data_ptr(), x.data_ptr(), known.data_ptr(), _limits()),
    )
    given = ctypes.byref(system)
    if blocked:
        done = library.solve_in_blocks(given) != 0
    else:
        largest = library.copy_and_look(given)
        done = (
            factorize_definite(factors.mT, large=large)
            if definite
            else factorize(factors.mT, pivots, large=large)
        )
        if done:
            (library.solve_definite if definite else library.solve_factored)(given, largest)
    return CompiledSolutions(x.mT, known) if done else None


def _room_of_factors(n: int, dtype: torch.dtype, *, blocked: bool) -> tuple[torch.Tensor, int]:
    """Memory for factors of order n, and how many numbers there are from one line to the next.

    Lines of blocks are an odd number of lines of the cache: columns of a panel are read together, and others
    would have the same places in a cache at some orders.
    """
    if not blocked:
        return torch.empty(n, n, dtype=dtype, device="cpu"), n
    numbers = LINE // dtype.itemsize
    apart = (-(-n // numbers) | 1) * numbers
    # torch aligns it to lines.
    return torch.empty(-(-n // BLOCK) * BLOCK, apart, dtype=dtype, device="cpu"), apart


@lru_cache(maxsize=1)
def _kernel() -> ctypes.CDLL | None:
    library = load("factored")
    if library is not None:
        library.copy_and_look.argtypes, library.copy_and_look.restype = [ctypes.c_void_p], ctypes.c_double
        for solve in (library.solve_factored, library.solve_definite):
            solve.argtypes = [ctypes.c_void_p, ctypes.c_double]
        library.solve_in_blocks.argtypes = [ctypes.c_void_p]
    return library


@lru_cache(maxsize=1)
def _limits() -> Any:
    return ctypes.pointer(_SystemLimitsStructure(MODERATE, ALIKE, MAX_RATE, MARGINS[FEW], COMPUTED))


@lru_cache(maxsize=64)
def _vectors(n: int) -> torch.Tensor:
    """Random vectors as rows: those that show the norm of the inverse, then one to look at A with."""
    here = torch.device("cpu")
    return torch.cat([probes(n, here, count, unit=False) for count in (FEW, 1)], 1).mT.contiguous()
