"""Processes for all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from over_processes.processes import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """Four processes with Gloo between them."""
    found = Processes(4)
    yield found
    found.stop()
