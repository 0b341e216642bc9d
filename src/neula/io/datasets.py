"""Real least-squares problems with known answers that ship with the package."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.io
import torch

from neula.errors import unknown_name
from neula.io.expressions import Formula

SURVEYING_NAMES = ("well1033", "illc1033")
MAX_DIGITS = 15.0
"""The digits to which NIST certifies its coefficients: no answer counts as better."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class NistProblem:
    """A linear regression with coefficients certified by NIST.

    Attributes
    ----------
    name : str
        Name of the data set, in lower case.
    A : ndarray, shape (m, n), float64
        Design matrix, each entry correctly rounded from the published decimals.
    b : ndarray, shape (m,), float64
        Observed response.
    certified : ndarray, shape (n,), float64
        Certified coefficients, in the order of the columns of ``A``.
    residual_std : float
        Certified residual standard deviation ``||b - A x|| / sqrt(m - n)``.
    """

    name: str  # in lower case
    A: FloatArray  # design matrix, shape (m, n), each entry correctly rounded from the published decimals
    b: FloatArray  # observed response, shape (m,)
    certified: FloatArray  # coefficients, in the order of the columns of A
    residual_std: float  # certified, too: ||b - A x|| / sqrt(m - n)


def nist_names() -> tuple[str, ...]:
    """Names of the NIST linear-regression data sets.

    Returns
    -------
    tuple of str
        Names that :func:`nist` knows, in alphabetical order.

    Examples
    --------
    >>> len(nist_names())
    11
    """
    return tuple(sorted(_certified("nist_strd")))


def nist(name: str) -> NistProblem:
    """A data set of the NIST Statistical Reference Datasets for linear regression.

    Parameters
    ----------
    name : str
        One of :func:`nist_names`; upper and lower case are the same.

    Returns
    -------
    NistProblem

    Raises
    ------
    ValueError
        If the name is not known.

    Notes
    -----
    Powers are formed exactly from the decimal digits and rounded once, so ``A`` is the float64 matrix nearest
    to the certified problem. On the worst set (Filip, condition number 1.8e15) the exact solution for the
    rounded matrix agrees with the certified one to 7.7 digits: more is luck.

    References
    ----------
    .. [1] NIST Statistical Reference Datasets, https://www.itl.nist.gov/div898/strd/lls/lls.shtml

    Examples
    --------
    >>> problem = nist("filip")
    >>> problem.A.shape, problem.certified.shape
    ((82, 11), (11,))
    """
    key = _known(name, "NIST data set", nist_names())
    entry = _certified("nist_strd")[key]
    A, b = _as_published(key)
    return NistProblem(
        name=key,
        A=np.array([[float(v) for v in row] for row in A]),
        b=np.array([float(y) for y in b]),
        certified=np.array(entry["beta"], dtype=np.float64),
        residual_std=float(entry["rsd"]),
    )


@dataclass(frozen=True)
class NonlinearProblem:
    """A non-linear regression with parameters certified by NIST.

    Attributes
    ----------
    name : str
        Name of the data set, in lower case.
    formula : Formula
        The model, of the parameters ``b1``, ``b2``, ... and the predictors.
    predictors : dict of str to ndarray, shape (m,), float64
    y : ndarray, shape (m,), float64
        Observed response.
    starts : ndarray, shape (2, n), float64
        Parameters to begin with, the second ones nearer.
    certified : ndarray, shape (n,), float64
        Certified parameters, to 11 digits.
    standard_deviations : ndarray, shape (n,), float64
        Certified ones of the parameters.
    residual_sum_of_squares, residual_std : float
        Certified, too.
    difficulty : {"lower", "average", "higher"}
        NIST's.

    Examples
    --------
    >>> problem = nist_nonlinear("misra1a")
    >>> problem.formula.text, problem.parameters
    ('b1*(1-exp(-b2*x))', ('b1', 'b2'))
    >>> bool(abs((problem.residuals(problem.certified) ** 2).sum() - 0.12455138894) < 1e-11)
    True
    """

    name: str  # in lower case
    formula: Formula  # the model
    predictors: dict[str, FloatArray]  # shape (m,) each
    y: FloatArray  # observed response, shape (m,)
    starts: FloatArray  # parameters to begin with, shape (2, n), the second ones nearer
    certified: FloatArray  # parameters, shape (n,), to 11 digits
    standard_deviations: FloatArray  # certified, as all that follows
    residual_sum_of_squares: float
    residual_std: float
    difficulty: str  # "lower", "average" or "higher" (NIST's)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(f"b{k + 1}" for k in range(len(self.certified)))

    def predict(self, b: Any) -> Any:
        """The model at parameters b, shape (n,); of torch if b is a tensor."""
        return self.formula({**self._like(b, self.predictors), **dict(zip(self.parameters, b, strict=True))})

    def residuals(self, b: Any) -> Any:
        """Residuals of the model at parameters b."""
        return self.predict(b) - self._like(b, {"y": self.y})["y"]

    @staticmethod
    def _like(b: Any, arrays: dict[str, FloatArray]) -> dict[str, Any]:
        if not isinstance(b, torch.Tensor):
            return dict(arrays)
        return {name: torch.from_numpy(array).to(b.device) for name, array in arrays.items()}


