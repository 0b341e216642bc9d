"""Figures 8 and 9, Table 4: time and accuracy of least squares, and of low-rank approximation."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import neula
from neula.algorithms.orthogonal.householder import householder
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.spectra.qr_svd import qr_svd
from neula.engines import FP64, Engine
from neula.io.matrices import ENTRIES, singular_values
from neula.papers.data import Measurements, Row, span
from neula.papers.drawing import Canvas, grouped_bars, lines, log_log, shape_text
from neula.papers.figure import Setting
from neula.papers.measuring import first_run, steady_seconds
from neula.papers.verdicts import MORE, MOST, ClaimCheck, about, within
from neula.pipeline.result import AccuracyWarning

SAME_LEVEL = 10.0
"""Errors within this factor are of the same level: neula stops at a small multiple of what Householder QR in
double precision reaches, so that one or the other is better by a small factor."""


def right_hand_side(a: torch.Tensor) -> torch.Tensor:
    """Random normal b: far from the range of A, so that the residual is large."""
    generator = torch.Generator(a.device).manual_seed(8)
    return torch.randn(a.shape[0], 1, dtype=a.dtype, device=a.device, generator=generator)


# item: Q gradient
def gradient_norm(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> float:
    """``||A^T (A x - b)||``, the paper's measure of accuracy, in double precision."""
    return float(torch.linalg.vector_norm(a.T @ (a @ x.double() - b)))


