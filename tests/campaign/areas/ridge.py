"""Ridge paths, and models chosen by them, beside refits in rational arithmetic."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from flint import arb, ctx, fmpq, fmpq_mat

import neula
from neula.engines import EmulatedEngine

from ..calls import answer_of
from ..exact import dyadic, embedded, error_in_norm, integers, parts, root_of_quotient
from ..matrices import ldexp, random_numbers
from ..recipes import Scope, Source, scalars_of
from ..verdict import Verdict, as_python

KINDS = (
    *("gaussian", "integers", "dummies", "copies", "nearly", "columns", "rows", "graded"),
    *("alone", "vandermonde", "zero", "centred"),
)
RHS = ("random", "integers", "inside", "zero", "tiny")
DAMPS = ("usual", "tiny", "wide", "none")
SOLVABLE = 1e-3
"""Largest change by a perturbation of rounding size for which a warning is a false alarm."""


@dataclass(frozen=True)
class RidgeRecipe:
    """A path of three dampings; powers are those of two."""

    kind: str
    m: int
    n: int
    rhs: str
    damps: str
    power: int
    of_a: int
    of_b: int
    engine: str
    library: str
    seed: int
    problem: str = "ridge"
    scalars: str = "real"

    @property
    def mean(self) -> bool:
        """Whether there is an intercept."""
        return self.kind == "centred" and self.scalars == "real"


def draw(source: Source, scope: Scope) -> RidgeRecipe:
    return RidgeRecipe(
        kind=source.choice(KINDS),
        m=source.integer(1, 7),
        n=source.integer(1, 7),
        rhs=source.choice(RHS),
        damps=source.choice(DAMPS),
        power=source.integer(5, 50),
        of_a=source.choice((0, 0, 0, 0, 400, -400)),
        of_b=source.choice((0, 0, 0, 300, -300)),
        engine=source.choice(scope.engines),
        library=source.choice(scope.libraries),
        seed=source.integer(0, 2**32 - 1),
        scalars=scalars_of("ridge", source, scope),
    )


def arrays(recipe: RidgeRecipe) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, b and the dampings."""
    rng, m, n = random_numbers(recipe.seed, is_complex=recipe.scalars == "complex"), recipe.m, recipe.n
    small = 2.0 ** -min(recipe.power, 40)  # ranks that are not in doubt
    a = rng.integers(-3, 4, (m, n)) * 1.0
    if recipe.kind in ("gaussian", "columns", "rows", "nearly", "graded"):
        a = rng.standard_normal((m, n))
    if recipe.kind == "dummies":
        a = np.column_stack([np.ones(m), np.eye(n)[rng.integers(0, n, m)]])
    elif recipe.kind in ("copies", "nearly"):
        a = np.column_stack([a, a[:, 0]])
        a[0, -1] += (recipe.kind == "nearly") * small
    elif recipe.kind == "columns":
        a[:, 0] *= 2.0**recipe.power
    elif recipe.kind == "rows":
        a[-1] *= small
    elif recipe.kind == "graded":
        a *= small ** (np.arange(n) / n)
    elif recipe.kind == "alone":  # a column that is not zero in one row only
        a[:, 0] = np.arange(m) == rng.integers(0, m)
    elif recipe.kind == "vandermonde":
        a = np.vander(np.arange(m) / 8 + rng.integers(0, 2, m) * small, n)
    elif recipe.kind == "zero":
        a[:, rng.integers(0, n)] = 0
    elif recipe.kind == "centred":  # means of powers of two are exact
        a = rng.integers(-99, 100, (2 ** (m % 3 + 1), n)) * 1.0
        a -= a.mean(0)
    b = rng.standard_normal(len(a))
    if recipe.rhs == "integers":
        b = rng.integers(-9, 10, len(a)).astype(float)
    elif recipe.rhs == "inside":
        b = a @ rng.integers(-3, 4, a.shape[1])
    elif recipe.rhs == "zero":
        b = np.zeros(len(a))
    elif recipe.rhs == "tiny":
        b = b * 2.0**-recipe.power
        b[0] = 1.0
    if recipe.kind == "centred":
        b = np.round(b * 64)
        b -= b.mean()
    damps = {
        "usual": 10.0 ** rng.integers(-4, 3, 3),
        "tiny": 10.0 ** -rng.integers(5, 13, 3),
        "wide": np.ldexp(1.0, rng.integers(-70, 40, 3)),
        "none": np.array([0.0, 1e-9, 1.0]),
    }[recipe.damps]
    return ldexp(a, recipe.of_a), ldexp(b, recipe.of_b), np.ldexp(damps, recipe.of_a)


def rational(a: np.ndarray) -> fmpq_mat:
    """The numbers as they are; a vector as a column."""
    found, exponent = integers(dyadic(a if a.ndim == 2 else a[:, None]))
    return fmpq_mat(found) * _power(exponent)


def _power(exponent: int) -> fmpq:
    return fmpq(1 << exponent) if exponent >= 0 else fmpq(1, 1 << -exponent)


