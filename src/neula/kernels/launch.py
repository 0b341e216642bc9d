"""Distribution of a kernel's work over thread blocks: functions that several launches share."""

from __future__ import annotations

from functools import lru_cache

import torch

VECTOR = 4
"""Elements of float32 that a thread loads at a time, where rows or columns begin and end at multiples."""


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; two for Triton's interpreter, so that work is distributed."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def ceil_div(total: int, each: int) -> int:
    """Thread blocks for so much, each with so much."""
    return -(-total // each)


def next_power_of_2(n: int) -> int:
    """The smallest that is at least n, and at least 1."""
    return 1 << max(0, n - 1).bit_length()


def share(total: int, among: int, multiple: int) -> int:
    """Work for each of ``among`` thread blocks, a multiple of ``multiple``."""
    return ceil_div(ceil_div(total, among), multiple) * multiple


def elements_at_a_time(a: torch.Tensor) -> int:
    """:data:`VECTOR`, in half precision twice as many, or 1: elements that a kernel can load at a time of a
    matrix, or of each of a batch.
    """
    *batch, row, column = a.stride()
    length, apart, unit = (a.shape[-2], column, row) if row == 1 else (a.shape[-1], row, column)
    sizes = (length, apart, *batch, a.data_ptr() // a.element_size())
    vector = VECTOR * 4 // min(4, a.element_size())
    return vector if unit == 1 and all(size % vector == 0 for size in sizes) else 1
