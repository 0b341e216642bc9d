"""Figures 1 and 2: what the rates of the pieces predict for the whole, and what is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.papers.data import Measurements, Row
from neula.papers.drawing import Canvas, plain_ticks
from neula.papers.figure import Figure, Setting
from neula.papers.measuring import householder_flops
from neula.papers.qr import rates
from neula.papers.qr.blocked_householder import blocked_householder
from neula.papers.qr.rates import FP32, LOW, WY_PANEL, Rates, Shape
from neula.papers.qr.recursive_householder import rhouqr
from neula.papers.verdicts import Claim, ClaimCheck, about, claim, within

FIGURE_TEXT = "4096 x 1024 on this CPU instead of 32768 x 16384 on a GPU"
AIM = 0.25
"""How far a measurement may be from the model to count as predicted."""


# item: Q (4)
def predicted_householder(n: int, block: int, panel: Rates, product: Rates, panel_parts: int = 2) -> float:
    """Formula (4): TFLOP/s of blocked Householder QR, two parts in panels and n/B in products."""
    parts = n / block
    return (parts + panel_parts) / (panel_parts / panel[block] + parts / product[block])


# item: Q (7)
def predicted_rgsqrf(n: int, cutoff: int, panel: Rates, product: Rates) -> float:
    """Formula (7): TFLOP/s of RGSQRF, half of each level in products and half in the level below."""
    if n <= cutoff:
        return panel[n]
    return 2 / (1 / predicted_rgsqrf(n // 2, cutoff, panel, product) + 1 / product[n // 2])


# item: Q (5)
def rgsqrf_operations(m: int, n: int, cutoff: int = 128) -> int:
    """Recurrence (5): ``T(n) = 2 T(n/2) + m n^2`` and ``2 m n^2`` for a panel, in all ``2 m n^2``."""
    if n <= cutoff:
        return 2 * m * n * n
    return 2 * rgsqrf_operations(m, n // 2, cutoff) + m * n * n


# item: V 80%
def panel_share(m: int, n: int, cutoff: int, panel: Rates, product: Rates) -> float:
    """Part of the time of RGSQRF that its panels take, by formula (7)."""
    in_panels = (n // cutoff) * rgsqrf_operations(m, cutoff, cutoff) / panel[cutoff]
    return in_panels * predicted_rgsqrf(n, cutoff, panel, product) / rgsqrf_operations(m, n, cutoff)


PREDICTED, MEASURED = "predicted", "measured"
PRODUCTS, WIDE = "predicted from products alone", "predicted from wide products, 1 part in panels"
BLOCKED, RECURSIVE, LIBRARY = "blocked Householder", "RHOUQR", "SGEQRF"
RGSQRF, RGSQRF_CAQR = "RGSQRF, SGEQRF panel", "RGSQRF, CAQR panel"
RGSQRF_DEFAULT = "RGSQRF, default panel"


@dataclass(frozen=True)
class _Study:
    """What Figures 1 and 2 share: one matrix, factorized with many block sizes."""

    setting: Setting
    a: torch.Tensor

    @property
    def flops(self) -> float:
        """Operations of Householder QR, which all methods are charged with: rates compare as times do."""
        return householder_flops(*self.a.shape)

    def charged(self, rgsqrf_rate: float) -> float:
        """A rate in terms of RGSQRF's own ``2 m n^2`` operations in terms of those of Householder QR."""
        m, n = self.a.shape
        return rgsqrf_rate * self.flops / (2 * m * n * n)

    def blocks(self) -> Iterator[int]:
        n = self.a.shape[1]
        sizes = [2**k for k in self.setting.pick(small=range(5, 10), paper=range(7, 13)) if 2**k <= n // 2]
        return self.setting.track(sizes, lambda block: f"B = {block}")

    def library(self) -> Row:
        """The library's own factorization, whose block size is its affair."""
        tflops = rates.tflops(self.flops, partial(torch.geqrf, self.a))
        return self.row(LIBRARY, FP32, None, {MEASURED: tflops})[0]

    def row(self, method: str, format: str, block: int | None, found: dict[str, float]) -> list[Row]:
        """A row for each of the rates."""
        m, n = self.a.shape
        head = {"m": m, "n": n, "method": method, "format": format, "B": block}
        default = block == rates.best_recursion(self.setting.speed).cutoff
        return [head | {"kind": kind, "tflops": rate, "default": default} for kind, rate in found.items()]


def measure_householder(setting: Setting, shape: Shape | None = None) -> Iterator[Row]:
    """Formula (4) and blocked Householder QR as it is, against the block size."""
    table, study = rates.RateTable(setting, shape), _Study(setting, rates.matrix(setting, shape))
    n = study.a.shape[1]
    yield study.library()
    for block in study.blocks():
        for format, engine in rates.engines(setting).items():
            run = partial(blocked_householder, study.a, engine, block=block)
            found = {
                PREDICTED: predicted_householder(
                    n, block, table.select(WY_PANEL), table.select(f"{format} step")
                ),
                WIDE: predicted_householder(
                    n, block, table.select(WY_PANEL), table.select(f"{format} wide step"), 1
                ),
                MEASURED: rates.tflops(study.flops, run),
            }
            yield from study.row(BLOCKED, format, block, found)


def measure_recursion(setting: Setting, shape: Shape | None = None) -> Iterator[Row]:
    """Formula (7) and RGSQRF as it is, against the cutoff, with the library's and the default panel."""
    table, study = rates.RateTable(setting, shape), _Study(setting, rates.matrix(setting, shape))
    n, default = study.a.shape[1], rates.best_recursion(setting.speed).panel
    variants = [
        (RGSQRF, LOW, "householder", table.select(rates.panel_column("householder"))),
        (RGSQRF, FP32, "householder", table.select(rates.panel_column("householder"))),
        (RGSQRF_CAQR, LOW, "caqr", table.select(rates.panel_column("caqr"))),
        (RGSQRF_DEFAULT, LOW, default, table.select(rates.panel_column(default))),
    ]
    yield study.library()
    for block in study.blocks():
        for method, format, panel, panel_rates in variants:
            if block not in panel_rates:
                continue
            run = partial(rgsqrf, study.a, rates.engines(setting)[format], panel=panel, cutoff=block)
            found = {
                PREDICTED: predicted_rgsqrf(n, block, panel_rates, table.select(f"{format} step")),
                PRODUCTS: predicted_rgsqrf(n, block, panel_rates, table.products(format)),
            }
            found = {kind: study.charged(rate) for kind, rate in found.items()}
            found[MEASURED] = rates.tflops(study.flops, run)
            yield from study.row(method, format, block, found)
        recursion = partial(rhouqr, study.a, setting.speed, cutoff=block)
        yield from study.row(RECURSIVE, LOW, block, {MEASURED: rates.tflops(study.flops, recursion)})


def _draw(rows: Measurements, canvas: Canvas) -> None:
    """Predictions as lines, measurements as markers of the same colour."""
    axes = canvas.subplots()
    variants = list(dict.fromkeys((row["method"], row["format"]) for row in rows))
    for number, (method, format) in enumerate(variants):
        for kind, part in rows.where(method=method, format=format).by("kind").items():
            label, colour = f"{method}, {format}: {kind}", f"C{number}"
            if method == LIBRARY:
                axes.axhline(part[0]["tflops"], color="black", linestyle="--", label=f"{method}: {kind}")
            else:
                style = {PREDICTED: "-", PRODUCTS: ":", WIDE: "-.", MEASURED: "o"}[str(kind)]
                axes.plot(part.column("B"), part.column("tflops"), style, color=colour, label=label)
    blocks = sorted({row["B"] for row in rows if row["B"]})
    axes.set(xscale="log", yscale="log", xlabel="block size B", ylabel="TFLOP/s")
    axes.set_xticks(blocks, [str(block) for block in blocks])
    axes.minorticks_off()
    plain_ticks(axes)
    axes.grid(alpha=0.3)
    axes.set_title(f"{rows[0]['m']} x {rows[0]['n']}")
    canvas.legend(loc="outside lower center", ncols=2, fontsize=10)


def _best_ms(rows: Measurements, method: str, format: str = LOW) -> float:
    """Shortest time over all block sizes."""
    tflops = max(rows.where(method=method, format=format, kind=MEASURED).column("tflops"))
    return 1e-9 * householder_flops(rows[0]["m"], rows[0]["n"]) / tflops


@claim("the low format makes blocked Householder QR around 30% faster, no more", timed=True)
def _low_gains_little(rows: Measurements) -> ClaimCheck:
    low, fp32 = _best_ms(rows, BLOCKED, LOW), _best_ms(rows, BLOCKED, FP32)
    text = f"{low:.3g} ms at the best block size, {fp32:.3g} ms in fp32: {fp32 / low:.2f} times as fast"
    return within([fp32 / low], (1.15, 1.45), text, tendency=(1.0, 1.15))


@claim("even then it is no better than SGEQRF", timed=True)
def _no_better_than_library(rows: Measurements) -> ClaimCheck:
    low, library = _best_ms(rows, BLOCKED), _best_ms(rows, LIBRARY, FP32)
    return within([library / low], (0.0, 1.0), f"{low:.3g} ms, SGEQRF {library:.3g} ms")


@claim("RGSQRF gains significantly from the low format and surpasses SGEQRF (by about 37%)", timed=True)
def _recursion_gains(rows: Measurements) -> ClaimCheck:
    low, fp32 = _best_ms(rows, RGSQRF, LOW), _best_ms(rows, RGSQRF, FP32)
    library = _best_ms(rows, LIBRARY, FP32)
    text = f"{low:.3g} ms, {fp32:.3g} ms in fp32, SGEQRF {library:.3g} ms"
    gain = library / low if low < fp32 / 1.3 else math.nan
    return within([gain], about(1.37, 1.25), f"{text}: {library / low:.2f} times", tendency=(1.0, math.inf))


@claim("a small cutoff (128) is as good as any", timed=True)
def _small_cutoff_is_best(rows: Measurements) -> ClaimCheck:
    part = rows.where(method=RGSQRF_DEFAULT, kind=MEASURED)
    at_128, best = part.where(B=128)[0]["tflops"], max(part.column("tflops"))
    text = f"B = 128 reaches {100 * at_128 / best:.0f}% of the best cutoff"
    return within([at_128 / best], (0.9, math.inf), text, tendency=(0.75, math.inf))


@claim("Gram-Schmidt beats Householder in the same recursion", timed=True)
def _beats_recursive_householder(rows: Measurements) -> ClaimCheck:
    ours, theirs = _best_ms(rows, RGSQRF), _best_ms(rows, RECURSIVE)
    text = f"{ours:.3g} ms with Q; RHOUQR, the same panel, {theirs:.3g} ms without Q"
    return within([theirs / ours], (1.0, math.inf), text)


def _predicted(method: str, by: str = PREDICTED) -> Callable[[Measurements], ClaimCheck]:
    """Measured against predicted at the default block size; 128, as the paper, for its own panels."""

    def judge(rows: Measurements) -> ClaimCheck:
        part = rows.where(method=method, format=LOW)
        part = part.where(B=128) if method == RGSQRF_CAQR else part.where(default=True)
        block = part[0]["B"]
        measured, predicted = (part.where(kind=kind)[0]["tflops"] for kind in (MEASURED, by))
        ratio = measured / predicted
        text = f"B = {block}: {measured:.3g} TFLOP/s measured, {predicted:.3g} predicted, ratio {ratio:.2f}"
        return within([ratio], (1 - AIM, 1 + AIM), text, tendency=about(1.0, 2.0))

    return judge


_V100_BLOCKS = (128, 256, 512, 1024)
"""Widths for which formula (4) is a model: in wider ones most of the operations are in the panel."""


@claim("formula (4) with the paper's own rates: low format gains around 30%, and stays below SGEQRF (6.67)")
def _v100_householder(rows: Measurements) -> ClaimCheck:
    _, n = rates.V100_SHAPE
    panel = rates.v100_rates("SGEQRF")
    low, fp32 = (
        max(
            predicted_householder(n, block, panel, rates.v100_rates(f"{format} NN")) for block in _V100_BLOCKS
        )
        for format in (LOW, FP32)
    )
    text = f"{low:.2f} TFLOP/s, {fp32:.2f} in fp32: {low / fp32:.2f} times as fast"
    return within([low / fp32 if low < rates.V100_LIBRARY else math.nan], (1.15, 1.45), text)


@claim("formula (7) with the paper's own rates and the CAQR panel: 27 TFLOP/s")
def _v100_rgsqrf(rows: Measurements) -> ClaimCheck:
    rate = predicted_rgsqrf(rates.V100_SHAPE[1], 128, {128: rates.V100_CAQR}, rates.v100_rates(LOW))
    return within([rate], about(27.0, 1.1), f"{rate:.1f} TFLOP/s")


@claim("with the SGEQRF panel over 80% of the time is in the panel (first version, by the paper's own rates)")
def _v100_panel(rows: Measurements) -> ClaimCheck:
    share = panel_share(*rates.V100_SHAPE, 128, rates.v100_rates("SGEQRF"), rates.v100_rates(LOW))
    return within([share], (0.8, 1.0), f"{share:.0%} at B = 128")


# item: Q Figure 1
FIGURE_1 = Figure(
    name="figure1",
    title="Figure 1: blocked Householder QR against the block size",
    shows="Formula (4) fed with this machine's rates of products (a step of the recursion, rounding "
    "included) and of panels (SGEQRF with Y and T), and blocked Householder QR itself, products in the low "
    "format or in fp32. The second prediction corrects two things: products have n/2 columns instead of B "
    "on their wide side, and panels one part of the operations (2mnB of 2mn^2) instead of two.",
    scaled_down=FIGURE_TEXT,
    measure=measure_householder,
    draw=_draw,
    claims=(
        _low_gains_little,
        _no_better_than_library,
        Claim("(neula) formula (4) is within 25% at the default width", _predicted(BLOCKED), timed=True),
        Claim("(neula) corrected for wide products and panels it is", _predicted(BLOCKED, WIDE), timed=True),
        _v100_householder,
    ),
    size=(11, 7),
    takes_matrix=False,
)

# item: Q Figure 2; Q 27 TFLOP/s; V 1.4 times
FIGURE_2 = Figure(
    name="figure2",
    title="Figure 2: recursive Gram-Schmidt QR against the cutoff",
    shows="Formula (7) fed with this machine's rates, and RGSQRF itself, with the SGEQRF panel (and "
    "SORGQR, since Gram-Schmidt needs the Q of a panel), with the CAQR panel and with the panel that is "
    "the default here. The dotted lines leave out the rounding between the products. RHOUQR is recursive "
    "Householder QR (Y, T, R) with the SGEQRF panel, its Q not formed. All are charged with the 2mn^2 - "
    "2n^3/3 operations of Householder QR, so that a higher point is a shorter time.",
    scaled_down=FIGURE_TEXT,
    measure=measure_recursion,
    draw=_draw,
    claims=(
        _recursion_gains,
        _small_cutoff_is_best,
        Claim(
            "with the CAQR panel formula (7) predicts the speed (27 TFLOP/s, 26.2 measured)",
            _predicted(RGSQRF_CAQR),
            timed=True,
        ),
        _beats_recursive_householder,
        Claim(
            "(neula) formula (7) is within 25% at the default cutoff", _predicted(RGSQRF_DEFAULT), timed=True
        ),
        _v100_rgsqrf,
        _v100_panel,
    ),
    size=(12, 8),
    takes_matrix=False,
)
