"""Results of the public functions: an answer, and the evidence for it."""

from neula.pipeline.result.attempts import (
    AccuracyError,
    AccuracyWarning,
    Attempt,
    IllConditionedWarning,
    logged,
    report_missed,
)
from neula.pipeline.result.bounded import BoundedResult, LsqLinearResult, NNLSResult
from neula.pipeline.result.certified import CertifiedResult
from neula.pipeline.result.cholesky import CholeskyResult
from neula.pipeline.result.eigh import EighResult, PowerResult
from neula.pipeline.result.factored import Factored, FactorSolution, FactorValue, SlogdetResult
from neula.pipeline.result.least_squares import LstsqResult
from neula.pipeline.result.lu import LUFactors
from neula.pipeline.result.nonlinear import CurveFitResult, LeastSquaresResult
from neula.pipeline.result.polar import PolarResult
from neula.pipeline.result.qr import QRResult
from neula.pipeline.result.ridge import RidgePath
from neula.pipeline.result.solution import SolutionResult, SolveResult
from neula.pipeline.result.svd import SVDResult

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
