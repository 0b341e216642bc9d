"""Tables 1 and 2: constants, storage and data movement, and measurements; section 8: QR stored in fp16.

Section 8 takes the paper's idea to QR: block Gram-Schmidt with panels by Householder's method in fp32. Stored
in fp16 and updated as Algorithm 3.1 does, A is rounded after every t products: its error is that of n / t
roundings, and the unit's fp32 sums gain nothing. Left-looking, a panel is updated by all columns of Q in a
buffer of ``m r`` numbers, and nothing is rounded but A and Q, once each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from neula.algorithms.elimination.lu import lu_factorize
from neula.algorithms.elimination.lu_panels import blocks
from neula.engines import FP16, FP32, UNITS, EmulatedEngine, Engine
from neula.papers.data import Measurements, Row, span
from neula.papers.errors import backward_error, orthogonality_defect
from neula.papers.figure import ExperimentScale, Setting
from neula.papers.lu import algorithms as lu
from neula.papers.lu.figures import dominant
from neula.papers.verdicts import ClaimCheck, Interval, about, within
from neula.pipeline.result import LUFactors

BLOCKS = 128  # q = n / r: the model is of the order ``q n^2``, and what it leaves out of the order ``n^2``

LEFT_OUT = 7
"""Bytes an element of A that the model leaves out, at most. Algorithm 4.1: 4 for the buffer, 2 for the L and
U that are operands of U and of L, 1 for those of the diagonal blocks. Algorithm 3.1: 2 for L and U.
"""


class CountingEngine(EmulatedEngine):
    """Counts the bytes of the operands of its products, each in its own format.

    As the paper's model has it, fast memory holds blocks of r rows and columns: an element is loaded once for
    each product that it takes part in. Panels in float32 are factorized by other engines, which do not count.
    """

    loaded = 0

    def gemm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> torch.Tensor:
        added = c.numel() * self.storage.itemsize if c is not None and beta != 0.0 else 0
        self.loaded += added + (a.numel() + b.numel()) * self.format.dtype.itemsize
        return super().gemm(a, b, c, alpha, beta)

    def gemm_low(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        self.loaded += (a.numel() + b.numel() + c.numel()) * self.format.dtype.itemsize
        # The numbers do not matter here: rounded once.
        return self.round(c - EmulatedEngine.gemm(self, a, b), c)


def panel_of(n: int) -> int:
    """R with about :data:`BLOCKS` blocks in a row of the matrix."""
    return max(1, n // BLOCKS)


# item: L (4.4) and (4.5)
def counted_bytes(a: torch.Tensor, name: str) -> int:
    """Bytes loaded by the products of Algorithm 3.1 or 4.1, with panels of :func:`panel_of` columns."""
    engine = CountingEngine(a.device, FP16, "ideal")
    storage = FP32 if name == lu.SINGLE else FP16
    lu_factorize(a, engine, variant=lu.variant_of(name), panel=panel_of(len(a)), storage=storage)
    return engine.loaded


# item: L (4.4) and (4.5)
def modelled_bytes(n: int, name: str) -> float:
    """Formulas (4.4), for Algorithm 3.1 with a matrix in either format, and (4.5), for Algorithm 4.1."""
    r = panel_of(n)
    q = n / r
    steps = range(1, math.ceil(q) + 1)
    if name == lu.BUFFERED:
        return 2 * sum((q - k) * (k - 1) for k in steps) * r**2 * 2
    return sum((q - k) ** 2 for k in steps) * r**2 * (4 if name == lu.SINGLE else 2)


BYTES = 80  # memory of an entry: L, U, their product and its bound in float64
LOST = 2.0**-25
"""Largest error of an element that is below the normal range of fp16: half of its smallest number."""
AS_GOOD = 3.0  # how many times the error of another algorithm counts as the same


class Constant(NamedTuple):
    """A row of Table 2: ``f = c u16 + n u32`` for panels by an algorithm."""

    panels: str  # the algorithm that factorizes the panels
    same_as: str  # what neula calls Algorithm 5.2 with these panels
    formula: str  # the paper's
    coefficient: float  # c, for the paper's widths


CONSTANTS = (
    Constant("2.1 fp16", lu.BUFFERED, "r u16 + n u32", lu.PANEL),
    Constant("2.1 fp32", lu.WIDE_PANELS, "2 u16 + n u32", 2),
    Constant("3.1 fp16", "5.2/3.1", "r u16 / 4 + n u32", lu.PANEL / lu.PAPERS_UNIT.block),
    Constant("3.1 fp32", "5.2/3.1-fp32", "2 u16 + n u32", 2),
    Constant("4.1", lu.DOUBLY_LOW, "s u16 + n u32", lu.INNER_PANEL),
    Constant("5.1", lu.DOUBLY_WIDE, "2 u16 + n u32", 2),
)
STORAGE = {
    lu.SINGLE: ("n^2", "2 u16 + n u32"),
    lu.HALF: ("0", "n u16 / 4"),
    lu.BUFFERED: ("n r", "u16 + max(n u32, r u16)"),
}
"""Table 1: numbers in fp32 that are stored, and the constant."""


# item: L Table 1
def measure_storage(setting: Setting, order: int | None = None) -> Iterator[Row]:
    """The rows of Table 1: storage and constants of Algorithms 3.1 and 4.1."""
    a = _matrix(setting, order)
    n = len(a)
    for name, (entries, formula) in setting.track(list(STORAGE.items()), lambda item: item[0]):
        factors, peak = _with_peak(a, name, setting.numerics)
        yield {
            "algorithm": name,
            "n": n,
            "fp32 entries": entries,
            "MB of factors": 1e-6 * factors.storage_bytes,
            "MB at most": peak,
            "MB moved": 1e-6 * counted_bytes(a, name),
            "MB by the model": 1e-6 * modelled_bytes(n, name),
            "f": formula,
            "f in u16": lu.constant(name, n) / FP16.u,
            **_measured(a, name, factors, setting),
        }


# item: L Table 2; L harmless
def measure_panels(setting: Setting, order: int | None = None) -> Iterator[Row]:
    """The rows of Table 2: constants of Algorithm 5.2 by the algorithm of its panels."""
    a = _matrix(setting, order)
    n = len(a)
    for row in setting.track(CONSTANTS, lambda row: f"panels by {row.panels}"):
        factors, _ = _with_peak(a, row.same_as, setting.numerics)
        yield {
            "panels by": row.panels,
            "measured as": row.same_as,
            "n": n,
            "f": row.formula,
            "f in u16": row.coefficient + n * FP32.u / FP16.u,
            **_measured(a, row.same_as, factors, setting),
        }


def _matrix(setting: Setting, order: int | None) -> torch.Tensor:
    n = order or setting.shape(small=(1024, 1024), paper=(8192, 8192), bytes_an_entry=BYTES)[0]
    return dominant(setting, n)


def _with_peak(a: torch.Tensor, name: str, engine: Engine) -> tuple[LUFactors, float | None]:
    """Factors, and on a GPU the megabytes that were allocated for them and on the way to them."""
    if not a.is_cuda:
        return _factors(a, name, engine), None
    _factors(a, name, engine)  # cuBLAS allocates its workspace
    before = torch.cuda.memory_allocated(a.device)
    torch.cuda.reset_peak_memory_stats(a.device)
    factors = _factors(a, name, engine)
    return factors, 1e-6 * (torch.cuda.max_memory_allocated(a.device) - before)


def _factors(a: torch.Tensor, name: str, engine: Engine) -> LUFactors:
    factors = lu.factorize(a, name, engine)
    assert factors is not None, "diagonally dominant"
    return factors


def _measured(a: torch.Tensor, name: str, factors: LUFactors, setting: Setting) -> Row:
    """On the paper's unit, whose constants these are, and also on that of the machine."""
    found = factorization_error(a, factors) / FP16.u
    if setting.scale is ExperimentScale.small:  # the paper's unit is the only one
        return {"measured in u16": found}
    emulated = factorization_error(a, _factors(a, name, setting.emulated)) / FP16.u
    return {"measured in u16": emulated, "on this machine's unit": found}


