"""Fixtures that tests of linear systems share."""

from __future__ import annotations

import pytest

from neula.algorithms.elimination import compiled, factored
from neula.kernels.core import core
from neula.problems.systems import evidence, ways


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


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems of some hundred unknowns find their evidence as large ones do."""
    for module in (evidence, ways):
        monkeypatch.setattr(module, "COSTLY", 100)


@pytest.fixture
def by_krylov(costly: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large definite systems are solved by conjugate gradients as well."""
    monkeypatch.setattr(ways, "_by_krylov", lambda *_: True)
