"""Types of the public functions for type checkers: keywords, and NumPy arrays for NumPy arrays.

A test compares them with the functions, which also have defaults. Each class lists the keyword-only
parameters of the function that it is named after.
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

TableLike: TypeAlias = Any
"""Table of pandas, Polars or Arrow, or a dictionary of columns."""

BoundsLike: TypeAlias = Any
"""A pair of lower and upper bounds, array_like, or scipy.optimize.Bounds."""

NameOrFunction: TypeAlias = Any
"""One of several names, or a function."""

Array: TypeAlias = Any
"""An array of the library of the first argument."""

EngineName = Literal["auto", "cpu", "cuda", "emulated"]
ArithmeticName = FormatName | Literal["fp16_cor"]
Pivoting = Literal["partial", "none", "rbt"]
Structure = Literal["gen", "pos"]
Certified = Literal["backward", "forward"]
QRMode = Literal["reduced", "r", "complete", "raw"]


class Common(TypedDict, total=False):
    accuracy: Accuracy | None
    engine: EngineName | Engine
    strict: bool
    progress: Progress | bool | None


class Waiting(Common, total=False):
    wait: bool


class LstsqKeywords(Waiting, total=False):
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
    leverage: Any


class NNLSKeywords(Common, total=False):
    maxiter: int | None
    sum_to: float | None


class LsqLinearKeywords(Common, total=False):
    lsmr_maxiter: int | None
    constraints: Any


class FitKeywords(TypedDict, total=False):
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
    args: Iterable[Any]
    kwargs: Mapping[str, Any] | None
    blocks: Sequence[Any] | None


class CurveFitKeywords(FitKeywords, total=False):
    full_output: bool
    nan_policy: Literal["raise", "omit"] | None
    maxfev: int | None


class SolveKeywords(Waiting, total=False):
    assume_a: Structure
    pivot: Pivoting | None
    compute: FormatName | None
    max_iterations: int
    certify: Certified


class QRKeywords(Waiting, total=False):
    pivoting: bool
    algorithm: Literal["rgsqrf", "rgsqrf-twice", "rgsqrf-reortho", "cholesky-qr", "householder"] | None
    compute: ArithmeticName | None
    panel: Literal["caqr", "cholesky", "cholesky2", "cholesky32", "householder"] | None
    cutoff: int | None
    overwrite_a: bool


class TsqrKeywords(TypedDict, total=False):
    compute: str
    engine: EngineName | Engine
    strict: bool


class OrthKeywords(Waiting, total=False):
    method: Literal["qr", "polar"]


class PolarKeywords(Waiting, total=False):
    side: Literal["right", "left"] | None
    rcond: float | None
    completion: bool


class CholeskyKeywords(Waiting, total=False):
    upper: bool
    jitter: Literal["auto"] | None


class EigvalshKeywords(Common, total=False):
    upper: bool
    subset_by_index: tuple[int, int] | None
    subset_by_value: tuple[float, float] | None
    certify: Literal["a priori", "measured"] | None


class EighKeywords(EigvalshKeywords, total=False):
    eigvals_only: bool
    algorithm: Literal["divide"] | None


class SvdvalsKeywords(Common, total=False):
    certify: Literal["a priori", "measured"] | None


class FullSVDKeywords(SvdvalsKeywords, total=False):
    full_matrices: bool
    compute_uv: bool


class PowerKeywords(Common, total=False):
    upper: bool


class SVDKeywords(Common, total=False):  # of svd_lowrank
    tol: float | None
    algorithm: Literal["iteration", "gram-svd", "qr-svd"] | None


class LUKeywords(TypedDict, total=False):
    panel: int | None
    inner_panel: int | tuple[int, ...] | None
    pivot: Pivoting
    compute: FormatName | None
    storage: FormatName | None
    engine: EngineName | Engine
    keep_a: bool
    progress: Progress | bool | None


class LUSolveKeywords(TypedDict, total=False):
    trans: int
    refine: bool | None
    strict: bool


class MatmulKeywords(TypedDict, total=False):
    compute: str | None
    engine: EngineName | Engine
