"""Small linear systems by a kernel in C: what :mod:`neula.algorithms.lapack.squares` defines, in one pass."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch

from neula.algorithms.krylov.batched_lstsq import PROBES, ROUNDING, probes
from neula.algorithms.krylov.doubled_refinement import COMPUTED, MAX_RATE
from neula.algorithms.lapack.square import ALIKE, MODERATE
from neula.algorithms.lapack.squares import DOUBLED_VECTORS, MARGINS
from neula.kernels.host_source import load

TOGETHER = 16
"""Order up to which systems of a batch are worked on side by side, one in each lane of a vector."""

THREADED = 1e6
"""Operations of a batch that are worth a second thread, which takes some 30 us to start."""

TAKEN = (torch.float64, torch.float32)
"""Dtypes of what the kernel reads, and of what it rounds x to."""


class _Limits(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_double)
        for name in (
            *("moderate", "alike", "max_rate", "rounding", "margin"),
            *("computed", "digits", "largest_error", "bound"),
        )
    ]


_OF_MATRICES = ("is_float", "batch", "row", "column")


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in ("count", "n", "k", "probes")),
        *((name, ctypes.c_void_p) for name in ("a", "b")),
        *((f"{x}_{name}", ctypes.c_long) for x in "ab" for name in _OF_MATRICES),
        *((name, ctypes.c_void_p) for name in ("z", "look")),
        ("x_is_float", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("x", "forward", "systems")),
        ("limits", ctypes.POINTER(_Limits)),
    ]


NAMES = ("accepted", "refined_error", "first_error", "backward_error", "condition", "growth")
"""What is known of each system: whether it is accepted (1 or 0), backward errors of what was refined, of what the
factors gave, and of x as it is given back, the condition number, and the growth of the elements."""


class Solved(NamedTuple):
    """Solutions with their evidence.

    Attributes
    ----------
    x : Tensor, shape (batch, n, k)
        float64, rounded to the dtype of the result.
    forward_error : Tensor, shape (batch, k)
        Bound on ``||D (x - x*)|| / ||D x*||``.
    systems : Tensor, shape (6, batch)
        What :data:`NAMES` says; of several right-hand sides the worst counts.
    """

    x: torch.Tensor
    forward_error: torch.Tensor
    systems: torch.Tensor


def solved(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, digits: float, largest_error: float, bound: float
) -> Solved | None:
    """Solve by LU with partial pivoting, update once, and measure; None where there is no compiler.

    Parameters
    ----------
    a : Tensor, shape (batch, n, n)
        float64 or float32, of any strides.
    b : Tensor, shape (batch, n, k)
    dtype : torch.dtype
        Of the result.
    digits, largest_error, bound : float
        Accepted is what is refined to that error, or as far as can be; a forward error, and a backward one.
    """
    count, n, k = b.shape
    together = n <= TOGETHER and count > 1
    library = load("squares_together" if together else "squares_alone")
    if library is None:
        return None
    z, look, margin = _vectors(n)
    limits = _Limits(MODERATE, ALIKE, MAX_RATE, ROUNDING, margin, COMPUTED, digits, largest_error, bound)
    room = torch.empty(count * (n * k + k + 6), dtype=torch.float64)
    x, forward, systems = room.split((count * n * k, count * k, 6 * count))
    batch = _Batch(
        *(count, n, k, len(z), a.data_ptr(), b.data_ptr()),
        *(a.dtype == torch.float32, *a.stride(), b.dtype == torch.float32, *b.stride()),
        *(z.data_ptr(), look.data_ptr(), dtype == torch.float32),
        *(x.data_ptr(), forward.data_ptr(), systems.data_ptr(), ctypes.pointer(limits)),
    )
    threads = 1 if count * n**3 < THREADED else torch.get_num_threads()
    if library.solve_squares(ctypes.byref(batch), ctypes.c_long(threads)):
        return None
    return Solved(x.view(count, n, k), forward.view(count, k), systems.view(6, count))


@lru_cache(maxsize=64)
def _vectors(n: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Vectors as rows that the norm of the inverse is known from, one to look at A with, and by how much the
    norm may exceed what is seen.
    """
    here = torch.device("cpu")
    z = probes(n, here, DOUBLED_VECTORS, unit=True).mT.contiguous()
    look = probes(n, here, 1, unit=False).flatten()
    return z, look, 1.0 if n <= PROBES else MARGINS[DOUBLED_VECTORS]
