"""Kernels for the host, compiled for fewer lanes than a processor has."""

from __future__ import annotations

import ctypes
import platform

import pytest
import torch

from neula import _core
from neula.kernels import host_source

CAPABILITIES = ["DEFAULT", *(host_source.INSTRUCTIONS if platform.machine() == "x86_64" else ())]
LEVELS = ["baseline", "avx2", "avx512"]
HERE = torch.backends.cpu.get_cpu_capability()


def compiled_for(capability: str, name: str, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL | None:
    """A library as a processor of this capability has it; the test is skipped where this one has less."""
    order = ["DEFAULT", *host_source.INSTRUCTIONS]
    if HERE not in order or order.index(capability) > order.index(HERE):
        pytest.skip(f"this processor has no {capability}")
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        return host_source._load.__wrapped__(name)


def core_of(level: str) -> _core.Core:
    """The compiled core for an instruction set; the test is skipped where this processor has less."""
    if level not in _core.levels():
        pytest.skip(f"this processor has no {level}")
    return _core.Core(level)
