"""Examples: drawn from a seed, or by Hypothesis, and built the same way from either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from neula.engines.cpu import why_no_bf16

from .matrices import (
    DEFINITE_KINDS,
    KINDS,
    REAL,
    RHS_KINDS,
    ComplexRandom,
    exponent_of,
    ldexp,
    line_scales,
    right_hand_side,
    stored,
    turned,
)  # fmt: skip

T = TypeVar("T")

FACTORS = ("qr", "tsqr", "orth", "svd", "lu", "matmul", "pivoted", "cholesky", "polar", "pinv")
BOUNDED = ("nnls", "box")
SOLVERS = ("lstsq", "solve", "pos", "held", "streamed")
PROBLEMS = (*SOLVERS, *FACTORS, *BOUNDED)
OFTEN = ("lstsq", "solve", "pos")
LEAST_SQUARES = ("lstsq", "held", "streamed")
DEFINITE = ("pos", "cholesky")
COMPLEX = (*SOLVERS, *FACTORS, "constrained", "incremental", "ridge")
"""Problems whose numbers may be complex, those of areas included."""

LARGEST_COMPLEX = 16
"""Of dimensions: the real problem of the parts is twice as large."""

BATCHED = (*OFTEN, "qr", "tsqr", "orth", "pivoted", "cholesky", "polar", "pinv", *BOUNDED)


class Source(Protocol):
    """Where decisions come from. The first of a list is the simplest one."""

    def choice(self, options: Sequence[T]) -> T: ...
    def integer(self, low: int, high: int) -> int: ...


class Seeded:
    """Decisions by a generator of random numbers."""

    def __init__(self, seed: int, example: int) -> None:
        self.rng = np.random.default_rng([seed, example])

    def choice(self, options: Sequence[T]) -> T:
        return options[int(self.rng.integers(len(options)))]

    def integer(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))


@dataclass(frozen=True)
class Scope:
    """Values from which recipes are drawn; ``certify`` None leaves the option out, ``scalars`` are kinds of
    numbers that are drawn where A may have either.
    """

    problems: tuple[str, ...] = PROBLEMS
    engines: tuple[str, ...] = ("cpu", "emulated")
    libraries: tuple[str, ...] = ("numpy", "torch")
    certify: tuple[str | None, ...] = (None, "forward")
    scalars: tuple[str, ...] = ("real", "real", "complex")


@dataclass(frozen=True)
class Member:
    """One matrix with its right-hand sides, of kinds of ``matrices``; scales are powers of ten: of rows and
    columns at most, of the whole matrix, and of b. Binary ones keep dependent columns dependent.
    """

    kind: str
    rows: int = 0
    columns: int = 0
    whole: int = 0
    rhs: str = "random"
    rhs_power: int = 0
    binary: bool = True


@dataclass(frozen=True)
class Recipe:
    """An example: all that is needed to make it again.

    k = 0 is a vector b; k is also the rank for ``svd`` and the columns of B for ``matmul``. ``pos`` is
    ``solve`` with ``assume_a="pos"``, ``batched`` a call with a batch, be it of one. ``damp`` is relative to
    the size of A, and weights differ by so many powers of ten (0: none).
    """

    problem: str
    m: int
    n: int
    k: int
    members: tuple[Member, ...]
    batched: bool = False
    dtype: str = "float64"
    damp: float = 0.0
    weights: int = 0
    rcond: float | None = None
    layout: str = "C"
    library: str = "numpy"
    engine: str = "cpu"
    options: tuple[tuple[str, str], ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Example:
    """The arrays of a recipe: A (batch, m, n), b (batch, m, columns), and what else lstsq takes."""

    recipe: Recipe
    a: np.ndarray
    b: np.ndarray
    weights: np.ndarray | None
    damp: float


def scalars_of(problem: str, source: Source, scope: Scope) -> str:
    """Kind of numbers, real where a problem has no others."""
    return source.choice(scope.scalars) if problem in COMPLEX else "real"


def is_complex(recipe: Any) -> bool:
    """Whether a recipe, be it that of an area, has complex numbers."""
    return getattr(recipe, "dtype", "") in REAL or getattr(recipe, "scalars", "real") == "complex"


def trans_of(recipe: Recipe) -> int:
    """``trans=`` of ``lu_solve``: complex systems with A, its transpose or its conjugate transpose."""
    return recipe.seed % 3 if is_complex(recipe) else 0


INTEGER_KINDS = {
    "any": (
        "integer",
        "counting",
        "dependent_integer",
        "zero_lines",
        "permutation",
        "pascal",
        "frank",
        "dummies",
    ),
    "pos": ("integer_gram",),
}


def draw(source: Source, problem: str, scope: Scope) -> Recipe:
    """One recipe: mostly small, mostly float64, and with not too many difficulties at a time."""
    m, n = _shape(source, problem)
    batched = problem in BATCHED and source.integer(0, 5) == 5
    count = source.integer(1, 5) if batched else 1
    dtype = source.choice(["float64"] * 7 + ["float32"] * 2 + ["float16", "int64"])
    lstsq = problem == "lstsq"
    recipe = Recipe(
        problem=problem,
        m=m,
        n=n,
        k=source.integer(1, min(m, n)) if problem == "svd" else source.integer(0, 3),
        members=tuple(_member(source, problem, dtype) for _ in range(count)),
        batched=batched,
        dtype=dtype,
        damp=source.choice([0.0] * 8 + [1.0, 1e-3, 1e-8, 1e3]) if lstsq else 0.0,
        weights=source.choice([0] * 8 + [1, 6, 15, 100]) if lstsq else 0,
        rcond=source.choice([None] * 12 + [1e-3, 1e-8, 0.0]) if lstsq else None,
        layout=source.choice(["C", "C", "F", "sliced", "reversed"]),
        library=source.choice(scope.libraries),
        engine=source.choice(scope.engines),
        options=_options(source, problem, scope),
        seed=source.integer(0, 2**32 - 1),
    )
    if dtype not in REAL.values() or scalars_of(problem, source, scope) == "real":
        return recipe
    sizes = {name: min(getattr(recipe, name), LARGEST_COMPLEX) for name in "mnk"}
    return replace(recipe, dtype=next(z for z in REAL if REAL[z] == dtype), **sizes)


def _shape(source: Source, problem: str) -> tuple[int, int]:
    limit = source.choice([6] * 8 + [12] * 4 + [40])
    n = source.integer(1, limit)
    if problem in ("solve", "lu", *DEFINITE):
        return n, n
    if problem in BOUNDED:  # every set of unknowns at bounds is looked at
        return source.integer(1, 8), min(n, 4)
    if problem in ("tsqr", "held", "streamed"):
        return source.integer(n, limit + n), n
    return source.choice([source.integer(1, limit), n]), n


def _member(source: Source, problem: str, dtype: str) -> Member:
    kinds = list(DEFINITE_KINDS if problem in DEFINITE else KINDS)
    if dtype == "int64":
        return Member(source.choice(INTEGER_KINDS["pos" if problem in DEFINITE else "any"]))
    power = {"float16": [0, 1]}.get(dtype, [0, 12, 30] if dtype == "float64" else [0, 3, 12])
    whole = [0, 0, 0, 0, 0, -12, 30, -100, 100, -200, 200, -300, 300, -400, 400]
    return Member(
        kind=source.choice(kinds),
        rows=source.choice([0] * 5 + power) if problem not in DEFINITE else 0,
        columns=source.choice([0] * 4 + power),
        whole=source.choice(whole),
        rhs=source.choice(RHS_KINDS),
        rhs_power=source.choice([*whole, 0, 0, 0, 0]),
        # Only exact scaling keeps a matrix symmetric.
        binary=source.integer(0, 1) == 0 or problem in DEFINITE,
    )


OPTIONS: dict[str, tuple[tuple[tuple[str, str], ...], ...]] = {
    "lstsq": (
        (),
        *((("algorithm", a),) for a in ("cgls", "lsqr", "householder", "svd", "direct", "normal")),
        (("accuracy", "fp32"),),
        (("accuracy", "fp16"),),
    ),
    "solve": (
        (),
        *((("pivot", p),) for p in ("none", "rbt", "partial")),
        (("compute", "fp32"),),
        (("accuracy", "fp32"),),
        (("accuracy", "fp16"),),
    ),
    "pos": ((), (("compute", "fp32"),), (("accuracy", "fp32"),), (("accuracy", "fp16"),)),
    "qr": (
        (),
        *((("algorithm", a),) for a in ("rgsqrf", "rgsqrf-reortho", "cholesky-qr", "householder")),
        (("mode", "complete"),),
        (("accuracy", "fp32"),),
        (("accuracy", "fp16"),),
    ),
    "tsqr": ((),),
    "orth": ((), (("accuracy", "fp32"),), (("accuracy", "fp16"),)),
    "svd": ((), (("accuracy", "fp32"),), (("accuracy", "fp16"),)),
    "lu": (
        (),
        (("pivot", "rbt"),),
        (("compute", "fp32"), ("storage", "fp32")),
        (("compute", "fp64"),),
        (("compute", "bf16"),),
    ),
    "matmul": ((),),
    **dict.fromkeys(("held", "streamed", "pivoted", "cholesky", "polar", "pinv", "nnls", "box"), ((),)),
}
"""Keywords beside those that have a place of their own in a recipe; the first ones are the default."""

COARSER = {"fp32": ("float64", "int64"), "fp16": ("float64", "float32", "int64")}
"""Accuracies, and the dtypes for which they are a choice."""


def _options(source: Source, problem: str, scope: Scope) -> tuple[tuple[str, str], ...]:
    named = source.choice([()] * 12 + list(OPTIONS[problem]))
    certify = source.choice(scope.certify) if problem in OFTEN else None
    return named if certify is None else (*named, ("certify", certify))


def keywords(recipe: Recipe) -> dict[str, str]:
    """The options that make sense for the dtype and the shape."""
    given = dict(recipe.options)
    if "accuracy" in given and REAL.get(recipe.dtype, recipe.dtype) not in COARSER[given["accuracy"]]:
        del given["accuracy"]
    if given.get("algorithm") in ("direct", "normal") and recipe.m < recipe.n:
        del given["algorithm"]
    if given.get("compute") == "bf16" and recipe.engine == "cpu" and why_no_bf16():
        del given["compute"]
    return given


def build(recipe: Recipe) -> Example:
    """The numbers of a recipe."""
    rng = np.random.default_rng(recipe.seed)
    m, n, columns = recipe.m, recipe.n, max(1, recipe.k)
    made = [_build_member(rng, recipe, member, columns) for member in recipe.members]
    a = np.stack([x[0] for x in made])
    b = np.stack([x[1] for x in made])
    size = float(np.abs(a * 1.0).max(initial=0.0)) or 1.0
    weights = line_scales(rng, m, recipe.weights, binary=False) if recipe.weights else None
    if weights is not None:
        weights = weights * rng.uniform(0.5, 2.0, m)
    assert a.shape[1:] == (m, n)
    return Example(recipe, a, b, weights, min(recipe.damp * size, 1e300))


def bounds_of(example: Example) -> tuple[np.ndarray, np.ndarray]:
    """Of every unknown: none below zero, or some that are near the solution without bounds."""
    n = example.a.shape[2]
    if example.recipe.problem == "nnls":
        return np.zeros(n), np.full(n, np.inf)
    rng = np.random.default_rng(example.recipe.seed + 1)
    tops = [float(np.abs(x.astype(np.float64)).max(initial=0.0)) for x in (example.a, example.b)]
    limits = np.finfo(example.a.dtype if example.a.dtype.kind == "f" else np.float64)
    size = tops[1] / tops[0] if tops[0] else 1.0
    size = float(np.clip(size, float(limits.smallest_normal) / float(limits.eps), 0.1 * float(limits.max)))
    # Numbers that x can be.
    ends = np.sort(size * rng.choice([-2, -1, -0.5, 0.25, 1, 4], (2, n)), axis=0).astype(limits.dtype)
    ends[1] += (ends[1] == ends[0]) * limits.dtype.type(size)
    ends = ends.astype(np.float64)
    return np.where(rng.random(n) < 0.3, -np.inf, ends[0]), np.where(rng.random(n) < 0.3, np.inf, ends[1])


def _build_member(
    rng: np.random.Generator, recipe: Recipe, member: Member, columns: int
) -> tuple[np.ndarray, np.ndarray]:
    definite, of_numbers = recipe.problem in DEFINITE, ComplexRandom(rng) if recipe.dtype in REAL else rng
    a = (DEFINITE_KINDS if definite else KINDS)[member.kind](of_numbers, recipe.m, recipe.n)
    a = ldexp(a, -exponent_of(a))
    b = right_hand_side(of_numbers, member.rhs, a, columns)
    if recipe.dtype in REAL:
        a, b = turned(rng, a, b, hermitian=definite)
    if member.columns:
        scales = line_scales(rng, recipe.n, member.columns, binary=member.binary)
        a = scales[:, None] * a * scales if definite else a * scales
    if member.rows:
        scales = line_scales(rng, recipe.m, member.rows, binary=member.binary)
        a, b = scales[:, None] * a, b * scales[:, None]
    power = 0 if recipe.dtype != "int64" else 3
    return stored(a, member.whole + power, recipe.dtype), stored(b, member.rhs_power + power, recipe.dtype)
