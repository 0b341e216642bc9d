"""Types of the public functions for type checkers: keywords, and NumPy arrays for NumPy arrays.

The functions say the same, with defaults; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

import numpy as np
from torch import Tensor

from neula.certificates.bounds import Accuracy
from neula.engines import Engine
from neula.engines.formats import FormatName
from neula.pipeline.progress import Progress

Kind = TypeVar("Kind", "np.ndarray[Any, Any]", Tensor)
"""The library of the first array, in which answers are given. Of other array_likes nothing is known."""

ArrayLike: TypeAlias = Any
"""NumPy array, torch tensor, any array with DLPack, data frame or list; checked when it is passed."""

Array: TypeAlias = Any
"""An array of the library of the first argument."""

EngineName = Literal["auto", "cpu", "cuda", "emulated"]
ArithmeticName = FormatName | Literal["fp16_cor"]
Pivoting = Literal["partial", "none", "rbt"]
Structure = Literal["gen", "pos"]
Certified = Literal["backward", "forward"]
QRMode = Literal["reduced", "r", "complete", "raw"]


class Common(TypedDict, total=False):
    """Keywords of nearly every function."""

    accuracy: Accuracy | None
    engine: EngineName | Engine
    strict: bool
    progress: Progress | bool | None


class Waiting(Common, total=False):
    """Keyword of functions that need not wait."""

    wait: bool


class LstsqKeywords(Waiting, total=False):
    """Keywords of :func:`neula.lstsq`."""

    algorithm: Literal["cgls", "lsqr", "direct", "normal", "householder", "svd"] | None
    compute: ArithmeticName | None
    damp: float
    intercept: bool
    weights: Any
    sigma: Any
    sample_weight: Any
    constraints: tuple[Any, Any] | None
    covariance: Any
    covariance_factor: Any
    rcond: float | None
    max_iterations: int
    certify: Certified


class RidgeKeywords(Common, total=False):
    """Keywords of :func:`neula.ridge_path`."""

    leverage: Any


class NNLSKeywords(Common, total=False):
    """Keywords of :func:`neula.nnls`."""

    maxiter: int | None
    sum_to: float | None


class LsqLinearKeywords(Common, total=False):
    """Keywords of :func:`neula.lsq_linear`, without what can be given by place."""

    lsmr_maxiter: int | None
    constraints: Any


class FitKeywords(TypedDict, total=False):
    """Keywords of :func:`neula.least_squares` and :func:`neula.curve_fit`."""

    ftol: float | None
    xtol: float | None
    gtol: float | None
    x_scale: Any
    loss: Literal["linear", "soft_l1", "huber", "cauchy", "arctan"] | Callable[[Any], Any]
    f_scale: Any
    diff_step: Any
    max_nfev: int | None
    verbose: Literal[0, 1, 2]
    callback: Callable[..., Any] | None
    engine: EngineName | Engine
    strict: bool
    progress: Progress | bool | None


class LeastSquaresKeywords(FitKeywords, total=False):
    """Keywords of :func:`neula.least_squares`, after the method."""

    args: Iterable[Any]
    kwargs: Mapping[str, Any] | None
    blocks: Sequence[Any] | None


class CurveFitKeywords(FitKeywords, total=False):
    """Keywords of :func:`neula.curve_fit`, after the Jacobian."""

    full_output: bool
    nan_policy: Literal["raise", "omit"] | None
    maxfev: int | None


class SolveKeywords(Waiting, total=False):
    """Keywords of :func:`neula.solve`."""

    assume_a: Structure
    pivot: Pivoting | None
    compute: FormatName | None
    max_iterations: int
    certify: Certified


class QRKeywords(Waiting, total=False):
    """Keywords of :func:`neula.qr`, without the mode."""

    pivoting: bool
    algorithm: Literal["rgsqrf", "rgsqrf-twice", "rgsqrf-reortho", "cholesky-qr", "householder"] | None
    compute: ArithmeticName | None
    panel: Literal["caqr", "cholesky", "cholesky2", "cholesky32", "householder"] | None
    cutoff: int | None
    overwrite_a: bool


class TsqrKeywords(TypedDict, total=False):
    """Keywords of :func:`neula.tsqr`, without the mode."""

    compute: str
    engine: EngineName | Engine
    strict: bool


class OrthKeywords(Waiting, total=False):
    """Keywords of :func:`neula.orth`, without ``rcond``."""

    method: Literal["qr", "polar"]


class PolarKeywords(Waiting, total=False):
    """Keywords of :func:`neula.polar`."""

    side: Literal["right", "left"] | None
    rcond: float | None
    completion: bool


class CholeskyKeywords(Waiting, total=False):
    """Keywords of :func:`neula.cholesky`."""

    upper: bool
    jitter: Literal["auto"] | None


class EigvalshKeywords(Common, total=False):
    """Of :func:`neula.eigvalsh`."""

    upper: bool
    subset_by_index: tuple[int, int] | None
    subset_by_value: tuple[float, float] | None
    certify: Literal["a priori", "measured"] | None


class EighKeywords(EigvalshKeywords, total=False):
    """Of :func:`neula.eigh`."""

    eigvals_only: bool
    algorithm: Literal["divide"] | None


class SvdvalsKeywords(Common, total=False):
    """Of :func:`neula.svdvals`."""

    certify: Literal["a priori", "measured"] | None


class FullSVDKeywords(SvdvalsKeywords, total=False):
    """Of :func:`neula.svd`."""

    full_matrices: bool
    compute_uv: bool


class PowerKeywords(Common, total=False):
    """Of :func:`neula.fractional_matrix_power` and the square roots."""

    upper: bool


class SVDKeywords(Common, total=False):
    """Keywords of :func:`neula.svd_lowrank`, without the rank."""

    tol: float | None
    algorithm: Literal["iteration", "gram-svd", "qr-svd"] | None


class LUKeywords(TypedDict, total=False):
    """Keywords of :func:`neula.lu_factor`, without the variant."""

    panel: int | None
    inner_panel: int | tuple[int, ...] | None
    pivot: Pivoting
    compute: FormatName | None
    storage: FormatName | None
    engine: EngineName | Engine
    keep_a: bool
    progress: Progress | bool | None


class LUSolveKeywords(TypedDict, total=False):
    """Keywords of :func:`neula.lu_solve`."""

    trans: int
    refine: bool | None
    strict: bool


class MatmulKeywords(TypedDict, total=False):
    """Keywords of :func:`neula.matmul`."""

    compute: str | None
    alpha: float
    beta: float
    out: Any
    engine: EngineName | Engine
