"""How much memory of a GPU a test's work takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def peak_beside(work: Callable[[], T]) -> tuple[T, int]:
    """What it returns, and the most bytes that it asks for at a time beside what there is.

    Blocks that an allocator gives out may be larger by a megabyte each, by what was freed before.
    """
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    found = work()
    return found, torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
