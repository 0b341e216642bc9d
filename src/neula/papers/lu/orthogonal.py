"""Section 8: the paper's idea for QR, a matrix that is stored in fp16 and updated in a buffer of fp32.

Block Gram-Schmidt with panels by Householder's method in fp32. Stored in fp16 and updated as Algorithm 3.1
does, A is rounded after every t products: its error is that of n / t roundings, and the unit's fp32 sums gain
nothing. Left-looking, a panel is updated by all columns of Q in a buffer of ``m r`` numbers, and nothing is
rounded but A and Q, once each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from neula.algorithms.elimination.lu_panels import blocks
from neula.engines import FP16, UNITS, Engine
from neula.io.matrices import random_matrix
from neula.papers.data import Measurements, Row
from neula.papers.errors import backward_error, orthogonality_defect
from neula.papers.figure import Figure, Setting
from neula.papers.verdicts import ClaimCheck, claim, within

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

    Examples
    --------
    >>> from neula.engines import EmulatedEngine
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


def measure_storages(setting: Setting, shape: tuple[int, int] | None = None) -> Iterator[Row]:
    """Errors for each way to store the matrix and each number of products that a unit adds."""
    m, n = shape or setting.shape(small=(1024, 512), paper=(8192, 4096), bytes_an_entry=100)
    a = random_matrix("normal", m, n, dtype=torch.float32, device=setting.device, seed=n)
    a /= a.abs().max()
    units = [unit for unit in UNITS.values() if unit.extra_bits is not None]
    for unit in setting.track(units, lambda unit: f"{unit.name}, t = {unit.block}"):
        engine = type(setting.emulated)(setting.device, FP16, unit)
        for storage in STORAGES:
            q, r = block_gram_schmidt(a, engine, storage)
            loss = float(torch.linalg.matrix_norm(orthogonality_defect(q))) / math.sqrt(n)
            row = {"m": m, "n": n, "t": unit.block, "storage": storage}
            yield row | {"residual": backward_error(a, q, r), "orthogonality": loss}


# --- claims -----------------------------------------------------------------------------------------------


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


@claim("with a buffer, storing the matrix in fp16 loses little (two roundings instead of one: sqrt 2 times)")
def _buffer_is_enough(rows: Measurements) -> ClaimCheck:
    pairs = list(zip(_residuals(rows, BUFFERED), _residuals(rows, SINGLE), strict=True))
    told = ", ".join(f"{ours:.1e} and {theirs:.1e}" for ours, theirs in pairs)
    roundings = math.hypot(1, SPREAD[1] / SPREAD[0])  # of A and of R, of R alone
    return within([ours / theirs for ours, theirs in pairs], (0.0, roundings), f"for each t {told}")


@claim("(neula) without one the error is that of a rounding after every t products: sqrt(n / t) u16")
def _roundings_add_up(rows: Measurements) -> ClaimCheck:
    part = rows.where(storage=ROUNDED)
    ratios = [row["residual"] / (_root_mean_square(row) * FP16.u) for row in part]
    told = ", ".join(f"t = {row['t']} {row['residual']:.1e}" for row in part)
    return within(ratios, SPREAD, f"{told}: {min(ratios):.2f} to {max(ratios):.2f} times that")


# item: L QR in fp16
STORAGE_OF_QR = Figure(
    name="table-qr",
    title="Section 8: QR with a matrix that is stored in fp16",
    shows="What the paper leaves to future work. Residual `||A - QR||_F / ||A||_F` and orthogonality of "
    f"block Gram-Schmidt with panels of {WIDTH} columns by Householder's method in fp32, of normal random "
    "matrices, on emulated units that add t products at a time: with A stored in fp32, in fp16 and rounded "
    "after each t products, and in fp16 with updates in a buffer of fp32.",
    scaled_down="1024 x 512 instead of 8192 x 4096",
    measure=measure_storages,
    draw=None,
    claims=(_buffer_is_enough, _roundings_add_up),
)