def factorization_error(a: torch.Tensor, factors: LUFactors) -> float:
    """Largest element of ``|A - L U|`` relative to ``|A| + |L| |U|``, in float64.

    The paper's analysis knows no underflow. Elements of L that are below the normal range of fp16, as HPL-AI
    matrices have many, may lose up to 2^-25 each: what this explains is subtracted.
    """
    exact, lower, upper = a.double(), factors.L.double(), factors.U.double()
    error = (lower @ upper - exact).abs() - LOST * upper.abs().sum(0)
    size = exact.abs() + lower.abs() @ upper.abs()
    return float(torch.where(error > 0, error / size, 0.0).max())


def within_constants(rows: Measurements) -> ClaimCheck:
    """The constant, and a unit roundoff for the rounding of A."""
    found = [
        (row.get("panels by", row.get("algorithm")), row["measured in u16"], row["f in u16"] + 1)
        for row in rows
        if row["f"] and row.get("measured as", "") is not None
    ]
    shares = [None if error is None else error / allowed for _, error, allowed in found]
    words = ", ".join(f"{name} {error or math.nan:.2g} of {allowed:.3g}" for name, error, allowed in found)
    return within(shares, (0.0, 1.0), f"in u16, with one for the rounding of A: {words}")


def half_the_memory(rows: Measurements) -> ClaimCheck:
    """By the megabytes that were allocated, or those of the factors where these are not known."""
    field = "MB of factors" if None in rows.column("MB at most") else "MB at most"
    return _ratio_to_single(rows, field, (0.0, 0.5 + 1.1 * lu.PANEL / rows[0]["n"]))


