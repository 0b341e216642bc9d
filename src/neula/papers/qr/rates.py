"""Table 3: rates of the pieces that a QR factorization is made of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.engines import Engine
from neula.engines.tuning import Recursion
from neula.papers.data import Measurements, Row
from neula.papers.figure import Figure, Setting
from neula.papers.measuring import sustained_seconds
from neula.papers.qr.wy import householder_wy
from neula.papers.verdicts import HALF_AN_ORDER, ClaimCheck, about, claim, within

Rates = dict[int, float]
"""TFLOP/s for each width."""

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
        tn, nn = v100_rates(f"{column} TN"), v100_rates(f"{column} NN")
        return {k: 2 / (1 / tn[k] + 1 / nn[k]) for k in tn}
    return {k: rates[V100_COLUMNS.index(column)] for k, rates in V100_RATES.items()}


SGEQRF, WY_PANEL = "SGEQRF", "WY panel"
LOW, FP32 = "low", "fp32"
TABLE_TEXT = (
    "4096 rows and k from 32 to 1024 on this CPU instead of 32768 rows and k from 128 to 16384 on a GPU"
)
WIDEST_PANEL = 4096
"""Wider ones are most of a matrix."""


Shape = tuple[int, int]


def matrix(setting: Setting, shape: Shape | None) -> torch.Tensor:
    """The matrix of Table 3 and Figures 1 and 2."""
    shape = shape or setting.shape(small=(4096, 1024), paper=(32768, 16384), bytes_an_entry=24)
    return setting.column_major_normal(*shape)


def engines(setting: Setting) -> dict[str, Engine]:
    """What multiplies: in the cheapest format, and in fp32."""
    return {LOW: setting.speed, FP32: setting.speed.using("fp32")}


def tflops(flops: float, run: Callable[[], object]) -> float:
    """TFLOP/s of a run of so many operations."""
    return 1e-12 * flops / sustained_seconds(run)


def best_recursion(engine: Engine) -> Recursion:
    """How the recursion ends by default."""
    return engine.tuning.recursion(engine.storage)


def measure_rates(setting: Setting, shape: Shape | None = None) -> Iterator[Row]:
    """Rates of products, of a step of the recursion, and of panels, against the width k."""
    a, best = matrix(setting, shape), best_recursion(setting.speed).panel
    m, n = a.shape
    widths = [2**k for k in setting.pick(small=range(5, 11), paper=range(7, 15)) if 2**k <= n]
    for k in setting.track(widths, lambda k: f"k = {k}"):
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
    """The column of Table 3 for a panel."""
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
    columns = itertools.cycle(range(0, n, width))

    def step() -> None:
        block = slice(start := next(columns), start + width)
        a2 = work[:, block]
        engine.gemm(q1.T, engine.operand(a2, None if low is None else low[:, block]), r12)
        engine.gemm(q1, engine.operand(r12), a2, alpha=-1.0, beta=1.0)

    return tflops(4 * m * k * width, step)


def _panel_rate(a: torch.Tensor, k: int, engine: Engine, panel: str) -> float:
    """A panel as RGSQRF runs it, in place and with the rounded copy of Q, on one block after the other."""
    m, n = a.shape
    blocks = itertools.cycle(engine.empty(m, n).copy_(a).split(k, dim=1))
    return tflops(
        2 * m * k * k, lambda: rgsqrf(next(blocks), engine, cutoff=k, panel=panel, overwrite_a=True)
    )


@claim("products in the low format need a larger k for their full rate (2048) than fp32 (1024)", timed=True)
def _low_needs_wider(rows: Measurements) -> ClaimCheck:
    """The first width at 90% of the best rate, in both formats."""
    first = {}
    for name in (LOW, FP32):
        best = max(rows.column(f"{name} TN"))
        first[name] = min(row["k"] for row in rows if row[f"{name} TN"] > 0.9 * best)
    text = f"90% of the best rate from k = {first[LOW]} on in the low format, {first[FP32]} in fp32"
    return within([first[LOW] / first[FP32]], about(2.0), text, tendency=(1.5, math.inf))


@claim("a Householder panel runs at a thousandth of the product rate (0.10 of 98)", timed=True)
def _panel_is_slow(rows: Measurements) -> ClaimCheck:
    narrow = next(row for row in rows if row["k"] >= 128)
    part = narrow[SGEQRF] / max(rows.column(f"{LOW} TN"))
    text = f"SGEQRF at k = {narrow['k']}: {100 * part:.2g}% of the best"
    return within([part], about(0.001, HALF_AN_ORDER), text, tendency=(0.0, 0.01))


@claim("the CAQR panel is 3.3 times faster than SGEQRF (0.33 TFLOP/s)", timed=True)
def _caqr_is_faster(rows: Measurements) -> ClaimCheck:
    row = rows.where(k=128)[0]
    ratio = row["CAQR panel"] / row[SGEQRF]
    text = f"at k = 128 {row['CAQR panel']:.2g} TFLOP/s with Q, SGEQRF {row[SGEQRF]:.2g} without"
    return within([ratio], about(3.3), f"{text}: {ratio:.2g} times", tendency=(1.0, math.inf))


# item: Q Table 3; Q CAQR rate
TABLE_3 = Figure(
    name="table3",
    title="Table 3: rates of products and panels in TFLOP/s",
    shows="TN multiplies k x m by m x k, NN m x k by k x k, as in the paper. A step is what the recursion "
    "does: rounding of A2 and R12, R12 = Q1^T A2, A2 - Q1 R12, on blocks that come from memory; a wide "
    "step has n/2 columns in A2. SGEQRF is the library's Householder QR of m x k, the WY panel is SGEQRF "
    "with Y and T. The last columns are panels as the recursion runs them: with explicit Q, in place. Many "
    "runs are queued before the clock stops.",
    scaled_down=TABLE_TEXT,
    measure=measure_rates,
    draw=None,
    claims=(_low_needs_wider, _panel_is_slow, _caqr_is_faster),
)


class RateTable:
    """Table 3 as the formulas need it: the rate of each width."""

    def __init__(self, setting: Setting, shape: Shape | None) -> None:
        self._rows = Measurements(measure_rates(setting, shape))

    def select(self, column: str) -> Rates:
        """One column, as far as it goes."""
        return {row["k"]: row[column] for row in self._rows if column in row}

    def products(self, format: str) -> Rates:
        """Both products of the paper one after the other, nothing between them."""
        return {row["k"]: 2 / (1 / row[f"{format} TN"] + 1 / row[f"{format} NN"]) for row in self._rows}
