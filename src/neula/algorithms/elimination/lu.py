"""LU factorization in mixed precision, with the matrix kept in half precision.

Lopez and Mary, "Mixed Precision LU Factorization on GPU Tensor Cores: Reducing Data Movement and Memory
Footprint" (Int. J. High Perform. Comput. Appl., 2022). The algorithms differ in three choices, and a
:data:`VARIANTS` entry names them: when blocks are updated (right- or left-looking), where the updates are
summed (in the matrix, rounded to its format each time, or in a float32 buffer of ``n r`` entries), and the
arithmetic of the panels (:mod:`neula.algorithms.elimination.lu_panels`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch

from neula.algorithms.elimination.calu import by_pivoted_blocks
from neula.algorithms.elimination.lu_panels import (
    Interchanges,
    Panel,
    Workspace,
    blocks,
    left_looking,
    low_panel,
    partitioned_panel,
    right_looking,
    single_panel,
    wide_panel,
)
from neula.algorithms.trace import Tracer, traced, with_panel_events
from neula.engines import FP32, FP64, Engine, Format
from neula.engines.formats import matching_dtype
from neula.errors import unknown_name, whole_number
from neula.kernels.lu.lu_block import factor_block, kernels_take, solve_off_diagonal
from neula.kernels.lu.tournament import WIDTH

WIDEST = 1024
"""Columns of a panel up to which the kernels of tournament pivoting keep its rows of U on the chip."""

SMALL = 0.4
"""Part of the exponents of a format up to which reciprocals of pivots are in its range."""

InnerPanel = int | tuple[int, ...]
"""Width s of the panels inside panels, or widths of panels inside these, the widest first."""

WHOLE = 64
"""Matrices are bordered to multiples of so many rows, lines of memory in half precision: kernels and cuBLAS
load several elements at a time only where columns begin and end so."""


@dataclass(frozen=True)
class LUTuning:
    """Widths r and s of the panels, and with tournaments."""

    lu_panel: int
    lu_inner_panel: int
    pivoted_panel: int
    pivoted_inner_panel: int
    lu_direct: int  # order below which a GPU's library takes real matrices in their precision; 0: none

    def direct(self, n: int, *, is_complex: bool) -> bool:
        """Whether a GPU's library takes a matrix by default; complex ones of any order, whose panels it has
        anyway.
        """
        return n < self.lu_direct or (is_complex and self.lu_direct > 0)


@dataclass(frozen=True)
class Variant:
    """One of the paper's algorithms, as the choices that it makes."""

    left_looking: bool  # whether a panel is updated as a whole just before it is factorized
    buffered: bool  # whether updates are summed in a buffer in the engine's storage precision
    uniform: bool  # whether everything is in one precision, without a matrix unit
    panel: str  # {"low", "wide"}: arithmetic of the panels (of the inner ones where there are two levels)
    # Algorithm by which inner panels make a panel: "3.1", or "4.1" with a buffer; empty where there are none.
    partitioned: str = ""


# item: L Algorithm 2.1; L Algorithm 3.1; L Algorithm 4.1; L Algorithm 5.1; L Algorithm 5.2; L panels by 3.1
VARIANTS = {
    "2.1": Variant(left_looking=False, buffered=False, uniform=True, panel="low"),
    "2.2": Variant(left_looking=True, buffered=False, uniform=True, panel="low"),
    "3.1": Variant(left_looking=False, buffered=False, uniform=False, panel="low"),
    "4.1": Variant(left_looking=True, buffered=True, uniform=False, panel="low"),
    "5.1": Variant(left_looking=True, buffered=True, uniform=False, panel="wide"),
    "5.2/4.1": Variant(left_looking=True, buffered=True, uniform=False, panel="low", partitioned="4.1"),
    "5.2/5.1": Variant(left_looking=True, buffered=True, uniform=False, panel="wide", partitioned="4.1"),
    "5.2/3.1": Variant(left_looking=True, buffered=True, uniform=False, panel="low", partitioned="3.1"),
    "5.2/3.1-fp32": Variant(left_looking=True, buffered=True, uniform=False, panel="wide", partitioned="3.1"),
}


