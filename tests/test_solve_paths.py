"""neula.solve on every path for every kind of system: accepted, and no error exceeds its bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.matrices import definite, with_condition
from tests.systems.conftest import without_core

import neula
from campaign.oracle import system
from neula.certificates.bounds import solve_bound
from neula.engines import FORMATS, CpuEngine, EmulatedEngine, Engine
from neula.engines.shipped import cuda_tuning
from neula.engines.tuning import Tuning
from neula.io.matrices import KINDS, random_matrix

N = 60
GPU = replace(cuda_tuning((9, 0), replayed_bytes=1 << 20, corrected=False), normal_equations=0)
INVERTED = replace(cuda_tuning((9, 0)), queued=0, queued_definite=0, inverted_whole=40, inverted_from=1)


def tuned(kind: type[Engine], tuning: Tuning) -> Engine:
    """A CPU that takes the steps of another machine."""
    return type("Tuned", (kind,), {"tuning": tuning})("cpu")


def low_first(kind: type[Engine]) -> Engine:
    """Low precision comes first for small systems, too."""
    return tuned(kind, replace(kind("cpu").tuning, direct=1, direct_definite=1))


PATHS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "without the core": {},
    "certified forward": {"certify": "forward"},
    "cpu, low precision first": {"engine": low_first(CpuEngine)},
    "emulated": {"engine": low_first(EmulatedEngine)},
    "emulated, forward": {"engine": low_first(EmulatedEngine), "certify": "forward"},
    "butterflies": {"engine": tuned(CpuEngine, GPU)},
    "normal equations": {"engine": tuned(CpuEngine, replace(GPU, normal_equations=400))},
    "half precision of a GPU": {"engine": tuned(EmulatedEngine, replace(GPU, harmless=100))},
    "blocks of columns": {"engine": tuned(CpuEngine, replace(GPU, double_cholesky=20, double_block=16))},
    "inverted blocks": {"engine": tuned(EmulatedEngine, INVERTED)},
    "parts of a batch": {"engine": tuned(CpuEngine, replace(GPU, chunk_elements=512))},
}
FIXED = {
    f"{pivot} {compute}": {"engine": "emulated", "pivot": pivot, "compute": compute}
    for pivot in ("none", "rbt", "partial")
    for compute in ("fp16", "fp32", "fp64")
}
"""Without another arithmetic where one does not do."""

Made = tuple[np.ndarray, np.ndarray]


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def normal(n: int, k: int = 2) -> Made:
    return rng().standard_normal((n, n)), rng().standard_normal((n, k))


def scaled(rows: float, columns: float) -> Made:
    """Units over so many decades; b has those of the rows."""
    a, b = with_condition(rng(), N, N, 1e3), rng().standard_normal((N, 2))
    r, c = 10.0 ** np.linspace(-rows, rows, N)[:, None], 10.0 ** np.linspace(-columns, columns, N)
    return r * a * rng().permutation(c), r * b


def dominant() -> Made:
    """The matrices of HPL-AI: uniform (0, 1), with n on the diagonal."""
    a = rng().random((N, N))
    np.fill_diagonal(a, N)
    return a, rng().standard_normal((N, 2))


def in_the_range(condition: float, n: int = N) -> Made:
    a = with_condition(rng(), n, n, condition)
    return a, a @ rng().standard_normal((n, 2))


def growing() -> Made:
    """Wilkinson's matrix, column-major: elements double in each step of LU with partial pivoting."""
    a = np.asfortranarray(np.eye(N) - np.tril(np.ones((N, N)), -1))
    a[:, -1] = 1
    return a, rng().standard_normal((N, 2))


CASES: dict[str, Callable[[], Made]] = {
    **{f"order {n}": partial(normal, n) for n in (1, 2, 7, 33)},
    "many right-hand sides": partial(normal, N, 80),
    **{kind: lambda kind=kind: (random_matrix(kind, N, N, cond=1e4).numpy(), normal(N)[1]) for kind in KINDS},
    "dominant": dominant,
    **{f"condition {c:.0e}": partial(in_the_range, c) for c in (1e2, 1e6, 1e10, 5e12)},
    "order 130": partial(in_the_range, 1e5, 130),
    "rows reversed": lambda: (np.eye(N)[::-1].copy(), normal(N)[1]),
    "growing": growing,
    "graded rows": partial(scaled, 100, 0),
    "graded columns": partial(scaled, 0, 100),
    "graded": partial(scaled, 20, 20),
    **{f"size {s}": lambda s=s: (s * normal(N)[0], s * normal(N)[1]) for s in (1e-290, 1e-30, 1e30, 1e290)},
    "tiny right-hand sides": lambda: (normal(N)[0], 1e-200 * normal(N)[1]),
    "a zero right-hand side": lambda: (normal(N)[0], normal(N)[1] * [0.0, 1.0]),
}
SIZES = (1e-200, 1e200)
DEFINITE: dict[str, Callable[[], Made]] = {
    **{
        f"definite {c:.0e}": lambda c=c: (definite(rng(), N, c), normal(N)[1]) for c in (10.0, 1e4, 1e8, 1e12)
    },
    "definite of order 130": lambda: (definite(rng(), 130, 1e4), normal(130)[1]),
    "definite of order 1": lambda: (np.array([[3.0]]), np.array([[2.0, 0.0]])),
    "definite in units": lambda: units_of(definite(rng(), N, 10.0)),
    **{
        f"definite, size {s}": lambda s=s: (s * definite(rng(), N, 10.0), normal(N)[1])
        for s in (1e-200, 1e200)
    },
}


