"""Recursive Gram-Schmidt QR on a neural engine.

Zhang, Baharlouei, Wu, "High Accuracy Matrix Computations on Neural Engines: A Study of QR Factorization and
its Applications" (HPDC 2020), Algorithm 1. About ``2 m n^2`` operations, except the panels' ``2 m n cutoff``
in products whose smallest dimension doubles from level to level: that is what matrix units need.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch

from neula.algorithms.orthogonal.cholesky_qr import cholesky_qr32_in_place
from neula.algorithms.orthogonal.panels import Panel, panel_named
from neula.algorithms.trace import TraceEvent, Tracer, traced
from neula.engines import FP64, Engine
from neula.errors import whole_number


@dataclass(frozen=True)
class RGSQRFTuning:
    """Columns of the blocks of a large matrix."""

    operand_columns: int  # beyond which products gain nothing from more
    graph_columns: int  # that are worth a graph: fewer are so tall that they take longer than launches


# item: Q Algorithm 1; Q cutoff; V Algorithm 2
def rgsqrf(
    a: torch.Tensor,
    engine: Engine,
    *,
    cutoff: int | None = None,
    panel: str | None = None,
    panel_format: str | None = None,
    overwrite_a: bool = False,
    on_columns: Callable[[int], None] | None = None,
    on_half: Callable[[torch.Tensor], None] | None = None,
    trace: Tracer | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factorize ``A = Q R`` with products in the engine's low format.

    Columns should be scaled to the range of the format (:mod:`neula.algorithms.scaling`). The orthogonality
    of Q is lost in proportion to the condition number. The backward error is a small multiple of the format's
    unit roundoff all the same, unless one singular value dominates all others: then most of Q comes from
    rounding errors, and for thousands of columns the error grows beyond a condition number of a few ``1/u``,
    up to overflow.

    Parameters
    ----------
    a : Tensor, shape (m, n), m >= n
    cutoff : int, optional
        Width at which the recursion stops; the engine's choice by default, 128 in the paper.
    panel : str, optional
        ``"caqr"``, ``"cholesky"``, ``"cholesky2"``, ``"cholesky32"`` or ``"householder"``; the engine's
        choice by default.
    panel_format : str, optional
        Format of the products inside the panel: fp32 by default, as in the paper's best variant; the
        engine's own format for the paper's ablation (Figure 7).
    overwrite_a : bool
        Let Q take the place of ``a``, which then must be column-major in the engine's storage precision, or,
        where the engine has panels for that, in fp16: then products are rounded as they are stored.
    on_columns : callable, optional
        Called with the number of columns that are done after each panel.
    on_half : callable, optional
        Called with the diagonal of R for the left half of the columns when those are done, a quarter of the
        work; what it raises ends the factorization.
    trace : callable, optional
        Called with each panel, update, product and block of R, for example a
        :class:`~neula.algorithms.trace.Trace`.

    Returns
    -------
    Q : Tensor, shape (m, n)
        Column-major, in the engine's storage precision.
    R : Tensor, shape (n, n)
        Upper triangular.

    Raises
    ------
    ValueError
        For an unknown panel or format, a cutoff below 1, or m < n.
    """
    m, n = engine.over_rows.count(a.shape[0]), a.shape[1]
    engine = engine if trace is None else traced(engine, trace)
    if m < n:
        raise ValueError(f"rgsqrf needs at least as many rows as columns, got {m} x {n}")
    best = engine.tuning.recursion(a.dtype if overwrite_a else engine.storage)
    cutoff = best.cutoff if cutoff is None else whole_number("cutoff", cutoff)
    q = a if overwrite_a else engine.padded(*a.shape)
    if not overwrite_a:
        q[: len(a)].copy_(a)
    r = engine.empty(n, n).zero_()
    recursion = _RecursiveGramSchmidt(
        engine,
        panel_engine=engine.using(panel_format or ("fp64" if engine.format is FP64 else "fp32")),
        panel=panel_named(panel or best.panel),
        fused=(panel or best.panel) == "cholesky32" and engine.storage == torch.float32,
        square_is_ill_conditioned=panel is None,
        cutoff=cutoff,
        on_columns=on_columns,
        key=("rgsqrf", repr(engine), panel, panel_format, cutoff),
        block=0 if on_columns or trace else _replayed_columns(q, cutoff, engine),
        rows=m,
        trace=trace,
    )
    columns = n
    if n > max(cutoff, recursion.block):
        # Operands of the first half, and of those that it is projected out of.
        columns = min(n, split_columns(n, cutoff) + engine.tuning[RGSQRFTuning].operand_columns)
    recursion.factorize(q, r, engine.operand_buffer(q[:, :columns]), last=True, on_left=on_half)
    return q[: len(a)], r


