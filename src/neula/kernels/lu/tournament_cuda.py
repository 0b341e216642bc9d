"""The kernel of :mod:`neula.kernels.lu.tournament`, in CUDA C++, compiled by NVRTC at the first call.

CUDA rather than Triton, for the reasons of ``cholesky_cuda``: a thread keeps its rows in
registers, and a column is one maximum over a warp, one barrier, and the subtraction of a row from the others.
"""

from __future__ import annotations

import math

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.lu.tournament import TILE, PanelFactors

MACROS = f"#define TILE {TILE}\n"


def play_cuda(block: torch.Tensor, found: PanelFactors, start: int, count: int) -> None:
    """:func:`neula.kernels.lu.tournament.play` by the kernel, queued on the current stream.

    Raises
    ------
    ImportError
        Without a torch that compiles CUDA.
    """
    tensors, numbers = arguments(block, found, start)
    with torch.cuda.device_of(block):
        kernel = compiled("tournament", "tournament", block.device, MACROS)
        kernel((-(-len(block) // TILE), 1, 1), (TILE, 1, 1), [*tensors, *numbers, count])


def arguments(
    block: torch.Tensor, found: PanelFactors, start: int
) -> tuple[list[torch.Tensor], tuple[int, int, int]]:
    """Arguments of the kernel, except for the number of pivots."""
    index = start // block.shape[1]
    candidates, arrived = found.room.chunk(2)
    dropped = round(math.log2(torch.finfo(found.low).eps / torch.finfo(torch.float32).eps))
    blocks = [found.factors[index], found.l_inverses[index], found.u_inverses[index]]
    return [block, found.places, found.pivots, *blocks, candidates, arrived], (dropped, len(block), start)
