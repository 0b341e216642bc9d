"""Retry in a chain of attempts when one of them runs out of memory."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from neula.engines import graphs
from neula.io.memory import sizes_here

_ASKED = re.compile(r"allocate ([\d.]+) (\w+)")
_TEXTS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


@dataclass
class MemoryGuard:
    """Attempts that may run out of memory, so that the next one, which may need less, has its turn."""

    device: torch.device
    # The missing memory of an attempt: "LU fp16 needed 2.00 GiB more, 1.25 GiB of 80.0 GiB free".
    shortages: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def attempt(self, label: str) -> Iterator[None]:
        """Carry on behind the block, whose temporary tensors are free then, if memory does not suffice."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error):
                raise
            self.shortages.append(f"{label} {_needed(error)}, {_free(self.device)}")
            if self.device.type == "cuda":
                graphs.clear()

    def raise_if_short(self) -> None:
        """Where no attempt gave an answer: raise torch.OutOfMemoryError if one had too little memory."""
        if self.shortages:
            raise torch.OutOfMemoryError(
                f"not enough memory on {self.device}: {'; '.join(self.shortages)}. Free memory, or "
                "pass fewer right-hand sides, smaller batches or a narrower dtype"
            )


def is_shortage(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # The allocator of the CPU, cuBLAS and cuSOLVER have no class of their own.
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def _needed(error: BaseException) -> str:
    found = _ASKED.search(str(error))
    if found is None:
        return "needed more than there was"
    size, unit = found.groups()
    return f"needed {_in_gib(int(size)) if unit == 'bytes' else f'{size} {unit}'} more"


def _free(device: torch.device) -> str:
    sizes = sizes_here()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # Reserved but unused memory of torch is free for torch.
        sizes = free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total
    if sizes is None:
        return "how much was free is not known"
    return f"{_in_gib(sizes[0])} of {_in_gib(sizes[1])} free"


def _in_gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
