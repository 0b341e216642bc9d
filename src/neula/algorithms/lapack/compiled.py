"""Small linear systems by a kernel in C: what :mod:`neula.algorithms.lapack.squares` defines, in one pass."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from neula.algorithms.krylov.batched_lstsq import PROBES, ROUNDING, probes
from neula.algorithms.lapack.square import ALIKE
from neula.certificates.forward_error import COMPUTED, ESTIMATED, MAX_RATE, inverse_margin
from neula.certificates.verdict import Evidence
from neula.kernels.host_matrices import empty
from neula.kernels.host_source import load
from neula.kernels.magnitudes import MODERATE

TOGETHER = 24
"""Order up to which systems of a batch are worked on side by side, one in each lane of a vector."""

THREADED = 1e5
"""From how many systems times the cube of their order on a second thread is worth the 30 us of its start."""

TAKEN = (torch.float64, torch.float32)
"""Dtypes of what the kernel reads, and of what it rounds x to."""


class _BatchLimitsStructure(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_double)
        for name in (*("moderate", "alike", "max_rate", "rounding", "margin", "computed", "digits"),)
    ]


_OF_MATRICES = ("is_float", "batch", "row", "column")


class _BatchStructure(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in ("count", "n", "k", "probes")),
        *((name, ctypes.c_void_p) for name in ("a", "b")),
        *((f"{x}_{name}", ctypes.c_long) for x in "ab" for name in _OF_MATRICES),
        ("vectors", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("definite", "x_is_float")),
        *((name, ctypes.c_void_p) for name in ("x", "known")),
        ("limits", ctypes.POINTER(_BatchLimitsStructure)),
    ]


NAMES = ("doubtful", "residual", "backward_error", "condition", "growth", "updates", *["history"] * 4)
"""Results of the kernel for each system, in the order of ``kernels/solved.h``: whether it is doubtful (1 or
0), ``||b - A x|| / ||b||`` and the backward error of x as it is returned, the condition number, the growth of
the elements, the number of updates; then backward errors before the first update and after each of them. The
last one is that of the refined solution before it is rounded."""


class CompiledSolutions(NamedTuple):
    """Solutions with their evidence.

    Attributes
    ----------
    x : Tensor, shape (..., n, k)
        float64, rounded to the dtype of the result.
    known : Tensor, shape (10 + k, ...)
        What :data:`NAMES` says, of several right-hand sides the worst; then for each a bound on its forward
        error ``||D (x - x*)|| / ||D x*||``.
    """

    x: torch.Tensor
    known: torch.Tensor

    @property
    def evidence(self) -> Evidence[Any]:
        """Evidence of each system: floats for one system, arrays for a batch."""
        numbers = self.known.numpy()
        forward_error = numbers[len(NAMES) :].max(0)
        known = numbers if numbers.ndim > 1 else numbers.tolist()
        doubtful, residual, backward_error, condition, *_, refined_error = known[: len(NAMES)]
        return Evidence(
            *(doubtful, residual, refined_error, backward_error, forward_error, ESTIMATED * condition)
        )


def available() -> bool:
    """Whether there is a kernel for one system: a compiler."""
    return _kernel(together=False) is not None


def solved(
    a: torch.Tensor,
    b: torch.Tensor,
    dtype: torch.dtype,
    digits: float,
    *,
    definite: bool = False,
) -> CompiledSolutions | None:
    """Solve by LU, update once, and measure; None where there is no compiler.

    Parameters
    ----------
    a : Tensor, shape (n, n) or (batch, n, n)
        float64 or float32, of any strides.
    b : Tensor, shape (n, k) or (batch, n, k)
    dtype : torch.dtype
        Of the result.
    digits : float
        Forward error to which solutions are refined; others are doubtful unless another update gains nothing.
    definite : bool, optional
        Whether matrices are to be eliminated without pivoting, as Cholesky's factors are made: those that
        are not symmetric and positive definite are doubtful.
    """
    *batch, n, k = b.shape
    count, own = (batch[0], ()) if batch else (1, (0,))
    solve = _kernel(n <= TOGETHER and count > 1)
    if solve is None:
        return None
    vectors, limits = _prepared(n, digits)
    x, known = empty(*b.shape), empty(len(NAMES) + k, *batch)
    given = _BatchStructure(
        *(count, n, k, len(vectors) - 1, a.data_ptr(), b.data_ptr()),
        *(a.dtype == torch.float32, *own, *a.stride(), b.dtype == torch.float32, *own, *b.stride()),
        *(vectors.data_ptr(), definite, dtype == torch.float32, x.data_ptr(), known.data_ptr(), limits),
    )
    threads = torch.get_num_threads() if count > 1 and count * n**3 >= THREADED else 1
    return None if solve(ctypes.byref(given), threads) else CompiledSolutions(x, known)


@lru_cache(maxsize=2)
def _kernel(together: bool) -> Callable[..., int] | None:
    library = load("squares_together" if together else "squares_alone")
    if library is None:
        return None
    function: Callable[..., int] = library.solve_squares
    library.solve_squares.argtypes = [ctypes.c_void_p, ctypes.c_long]
    return function


@lru_cache(maxsize=64)
def _prepared(n: int, digits: float) -> tuple[torch.Tensor, Any]:
    """Random vectors as rows: those that the norm of the inverse is known from, then one to look at A with;
    and limits.
    """
    here = torch.device("cpu")
    z, margin = probes(n, here), 1.0 if n <= PROBES else inverse_margin(PROBES)
    limits = _BatchLimitsStructure(MODERATE, ALIKE, MAX_RATE, ROUNDING, margin, COMPUTED, digits)
    return torch.cat([z, probes(n, here, 1, unit=False)], 1).mT.contiguous(), ctypes.pointer(limits)
