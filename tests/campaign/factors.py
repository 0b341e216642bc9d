"""Verdicts on factorizations and products: LAPACK's test ratios are below 30, or there was a warning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from neula.engines import FORMATS
from neula.engines.formats import Arithmetic

from . import more, ratios
from .calls import Answer, as_array
from .matrices import exponent_of, ldexp
from .oracle import LeastSquares, System
from .recipes import Example, keywords, trans_of
from .verdict import Verdict, is_default, limits_of, spacing_of, unit_roundoff

OTHERS = more.RATIOS.keys()
"""Problems whose results :mod:`tests.campaign.more` judges."""

OUTPUTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    **dict.fromkeys(("qr", "tsqr", "svd", "pivoted"), tuple),
    **dict.fromkeys(("orth", "matmul", "pinv"), lambda result: (result,)),
    "lu": lambda result: (result[0].L, result[0].U, result[1]),
    "cholesky": lambda result: (result.L,),
    "polar": lambda result: (result.U, result.H, result.ranks),
}
"""The arrays of a result."""

MAY_OVERFLOW = 2.0**1000
"""From elements of this size on norms of columns may exceed float64."""


SINGULAR = 0.01
"""Condition number, in units of ``1 / (n u)``, from which on a warning is no false alarm."""

TINY = 100
"""Multiple of the smallest normal number below which a column is tiny."""


def judge_factors(example: Example, answer: Answer, verdict: Verdict) -> None:
    """Add what is wrong with an answer of qr, tsqr, orth, svd_lowrank, lu_factor or matmul."""
    recipe = example.recipe
    if recipe.problem == "lu" and answer.error is None and not answer.warned:
        _judge_solution(example, as_array(answer.result[1]), verdict)
    if answer.error is not None:
        allowed = more.may_raise if recipe.problem in OTHERS else _may_raise
        if not allowed(example, answer.error):
            verdict.add("violation", "raised", f"{type(answer.error).__name__}: {answer.error}")
        return
    if recipe.problem == "matmul" and _product_overflows(example):
        return
    try:
        measured = _worst(_ratios(example, answer.result))
    except OverflowError:  # factors of a mixed matrix in a narrow dtype
        return
    verdict.numbers.append(
        {
            "ratios": list(measured),
            "errors": list(measured.values()),
            "forward_errors": [ratios.THRESHOLD] * len(measured),
            "accepted": not answer.warned,
            "warned": answer.warned,
        }
    )
    if not answer.warned:
        for name, ratio in measured.items():
            if not ratio < ratios.THRESHOLD:
                verdict.add("unsound", name, f"test ratio {ratio:.3g}")
    elif not is_default(example) or (recipe.problem in ("qr", "tsqr", "pivoted") and _overflows(example)):
        return
    elif not _has_tiny_column(example) and not _deserves_warning(example):
        verdict.add("false alarm", "warning", f"every matrix has a factorization; {measured}")


def _judge_solution(example: Example, x: np.ndarray, verdict: Verdict) -> None:
    """Solutions without a warning are as accurate as the dtype, whatever the format of the factors."""
    truth, n = _system(example), example.a.shape[2]
    if truth.singular:
        verdict.add("unsound", "singular", "A is exactly singular: neither LinAlgError nor warning")
        return
    spacing = spacing_of(example.a.dtype)
    expected = truth.bounds(n, unit_roundoff(example, None)) + truth.underflow(n, spacing)
    errors = truth.errors(x.reshape(n, -1), n)
    if not (errors <= ratios.THRESHOLD * n * expected).all():
        verdict.add("unsound", "solution", f"errors {errors}, expected {expected}")


def _system(example: Example) -> System:
    """The one that ``lu_solve`` is asked to solve."""
    a, trans = example.a[0], trans_of(example.recipe)
    return System((a, a.T, a.T.conj())[trans], example.b[0])


def _worst(measured: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Of the matrices of a batch."""
    found: dict[str, float] = {}
    for name, ratio in measured:
        found[name] = max(found.get(name, 0.0), ratio)
    return found


def _deserves_warning(example: Example) -> bool:
    """A basis of dependent columns, and a solution with a matrix that is singular to its accuracy."""
    if example.recipe.problem in OTHERS:
        return more.deserves_warning(example)
    if example.recipe.problem not in ("orth", "lu"):
        return False
    u = max(unit_roundoff(example, keywords(example.recipe).get("accuracy")), 2.0**-53)
    if example.recipe.problem == "lu":
        truth = _system(example)
        if truth.singular or (truth.underflow(len(example.a[0]), spacing_of(example.a.dtype)) > u).any():
            return True
    return any(_condition(a) * max(a.shape) * u >= SINGULAR for a in as_array(example.a))


def _condition(a: np.ndarray) -> float:
    """Condition number of A with normalized columns."""
    values = LeastSquares(a, np.zeros((len(a), 1)), rcond=0.0).singular_values
    return math.inf if values[-1] == 0 else float(values[0] / values[-1])