def nist_nonlinear_names() -> tuple[str, ...]:
    """Names of the NIST non-linear regression data sets.

    Returns
    -------
    tuple of str
        Names that :func:`nist_nonlinear` knows, in alphabetical order.

    Examples
    --------
    >>> len(nist_nonlinear_names())
    27
    """
    return tuple(sorted(_certified("nist_nonlinear")))


def nist_nonlinear(name: str) -> NonlinearProblem:
    """A data set of the NIST Statistical Reference Datasets for non-linear regression.

    Parameters
    ----------
    name : str
        One of :func:`nist_nonlinear_names`; upper and lower case are the same.

    Returns
    -------
    NonlinearProblem

    Raises
    ------
    ValueError
        If the name is not known.

    References
    ----------
    .. [1] NIST Statistical Reference Datasets,
       https://www.itl.nist.gov/div898/strd/nls/nls_main.shtml

    Examples
    --------
    >>> problem = nist_nonlinear("MGH09")
    >>> problem.y.shape, problem.starts.shape
    ((11,), (2, 4))
    """
    key = _known(name, "NIST non-linear data set", nist_nonlinear_names())
    entry = _certified("nist_nonlinear")[key]
    names, *rows = _rows_of("nist_nonlinear", key)
    table = dict(zip(names, np.array(rows, dtype=np.float64).T.copy(), strict=True))
    return NonlinearProblem(
        name=key,
        formula=Formula.parse(entry["model"]),
        predictors={column: values for column, values in table.items() if column != "y"},
        y=Formula.parse(entry["response"])(table),
        starts=np.array([entry["start_1"], entry["start_2"]]),
        certified=np.array(entry["certified"]),
        standard_deviations=np.array(entry["standard_deviations"]),
        residual_sum_of_squares=entry["residual_sum_of_squares"],
        residual_std=entry["residual_standard_deviation"],
        difficulty=entry["difficulty"],
    )


def surveying(name: str) -> tuple[FloatArray, FloatArray]:
    """A surveying problem of Paige and Saunders, as a dense matrix.

    Parameters
    ----------
    name : {'well1033', 'illc1033'}
        The well-conditioned problem (condition number 166) or the ill-conditioned one (1.9e4).

    Returns
    -------
    A : ndarray, shape (1033, 320), float64
    b : ndarray, shape (1033,), float64

    Raises
    ------
    ValueError
        If the name is not known.

    References
    ----------
    .. [1] C. C. Paige and M. A. Saunders, "LSQR: An algorithm for sparse linear equations and sparse least
       squares", ACM Trans. Math. Software 8 (1982) 43-71.

    Examples
    --------
    >>> A, b = surveying("well1033")
    >>> A.shape, b.shape
    ((1033, 320), (1033,))
    """
    key = _known(name, "surveying problem", SURVEYING_NAMES)
    found = []
    for end in ("", "_rhs1"):
        with as_file(_data() / "lsq" / f"{key}{end}.mtx.gz") as file:
            found.append(scipy.io.mmread(file))
    return found[0].toarray(), found[1].ravel()


def data_names() -> dict[str, tuple[str, ...]]:
    """Names of all data sets, by kind.

    Returns
    -------
    dict of str to tuple of str
    """
    return {
        "surveying": SURVEYING_NAMES,
        "linear regression (NIST)": nist_names(),
        "non-linear regression (NIST)": nist_nonlinear_names(),
    }


