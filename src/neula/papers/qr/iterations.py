"""What the paper leaves open: iterations against the condition number of ``A R^-1``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from neula.algorithms.krylov.cgls import Stop, cgls
from neula.algorithms.krylov.lsqr import lsqr
from neula.algorithms.krylov.operators import LeastSquaresOperator
from neula.algorithms.krylov.refinement import InnerSolver
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.scaling import power_of_two_scales
from neula.algorithms.spectra.condition import solve_rt
from neula.engines import Engine
from neula.papers.data import Measurements, Row
from neula.papers.drawing import Axes, Canvas, log_log, shape_text
from neula.papers.figure import Figure, Setting
from neula.papers.qr.least_squares import right_hand_side
from neula.papers.verdicts import ClaimCheck, cases, claim

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
SLOW = 1.1
"""Below this condition number of A R^-1 a handful of iterations suffices for any spectrum."""
MEASURABLE = 1e-13
"""Eigenvalues of a Gram matrix that are smaller, relative to the largest, are rounding errors."""


def measure_iterations(setting: Setting, shape: tuple[int, int] | None = None) -> Iterator[Row]:
    """Iterations of CGLS and LSQR, and the condition number of ``A R^-1`` that they depend on."""
    m, n = shape or setting.shape(small=(1024, 512), paper=(8192, 2048), bytes_an_entry=64)
    cases = setting.kinds([(spectrum, cond) for spectrum in SPECTRA for cond in CONDITIONS])
    for spectrum, cond in setting.track(cases, lambda case: f"{case[0]} {case[1]:.0e}"):
        a = setting.random(spectrum, m, n, cond=cond, seed=3)
        b = right_hand_side(a)
        for name in FORMATS:
            r = scaled_triangle(a, setting.numerics.using(name))
            yield {
                "spectrum": spectrum,
                "cond": cond,
                "m": m,
                "n": n,
                "format": name,
                "cond_preconditioned": preconditioned_condition(a, r),
                "cgls": iterations_of(cgls, a, r, b),
                "lsqr": iterations_of(lsqr, a, r, b),
            }


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
    """What R in each format leaves of the condition number, and the iterations that this takes."""
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
    log_log(left, "cond(A)", "cond(AR$^{-1}$) - 1", f"what R leaves of the condition number, {shape}")
    log_log(
        right, "cond(AR$^{-1}$) - 1", "iterations", "iterations to reduce ||R$^{-T}$A$^T$r|| by $10^{-10}$"
    )
    right.set_ylim(2, 1.5 * MAX_ITERATIONS)
    for place in (left, right):
        place.grid(alpha=0.3)
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


@claim("the number of iterations is within the bound of the theory")
def _within_theory(rows: Measurements) -> ClaimCheck:
    """Where CGLS has finished, or should have: what may take more iterations than it got decides nothing."""
    known = [row for row in rows if row["cond_preconditioned"] is not None]
    decided = [row for row in known if row["cgls"] is not None or _bound(row) <= MAX_ITERATIONS]
    finished = [row for row in decided if row["cgls"] is not None]
    kept = [row["cgls"] is not None and row["cgls"] <= _bound(row) for row in decided]
    shares: dict[str, list[float]] = {}
    for row in finished:
        if row["cond_preconditioned"] > SLOW:
            shares.setdefault(row["spectrum"], []).append(row["cgls"] / _bound(row))
    text = ", ".join(f"{spectrum} {statistics.median(parts):.0%}" for spectrum, parts in shares.items())
    return cases(
        kept,
        f"{sum(kept)} of {len(decided)}, {len(known) - len(decided)} undecided after {MAX_ITERATIONS}; "
        f"median part of the bound where cond(AR^-1) > {SLOW:g}: {text}",
    )


def _bound(row: Row) -> int:
    return iteration_bound(row["cond_preconditioned"])


@claim("LSQR takes as many iterations as CGLS")
def _lsqr_alike(rows: Measurements) -> ClaimCheck:
    """Where one of them finishes."""
    finished = [row for row in rows if row["cgls"] is not None or row["lsqr"] is not None]
    pairs = [(_count(row, "cgls"), _count(row, "lsqr")) for row in finished]
    alike = [_alike(*pair) for pair in pairs]
    equal = sum(row["cgls"] == row["lsqr"] for row in finished)
    first, second = max(pairs, key=lambda pair: abs(pair[0] - pair[1]), default=(0, 0))
    return cases(
        alike,
        f"equal in {equal} of {len(pairs)}, within {SLACK:.0%} in {sum(alike)}; "
        f"most apart {first} and {second}",
    )


@claim("bits decide: bf16 (8) takes more iterations than fp16 (11), tf32 (11) as many")
def _bits_decide(rows: Measurements) -> ClaimCheck:
    """Formats on equal matrices, where one of those with 11 bits finishes."""
    by_format = (rows.where(format=name) for name in ("fp16", "tf32", "bf16"))
    counts = [[_count(row, "cgls") for row in three] for three in zip(*by_format, strict=True)]
    finished = [three for three in counts if min(three[:2]) < MAX_ITERATIONS]
    alike = [_alike(fp16, tf32) for fp16, tf32, _ in finished]
    more = [bf16 > fp16 for fp16, _, bf16 in finished]
    fewer = sum(bf16 < fp16 for fp16, _, bf16 in finished)
    most = max((bf16 / fp16 for fp16, _, bf16 in finished), default=math.nan)
    return cases(
        [like and greater for like, greater in zip(alike, more, strict=True)],
        f"tf32 as many as fp16 in {sum(alike)} of {len(finished)}; bf16 more in {sum(more)}, "
        f"fewer in {fewer}, up to {most:.1f} times as many",
        least=MOST,
    )


ITERATIONS = Figure(
    name="iterations",
    title="Iterations against the condition number of the preconditioned matrix",
    shows="The theory of section 3.2.3, measured: iterations of CGLS and LSQR until `||R^-T A^T r||` is "
    "reduced by 1e-10, with R from RGSQRF in three formats, against the measured condition number k of `A "
    "R^-1`. b is random normal. Dashed: what `2 k ((k - 1)/(k + 1))^i` allows. Where a mark is missing, "
    "400 iterations were not enough.",
    scaled_down="1024 x 512 instead of 8192 x 2048, tensor cores emulated",
    measure=measure_iterations,
    draw=draw_iterations,
    claims=(_within_theory, _lsqr_alike, _bits_decide),
    size=(13, 6),
)
