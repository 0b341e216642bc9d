"""Least squares with equality constraints, beside the equations with multipliers in rational numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from flint import arb, fmpq, fmpq_mat
from tests.bounded.exact import matrix, rational

import neula

from ..calls import answer_of
from ..exact import columns, embedded, error_in_norm, parts, root_of_quotient
from ..matrices import KINDS, ldexp, random_numbers
from ..recipes import Scope, Source, scalars_of
from ..verdict import Verdict, as_python

MATRICES = (
    *("integer", "normal", "integer", "normal", "counting", "dependent_integer", "duplicates", "zero_lines"),
    *("vandermonde", "hilbert", "graded", "kahan", "diagonal", "geometric", "sparse"),
)
CONSTRAINTS = (
    *("integer", "normal", "integer", "copied", "copied integer", "combined integer", "sum"),
    *("one ulp", "near"),
    *("rows of A", "zero row", "tiny element", "graded", "vandermonde"),
)
RIGHT = ("image", "random", "zero", "tiny", "contradiction")
POWERS = (0, 0, 0, 0, 40, -40, 200, -200, 450, -450, 900, -900, 1000, -1000)

NEARLY = ("sum", "one ulp", "near", "rows of A")
"""Kinds of constraints whose rank rounding errors may decide on: a warning is no false alarm."""

SOLVABLE = 0.01
"""With an expected error below nobody needs a warning."""

CONTRADICTS = 1e-6
"""Contradictions above are no rounding errors."""

STEP = 2.0**-30
"""Relative perturbations that show what rounding errors may come to."""


@dataclass(frozen=True)
class ConstrainedRecipe:
    """Powers are those of two; ``damp`` is relative to the size of A."""

    a: str
    c: str
    d: str
    m: int
    n: int
    p: int
    k: int
    of_a: int
    of_c: int
    of_b: int
    columns: int
    damp: float
    weights: str
    seed: int
    problem: str = "constrained"
    scalars: str = "real"


def draw(source: Source, scope: Scope) -> ConstrainedRecipe:
    n = source.integer(1, 6)
    return ConstrainedRecipe(
        a=source.choice(MATRICES),
        c=source.choice(CONSTRAINTS),
        d=source.choice(RIGHT),
        m=source.integer(1, 9),
        n=n,
        p=source.integer(0, n + 1),
        k=source.integer(0, 2),
        of_a=source.choice(POWERS),
        of_c=source.choice(POWERS),
        of_b=source.choice(POWERS),
        columns=source.choice([0, 0, 0, 0, 12, 60]),
        damp=source.choice([0.0] * 8 + [1.0, 1e-8, 1e3, 1e6]),
        weights=source.choice(["", "", "", "", "weights", "variances"]),
        seed=source.integer(0, 2**32 - 1),
        scalars=scalars_of("constrained", source, scope),
    )


def build(recipe: ConstrainedRecipe) -> dict[str, np.ndarray]:
    """The numbers of a recipe."""
    rng = random_numbers(recipe.seed, is_complex=recipe.scalars == "complex")
    m, n, k = recipe.m, recipe.n, max(1, recipe.k)
    a = KINDS[recipe.a](rng, m, n)
    c = _constraints(rng, recipe, a)
    p = len(c)
    b = rng.integers(-9, 10, (m, k)) * 1.0 if rng.random() < 0.5 else rng.standard_normal((m, k))
    d = {
        "image": lambda: c @ rng.standard_normal((n, k)),
        "random": lambda: rng.standard_normal((p, k)),
        "zero": lambda: np.zeros((p, k)),
        "tiny": lambda: 1e-12 * (c @ rng.standard_normal((n, k))),
        "contradiction": lambda: c @ rng.standard_normal((n, k)) + 1e-3,
    }[recipe.d]()
    if recipe.c in ("copied", "copied integer", "combined integer") and recipe.d == "random" and p > 1:
        d[-1] = d[0] if recipe.c != "combined integer" else d[0] + d[(p - 1) // 2]
    if recipe.c == "rows of A" and recipe.d == "image":
        d = b[: len(c)].copy()
    scales = np.ldexp(1.0, rng.integers(-recipe.columns, recipe.columns + 1, n))
    of_d = max(-1060, min(recipe.of_b - recipe.of_a + recipe.of_c, 1000))
    with np.errstate(over="ignore"):
        a, c = ldexp(a * scales, recipe.of_a), ldexp(c * scales, recipe.of_c)
        b, d = ldexp(b, recipe.of_b), ldexp(d, of_d)
    found = {"A": a, "b": b, "C": c, "d": d}
    if recipe.weights == "weights":
        found["weights"] = rng.uniform(0.5, 2.0, m)
    if recipe.weights == "variances":
        found["covariance"] = np.ldexp(
            rng.uniform(0.5, 2.0, m), 0 if recipe.damp else int(rng.choice([0, 0, -300, 300]))
        )
    return found


def _constraints(rng: Any, recipe: ConstrainedRecipe, a: np.ndarray) -> np.ndarray:
    n, p, kind = recipe.n, recipe.p, recipe.c
    if kind == "rows of A":
        return a[:p].copy()
    if kind in KINDS and "integer" not in kind:
        return KINDS[kind](rng, p, n) if p else np.zeros((0, n))
    whole = "integer" in kind or kind == "one ulp" or kind == "near"
    c = rng.integers(-5, 6, (p, n)) * 1.0 if whole else rng.standard_normal((p, n))
    if p < 2:
        return c
    other = (p - 1) // 2
    if kind in ("copied", "copied integer"):
        c[-1] = c[0]
    elif kind in ("combined integer", "sum"):
        c[-1] = c[0] + c[other]
    elif kind == "one ulp":
        c[-1] = float(rng.integers(1, 4)) * c[0]
        c[-1, -1] += np.nextafter(c[-1, -1].real, np.inf) - c[-1, -1].real
    elif kind == "near":
        c[-1] = 3 * c[0]
        c[-1, -1] += 10.0 ** -rng.uniform(3, 16)
    elif kind == "zero row":
        c[-1] = 0.0
    elif kind == "tiny element":
        c[0] = np.where(np.arange(n) == 0, 1.0, 10.0 ** -rng.uniform(10, 200))
    return c


def _of_parts(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The real problem."""
    if not any(np.iscomplexobj(x) for x in given.values()):
        return given
    forms = {"A": embedded, "C": embedded, "b": parts, "d": parts}
    return {name: forms[name](x) if name in forms else np.tile(x, 2) for name, x in given.items()}


