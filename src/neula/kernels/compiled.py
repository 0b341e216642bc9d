"""``triton.jit``, where there is Triton: modules with kernels can be read without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton  # type: ignore[import-untyped, import-not-found]
except ImportError:
    triton = None


def require_triton(who_needs: str) -> None:
    """Raise where there is no Triton.

    Raises
    ------
    ImportError
        Which begins with ``who_needs``, as in "the tile kernel needs".
    """
    if triton is None:
        raise ImportError(f"{who_needs} Triton: pip install triton")


def jit(*sizes: str) -> Callable[[Callable], Any]:
    """Compile a function for GPUs, without a version for each kind of number in ``sizes``."""

    def compiled(function: Callable) -> Any:
        return function if triton is None else triton.jit(function, do_not_specialize=list(sizes))

    return compiled