def inverse_of_gram(a: fmpq_mat) -> fmpq_mat:
    return (a.transpose() * a).inv()


def shortest(a: fmpq_mat, b: fmpq_mat) -> fmpq_mat:
    """The least-squares solution of minimum norm, by a factorization ``A = C F`` of full rank."""
    f, rank = a.rref()
    if not rank:
        return fmpq_mat(a.ncols(), b.ncols())
    rows = f.tolist()[:rank]
    pivots = [next(j for j, v in enumerate(row) if v != 0) for row in rows]
    c, f = fmpq_mat([[row[j] for j in pivots] for row in a.tolist()]), fmpq_mat(rows)
    y = inverse_of_gram(c) * (c.transpose() * b)
    return f.transpose() * (inverse_of_gram(f.transpose()) * y)


def ridge(a: fmpq_mat, b: fmpq_mat, square: fmpq, mean: bool) -> fmpq_mat:
    """The exact solution, with an intercept that is not damped below it where there is one."""
    if a.nrows() == 0:
        return fmpq_mat(a.ncols() + mean, b.ncols())
    if square == 0:
        means = [
            fmpq_mat([[sum(c, fmpq(0)) / len(c) for c in zip(*y.tolist(), strict=True)]]) * mean
            for y in (a, b)
        ]
        of_a, of_b = (fmpq_mat([y.tolist()[0]] * a.nrows()) for y in means)
        x = shortest(a - of_a, b - of_b)
        return fmpq_mat([*x.tolist(), *(means[1] - means[0] * x).tolist()][: a.ncols() + mean])
    if mean:
        a = fmpq_mat([[*row, fmpq(1)] for row in a.tolist()])
    n = a.ncols()
    gram = a.transpose() * a + fmpq_mat([[square * (i == j < n - mean) for j in range(n)] for i in range(n)])
    return gram.solve(a.transpose() * b)


@dataclass
class Truth:
    """The exact answers for one damping. Of complex numbers those of the real problem of their parts, where
    an observation is two rows.
    """

    rows: int
    x: fmpq_mat
    residual: fmpq
    left_out: list[fmpq]
    trace: fmpq
    scale: list[fmpq]

    @classmethod
    def of(cls, a: np.ndarray, b: np.ndarray, damp: float, mean: bool) -> Truth:
        rows, fold = len(a), 1 + (np.iscomplexobj(a) or np.iscomplexobj(b))
        if fold == 2:
            a, b = embedded(a), parts(b[:, None])
        exact, y, square = rational(a), rational(b), rational(np.array([damp]))[0, 0] ** 2
        m, n = a.shape
        x = ridge(exact, y, square, mean)
        image = fmpq_mat([[*row, *[fmpq(1)] * mean] for row in exact.tolist()])
        residual = y - image * x
        units = ridge(exact, fmpq_mat([[fmpq(i == j) for j in range(m)] for i in range(m)]), square, mean)
        hat = image * units
        left_out = []
        for i in range(m):
            others = [j for j in range(m) if j % rows != i % rows]
            lines, values = exact.tolist(), y.tolist()
            part = fmpq_mat([lines[j] for j in others]) if others else fmpq_mat(0, n)
            of_part = fmpq_mat([values[j] for j in others]) if others else fmpq_mat(0, 1)
            fit = ridge(part, of_part, square, mean)
            left_out.append(y[i, 0] - (fmpq_mat([image.tolist()[i]]) * fit)[0, 0])
        scale = [sum((exact[i, j] ** 2 for i in range(m)), fmpq(0)) + square for j in range(n)]
        trace = m - sum((hat[i, i] for i in range(m)), fmpq(0))
        squared = sum((v**2 for v in residual.entries()), fmpq(0))
        return cls(rows, x, squared, left_out, trace / fold, scale)

    def error_of_x(self, x: fmpq_mat) -> float:
        """``||D (x - x*)|| / ||D x*||``."""
        n = len(self.scale)  # without an intercept
        return error_in_norm(self.scale, x.entries()[:n], self.x.entries()[:n])

    @property
    def numbers(self) -> dict[str, fmpq | None]:
        """Squares of the numbers that are judged."""
        m = self.rows
        gcv = m * self.residual / self.trace**2 if self.trace != 0 else None
        loo = sum((e**2 for e in self.left_out), fmpq(0)) / m
        return {"residual_norms": self.residual, "gcv": gcv, "leave_one_out": loo}


def relative_error(found: float, exact: fmpq, *, root: bool) -> float:
    """Of a number whose exact value, or its square, is known."""
    if found == 0 or exact == 0:
        return 0.0 if found == 0 and exact == 0 else (1.0 if exact != 0 else math.inf)
    true = arb(exact).sqrt() if root else arb(exact)
    return float((abs(arb(found) - true) / true).mid())


