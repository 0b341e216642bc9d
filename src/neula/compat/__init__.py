"""Drop-in modules: the signatures of ``numpy.linalg``, ``scipy.linalg`` and ``torch.linalg``.

``import neula.compat.numpy as la`` in place of ``import numpy.linalg as la`` is all that a program needs. The
functions of neula answer, with the return values, defaults and exceptions of the library whose place they
take; everything else is the library's own. :func:`patched` and ``python -m neula.compat script.py`` put
them into a whole program as it is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neula.compat.patching import patched as patched

__all__ = ["numpy", "patched", "scipy", "torch"]


def __getattr__(name: str) -> Any:
    """Import a module when it is used first, so that ``neula.compat.scipy`` does not need another import."""
    if name not in __all__:
        raise AttributeError(f"module 'neula.compat' has no attribute {name!r}: it has {', '.join(__all__)}")
    if name == "patched":
        return import_module("neula.compat.patching").patched
    return import_module(f"neula.compat.{name}")
