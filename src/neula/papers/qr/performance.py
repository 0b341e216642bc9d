"""Figures 5, 6 and 7: time of the factorization."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from neula.algorithms.orthogonal.reorthogonalize import reorthogonalize, second_passes
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.engines import Engine
from neula.papers.data import Measurements, Row, span
from neula.papers.drawing import Canvas, grouped_bars, plain_ticks, shape_text
from neula.papers.errors import backward_error
from neula.papers.figure import Figure, Setting
from neula.papers.measuring import householder_flops, median_seconds
from neula.papers.qr.accuracy import orthogonality
from neula.papers.verdicts import ClaimCheck, claim, within

SQUARE_SHAPES = [(32768, 32768), (32768, 16384), (16384, 16384), (8192, 8192)]
PAPER_SHAPES = [*SQUARE_SHAPES, (131072, 4096), (524288, 1024), (2097152, 256), (4194304, 128)]
SMALL_SHAPES = [(2048, 2048), (4096, 1024), (8192, 512), (32768, 256), (65536, 128)]
SMALL_TEXT = "2048 x 2048 to 65536 x 128 on this CPU instead of 32768 x 32768 to 4194304 x 128 on a GPU"
BYTES = 40
"""Memory of an entry: A, work, Q of two passes and the peer's copies."""


FASTER = (1.0, math.inf)
"""The interval of "at all": a ratio of times, or of errors, above 1."""

Shapes = Sequence[tuple[int, int]]


def _matrices(setting: Setting, shapes: Shapes) -> Iterator[torch.Tensor]:
    """A matrix of each shape, one after the other."""
    fitting = setting.fitting(shapes or setting.pick(small=SMALL_SHAPES, paper=PAPER_SHAPES), BYTES)
    for shape in setting.track(fitting, lambda shape: shape_text(*shape)):
        yield setting.column_major_normal(*shape)


def _compare(
    setting: Setting, a: torch.Tensor, peer: str, methods: Mapping[str, Callable[[], Any]]
) -> Iterator[Row]:
    """Time methods side by side; TFLOP/s count the operations of Householder QR for all of them."""
    m, n = a.shape
    seconds = {name: median_seconds(method, repeats=3) for name, method in methods.items()}
    for name, time in seconds.items():
        yield {
            "m": m,
            "n": n,
            "method": name,
            "format": setting.speed.format.name,
            "ms": 1e3 * time,
            "tflops": 1e-12 * householder_flops(m, n) / time,
            "speedup": seconds[peer] / time,
        }


def _draw(rows: Measurements, canvas: Canvas) -> None:
    """Bars of TFLOP/s on a logarithmic axis, labelled with time, rate and speedup."""
    axes = canvas.subplots()
    shapes = {shape_text(row["m"], row["n"]): (row["m"], row["n"]) for row in rows}
    series, labels = {}, {}
    for method, part in rows.by("method").items():
        found = [part.where(m=m, n=n)[0] for m, n in shapes.values()]
        series[str(method)] = [row["tflops"] for row in found]
        labels[str(method)] = [_label(row) for row in found]
    grouped_bars(axes, list(shapes), series, labels)
    axes.set(yscale="log", ylabel="TFLOP/s", title=f"products in {rows[0]['format']}")
    axes.set_ylim(top=12 * axes.get_ylim()[1])
    plain_ticks(axes)
    canvas.legend(loc="outside upper center", ncols=len(series), fontsize=10)


def _label(row: Row) -> str:
    ms = f"{row['ms']:.0f}" if row["ms"] >= 100 else f"{row['ms']:.3g}"
    return f"{ms} ms  {row['tflops']:.3g} TF  {row['speedup']:.1f}x"


def _speedups(rows: Measurements, method: str) -> list[float]:
    return rows.where(method=method).column("speedup")


def _range(values: list[float]) -> str:
    return f"{span(values, '.1f')} times faster"


# --- Figure 5 ---------------------------------------------------------------------------------------------

REORTHO, TWICE, WITH_Q = "RGSQRF-Reortho", "RGSQRF, two passes", "SGEQRF + SORGQR"


def measure_reortho(setting: Setting, shapes: Shapes = ()) -> Iterator[Row]:
    """RGSQRF with a second pass against Householder QR that forms Q."""
    engine = setting.speed
    for a in _matrices(setting, shapes):
        methods: dict[str, Callable[[], Any]] = {
            REORTHO: partial(_until_orthogonal, a, engine),
            TWICE: partial(_twice, a, engine),
            WITH_Q: partial(torch.linalg.qr, a),
        }
        passes = 1 + sum(1 for _ in second_passes(*rgsqrf(a, engine), engine))
        for row in _compare(setting, a, WITH_Q, methods):
            yield row | {"passes": passes if row["method"] == REORTHO else None}