def judge(recipe: ConstrainedRecipe, device: str) -> tuple[Verdict, str]:
    """Call, solve exactly, compare."""
    given = build(recipe)
    damp = _damping(recipe, given)
    if not all(np.isfinite(x).all() for x in given.values()):
        return Verdict(), ""
    answer = answer_of(partial(_call, recipe, given, damp))
    verdict, result = Verdict.on(answer), answer.result
    truth = Truth(given, damp)
    rounded = recipe.c == "sum" and recipe.p > 1 and truth.constraint_rank == recipe.p
    if rounded and result is not None and result.constraint_rank < recipe.p:
        truth = Truth({**given, "C": given["C"][:-1], "d": given["d"][:-1]}, damp)
    _judged(verdict, recipe, truth, answer.warned, result, answer.error)
    return verdict, _shown(given, damp, recipe) if verdict.findings else ""


def _damping(recipe: ConstrainedRecipe, given: dict[str, np.ndarray]) -> float:
    damp = recipe.damp * float(np.abs(given["A"]).max(initial=0.0))
    return damp if damp < 1e300 else 0.0


def _call(recipe: ConstrainedRecipe, given: dict[str, np.ndarray], damp: float) -> Any:
    options: dict[str, Any] = {x: given[x] for x in ("weights", "covariance") if x in given}
    b, d = (given[x][:, 0] if recipe.k == 0 else given[x] for x in "bd")
    return neula.lstsq(given["A"], b, constraints=(given["C"], d), damp=damp, **options)


class Truth:
    """The exact solution of smallest norm."""

    def __init__(self, given: dict[str, np.ndarray], damp: float) -> None:
        self.fold = 1 + any(np.iscomplexobj(x) for x in given.values())
        given = _of_parts(given)
        a, b, c, d = (matrix(given[name]) for name in ("A", "b", "C", "d"))
        n, m = a.ncols(), a.nrows()
        factors = [fmpq(1)] * m
        if "weights" in given:
            factors = [rational(w) ** 2 for w in given["weights"]]
        if "covariance" in given:
            factors = [1 / rational(v) for v in given["covariance"]]
        left = fmpq_mat(m, n, [f * x for f, row in zip(factors, a.tolist(), strict=True) for x in row])
        squared = [rational(damp) ** 2 if i == j else fmpq(0) for i in range(n) for j in range(n)]
        self.gram, self.right = left.transpose() * a + fmpq_mat(n, n, squared), left.transpose() * b
        self.kept = _independent_rows(c)
        self.c, self.d = _rows(c, self.kept), _rows(d, self.kept)
        self.contradiction = _contradiction(c, d, self.kept)
        self.consistent = self.contradiction == 0
        stacked = fmpq_mat(self.gram.tolist() + self.c.tolist())
        self.rank, self.full = stacked.rank() // self.fold, stacked.rank() == n
        self.constraint_rank = len(self.kept) // self.fold
        self.x = _solved(self.gram, self.right, self.c, self.d, stacked if not self.full else None)

    def errors(self, x: np.ndarray) -> np.ndarray:
        """``||D (x - x*)|| / ||D x*||`` of each column."""
        found = matrix(x if self.fold == 1 else parts(x))
        squares = [self.gram[i, i] for i in range(found.nrows())]
        squares = squares if any(squares) else [fmpq(1)] * len(squares)
        pairs = zip(columns(found), columns(self.x), strict=True)
        return np.array([error_in_norm(squares, one, exact) for one, exact in pairs])


