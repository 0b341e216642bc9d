"""Dense linear algebra on tensor cores and CPUs, with a measured error bound on every result.

You choose the accuracy. neula tries the cheapest arithmetic that can reach it, measures the answer, and
retries in higher precision if the measurement fails.
"""

from __future__ import annotations

from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neula import distributed as distributed
    from neula.certificates.qr_evidence import QRCertificate
    from neula.pipeline.chain import finish
    from neula.pipeline.result import (
        AccuracyError,
        AccuracyWarning,
        Attempt,
        CholeskyResult,
        CurveFitResult,
        EighResult,
        IllConditionedWarning,
        LeastSquaresResult,
        LsqLinearResult,
        LstsqResult,
        LUFactors,
        NNLSResult,
        PolarResult,
        PowerResult,
        QRResult,
        RidgePath,
        SolveResult,
        SVDResult,
    )
    from neula.problems.bounded.lsq_linear import lsq_linear, nnls
    from neula.problems.definite.cholesky import cholesky
    from neula.problems.least_squares.held_open import LeastSquares
    from neula.problems.least_squares.lstsq import fit_formula, lstsq
    from neula.problems.least_squares.pinv import pinv
    from neula.problems.least_squares.ridge_path import ridge_path
    from neula.problems.low_rank.svd import svd_lowrank
    from neula.problems.nonlinear.curve_fit import curve_fit
    from neula.problems.nonlinear.least_squares import least_squares
    from neula.problems.operators import registered as ops  # noqa: F401
    from neula.problems.orthogonal.orth import orth
    from neula.problems.orthogonal.qr import qr
    from neula.problems.orthogonal.tsqr import tsqr
    from neula.problems.polar.polar import polar
    from neula.problems.products.matmul import matmul
    from neula.problems.spectra.eigh import eigh, eigvalsh
    from neula.problems.spectra.powers import fractional_matrix_power, inv_sqrt, sqrtm
    from neula.problems.spectra.svd import svd, svdvals
    from neula.problems.systems.lu import lu_factor
    from neula.problems.systems.lu_solve import lu_solve
    from neula.problems.systems.solve import solve

__version__ = "0.1.0"

__all__ = [
    "AccuracyError",
    "AccuracyWarning",
    "Attempt",
    "CholeskyResult",
    "CurveFitResult",
    "EighResult",
    "IllConditionedWarning",
    "LUFactors",
    "LeastSquares",
    "LeastSquaresResult",
    "LsqLinearResult",
    "LstsqResult",
    "NNLSResult",
    "PolarResult",
    "PowerResult",
    "QRCertificate",
    "QRResult",
    "RidgePath",
    "SVDResult",
    "SolveResult",
    "cholesky",
    "curve_fit",
    "eigh",
    "eigvalsh",
    "finish",
    "fit_formula",
    "fractional_matrix_power",
    "inv_sqrt",
    "least_squares",
    "lsq_linear",
    "lstsq",
    "lu_factor",
    "lu_solve",
    "matmul",
    "nnls",
    "orth",
    "pinv",
    "polar",
    "qr",
    "ridge_path",
    "solve",
    "sqrtm",
    "svd",
    "svd_lowrank",
    "svdvals",
    "tsqr",
]

_HOMES = {
    "LeastSquares": "problems.least_squares.held_open",
    "QRCertificate": "certificates.qr_evidence",
    "cholesky": "problems.definite.cholesky",
    "eigh": "problems.spectra.eigh",
    "eigvalsh": "problems.spectra.eigh",
    "fractional_matrix_power": "problems.spectra.powers",
    "inv_sqrt": "problems.spectra.powers",
    "sqrtm": "problems.spectra.powers",
    "svd": "problems.spectra.svd",
    "svdvals": "problems.spectra.svd",
    "finish": "pipeline.chain",
    "fit_formula": "problems.least_squares.lstsq",
    "lsq_linear": "problems.bounded.lsq_linear",
    "curve_fit": "problems.nonlinear.curve_fit",
    "least_squares": "problems.nonlinear.least_squares",
    "lstsq": "problems.least_squares.lstsq",
    "lu_factor": "problems.systems.lu",
    "lu_solve": "problems.systems.lu_solve",
    "matmul": "problems.products.matmul",
    "nnls": "problems.bounded.lsq_linear",
    "orth": "problems.orthogonal.orth",
    "pinv": "problems.least_squares.pinv",
    "polar": "problems.polar.polar",
    "qr": "problems.orthogonal.qr",
    "ridge_path": "problems.least_squares.ridge_path",
    "solve": "problems.systems.solve",
    "svd_lowrank": "problems.low_rank.svd",
    "tsqr": "problems.orthogonal.tsqr",
}
"""Where the functions and the certificate live; all other public names are results."""

_MODULES = {
    "algorithms": "algorithms",
    "compat": "compat",
    "distributed": "distributed",
    "engines": "engines",
    "io": "io",
    "jax": "jax",
    "ops": "problems.operators.registered",
    "sklearn": "sklearn",
}
"""Public modules, and where they live."""

_ROOMS = ("certificates", "cli", "errors", "kernels", "papers", "pipeline", "problems")
"""Modules that need no import of their own, and are not listed."""


_importing = RLock()  # threads that import a package and its parts at once may wait for one another

if not TYPE_CHECKING:  # type checkers would believe in any name

    def __getattr__(name: str) -> Any:
        """Import a public name when it is used first: ``import neula`` alone does not import torch."""
        with _importing:
            if name in _ROOMS:
                return import_module(f"neula.{name}")
            if name in _MODULES:
                return import_module(f"neula.{_MODULES[name]}")
            if name not in __all__:
                raise AttributeError(f"module 'neula' has no attribute {name!r}{_meant(name)}")
            found = getattr(import_module(f"neula.{_HOMES.get(name, 'pipeline.result')}"), name)
            globals()[name] = found
            return found


def _meant(name: str) -> str:
    """A suggestion for a misspelled public name, to append to an error message."""
    from difflib import get_close_matches

    if name.startswith("_"):
        return ""
    near = get_close_matches(name.lower(), [x.lower() for x in __all__], 1)
    near = near or [x for x in __all__ if x.startswith(name)][:1]
    return "".join(f": did you mean {x!r}?" for x in __all__ if x.lower() in near)


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__, *_MODULES})
