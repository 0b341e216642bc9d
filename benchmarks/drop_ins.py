"""Functions of ``neula.compat`` beside those whose place they take, called in the same way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
import scipy.optimize
import sklearn.decomposition
import sklearn.linear_model
import torch

import neula.compat.numpy
import neula.compat.scipy
import neula.compat.scipy.optimize
import neula.compat.sklearn
import neula.compat.torch
from benchmarks.compared import FOLDER, MACHINES, milliseconds
from benchmarks.harness import Results
from neula.papers.data import ExperimentData
from neula.papers.measuring import rested_seconds

NAME = "drop_ins"

TALL = ((10, 3), (64, 32), (300, 40), (2000, 50), (2000, 500))
ORDERS = (3, 10, 50, 200, 1000)
POINTS = (20, 50, 200, 1000, 5000)

SLOWER, LATER = 1.25, 0.1
"""Limits on the time of a function: a multiple of the time of its peer, or milliseconds added to that."""

Call = Callable[[Any], Any]
"""Computation with a module, neula's or the other, or with a class of it."""

Peers = Mapping[str, tuple[Any, Any]]
PEERS: Peers = {
    "numpy.linalg": (neula.compat.numpy, np.linalg),
    "scipy.linalg": (neula.compat.scipy, scipy.linalg),
    "torch.linalg": (neula.compat.torch, torch.linalg),
    "scipy.optimize": (neula.compat.scipy.optimize, scipy.optimize),
    "sklearn.linear_model": (neula.compat.sklearn, sklearn.linear_model),
    "sklearn.decomposition": (neula.compat.sklearn, sklearn.decomposition),
}


