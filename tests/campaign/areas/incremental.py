"""Sequences of updates, forgetting, downdates and merges of ``LeastSquares``, beside rational sums."""

from __future__ import annotations

import math
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flint import arb, fmpq, fmpq_mat
from tests.bounded.exact import matrix, rational

import neula

from ..exact import columns, embedded, error_in_norm, parts
from ..matrices import KINDS, ldexp, random_numbers
from ..recipes import Scope, Source, scalars_of
from ..verdict import Verdict

MATRICES = (
    *("integer", "normal", "integer", "normal", "uniform", "duplicates", "zero_lines"),
    *("graded", "hilbert"),
)
STEPS = ("update", "update", "update", "forget", "downdate", "merge", "save", "weighted", "solve")
POWERS = (0, 0, 0, 0, 40, -40, 200, -200, -450, -900, -1000, -1040)

FAIR = 1e5
"""Condition number up to which the normal equations are certified."""


@dataclass(frozen=True)
class IncrementalRecipe:
    """Powers are those of two; ``units`` are those of columns, which ``scales=`` names."""

    a: str
    n: int
    k: int
    steps: tuple[str, ...]
    of_a: int
    of_b: int
    units: int
    varied: int
    damp: float
    seed: int
    problem: str = "incremental"
    scalars: str = "real"


def draw(source: Source, scope: Scope) -> IncrementalRecipe:
    damp = source.choice([0.0] * 6 + [1.0, 1e-3, 1e5, 1e100])
    return IncrementalRecipe(
        a=source.choice(MATRICES),
        n=source.integer(1, 4),
        k=source.integer(0, 2),
        steps=tuple(source.choice(STEPS) for _ in range(source.integer(1, 6))),
        of_a=source.choice(POWERS),
        of_b=source.choice(POWERS),
        units=source.choice([0, 0, 0, 0, 20, 400]) if damp == 0 else 0,
        varied=source.choice([0, 0, 0, 0, 10, 300]),
        damp=damp,
        seed=source.integer(0, 2**32 - 1),
        scalars=scalars_of("incremental", source, scope),
    )


class Rows:
    """Sums that a fit must reproduce: exact sums over rows, those of the parts of complex ones (``fold``
    2).
    """

    def __init__(self, n: int, k: int, fold: int) -> None:
        self.gram, self.right = fmpq_mat(fold * n, fold * n), fmpq_mat(fold * n, k)
        self.count, self.fold = 0, fold

    def add(self, a: np.ndarray, b: np.ndarray, w: np.ndarray | None, sign: int = 1) -> None:
        self.count += sign * len(a)
        if self.fold == 2:
            a, b, w = embedded(a), parts(b), None if w is None else np.tile(w, 2)
        factors = [fmpq(1)] * len(a) if w is None else [rational(x) ** 2 for x in w]
        left, n = matrix(a), a.shape[1]
        rows = zip(factors, left.tolist(), strict=True)
        weighted = fmpq_mat(len(a), n, [sign * f * x for f, row in rows for x in row]).transpose()
        self.gram, self.right = self.gram + weighted * left, self.right + weighted * matrix(b)


def judge(recipe: IncrementalRecipe, device: str) -> tuple[Verdict, str]:
    """Run the sequence; every solution is held against the exact one."""
    verdict, told = Verdict(), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for step, fit, rows in _run(recipe, told):
                caught.clear()
                _judge(verdict, recipe, step, fit, rows, caught)
        except (ValueError, OverflowError) as error:
            if not _documented(error):
                verdict.add("violation", "raised", f"{type(error).__name__}: {error}")
        except Exception as error:  # an error of any kind is an answer to be judged
            verdict.add("violation", "raised", f"{type(error).__name__}: {error}")
    if not verdict.findings:
        return verdict, ""
    return verdict, "\n".join(["import numpy as np, neula", *told])


def _documented(error: Exception) -> bool:
    parts = ("do not determine", "would be left", "larger residuals", "cannot be removed", "does not fit")
    return any(part in str(error) for part in parts)


