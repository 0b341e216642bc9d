"""Drop-ins and the functions that they replace: kinds of answers, errors, warnings, and residuals."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import scipy.linalg
import scipy.optimize
import torch

import neula
from neula.compat import numpy as np_compat
from neula.compat import scipy as sp_compat
from neula.compat import torch as torch_compat
from neula.compat.scipy import optimize as opt_compat

from ..matrices import ldexp, random_numbers
from ..recipes import Scope, Source
from ..verdict import Verdict, as_python

MODULES: dict[str, tuple[ModuleType, ModuleType]] = {
    "numpy": (np_compat, np.linalg),
    "scipy": (sp_compat, scipy.linalg),
    "torch": (torch_compat, torch.linalg),
    "optimize": (opt_compat, scipy.optimize),
}
CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "solve": lambda la, a, b: la.solve(a, b),
    "lstsq": lambda la, a, b: la.lstsq(a, b),
    "qr": lambda la, a, b: la.qr(a),
    "cholesky": lambda la, a, b: la.cholesky(a),
    "pinv": lambda la, a, b: la.pinv(a),
    "orth": lambda la, a, b: la.orth(a),
    "lu_factor": lambda la, a, b: tuple(la.lu_factor(a)),
    "lu_solve": lambda la, a, b: la.lu_solve(la.lu_factor(a), b),
    "lu_solve, trans": lambda la, a, b: la.lu_solve(la.lu_factor(a), b, trans=1),
    "nnls": lambda la, a, b: la.nnls(a, b),
    "lsq_linear": lambda la, a, b: la.lsq_linear(a, b, (-1.0, 1.0)).x,
}
COMMON = ("solve", "lstsq", "qr", "cholesky", "pinv")
FUNCTIONS = {
    "numpy": COMMON,
    "torch": COMMON,
    "scipy": (*COMMON, "orth", "lu_factor", "lu_solve", "lu_solve, trans"),
    "optimize": ("nnls", "lsq_linear"),
}
NEVER_END = ("lstsq", "pinv", "lsq_linear", "nnls")
"""With NaN and Inf, or without rows or columns, the library may hang or abort: it is not asked."""

ROUNDING = 1000
"""Backward errors may be so many times ``max(m, n) u``, or ten times the library's."""


@dataclass(frozen=True)
class DropInRecipe:
    """A call of a drop-in; sizes may be zero."""

    library: str
    function: str
    shape: tuple[int, ...]
    k: int | None
    kind: str
    dtype: str
    seed: int
    problem: str = "dropins"


def draw(source: Source, scope: Scope) -> DropInRecipe:
    library = source.choice(list(MODULES))
    function = source.choice(FUNCTIONS[library])
    m = source.choice([3, 1, 0, 2, 5, 12])
    square = function in ("solve", "cholesky") or function.startswith("lu") or source.integer(0, 2) == 0
    n = m if square and source.integer(0, 9) else source.choice([3, 1, 0, 2, 5, 12])
    batch = [(), (), (), (2,), (0,)] if library != "optimize" else [()]
    return DropInRecipe(
        library=library,
        function=function,
        shape=(*source.choice(batch), m, n),
        k=source.choice([None, None, 1, 0, 2]),
        kind=source.choice(
            ["normal", "normal", "integer", "ones", "zeros", "definite", "nan", "inf", "scaled"]
        ),
        dtype=source.choice(["float64", "float64", "float32", "int64", "bool", "float16", "complex128"]),
        seed=source.integer(0, 2**32 - 1),
    )


def numbers(recipe: DropInRecipe) -> tuple[np.ndarray, np.ndarray]:
    """A and b of a recipe."""
    rng = random_numbers(recipe.seed, is_complex=recipe.dtype == "complex128")
    shape, kind = recipe.shape, recipe.kind
    a = rng.standard_normal(shape)
    if kind in ("ones", "zeros"):
        a = np.full(shape, float(kind == "ones"))
    elif kind == "integer":
        a = rng.integers(-3, 4, shape) * 1.0
    elif kind == "definite" and shape[-1] == shape[-2]:
        a = a @ a.conj().swapaxes(-1, -2) + np.eye(shape[-1])
    elif kind == "scaled":
        a = ldexp(a, int(rng.integers(-20, 21)) if recipe.dtype != "float16" else 0)
    with np.errstate(all="ignore"):
        a = a.astype(recipe.dtype)
        if kind in ("nan", "inf") and a.size and a.dtype.kind in "fc":
            a.flat[rng.integers(a.size)] = float(kind)
        b = rng.standard_normal(shape[:-1] if recipe.k is None else (*shape[:-1], recipe.k))
        return a, b.astype(recipe.dtype)


