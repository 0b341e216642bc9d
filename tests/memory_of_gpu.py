"""Memory of a GPU that the work of a test takes, and whether it waits for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def peak_beside(work: Callable[[], T]) -> tuple[T, int]:
    """The result, and the most bytes that the work asks for at a time in addition to those before.

    Blocks that an allocator gives out may be larger by a megabyte each, by what was freed before.
    """
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    found = work()
    return found, torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


@contextmanager
def without_waiting() -> Iterator[None]:
    """An error for each operation inside that waits for the GPU."""
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