def _until_orthogonal(a: torch.Tensor, engine: Engine) -> None:
    reorthogonalize(*rgsqrf(a, engine), engine)


def _twice(a: torch.Tensor, engine: Engine) -> None:
    """Exactly two passes, as in the paper."""
    next(second_passes(*rgsqrf(a, engine), engine))


@claim("faster than SGEQRF + SORMQR for all shapes (3.7 to 7.7 times)", timed=True)
def _reortho_faster(rows: Measurements) -> ClaimCheck:
    part = rows.where(method=REORTHO)
    thrice = [shape_text(row["m"], row["n"]) for row in part if row["passes"] > 2]
    speedups = (rows.where(method=TWICE) or part).column("speedup")
    text = _range(speedups)
    text += f"; {', '.join(thrice)} took more than two passes" if thrice else "; all took two passes"
    return within(speedups, (3.7, 7.7), text, tendency=FASTER)


# item: Q Figure 5
FIGURE_5 = Figure(
    name="figure5",
    title="Figure 5: RGSQRF-Reortho against SGEQRF with Q",
    shows="RGSQRF in the low format with the panel that is the default here, repeated until Q is orthogonal "
    "and, where the data have it, exactly twice, beside the library's Householder QR that forms Q; float32, "
    "random normal matrices. Two passes do, except for square matrices, whose condition number exceeds 1/u: "
    "they take a third. TFLOP/s count 2mn^2 - 2n^3/3 operations for all.",
    scaled_down=SMALL_TEXT,
    measure=measure_reortho,
    draw=_draw,
    claims=(_reortho_faster,),
    size=(11, 6),
)


# --- Figure 6 ---------------------------------------------------------------------------------------------

SGEQRF = "SGEQRF"
CAQR_PANEL, SGEQRF_PANEL = "RGSQRF, CAQR panel", "RGSQRF, SGEQRF panel"


def measure_panels(setting: Setting, shapes: Shapes = ()) -> Iterator[Row]:
    """RGSQRF with the paper's two panels and the default one, against Householder QR without Q."""
    engine = setting.speed
    for a in _matrices(setting, shapes):
        methods: dict[str, Callable[[], Any]] = {
            CAQR_PANEL: partial(rgsqrf, a, engine, panel="caqr", cutoff=128),
            SGEQRF_PANEL: partial(rgsqrf, a, engine, panel="householder", cutoff=128),
            f"RGSQRF, {engine.tuning.recursion(engine.storage).panel} panel": partial(rgsqrf, a, engine),
            SGEQRF: partial(torch.geqrf, a),
        }
        yield from _compare(setting, a, SGEQRF, methods)


@claim("RGSQRF with the CAQR panel is faster than SGEQRF (3.0 to 14.6 times)", timed=True)
def _rgsqrf_faster(rows: Measurements) -> ClaimCheck:
    speedups = _speedups(rows, CAQR_PANEL)
    return within(speedups, (3.0, 14.6), f"with the CAQR panel {_range(speedups)}", tendency=FASTER)


@claim("the CAQR panel contributes more when the matrix is skinny", timed=True)
def _panel_matters_when_skinny(rows: Measurements) -> ClaimCheck:
    """Gain of the CAQR panel over the SGEQRF panel on the squarest and on the tallest matrix."""
    shapes = dict.fromkeys((row["m"], row["n"]) for row in rows)
    gains = dict(zip(shapes, rows.ratios("speedup", CAQR_PANEL, SGEQRF_PANEL), strict=True))
    square, tall = min(gains, key=_aspect), max(gains, key=_aspect)
    text = ", ".join(f"{gains[shape]:.1f} times faster at {shape_text(*shape)}" for shape in (square, tall))
    return within([gains[tall] / max(gains[square], 1.0)], FASTER, text)


def _aspect(shape: tuple[int, int]) -> tuple[float, int]:
    """Order of shapes from square to tall, the largest first of those that are equally square."""
    return shape[0] / shape[1], -shape[0]


@claim("(neula) the default panel is the fastest", timed=True)
def _default_panel_best(rows: Measurements) -> ClaimCheck:
    default = next(name for name in rows.column("method") if name not in (CAQR_PANEL, SGEQRF_PANEL, SGEQRF))
    over = (rows.ratios("speedup", default, panel) for panel in (CAQR_PANEL, SGEQRF_PANEL))
    ratios = list(map(min, *over))
    return within(ratios, FASTER, f"{span(ratios)} times the speed of the better one")


# item: Q Figure 6; Q 36.6 TFLOP/s; V Figure 1
FIGURE_6 = Figure(
    name="figure6",
    title="Figure 6: RGSQRF with different panels against SGEQRF",
    shows="One pass of RGSQRF in the low format with the paper's two panels (cutoff 128) and with the "
    "panel and cutoff that are the default here, beside the library's Householder QR without Q.",
    scaled_down=SMALL_TEXT,
    measure=measure_panels,
    draw=_draw,
    claims=(_rgsqrf_faster, _panel_matters_when_skinny, _default_panel_best),
    size=(12, 6),
)