def _independent_rows(c: fmpq_mat) -> list[int]:
    kept: list[int] = []
    for i in range(c.nrows()):
        if _rows(c, [*kept, i]).rank() > len(kept):
            kept.append(i)
    return kept


def _rows(c: fmpq_mat, places: list[int]) -> fmpq_mat:
    rows = c.tolist()
    return fmpq_mat(len(places), c.ncols(), [x for i in places for x in rows[i]])


def _contradiction(c: fmpq_mat, d: fmpq_mat, kept: list[int]) -> float:
    """By what part of its terms a right-hand side differs at most from what the others make it."""
    others, worst = [i for i in range(c.nrows()) if i not in kept], 0.0
    basis, right = _rows(c, kept), _rows(d, kept)
    factors = (
        (basis * basis.transpose()).solve(basis * _rows(c, others).transpose()).transpose() if kept else None
    )
    for place, i in enumerate(others):
        for j in range(d.ncols()):
            terms = [factors[place, q] * right[q, j] for q in range(len(kept))] if factors is not None else []
            size = abs(d[i, j]) + sum((abs(t) for t in terms), fmpq(0))
            rest = abs(d[i, j] - sum(terms, fmpq(0)))
            worst = max(worst, float(arb(rest / size)) if rest else 0.0)
    return worst


def _solved(gram: fmpq_mat, right: fmpq_mat, c: fmpq_mat, d: fmpq_mat, stacked: fmpq_mat | None) -> fmpq_mat:
    """By the equations with multipliers; of many solutions the shortest."""
    n, p = gram.nrows(), c.nrows()
    if stacked is not None:
        free = _null_space(stacked)
        gram = gram + free * free.transpose()
    top = [[*x, *y] for x, y in zip(gram.tolist(), c.transpose().tolist() if p else [[]] * n, strict=True)]
    whole = fmpq_mat(top + [[*x, *[fmpq(0)] * p] for x in c.tolist()])
    solved = whole.solve(fmpq_mat(right.tolist() + d.tolist()))
    return _rows(solved, list(range(n)))


def _null_space(a: fmpq_mat) -> fmpq_mat:
    """A basis in columns."""
    reduced, rank = a.rref()
    rows, n = reduced.tolist()[:rank], a.ncols()
    pivots = [next(j for j in range(n) if row[j] != 0) for row in rows]
    columns = []
    for j in (j for j in range(n) if j not in pivots):
        column = [fmpq(0)] * n
        column[j] = fmpq(1)
        for row, pivot in zip(rows, pivots, strict=True):
            column[pivot] = -row[j]
        columns.append(column)
    return fmpq_mat(columns).transpose()


def _judged(
    verdict: Verdict, recipe: ConstrainedRecipe, truth: Truth, told: bool, result: Any, error: Any
) -> None:
    if error is not None:
        _judge_error(verdict, recipe, truth, error)
        return
    contradicts = truth.contradiction > CONTRADICTS and not _nearly_fulfilled(build(recipe), result.x)
    if contradicts and not told:
        verdict.add("unsound", "contradiction", "no x fulfils the constraints, and nothing is said of it")
        return
    if not told and result.constraint_rank != truth.constraint_rank:
        text = f"{result.constraint_rank}, and {truth.constraint_rank} is right"
        verdict.add("unsound", "constraint rank", text)
        return
    claimed = np.atleast_1d(result.forward_errors)
    x = np.asarray(result.x).reshape(recipe.n, -1)
    if not np.isfinite(x).all():
        verdict.add("violation", "not finite", f"{x}")
        return
    if not told and result.rank != truth.rank:
        plain = not (recipe.weights or recipe.damp or recipe.c in NEARLY)
        if plain and recipe.a in ("integer", "counting", "dependent_integer", "duplicates"):
            verdict.add("unsound", "rank", f"{result.rank}, and {truth.rank} is right")
        return
    errors = truth.errors(x)
    verdict.numbers.append(
        {
            "errors": errors.tolist(),
            "forward_errors": claimed.tolist(),
            "rank": int(result.rank),
            "accepted": bool(result.converged),
            "warned": told,
        }
    )
    # Where rounding decides on the rank, a warning says that errors are those of constraints not rounded.
    doubted = told & (recipe.c in NEARLY) | (told & ~(claimed < 0.1))
    sound = ((errors <= claimed * (1 + 1e-9)) | doubted).all()
    if result.rank == truth.rank and truth.consistent and not sound:
        verdict.add("unsound", "error", f"errors {errors}, and forward_errors {claimed}")
    if told and recipe.c not in NEARLY and truth.full and truth.consistent:
        expected = _expected(recipe, truth)
        if (expected < SOLVABLE).all():
            verdict.add("false alarm", "warning", f"expected {expected}, found {errors}, claimed {claimed}")


