"""The compiled core, ``neula._core``, for the instructions of this processor.

It is built from ``cpp/`` when neula is installed. Where there was no compiler it is missing; NumPy and LAPACK
then do the same in more time.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from neula._core import Core

LEVELS = {"AVX2": "avx2", "AVX512": "avx512"}
"""Builds of the core by torch's names of instruction sets, so that capping torch caps the core."""


DTYPES = (torch.float64, torch.float32)
"""Real dtypes of the core, some of whose kernels also take complex numbers with such parts: of others
``small_problems.embedding`` makes real matrices."""


@lru_cache(maxsize=1)
def core() -> Core | None:
    """The kernels, or None where there are none, or ``NEULA_CORE=none`` in the environment turns them off.

    Raises ImportError if the core was built with flags that change its arithmetic: its error bounds would not
    hold.

    Examples
    --------
    >>> found = core()
    >>> found is None or found.level in ("baseline", "avx2", "avx512")
    True
    """
    if os.environ.get("NEULA_CORE") == "none":
        return None
    try:
        module = import_module("neula._core")
    except ModuleNotFoundError:
        return None
    level = LEVELS.get(torch.backends.cpu.get_cpu_capability(), "baseline")
    found: Core = module.Core(level if level in module.levels() else "baseline")
    if not found.arithmetic_is_exact():
        raise ImportError(
            "neula._core was compiled with flags that change floating-point arithmetic (-ffast-math?): "
            "build it without them"
        )
    module.share_threads(_pool_of_torch())
    return found


def _pool_of_torch() -> int:
    """The address of GOMP_parallel in torch's OpenMP, whose threads the core shares; 0 without it."""
    with suppress(AttributeError, OSError):
        # Only a library that is loaded: another OpenMP would have threads of its own.
        openmp = ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_NOLOAD)
        return ctypes.cast(openmp.GOMP_parallel, ctypes.c_void_p).value or 0
    return 0


def description() -> str:
    """The core in a few words, for ``neula info``."""
    found = core()
    if found is not None:
        return found.level
    if os.environ.get("NEULA_CORE") == "none":
        return "turned off by NEULA_CORE=none"
    return "none: small problems on a CPU take longer"


_NUMPY = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.complex128: np.complex128,
    torch.complex64: np.complex64,
}


def empty(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Memory for results, of single or double precision, in half of the time that torch takes."""
    return torch.from_numpy(np.empty(shape, _NUMPY[dtype]))
