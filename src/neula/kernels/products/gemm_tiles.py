"""How corrected products are cut up for thread blocks."""

from __future__ import annotations

from typing import NamedTuple

from neula.kernels.products.parts import Scheme


class GemmConfig(NamedTuple):
    """How the product is cut up."""

    # rows, columns: the tile of C of a thread block.
    rows: int
    columns: int
    run: int  # products that are summed on the unit before they are added outside; what is loaded at a time
    # warps, stages: warps of a thread block, and loads in flight.
    warps: int
    stages: int


def configs(scheme: Scheme) -> list[GemmConfig]:
    """How products may be cut up, what is best for large ones first."""
    run = 128 // scheme.dtype.itemsize
    if scheme.parts == 1:
        return [
            GemmConfig(128, 256, run, 8, 3),
            GemmConfig(128, 128, run, 8, 4),
            GemmConfig(64, 64, run, 4, 3),
        ]
    less = scheme.parts - 2  # a third part needs the room of a stage
    return [
        GemmConfig(128, 128, run, 8, 3 - less),
        GemmConfig(64, 128, run, 4, 2),
        GemmConfig(64, 64, run, 4, 3 - less),
        GemmConfig(64, 64, run // 2, 4, 2),
    ]