@dataclass(frozen=True)
class PackedLU:
    """``A[permutation] = L U`` in one matrix, as LAPACK keeps it, or a batch of such matrices."""

    # Shape (..., n, n). U, and below the diagonal L, whose diagonal is 1. Column-major, in the dtype that
    # holds storage.
    lu: torch.Tensor
    # Shape (..., n): integers: rows of A in the order in which L and U have them, on the device of the
    # factors.
    permutation: torch.Tensor
    storage: Format  # format of the elements of lu
    # The permutation as a sequence of interchanges, as LAPACK returns it; None if unknown.
    interchanges: Interchanges | None = None

    @cached_property
    def pivots(self) -> torch.Tensor:
        """Row ``i`` was interchanged with row ``pivots[i]``, in this order: shape (..., n), on the CPU."""
        if self.interchanges is not None:
            return self.interchanges.pivots
        pivots = self.permutation.to("cpu", copy=True)
        for index in product(*map(range, pivots.shape[:-1])):
            pivots[index] = Interchanges.leading_to(pivots[index]).pivots
        return pivots

    def member(self, index: tuple[int, ...]) -> PackedLU:
        """The factors of one matrix of a batch, in the same memory."""
        rows = None if self.interchanges is None else Interchanges(self.interchanges.pivots[index])
        return PackedLU(self.lu[index], self.permutation[index], self.storage, rows)

    def lower(self) -> torch.Tensor:
        """L, with its diagonal."""
        lower = self.lu.tril(-1)
        lower.diagonal(dim1=-2, dim2=-1).fill_(1)
        return lower

    @property
    def storage_bytes(self) -> int:
        """Bytes that the factors take."""
        return self.lu.numel() * self.lu.element_size()