def _run(recipe: IncrementalRecipe, told: list[str]) -> Any:
    fold, n, k = 1 + (recipe.scalars == "complex"), recipe.n, max(1, recipe.k)
    rng = random_numbers(recipe.seed, is_complex=fold == 2)
    units = np.ldexp(1.0, rng.integers(-recipe.units, recipe.units + 1, n))
    units = np.where(np.abs(np.log2(units) + recipe.of_a) < 1040, units, 1.0)
    scales = units if recipe.units else None
    fit, rows, held = neula.LeastSquares(n, scales=scales), Rows(n, k, fold), []
    named = "" if scales is None else f", scales={units.tolist()}"
    told.append(f"fit = neula.LeastSquares({n}{named})")

    def block() -> tuple[np.ndarray, np.ndarray]:
        m, power = int(rng.integers(1, 6)), int(rng.integers(-recipe.varied, recipe.varied + 1))
        a = ldexp(KINDS[recipe.a](rng, m, n) * units, max(-1074, recipe.of_a + power))
        b = rng.integers(-9, 10, (m, k)) * 1.0 if rng.random() < 0.5 else rng.standard_normal((m, k))
        return a, ldexp(b, max(-1074, recipe.of_b + power))

    def given(b: np.ndarray) -> np.ndarray:
        return b[:, 0] if recipe.k == 0 else b

    for step in ("update", *recipe.steps, "solve"):
        if step in ("update", "weighted", "merge"):
            a, b = block()
            if max(np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0)) > 2.0**400:
                return
            w = rng.uniform(0.5, 2.0, len(a)) if step == "weighted" else None
            shown = f"np.array({a.tolist()}), np.array({given(b).tolist()})"
            if step == "merge":
                other = neula.LeastSquares(n, scales=scales)
                other.update(a, given(b))
                fit.merge(other)
                told.append(
                    f"other = neula.LeastSquares({n}{named}); other.update({shown}); fit.merge(other)"
                )
            else:
                fit.update(a, given(b), weights=w)
                told.append(f"fit.update({shown}, weights={None if w is None else w.tolist()})")
            rows.add(a, b, w)
            held.append((a, b, w))
        elif step == "forget":
            factor = float(rng.choice([0.25, 0.5, 0.99, 1e-6, 1e-300]))
            fit.forget(factor)
            told.append(f"fit.forget({factor})")
            rows.gram, rows.right = rows.gram * rational(factor), rows.right * rational(factor)
            held.clear()
        elif step == "downdate" and held:
            a, b, w = held.pop(int(rng.integers(len(held))))
            told.append(f"fit.downdate(np.array({a.tolist()}), np.array({given(b).tolist()}), weights={w})")
            try:
                fit.downdate(a, given(b), weights=w)
            except ValueError as error:
                if not _documented(error):
                    raise
                told.pop()
            else:
                rows.add(a, b, w, -1)
        elif step == "save":
            with tempfile.TemporaryDirectory() as folder:
                fit.save(Path(folder) / "fit.npz")
                fit = neula.LeastSquares.load(Path(folder) / "fit.npz")
        elif step == "solve":
            damp = float(np.ldexp(recipe.damp, recipe.of_a))
            told.append(f"fit.solve(damp={damp!r})")
            yield damp, fit, rows


def _judge(verdict: Verdict, recipe: Any, damp: float, fit: Any, rows: Rows, caught: list[Any]) -> None:
    result, n = fit.solve(damp=damp), rows.gram.nrows()
    warned = any(issubclass(w.category, neula.AccuracyWarning) for w in caught)
    squared = fmpq_mat(n, n, [rational(damp) ** 2 if i == j else fmpq(0) for i in range(n) for j in range(n)])
    gram = rows.gram + squared
    rank, x = gram.rank() // rows.fold, np.asarray(result.x).reshape(recipe.n, -1)
    x = x if rows.fold == 1 else parts(x)
    if fit.rows != rows.count:
        verdict.add("violation", "rows", f"{fit.rows}, and {rows.count} is right")
    claimed = np.atleast_1d(result.forward_errors)
    condition = _condition(gram)
    if not warned and result.rank != rank:
        if result.rank > rank or condition < FAIR:
            verdict.add("unsound", "rank", f"{result.rank}, and {rank} is right")
        return
    if result.rank != rank or rank < recipe.n or (warned and not np.isfinite(x).all()):
        return
    exact, found, squares = gram.solve(rows.right), matrix(x), [gram[i, i] for i in range(n)]
    for j in range(x.shape[1]):
        error = error_in_norm(squares, *(columns(y)[j] for y in (found, exact)))
        size = sum((s * exact[i, j] ** 2 for i, s in enumerate(squares)), fmpq(0))
        tiny = sum(squares, fmpq(0)) * rational(2.0**-1074) ** 2
        told = {
            "errors": [error],
            "forward_errors": [float(claimed[j])],
            "rank": int(result.rank),
            "accepted": bool(result.converged),
            "warned": warned,
            "condition": condition,
        }
        verdict.numbers.append(told)
        if not error <= claimed[j] * (1 + 1e-9) and not (warned and not claimed[j] < 0.1):
            verdict.add("unsound", "error", f"{told}")
        normal = not size or tiny / size < rational(2.0**-106)
        plain = recipe.a in ("integer", "normal", "uniform") and recipe.varied == 0
        plain = plain and not {"forget", "downdate"} & set(recipe.steps)
        if warned and normal and condition < FAIR and plain and size:
            verdict.add("false alarm", "warning", f"{told}")


def _condition(gram: fmpq_mat) -> float:
    """Of the matrix with normalized columns."""
    n = gram.nrows()
    scaled = np.eye(n)
    for i in range(n):
        for j in range(i):
            size = gram[i, i] * gram[j, j]
            if size:
                value = float(arb(gram[i, j] * gram[i, j] / size).sqrt())
                scaled[i, j] = scaled[j, i] = math.copysign(value, 1 if gram[i, j] > 0 else -1)
    values = np.linalg.eigvalsh(scaled)
    return math.sqrt(values[-1] / values[0]) if values[0] > 1e-14 else math.inf
