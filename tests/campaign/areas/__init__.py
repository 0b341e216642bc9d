"""Kinds of problems with recipes and exact answers of their own, a module each.

A module defines ``draw(source, scope)``, which returns a frozen recipe with a field ``problem`` (the module's
name), and ``judge(recipe, device)``, which returns the verdict and the same call in Python.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

AREAS: dict[str, ModuleType] = {
    found.name: importlib.import_module(f"{__name__}.{found.name}")
    for found in pkgutil.iter_modules(__path__)
}
