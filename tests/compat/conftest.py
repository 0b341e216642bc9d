"""Fixtures that tests of drop-ins share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import neula

NAMES = ("solve", "lstsq", "qr", "orth", "lu_factor", "lu_solve", "cholesky", "pinv", "eigh", "svd", "sqrtm")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Functions of neula that were called, in order."""
    names: list[str] = []

    def telling(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            return function(*args, **kwargs)

        return call

    for name in (*NAMES, "fractional_matrix_power"):
        monkeypatch.setattr(neula, name, telling(name, getattr(neula, name)))
    return names
