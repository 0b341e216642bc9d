"""Builds of the compiled core for fewer instructions than a processor has."""

from __future__ import annotations

import pytest

from neula import _core

LEVELS = ["baseline", "avx2", "avx512"]


def core_of(level: str) -> _core.Core:
    """The compiled core for an instruction set; the test is skipped where this processor has less."""
    if level not in _core.levels():
        pytest.skip(f"this processor has no {level}")
    return _core.Core(level)