def lu_factorize(
    a: torch.Tensor,
    engine: Engine,
    *,
    variant: str = "5.2/5.1",
    panel: int | None = None,
    inner_panel: InnerPanel | None = None,
    storage: Format | None = None,
    pivoting: bool = False,
    overwrite: bool = False,
    on_columns: Callable[[int], None] | None = None,
    trace: Tracer | None = None,
) -> PackedLU:
    """Factorize ``A = L U``, or ``A[permutation] = L U`` with pivoting, by one of the paper's algorithms.

    Nothing is scaled, and nothing is checked: a zero pivot or an element beyond the range of the format
    leaves NaN or Inf. Without pivoting and with tournaments nothing synchronizes.

    Parameters
    ----------
    a : Tensor, shape (n, n)
        Not modified, except with ``overwrite``.
    engine : Engine
        Multiplies the updates in its low format.
    variant : str
        A key of :data:`VARIANTS`, the number of the algorithm in the paper; for Algorithm 5.2 with that of
        the panels: ``"2.1"``, ``"2.2"``, ``"3.1"``, ``"4.1"``, ``"5.1"``, ``"5.2/4.1"``, ``"5.2/5.1"``,
        ``"5.2/3.1"`` or, with panels that stay in single precision, ``"5.2/3.1-fp32"``.
    panel, inner_panel : int, optional
        Widths r and s; two widths (s, t) for inner panels that are partitioned once more. The engine's by
        default, and LAPACK's own with pivoting in single or double precision, if it is available and no
        progress is reported. There are at least two inner panels in a panel, which share its buffer.
    storage : Format, optional
        Of the matrix: the engine's low format by default. Algorithm 3.1 can also keep it in float32.
    pivoting : bool
        Partial pivoting: whole rows of the matrix are interchanged. Where the engine has ``tournaments``,
        Algorithm 5.2/5.1 with inner panels of their width has those, see
        :mod:`neula.algorithms.elimination.calu`.
    overwrite : bool
        Whether the factors may take the place of A, if that is column-major and of their dtype.
    on_columns : callable, optional
        Called with the number of columns that are done after each panel.
    trace : callable, optional
        Called with each product and each panel, for example a :class:`~neula.algorithms.trace.Trace`.

    Raises
    ------
    ValueError
        For an unknown variant, or panels that do not fit.

    Examples
    --------
    >>> import torch
    >>> from neula.engines import EmulatedEngine
    >>> factors = lu_factorize(torch.tensor([[1.0, 3.0], [2.0, 4.0]]), EmulatedEngine(), pivoting=True)
    >>> factors.lu
    tensor([[2.0000, 4.0000],
            [0.5000, 1.0000]], dtype=torch.float16)
    >>> factors.permutation
    tensor([1, 0])
    """
    if variant not in VARIANTS:
        raise unknown_name("variant", variant, VARIANTS)
    if trace is not None:
        engine, on_columns = traced(engine, trace), with_panel_events(trace, on_columns)
    chosen, n = VARIANTS[variant], a.shape[0]
    kept = storage or engine.format
    low = kept == engine.format
    arithmetic = engine.unblocked if chosen.uniform else engine
    dtype = arithmetic.operand_dtype if low else arithmetic.storage
    in_place = overwrite and a.dtype == dtype and a.T.is_contiguous()
    if pivoting and is_lapacks(engine, kept, panel, inner_panel, on_columns):
        whole = a if in_place else engine.empty(n, n, dtype=dtype).copy_(a)
        return by_library(whole, largest_of(whole), kept)
    r, s = panel_widths(variant, engine, panel, inner_panel, pivoting)
    if isinstance(s, int) and variant == "5.2/5.1" and low and _in_whole_blocks(engine, r, s, pivoting):
        matrix = a if in_place and n % WHOLE == 0 else bordered(a, engine)
        permutation = torch.arange(n, device=matrix.device)
        done = None if on_columns is None else lambda columns: on_columns(min(columns, n))
        if pivoting:
            # Rows of the border are pivots only of columns that are zero: then nothing is solved for.
            permutation = by_pivoted_blocks(matrix, engine, r, done)[:n].clamp(max=n - 1)
        else:
            by_blocks(matrix, engine, r, s, done)
        return PackedLU(matrix[:n, :n], permutation, kept)
    matrix = a if in_place else arithmetic.empty(n, n, dtype=dtype)
    permutation = torch.arange(n, device=matrix.device)
    work = Workspace(
        matrix=arithmetic.round(a, matrix) if low else matrix.copy_(a),
        engine=arithmetic,
        low=low,
        # Two inner panels of a matrix that is itself narrower than them.
        buffer=matrix.new_empty(n * min(r, 2 * n), dtype=engine.storage) if chosen.buffered else None,
        interchanges=Interchanges.none(n) if pivoting else None,
    )
    # A matrix stored in single precision has no low arithmetic.
    factor: Panel = low_panel if chosen.panel == "low" and low and kept.u > FP32.u else wide_panel
    if s is not None:
        factor = _partitioned(chosen, factor, s)
    algorithm = left_looking if chosen.left_looking else right_looking
    for columns, _ in algorithm(work, slice(0, n), r, factor):
        if on_columns is not None:
            on_columns(columns.stop)
    if work.interchanges is not None:
        permutation = work.interchanges.permutation().to(matrix.device)
    # An emulated format is computed with in a wider one, and stored in that only in the place of A.
    stored = matching_dtype(kept.dtype, matrix.dtype)
    return PackedLU(matrix.to(stored) if low and not in_place else matrix, permutation, kept)


def _partitioned(variant: Variant, factor: Panel, widths: InnerPanel) -> Panel:
    """Panels of panels, the innermost ones by ``factor``."""
    *outer, innermost = widths if isinstance(widths, tuple) else (widths,)
    if variant.partitioned == "3.1":
        single = factor is wide_panel
        found = single_panel(innermost) if single else partitioned_panel(innermost, factor, buffered=False)
    else:
        found = partitioned_panel(innermost, factor)
    for width in reversed(outer):
        found = partitioned_panel(width, found)
    return found


