"""Figures 3 to 7 and section 3.5: accuracy and time of the factorization."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from neula.algorithms.orthogonal.householder import householder
from neula.algorithms.orthogonal.reorthogonalize import reorthogonalize, second_passes
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.scaling import power_of_two_scales
from neula.certificates.bounds import orthogonality_bound, residual_bound
from neula.engines import FP16, Engine, Format
from neula.io.matrices import SPECTRA
from neula.papers.data import Measurements, Row, span
from neula.papers.drawing import Canvas, grouped_bars, lines, log_log, plain_ticks, shape_text
from neula.papers.errors import backward_error, growth, norm_of_defect, orthogonality_defect
from neula.papers.figure import Setting
from neula.papers.measuring import householder_flops, steady_seconds
from neula.papers.qr.householder import rhouqr
from neula.papers.verdicts import MORE, ClaimCheck, cases, within

RGSQRF, REORTHO, RHOUQR, SGEQRF = "RGSQRF", "RGSQRF-Reortho", "RHOUQR", "SGEQRF"
UNTIL = "RGSQRF until orthogonal"
CONDITIONS = [10.0**k for k in range(8)]
PAPERS = ("arithmetic",)  # the spectrum that the paper shows
OTHERS = tuple(spectrum for spectrum in SPECTRA if spectrum not in PAPERS)
FLAT = 0.2  # exponents of the condition number below this are no growth
COMPLETE = 0.3  # from here on Q is about as far from orthogonal as it can get

Factors = tuple[torch.Tensor, torch.Tensor]


# item: Q Figure 3; V Figure 2; Q Figure 4
def measure_accuracy(setting: Setting, shape: tuple[int, int] | None = None) -> Iterator[Row]:
    """Backward error and orthogonality against the condition number, for four spectra."""
    m, n = whole = shape or setting.shape(small=(768, 384), paper=(32768, 16384), bytes_an_entry=64)
    others = setting.pick(small=whole, paper=(m // 4, n // 4))
    if others != whole:
        setting.notes.append(f"spectra that the paper does not show: {shape_text(*others)}")
    cases = setting.kinds([(spectrum, cond) for spectrum in (*PAPERS, *OTHERS) for cond in CONDITIONS])
    for spectrum, cond in setting.track(cases, lambda case: f"{case[0]} {case[1]:.0e}"):
        m, n = whole if spectrum in PAPERS else others
        a = setting.random(spectrum, m, n, cond=cond, seed=3)
        head = {"spectrum": spectrum, "cond": cond}
        for method, (q, r) in _factorizations(a.float(), setting.numerics):
            yield head | {
                "method": method,
                "m": m,
                "n": n,
                "backward_error": backward_error(a, q, r),
                "orthogonality": orthogonality(q),
            }
            del q, r


def _factorizations(a: torch.Tensor, engine: Engine) -> Iterator[tuple[str, Factors]]:
    """The paper's methods with its panel, and one pass with the panel that is the default here."""
    scales = power_of_two_scales(engine.column_max(a))
    q, r = rgsqrf(a * scales, engine, panel="caqr")
    yield RGSQRF, (q, r / scales)
    passes = second_passes(q, r, engine, panel="caqr")
    q, r = next(passes)
    yield REORTHO, (q, r / scales)
    q, r = deque(itertools.chain([(q, r)], passes), maxlen=1).pop()
    yield UNTIL, (q, r / scales)
    del q, r
    if (panel := engine.tuning.recursion(engine.storage).panel) != "caqr":
        q, r = rgsqrf(a * scales, engine)
        yield f"{RGSQRF} ({panel} panel)", (q, r / scales)
        del q, r
    factors = rhouqr(a * scales, engine)
    yield RHOUQR, (factors.q(engine), factors.r / scales)
    del factors
    yield SGEQRF, householder(a)


# item: Q orthogonality
def orthogonality(q: torch.Tensor) -> float:
    """``||I - Q^T Q||_2``, computed in double precision."""
    return norm_of_defect(orthogonality_defect(q))


def draw_spectra(rows: Measurements, canvas: Canvas, quantity: str, label: str) -> None:
    """A picture for each spectrum, with one curve a method; crosses at the top: Inf or NaN."""
    axes = canvas.subplots(2, 2, sharex=True, sharey=True)
    for place, spectrum in zip(axes.flat, (*PAPERS, *OTHERS), strict=True):
        part = rows.where(spectrum=spectrum)
        lines(place, part, "cond", quantity, "method")
        lost = [row["cond"] for row in part if row[quantity] is None]
        place.plot(lost, [0.97] * len(lost), "kx", transform=place.get_xaxis_transform())
        log_log(place, "cond(A)", label, f"{spectrum}, {part[0]['m']} x {part[0]['n']}")
        place.label_outer()
    handles, names = axes.flat[0].get_legend_handles_labels()
    canvas.legend(handles, names, loc="outside upper center", ncols=3, fontsize=10)


