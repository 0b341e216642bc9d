"""What tests of linear systems share."""

from __future__ import annotations

import pytest

from neula.algorithms.lapack import compiled, factored
from neula.kernels.core import core


def without_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler."""
    for module in (compiled, factored):
        monkeypatch.setattr(module, "core", lambda: None)


@pytest.fixture(params=["kernels", "NumPy"])
def by_kernels_or_numpy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled core, and without it."""
    if request.param == "NumPy":
        without_core(monkeypatch)
    elif core() is None:
        pytest.skip("no compiled core")
