"""neula: dense linear algebra on neural engines.

Say which accuracy you need; neula picks the cheapest arithmetic that reaches it, and the result carries
measured evidence that it did.
"""

from neula.lstsq import lstsq
from neula.lu import lu_factor, lu_solve
from neula.matmul import matmul
from neula.qr import orth, qr
from neula.result import (
    AccuracyError,
    AccuracyWarning,
    Attempt,
    IllConditionedWarning,
    LstsqResult,
    LUFactors,
    QRCertificate,
    QRResult,
    SolveResult,
    SVDResult,
)
from neula.solve import solve
from neula.svd import svd_lowrank
from neula.tsqr import tsqr

__version__ = "0.1.0"

__all__ = [
    "AccuracyError",
    "AccuracyWarning",
    "Attempt",
    "IllConditionedWarning",
    "LUFactors",
    "LstsqResult",
    "QRCertificate",
    "QRResult",
    "SVDResult",
    "SolveResult",
    "lstsq",
    "lu_factor",
    "lu_solve",
    "matmul",
    "orth",
    "qr",
    "solve",
    "svd_lowrank",
    "tsqr",
]
