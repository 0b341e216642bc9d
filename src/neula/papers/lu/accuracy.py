"""Figures 1 to 5: errors against n, beside rates, for diagonally dominant matrices and for tunable ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from neula.engines import BF16
from neula.io.matrices import no_pivoting_matrix
from neula.papers.data import Measurements, Row
from neula.papers.drawing import Axes, Canvas, lines, log_log
from neula.papers.figure import Figure, Setting
from neula.papers.lu.algorithms import (
    ALGORITHMS,
    BUFFERED,
    COMPARED,
    DOUBLY_LOW,
    DOUBLY_WIDE,
    EMULATED,
    EMULATED_UP_TO,
    HALF,
    INNER_PANEL,
    PANEL,
    PAPERS_UNIT,
    SINGLE,
    STANDARD,
    UNIT,
    WIDE_PANELS,
    accuracy_row,
    units,
)
from neula.papers.lu.performance import SERIES, dominant, draw_rates, faster, times
from neula.papers.verdicts import HALF_AN_ORDER, Claim, ClaimCheck, Interval, about, cases, within

BYTES = 60
"""Memory of an entry: A, which is made in float64, the factors, L and U, and blocks of them in float64."""
STANDARD_UP_TO = 1024
"""Orders up to which rounding after every product is emulated on a CPU, in seconds."""
CONDITION = 1e3
"""Of the matrices of Figure 5."""
COARSER = (HALF, BUFFERED)
"""Algorithms that are compared in bf16, too."""
SAME = about(1.0, 3.0)
"""From and up to how many times the error of another algorithm an error counts as the same."""
AN_ORDER, TWO_ORDERS = about(10.0, HALF_AN_ORDER), about(100.0, HALF_AN_ORDER)
"""How many times as large an error is that is about one or two orders of magnitude larger."""
MORE: Interval = (1.0, math.inf)
"""The tendency of a claim that an error is larger."""
TIE = 1.01
"""Errors that both come from the panels are equal but for the last digits."""
ORDER = ((SINGLE,), (WIDE_PANELS, DOUBLY_WIDE), (BUFFERED, DOUBLY_LOW), (HALF,))


def measure_dominant(setting: Setting, orders: Sequence[int] | None = None) -> Iterator[Row]:
    """Errors of all algorithms on HPL-AI matrices, and times in rows of their own."""
    for n in _tracked(setting, orders):
        a = dominant(setting, n)
        for name in ALGORITHMS:
            yield from _errors_on_units(a, name, setting)
        if _is_cheap(n, HALF, setting):
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
    sizes = orders or setting.pick(small=(512, 1024, 1536, 2048), paper=[2**k for k in range(10, 16)])
    shapes = setting.fitting([(n, n) for n in sizes], BYTES)
    return (n for n, _ in setting.track(shapes, lambda shape: f"n = {shape[0]}"))


def _errors_on_units(a: torch.Tensor, name: str, setting: Setting) -> Iterator[Row]:
    """On tensor cores and emulated, as far as the latter is cheap; without a unit there is only emulation."""
    for unit, engine in units(setting).items():
        if _is_cheap(len(a), name, setting) if unit == EMULATED else name != STANDARD:
            yield accuracy_row(a, name, unit, engine)


def _is_cheap(n: int, name: str, setting: Setting) -> bool:
    """Whether the emulation takes seconds."""
    limit = setting.pick(small=STANDARD_UP_TO if name == STANDARD else EMULATED_UP_TO, paper=EMULATED_UP_TO)
    return n <= limit


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


# --- claims -----------------------------------------------------------------------------------------------


def _errors(rows: Measurements, name: str, *, format: str = "fp16", emulated: bool = False) -> Measurements:
    """Rows with the errors of an algorithm on the unit; where it was only emulated, or by request, those."""
    part = rows.where(algorithm=name, format=format)
    return (not emulated and part.where(unit=UNIT)) or part.where(unit=EMULATED)


def _by_order(rows: Measurements) -> dict[int, float]:
    """Errors by n; NaN where there was no finite one."""
    return dict(zip(rows.column("n"), rows.numbers("error"), strict=True))


def _side_by_side(paper: Claim, machine: Claim) -> Claim:
    """The verdict on the paper's unit, beside what the machine's own does where there is one."""

    def judge(rows: Measurements) -> ClaimCheck:
        check = paper.judge(rows)
        if not rows.where(unit=UNIT):
            return check
        there = machine.judge(rows).measured
        return replace(check, measured=f"{_emulated_unit(rows)}: {check.measured}. Own unit: {there}")

    return Claim(paper.text, judge)


def _emulated_unit(rows: Measurements) -> str:
    """The t of the emulated rows. Those without one are of neula 0.1.0, whose unit rounded to nearest."""
    t = rows.where(unit=EMULATED)[0].get("t")
    return f"t = {t}" if t is not None else f"t = 8 to nearest, not the paper's {PAPERS_UNIT.block}"


def _worse(*args: Any, **options: Any) -> Claim:
    """The claim of :func:`_worse_on_unit`, with the paper's unit and the machine's side by side."""
    return _side_by_side(
        _worse_on_unit(*args, **options | {"emulated": True}), _worse_on_unit(*args, **options)
    )


def _worse_on_unit(
    text: str,
    name: str,
    peer: str,
    claimed: Interval,
    *,
    format: str = "fp16",
    emulated: bool = False,
    large: bool = False,
) -> Claim:
    """The claim that the error of an algorithm is so many times that of another one, for all or large n."""

    def judge(rows: Measurements) -> ClaimCheck:
        ours, theirs = (_by_order(_errors(rows, x, format=format, emulated=emulated)) for x in (name, peer))
        ratios = {n: ours[n] / theirs[n] for n in ours if n in theirs}
        n = max(ratios)
        smallest, largest = (_short(find(ratios.values())) for find in (min, max))
        first, second = (x.replace("fp16", format) for x in (name, peer))
        return within(
            [ratios[n]] if large else ratios.values(),
            claimed,
            f"{first} {ours[n]:.1e}, {second} {theirs[n]:.1e} at n = {n}: {_short(ratios[n])} times; "
            f"{smallest} to {largest} for all n",
            tendency=MORE if claimed[0] >= 1.0 else None,
        )

    return Claim(text, judge)


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


def _ordered_on_unit(rows: Measurements, *, emulated: bool) -> ClaimCheck:
    """At the largest n; equal errors count as ordered."""
    found = {name: _by_order(_errors(rows, name, emulated=emulated)) for group in ORDER for name in group}
    largest = max(found[SINGLE])
    groups = [[found[name][largest] for name in group] for group in ORDER]
    ordered = [max(low) <= TIE * min(high) for low, high in itertools.pairwise(groups)]
    told = ", ".join(f"{name} {by_order[largest]:.1e}" for name, by_order in found.items())
    return cases(ordered, f"at n = {largest}: {told}")


IN_ORDER = "errors in order: 3.1 fp32, then 5.1 and 5.2/5.1, then 4.1 and 5.2/4.1, then 3.1 fp16"
_ordered = _side_by_side(
    *(Claim(IN_ORDER, partial(_ordered_on_unit, emulated=emulated)) for emulated in (True, False))
)

SHOWN = (
    "Left: componentwise backward error (formula 2.2) of the solution of `A x = b`, b = A times ones, "
    f"substituted in fp32; A as in HPL-AI, no pivoting, panels of {PANEL} columns and {INNER_PANEL} inside. "
    "Dashed: what the theorem allows, with the rounding of A and the substitutions. Dotted: the "
    f"paper's tensor cores emulated up to n = {EMULATED_UP_TO}, where there are real ones: they add "
    f"t = {PAPERS_UNIT.block} products at a time and truncate, and round an fp16 matrix after each t, where "
    "a library does so once a product. Claims of the paper are judged on them, and beside it stands what the "
    "machine's own unit does. 2.1 is always emulated, since its arithmetic is fp16 without "
    "tensor cores. Not drawn: 3.1 and 4.1 in bf16, emulated. Right: TFLOP/s of `neula.lu_factor` with the "
    "panels that suit the engine, and of the library's LU in fp32."
)
SCALED_DOWN = (
    "n from 512 to 2048 instead of 1024 to 32768, tensor cores emulated; times with this CPU's low format "
    "instead of fp16"
)


def _figure(number: int, title: str, names: tuple[str, ...], *claims: Claim) -> Figure:
    return Figure(
        name=f"figure{number}",
        title=f"Figure {number}: {title}",
        shows=SHOWN,
        scaled_down=SCALED_DOWN,
        measure=measure_dominant,
        draw=partial(_draw_with_rates, names),
        claims=(*claims, _bounded(names)),
        size=(12, 5.5),
    )


# item: L Figure 1
FIGURE_1 = _figure(
    1,
    "what storing the matrix in fp16 costs Algorithm 3.1",
    (STANDARD, HALF, SINGLE),
    _worse("stored in fp16, Algorithm 3.1 errs about two orders of magnitude more", HALF, SINGLE, TWO_ORDERS),
    _worse(
        "stored in fp16, it errs as much as Algorithm 2.1 in plain fp16", HALF, STANDARD, SAME, emulated=True
    ),
)
# item: L Figure 2
FIGURE_2 = _figure(
    2,
    "Algorithm 4.1, left-looking with an fp32 buffer",
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
    "Algorithm 5.1, panels in fp32",
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
    "Algorithm 5.2, panels that are partitioned again",
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
FIGURE_5 = Figure(
    name="figure5",
    title="Figure 5: matrices of Fasi and Higham with condition 1e3",
    shows="Componentwise backward error (formula 2.2) as in Figures 1 to 4, for dense matrices that need no "
    "pivoting and have condition number 1e3 in the infinity norm. Dashed: what the theorem allows. Dotted: "
    "tensor cores emulated, where there are real ones.",
    scaled_down="n from 512 to 2048 instead of 1024 to 32768, tensor cores emulated",
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