def half_the_movement(rows: Measurements) -> ClaimCheck:
    """By the bytes that the engine counts, and by the model, where there are such."""
    interval = about(0.5, 1.2)
    checks = [_ratio_to_single(rows, field, interval) for field in ("MB moved", "MB by the model")]
    values = [value for check in checks for value in check.values]
    return within(values, interval, "; ".join(check.measured for check in checks) + f" (q = {BLOCKS})")


def _ratio_to_single(rows: Measurements, field: str, interval: Interval) -> ClaimCheck:
    """A field of 4.1 over that of 3.1 with an fp32 matrix."""
    ours, theirs = (rows.where(algorithm=name)[0].get(field) for name in (lu.BUFFERED, lu.SINGLE))
    if ours is None or theirs is None:
        return within([], interval, f"0 {field} counted")
    text = f"{field}: {ours:.3g} with 4.1, {theirs:.3g} with 3.1 and an fp32 matrix"
    return within([ours / theirs], interval, text, weaker=(0.0, 1.0))


def model_is_right(rows: Measurements) -> ClaimCheck:
    """Bytes an element of A in addition to the model's."""
    counted = [row for row in rows if row.get("MB moved")]
    beside = [1e6 * (row["MB moved"] - row["MB by the model"]) / row["n"] ** 2 for row in counted]
    return within(beside, (0.0, LEFT_OUT), f"bytes an element of A: {span(beside, '.1f') if beside else 0}")


def panels(rows: Measurements, ours: str, others: Sequence[str], claimed: Interval) -> ClaimCheck:
    """The error of panels by an algorithm over those by others."""
    first, *rest = (rows.where(**{"panels by": x}).numbers("measured in u16")[0] for x in (ours, *others))
    text = f"{first:.2g} u16 with panels by {ours}, at most {max(rest):.2g} u16 with {', '.join(others)}"
    return within([first / other for other in rest], claimed, text)


SINGLE, ROUNDED, BUFFERED = "fp32 storage", "fp16 storage", "fp16 storage, fp32 buffer"
STORAGES = (SINGLE, ROUNDED, BUFFERED)
WIDTH = 64
SPREAD = (12**-0.5, 3**-0.5)
"""Root mean square of a rounding error, in u of the number, which is spread evenly over half a last place to
both sides: the ends of a binade.
"""


