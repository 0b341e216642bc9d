"""Kernels in C compile for every processor: where one does not, NumPy would take its place unnoticed."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from neula import kernels
from neula.kernels import host_source

FILES = sorted(path.stem for path in Path(kernels.__file__).parent.glob("*.c"))

KERNELS = [name for name in FILES if not any(name.startswith(f"{other}_") for other in FILES)]
"""Others are parts of these."""

CAPABILITIES = ["DEFAULT", *(host_source.INSTRUCTIONS if platform.machine() == "x86_64" else ())]


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    host_source._load.cache_clear()
    yield
    host_source._load.cache_clear()


@pytest.mark.skipif(host_source.compiler() is None, reason="no C compiler")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles(name: str, capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert host_source.load(name) is not None
