"""Table 3, Figures 1 and 2: rates of the pieces, what they predict for the whole, and what is measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.engines import Engine
from neula.engines.tuning import Recursion
from neula.papers.data import Measurements, Row
from neula.papers.drawing import Canvas, plain_ticks
from neula.papers.figure import Setting
from neula.papers.measuring import householder_flops, sustained_seconds
from neula.papers.qr.householder import blocked_householder, householder_wy, rhouqr
from neula.papers.verdicts import HALF_AN_ORDER, MORE, ClaimCheck, Interval, about, within

Shape = tuple[int, int]
Rates = dict[int, float]  # TFLOP/s for each width

V100_SHAPE, V100_CAQR, V100_LIBRARY = (32768, 16384), 0.33, 6.67
"""Of the paper: the matrix, and TFLOP/s of the CAQR panel of 128 columns and of SGEQRF of all columns."""
V100_COLUMNS = ("low TN", "fp32 TN", "low NN", "fp32 NN", "SGEQRF")
V100_RATES = {
    128: (8.45, 1.83, 4.44, 2.28, 0.10),
    256: (30.17, 4.19, 11.39, 5.91, 0.14),
    512: (56.48, 8.23, 58.05, 10.19, 0.36),
    1024: (72.39, 12.43, 77.58, 12.80, 0.79),
    2048: (93.53, 13.54, 87.29, 13.56, 1.55),
    4096: (97.82, 12.31, 92.72, 12.81, 2.71),
    8192: (92.75, 12.94, 92.20, 13.04, 4.39),
    16384: (82.32, 12.96, 83.40, 13.12, 6.67),
}
"""Table 3 of the paper: TFLOP/s of a V100 for each width k, with 32768 rows."""


def v100_rates(column: str) -> Rates:
    """One column of the paper's Table 3; ``"low"`` or ``"fp32"``: its two products one after the other."""
    if column not in V100_COLUMNS:
        return both(v100_rates(f"{column} TN"), v100_rates(f"{column} NN"))
    return {k: rates[V100_COLUMNS.index(column)] for k, rates in V100_RATES.items()}


def both(first: Rates, second: Rates) -> Rates:
    """Rates of two pieces of equal work, one after the other."""
    return {k: 2 / (1 / first[k] + 1 / second[k]) for k in first}


def rate_at(rates: Rates, width: int) -> float:
    """The rate of this width, or of the widest below it that was measured, or of the narrowest."""
    return rates[max((k for k in rates if k <= width), default=min(rates))]


SGEQRF, WY_PANEL = "SGEQRF", "WY panel"
LOW, FP32 = "low", "fp32"
WIDEST_PANEL = 4096  # wider ones are most of a matrix


def matrix(setting: Setting, shape: Shape | None) -> torch.Tensor:
    shape = shape or setting.shape(small=(4096, 1024), paper=(32768, 16384), bytes_an_entry=24)
    return setting.column_major_normal(*shape)


def widths(setting: Setting, small: range, paper: range, most: int) -> list[int]:
    """Powers of two up to ``most``; of the user's matrix from 4 on."""
    exponents = setting.pick(small=small, paper=paper) if setting.matrix is None else range(2, paper.stop)
    return [2**k for k in exponents if 2**k <= most]


def engines(setting: Setting) -> dict[str, Engine]:
    return {LOW: setting.speed, FP32: setting.speed.using("fp32")}


def tflops(flops: float, run: Callable[[], object]) -> float:
    return 1e-12 * flops / sustained_seconds(run)


def best_recursion(engine: Engine) -> Recursion:
    return engine.tuning.recursion(engine.storage)


# item: Q Table 3; Q CAQR rate
def measure_rates(setting: Setting, shape: Shape | None = None) -> Iterator[Row]:
    """Rates of products, of a step of the recursion, and of panels, against the width k; once a run."""
    key = "rates", shape
    if key not in setting.shared:
        setting.shared[key] = list(_rates(setting, shape))
    yield from setting.shared[key]


