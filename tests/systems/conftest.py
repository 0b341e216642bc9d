"""What tests of linear systems share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from neula.algorithms.lapack import compiled, factored
from neula.kernels import host_source


@pytest.fixture
def forget() -> Iterator[Callable[[], None]]:
    """Makes the next call look for a compiler again."""

    def all_kernels() -> None:
        for cached in (host_source._load, compiled._kernel, factored._kernel):
            cached.cache_clear()

    yield all_kernels
    all_kernels()


@pytest.fixture(params=["kernels", "NumPy"])
def by_kernels_or_numpy(
    request: pytest.FixtureRequest, forget: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the C compiler that there is, and without one."""
    if request.param == "NumPy":
        monkeypatch.setenv("CC", "false")
    elif host_source.compiler() is None:
        pytest.skip("no C compiler")
    forget()