def _may_raise(example: Example, error: Exception) -> bool:
    """LU in half precision has a small range, named algorithms break down, and products overflow."""
    if example.recipe.problem == "lu":
        named = keywords(example.recipe)
        coarse = example.recipe.engine != "cpu" or named.get("compute") in ("bf16", "fp32")
        usual = not coarse and "pivot" not in named and not _near_the_ends(example)
        known = isinstance(error, (OverflowError, np.linalg.LinAlgError))
        return known and (not usual or _deserves_warning(example))
    if isinstance(error, OverflowError):
        size = MAY_OVERFLOW if example.a.dtype.kind == "i" else float(np.finfo(example.a.dtype).max)
        room = max(example.a.shape) * max(1.0, float(np.abs(as_array(example.b)).max(initial=0.0)))
        return float(np.abs(as_array(example.a)).max(initial=0.0)) * room >= size
    return not is_default(example) and isinstance(error, ArithmeticError)


def _near_the_ends(example: Example) -> bool:
    """Whether A or b has elements whose squares or reciprocals leave the range."""
    limits = limits_of(example.a.dtype)
    sizes = np.abs(np.concatenate([as_array(x).ravel() for x in (example.a, example.b)]))
    sizes = sizes[sizes > 0]
    return bool((sizes >= np.sqrt(limits.max)).any() or (sizes <= np.sqrt(limits.tiny) / 4).any())


def _product_overflows(example: Example) -> bool:
    """Whether an element may exceed the dtype: infinite, as in NumPy."""
    tops = [float(np.abs(as_array(x)).max(initial=0.0)) for x in (example.a, example.b)]
    size = math.inf if example.a.dtype.kind == "i" else float(np.finfo(example.a.dtype).max)
    return math.prod(tops) * example.a.shape[1] >= size


def _overflows(example: Example) -> bool:
    """Whether the norm of a column, and so R, exceeds the dtype."""
    a = as_array(example.a)
    size = np.linalg.norm(ldexp(a, -exponent_of(a)), axis=1).max(initial=1.0)
    return bool(np.log2(size) + exponent_of(a) >= np.log2(float(limits_of(example.a.dtype).max)))


def _has_tiny_column(example: Example) -> bool:
    """Whether a column (row of a wide A) is so small that its part of R has no digits, or few."""
    limits = limits_of(example.a.dtype)
    tops = np.abs(as_array(example.a)).max(1)
    return bool(((tops > 0) & (tops < TINY * float(limits.smallest_normal))).any())


def _ratios(example: Example, result: Any) -> Iterator[tuple[str, float]]:
    """The test ratios of a result; of a batch the worst."""
    recipe = example.recipe
    u = unit_roundoff(example, keywords(recipe).get("accuracy"))
    a, tiny = as_array(example.a), 2.0 ** spacing_of(example.a.dtype)
    outputs = [as_array(x) for x in OUTPUTS[recipe.problem](result)]
    if not all(np.isfinite(x).all() for x in outputs):
        yield "not finite", math.inf
    elif recipe.problem in OTHERS:
        stacks = [x.reshape(len(a), *x.shape[recipe.batched :]) for x in outputs]
        if recipe.problem == "pivoted":
            yield "2-norm", ratios.certified_2norms(result, stacks[0], u)
        for matrix, *parts in zip(a, *stacks, strict=True):
            yield from more.RATIOS[recipe.problem](matrix, parts, u, tiny)
    elif recipe.problem in ("qr", "tsqr", "orth"):
        q, *r = (x.reshape(len(a), *x.shape[-2:]) for x in outputs)
        yield "orthogonality", max(ratios.orthogonality_ratio(x, u) for x in q)
        test = ratios.qrt01 if q.shape[1] == q.shape[2] else ratios.qrt02
        if r:
            yield "residual", max(test(*each, u, tiny)[0] for each in zip(a, q, *r, strict=True))
            yield "diagonal", math.inf if np.diagonal(r[0], axis1=1, axis2=2).imag.any() else 0.0
            yield "2-norm", ratios.certified_2norms(result, q, u)
    elif recipe.problem == "svd":
        left, s, right = outputs
        yield "orthogonality", max(ratios.orthogonality_ratio(x, u) for x in (left, right.T))
        yield "values", ratios.singular_value_ratio(a[0], s, u, tiny)
    elif recipe.problem == "lu":
        factors = result[0]
        storage = FORMATS[factors.storage]
        if factors.transform is None:
            rows = a[0][factors.permutation]
            given = unit_roundoff(example, None)  # L and U are given in the dtype of A, with its spacing
            if np.iscomplexobj(a):  # kept in float32 or wider, whatever their products were
                given = max(given, Arithmetic.named(factors.compute).u)
            smallest = max(tiny, 2.0 ** (2 - storage.max_exponent - storage.significand))
            found = ratios.residual_ratio(rows, outputs[0], outputs[1], max(storage.u, given), smallest)
            yield "get01", found / _growth(rows, outputs[0], outputs[1])
    else:
        yield "product", ratios.product_ratio(a[0].T, as_array(example.b[0]), outputs[0], u, tiny)


def _growth(a: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> float:
    """``|| |L| |U| || / ||A||``, by which errors grow (Higham 2002, theorem 9.3); at least 1."""
    size = float(np.abs(a).max(initial=0.0)) or 1.0
    products = np.abs(lower) @ np.abs(upper / size)
    return max(1.0, float(products.sum(0).max() / np.abs(a / size).sum(0).max()))