def is_lapacks(engine: Engine, kept: Format, *asked: Any) -> bool:
    """Whether the library computes pivoted factors in this format: no width is requested, and no progress."""
    library = engine.tuning.lapack or engine.tuning[LUTuning].lu_direct > 0
    whole = kept == engine.format and kept in (FP32, FP64) and library
    return whole and all(each is None for each in asked)


def by_library(matrices: torch.Tensor, largest: torch.Tensor, kept: Format) -> PackedLU:
    """LU of a matrix or a batch by the library, in place, for variants that use one precision only; singular
    matrices are allowed.

    ``matrices``, shape (..., n, n), column-major; ``largest``, shape (...): their largest magnitudes.
    """
    powers = -torch.frexp(largest.double())[1]
    powers.masked_fill_(powers <= SMALL * kept.max_exponent, 0)
    scales = None
    if bool(powers.any()):  # pivots whose reciprocals overflow leave no digit
        ones = matrices.real.new_ones(powers.shape)
        scales = ones.ldexp(powers.clamp_max(kept.max_exponent - 1).to(ones.device))[..., None, None]
        matrices.mul_(scales)
    pivots, info = (torch.empty(0, dtype=torch.int32, device=matrices.device) for _ in range(2))
    torch.linalg.lu_factor_ex(matrices, out=(matrices, pivots, info))
    if scales is not None:
        matrices.copy_(matrices.tril(-1).add_(matrices.triu().div_(scales)))
    interchanges = Interchanges(pivots.cpu().long().sub_(1))
    return PackedLU(matrices, interchanges.permutation().to(matrices.device), kept, interchanges)


def lu_in_place(a: torch.Tensor, pivots: torch.Tensor) -> bool:
    """LU with partial pivoting; False where a pivot vanishes.

    Pivots, int32, are written to: in the form of SciPy, counted from 0.
    """
    info = torch.empty((), dtype=torch.int32, device="cpu")
    torch.linalg.lu_factor_ex(a, out=(a, pivots, info))
    pivots -= 1
    return not int(info)


def cholesky_in_place(a: torch.Tensor) -> bool:
    """Cholesky's L in the place of the lower triangle; False where there is none."""
    info = torch.empty((), dtype=torch.int32, device="cpu")
    torch.linalg.cholesky_ex(a, out=(a, info))
    return not int(info)


def largest_of(a: torch.Tensor) -> torch.Tensor:
    """The largest magnitude, of complex numbers that of a part; or NaN. On a CPU the norm takes ten times as
    long.

    The transpose of a column-major matrix is contiguous: ``aminmax`` copies others.
    """
    a = a.mT if a.ndim > 1 and a.mT.is_contiguous() else a
    low, high = torch.aminmax(torch.view_as_real(a) if a.is_complex() else a)
    return torch.maximum(-low, high)


def _in_whole_blocks(engine: Engine, r: int, s: int, pivoting: bool) -> bool:
    """Whether kernels take panels by Algorithm 5.1 of these widths, and the unit rounds sums once."""
    if not engine.rounds_once:
        return False
    if pivoting:
        return engine.tuning.has_tournaments(engine.format) and s == WIDTH and r % WIDTH == 0 and r <= WIDEST
    return kernels_take(engine.operand_dtype, engine.device, s)


