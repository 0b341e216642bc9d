"""Figures 1 to 5: errors against n, beside rates, for diagonally dominant matrices and for tunable ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from neula.engines import BF16
from neula.io.matrices import no_pivoting_matrix
from neula.papers.data import Measurements, Row
from neula.papers.drawing import Axes, Canvas, lines, log_log
from neula.papers.figure import Figure, Setting, described
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
from neula.papers.lu.performance import SERIES, dominant, draw_rates, faster, times
from neula.papers.verdicts import EVERY, HALF_AN_ORDER, MORE, Claim, ClaimCheck, Interval, about, within

BYTES = 60
"""Memory of an entry: A, which is made in float64, the factors, L and U, and blocks of them in float64."""
CONDITION = 1e3
"""Of the matrices of Figure 5."""
COARSER, COARSER_UP_TO = (HALF, BUFFERED), 4096
"""Algorithms that are compared in bf16, too, and up to which order: an eighth of what fp16 needs."""
SAME = about(1.0, 3.0)
"""From and up to how many times the error of another algorithm an error counts as the same."""
AN_ORDER, TWO_ORDERS = about(10.0, HALF_AN_ORDER), about(100.0, HALF_AN_ORDER)
"""How many times as large an error is that is about one or two orders of magnitude larger."""
TIE = 1.01
"""Errors that both come from the panels are equal up to the last digits."""
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


def _draw_with_rates(names: Sequence[str], rows: Measurements, canvas: Canvas) -> None:
    """Errors with their bounds on the left, rates on the right."""
    left, right = canvas.subplots(1, 2)
    _draw_errors(left, rows, names)
    draw_rates(right, rows, [name for name in names if name != STANDARD])
    handles = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
    handles |= dict(zip(*reversed(right.get_legend_handles_labels()), strict=True))
    canvas.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=6, fontsize=10)


def _draw_tunable(rows: Measurements, canvas: Canvas) -> None:
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
    text: str,
    on_unit: Callable[[Measurements, bool], tuple[list[float], str]],
    claimed: Interval,
    *,
    format: str = "fp16",
    **options: Any,
) -> Claim:
    """The claim about numbers and their text, on the paper's unit and on the machine's where measured."""

    def judge(rows: Measurements) -> ClaimCheck:
        values, told = on_unit(rows, True)
        if rows.where(unit=UNIT, format=format):
            # Rows without a t are of neula 0.1.0, whose unit rounded to nearest.
            t = rows.where(unit=EMULATED)[0].get("t")
            unit = f"t = {t}" if t is not None else f"t = 8 to nearest, not the paper's {PAPERS_UNIT.block}"
            told = f"{unit}: {told}. Own unit: {on_unit(rows, False)[1]}"
        return within(values, claimed, told, **options)

    return Claim(text, judge)


def _worse(
    text: str, name: str, peer: str, claimed: Interval, *, format: str = "fp16", large: bool = False
) -> Claim:
    """The claim that the error of an algorithm is so many times that of another one, for all or large n."""

    def ratios(rows: Measurements, emulated: bool) -> tuple[list[float], str]:
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

    return _both_units(text, ratios, claimed, format=format, tendency=MORE if claimed[0] >= 1.0 else None)


def _short(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"


def _bounded(names: Sequence[str]) -> Claim:
    """The claim that no error exceeds its bound, on any unit and in any format."""

    def judge(rows: Measurements) -> ClaimCheck:
        shares = {}
        for name in names:
            # Where n u16 is 1 or more, theorems about sums in fp16 say nothing.
            measured = Measurements(r for r in rows.where(algorithm=name) if r.get("bound") is not None)
            # NumPy's maximum of NaN and anything is NaN, which holds no bound.
            shares[name] = float(np.divide(measured.numbers("error"), measured.column("bound")).max())
        told = ", ".join(f"{name} {share:.2g}" for name, share in shares.items())
        return within(shares.values(), (0.0, 1.0), f"at most so much of them: {told}")

    return Claim("errors are below the bounds of the theorems", judge)


def _order(rows: Measurements, emulated: bool) -> tuple[list[float], str]:
    """At the largest n; equal errors count as ordered."""
    found = {x: _errors(rows, x, emulated=emulated) for group in ORDER for x in group}
    last = {name: part.numbers("error")[-1] for name, part in found.items()}
    groups = [[last[name] for name in group] for group in ORDER]
    told = ", ".join(f"{name} {error:.1e}" for name, error in last.items())
    return [float(max(low) <= TIE * min(high)) for low, high in itertools.pairwise(groups)], told


_ordered = _both_units(
    "errors in order: 3.1 fp32, then 5.1 and 5.2/5.1, then 4.1 and 5.2/4.1, then 3.1 fp16", _order, EVERY
)


def _figure(number: int, names: tuple[str, ...], *claims: Claim) -> Figure:
    return described(
        "lu-paper",
        f"figure{number}",
        measure=measure_dominant,
        draw=partial(_draw_with_rates, names),
        claims=(*claims, _bounded(names)),
        size=(12, 5.5),
    )


# item: L Figure 1
FIGURE_1 = _figure(
    1,
    (STANDARD, HALF, SINGLE),
    _worse("stored in fp16, Algorithm 3.1 errs about two orders of magnitude more", HALF, SINGLE, TWO_ORDERS),
    _worse("stored in fp16, it errs as much as Algorithm 2.1 in plain fp16", HALF, STANDARD, SAME),
)
# item: L Figure 2
FIGURE_2 = _figure(
    2,
    (HALF, SINGLE, BUFFERED),
    _worse(
        "4.1 errs about an order of magnitude less than 3.1 with an fp16 matrix, for large n",
        HALF,
        BUFFERED,
        AN_ORDER,
        large=True,
    ),
    _worse(
        "4.1 errs about an order of magnitude more than 3.1 with an fp32 matrix", BUFFERED, SINGLE, AN_ORDER
    ),
    _worse(
        "(neula) in bf16, which is eight times as coarse, 4.1 is ahead of 3.1 at an eighth of the order",
        HALF,
        BUFFERED,
        (1.5, math.inf),
        format="bf16",
        large=True,
    ),
    faster("4.1 is faster than 3.1 with an fp16 matrix (46 and 40 TFLOP/s)", BUFFERED, HALF, paper=46 / 40),
    faster("4.1 is faster than 3.1 with an fp32 matrix (46 and 26 TFLOP/s)", BUFFERED, SINGLE, paper=46 / 26),
)
# item: L Figure 3
FIGURE_3 = _figure(
    3,
    (HALF, SINGLE, BUFFERED, WIDE_PANELS),
    _worse("5.1 is more accurate than 4.1, up to an order", BUFFERED, WIDE_PANELS, (1.5, 10 * HALF_AN_ORDER)),
    _worse(
        "5.1 errs about three times as much as 3.1 with an fp32 matrix", WIDE_PANELS, SINGLE, about(3.0, 3.0)
    ),
    faster(
        "panels in fp32 cost up to 20% of the speed: 4.1 is faster than 5.1",
        BUFFERED,
        WIDE_PANELS,
        paper=46 / 43,
    ),
)
# item: L Figure 4
FIGURE_4 = _figure(
    4,
    (HALF, SINGLE, DOUBLY_LOW, DOUBLY_WIDE),
    _ordered,
    _worse("5.2/5.1 errs as 5.1 does", DOUBLY_WIDE, WIDE_PANELS, SAME),
    _worse("5.2/4.1 errs as 4.1 does, though its bound is r/s times smaller", DOUBLY_LOW, BUFFERED, SAME),
    _worse(
        "3.1 with an fp16 matrix errs at least five times as much as 5.2/5.1",
        HALF,
        DOUBLY_WIDE,
        (5.0, math.inf),
    ),
    faster("5.2/5.1 is faster than 5.1 (47 and 43 TFLOP/s)", DOUBLY_WIDE, WIDE_PANELS, paper=47 / 43),
    faster(
        "5.2/5.1 is almost twice as fast as 3.1 with an fp32 matrix (47 and 26)",
        DOUBLY_WIDE,
        SINGLE,
        paper=47 / 26,
    ),
    faster(
        "5.2/4.1 is the fastest of all (56)",
        DOUBLY_LOW,
        *(name for name in ALGORITHMS if name not in (STANDARD, DOUBLY_LOW)),
    ),
)
# item: L Figure 5
FIGURE_5 = described(
    "lu-paper",
    "figure5",
    measure=measure_tunable,
    draw=_draw_tunable,
    claims=(
        _worse(
            "3.1 with an fp16 matrix errs much more than with an fp32 one", HALF, SINGLE, (10.0, math.inf)
        ),
        _worse("5.2/4.1 errs less than 3.1 with an fp16 matrix", HALF, DOUBLY_LOW, (1.5, math.inf)),
        _worse("5.2/5.1 errs less than 5.2/4.1", DOUBLY_LOW, DOUBLY_WIDE, (1.1, math.inf)),
        _bounded(COMPARED),
    ),
    size=(8.5, 5),
)