# --- Figure 7 ---------------------------------------------------------------------------------------------

WORTH = 1.3
VARIANTS = ON_ON, OFF_ON, OFF_OFF = "(on, on)", "(off, on)", "(off, off)"


def measure_low_format(setting: Setting, shapes: Shapes = ()) -> Iterator[Row]:
    """Low format on or off in panel and update: time, and what it does to accuracy."""
    yield from _low_format_accuracy(setting)
    for a in _matrices(setting, shapes):
        variants = {name: partial(_rgsqrf_with, a, setting.speed, name) for name in VARIANTS}
        yield from _compare(setting, a, OFF_OFF, variants)


def _rgsqrf_with(a: torch.Tensor, engine: Engine, variant: str) -> tuple[torch.Tensor, torch.Tensor]:
    low = engine.format.name
    panel = low if variant == ON_ON else "fp32"
    update = engine.using("fp32") if variant == OFF_OFF else engine
    return rgsqrf(a, update, panel="caqr", panel_format=panel, cutoff=128)


def _low_format_accuracy(setting: Setting) -> Iterator[Row]:
    """Errors of the three variants for a matrix of condition 1e3."""
    m, n = setting.shape(small=(1024, 512), paper=(32768, 4096), bytes_an_entry=48)
    a = setting.random("arithmetic", m, n, cond=1e3, seed=11)
    for variant in VARIANTS:
        q, r = _rgsqrf_with(a.float(), setting.numerics, variant)
        errors = {"backward_error": backward_error(a, q, r), "orthogonality": orthogonality(q)}
        yield {"m": m, "n": n, "method": variant, "format": setting.numerics.format.name} | errors


def _draw_low_format(rows: Measurements, canvas: Canvas) -> None:
    """The rows with times; the legend explains the pairs."""
    _draw(_timed(rows), canvas)
    canvas.legends[0].set_title("low format in (panel, update)")


def _timed(rows: Measurements) -> Measurements:
    return Measurements(row for row in rows if row.get("ms") is not None)


@claim("the low format in the update is critical for large matrices", timed=True)
def _update_matters(rows: Measurements) -> ClaimCheck:
    """On the matrix with the most operations, where products are most of the work."""
    part = _timed(rows).where(method=OFF_ON)
    largest = max(part, key=lambda row: row["m"] * row["n"] ** 2)
    worth = sum(row["speedup"] > WORTH for row in part)
    shape = shape_text(largest["m"], largest["n"])
    text = f"(off, on) is {largest['speedup']:.1f} times as fast as (off, off) at {shape}, "
    text += f"more than {WORTH} times in {worth} of {len(part)} shapes"
    return within([largest["speedup"]], (WORTH, math.inf), text, tendency=FASTER)


@claim("the low format does not help much in the panel", timed=True)
def _panel_does_not(rows: Measurements) -> ClaimCheck:
    gains = _timed(rows).ratios("speedup", ON_ON, OFF_ON)
    return within(gains, (0.0, 1.2), f"(on, on) is {span(gains)} times as fast as (off, on)")


@claim("in the panel it costs accuracy")
def _panel_costs_accuracy(rows: Measurements) -> ClaimCheck:
    lossy, best = _errors(rows, ON_ON), _errors(rows, OFF_ON)
    text = "; ".join(
        f"{variant}: backward error {error:.1e}, orthogonality {loss:.1e}"
        for variant, (error, loss) in ((ON_ON, lossy), (OFF_ON, best))
    )
    return within([lossy[0] / best[0], lossy[1] / best[1]], FASTER, text)


def _errors(rows: Measurements, variant: str) -> tuple[float, float]:
    """Backward error and orthogonality; infinite where they are not finite."""
    row = next(row for row in rows.where(method=variant) if row.get("ms") is None)
    error, loss = (row[name] for name in ("backward_error", "orthogonality"))
    return math.inf if error is None else error, math.inf if loss is None else loss


# item: Q Figure 7
FIGURE_7 = Figure(
    name="figure7",
    title="Figure 7: low format on or off in panel and update",
    shows="RGSQRF with the CAQR panel, the low format enabled in (panel, update); speedups over (off, "
    "off). The rows without times have the errors for a matrix with arithmetic spectrum and condition 1e3.",
    scaled_down=SMALL_TEXT + "; errors with emulated tensor cores, 1024 x 512",
    measure=measure_low_format,
    draw=_draw_low_format,
    claims=(_update_matters, _panel_does_not, _panel_costs_accuracy),
    size=(11, 6),
)
