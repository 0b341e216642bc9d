"""The paper's algorithms by the names that the figures give them, and how one is run and judged."""

from __future__ import annotations

import math

import numpy as np
import torch

import neula
from neula.algorithms.elimination.lu import VARIANTS
from neula.certificates.lu import BlockFma, componentwise_backward_error, gamma, lu_bound
from neula.engines import FP16, FP32, UNITS, EmulatedEngine, Engine, Format
from neula.papers.data import Row
from neula.papers.figure import Setting
from neula.pipeline.result import LUFactors
from neula.problems.signatures import Pivoting

STANDARD, HALF, SINGLE = "2.1 fp16", "3.1 fp16", "3.1 fp32"
BUFFERED, WIDE_PANELS, DOUBLY_LOW, DOUBLY_WIDE = "4.1", "5.1", "5.2/4.1", "5.2/5.1"
ALGORITHMS = (STANDARD, HALF, SINGLE, BUFFERED, WIDE_PANELS, DOUBLY_LOW, DOUBLY_WIDE)
"""The number in the paper, for Algorithm 5.2 with that of its panels, and the format of the matrix where
there is a choice. Where times are taken in another low format, it takes the place of fp16."""
COMPARED = (SINGLE, HALF, DOUBLY_LOW, DOUBLY_WIDE)  # algorithms of section 6 of the paper

# item: L widths
PANEL, INNER_PANEL = 256, 8  # the paper's widths r and s
PAPERS_UNIT = UNITS["v100"]  # the paper's unit, which adds t = 4 products at a time
Widths = tuple[int | None, int | None]  # widths r and s of panels
BEST: Widths = (None, None)  # the widths that suit the engine

UNIT, EMULATED = "tensor cores", "emulated"
EMULATED_UP_TO = 16384  # orders up to which the paper's unit is emulated on a GPU, in a minute


def units(setting: Setting) -> dict[str, Engine]:
    """Engines whose rounding is compared: tensor cores and their emulation, or only the latter."""
    if type(setting.numerics) is EmulatedEngine:
        return {EMULATED: setting.numerics}
    return {UNIT: setting.numerics, EMULATED: setting.emulated}


def variant_of(name: str) -> str:
    """The name that ``neula.lu_factor`` has for an algorithm."""
    return name.split()[0]


def factorize(
    a: torch.Tensor,
    name: str,
    engine: Engine,
    widths: Widths = (PANEL, INNER_PANEL),
    pivot: Pivoting = "none",
) -> LUFactors | None:
    """Factorize by one of :data:`ALGORITHMS`; None where a pivot vanishes or the format overflows."""
    variant = variant_of(name)
    try:
        return neula.lu_factor(
            a,
            variant,
            panel=widths[0],
            inner_panel=widths[1] if VARIANTS[variant].partitioned else None,
            pivot=pivot,
            storage=_storage(name, engine.format).name,
            engine=engine,
            keep_a=False,  # solutions are to show the factors, unrefined
        )
    except (np.linalg.LinAlgError, OverflowError):
        return None


def solution_error(a: torch.Tensor, factors: LUFactors | None, x: torch.Tensor | None = None) -> float:
    """Formula 2.2: componentwise backward error of a solution by substitution in float32.

    ``x`` is the exact solution in float64, by default of ones, as in the paper. The factors are without
    interchanges; the error of what could not be factorized is NaN.
    """
    if factors is None:
        return math.nan
    ones = torch.ones(len(a), dtype=torch.float64, device=a.device)
    b = _times(a, ones if x is None else x).float()
    try:
        solution = neula.lu_solve(factors, b)
    except OverflowError:
        return math.nan
    return componentwise_backward_error(a, solution[:, None], b[:, None], factors.L, factors.U)


def solution_bound(name: str, n: int, low: Format = FP16) -> float:
    """Bound on formula 2.2 by the theorems, with the paper's panels and the truncation of its unit.

    To f in ``u |A| + f ((1 + u) |A| + |L| |U|)``, where the first term is the rounding of A to the low
    format, comes substitution in float32: ``gamma_n`` for each factor (Higham, "Accuracy and Stability of
    Numerical Algorithms", theorem 8.5).
    """
    storage = _storage(name, low)
    rounding = 0.0 if storage is FP32 else low.u
    bounds = BlockFma.on(PAPERS_UNIT, low)
    f = bounds.lu(variant_of(name), n, panel=PANEL, inner_panel=INNER_PANEL, storage=storage)
    return rounding + f * (1 + rounding) + 2 * gamma(n, FP32.u)


def constant(name: str, n: int, low: Format = FP16) -> float:
    """The constant of Table 1 or 2, with the paper's panels."""
    storage = _storage(name, low)
    return lu_bound(
        variant_of(name), n, panel=min(PANEL, n), inner_panel=INNER_PANEL, low=low, storage=storage
    )


def accuracy_row(a: torch.Tensor, name: str, unit: str, engine: Engine) -> Row:
    """One algorithm on one matrix: its error and what bounds it."""
    n = len(a)
    return {
        "n": n,
        "algorithm": name,
        "unit": unit,
        "t": engine.block if isinstance(engine, EmulatedEngine) else None,
        "format": engine.format.name,
        "error": solution_error(a, factorize(a, name, engine)),
        "bound": solution_bound(name, n, engine.format),
    }


def _storage(name: str, low: Format) -> Format:
    return FP32 if name == SINGLE else low


def _times(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``A x`` in float64, whose copy of A is made in blocks of rows."""
    return torch.cat([block.double() @ x for block in a.split(max(1, (1 << 26) // len(a)))])
