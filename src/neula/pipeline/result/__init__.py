"""Results of the public functions: an answer, and the evidence for it."""

from neula.pipeline.result.attempts import (
    AccuracyError,
    AccuracyWarning,
    Attempt,
    IllConditionedWarning,
    logged,
    report_missed,
)
from neula.pipeline.result.factorizations import (
    CholeskyResult,
    Factored,
    FactorSolution,
    FactorValue,
    LUFactors,
    QRResult,
    SlogdetResult,
)
from neula.pipeline.result.nonlinear import CurveFitResult, LeastSquaresResult
from neula.pipeline.result.shown import CertifiedResult
from neula.pipeline.result.solutions import (
    BoundedResult,
    LsqLinearResult,
    LstsqResult,
    NNLSResult,
    RidgePath,
    SolutionResult,
    SolveResult,
)
from neula.pipeline.result.spectra import EighResult, PolarResult, PowerResult, SVDResult

__all__ = [
    "AccuracyError",
    "AccuracyWarning",
    "Attempt",
    "BoundedResult",
    "CertifiedResult",
    "CholeskyResult",
    "CurveFitResult",
    "EighResult",
    "FactorSolution",
    "FactorValue",
    "Factored",
    "IllConditionedWarning",
    "LUFactors",
    "LeastSquaresResult",
    "LsqLinearResult",
    "LstsqResult",
    "NNLSResult",
    "PolarResult",
    "PowerResult",
    "QRResult",
    "RidgePath",
    "SVDResult",
    "SlogdetResult",
    "SolutionResult",
    "SolveResult",
    "logged",
    "report_missed",
]