# item: Q (6)
@dataclass
class _RecursiveGramSchmidt:
    """Algorithm 1, in place: the columns of A become those of Q."""

    engine: Engine
    panel_engine: Engine
    panel: Panel
    fused: bool
    """Whether a panel works in place and rounds on the way."""
    square_is_ill_conditioned: bool
    """Whether panels that have hardly more rows than columns, once the others are projected out, are taken
    to be as ill-conditioned as square matrices."""
    cutoff: int
    on_columns: Callable[[int], None] | None
    key: Hashable
    block: int
    rows: int
    trace: Tracer | None = None
    columns_done: int = 0

    def factorize(
        self,
        a: torch.Tensor,
        r: torch.Tensor,
        low: torch.Tensor | None,
        *,
        last: bool = False,
        on_left: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Turn ``a`` into Q, fill R, and return Q as an operand, kept in ``low`` where that differs.

        Where no one needs that (``last``), ``low`` may be narrower: some more than the first half.
        """
        n = a.shape[1]
        if n <= self.cutoff:
            return self._factorize_panel(a, r, low)
        if n <= self.block:
            return self._factorize_replayed(a, r, low)
        k = split_columns(n, self.cutoff)
        left, right = slice(0, k), slice(k, n)
        low1, low2 = (None, None) if low is None else (low[:, left], low[:, k:])

        q1 = self.factorize(a[:, left], r[left, left], low1)
        if on_left is not None:
            on_left(r[left, left].diagonal())
        self.engine.project_out(q1, a[:, right], r[left, right], low2)
        if self.trace is not None:
            done = self.columns_done
            ranges = (done - k, done), (done, done + n - k)
            self.trace(TraceEvent("update", *ranges, shape=tuple(a[:, right].shape)))
            self.trace(TraceEvent("block of R", *ranges, value=r[left, right].clone()))
        if last and low is not None:
            low2 = low[:, : n - k]  # nothing reads Q1 any more
        self.factorize(a[:, right], r[right, right], low2, last=last)
        return a if low is None else low

    def _factorize_replayed(self, a: torch.Tensor, r: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
        """A block of columns as a function of its numbers alone, which a CUDA graph may replay."""

        def factorized(block: torch.Tensor) -> tuple[torch.Tensor, ...]:
            workspace = self.engine.operand_buffer(block)
            triangle = self.engine.empty(n, n).zero_()
            replace(self, block=0).factorize(block, triangle, workspace)
            return (block, triangle) if workspace is None else (block, triangle, workspace)

        n = a.shape[1]
        key = (self.key, self._rows_left() if self._rows_left() - n < 2 * self.cutoff else None)
        self.engine.replay(factorized, (a,), key, (a, r) if low is None else (a, r, low))
        self.columns_done += n
        return a if low is None else low

    def _rows_left(self) -> int:
        """Dimensions that the columns to come may lie in."""
        return self.rows - self.columns_done

    def _factorize_panel(self, a: torch.Tensor, r: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
        rounded = low if low is not None and low.dtype != a.dtype else None
        if self.fused:
            square = self.square_is_ill_conditioned and self._rows_left() < 2 * self.cutoff
            cholesky_qr32_in_place(a, r, self.engine, rounded, twice=square)
        else:
            q, r_panel = self.panel(a, self.panel_engine)
            a.copy_(q)
            r.copy_(r_panel)
        self.columns_done += a.shape[1]
        if self.on_columns is not None:
            self.on_columns(self.columns_done)
        if self.trace is not None:
            columns = self.columns_done - a.shape[1], self.columns_done
            used = self.engine if self.fused else self.panel_engine
            self.trace(TraceEvent("panel", columns, shape=tuple(a.shape), format=used.format.name))
            self.trace(TraceEvent("block of R", columns, columns, value=r.clone()))
        return rounded if self.fused and rounded is not None else self.engine.operand(a, low)


def _replayed_columns(a: torch.Tensor, cutoff: int, engine: Engine) -> int:
    """Columns of a block that a CUDA graph factorizes; 0 if they are few, or it does everything."""
    (m, n), columns = a.shape, cutoff
    while 2 * columns * m * a.itemsize <= engine.replayed_bytes:
        columns *= 2
    everything = m * n * engine.storage.itemsize <= engine.replayed_bytes
    return 0 if everything or columns < engine.tuning[RGSQRFTuning].graph_columns else min(columns, n)


def split_columns(n: int, cutoff: int) -> int:
    """Half of the columns, rounded up to whole panels."""
    panels = -(-n // cutoff)
    return (panels + 1) // 2 * cutoff