def flat(
    rows: Measurements, method: str, quantity: str, format: Format, spectra: Sequence[str] = PAPERS
) -> ClaimCheck:
    """An error does not grow with the condition number and is that of a format.

    A spectrum for which the error grows counts as one beyond the bound.
    """
    bound_of = residual_bound if quantity == "backward_error" else orthogonality_bound
    # The identity, which condition 1 gives up to rounding, is factorized exactly by some methods.
    parts = [Measurements(rows.where(spectrum=spectrum, method=method)[1:]) for spectrum in spectra]
    errors, shares, powers = [], [], []
    for part in parts:
        found = part.numbers(quantity)
        bounds = [bound_of(format, row["n"]) for row in part]
        lost = any(map(math.isnan, found))
        powers.append(-math.inf if lost else growth(part, quantity, "cond"))
        is_flat = powers[-1] < FLAT
        shares += [x / y if is_flat else math.nan for x, y in zip(found, bounds, strict=True)]
        errors += found
    finite = [error for error in errors if not math.isnan(error)]
    words = f"largest error {max(finite, default=math.nan):.1e}"
    if max(powers) > -math.inf:
        words += f", growing at most as cond^{max(powers):.2f} (to be flat, below {FLAT})"
    words += f"; Inf or NaN for {len(errors) - len(finite)} of {len(errors)}"
    return within(shares, (0.0, 1.0), words)


def deteriorates(rows: Measurements, spectra: Sequence[str], least: float, most: float) -> ClaimCheck:
    """The exponent of the loss of orthogonality, from condition 10 until it is complete."""

    def power(part: list[Row]) -> float:
        growing = [row for row in part if row["orthogonality"] < COMPLETE]
        growing = part[: max(2, len(growing))]
        return growth(growing, "orthogonality", "cond") if len(growing) > 1 else math.nan

    parts = {spectrum: rows.where(spectrum=spectrum, method=RGSQRF)[1:] for spectrum in spectra}
    powers = {x: power([row for row in part if row["orthogonality"]]) for x, part in parts.items()}
    words = ", ".join(f"{spectrum} cond^{exponent:.1f}" for spectrum, exponent in powers.items())
    return within(powers.values(), (least, most), f"until orthogonality is lost: {words}")


SMALLEST_FP16 = 6e-8
EXPONENTS = [-30, -20, -15, -12, -10, -9, -8, -7, -6, -4, -2, 0, 2, 4, 5, 6, 8, 10, 15, 20, 30]


def measure_overflow(setting: Setting, shape: tuple[int, int] | None = None) -> Iterator[Row]:
    """Columns from 1 to ``10^e`` in random order, factorized with and without scaling."""
    m, n = shape or setting.shape(small=(1024, 256), paper=(32768, 4096), bytes_an_entry=64)
    engine = setting.numerics
    a = setting.random("normal", m, n, dtype=torch.float32, seed=5)
    order = torch.randperm(n, generator=torch.Generator("cpu").manual_seed(6), device="cpu").to(a.device)
    for exponent in setting.track(EXPONENTS, lambda exponent: f"columns to 1e{exponent}"):
        graded = a * torch.logspace(0, exponent, n, dtype=torch.float32, device=a.device)[order]
        scales = power_of_two_scales(engine.column_max(graded))
        for scaling, factors in {"without": torch.ones_like(scales), "with": scales}.items():
            q, r = rgsqrf(graded * factors, engine, panel="caqr")
            yield {
                "scaling": scaling,
                "exponent": exponent,
                "m": m,
                "n": n,
                "finite": bool(q.isfinite().all() and r.isfinite().all()),
                "backward_error": _worst_column(graded * scales, q, r * (scales / factors)),
                "orthogonality": orthogonality(q),
            }