def judge(recipe: RidgeRecipe, device: str) -> tuple[Verdict, str]:
    """Every number against its bound; whether a warning was due by what rounding errors of A change."""
    a, b, damps = arrays(recipe)
    mean = recipe.mean
    leverage = 1 / len(a) if mean else 0.0
    shown = as_python(f"neula.ridge_path(A, b, {damps.tolist()}, leverage={leverage})", A=a, b=b)
    engine = EmulatedEngine() if recipe.engine == "emulated" else recipe.engine
    given = [torch.from_numpy(y).to(device) for y in (a, b)] if recipe.library == "torch" else [a, b]
    answer = answer_of(lambda: neula.ridge_path(*given, damps, leverage=leverage, engine=engine))
    verdict, path, warned = Verdict.on(answer), answer.result, answer.warned
    if answer.error is not None:
        verdict.add("violation", "raised", f"{verdict.raised}: {answer.error}")
        return verdict, shown
    if warned == path.converged or path.converged != bool(path.accepted.all()):
        verdict.add("violation", "warning", f"converged {path.converged}, warned {warned}")
    with ctx.workprec(400):
        truths = [Truth.of(a, b, damp, mean) for damp in damps.tolist()]
        _judge_model(verdict, recipe, (a, b, damps), [truth.numbers["leave_one_out"] for truth in truths])
        for i, (damp, truth) in enumerate(zip(damps.tolist(), truths, strict=True)):
            _judge_one(verdict, partial(_numbers, path, i), truth, bool(path.accepted[i]), damp)
            if not path.accepted[i] and _is_solvable(a, b, damp, mean, truth):
                verdict.add("false alarm", "accepted", f"damping {damp}: {_numbers(path, i, 'errors')}")
    return verdict, shown if verdict.findings else ""


def _judge_model(
    verdict: Verdict,
    recipe: RidgeRecipe,
    given: tuple[np.ndarray, np.ndarray, np.ndarray],
    errors: list[fmpq],
) -> None:
    """The model that RidgeCV chooses is the one that predicts best."""
    a, b, damps = given
    if recipe.of_a or recipe.of_b or not damps.all() or len(a) < 2 or recipe.scalars == "complex":
        return
    from neula.sklearn import RidgeCV  # which takes seconds to import, and few processes need

    mean = recipe.mean
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = RidgeCV(damps**2, fit_intercept=mean).fit(a, b)
    found, best = errors[(damps**2).tolist().index(model.alpha_)], min(errors)
    accurate = not any(issubclass(w.category, neula.AccuracyWarning) for w in caught)
    if accurate and found > best * fmpq(1 + 10**9, 10**9) and found > fmpq(1, 10**28):
        verdict.add("unsound", "model", f"{model.alpha_} chosen of {damps**2}: {errors}")


def _numbers(path: neula.RidgePath, i: int, name: str) -> tuple[float, float] | list[float]:
    names = ("residual_norm_errors", "gcv_errors", "leave_one_out_errors")
    if name == "errors":
        return [float(getattr(path, each)[i]) for each in ("forward_errors", *names)]
    of = {"residual_norms": names[0], "gcv": names[1], "leave_one_out": names[2]}
    return float(getattr(path, name)[i]), float(getattr(path, of[name])[i])


def _judge_one(verdict: Verdict, numbers, truth: Truth, accepted: bool, damp: float) -> None:
    """One damping; without a warning claims have to hold, and with one where they are made."""
    kind = "unsound" if accepted else "violation"
    path, i = numbers.args
    x = np.asarray(path.x[i].tolist())
    x = parts(x[:, None]) if np.iscomplexobj(x) else x
    error, claimed = truth.error_of_x(rational(x)), float(path.forward_errors[i])
    told = {"accepted": accepted, "warned": not path.converged}
    verdict.numbers.append({"errors": [error], "forward_errors": [claimed], **told})
    if error > claimed * (1 + 1e-6):
        verdict.add(kind, "x", f"damping {damp}: forward error {claimed:.1e}, true {error:.1e}")
    for name, exact in truth.numbers.items():
        value, claimed = numbers(name)
        if exact is None or not math.isfinite(claimed):
            continue
        error = relative_error(value, exact, root=name == "residual_norms")
        if not error <= claimed * (1 + 1e-6):
            verdict.add(kind, name, f"damping {damp}: error {claimed:.1e} claimed, true {error:.1e}")


def _is_solvable(a: np.ndarray, b: np.ndarray, damp: float, mean: bool, truth: Truth) -> bool:
    """Whether changes of A and b by rounding errors leave all answers nearly as they are."""
    if mean:
        return False
    rng = np.random.default_rng(1)
    for _ in range(2):
        noise = 16 * 2.0**-53 * rng.uniform(-1, 1, a.shape) * np.abs(a).max(0)
        moved = Truth.of(a + noise, b * (1 + 2.0**-50 * rng.uniform(-1, 1, b.shape)), damp, mean)
        errors = [truth.error_of_x(moved.x)]
        for (_, p), (_, q) in zip(moved.numbers.items(), truth.numbers.items(), strict=True):
            if p is None or q is None:
                return False
            errors.append(root_of_quotient((p - q) ** 2, q**2))
        if not max(errors) <= SOLVABLE:
            return False
    return True
