"""Iterations of least squares: against the condition number of ``A R^-1``, the stress case, and errata.

The stress case is a geometric spectrum of condition 1e4 (HPDC 2020, section 4.2.2; arXiv 2019, Figure 5). The
errata are literal transcriptions of Algorithm 3 as it is printed in both versions, and as it was meant:
:func:`neula.algorithms.krylov.cgls.cgls` is the one that the library uses. All corrections are listed in
``docs/experiments/errata.md``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from neula.algorithms.krylov.cgls import LeastSquaresOperator, Stop, cgls, lsqr
from neula.algorithms.krylov.refinement import InnerSolver
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.scaling import power_of_two_scales
from neula.algorithms.spectra.condition import solve_rt
from neula.engines import FP32, Engine
from neula.papers.data import Measurements, Row
from neula.papers.drawing import Axes, Canvas, grouped_bars, lines, log_log, shape_text
from neula.papers.figure import Setting
from neula.papers.measuring import first_run
from neula.papers.qr import least_squares as ls
from neula.papers.qr.least_squares import gradient_norm, right_hand_side
from neula.papers.verdicts import MORE, ClaimCheck, about, cases, within

TOLERANCE = 1e-10
MAX_ITERATIONS = 400
FORMATS: dict[str, dict[str, Any]] = {
    "fp16": {"marker": "o", "markersize": 9, "fillstyle": "none"},
    "bf16": {"marker": "s", "markersize": 6},
    "tf32": {"marker": "x", "markersize": 6},
}
"""Formats of R and how they are drawn: fp16 and tf32 often coincide."""
SPECTRA = ("arithmetic", "geometric", "cluster_small")
CONDITIONS = [10.0 ** (k / 2) for k in range(11)]
SLACK = 0.1
MOST = 0.9
SLOW = 1.1  # below this condition number of A R^-1 a handful of iterations suffices for any spectrum
MEASURABLE = 1e-13
"""Eigenvalues of a Gram matrix that are smaller, relative to the largest, are rounding errors."""


def measure_iterations(setting: Setting, shape: tuple[int, int] | None = None) -> Iterator[Row]:
    """Iterations of CGLS and LSQR, and the condition number of ``A R^-1`` that they depend on."""
    m, n = shape or setting.shape(small=(768, 384), paper=(8192, 2048), bytes_an_entry=64)
    cases = setting.kinds([(spectrum, cond) for spectrum in SPECTRA for cond in CONDITIONS])
    for spectrum, cond in setting.track(cases, lambda case: f"{case[0]} {case[1]:.0e}"):
        a = setting.random(spectrum, m, n, cond=cond, seed=3)
        b = right_hand_side(a)
        for name in FORMATS:
            r = scaled_triangle(a, setting.numerics.using(name))
            kappa = preconditioned_condition(a, r)
            counts = {"cgls": iterations_of(cgls, a, r, b), "lsqr": iterations_of(lsqr, a, r, b)}
            head = {"spectrum": spectrum, "cond": cond, "m": m, "n": n, "format": name}
            yield head | {"cond_preconditioned": kappa} | counts


def scaled_triangle(a: torch.Tensor, engine: Engine) -> torch.Tensor:
    """R of A as ``neula.lstsq`` computes it: of the scaled matrix."""
    scales = power_of_two_scales(engine.column_max(a))
    _, r = rgsqrf((a * scales).float(), engine)
    return r.double() / scales


def preconditioned_condition(a: torch.Tensor, r: torch.Tensor) -> float | None:
    """Condition number of ``A R^-1``; None where R is no preconditioner at all."""
    w = torch.linalg.solve_triangular(r, a, upper=True, left=False)
    if not bool(w.isfinite().all()):
        return None
    eigenvalues = torch.linalg.eigvalsh(w.T @ w)
    smallest, largest = float(eigenvalues[0]), float(eigenvalues[-1])
    return math.sqrt(largest / smallest) if smallest > MEASURABLE * largest else None


def iterations_of(
    solver: InnerSolver,
    a: torch.Tensor,
    r: torch.Tensor,
    b: torch.Tensor,
    tolerance: float = TOLERANCE,
    most: int = MAX_ITERATIONS,
) -> int | None:
    """Iterations until ``||R^-T A^T r||`` is reduced by the tolerance; None if it is not."""
    operator = LeastSquaresOperator(a)
    start = torch.linalg.vector_norm(solve_rt(r, operator.rmatmul(b)), dim=0)
    if not bool(start.isfinite().all()):
        return None
    found = solver(operator, r, b, stop=Stop(tolerance * start), max_iterations=most)
    residual = b - operator.matmul(found.x)
    reduced = torch.linalg.vector_norm(solve_rt(r, operator.rmatmul(residual)), dim=0)
    # The true residual differs from the updated one by rounding errors.
    return found.iterations if bool((reduced <= 2 * tolerance * start).all()) else None


# item: Q rate
def iteration_bound(kappa: float) -> int:
    """Iterations that suffice in exact arithmetic for a condition number of ``A R^-1``.

    ``||A (x - x_i)||`` falls as ``2 ((kappa - 1) / (kappa + 1))^i``, and ``||R^-T A^T r||`` is that times
    something between the extreme singular values: another factor of at most ``kappa``.
    """
    if kappa <= 1:
        return 1
    rate = math.log((kappa + 1) / (kappa - 1))
    return max(1, math.ceil(math.log(2 * kappa / TOLERANCE) / rate))


def draw_iterations(rows: Measurements, canvas: Canvas) -> None:
    """The condition number that R in each format leaves, and the iterations that this takes."""
    left, right = canvas.subplots(1, 2)
    for color, (spectrum, part) in enumerate(rows.by("spectrum").items()):
        for name, style in FORMATS.items():
            own = part.where(format=name)
            excess = [_excess(row) for row in own]
            look: dict[str, Any] = {"color": f"C{color}"} | style
            left.plot(own.column("cond"), excess, label=f"{spectrum}, {name}", linewidth=1, **look)
            right.plot(excess, own.numbers("cgls"), linestyle="", **look)
            right.plot(excess, own.numbers("lsqr"), "k.", markersize=4, zorder=3)
    _draw_bound(right, [row for row in rows if row["lsqr"] is not None])
    shape = shape_text(rows[0]["m"], rows[0]["n"])
    x = "cond(AR$^{-1}$) - 1"
    log_log(left, "cond(A)", x, f"what R leaves of the condition number, {shape}")
    log_log(right, x, "iterations", "iterations to reduce ||R$^{-T}$A$^T$r|| by $10^{-10}$")
    right.set_ylim(2, 1.5 * MAX_ITERATIONS)
    for place in (left, right):
        place.legend(fontsize=9, loc="upper left")


def _draw_bound(axes: Axes, rows: Sequence[Row]) -> None:
    """The dashed curve as far as there are results, and entries of the legend for the two solvers."""
    excess = sorted(_excess(row) for row in rows if row["cond_preconditioned"] is not None)
    axes.plot(excess, [iteration_bound(1 + x) for x in excess], "--", color="gray", label="theory: at most")
    axes.plot([], [], "s", color="gray", label="CGLS (colours and marks as on the left)")
    axes.plot([], [], "k.", markersize=4, label="LSQR")


def _excess(row: Row) -> float:
    """How far the condition number of ``A R^-1`` is from 1."""
    kappa = row["cond_preconditioned"]
    return math.nan if kappa is None else kappa - 1


def _count(row: Row, solver: str) -> int:
    """Iterations; a solver that has not finished has taken as many as it may."""
    return MAX_ITERATIONS if row[solver] is None else row[solver]


def _alike(first: int, second: int) -> bool:
    """Rounding errors move the last iteration by one, and slow convergence by a few in a hundred."""
    return abs(first - second) <= max(1, SLACK * max(first, second))


def within_theory(rows: Measurements) -> ClaimCheck:
    """Where CGLS has finished, or should have: what may take more iterations than it got decides nothing."""
    known = [row for row in rows if row["cond_preconditioned"] is not None]
    bounds = [iteration_bound(row["cond_preconditioned"]) for row in known]
    decided = [
        (row, bound)
        for row, bound in zip(known, bounds, strict=True)
        if row["cgls"] is not None or bound <= MAX_ITERATIONS
    ]
    kept = [row["cgls"] is not None and row["cgls"] <= bound for row, bound in decided]
    slow = [(row, b) for row, b in decided if row["cgls"] and row["cond_preconditioned"] > SLOW]
    used = f"{statistics.median(row['cgls'] / bound for row, bound in slow):.0%}" if slow else "none"
    return cases(
        kept,
        f"{sum(kept)} of {len(decided)}, {len(known) - len(decided)} undecided after {MAX_ITERATIONS}; "
        f"median part of the bound where cond(AR^-1) > {SLOW:g}: {used}",
    )


def lsqr_alike(rows: Measurements) -> ClaimCheck:
    """Where one of them finishes."""
    finished = [row for row in rows if row["cgls"] is not None or row["lsqr"] is not None]
    pairs = [(_count(row, "cgls"), _count(row, "lsqr")) for row in finished]
    alike = [_alike(*pair) for pair in pairs]
    equal = sum(row["cgls"] == row["lsqr"] for row in finished)
    return cases(alike, f"equal in {equal} of {len(pairs)}, within {SLACK:.0%} in {sum(alike)}")


def bits_decide(rows: Measurements) -> ClaimCheck:
    """Formats on equal matrices, where one of those with 11 bits finishes."""
    by_format = (rows.where(format=name) for name in ("fp16", "tf32", "bf16"))
    counts = [[_count(row, "cgls") for row in three] for three in zip(*by_format, strict=True)]
    finished = [three for three in counts if min(three[:2]) < MAX_ITERATIONS]
    alike = [_alike(fp16, tf32) for fp16, tf32, _ in finished]
    more = [bf16 > fp16 for fp16, _, bf16 in finished]
    text = f"of {len(finished)}: tf32 as many as fp16 in {sum(alike)}, bf16 more in {sum(more)}"
    both = [like and greater for like, greater in zip(alike, more, strict=True)]
    return cases(both, text, least=MOST)


MOST_ITERATIONS = 200  # most iterations that the paper tolerates
LOOSE, TIGHT = 1e-6, 1e-12
"""Reductions of ``||R^-T A^T r||``: what the paper reaches after 200 iterations, and double precision."""
SOLVERS = {"cgls": cgls, "lsqr": lsqr}
SINGLE = "RGSQRF + CGLS, single"
ONLY_EASIER = 30  # iterations for condition 1e3: a stress case takes more


# item: Q stress case; V Figure 5
def measure_stress(setting: Setting, shapes: Sequence[tuple[int, int]] = ()) -> Iterator[Row]:
    """Iterations of both solvers with R in fp16, and times and errors where single precision is enough."""
    small, paper = ((1024, 512), (2048, 512)), ((32768, 16384), (65536, 8192), (131072, 4096))
    kind, cond = ls.STRESS
    fitting = setting.fitting(shapes or setting.pick(small=small, paper=paper), ls.BYTES_AN_ENTRY)
    options: dict[str, Any] = {"algorithm": "cgls", "accuracy": "fp32", "max_iterations": MOST_ITERATIONS}
    for m, n in setting.track(fitting, lambda shape: shape_text(*shape)):
        a = setting.random(kind, m, n, cond=cond, seed=7)
        b, head = ls.right_hand_side(a), {"m": m, "n": n}
        r = scaled_triangle(a, setting.numerics)
        for name, solver in SOLVERS.items():
            for tolerance in (LOOSE, TIGHT):
                count = iterations_of(solver, a, r, b, tolerance, MOST_ITERATIONS)
                yield head | {"solver": name, "tolerance": tolerance, "iterations": count}
        _, seconds = first_run(partial(ls.with_low_factors, a, b, setting.speed, **options))
        found = ls.with_low_factors(a, b, setting.numerics, **options)
        error = ls.optimality(a, b, found["x"]) if "x" in found else None
        own = {"solver": SINGLE, "iterations": found["iterations"], "optimality": error}
        yield head | own | {"ms": 1e3 * seconds}
        for name, dtype in ls.PEERS.items():
            x, seconds = first_run(partial(ls.gels, a.to(dtype), b.to(dtype)), warmup=0)
            yield head | {"solver": name, "optimality": ls.optimality(a, b, x), "ms": 1e3 * seconds}
        del a


def draw_stress(rows: Measurements, canvas: Canvas) -> None:
    left, right = canvas.subplots(1, 2)
    shapes = [shape_text(row["m"], row["n"]) for row in rows.where(solver=SINGLE)]
    counts = {
        f"{name}, to {tolerance:.0e}": rows.where(solver=name, tolerance=tolerance).column("iterations")
        for name in SOLVERS
        for tolerance in (LOOSE, TIGHT)
    }
    labels = {name: [_in_words([x or math.inf]) for x in part] for name, part in counts.items()}
    grouped_bars(left, shapes, counts, labels)
    times = {name: rows.where(solver=name).column("ms") for name in (SINGLE, *ls.PEERS)}
    grouped_bars(right, shapes, times, {name: [f"{x:.3g}" for x in part] for name, part in times.items()})
    left.set(ylabel="iterations")
    right.set(ylabel="time (ms)", yscale="log")
    for place in (left, right):
        place.legend(fontsize=9)
        place.margins(y=0.3)


def _iterations(rows: Measurements, solver: str, tolerance: float) -> list[float]:
    """Counts of all sizes; infinite where 200 were not enough."""
    counts = rows.where(solver=solver, tolerance=tolerance).column("iterations")
    return [math.inf if count is None else count for count in counts]


def _in_words(counts: Sequence[float]) -> str:
    return ", ".join(f"more than {MOST_ITERATIONS}" if math.isinf(x) else f"{x:.0f}" for x in counts)


def slow_convergence(rows: Measurements) -> ClaimCheck:
    """At the size with the most columns."""
    n = max(rows.column("n"))
    counts, interval = _iterations(rows.where(n=n), "cgls", LOOSE)[:1], about(MOST_ITERATIONS, 1.25)
    return within(counts, interval, f"{_in_words(counts)} for n = {n}", weaker=(ONLY_EASIER, math.inf))


def out_of_reach(rows: Measurements) -> ClaimCheck:
    counts = [count for solver in SOLVERS for count in _iterations(rows, solver, TIGHT)]
    return within(counts, (MOST_ITERATIONS + 1, math.inf), f"{_in_words(counts)} iterations to 1e-12")


def lsqr_too(rows: Measurements) -> ClaimCheck:
    ours, theirs = (
        [count for tolerance in (LOOSE, TIGHT) for count in _iterations(rows, solver, tolerance)]
        for solver in ("lsqr", "cgls")
    )
    decided = [pair for pair in zip(ours, theirs, strict=True) if min(pair) < math.inf]
    ratios = [x / y if max(x, y) < math.inf else math.nan for x, y in decided]
    return within(ratios, (1 - SLACK, 1 + SLACK), f"LSQR {_in_words(ours)}, CGLS {_in_words(theirs)}")


def single_is_reached(rows: Measurements) -> ClaimCheck:
    """Of a solution at the level of SGEQRF's; a worse one counts as none."""
    pairs = list(zip(rows.where(solver=SINGLE), rows.where(solver=ls.SGEQRF), strict=True))
    accurate = [
        x["optimality"] is not None and x["optimality"] <= max(ls.SAME_LEVEL * y["optimality"], FP32.u)
        for x, y in pairs
    ]
    speedups = [y["ms"] / x["ms"] for x, y in pairs]
    text = ", ".join(f"{x:.2f}" for x in speedups)
    text += f" times as fast; accurate in {sum(accurate)} of {len(accurate)}"
    values = [x if good else math.nan for x, good in zip(speedups, accurate, strict=True)]
    return within(values, about(2.0), text, weaker=MORE)