def _worst_column(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> float:
    """Largest ``||a_j - Q r_j|| / ||a_j||`` of a column."""
    error = a - q.double() @ r.double()
    return float((error.norm(dim=0) / a.double().norm(dim=0)).max())


def draw_overflow(rows: Measurements, canvas: Canvas) -> None:
    """Errors against the range of the columns; a cross where the result is not finite."""
    axes = canvas.subplots(1, 2, sharex=True)
    lost = rows.where(scaling="without", finite=False).column("exponent")
    for place, quantity, label in (
        (axes[0], "backward_error", "largest ||a - Qr|| / ||a|| of a column"),
        (axes[1], "orthogonality", "||I - Q$^T$Q||"),
    ):
        lines(place, rows, "exponent", quantity, "scaling")
        place.plot(lost, [1.0] * len(lost), "x", color="C0", label="without: Inf or NaN")
        place.set(yscale="log", xlabel="columns from 1 to $10^e$: e", ylabel=label)
        for limit in (FP16.largest, SMALLEST_FP16):
            place.axvline(math.log10(limit), linestyle="--", color="gray")
        place.grid(alpha=0.3)
    axes[0].set_title("dashed: the range of fp16", fontsize=10)
    axes[1].legend(title="scaling", loc="center right")


def overflows(rows: Measurements) -> ClaimCheck:
    lost = [row["exponent"] for row in rows.where(scaling="without", finite=False) if row["exponent"] > 0]
    large = [row for row in rows.where(scaling="without") if 10.0 ** row["exponent"] > 10 * FP16.largest]
    text = f"Inf or NaN from columns of 1e{min(lost)} on" if lost else "never in columns of up to 1e30"
    return cases([not row["finite"] for row in large], text)


def underflows(rows: Measurements) -> ClaimCheck:
    part = [row for row in rows.where(scaling="without") if row["exponent"] <= 0 and row["finite"]]
    worst, best = max(part, key=lambda row: row["backward_error"]), part[-1]["backward_error"]
    text = f"worst column {best:.1e}; with columns to 1e{worst['exponent']} {worst['backward_error']:.1e}"
    return within([worst["backward_error"] / best], (10.0, math.inf), text, weaker=(2.0, math.inf))


def scaling_helps(rows: Measurements) -> ClaimCheck:
    part = rows.where(scaling="with")
    errors = [math.inf if error is None else error for error in part.column("backward_error")]
    bound = residual_bound(FP16, part[0]["n"])
    low, high = part[0]["exponent"], part[-1]["exponent"]
    text = f"worst column {max(errors):.1e} (bound {bound:.1e}) with columns from 1e{low} to 1e{high}"
    finite = part.column("finite")
    return cases([ok and error <= bound for ok, error in zip(finite, errors, strict=True)], text)


SQUARE_SHAPES = [(32768, 32768), (32768, 16384), (16384, 16384), (8192, 8192)]
PAPER_SHAPES = [*SQUARE_SHAPES, (131072, 4096), (524288, 1024), (2097152, 256), (4194304, 128)]
SMALL_SHAPES = [(1024, 1024), (4096, 1024), (8192, 512), (32768, 256), (65536, 128)]
BYTES = 40  # memory of an entry: A, work, Q of two passes and the peer's copies

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
    seconds = {name: steady_seconds(method) for name, method in methods.items()}
    head, format = {"m": m, "n": n}, setting.speed.format.name
    for name, time in seconds.items():
        rates = {"ms": 1e3 * time, "tflops": 1e-12 * householder_flops(m, n) / time}
        yield head | {"method": name, "format": format} | rates | {"speedup": seconds[peer] / time}


def draw_bars(rows: Measurements, canvas: Canvas) -> None:
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


TWICE, WITH_Q = "RGSQRF, two passes", "SGEQRF + SORGQR"


# item: Q Figure 5
def measure_reortho(setting: Setting, shapes: Shapes = ()) -> Iterator[Row]:
    """RGSQRF with a second pass against Householder QR that forms Q."""
    engine = setting.speed
    for a in _matrices(setting, shapes):
        methods: dict[str, Callable[[], Any]] = {
            REORTHO: partial(_passes, a, engine, reorthogonalize),
            TWICE: partial(_passes, a, engine, lambda *factors: next(second_passes(*factors))),
            WITH_Q: partial(torch.linalg.qr, a),
        }
        passes = 1 + sum(1 for _ in second_passes(*rgsqrf(a, engine), engine))
        for row in _compare(setting, a, WITH_Q, methods):
            yield row | {"passes": passes if row["method"] == REORTHO else None}


def _passes(a: torch.Tensor, engine: Engine, more: Callable[..., object]) -> None:
    """One pass and more: until orthogonal, or a second one, as in the paper."""
    more(*rgsqrf(a, engine), engine)


def reortho_faster(rows: Measurements) -> ClaimCheck:
    part = rows.where(method=REORTHO)
    thrice = [shape_text(row["m"], row["n"]) for row in part if row["passes"] > 2]
    speedups = (rows.where(method=TWICE) or part).column("speedup")
    text = f"{span(speedups, '.1f')} times faster; more than two passes until orthogonal: "
    return within(speedups, (3.7, 7.7), text + (", ".join(thrice) or "none"), weaker=MORE)


CAQR_PANEL, SGEQRF_PANEL = "RGSQRF, CAQR panel", "RGSQRF, SGEQRF panel"


# item: Q Figure 6; Q 36.6 TFLOP/s; V Figure 1
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


def rgsqrf_faster(rows: Measurements) -> ClaimCheck:
    speedups = rows.where(method=CAQR_PANEL).column("speedup")
    return within(speedups, (3.0, 14.6), f"{span(speedups, '.1f')} times faster", weaker=MORE)


def panel_matters_when_skinny(rows: Measurements) -> ClaimCheck:
    """Gain of the CAQR panel over the SGEQRF panel on the squarest, largest matrix and on the tallest."""
    shapes = dict.fromkeys((row["m"], row["n"]) for row in rows)
    gains = dict(zip(shapes, rows.ratios("speedup", CAQR_PANEL, SGEQRF_PANEL), strict=True))
    by_aspect = sorted(gains, key=lambda shape: (shape[0] / shape[1], -shape[0]))
    square, tall = by_aspect[0], by_aspect[-1]
    text = ", ".join(f"{gains[shape]:.1f} times faster at {shape_text(*shape)}" for shape in (square, tall))
    return within([gains[tall] / max(gains[square], 1.0)], MORE, text)


def default_panel_best(rows: Measurements) -> ClaimCheck:
    default = next(name for name in rows.column("method") if name not in (CAQR_PANEL, SGEQRF_PANEL, SGEQRF))
    ratios = list(map(min, *(rows.ratios("speedup", default, x) for x in (CAQR_PANEL, SGEQRF_PANEL))))
    return within(ratios, MORE, f"{span(ratios)} times the speed of the better one")


WORTH = 1.3
VARIANTS = ON_ON, OFF_ON, OFF_OFF = "(on, on)", "(off, on)", "(off, off)"


# item: Q Figure 7
def measure_low_format(setting: Setting, shapes: Shapes = ()) -> Iterator[Row]:
    """Low format on or off in panel and update: time, and what it does to accuracy."""
    yield from _low_format_accuracy(setting)
    for a in _matrices(setting, shapes):
        variants = {name: partial(_rgsqrf_with, a, setting.speed, name) for name in VARIANTS}
        yield from _compare(setting, a, OFF_OFF, variants)


def _rgsqrf_with(a: torch.Tensor, engine: Engine, variant: str) -> tuple[torch.Tensor, torch.Tensor]:
    panel = engine.format.name if variant == ON_ON else "fp32"
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


def draw_low_format(rows: Measurements, canvas: Canvas) -> None:
    """The rows with times; the legend explains the pairs."""
    draw_bars(_timed(rows), canvas)
    canvas.legends[0].set_title("low format in (panel, update)")


def _timed(rows: Measurements) -> Measurements:
    return Measurements(row for row in rows if row.get("ms") is not None)


def update_matters(rows: Measurements) -> ClaimCheck:
    """On the matrix with the most operations, where products are most of the work."""
    part = _timed(rows).where(method=OFF_ON)
    largest = max(part, key=lambda row: row["m"] * row["n"] ** 2)
    worth = sum(row["speedup"] > WORTH for row in part)
    text = f"(off, on) is {largest['speedup']:.1f} times as fast as (off, off) at "
    text += (
        f"{shape_text(largest['m'], largest['n'])}, more than {WORTH} times in {worth} of {len(part)} shapes"
    )
    return within([largest["speedup"]], (WORTH, math.inf), text, weaker=MORE)


def panel_does_not(rows: Measurements) -> ClaimCheck:
    gains = _timed(rows).ratios("speedup", ON_ON, OFF_ON)
    return within(gains, (0.0, 1.2), f"(on, on) is {span(gains)} times as fast as (off, on)")


def panel_costs_accuracy(rows: Measurements) -> ClaimCheck:
    """Backward error and orthogonality; an error that is not finite is infinite."""
    errors = Measurements(row for row in rows if row.get("ms") is None)
    lossy, best = (
        [math.inf if row[name] is None else row[name] for name in ("backward_error", "orthogonality")]
        for variant in (ON_ON, OFF_ON)
        for row in errors.where(method=variant)
    )
    text = f"{ON_ON}: {lossy[0]:.1e} and {lossy[1]:.1e}, {OFF_ON}: {best[0]:.1e} and {best[1]:.1e}"
    ratios = [x / y for x, y in zip(lossy, best, strict=True)]
    return within(ratios, MORE, f"backward error and orthogonality {text}")