def bordered(a: torch.Tensor, engine: Engine) -> torch.Tensor:
    """A in the low format, bordered by an identity to a multiple of :data:`WHOLE` rows.

    Its factors are those of A, bordered by the same.
    """
    n = a.shape[0]
    order = -(-n // WHOLE) * WHOLE
    matrix = engine.empty(order, order, dtype=engine.operand_dtype)
    matrix[n:], matrix[:n, n:] = 0, 0
    matrix.diagonal()[n:] = 1
    engine.round(a, matrix[:n, :n])
    return matrix


def by_blocks(
    matrix: torch.Tensor, engine: Engine, r: int, s: int, on_columns: Callable[[int], None] | None = None
) -> None:
    """Algorithm 5.2 with panels by 5.1, in place, for a unit that rounds the sum of all updates once.

    Without interchanges a diagonal block need not wait for the rows below it. So it is factorized while they
    and the columns to its right are updated, and these are solved for afterwards: each element comes from the
    same operations as in :func:`neula.algorithms.elimination.lu_panels.left_looking`.

    The matrix is column-major in the engine's low format; r and s are the widths of the panels.
    """
    for k in blocks(slice(0, matrix.shape[0]), r):
        done, rest = slice(0, k.start), slice(k.stop, None)
        diagonal = matrix[k, k]
        if k.start > 0:
            engine.gemm_low(matrix[k, done], matrix[done, k], diagonal)

        updates = [
            (matrix[rest, done], matrix[done, k], matrix[rest, k]),
            (matrix[k, done], matrix[done, rest], matrix[k, rest]),
        ]
        l_inverses, u_inverses = engine.subtract_concurrently(
            [update for update in updates if k.start > 0 and update[2].numel()],
            partial(_factorized, diagonal, s, engine),
        )
        solve_off_diagonal(matrix[k.start :, k.start :], len(diagonal), l_inverses, u_inverses)
        if on_columns is not None:
            on_columns(k.start + diagonal.shape[0])


def _factorized(diagonal: torch.Tensor, width: int, engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """``lu_block.factor_block``, two dozen launches of microseconds, from a CUDA graph."""

    def factorized(columns: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *factor_block(columns.T, width), columns

    # Without gaps between columns, whatever the matrix: one graph serves blocks of all.
    given = (diagonal.T.contiguous(),)
    l_inverses, u_inverses, columns = engine.replay(factorized, given, ("lu block", width))
    diagonal.copy_(columns.T)
    return l_inverses, u_inverses


# item: L triple partition
def panel_widths(
    variant: str,
    engine: Engine,
    panel: int | None = None,
    inner_panel: InnerPanel | None = None,
    pivoting: bool = False,
) -> tuple[int, InnerPanel | None]:
    """The widths r and s of a variant: what is given, what suits the engine where nothing is.

    There is no s where the algorithm has no inner panels. A ValueError about widths that do not fit says what
    fits.
    """
    inner = inner_panel if isinstance(inner_panel, tuple) else (inner_panel,)
    for name, width in (("panel", panel), *(("inner_panel", width) for width in inner)):
        if width is not None:
            whole_number(name, width)
    tuning = engine.tuning[LUTuning]
    best_r, best_s = tuning.lu_panel, tuning.lu_inner_panel
    if pivoting and variant == "5.2/5.1" and engine.tuning.has_tournaments(engine.format):
        best_r, best_s = tuning.pivoted_panel, tuning.pivoted_inner_panel
    r = best_r if panel is None else operator.index(panel)
    if not VARIANTS[variant].partitioned:
        if inner_panel is None:
            return r, None
        raise ValueError(
            f"variant {variant!r} has no inner panels, got inner_panel={inner_panel}: "
            "leave it out, or pass variant='5.2/5.1'"
        )
    if inner_panel is None:
        return r, min(best_s, max(1, r // 2))
    widths = [operator.index(width) for width in inner if width is not None]
    for outside, width in itertools.pairwise([r, *widths]):
        widest = max(1, outside // 2)
        if width > widest:
            raise ValueError(
                f"inner_panel={width} does not fit twice into panel={outside}: pass an inner_panel of at "
                f"most {widest}, or variant='5.1', which has none"
            )
    return r, tuple(widths) if isinstance(inner_panel, tuple) else widths[0]
