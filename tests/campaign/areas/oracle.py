"""The oracle beside itself: singular values in enclosures, and counted by Sylvester's law of inertia."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from flint import arb, ctx, fmpz_mat

from .. import spectrum
from ..exact import dyadic, integers
from ..oracle import LeastSquares
from ..recipes import Scope, Source
from ..verdict import Verdict

KINDS = ("dummies", "repeated", "clustered", "zero", "integers", "scaled")


@dataclass(frozen=True)
class OracleRecipe:
    """A matrix with repeated, clustered or zero singular values."""

    kind: str
    m: int
    n: int
    seed: int
    problem: str = "oracle"


def draw(source: Source, scope: Scope) -> OracleRecipe:
    return OracleRecipe(
        kind=source.choice(KINDS),
        m=source.integer(1, 9),
        n=source.integer(1, 7),
        seed=source.integer(0, 2**32 - 1),
    )


def matrix(recipe: OracleRecipe) -> np.ndarray:
    """The numbers of a recipe."""
    rng = np.random.default_rng(recipe.seed)
    m, n = recipe.m, recipe.n
    if recipe.kind == "dummies":
        return np.column_stack([np.ones(m), np.eye(n)[rng.integers(0, n, m)]])
    if recipe.kind == "integers":
        return rng.integers(-1, 2, (m, n)).astype(float)
    if recipe.kind == "scaled":
        return np.ldexp(rng.integers(-2, 3, (m, n)).astype(float), rng.integers(-60, 61, n))
    k = min(m, n)
    values = np.ldexp(1.0, -rng.integers(0, {"zero": 2, "repeated": 3, "clustered": 2}[recipe.kind] + 1, k))
    if recipe.kind == "zero":
        values[rng.random(k) < 0.5] = 0.0
    if recipe.kind == "clustered":
        values *= 1 + 2.0 ** -float(rng.integers(20, 53)) * rng.random(k)
    reflections = [
        np.eye(size) - 2 * np.outer(v, v) / (v @ v) for size in (m, n) for v in [rng.integers(1, 4, size)]
    ]
    return reflections[0][:, :k] * values @ reflections[1][:k]


def judge(recipe: OracleRecipe, device: str) -> tuple[Verdict, str]:
    """Compare counts on both sides of every enclosure."""
    verdict, a = Verdict(), matrix(recipe)
    exact = integers(dyadic(a))[0]
    if exact.rank() == 0:
        return verdict, ""
    truth = LeastSquares(a, np.ones((len(a), 1)), rcond=max(a.shape) * 2.0**-52)
    with ctx.workprec(spectrum.BITS):
        for i, value in enumerate(truth.enclosures):
            wider = value * arb(1, arb((1, -290)))
            if not _count(exact, wider.lower()) > i >= _count(exact, wider.upper()):
                verdict.add("unsound", "enclosure", f"singular value {i} is not in {value}")
    by_enclosures = {int((truth.singular_values > truth.rcond * factor).sum()) for factor in (1.001, 0.999)}
    if not by_enclosures <= set(truth.ranks):
        verdict.add("unsound", "rank", f"{truth.ranks} by inertia, {by_enclosures} by enclosures")
    return verdict, f"a = np.array({a.tolist()})"


def _count(a: fmpz_mat, end: arb) -> int:
    """How many singular values are larger than an end of an enclosure."""
    mantissa, exponent = end.man_exp()
    t = Fraction(int(mantissa)) * Fraction(2) ** int(exponent)
    return a.ncols() if t <= 0 else spectrum.count_above(a, (t * t).as_integer_ratio())