def units_of(a: np.ndarray) -> Made:
    units = 2.0 ** np.linspace(-200, 200, N).round()[:, None]
    return units * a * units.T, units * normal(N)[1]


UNSOLVED = {("without the core", "growing"), ("inverted blocks", "growing")}
"""And said to be: no digit is left after LU with partial pivoting, which is all that there is."""

PERHAPS = {("emulated", "growing"), ("emulated, forward", "growing")}
"""Where the order of sums, another one on each processor, decides whether a digit is left."""


def check(a: np.ndarray, b: np.ndarray, found: Any, u: float) -> None:
    """By the exact solution of what was given: the bound on the forward error, and the backward error.

    Rigal and Gaches' in the infinity norm, where sums do not overflow.
    """
    wide, right, x = (np.asarray(v, dtype=np.float64) for v in (a, b, found.x))
    assert found.converged
    assert (system(wide, right).errors(x, len(a)) <= found.forward_errors).all()
    size = np.abs(wide).max()
    if 1e-150 < size < 1e150:
        residual = np.abs(right - wide @ x).max(0)
        size = np.abs(wide).sum(1).max() * np.abs(x).max(0) + np.abs(right).max(0)
        assert (residual <= (solve_bound(FORMATS["fp64"], len(a)) + 4 * u) * size).all()


PAIRS = [
    (path, case)
    for i, path in enumerate(PATHS)
    for j, case in enumerate([*CASES, *DEFINITE])
    if (i + j) % 2 == 0 or path == "cpu" or (path, case) in UNSOLVED
]
"""All systems on the first path; every other one on others, in turns."""


@pytest.mark.filterwarnings("ignore::neula.IllConditionedWarning")
@pytest.mark.parametrize(("path", "case"), PAIRS)
def test_every_path_for_every_system(path: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "without the core":
        without_core(monkeypatch)
    a, b = {**CASES, **DEFINITE}[case]()
    before = a.copy(), b.copy()
    options = {**PATHS[path], "assume_a": "pos" if case in DEFINITE else "gen"}
    if path == "parts of a batch":
        found = neula.solve(np.stack([a, a, a]), np.stack([b, b, b]), **options)
        found = replace(found, x=found.x[2], forward_errors=found.forward_errors[2])
    else:
        found = neula.solve(a, b, **options)
    assert np.array_equal(a, before[0])
    assert np.array_equal(b, before[1])
    if (path, case) in UNSOLVED:
        assert not found.converged
        return
    if (path, case) in PERHAPS and not found.converged:
        return
    check(a, b, found, 2.0**-53)


@pytest.mark.parametrize("path", FIXED)
def test_what_is_fixed_solves_what_is_easy(path: str) -> None:
    a, b = dominant()
    check(a, b, neula.solve(a, b, **FIXED[path]), 2.0**-53)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 7, 64])
def test_narrow_dtypes(path: str, dtype: str, n: int) -> None:
    a = (normal(n)[0] + 2 * n**0.5 * np.eye(n)).astype(dtype)
    b = normal(n)[1].astype(dtype)
    found = neula.solve(a, b, **PATHS[path])
    assert found.x.dtype == a.dtype
    check(a, b, found, float(np.finfo(dtype).eps))


@pytest.mark.parametrize("path", PATHS)
def test_what_is_not_finite_is_refused(path: str) -> None:
    a, b = normal(9)
    with pytest.raises(ValueError, match=r"b\[1, 0\] is inf"):
        neula.solve(a, np.where(np.arange(18).reshape(9, 2) == 2, np.inf, b), **PATHS[path])
    a[4, 1] = np.nan
    with pytest.raises(ValueError, match=r"A\[4, 1\] is nan"):
        neula.solve(a, b, **PATHS[path])
