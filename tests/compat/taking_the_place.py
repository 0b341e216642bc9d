"""A pytest plugin for the test suites of SciPy and NumPy: they test :mod:`neula.compat`."""

from __future__ import annotations

from types import ModuleType

import pytest

from neula.compat import numpy, scipy
from neula.compat.scipy import optimize

PLACES = {
    "scipy.linalg": ("scipy.linalg", scipy),
    "scipy.optimize": ("scipy.optimize", optimize),
    "numpy.linalg": ("numpy.linalg", numpy),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        _replace(module, *PLACES[".".join(module.__name__.split(".")[:2])])


def _replace(module: ModuleType, peer: str, compat: ModuleType) -> None:
    """Names that a test module has of the peer, and the peer's module itself."""
    for name, value in vars(module).copy().items():
        if getattr(value, "__name__", None) == peer:
            setattr(module, name, compat)
        elif name in vars(compat) and getattr(value, "__module__", "").startswith(peer):
            setattr(module, name, vars(compat)[name])