def copy_data(name: str, folder: Path) -> list[Path]:
    """Copy the files of a data set into a folder, which is made if it does not exist.

    Parameters
    ----------
    name : str
        One of :func:`data_names`; upper and lower case are the same.
    folder : Path

    Returns
    -------
    list of Path
        The copies: of a surveying problem A and b, of a regression one table with the response ``y``.

    Raises
    ------
    ValueError
        If the name is not known.
    FileExistsError
        If the folder has another file of that name.
    NotADirectoryError
        If the folder is a file.
    """
    key = name.lower()
    surveys, linear, _ = data_names().values()
    if not any(key in names for names in data_names().values()):
        raise ValueError(f"unknown data set {name!r}: 'neula data' lists all of them")
    if key in surveys:
        sources = [_data() / "lsq" / f"{key}{end}.mtx.gz" for end in ("", "_rhs1")]
    else:
        sources = [_data() / ("nist_strd" if key in linear else "nist_nonlinear") / f"{key}.csv"]
    if folder.is_file():
        raise NotADirectoryError(f"{folder} is a file: name a folder, which is made if it does not exist")
    folder.mkdir(parents=True, exist_ok=True)
    copies = {folder / source.name: source.read_bytes() for source in sources}
    for path, content in copies.items():
        if path.exists() and path.read_bytes() != content:
            raise FileExistsError(f"{path} exists and is another file: choose another folder")
    for path, content in copies.items():
        path.write_bytes(content)
    return list(copies)


def log_relative_error(x: npt.ArrayLike, certified: npt.ArrayLike) -> float:
    """Correct decimal digits of the worst coefficient: NIST's log relative error (LRE).

    Parameters
    ----------
    x, certified : array_like, shape (n,)
        Computed and certified coefficients. Where a certified one is zero, the absolute error counts.

    Returns
    -------
    float
        ``min(-log10(|x - c| / |c|))``, between 0 (also for NaN) and 15, the digits that are certified.

    Raises
    ------
    ValueError
        If the shapes differ.

    Examples
    --------
    >>> round(log_relative_error([1.001, 2.0], [1.0, 2.0]), 3)
    3.0
    """
    computed, exact = np.asarray(x, dtype=np.float64), np.asarray(certified, dtype=np.float64)
    if computed.shape != exact.shape:
        raise ValueError(f"x has shape {computed.shape}, the certified coefficients {exact.shape}")
    worst = float(np.max(np.abs(computed - exact) / np.where(exact == 0, 1.0, np.abs(exact))))
    if np.isnan(worst):
        return 0.0
    # Inside 1e-15 .. 1, where the logarithm needs no care.
    return float(-np.log10(np.clip(worst, 10**-MAX_DIGITS, 1.0)))


def _data() -> Traversable:
    return files("neula") / "io" / "data"


def _known(name: str, kind: str, names: tuple[str, ...]) -> str:
    """A name in lower case, if there is such a data set."""
    key = str(name).lower()
    if key not in names:
        raise unknown_name(kind, name, names)
    return key


@lru_cache(maxsize=4)
def _certified(folder: str) -> dict[str, dict[str, Any]]:
    text = (_data() / folder / "certified.json").read_text(encoding="utf-8")
    return {name.lower(): entry for name, entry in json.loads(text).items()}


def _rows_of(folder: str, key: str) -> list[list[str]]:
    return list(csv.reader((_data() / folder / f"{key}.csv").read_text(encoding="utf-8").splitlines()))


def _as_published(key: str) -> tuple[list[list[Fraction]], list[Fraction]]:
    """Design matrix and response of a linear regression, without rounding."""
    entry = _certified("nist_strd")[key]
    b, *predictors = zip(
        *([Fraction(text) for text in row] for row in _rows_of("nist_strd", key)[1:]), strict=True
    )
    if entry["model"] == "polynomial":
        predictors = [tuple(x**k for x in predictors[0]) for k in range(entry["degree"] + 1)]
    elif entry["model"] == "linear with intercept":
        predictors.insert(0, (Fraction(1),) * len(b))
    return list(map(list, zip(*predictors, strict=True))), list(b)