def block_gram_schmidt(
    a: torch.Tensor, engine: Engine, storage: str, width: int = WIDTH
) -> tuple[torch.Tensor, torch.Tensor]:
    """Q, in fp16, and R, in float32, of a matrix in the range of fp16, stored in one of :data:`STORAGES`.

    >>> from neula.io.matrices import random_matrix
    >>> a = random_matrix("normal", 96, 48, dtype=torch.float32)
    >>> for storage in STORAGES:
    ...     q, r = block_gram_schmidt(a, EmulatedEngine(unit="v100"), storage, 8)
    ...     print(backward_error(a, q, r) < 4 * FP16.u)
    True
    True
    True
    """
    n, low = a.shape[1], storage != SINGLE
    left = storage == BUFFERED
    matrix, q = engine.empty(*a.shape), engine.empty(*a.shape)
    engine.round(a, matrix) if low else matrix.copy_(a)
    r = engine.empty(n, n).zero_()
    for k in blocks(slice(0, n), width):
        panel = matrix[:, k].clone()
        for j in blocks(slice(0, k.start if left else 0), width):
            engine.gemm(q[:, j].T, engine.operand(panel), r[j, k])
            engine.gemm(q[:, j], engine.operand(r[j, k]), panel, alpha=-1.0, beta=1.0)
        factor, r[k, k] = torch.linalg.qr(panel)
        engine.round(factor, q[:, k])
        rest = slice(n if left else k.stop, n)
        if rest.start < n:
            engine.gemm(q[:, k].T, engine.operand(matrix[:, rest]), r[k, rest])
            subtract = engine.gemm_low if low else engine.gemm
            options = {} if low else {"alpha": -1.0, "beta": 1.0}
            subtract(q[:, k], engine.operand(r[k, rest]), matrix[:, rest], **options)
    return q, r


# item: L QR in fp16
def measure_storages(setting: Setting, shape: tuple[int, int] | None = None) -> Iterator[Row]:
    """Errors for each way to store the matrix and each number of products that a unit adds."""
    m, n = shape or setting.shape(small=(1024, 512), paper=(4096, 2048), bytes_an_entry=100)
    a = setting.random("normal", m, n, dtype=torch.float32, seed=n)
    a = a / a.abs().max()
    units = [unit for unit in UNITS.values() if unit.extra_bits is not None]
    for unit in setting.track(units, lambda unit: f"{unit.name}, t = {unit.block}"):
        engine = type(setting.emulated)(setting.device, FP16, unit)
        for storage in STORAGES:
            q, r = block_gram_schmidt(a, engine, storage)
            loss = float(torch.linalg.matrix_norm(orthogonality_defect(q))) / math.sqrt(n)
            row = {"m": m, "n": n, "t": unit.block, "storage": storage}
            yield row | {"residual": backward_error(a, q, r), "orthogonality": loss}


def _residuals(rows: Measurements, storage: str) -> list[float]:
    return rows.where(storage=storage).numbers("residual")


def _root_mean_square(row: Row) -> float:
    """The residual without a buffer, in SPREAD u16, of a normal matrix by independent rounding errors.

    A and the operand R are rounded once, and an element once more for every t columns of Q that are
    subtracted, each of which takes a part 1 / m of its square.
    """
    m, n, t = (row[name] for name in ("m", "n", "t"))
    rounded = [k.start * (1 - k.start / (2 * m)) * (k.stop - k.start) for k in blocks(slice(0, n), WIDTH)]
    return math.sqrt(2 + sum(rounded) / (n * t))


def buffer_is_enough(rows: Measurements) -> ClaimCheck:
    pairs = list(zip(_residuals(rows, BUFFERED), _residuals(rows, SINGLE), strict=True))
    words = ", ".join(f"{ours:.1e} and {theirs:.1e}" for ours, theirs in pairs)
    roundings = math.hypot(1, SPREAD[1] / SPREAD[0])  # of A and of R, of R alone
    return within([ours / theirs for ours, theirs in pairs], (0.0, roundings), f"for each t {words}")


def roundings_add_up(rows: Measurements) -> ClaimCheck:
    part = rows.where(storage=ROUNDED)
    ratios = [row["residual"] / (_root_mean_square(row) * FP16.u) for row in part]
    words = ", ".join(f"t = {row['t']} {row['residual']:.1e}" for row in part)
    return within(ratios, SPREAD, f"{words}: {min(ratios):.2f} to {max(ratios):.2f} times that")