def judge(recipe: DropInRecipe, device: str) -> tuple[Verdict, str]:
    """Compare with the library, where that may be asked."""
    verdict, (a, b) = Verdict(), numbers(recipe)
    ours, theirs = MODULES[recipe.library]
    call = CALLS[recipe.function]
    finite = bool(np.isfinite(a).all())
    shown = as_python(f"A = A.reshape({a.shape})  # {recipe.function} of {recipe.library}", A=a, b=b)
    found, told = _outcome(lambda: call(ours, *_given(recipe, a, b)))
    if recipe.function in NEVER_END and (not finite or (recipe.library == "optimize" and not a.size)):
        if not finite and not isinstance(found, Exception):
            verdict.add("unsound", "not finite", f"{found}")
        return verdict, shown
    if recipe.function == "lsq_linear" and recipe.dtype in ("float16", "float32"):  # not SciPy's
        return verdict, shown
    expected, warned = _outcome(lambda: call(theirs, *_given(recipe, a, b)))
    if told != warned and not isinstance(found, Exception):
        verdict.add("violation", "warnings", f"{told}, the library {warned}")
    if isinstance(expected, Exception) or isinstance(found, Exception):
        if (type(found), str(found)) != (type(expected), str(expected)) and not _nearly_singular(a):
            verdict.add("violation", "error", f"{found!r}, the library {expected!r}")
        return verdict, shown
    eps = float(np.finfo(found[0].dtype).eps) if found[0].dtype.kind in "fc" else 1.0
    if a.dtype == bool:  # versions of SciPy disagree
        found, expected = ([x.astype(float) for x in each] for each in (found, expected))
    if [(x.dtype, x.shape) for x in found] != [(x.dtype, x.shape) for x in expected]:
        if not _nearly_singular(a) and recipe.function != "orth":
            verdict.add("violation", "shapes", f"{[(x.dtype, x.shape) for x in found]}")
    elif finite and a.size and not _nearly_singular(a):
        error, other = (_residual(recipe, a, b, x) for x in (found, expected))
        size = ROUNDING * max(a.shape) * eps
        if not error <= max(size, 10 * other):
            verdict.add("unsound", "residual", f"{error}, of the library {other}")
    return verdict, shown


def _given(recipe: DropInRecipe, a: np.ndarray, b: np.ndarray) -> tuple[Any, Any]:
    return (torch.from_numpy(a), torch.from_numpy(b)) if recipe.library == "torch" else (a, b)


def _outcome(function: Callable[[], Any]) -> tuple[Any, set[type]]:
    """Arrays, or an error, and warnings that are not neula's."""
    with warnings.catch_warnings(record=True) as caught, np.errstate(all="ignore"):
        warnings.simplefilter("always")
        try:
            found = function()
            found = [np.asarray(x) for x in (found if isinstance(found, (tuple, list)) else (found,))]
        except Exception as error:  # an error of any kind is compared
            found = error
    ignored = (neula.AccuracyWarning, DeprecationWarning)  # which versions of a library give or do not
    return found, {w.category for w in caught if not issubclass(w.category, ignored)}


def _nearly_singular(a: np.ndarray) -> bool:
    """Whether rounding errors decide about the rank of one of the matrices."""
    if not a.size or a.ndim < 2 or not np.isfinite(a).all():
        return False
    wide = a.astype(np.complex128)
    u = float(np.finfo(a.dtype).eps) if a.dtype.kind in "fc" else 2.0**-52
    values = np.linalg.svd(wide, compute_uv=False)
    return bool((values[..., -1] <= 1000 * max(a.shape) * u * values[..., 0]).any())


def _residual(recipe: DropInRecipe, a: np.ndarray, b: np.ndarray, found: list[np.ndarray]) -> float:
    """Of an answer, relative to what it is made of."""
    a, b, name = a.astype(np.complex128), b.astype(np.complex128), recipe.function
    a = a.swapaxes(-1, -2) if name == "lu_solve, trans" else a
    x, norm = found[0].astype(np.complex128), np.linalg.norm
    h = a.conj().swapaxes(-1, -2)
    if name == "qr":
        return float(norm(x @ found[1] - a) / norm(a))
    if name == "cholesky":
        upper = recipe.library == "scipy"
        made = x.conj().swapaxes(-1, -2) @ x if upper else x @ x.conj().swapaxes(-1, -2)
        return float(norm((np.triu if upper else np.tril)(made - a)) / norm(a))
    if name == "pinv":
        return float(norm(a @ x @ a - a) / (norm(a) ** 2 * norm(x)))
    if name == "orth":
        return float(norm(x.conj().swapaxes(-1, -2) @ x - np.eye(x.shape[-1])))
    if name == "lu_factor":
        return 0.0
    if not b.size:
        return 0.0
    x, b = (y[..., None] if y.ndim < a.ndim else y for y in (x, b))
    r = b - a @ x
    # Of two bounded solutions, both of which are feasible, the residuals say enough.
    scale = norm(a) * norm(x) + norm(b)
    least = norm(h @ r) / norm(a) if name == "lstsq" and norm(a) else norm(r)
    return float(least / scale) if scale else 0.0
