"""Non-linear fits: minima to a hundred digits by Newton's method, and models that no data determine.

Residuals, data and parameters are floating-point numbers, so the sum of squares is an exact function of them.
Newton's method begins where neula ends; neula's forward error is the distance to the minimum that it finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flint
import numpy as np
import torch
from flint import arb, arb_mat

import neula

from ..calls import answer_of, as_array
from ..recipes import Scope, Source
from ..verdict import Verdict

BITS = 320
"""Of the arithmetic that the minimum is found in."""

SLACK = 10.0
"""A forward error is an estimate: it may be too small by so much."""


class Balls:
    """Functions of balls, under the names that NumPy and torch have for them."""

    exp, sin, cos = (staticmethod(lambda x, name=name: getattr(x, name)()) for name in ("exp", "sin", "cos"))


def _decay(o: Any, t: Any, a: Any, b: Any, c: Any) -> tuple[Any, list[Any]]:
    e = o.exp(-b * t)
    return a * e + c, [e, -t * a * e, e * 0 + 1]


def _gauss(o: Any, t: Any, a: Any, c: Any, w: Any) -> tuple[Any, list[Any]]:
    u = (t - c) / w
    e = o.exp(-u * u / 2)
    return a * e, [e, a * e * u / w, a * e * u * u / w]


def _wave(o: Any, t: Any, a: Any, w: Any, f: Any) -> tuple[Any, list[Any]]:
    s, k = o.sin(w * t + f), o.cos(w * t + f)
    return a * s, [s, a * k * t, a * k]


def _saturation(o: Any, t: Any, a: Any, b: Any) -> tuple[Any, list[Any]]:
    return a * t / (b + t), [t / (b + t), -a * t / (b + t) / (b + t)]


def _line(o: Any, t: Any, a: Any, b: Any) -> tuple[Any, list[Any]]:
    return a + b * t, [t * 0 + 1, t + a * 0]


def _product(o: Any, t: Any, a: Any, b: Any, c: Any) -> tuple[Any, list[Any]]:
    return a * b * t + c, [b * t, a * t, t * 0 + 1]


def _sum(o: Any, t: Any, a: Any, b: Any, c: Any) -> tuple[Any, list[Any]]:
    return a + b + c * t, [t * 0 + 1, t * 0 + 1, t + a * 0]


def _factors(o: Any, t: Any, a: Any, b: Any) -> tuple[Any, list[Any]]:
    e = o.exp(a) * o.exp(b) * t
    return e, [e, e]


def _delayed(o: Any, t: Any, a: Any, b: Any, d: Any) -> tuple[Any, list[Any]]:
    e = o.exp(-b * (t - d))
    return a * e, [e, -(t - d) * a * e, a * b * e]


def _mixture(o: Any, t: Any, a: Any, b: Any, c: Any) -> tuple[Any, list[Any]]:
    x, y, z = t * 0.5 + 1, t * 0.25 + 2, t * 0.125 + 3
    return a * x + b * y + c * z, [x + a * 0, y + a * 0, z + a * 0]


@dataclass(frozen=True)
class Model:
    """A model with its derivatives; usual parameters, of which one may be a place on the axis of t; and the
    rank of the derivatives, whatever the parameters are.
    """

    values: Callable[..., tuple[Any, list[Any]]]
    truth: tuple[float, ...]
    rank: int
    place: int | None = None


MODELS = {
    "decay": Model(_decay, (2.5, 1.25, 0.5), 3),
    "gauss": Model(_gauss, (3.0, 0.0, 1.0), 3, 1),
    "wave": Model(_wave, (2.0, 1.5, 0.75), 3),
    "saturation": Model(_saturation, (2.0, 1.5), 2),
    "line": Model(_line, (1.0, 2.0), 2),
    "product": Model(_product, (2.0, 0.75, 1.0), 2),
    "sum": Model(_sum, (2.0, 0.75, 1.0), 2),
    "factors": Model(_factors, (0.5, 0.25), 1),
    "delayed": Model(_delayed, (2.0, 0.5, 1.0), 2),
    "mixture": Model(_mixture, (2.0, 0.75, 1.0), 2),
}

LOSSES: dict[str, Callable[[Any], Any]] = {
    "linear": lambda z: 0 * z + 1,
    "soft_l1": lambda z: 1 / (1 + z).sqrt(),
    "cauchy": lambda z: 1 / (1 + z),
}
"""Their first derivatives."""


@dataclass(frozen=True)
class FitsRecipe:
    """A fit with m observations. Derivatives are given where ``jac`` says so. ``noise`` is a power of ten,
    relative to the data (-99: none), ``offset`` one of a constant in model and data, ``step`` one of
    ``diff_step`` (-1 and 0: none). ``far`` is by which power of two of widths the axis of t is moved with a
    model that has a place; parameter ``of`` is in units of ``2^unit``, and residuals are multiplied by
    ``2^size``. Parameters are off by ``near`` hundredths of themselves, or of their width, in the
    beginning; bounds are far from the minimum.
    """

    model: str
    jac: str | None
    function: str
    library: str
    loss: str
    m: int
    noise: int
    far: int
    unit: int
    of: int
    size: int
    offset: int
    near: int
    step: int
    bounded: bool
    seed: int
    problem: str = "fits"


def draw(source: Source, scope: Scope) -> FitsRecipe:
    """A fit by decisions of a source."""
    model = source.choice(list(MODELS))
    library = source.choice(list(scope.libraries))
    schemes = [None, "given", "2-point", "3-point", "cs", *(["forward"] if library == "torch" else [])]
    jac = source.choice(schemes)
    stepped = jac in ("2-point", "3-point") and source.integer(0, 4) == 0
    return FitsRecipe(
        model=model,
        jac=jac,
        function=source.choice(["least_squares", "curve_fit"]),
        library=library,
        loss=source.choice(["linear", "linear", "linear", "soft_l1", "cauchy"]),
        m=source.choice([20, 12, 30, 5, 4, 3, 2]),
        noise=source.choice([-2, -1, 0, -4, -8, -12, -99]),
        far=source.choice([-1, 0, 4, 10, 14, 18, 22]),
        unit=source.choice([0, 0, -3, 10, -20, 40, -60, 200, -200]),
        of=source.integer(0, 3),
        size=source.choice([0, 0, 0, 20, -20, 200, -200]),
        offset=source.choice([-1, -1, -1, 2, 5, 9]),
        near=source.choice([10, 30, 1, 0]),
        step=source.choice([-4, -2, -8, -11]) if stepped else 0,
        bounded=source.integer(0, 4) == 0,
        seed=source.integer(0, 2**31 - 1),
    )


@dataclass(frozen=True)
class Fit:
    """The numbers of a recipe."""

    recipe: FitsRecipe
    model: Model
    t: np.ndarray
    y: np.ndarray
    start: np.ndarray
    units: np.ndarray
    constant: float
    size: float
    f_scale: float

    @classmethod
    def of(cls, recipe: FitsRecipe) -> Fit:
        """Build it; ``t`` lies on a grid, so that differences of them are exact."""
        rng, model = np.random.default_rng(recipe.seed), MODELS[recipe.model]
        q = np.array(model.truth) * np.exp2(rng.integers(-1, 2, len(model.truth)) / 4)
        spread = np.linspace(-3, 3, recipe.m) if model.place is not None else np.linspace(0.25, 4, recipe.m)
        t, widths = np.round(spread * 2**12) / 2**12, q.copy()
        if model.place is not None:
            shift = 0.0 if recipe.far < 0 else 2.0**recipe.far
            t, widths[model.place], q[model.place] = t + shift, 0.5, shift + 0.125
        elif recipe.model == "wave" and recipe.far > 0:
            widths[2], q[2] = 0.75, q[2] + 2.0**recipe.far
        units = np.ones(len(q))
        units[recipe.of % len(q)] = 2.0**recipe.unit
        constant = 0.0 if recipe.offset < 0 else 10.0**recipe.offset
        exact = model.values(np, t, *q)[0]
        level = 0.0 if recipe.noise == -99 else 10.0**recipe.noise
        y = constant + exact + level * rng.standard_normal(len(t))
        start = (q + recipe.near / 100 * widths * rng.choice([-1, 1], len(q))) * units
        size = 2.0**recipe.size
        return cls(recipe, model, t, size * y, start, units, constant, size, size * max(level, 1e-3))

    def values(self, o: Any, t: Any, p: Any) -> tuple[Any, list[Any]]:
        """The model and its derivatives by p, in NumPy, in torch, or of balls."""
        q = [
            x / (unit if o is not Balls else arb(unit))
            for x, unit in zip(p, self.units.tolist(), strict=True)
        ]
        constant, size = (
            (self.constant, self.size) if o is not Balls else (arb(self.constant), arb(self.size))
        )
        value, slopes = self.model.values(o, t, *q)
        return (value + constant) * size, [
            size * s / unit for s, unit in zip(slopes, self.units.tolist(), strict=True)
        ]

    def options(self) -> dict[str, Any]:
        recipe = self.recipe
        found: dict[str, Any] = {}
        if recipe.jac not in (None, "given"):
            found["jac"] = recipe.jac
        if recipe.loss != "linear":
            found |= {"loss": recipe.loss, "f_scale": self.f_scale}
        if recipe.step:
            found["diff_step"] = 10.0**recipe.step
        if recipe.bounded:
            far = 8 * np.maximum(np.abs(self.start), self.units)
            found["bounds"] = (self.start - far, self.start + far)
        return found

    def run(self, device: str) -> Any:
        """Give it to neula."""
        recipe, options = self.recipe, self.options()
        t, y, start, o, stack = self.t, self.y, self.start, np, np.stack
        if recipe.library == "torch":
            t, y, start = (torch.from_numpy(x).to(device) for x in (t, y, start))
            o, stack = torch, torch.stack

        def model(t: Any, *p: Any) -> Any:
            return self.values(o, t, p)[0]

        def slopes(t: Any, *p: Any) -> Any:
            return stack([s + 0 * t for s in self.values(o, t, p)[1]], -1)

        if recipe.function == "curve_fit":
            if recipe.jac == "given":
                options["jac"] = slopes
            return neula.curve_fit(model, t, y, p0=start, **options).result
        if recipe.jac == "given":
            options["jac"] = lambda p: slopes(t, *p)
        return neula.least_squares(lambda p: model(t, *p) - y, start, **options)

    def gradient(self, p: list[arb]) -> list[arb]:
        """Of half the sum of losses."""
        total, slope_of = [arb(0)] * len(p), LOSSES[self.recipe.loss]
        scale = arb(self.f_scale)
        for t, y in zip(self.t.tolist(), self.y.tolist(), strict=True):
            value, slopes = self.values(Balls, arb(t), p)
            f = value - arb(y)
            weighted = f * slope_of((f / scale) ** 2)
            total = [g + weighted * s for g, s in zip(total, slopes, strict=True)]
        return [x.mid() for x in total]

    def hessian(self, p: list[arb]) -> arb_mat:
        """By differences of the gradient."""
        rows = []
        for j, unit in enumerate(self.units.tolist()):
            h = arb(unit) * arb(2) ** (-100)
            up, down = ([*p[:j], p[j] + by, *p[j + 1 :]] for by in (h, -h))
            pairs = zip(self.gradient(up), self.gradient(down), strict=True)
            rows.append([((a - b) / (2 * h)).mid() for a, b in pairs])
        return arb_mat(rows)

    def jacobian(self, x: np.ndarray) -> np.ndarray:
        """Of the residuals, rounded."""
        p = [arb(v) for v in x.tolist()]
        rows = [self.values(Balls, arb(t), p)[1] for t in self.t.tolist()]
        return np.array([[float(arb(s).mid()) for s in row] for row in rows])


def minimum_near(fit: Fit, x: np.ndarray, at_bounds: np.ndarray) -> np.ndarray | None:
    """``x - x*`` to the digits of floating-point numbers, some variables being held at bounds; None unless
    Newton's method comes to a minimum.
    """
    p, units = [arb(v) for v in x.tolist()], fit.units.tolist()
    free = np.flatnonzero(at_bounds == 0).tolist()
    for _ in range(12):
        h, g, step = fit.hessian(p), fit.gradient(p), [arb(0)] * len(p)
        try:
            found = arb_mat([[h[i, j] for j in free] for i in free]).solve(arb_mat([[g[i]] for i in free]))
        except ZeroDivisionError:
            return None
        for i, row in zip(free, found.tolist(), strict=True):
            step[i] = row[0].mid()
        p = [(a - b).mid() for a, b in zip(p, step, strict=True)]
        lengths = [abs(float(s / arb(unit))) for s, unit in zip(step, units, strict=True)]
        if not max(lengths) < 1e3:
            return None
        if max(lengths) < 1e-40:
            unit = [arb(u) for u in units]
            size = arb(fit.size) ** 2
            scaled = [[float(h[i, j] * unit[i] * unit[j] / size) for j in free] for i in free]
            if free and not np.linalg.eigvalsh(np.array(scaled)).min() > 0:
                return None
            return np.array([float(arb(a) - b) for a, b in zip(x.tolist(), p, strict=True)])
    return None


def judge(recipe: FitsRecipe, device: str) -> tuple[Verdict, str]:
    """Compare neula's answer with the minimum nearby."""
    fit = Fit.of(recipe)
    with np.errstate(all="ignore"):
        answer = answer_of(lambda: fit.run(device))
    verdict, result, warned = Verdict.on(answer), answer.result, answer.warned
    if answer.error is not None:
        if "not finite at x0" not in str(answer.error):
            verdict.add("violation", "error", f"{verdict.raised}: {answer.error}")
        return verdict, _shown(recipe)
    usual = ("RuntimeWarning", "DeprecationWarning")
    if stray := [text for text in answer.stray if not text.startswith(usual)]:
        verdict.add("violation", "warning", "; ".join(stray))
    if warned == result.converged:
        verdict.add("violation", "converged", f"warned: {warned}, converged: {result.converged}")
    x, n = as_array(result.x), len(fit.start)
    rank = min(fit.model.rank, recipe.m)
    told = {"rank": int(result.rank), "accepted": bool(result.converged), "warned": warned}
    verdict.numbers.append({"forward_errors": [float(result.forward_error)], "errors": [math.nan], **told})
    if result.rank > rank or (result.converged and rank < n):
        verdict.add("unsound", "rank", f"rank {result.rank}, and every Jacobian has {rank}")
    if rank < n and bool(np.isfinite(as_array(result.standard_errors())).any()):
        verdict.add("unsound", "errors", "standard errors of what is not determined")
    if rank < n or not np.isfinite(x).all():
        return verdict, _shown(recipe)
    with flint.ctx.workprec(BITS):
        left = minimum_near(fit, x, as_array(result.active_mask))
        jac = fit.jacobian(x) / fit.size
    if left is None:
        return verdict, _shown(recipe)
    norms = np.linalg.norm(jac, axis=0)
    error = float(np.linalg.norm(norms * left) / np.linalg.norm(norms * (x - left)))
    verdict.numbers[0]["errors"] = [error]
    if result.converged and not error <= SLACK * result.forward_error:
        verdict.add("unsound", "forward", f"claimed {result.forward_error:.2e}, true {error:.2e}")
    if not result.converged and _is_easy(fit, result, jac, norms, error):
        verdict.add(
            "false alarm", "warning", f"{[str(w.message) for w in answer.warnings][-1:]}, true {error:.2e}"
        )
    return verdict, _shown(recipe)


def _is_easy(fit: Fit, result: Any, jac: np.ndarray, norms: np.ndarray, error: float) -> bool:
    """Whether x is right, and rounding errors and those of the Jacobian that was used leave two digits."""
    if not (error < 1e-2 and (norms > 0).all()) or result.status <= 0 or fit.recipe.loss != "linear":
        return False
    values = np.linalg.svd(jac / norms, compute_uv=False)
    used = as_array(result.jac) / fit.size
    noise = float(np.linalg.norm((used - jac) / norms)) + 2.0**-50
    far, condition = float(np.linalg.norm(norms * as_array(result.x))), float(values[0] / values[-1])
    size = float(np.linalg.norm(as_array(result.fun))) / fit.size
    data = float(np.linalg.norm(fit.y)) / fit.size
    expected = 2.0**-50 * condition * (data + far) / far + noise * condition**2 * size / far
    return noise * condition < 1e-2 and expected < 1e-3


def _shown(recipe: FitsRecipe) -> str:
    return f"from tests.campaign.areas.fits import Fit, FitsRecipe\nprint(Fit.of({recipe!r}).run('cpu'))"
