"""The paper's modes and their peer, and how a matrix is factorized in them."""

from __future__ import annotations

from functools import partial

import torch

import neula
from neula.algorithms.corrected import corrected_bmm
from neula.algorithms.orthogonal.tsqr import tsqr as tree
from neula.engines import EmulatedEngine
from neula.papers.figure import Setting
from neula.pipeline.result import QRResult

CORRECTED = FP16_COR, TF32_COR = "fp16_cor", "tf32_cor"
UNCORRECTED = FP16_NOCOR, TF32_NOCOR = "fp16_nocor", "tf32_nocor"
FP32_NOTC = "fp32_notc"
# item: T modes
MODES = (FP16_COR, FP16_NOCOR, TF32_COR, TF32_NOCOR, FP32_NOTC)
ACCURATE = (*CORRECTED, FP32_NOTC)
AUTO = "auto"
"""What neula does where no mode is named."""

HOUSEHOLDER = "torch.linalg.qr"
"""Householder QR of cuSOLVER on a GPU, of LAPACK on a CPU."""

COLUMNS = 128
BYTES = 40
"""Memory of an entry: A, Q, and the copies that they are made from."""


TRUNCATING, NEAREST, SLIDES = "emulated", "to nearest", "as in the slides"
"""Emulated units that truncate as an A100 does, or round to nearest; and the former in tiles of 256 rows,
with remainders that are scaled by 2^10.
"""
EMULATED_UP_TO = 1 << 13
"""Rows up to which units are emulated, in seconds."""
SLIDES_ROWS, SLIDES_SHIFT = 256, 10


def tsqr(a: torch.Tensor, mode: str, setting: Setting) -> QRResult:
    """Factorize in a mode: on tensor cores, or on their emulation where there are none."""
    return neula.tsqr(a, compute=mode, engine=setting.numerics)


def emulated(a: torch.Tensor, mode: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Q and R in a corrected mode on emulated units, by the names of the rows of data."""
    a, format = a.cpu(), mode.removesuffix("_cor")
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, unit in ((TRUNCATING, "a100"), (NEAREST, "ideal")):
        q, r = neula.tsqr(a, compute=mode, engine=EmulatedEngine(unit=unit))
        found[f"{mode}, {name}"] = q, r
    product = partial(corrected_bmm, engine=EmulatedEngine(format=format), shift=SLIDES_SHIFT)
    q, r = tree(a[None], product, tile_rows=SLIDES_ROWS)
    return found | {f"{mode}, {SLIDES}": (q[0], r[0])}