STEPS = 40
DIVERGED, CONVERGED = 1e10, 1e-10
"""Factors by which the norm of the gradient has grown, or has fallen, after all steps."""


# item: Q Algorithm 3; V Algorithm 5
@dataclass(frozen=True)
class PrintedCGLS:
    """A version of Algorithm 3: what its three disputed lines say."""

    name: str
    starts_preconditioned: bool  # s = R'\(A'*r) instead of s = A'*r
    divides_by_delta: bool  # alpha = gamma/delta instead of alpha = gamma/gamma1
    solves_for_x: bool  # x = R\x at the end: the loop finds R x

    def run(self, a: torch.Tensor, b: torch.Tensor, r_factor: torch.Tensor) -> Iterator[tuple[float, float]]:
        """Yield ``||A^T r||`` of the updated residual and of the x that would be returned after each step."""
        x = torch.zeros_like(a[0])[:, None]
        r = b.clone()
        s = a.T @ r
        if self.starts_preconditioned:
            s = torch.linalg.solve_triangular(r_factor.T, s, upper=False)
        p, gamma, gamma1 = s, s.square().sum(), s.new_tensor(math.nan)  # gamma1 has no value before line 18
        for _ in range(STEPS):
            q = a @ torch.linalg.solve_triangular(r_factor, p, upper=True)
            delta = q.square().sum()
            alpha = gamma / (delta if self.divides_by_delta else gamma1)
            x = x + alpha * p
            r = r - alpha * q
            s = torch.linalg.solve_triangular(r_factor.T, a.T @ r, upper=False)
            gamma1, gamma = gamma, s.square().sum()
            p = s + gamma / gamma1 * p
            found = torch.linalg.solve_triangular(r_factor, x, upper=True) if self.solves_for_x else x
            yield float(torch.linalg.vector_norm(a.T @ r)), gradient_norm(a, b, found)


