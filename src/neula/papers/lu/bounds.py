"""Tables 1 and 2: the constants of the error bounds and the storage, beside what is measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from neula.engines import FP16, FP32, Engine
from neula.papers.data import Measurements, Row
from neula.papers.figure import Figure, Setting
from neula.papers.lu import algorithms as lu
from neula.papers.lu.movement import BLOCKS, LEFT_OUT, counted_bytes, modelled_bytes
from neula.papers.lu.performance import dominant
from neula.papers.verdicts import ClaimCheck, about, claim, within
from neula.pipeline.result import LUFactors

BYTES = 80
"""Memory of an entry: L, U, their product and its bound in float64."""
LOST = 2.0**-25
"""Largest error of an element that is below the normal range of fp16: half of its smallest number."""
AS_GOOD = 3.0
"""How many times the error of another algorithm counts as the same."""


@dataclass(frozen=True)
class Constant:
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
            "measured in u16": factorization_error(a, factors) / FP16.u,
        }


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
            "measured in u16": factorization_error(a, factors) / FP16.u,
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


def factorization_error(a: torch.Tensor, factors: LUFactors) -> float:
    """Largest element of ``|A - L U|`` relative to ``|A| + |L| |U|``, in float64.

    The paper's analysis knows no underflow. Elements of L that are below the normal range of fp16, as HPL-AI
    matrices have many, may lose up to 2^-25 each: what this explains is subtracted.
    """
    exact, lower, upper = a.double(), factors.L.double(), factors.U.double()
    error = (lower @ upper - exact).abs() - LOST * upper.abs().sum(0)
    size = exact.abs() + lower.abs() @ upper.abs()
    return float(torch.where(error > 0, error / size, 0.0).max())


# --- claims -----------------------------------------------------------------------------------------------


@claim("errors are within the constants")
def _within(rows: Measurements) -> ClaimCheck:
    """The constant, and a unit roundoff for the rounding of A."""
    measured = [row for row in rows if row["f"] and row.get("measured as", "") is not None]
    parts = {
        str(row.get("panels by", row.get("algorithm"))): (row["measured in u16"], row["f in u16"] + 1)
        for row in measured
    }
    told = ", ".join(
        f"{name} {'not finite' if error is None else f'{error:.2g}'} of {allowed:.3g}"
        for name, (error, allowed) in parts.items()
    )
    shares = [None if error is None else error / allowed for error, allowed in parts.values()]
    return within(shares, (0.0, 1.0), f"in u16, with one for the rounding of A: {told}")


@claim("4.1 takes half the memory of 3.1 with an fp32 matrix, and a buffer of n r")
def _half_the_memory(rows: Measurements) -> ClaimCheck:
    """Peaks where they were measured, and the factors themselves elsewhere."""
    field = "MB of factors" if None in rows.column("MB at most") else "MB at most"
    single, buffered = (rows.where(algorithm=name)[0][field] for name in (lu.SINGLE, lu.BUFFERED))
    text = f"{field}: {buffered:.3g} with 4.1, {single:.3g} with 3.1 and an fp32 matrix"
    n = rows[0]["n"]
    # Half, and the buffer of n r numbers in fp32.
    return within([buffered / single], (0.0, 0.5 + 1.1 * lu.PANEL / n), text, tendency=(0.0, 1.0))


@claim("4.1 moves about half the data of 3.1 with an fp32 matrix: (4.4) and (4.5)")
def _half_the_movement(rows: Measurements) -> ClaimCheck:
    """By the bytes that the engine counts, where it has."""
    counted, modelled = (
        {row["algorithm"]: row[field] for row in rows if row.get(field)}
        for field in ("MB moved", "MB by the model")
    )
    told = ", ".join(f"{x} {counted[x]:.3g} MB, by the model {modelled[x]:.3g}" for x in counted)
    ratios = [x[lu.BUFFERED] / x[lu.SINGLE] for x in (counted, modelled) if x]
    return within(ratios, about(0.5, 1.2), f"{told or '0 MB counted'} (q = {BLOCKS})")


@claim("(neula) the model leaves out what is of the order n^2")
def _model_is_right(rows: Measurements) -> ClaimCheck:
    """Bytes an element of A beside the model's."""
    counted = [row for row in rows if row.get("MB moved")]
    beside = [1e6 * (row["MB moved"] - row["MB by the model"]) / row["n"] ** 2 for row in counted]
    text = ", ".join(f"{row['algorithm']} {x:.1f}" for row, x in zip(counted, beside, strict=True))
    return within(beside, (0.0, LEFT_OUT), f"bytes an element of A: {text or '0 counted'}")


def _measured(rows: Measurements, panels: str) -> float:
    return rows.where(**{"panels by": panels}).numbers("measured in u16")[0]


@claim("panels in plain fp16 are the least accurate ones")
def _only_fp16_panels(rows: Measurements) -> ClaimCheck:
    """Panels in plain fp16 against those of the other algorithms."""
    low, *others = (_measured(rows, panels) for panels in ("2.1 fp16", "2.1 fp32", "4.1", "5.1"))
    text = f"{low:.2g} u16 with panels by 2.1 in fp16, at most {max(others):.2g} u16 with the others"
    return within([low / other for other in others], (1.0, math.inf), text)


@claim("tensor cores inside the panels are numerically harmless")
def _tensor_cores_harmless(rows: Measurements) -> ClaimCheck:
    ours, fp32 = (_measured(rows, panels) for panels in ("5.1", "2.1 fp32"))
    text = f"{ours:.2g} u16 with panels by 5.1, {fp32:.2g} u16 with panels in fp32"
    return within([ours / fp32], (0.0, AS_GOOD), text)


SHOWN = (
    "Largest element of `|A - LU|` relative to `|A| + |L||U|` for an HPL-AI matrix without pivoting, in "
    f"units of u16 = 2^-11, beside the dominant term f of the bound; r = {lu.PANEL}, s = {lu.INNER_PANEL}. "
    "What elements of L below the normal range of fp16 lose is subtracted: the bounds know no underflow."
)
SCALED_DOWN = "n = 1024 instead of 8192, tensor cores emulated"

# item: L Table 1
TABLE_1 = Figure(
    name="table1",
    title="Table 1: storage and constants of Algorithms 3.1 and 4.1",
    shows=SHOWN
    + " Memory is that of the factors as they are stored, and on a GPU the most that was allocated. "
    f"Moved are the operands of updates, counted by an emulated engine with {BLOCKS} panels.",
    scaled_down=SCALED_DOWN,
    measure=measure_storage,
    draw=None,
    claims=(_within, _half_the_memory, _half_the_movement, _model_is_right),
)
# item: L Table 2; L harmless
TABLE_2 = Figure(
    name="table2",
    title="Table 2: constants of Algorithm 5.2 by the algorithm of its panels",
    shows=SHOWN + " With panels by 2.1, Algorithm 5.2 is 4.1 (in fp16) or 5.1 (in fp32).",
    scaled_down=SCALED_DOWN,
    measure=measure_panels,
    draw=None,
    claims=(_within, _only_fp16_panels, _tensor_cores_harmless),
)