def run(device: torch.device) -> Results:
    """Time all of them in float64, in the memory of the host."""
    results = Results(NAME, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for library, function, sizes, make in CASES:
            for size in sizes:
                calls = [partial(make(size), module) for module in PEERS[library]]
                for call in calls:
                    call()
                ours, peer = rested_seconds(calls, 0.4)
                results.add(
                    library=library,
                    function=function,
                    shape="x".join(map(str, size)) if isinstance(size, tuple) else str(size),
                    ms=1e3 * ours,
                    peer_ms=1e3 * peer,
                    ratio=peer / ours,
                    within=_is_within(1e3 * ours, 1e3 * peer),
                )
    return results


def _is_within(ms: float, peer_ms: float) -> bool:
    return ms <= max(SLOWER * peer_ms, peer_ms + LATER)


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def _of_matrix(use: Callable[[Any, np.ndarray, np.ndarray], Any]) -> Callable[[Any], Call]:
    """A call for a tall matrix and a vector."""

    def make(size: tuple[int, int]) -> Call:
        a, b = _normal(*size), _normal(size[0], seed=1)
        return lambda module: use(module, a, b)

    return make


def _of_system(use: Callable[[Any, np.ndarray, np.ndarray], Any]) -> Callable[[Any], Call]:
    def make(n: int) -> Call:
        a, b = _normal(n, n), _normal(n, seed=1)
        return lambda module: use(module, a, b)

    return make


def _of_definite(use: Callable[[Any, np.ndarray, np.ndarray], Any]) -> Callable[[Any], Call]:
    def make(n: int) -> Call:
        half, b = _normal(n, n), _normal(n, seed=1)
        a = half @ half.T / n + np.eye(n)
        return lambda module: use(module, a, b)

    return make


def _factorized(n: int) -> Call:
    """Solves with factors that each library has made once."""
    a, b, known = _normal(n, n), _normal(n, seed=1), dict[str, Any]()

    def use(module: Any) -> Any:
        factors = known.get(module.__name__) or known.setdefault(module.__name__, module.lu_factor(a))
        return module.lu_solve(factors, b)

    return use


def _decay(x: np.ndarray, p: float, q: float) -> np.ndarray:
    fitted: np.ndarray = p * np.exp(-q * x)
    return fitted


def _of_points(use: Callable[[Any, np.ndarray, np.ndarray], Any]) -> Callable[[Any], Call]:
    """A call for an exponential decay with noise."""

    def make(count: int) -> Call:
        x = np.linspace(0, 4, count)
        y = _decay(x, 2.5, 1.3) + 0.01 * _normal(count)
        return lambda module: use(module, x, y)

    return make


def _torchs(use: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> Callable[..., Any]:
    """The same with tensors, the vector as a column."""
    return lambda module, a, b: use(module, torch.from_numpy(a), torch.from_numpy(b)[:, None])


CASES: Sequence[tuple[str, str, Sequence[Any], Callable[[Any], Call]]] = [
    ("numpy.linalg", "lstsq", TALL, _of_matrix(lambda m, a, b: m.lstsq(a, b, rcond=None))),
    ("numpy.linalg", "qr", TALL, _of_matrix(lambda m, a, b: m.qr(a))),
    ("numpy.linalg", "pinv", TALL, _of_matrix(lambda m, a, b: m.pinv(a))),
    ("numpy.linalg", "solve", ORDERS, _of_system(lambda m, a, b: m.solve(a, b))),
    ("numpy.linalg", "cholesky", ORDERS, _of_definite(lambda m, a, b: m.cholesky(a))),
    ("scipy.linalg", "lstsq", TALL, _of_matrix(lambda m, a, b: m.lstsq(a, b))),
    ("scipy.linalg", "qr, economic", TALL, _of_matrix(lambda m, a, b: m.qr(a, mode="economic"))),
    ("scipy.linalg", "orth", TALL, _of_matrix(lambda m, a, b: m.orth(a))),
    ("scipy.linalg", "pinv", TALL, _of_matrix(lambda m, a, b: m.pinv(a))),
    ("scipy.linalg", "solve", ORDERS, _of_system(lambda m, a, b: m.solve(a, b))),
    ("scipy.linalg", "solve, pos", ORDERS, _of_definite(lambda m, a, b: m.solve(a, b, assume_a="pos"))),
    ("scipy.linalg", "cholesky", ORDERS, _of_definite(lambda m, a, b: m.cholesky(a))),
    ("scipy.linalg", "lu_factor", ORDERS, _of_system(lambda m, a, b: m.lu_factor(a))),
    ("scipy.linalg", "lu_solve", ORDERS, _factorized),
    ("torch.linalg", "lstsq", TALL, _of_matrix(_torchs(lambda m, a, b: m.lstsq(a, b)))),
    ("torch.linalg", "qr", TALL, _of_matrix(_torchs(lambda m, a, b: m.qr(a)))),
    ("torch.linalg", "pinv", TALL, _of_matrix(_torchs(lambda m, a, b: m.pinv(a)))),
    ("torch.linalg", "solve", ORDERS, _of_system(_torchs(lambda m, a, b: m.solve(a, b)))),
    ("torch.linalg", "cholesky", ORDERS, _of_definite(_torchs(lambda m, a, b: m.cholesky(a)))),
    ("scipy.optimize", "nnls", TALL, _of_matrix(lambda m, a, b: m.nnls(a, b))),
    ("scipy.optimize", "lsq_linear", TALL, _of_matrix(lambda m, a, b: m.lsq_linear(a, b, (-0.05, 0.1)))),
    ("scipy.optimize", "curve_fit", POINTS, _of_points(lambda m, x, y: m.curve_fit(_decay, x, y))),
    (
        "scipy.optimize",
        "least_squares",
        POINTS,
        _of_points(lambda m, x, y: m.least_squares(lambda t: _decay(x, *t) - y, [1.0, 1.0])),
    ),
    (
        "sklearn.linear_model",
        "LinearRegression",
        TALL,
        _of_matrix(lambda m, a, b: m.LinearRegression().fit(a, b)),
    ),
    ("sklearn.linear_model", "Ridge", TALL, _of_matrix(lambda m, a, b: m.Ridge().fit(a, b))),
    ("sklearn.linear_model", "RidgeCV", TALL, _of_matrix(lambda m, a, b: m.RidgeCV().fit(a, b))),
    ("sklearn.decomposition", "PCA", TALL, _of_matrix(lambda m, a, b: m.PCA(2).fit(a))),
    ("sklearn.decomposition", "TruncatedSVD", TALL, _of_matrix(lambda m, a, b: m.TruncatedSVD(2).fit(a))),
]


def of_drop_ins(folder: Path = FOLDER) -> Iterator[Sequence[str]]:
    """Times of both, from the smallest size to the largest; in bold what is slower than it may be."""
    rows = ExperimentData.read(folder / f"{NAME}-{MACHINES['CPU']}.json").rows
    sizes = zip(("x".join(map(str, size)) for size in TALL), ORDERS, POINTS, strict=True)
    yield "function", *("<br>".join(map(str, size)) for size in sizes)
    for library, function, _, _ in CASES:
        cells = []
        for row in rows.where(library=library, function=function):
            ms, peer = (milliseconds(row[name]) for name in ("ms", "peer_ms"))
            within = _is_within(row["ms"], row["peer_ms"])
            cells.append(f"{ms if within else f'**{ms}**'}&nbsp;/&nbsp;{peer}")
        yield f"`{library.partition('.')[0]}.{function}`", *cells
