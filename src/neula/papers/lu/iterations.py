"""An open question of the paper: how many refinement steps the factors of each algorithm need."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from neula.algorithms.elimination.equilibrate import Equilibrated, equilibrate
from neula.algorithms.elimination.factorization import Factorization, MixedLU, growth_of
from neula.algorithms.elimination.lu import VARIANTS, lu_factorize
from neula.algorithms.krylov.iterative_refinement import gmres_refinement, refine
from neula.algorithms.triangular.substitution import Substitution
from neula.certificates.backward_error import Scaling
from neula.certificates.bounds import solve_bound
from neula.engines import FP32, FP64, Engine
from neula.io.matrices import no_pivoting_matrix
from neula.papers.data import Measurements, Row, span
from neula.papers.drawing import Canvas, lines, log_log, plain_ticks
from neula.papers.errors import norm_of_defect
from neula.papers.figure import Setting
from neula.papers.lu import algorithms as lu
from neula.papers.lu.figures import SERIES
from neula.papers.verdicts import ClaimCheck, cases, within

NAMES = tuple(name for name in lu.ALGORITHMS if name != lu.STANDARD)
"""Without Algorithm 2.1, whose factors are those of 3.1 with an fp16 matrix on hardware."""
TUNABLE, GEOMETRIC = "Fasi-Higham", "geometric"
KINDS = {TUNABLE: "Fasi and Higham, no pivoting", GEOMETRIC: "geometric spectrum, partial pivoting"}
CONDITIONS = [10.0**k for k in range(1, 10)]
MAX_ITERATIONS = 100
SOLVERS = CLASSICAL, GMRES = "classical", "gmres"
ALIKE = 1.5  # how many times as many iterations count as about as many


def measure_iterations(setting: Setting, order: int | None = None) -> Iterator[Row]:
    """Iterations of classical and GMRES-based refinement with the factors of each algorithm."""
    n = order or setting.shape(small=(256, 256), paper=(1024, 1024), bytes_an_entry=100)[0]
    kinds = KINDS if setting.matrix is None else (GEOMETRIC,)  # the user's is pivoted
    cases = setting.kinds([(kind, cond) for kind in kinds for cond in CONDITIONS])
    for kind, cond in setting.track(cases, lambda case: f"{case[0]} {case[1]:.0e}"):
        system = _system(kind, n, cond, setting)
        for name in NAMES:
            factors = _factors(system, name, setting.numerics)
            yield {
                "matrix": kind,
                "cond": cond,
                "n": n,
                "algorithm": name,
                "contraction": contraction(system.a, factors),
                "classical": classical_iterations(system, factors),
                "gmres": gmres_iterations(system, factors),
            }


@dataclass(frozen=True)
class PaperSystem:
    """A system in double precision and how its solution is judged."""

    a: torch.Tensor
    b: torch.Tensor  # one column
    pivoting: bool  # whether the factorization needs interchanges

    @property
    def scaling(self) -> Scaling:
        """The infinity norm of A."""
        return Scaling(self.a.abs().sum(1).amax())

    @property
    def tolerance(self) -> float:
        """The backward error that ``neula.solve`` accepts as double precision."""
        return solve_bound(FP64, len(self.a))


def _system(kind: str, n: int, cond: float, setting: Setting) -> PaperSystem:
    """A matrix and a random right-hand side; the condition number is in the infinity norm or the 2-norm."""
    device = setting.device
    if kind == TUNABLE:
        a = no_pivoting_matrix(n, cond, device=device)
    else:
        a = setting.random(kind, n, n, cond=cond, seed=3)
    generator = torch.Generator(device).manual_seed(4)
    b = torch.randn(n, 1, dtype=torch.float64, device=device, generator=generator)
    return PaperSystem(a, b, pivoting=kind != TUNABLE)


def _factors(system: PaperSystem, name: str, engine: Engine) -> Factorization:
    """Factors of the scaled matrix, as ``neula.solve`` has them, by one of the algorithms.

    Panels are an eighth of the matrix: with the paper's width, small ones would have one or two.
    """
    a, n, single = system.a, len(system.a), engine.using(FP32)
    scales = equilibrate(a, torch.linalg.vector_norm(a, 1, dim=1), engine)
    scaled = scales.fill(single.empty(n, n), a, single)
    variant = lu.variant_of(name)
    packed = lu_factorize(
        scaled,
        engine,
        variant=variant,
        panel=max(2, n // 8),
        inner_panel=min(lu.INNER_PANEL, max(1, n // 16)) if VARIANTS[variant].partitioned else None,
        storage=FP32 if name == lu.SINGLE else None,
        pivoting=system.pivoting,
    )
    growth = growth_of(packed.lu, engine.column_max(scaled).amax(), engine)
    return Equilibrated(MixedLU(Substitution(packed, torch.float32), growth), scales)


def contraction(a: torch.Tensor, factors: Factorization) -> float:
    """``||I - (LU)^-1 A||_2``: the largest part of the error that a step of classical refinement leaves."""
    defect = -factors.solve(a)
    defect.diagonal().add_(1)
    return norm_of_defect(defect) if bool(defect.isfinite().all()) else math.nan


def classical_iterations(system: PaperSystem, factors: Factorization) -> int | None:
    """Solves until the backward error is that of double precision; None if it never is.

    Unlike :func:`neula.algorithms.krylov.iterative_refinement.refine`, it continues where an iteration does
    not help: before the rate of convergence shows, a step or two may do worse.
    """
    a, b, scaling = system.a, system.b, system.scaling
    x, residual = torch.zeros_like(b), b
    for iteration in range(1, MAX_ITERATIONS + 1):
        x = x + factors.solve(residual)
        residual = b - a @ x
        if float(scaling.backward_error(b, x, residual).max()) <= system.tolerance:
            return iteration
    return None


def gmres_iterations(system: PaperSystem, factors: Factorization) -> int | None:
    """Solves inside GMRES, over all steps, until the backward error is that of double precision, or None."""
    refined = refine(
        system.a,
        system.b,
        gmres_refinement(system.a, factors),
        scalings=[system.scaling],
        tolerance=system.tolerance,
        max_iterations=MAX_ITERATIONS,
    )
    return refined.iterations if bool((refined.backward_error <= system.tolerance).all()) else None


def iteration_bound(rate: float, n: int) -> int | None:
    """Iterations that suffice for classical refinement with this contraction; None from 1 on.

    ``||x - x_i||_2 <= rate^i ||x||_2`` bounds the normwise backward error in the infinity norm by
    ``sqrt(n) rate^i``, up to terms of the order of ``rate^i`` itself.
    """
    if not 0 < rate < 1:
        return None
    return max(1, math.ceil(math.log(math.sqrt(n) / solve_bound(FP64, n)) / -math.log(rate)))


LABELS = {
    "contraction": "||I - (LU)$^{-1}$A||$_2$",
    CLASSICAL: "iterations, classical",
    GMRES: "iterations, GMRES",
}


def draw_iterations(rows: Measurements, canvas: Canvas) -> None:
    """For both kinds of matrices the contraction and the iterations, against the condition number."""
    axes = canvas.subplots(len(KINDS), len(LABELS), sharex=True)
    cases = itertools.product(KINDS.items(), LABELS.items())
    for place, ((kind, title), (field, label)) in zip(axes.flat, cases, strict=True):
        # NaN, other than None, leaves a gap in a line.
        part = rows.where(matrix=kind)
        gaps = zip(part, part.numbers(field), strict=True)
        lines(place, Measurements(row | {field: y} for row, y in gaps), "cond", field, "algorithm", SERIES)
        log_log(place, "cond(A)" if place in axes[-1] else "", label, title)
        if field in SOLVERS:
            place.set_ylim(2, 1.4 * MAX_ITERATIONS)
            plain_ticks(place)
        else:
            place.axhline(1.0, linestyle="--", color="gray", linewidth=1)
    canvas.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=6, fontsize=10)


def _converged(rows: Measurements, solver: str) -> int:
    """Matrices for which a solver converges."""
    return sum(value is not None for value in rows.column(solver))


def within_theory(rows: Measurements) -> ClaimCheck:
    """Where the contraction is below 1/2: nearer to 1, its estimate decides more than the factors."""
    bounded = [
        (row["classical"], bound)
        for row in rows
        if row["contraction"] is not None
        and row["contraction"] <= 0.5
        and (bound := iteration_bound(row["contraction"], row["n"])) is not None
    ]
    kept = [found is not None and found <= bound for found, bound in bounded]
    return cases(kept, f"{sum(kept)} of {len(bounded)}")


def gmres_goes_further(rows: Measurements) -> ClaimCheck:
    """For every algorithm and kind of matrix."""
    parts = [rows.where(matrix=kind, algorithm=name) for kind in rows.by("matrix") for name in NAMES]
    gained = [_converged(part, GMRES) - _converged(part, CLASSICAL) for part in parts]
    text = f"GMRES for {_converged(rows, GMRES)} of {len(rows)} systems, classical for "
    text += f"{_converged(rows, CLASSICAL)}; {min(gained)} to {max(gained)} more for an algorithm"
    return cases([gain >= 0 for gain in gained] if max(gained) > 0 else [False], text)


def _ratios(rows: Measurements, name: str, peer: str, fields: Sequence[str]) -> dict[str, list[float]]:
    """Quotients of two algorithms for each kind of matrix and field, where both have a value."""
    return {
        f"{kind}, {field}": [x for x in part.ratios(field, name, peer, "algorithm") if not math.isnan(x)]
        for kind, part in rows.by("matrix").items()
        for field in fields
    }


def _in_words(ratios: dict[str, list[float]]) -> str:
    parts = "; ".join(f"{case} {span(found) if found else 'none'}" for case, found in ratios.items())
    return f"times as many: {parts}"


def half_the_memory_for_free(rows: Measurements) -> ClaimCheck:
    """Fewer iterations with half the memory are none the worse."""
    ratios = _ratios(rows, lu.DOUBLY_WIDE, lu.SINGLE, SOLVERS)
    # A solver that converges for no matrix has no ratio, and fails.
    worst = [max(found, default=math.nan) for found in ratios.values()]
    return within(worst, (0.0, ALIKE), _in_words(ratios))


def accuracy_pays(rows: Measurements) -> ClaimCheck:
    """No more iterations wherever both converge, and convergence for more systems."""
    ratios = _ratios(rows, lu.DOUBLY_WIDE, lu.HALF, SOLVERS)
    ours, theirs = (
        sum(_converged(rows.where(algorithm=name), solver) for solver in SOLVERS)
        for name in (lu.DOUBLY_WIDE, lu.HALF)
    )
    fewer = [max(found, default=0.0) <= 1.0 for found in ratios.values()]
    return cases([*fewer, ours > theirs], f"{_in_words(ratios)}; converge: {ours} and {theirs}")


def consistent_factors(rows: Measurements) -> ClaimCheck:
    """Where factors are good enough for classical refinement; beyond, errors are anything."""
    usable = Measurements(
        row if (row["contraction"] or math.inf) < 1 else row | {"contraction": None}
        for row in rows.where(matrix=GEOMETRIC)
    )
    ratios = _ratios(usable, lu.DOUBLY_WIDE, lu.SINGLE, ("contraction",))
    return within(itertools.chain(*ratios.values()), (0.0, 1.0), f"contractions, {_in_words(ratios)}")
