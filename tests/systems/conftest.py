"""Fixtures that tests of linear systems share."""

from __future__ import annotations

import pytest

from neula.algorithms.elimination import compiled, factored
from neula.kernels.core import core


def without_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler."""
    for module in (compiled, factored):
        monkeypatch.setattr(module, "core", lambda: None)


@pytest.fixture(params=["core", "no core"])
def with_core_and_without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled core, and without it."""
    if request.param == "no core":
        without_core(monkeypatch)
    elif core() is None:
        pytest.skip("no compiled core")