def _rates(setting: Setting, shape: Shape | None) -> Iterator[Row]:
    a, best = matrix(setting, shape), best_recursion(setting.speed).panel
    m, n = a.shape
    for k in setting.track(widths(setting, range(5, 11), range(7, 15), n), lambda k: f"k = {k}"):
        row: Row = {"m": m, "k": k}
        for name, engine in engines(setting).items():
            rates = _product_rates(a[:, :k], engine)
            rates |= {
                "step": _step_rate(a, k, k, engine),
                "wide step": _step_rate(a, k, max(k, n // 2), engine),
            }
            row |= {f"{name} {piece}": rate for piece, rate in rates.items()}
        row[SGEQRF] = tflops(2 * m * k * k, partial(torch.geqrf, a[:, :k]))
        row[WY_PANEL] = tflops(2 * m * k * k, partial(householder_wy, a[:, :k]))
        panels = ("householder", "caqr", best) if k <= min(n // 4, WIDEST_PANEL) else ()
        yield row | {panel_column(panel): _panel_rate(a, k, setting.speed, panel) for panel in panels}


def panel_column(panel: str) -> str:
    return {"householder": "SGEQRF panel", "caqr": "CAQR panel"}.get(panel, f"{panel} panel")


def _product_rates(a: torch.Tensor, engine: Engine) -> Row:
    """The paper's two products: k x m by m x k, and m x k by k x k."""
    m, k = a.shape
    tall, small = engine.operand(a), engine.operand(a[:k])
    gram, product = engine.empty(k, k), engine.empty(m, k)
    return {
        "TN": tflops(2 * m * k * k, lambda: engine.gemm(tall.T, tall, gram)),
        "NN": tflops(2 * m * k * k, lambda: engine.gemm(tall, small, product)),
    }


def _step_rate(a: torch.Tensor, k: int, width: int, engine: Engine) -> float:
    """Both products of a step with the rounding between them, on one block of columns after the other.

    ``A2 - Q1 (Q1^T A2)`` with k columns in Q1 and ``width`` in A2. The blocks are those of the whole matrix,
    so that they come from memory as they do in the recursion.
    """
    m, n = a.shape
    # Halved, so that repeated updates stay bounded.
    q1 = engine.operand(engine.empty(m, k).copy_(a[:, :k] / (2 * m**0.5)))
    work = engine.empty(m, n).copy_(a)
    low = engine.operand_buffer(work)
    r12 = engine.empty(k, width)
    columns = itertools.cycle(range(0, n - width + 1, width))

    def step() -> None:
        block = slice(start := next(columns), start + width)
        a2 = work[:, block]
        engine.gemm(q1.T, engine.operand(a2, None if low is None else low[:, block]), r12)
        engine.gemm(q1, engine.operand(r12), a2, alpha=-1.0, beta=1.0)

    return tflops(4 * m * k * width, step)


def _panel_rate(a: torch.Tensor, k: int, engine: Engine, panel: str) -> float:
    """A panel as RGSQRF runs it, in place and with the rounded copy of Q, on one block after the other."""
    m, n = a.shape
    blocks = itertools.cycle(engine.empty(m, n).copy_(a)[:, : n // k * k].split(k, dim=1))
    run = lambda: rgsqrf(next(blocks), engine, cutoff=k, panel=panel, overwrite_a=True)  # noqa: E731
    return tflops(2 * m * k * k, run)


def low_needs_wider(rows: Measurements) -> ClaimCheck:
    """The first width at 90% of the best rate, in both formats."""
    first = {}
    for name in (LOW, FP32):
        best = max(rows.column(f"{name} TN"))
        first[name] = min(row["k"] for row in rows if row[f"{name} TN"] > 0.9 * best)
    text = f"90% of the best rate from k = {first[LOW]} on in the low format, {first[FP32]} in fp32"
    return within([first[LOW] / first[FP32]], about(2.0), text, weaker=(1.5, MORE[1]))


def panel_is_slow(rows: Measurements) -> ClaimCheck:
    narrow = next(row for row in rows if row["k"] >= 128)
    part = narrow[SGEQRF] / max(rows.column(f"{LOW} TN"))
    text = f"SGEQRF at k = {narrow['k']}: {100 * part:.2g}% of the best"
    return within([part], about(0.001, HALF_AN_ORDER), text, weaker=(0.0, 0.01))


def caqr_is_faster(rows: Measurements) -> ClaimCheck:
    row = rows.where(k=128)[0]
    ratio = row["CAQR panel"] / row[SGEQRF]
    text = f"at k = 128 {row['CAQR panel']:.2g} TFLOP/s with Q, SGEQRF {row[SGEQRF]:.2g} without"
    return within([ratio], about(3.3), f"{text}: {ratio:.2g} times", weaker=MORE)


def rate_table(setting: Setting, shape: Shape | None) -> dict[str, Rates]:
    """Table 3 as the formulas need it: the rate of each width, for each column as far as it goes."""
    rows = Measurements(measure_rates(setting, shape))
    return {column: {row["k"]: row[column] for row in rows if column in row} for column in rows.fields}


AIM = 0.25  # how far a measurement may be from the model to count as predicted


# item: Q (4)
def predicted_householder(n: int, block: int, panel: Rates, product: Rates, panel_parts: int = 2) -> float:
    """Formula (4): TFLOP/s of blocked Householder QR, two parts in panels and n/B in products."""
    parts = n / block
    return (parts + panel_parts) / (panel_parts / panel[block] + parts / product[block])


# item: Q (7)
def predicted_rgsqrf(n: int, cutoff: int, panel: Rates, product: Rates) -> float:
    """Formula (7): TFLOP/s of RGSQRF, half of each level in products and half in the level below."""
    if n <= cutoff:
        return rate_at(panel, n)
    return 2 / (1 / predicted_rgsqrf(n // 2, cutoff, panel, product) + 1 / rate_at(product, n // 2))


# item: Q (5)
def rgsqrf_operations(m: int, n: int, cutoff: int = 128) -> int:
    """Recurrence (5): ``T(n) = 2 T(n/2) + m n^2`` and ``2 m n^2`` for a panel, in all ``2 m n^2``.

    Halves of an odd n differ by one; the two products take ``4 m n1 n2``, which is ``m n^2`` for equal ones.
    """
    if n <= cutoff:
        return 2 * m * n * n
    left, right = n // 2, n - n // 2
    halves = (rgsqrf_operations(m, half, cutoff) for half in (left, right))
    return sum(halves) + 4 * m * left * right


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
    """The setting of Figures 1 and 2: one matrix, factorized with many block sizes."""

    setting: Setting
    a: torch.Tensor

    @property
    def flops(self) -> float:
        """Operations of Householder QR, which all methods are charged with: rates compare as times do."""
        return householder_flops(*self.a.shape)

    def blocks(self) -> Iterator[int]:
        sizes = widths(self.setting, range(5, 10), range(7, 13), self.a.shape[1] // 2)
        return self.setting.track(sizes, lambda block: f"B = {block}")

    def library(self) -> list[Row]:
        """The library's own factorization, whose block size is its affair."""
        return self.rows(LIBRARY, FP32, None, partial(torch.geqrf, self.a))

    def rows(
        self, method: str, format: str, block: int | None, run: Callable[[], object], **predicted: float
    ) -> list[Row]:
        """A row for the measured rate and one for each prediction, by its name."""
        m, n = self.a.shape
        head = {"m": m, "n": n, "method": method, "format": format, "B": block}
        default = block == best_recursion(self.setting.speed).cutoff
        found = predicted | {MEASURED: tflops(self.flops, run)}
        return [head | {"kind": kind, "tflops": rate, "default": default} for kind, rate in found.items()]


# item: Q Figure 1
def measure_householder(setting: Setting, shape: Shape | None = None) -> Iterator[Row]:
    """Formula (4) and blocked Householder QR as it is, against the block size."""
    table, study = rate_table(setting, shape), _Study(setting, matrix(setting, shape))
    predict = partial(predicted_householder, study.a.shape[1], panel=table[WY_PANEL])
    yield from study.library()
    for block in study.blocks():
        for format, engine in engines(setting).items():
            step, wide = (table[f"{format} {name}"] for name in ("step", "wide step"))
            found = {
                PREDICTED: predict(block, product=step),
                WIDE: predict(block, product=wide, panel_parts=1),
            }
            run = partial(blocked_householder, study.a, engine, block=block)
            yield from study.rows(BLOCKED, format, block, run, **found)


# item: Q Figure 2; Q 27 TFLOP/s; V 1.4 times
def measure_recursion(setting: Setting, shape: Shape | None = None) -> Iterator[Row]:
    """Formula (7) and RGSQRF as it is, against the cutoff, with the library's and the default panel."""
    table, study = rate_table(setting, shape), _Study(setting, matrix(setting, shape))
    m, n = study.a.shape
    charged = study.flops / (2 * m * n * n)  # of the operations of RGSQRF itself
    variants = [
        (RGSQRF, LOW, "householder"),
        (RGSQRF, FP32, "householder"),
        (RGSQRF_CAQR, LOW, "caqr"),
        (RGSQRF_DEFAULT, LOW, best_recursion(setting.speed).panel),
    ]
    yield from study.library()
    for block in study.blocks():
        for method, format, panel in variants:
            panel_rates = table.get(panel_column(panel), {})
            if block not in panel_rates:
                continue
            products = both(table[f"{format} TN"], table[f"{format} NN"])
            pieces = {PREDICTED: table[f"{format} step"], PRODUCTS: products}
            found = {x: charged * predicted_rgsqrf(n, block, panel_rates, y) for x, y in pieces.items()}
            run = partial(rgsqrf, study.a, engines(setting)[format], panel=panel, cutoff=block)
            yield from study.rows(method, format, block, run, **found)
        yield from study.rows(RECURSIVE, LOW, block, partial(rhouqr, study.a, setting.speed, cutoff=block))


def draw(rows: Measurements, canvas: Canvas) -> None:
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


def _best(rows: Measurements, method: str, format: str = LOW) -> tuple[float, str]:
    """Shortest time in milliseconds over all block sizes, and in words."""
    tflops = max(rows.where(method=method, format=format, kind=MEASURED).column("tflops"))
    ms = 1e-9 * householder_flops(rows[0]["m"], rows[0]["n"]) / tflops
    return ms, f"{method} {ms:.3g} ms" + f" in {format}" * (method != LIBRARY)


def _compared(rows: Measurements, ours: tuple[str, str], theirs: tuple[str, str]) -> tuple[float, str]:
    """How many times as fast as another one a method is at its best block size, and both times in words."""
    (ms, text), (peer_ms, peer_text) = _best(rows, *ours), _best(rows, *theirs)
    return peer_ms / ms, f"{text}, {peer_text}: {peer_ms / ms:.2f} times as fast"


def compared(
    rows: Measurements,
    ours: tuple[str, str],
    theirs: tuple[str, str],
    claimed: Interval,
    weaker: Interval | None = None,
    note: str = "",
) -> ClaimCheck:
    """How many times as fast as another one a method is, each at its best block size."""
    gain, text = _compared(rows, ours, theirs)
    return within([gain], claimed, text + note, weaker=weaker)


def recursion_gains(rows: Measurements) -> ClaimCheck:
    gain, text = _compared(rows, (RGSQRF, LOW), (LIBRARY, FP32))
    from_format, more = _compared(rows, (RGSQRF, LOW), (RGSQRF, FP32))
    found = gain if from_format > 1.3 else math.nan
    return within([found], about(1.37, 1.25), f"{text}; {more}", weaker=MORE)


def small_cutoff_is_best(rows: Measurements) -> ClaimCheck:
    part = rows.where(method=RGSQRF_DEFAULT, kind=MEASURED)
    at_128, best = part.where(B=128)[0]["tflops"], max(part.column("tflops"))
    text = f"B = 128 reaches {100 * at_128 / best:.0f}% of the best cutoff"
    return within([at_128 / best], (0.9, math.inf), text, weaker=(0.75, math.inf))


def predicted(rows: Measurements, method: str, by: str = PREDICTED) -> ClaimCheck:
    """Measured against predicted at the default block size; 128, as the paper, for its own panels."""
    part = rows.where(method=method, format=LOW)
    part = part.where(B=128) if method == RGSQRF_CAQR else part.where(default=True)
    measured, expected = (part.where(kind=kind)[0]["tflops"] for kind in (MEASURED, by))
    ratio = measured / expected
    words = f"B = {part[0]['B']}: {measured:.3g} TFLOP/s measured, {expected:.3g} predicted, "
    return within([ratio], (1 - AIM, 1 + AIM), f"{words}ratio {ratio:.2f}", weaker=about(1.0, 2.0))


_V100_BLOCKS = (128, 256, 512, 1024)
"""Widths for which formula (4) is a model: in wider ones most of the operations are in the panel."""


def v100_householder(rows: Measurements) -> ClaimCheck:
    predict = partial(predicted_householder, V100_SHAPE[1], panel=v100_rates("SGEQRF"))
    low, fp32 = (
        max(predict(block, product=v100_rates(f"{format} NN")) for block in _V100_BLOCKS)
        for format in (LOW, FP32)
    )
    text = f"{low:.2f} TFLOP/s, {fp32:.2f} in fp32: {low / fp32:.2f} times as fast"
    return within([low / fp32 if low < V100_LIBRARY else math.nan], (1.15, 1.45), text)


def v100_rgsqrf(rows: Measurements) -> ClaimCheck:
    rate = predicted_rgsqrf(V100_SHAPE[1], 128, {128: V100_CAQR}, v100_rates(LOW))
    return within([rate], about(27.0, 1.1), f"{rate:.1f} TFLOP/s")


def v100_panel(rows: Measurements) -> ClaimCheck:
    share = panel_share(*V100_SHAPE, 128, v100_rates("SGEQRF"), v100_rates(LOW))
    return within([share], (0.8, 1.0), f"{share:.0%} at B = 128")
