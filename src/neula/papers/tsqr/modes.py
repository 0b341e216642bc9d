"""The paper's modes and their peer, and how a matrix is factorized in them."""

from __future__ import annotations

from typing import Any

import torch

import neula
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


def tsqr(a: torch.Tensor, mode: str, setting: Setting) -> QRResult:
    """Factorize in a mode: on tensor cores, or on their emulation where there are none."""
    engine: Any = setting.numerics.name
    return neula.tsqr(a, compute=mode, engine=engine)
