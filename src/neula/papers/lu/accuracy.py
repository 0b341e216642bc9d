"""Figures 1 to 5: errors against n, beside rates, for diagonally dominant matrices and for tunable ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from neula.engines import BF16
from neula.io.matrices import no_pivoting_matrix
from neula.papers.data import Measurements, Row
from neula.papers.drawing import Axes, Canvas, lines, log_log
from neula.papers.figure import Setting, described
from neula.papers.lu import performance
from neula.papers.lu.algorithms import (
    ALGORITHMS,
    BUFFERED,
    COMPARED,
    DOUBLY_LOW,
    DOUBLY_WIDE,
    EMULATED,
    EMULATED_UP_TO,
    HALF,
    PAPERS_UNIT,
    SINGLE,
    STANDARD,
    UNIT,
    WIDE_PANELS,
    accuracy_row,
    units,
)
from neula.papers.lu.performance import SERIES, dominant, draw_rates, times
from neula.papers.verdicts import EVERY, HALF_AN_ORDER, MORE, ClaimCheck, Interval, about, within

BYTES = 60
"""Memory of an entry: A, which is made in float64, the factors, L and U, and blocks of them in float64."""
CONDITION = 1e3  # of the matrices of Figure 5
COARSER, COARSER_UP_TO = (HALF, BUFFERED), 4096
"""Algorithms that are compared in bf16, too, and up to which order: an eighth of what fp16 needs."""
SAME = about(1.0, 3.0)
"""From and up to how many times the error of another algorithm an error counts as the same."""
AN_ORDER, TWO_ORDERS = about(10.0, HALF_AN_ORDER), about(100.0, HALF_AN_ORDER)
"""How many times as large an error is that is about one or two orders of magnitude larger."""
TIE = 1.01  # errors that both come from the panels are equal up to the last digits
ORDER = ((SINGLE,), (WIDE_PANELS, DOUBLY_WIDE), (BUFFERED, DOUBLY_LOW), (HALF,))


def measure_dominant(setting: Setting, orders: Sequence[int] | None = None) -> Iterator[Row]:
    """Errors of all algorithms on HPL-AI matrices, and times in rows of their own."""
    for n in _tracked(setting, orders):
        a = dominant(setting, n)
        for name in ALGORITHMS:
            yield from _errors_on_units(a, name, setting)
        if n <= COARSER_UP_TO:
            coarser = setting.emulated.using(BF16)
            yield from (accuracy_row(a, name, EMULATED, coarser) for name in COARSER)
        yield from times(a, [name for name in ALGORITHMS if name != STANDARD], setting)


def measure_tunable(setting: Setting, orders: Sequence[int] | None = None) -> Iterator[Row]:
    """Errors of the algorithms of section 6 on the matrices of Fasi and Higham."""
    for n in _tracked(setting, orders):
        make = partial(no_pivoting_matrix, n, CONDITION, dtype=torch.float32, device=setting.device)
        a = setting.given_or(make, torch.float32)
        for name in COMPARED:
            yield from _errors_on_units(a, name, setting)


def _tracked(setting: Setting, orders: Sequence[int] | None) -> Iterator[int]:
    sizes = orders or setting.pick(small=(512, 768, 1024), paper=[2**k for k in range(10, 16)])
    shapes = setting.fitting([(n, n) for n in sizes], BYTES)
    return (n for n, _ in setting.track(shapes, lambda shape: f"n = {shape[0]}"))


def _errors_on_units(a: torch.Tensor, name: str, setting: Setting) -> Iterator[Row]:
    """On tensor cores and emulated, as far as the latter is cheap; without a unit there is only emulation."""
    for unit, engine in units(setting).items():
        if len(a) <= EMULATED_UP_TO if unit == EMULATED else name != STANDARD:
            yield accuracy_row(a, name, unit, engine)


# --- drawing ----------------------------------------------------------------------------------------------


def draw_with_rates(rows: Measurements, canvas: Canvas, names: Sequence[str]) -> None:
    """Errors with their bounds on the left, rates on the right."""
    left, right = canvas.subplots(1, 2)
    _draw_errors(left, rows, names)
    draw_rates(right, rows, [name for name in names if name != STANDARD])
    handles = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
    handles |= dict(zip(*reversed(right.get_legend_handles_labels()), strict=True))
    canvas.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=6, fontsize=10)


def draw_tunable(rows: Measurements, canvas: Canvas) -> None:
    axes = canvas.subplots()
    _draw_errors(axes, rows, COMPARED)
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=10)


def _draw_errors(axes: Axes, rows: Measurements, names: Sequence[str]) -> None:
    """Solid on the unit, dotted where that is emulated besides, dashed the bound of the theorem."""
    found = {name: _errors(rows, name) for name in names}
    measured = Measurements(row for part in found.values() for row in part)
    lines(axes, measured, "n", "error", "algorithm", SERIES)
    for name, part in found.items():
        color = f"C{SERIES.index(name)}"
        axes.plot(part.column("n"), part.numbers("bound"), "--", color=color, linewidth=1)
        emulated = _errors(rows, name, emulated=True)
        if emulated != part:
            axes.plot(emulated.column("n"), emulated.numbers("error"), ":", color=color)
    axes.plot([], [], "--", color="gray", linewidth=1, label="bound")
    log_log(axes, "n", "componentwise backward error", "error")
    axes.set_xscale("log", base=2)


# --- claims: judged on the paper's unit, emulated; beside them stands what the machine's own unit does -----


def _errors(rows: Measurements, name: str, *, format: str = "fp16", emulated: bool = False) -> Measurements:
    """Rows with the errors of an algorithm on the unit; where it was only emulated, or by request, those."""
    part = rows.where(algorithm=name, format=format)
    return (not emulated and part.where(unit=UNIT)) or part.where(unit=EMULATED)


def _both_units(
    rows: Measurements,
    on_unit: Callable[[bool], tuple[list[float], str]],
    claimed: Interval,
    *,
    format: str = "fp16",
    tendency: Interval | None = None,
) -> ClaimCheck:
    """Compare numbers, with their text, on the paper's unit, and show those on the machine's."""
    values, told = on_unit(True)
    if rows.where(unit=UNIT, format=format):
        # Rows without a t are of neula 0.1.0, whose unit rounded to nearest.
        t = rows.where(unit=EMULATED)[0].get("t")
        unit = f"t = {t}" if t is not None else f"t = 8 to nearest, not the paper's {PAPERS_UNIT.block}"
        told = f"{unit}: {told}. Own unit: {on_unit(False)[1]}"
    return within(values, claimed, told, tendency=tendency)


def worse(
    rows: Measurements, name: str, peer: str, claimed: Interval, *, format: str = "fp16", large: bool = False
) -> ClaimCheck:
    """How many times the error of an algorithm is that of another one, for all or large n."""

    def ratios(emulated: bool) -> tuple[list[float], str]:
        ours, theirs = (
            {row["n"]: row for row in _errors(rows, x, format=format, emulated=emulated)}
            for x in (name, peer)
        )
        found = {n: ours[n]["error"] or math.nan for n in ours if n in theirs}
        found = {n: error / (theirs[n]["error"] or math.nan) for n, error in found.items()}
        n = max(found)
        smallest, largest = (_short(find(found.values())) for find in (min, max))
        told = f"{_short(found[n])} times at n = {n}; {smallest} to {largest} for all n"
        return [found[n]] if large else list(found.values()), told

    return _both_units(rows, ratios, claimed, format=format, tendency=MORE if claimed[0] >= 1.0 else None)


def _short(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"


def bounded(rows: Measurements, names: Sequence[str]) -> ClaimCheck:
    """No error exceeds its bound, on any unit and in any format."""
    shares = {}
    for name in names:
        # Where n u16 is 1 or more, theorems about sums in fp16 say nothing.
        measured = Measurements(r for r in rows.where(algorithm=name) if r.get("bound") is not None)
        # NumPy's maximum of NaN and anything is NaN, which holds no bound.
        shares[name] = float(np.divide(measured.numbers("error"), measured.column("bound")).max())
    told = ", ".join(f"{name} {share:.2g}" for name, share in shares.items())
    return within(shares.values(), (0.0, 1.0), f"at most so much of them: {told}")


def ordered(rows: Measurements) -> ClaimCheck:
    """Errors of groups of algorithms are in order at the largest n; equal errors count as ordered."""

    def order(emulated: bool) -> tuple[list[float], str]:
        found = {x: _errors(rows, x, emulated=emulated) for group in ORDER for x in group}
        last = {name: part.numbers("error")[-1] for name, part in found.items()}
        groups = [[last[name] for name in group] for group in ORDER]
        told = ", ".join(f"{name} {error:.1e}" for name, error in last.items())
        return [float(max(low) <= TIE * min(high)) for low, high in itertools.pairwise(groups)], told

    return _both_units(rows, order, EVERY)


# item: L Figure 1
FIGURE_1 = described("lu-paper", "figure1", vars(performance) | globals())
# item: L Figure 2
FIGURE_2 = described("lu-paper", "figure2", vars(performance) | globals())
# item: L Figure 3
FIGURE_3 = described("lu-paper", "figure3", vars(performance) | globals())
# item: L Figure 4
FIGURE_4 = described("lu-paper", "figure4", vars(performance) | globals())
# item: L Figure 5
FIGURE_5 = described("lu-paper", "figure5", vars(performance) | globals())
