"""Whether a kernel can run on a device: found out by trying."""

from __future__ import annotations

import warnings
from collections.abc import Callable


def can_run(attempt: Callable[[], object], what: str, instead: str) -> bool:
    """Try a kernel: Triton may be missing, too old for the GPU, or without a C compiler.

    Parameters
    ----------
    attempt : callable
        Imports the kernel and launches it on something small.
    what, instead : str
        For the warning where Triton is there and fails: which kernel on which device, and what takes its
        place.
    """
    try:
        attempt()
    except ImportError:
        return False
    except Exception as error:
        warnings.warn(
            f"Triton cannot run {what}; {instead}. Triton says: {error}", RuntimeWarning, stacklevel=4
        )
        return False
    return True