HPDC = PrintedCGLS("HPDC 2020, as printed", False, True, False)
ARXIV = PrintedCGLS("arXiv 2019, as printed", False, False, False)
MEANT = PrintedCGLS("as meant", True, True, True)


def measure_errata(setting: Setting, shape: tuple[int, int] | None = None) -> Iterator[Row]:
    """Gradients after every step of the three versions, for one matrix and one R."""
    m, n = shape or setting.shape(small=(512, 128), paper=(8192, 2048), bytes_an_entry=64)
    a = setting.random("normal", m, n, seed=3)
    b, scales = right_hand_side(a), power_of_two_scales(setting.numerics.column_max(a))
    r = rgsqrf((a * scales).float(), setting.numerics)[1].double() / scales
    start = gradient_norm(a, b, torch.zeros_like(b[:n]))
    for version in setting.track((HPDC, ARXIV, MEANT), lambda version: version.name):
        for step, (updated, returned) in enumerate(version.run(a, b, r), 1):
            yield {
                "version": version.name,
                "step": step,
                "m": m,
                "n": n,
                "updated gradient": updated / start,
                "gradient of x": returned / start,
            }


def draw_errata(rows: Measurements, canvas: Canvas) -> None:
    """Both norms against the step, one line a version; NaN is not drawn."""
    axes = canvas.subplots(1, 2, sharex=True)
    for place, quantity in zip(axes, ("updated gradient", "gradient of x"), strict=True):
        lines(place, rows, "step", quantity, "version")
        place.set(yscale="log", xlabel="step", title=f"{quantity} / ||A$^T$b||")
        place.grid(alpha=0.3)
    axes[0].legend()


def diverges(rows: Measurements) -> ClaimCheck:
    growth = rows.where(version=HPDC.name)[-1]["updated gradient"]
    text = f"the gradient has grown by {growth:.1e} after {STEPS} steps" if growth else "not finite, 0 digits"
    return within([growth], (DIVERGED, math.inf), text)


def undefined(rows: Measurements) -> ClaimCheck:
    lost = [row["updated gradient"] is None for row in rows.where(version=ARXIV.name)]
    return cases(lost, f"NaN after {sum(lost)} of {len(lost)} steps: gamma1 has no value before line 21")


def converges(rows: Measurements) -> ClaimCheck:
    left = [math.inf if x is None else x for x in rows.where(version=MEANT.name).column("gradient of x")]
    best = left.index(min(left))
    return within(
        [left[best]], (0.0, CONVERGED), f"{left[best]:.1e} of the gradient left after {best + 1} steps"
    )
