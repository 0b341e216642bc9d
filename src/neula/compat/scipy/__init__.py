"""``scipy.linalg``, with the answers of neula: ``import neula.compat.scipy as la``.

All other names are SciPy's. ``overwrite_a``, ``overwrite_b`` and ``lwork`` have no effect: nothing is
overwritten.
"""

from __future__ import annotations

from scipy import linalg

from neula.compat.drop_in import names_of
from neula.compat.scipy.factors import (
    CholeskyPair,
    LUPair,
    cho_factor,
    cho_solve,
    cholesky,
    lu_factor,
    lu_solve,
)
from neula.compat.scipy.orthogonal import lstsq, orth, pinv, qr
from neula.compat.scipy.spectra import eigh, eigvalsh, fractional_matrix_power, sqrtm, svd, svdvals
from neula.compat.scipy.systems import AccuracyLinAlgWarning, det, inv, solve

__all__ = [
    "AccuracyLinAlgWarning",
    "CholeskyPair",
    "LUPair",
    "cho_factor",
    "cho_solve",
    "cholesky",
    "det",
    "eigh",
    "eigvalsh",
    "fractional_matrix_power",
    "inv",
    "lstsq",
    "lu_factor",
    "lu_solve",
    "orth",
    "pinv",
    "qr",
    "solve",
    "sqrtm",
    "svd",
    "svdvals",
]

__dir__, __getattr__ = names_of(linalg, globals())