def gels(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The direct solver of LAPACK and cuSOLVER: Householder QR in the precision of A."""
    return torch.linalg.lstsq(a, b, driver="gels").solution


RGSQRF, SGEQRF, DGEQRF = "RGSQRF iterative", "SGEQRF direct", "DGEQRF direct"
PEERS = {SGEQRF: torch.float32, DGEQRF: torch.float64}
GEOMETRIC, STRESS = ("geometric", 1e3), ("geometric", 1e4)
MATRICES = (
    *((entries, None) for entries in ENTRIES),
    GEOMETRIC,
    *((spectrum, 1e5) for spectrum in ("arithmetic", "cluster_small", "cluster_large")),
    STRESS,
)
SMALL_SHAPES = [(2048, 1024), (4096, 1024), (4096, 512), (8192, 256), (16384, 128)]
PAPER_SHAPES = [(16384, 8192), (32768, 16384), (65536, 8192), (131072, 4096), (262144, 2048), (524288, 1024)]
BYTES_AN_ENTRY = 48
"""A and its factor in double precision, what makes the matrix or the solver's copies, and a reserve."""

ROUNDING = 10 * FP64.u  # optimality that is only rounding errors
ALMOST_ALL = 0.85  # seven of the eight matrices, say
TENDENCY = 0.5  # correlation from which on there is a tendency


# item: Q Figure 8; Q iterations; V Figure 3
def measure_solvers(setting: Setting, shapes: Sequence[tuple[int, int]] = ()) -> Iterator[Row]:
    """Times of the refined and of the direct solvers for the paper's matrices and sizes."""
    shapes = setting.fitting(shapes or setting.pick(small=SMALL_SHAPES, paper=PAPER_SHAPES), BYTES_AN_ENTRY)
    cases = setting.kinds([(shape, matrix) for shape in shapes for matrix in MATRICES])
    for (m, n), (kind, cond) in setting.track(cases, lambda case: f"{shape_text(*case[0])} {case[1][0]}"):
        a = setting.random(kind, m, n, cond=cond or 1.0, seed=7)
        b = right_hand_side(a)
        about = {"matrix": kind, "cond": cond, "m": m, "n": n}
        refined = partial(with_low_factors, a, b, setting.speed, algorithm="cgls")
        found, seconds = first_run(refined)
        yield about | {
            "solver": RGSQRF,
            "ms": 1e3 * seconds,
            "optimality": optimality(a, b, found["x"]) if "x" in found else None,
            "iterations": found["iterations"],
            "method": found["method"],
            "converged": found["converged"],
        }
        for solver, dtype in PEERS.items():
            peer = partial(gels, a.to(dtype), b.to(dtype))
            x, peer_seconds = first_run(peer, warmup=0)
            yield about | {
                "solver": solver,
                "ms": 1e3 * peer_seconds,
                "optimality": optimality(a, b, x),
                "speedup": peer_seconds / seconds,
            }
            del peer
        del a


def optimality(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> float:
    """``||A^T r|| / (||A||_F ||r||)``."""
    residual = torch.linalg.vector_norm(b - a @ x.double())
    return gradient_norm(a, b, x) / float(torch.linalg.matrix_norm(a) * residual)


def draw_solvers(rows: Measurements, canvas: Canvas) -> None:
    """One picture a matrix, three bars a size: iterations above the first, speedups above the others."""
    places = canvas.subplots(2, 4, sharex=True, sharey=True)
    for letter, place, (kind, cond) in zip("abcdefgh", places.flat, MATRICES, strict=True):
        part = rows.where(matrix=kind, cond=cond)
        solvers = {solver: part.where(solver=solver) for solver in (RGSQRF, *PEERS)}
        place.set_yscale("log")
        grouped_bars(
            place,
            [shape_text(row["m"], row["n"]) for row in solvers[RGSQRF]],
            {solver: own.column("ms") for solver, own in solvers.items()},
            {solver: [_bar_label(row) for row in own] for solver, own in solvers.items()},
        )
        title = kind if cond is None else f"{kind}, cond $10^{{{math.log10(cond):.0f}}}$"
        place.set_title(f"({letter}) {title}", fontsize=11)
        place.grid(axis="y", alpha=0.3)
        place.set_axisbelow(True)
    times = rows.column("ms")
    # Bars on a logarithmic axis need a floor; the labels need space above.
    places.flat[0].set_ylim(min(times) / 3, max(times) * 6)
    for place in places[:, 0]:
        place.set_ylabel("time (ms)")
    handles, names = places.flat[0].get_legend_handles_labels()
    canvas.legend(handles, names, loc="outside upper center", ncols=len(names), fontsize=11)


def _bar_label(row: Row) -> str:
    """Iterations of the refined solver, the speedup over a direct one."""
    if row["solver"] == RGSQRF:
        return "failed" if row["iterations"] is None else f"{row['iterations']} it"
    return f"{row['speedup']:.{1 if row['speedup'] >= 1 else 2}f}x"


@dataclass(frozen=True)
class _SolverComparison:
    refined: Row
    single: Row
    double: Row

    @property
    def stress(self) -> bool:
        return (self.refined["matrix"], self.refined["cond"]) == STRESS

    @property
    def speedup(self) -> float:
        """Over the faster one of the direct solvers."""
        return min(self.single["speedup"], self.double["speedup"])

    @property
    def accurate(self) -> bool:
        """Whether there is a solution at the level of DGEQRF's, or of rounding errors."""
        optimality = self.refined["optimality"]
        return optimality is not None and bool(
            optimality <= max(SAME_LEVEL * self.double["optimality"], ROUNDING)
        )

    @property
    def shape(self) -> tuple[int, int]:
        return self.refined["m"], self.refined["n"]


def _cases(rows: Measurements) -> list[_SolverComparison]:
    solvers = (rows.where(solver=solver) for solver in (RGSQRF, SGEQRF, DGEQRF))
    return [_SolverComparison(*three) for three in zip(*solvers, strict=True)]


def faster(rows: Measurements) -> ClaimCheck:
    """Both at once: a wrong answer counts as slow."""
    cases = _cases(rows)
    speedups = [case.speedup if case.accurate else math.nan for case in cases]
    pairs = [(case.single["speedup"], case.double["speedup"]) for case in cases if case.accurate]
    most = "/".join(f"{max(column):.1f}x" for column in zip(*pairs, strict=True)) or "0x"
    faster, accurate = sum(x > 1 for x in speedups), sum(case.accurate for case in cases)
    text = f"faster than both in {faster} of {len(cases)} cases, up to {most}; accurate in {accurate}"
    return within(speedups, MORE, text, least=ALMOST_ALL)


def taller(rows: Measurements) -> ClaimCheck:
    """Correlation of height per width with the median speedup of accurate solutions, both as logarithms."""
    speedups: dict[tuple[int, int], list[float]] = {}
    for case in _cases(rows):
        if case.accurate and not case.stress:
            speedups.setdefault(case.shape, []).append(case.speedup)
    medians = {shape: statistics.median(values) for shape, values in speedups.items()}
    heights = [math.log(m / n) for m, n in medians]
    if len(set(heights)) < 2:
        return within([], (TENDENCY, 1.0), "0 pairs of sizes with different shapes")
    correlation = statistics.correlation(heights, [math.log(speedup) for speedup in medians.values()])
    text = ", ".join(f"{shape_text(*shape)} {speedup:.2f}x" for shape, speedup in medians.items())
    text = f"correlation {correlation:.2f}; median over matrices: {text}"
    return within([correlation], (TENDENCY, 1.0), text)


def _median_iterations(rows: Measurements) -> dict[tuple[str, float | None], float]:
    """Median over the solved sizes for each kind of matrix except the stress case; NaN if none was solved."""
    found = {}
    for kind, cond in (case for case in MATRICES if case != STRESS):
        solved = rows.where(solver=RGSQRF, matrix=kind, cond=cond, converged=True)
        found[kind, cond] = statistics.median([row["iterations"] for row in solved] or [math.nan])
    return found


def slow_spectrum(rows: Measurements) -> ClaimCheck:
    count = _median_iterations(rows)[GEOMETRIC]
    return within([count], (20.0, 30.0), f"median of the sizes {count:.3g}", weaker=(10.0, 100.0))


def few_iterations(rows: Measurements) -> ClaimCheck:
    """At most 9 for more than half of them; in part if fewer than for a geometric spectrum."""
    counts = {kind: count for kind, count in _median_iterations(rows).items() if kind != GEOMETRIC}
    words = (f"{kind} {'none' if math.isnan(x) else f'{x:.3g}'}" for (kind, _), x in counts.items())
    text = f"of {len(counts)}, medians of the sizes: {', '.join(words)}"
    return within(counts.values(), (0.0, 9.0), text, weaker=(0.0, 20.0), least=0.6)


def unprofitable(rows: Measurements) -> ClaimCheck:
    """A statement that there is none: one size that is solved faster refutes it."""
    cases = [case for case in _cases(rows) if case.stress]
    speedups = [case.double["speedup"] if case.accurate else 0.0 for case in cases]
    sizes = zip(cases, speedups, strict=True)
    text = ", ".join(f"{shape_text(*case.shape)} {x:.2f}x ({_bar_label(case.refined)})" for case, x in sizes)
    return within(speedups, (0.0, 1.0), f"speedup over DGEQRF, 0 if not as accurate: {text}")


S_DIRECT, D_DIRECT = "SCuSOLVE", "DCuSOLVE"
LOW_DIRECT, LOW_REFINED = "RGSQRF direct", "RGSQRF + CGLS"
HALF_DECADES = [10.0 ** (k / 2) for k in range(6, 13)]
FEW_ITERATIONS = 50
TWO_ORDERS = about(100.0, 5.0)


# item: Q Figure 9; V Figure 4
def measure_refinement(setting: Setting) -> Iterator[Row]:
    """Accuracy of direct and refined solutions against the condition number."""
    m, n = setting.shape(small=(1024, 512), paper=(32768, 16384), bytes_an_entry=64)
    for cond in setting.track(setting.kinds(HALF_DECADES), lambda cond: f"cond {cond:.0e}"):
        a = setting.random("cluster_small", m, n, cond=cond, seed=3)
        b = right_hand_side(a)
        about = {"cond": cond, "m": m, "n": n}
        for solver, dtype in {S_DIRECT: torch.float32, D_DIRECT: torch.float64}.items():
            x = gels(a.to(dtype), b.to(dtype))
            yield about | {"solver": solver, "gradient": gradient_norm(a, b, x)}
        for solver, algorithm in {LOW_DIRECT: "direct", LOW_REFINED: "cgls"}.items():
            found = with_low_factors(a, b, setting.numerics, algorithm=algorithm)
            gradient = gradient_norm(a, b, found.pop("x")) if "x" in found else None
            yield about | {"solver": solver, "gradient": gradient} | found
        del a


def with_low_factors(a: torch.Tensor, b: torch.Tensor, engine: Engine, **options: Any) -> Row:
    """Solve by ``neula.lstsq`` with R in the engine's format; the row has no ``x`` if R breaks down."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccuracyWarning)  # the data say it
        try:
            result = neula.lstsq(a, b, compute=engine.format.name, engine=engine, **options)
        except ArithmeticError:
            return {"iterations": None, "converged": False, "method": f"rgsqrf {engine.format.name}"}
    found = {"x": result.x, "iterations": result.iterations, "converged": result.converged}
    return found | {"method": result.attempts[-1].method}


def draw_refinement(rows: Measurements, canvas: Canvas) -> None:
    """One curve a solver; the numbers are iterations of CGLS."""
    axes = canvas.subplots()
    lines(axes, rows, "cond", "gradient", "solver")
    log_log(axes, "cond(A)", "||A$^T$(Ax - b)||", f"cluster_small, {shape_text(rows[0]['m'], rows[0]['n'])}")
    refined = [row for row in rows.where(solver=LOW_REFINED) if row["gradient"]]
    for row in refined:
        text = f"{row['iterations']}" if row["converged"] else f"{row['iterations']}*"
        place, below = (row["cond"], row["gradient"]), (0, -15)
        axes.annotate(text, place, below, textcoords="offset points", ha="center", fontsize=9)
    axes.margins(y=0.1)
    axes.grid(alpha=0.3)
    starred = "" if all(row["converged"] for row in refined) else " (*: not certified)"
    axes.legend(title=f"numbers: iterations{starred}", loc="center right")


def _ratios(rows: Measurements, solver: str, reference: str) -> list[float]:
    """How many times the gradient of one solver is that of another, for each condition number."""
    ratios = rows.ratios("gradient", solver, reference, "solver")
    return [math.inf if math.isnan(ratio) else ratio for ratio in ratios]


def two_orders(rows: Measurements) -> ClaimCheck:
    """Two orders, give or take 0.7 of one, for most condition numbers."""
    ratios = _ratios(rows, LOW_DIRECT, S_DIRECT)
    listed = ", ".join(f"{ratio:.2g}" for ratio in ratios)
    return within(ratios, TWO_ORDERS, f"{listed} times (roundoffs: 2^13 = 8192)", weaker=MORE, least=MOST)


def reaches_double(rows: Measurements) -> ClaimCheck:
    ratios = _ratios(rows, LOW_REFINED, D_DIRECT)
    refined = rows.where(solver=LOW_REFINED)
    iterations = [math.inf if count is None else count for count in refined.column("iterations")]
    certified = sum(refined.column("converged"))
    return within(
        [x if count <= FEW_ITERATIONS else math.nan for x, count in zip(ratios, iterations, strict=True)],
        (0.0, SAME_LEVEL),
        f"{span(ratios, '.2g')} times DCuSOLVE's in {min(iterations)} to {max(iterations)} "
        f"iterations; neula certifies {certified} of {len(refined)}",
    )


RANKS = [16, 64, 128, 256, 512]
COND = 1e6
RGSQRF_SVD, SGEQRF_SVD, NEULA = "RGSQRF-SVD", "SGEQRF-SVD", "neula.svd_lowrank"

LowRank = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


# item: Q Table 4
def measure_low_rank(setting: Setting, shape: tuple[int, int] | None = None) -> Iterator[Row]:
    """Error and time of the approximation for each rank, and the smallest possible error."""
    m, n = shape or setting.shape(small=(8192, 1024), paper=(524288, 1024), bytes_an_entry=48)
    exact = setting.random("arithmetic", m, n, cond=COND, seed=9)
    a = setting.speed.empty(m, n).copy_(exact)
    values = (
        torch.linalg.svdvals(exact) if setting.matrix is not None else singular_values("arithmetic", n, COND)
    )
    squares = values.square()
    for rank in setting.track([rank for rank in RANKS if rank < n], lambda rank: f"rank {rank}"):
        for method, approximate in _methods(a, rank).items():
            seconds = steady_seconds(partial(approximate, setting.speed))
            yield {
                "rank": rank,
                "method": method,
                "m": m,
                "n": n,
                "error": approximation_error(exact, approximate(setting.numerics)),
                "smallest": float((squares[rank:].sum() / squares.sum()).sqrt()),
                "ms": 1e3 * seconds,
            }


def _methods(a: torch.Tensor, rank: int) -> dict[str, Callable[[Engine], LowRank]]:
    """The paper's two, and what a user calls, certificate included."""
    return {
        RGSQRF_SVD: lambda engine: qr_svd(*rgsqrf(a, engine), rank=rank),
        SGEQRF_SVD: lambda engine: qr_svd(*householder(a), rank=rank),
        NEULA: lambda engine: tuple(neula.svd_lowrank(a, rank, accuracy="fp16", engine=engine)),
    }


def approximation_error(a: torch.Tensor, factors: LowRank) -> float:
    """``||A - U diag(s) V^T||_F / ||A||_F``, computed in double precision."""
    u, s, vh = (factor.double() for factor in factors)
    return float(torch.linalg.matrix_norm(a - (u * s) @ vh) / torch.linalg.matrix_norm(a))


def optimal(rows: Measurements) -> ClaimCheck:
    """Whether three digits, which the paper prints, are those of the best approximation."""
    part = rows.where(method=RGSQRF_SVD)
    ratios = [math.inf if row["error"] is None else row["error"] / row["smallest"] for row in part]
    text = f"at most {max(ratios):.5f} times the smallest possible error"
    return within(ratios, (0.0, 1.005), text)