def _nearly_fulfilled(given: dict[str, np.ndarray], x: np.ndarray) -> bool:
    """Whether x fulfils constraints with right-hand sides that differ by roundings from those given."""
    x = np.asarray(x).reshape(given["C"].shape[1], -1)
    if not np.isfinite(x).all():
        return False
    x, given = parts(x) if np.iscomplexobj(x) else x, _of_parts(given)
    c, d, exact = matrix(given["C"]), matrix(given["d"]), matrix(x)
    rest, size = c * exact - d, matrix(np.abs(given["C"])) * matrix(np.abs(x))
    pairs = zip(rest.entries(), size.entries(), d.entries(), strict=True)
    spacing = rational(2.0**-1074)
    return all(abs(r) <= rational(CONTRADICTS) * (s + abs(v)) + spacing for r, s, v in pairs)


def _judge_error(verdict: Verdict, recipe: ConstrainedRecipe, truth: Truth, error: Exception) -> None:
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, OverflowError):
        largest = max((abs(v) for v in truth.x.entries()), default=fmpq(0))
        knowable = truth.full and truth.consistent and recipe.c not in NEARLY
        if knowable and largest < rational(1.7e308) and (_expected(recipe, truth) < SOLVABLE).all():
            verdict.add("violation", "raised", told)
    elif not (type(error) is ValueError and "contradict" in str(error)):
        verdict.add("violation", "raised", told)
    elif truth.consistent and recipe.c not in NEARLY and (_expected(recipe, truth) < SOLVABLE).all():
        verdict.add("violation", "refused", told)


def _expected(recipe: ConstrainedRecipe, truth: Truth) -> np.ndarray:
    """Expected relative error of x from perturbations of the size of rounding errors, and from underflow."""
    rng, n = np.random.default_rng(recipe.seed), truth.gram.nrows()
    plain = build(recipe)
    given, damp = _of_parts(plain), _damping(recipe, plain)
    worst = np.zeros(truth.x.ncols())
    squares = [truth.gram[i, i] for i in range(n)]
    tiny = sum(squares, fmpq(0)) * rational(2.0**-1074) ** 2
    for _ in range(2):
        moved = dict(given)
        for name, axis in (("A", 0), ("b", 0), ("C", 1), ("d", 0)):
            x = given[name] if name in "Ab" else given[name][truth.kept]
            sizes = x if name == "d" else np.abs(x).max(axis=axis, keepdims=True, initial=0.0)
            moved[name] = x + STEP * sizes * rng.uniform(-1, 1, x.shape)
        if not all(np.isfinite(x).all() for x in moved.values()):
            return worst + math.inf
        other = Truth(moved, damp)
        if not (other.full and len(other.kept) == len(truth.kept)):
            return worst + math.inf
        for j, (exact, changed) in enumerate(zip(columns(truth.x), columns(other.x), strict=True)):
            moved_by = error_in_norm(squares, changed, exact)
            size = sum((s * y**2 for s, y in zip(squares, exact, strict=True)), fmpq(0))
            saturated = moved_by > SOLVABLE or (size != 0 and root_of_quotient(tiny, size) > 2.0**-53)
            worst[j] = math.inf if saturated else max(worst[j], 16 * n * 2.0**-53 * moved_by / STEP)
    return worst


def _shown(given: dict[str, np.ndarray], damp: float, recipe: ConstrainedRecipe) -> str:
    column = "[:, 0]" * (recipe.k == 0)
    more = "".join(f", {name}={name}" for name in ("weights", "covariance") if name in given)
    return as_python(f"neula.lstsq(A, b{column}, constraints=(C, d{column}), damp={damp!r}{more})", **given)
