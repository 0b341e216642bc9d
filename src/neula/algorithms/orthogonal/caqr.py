"""The communication-avoiding panel of the paper: Gram-Schmidt tiles, reduced up a tree.

Zhang, Baharlouei, Wu, "High Accuracy Matrix Computations on Neural Engines" (HPDC 2020), section 3.1.3,
formula (8) and Algorithm 2.
"""

from __future__ import annotations

import torch

from neula.algorithms.trace import TraceEvent, Tracer, traced
from neula.engines import Engine
from neula.kernels import mgs_into
from neula.kernels.precision import exactly
from neula.kernels.qr.mgs import TILE_COLUMNS, TILE_ROWS


# item: Q (8); V (6)
def caqr(
    a: torch.Tensor,
    engine: Engine,
    *,
    tile_rows: int = TILE_ROWS,
    tile_columns: int = TILE_COLUMNS,
    trace: Tracer | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """QR of a panel: recursion down to ``tile_columns`` columns, each of them a tree of tiles.

    Shapes: a (m, n), m >= n. ``engine``: multiplies between tiles; fp32 in the paper's best variant, a low
    format for its ablation. ``tile_rows``, ``tile_columns``: the shape of a tile, ``tile_rows >= 2 *
    tile_columns``; 256 x 32 in the paper. ``trace``: called with each product, and with each stack of tiles
    as a panel of three dimensions. Returns Q, shape (m, n); R, shape (n, n).
    """
    if tile_rows < 2 * tile_columns:
        raise ValueError(
            f"tiles of {tile_rows} x {tile_columns} do not shrink up the tree: "
            f"take tile_rows >= {2 * tile_columns}"
        )
    # Row-major, unlike other working matrices: a row of a tile is one contiguous piece.
    q = a.clone(memory_format=torch.contiguous_format)
    r = a.new_zeros(a.shape[1], a.shape[1])
    if trace is not None:
        engine = traced(engine, trace)
    _factorize(q, r, engine, tile_rows, tile_columns)
    return q, r


def _factorize(a: torch.Tensor, r: torch.Tensor, engine: Engine, tile_rows: int, tile_columns: int) -> None:
    """Algorithm 1 in place: the columns of A become those of Q."""
    n = a.shape[1]
    if n <= tile_columns:
        factors = engine.over_rows.merged(a, lambda rows: _tree(rows, engine, tile_rows))
        for target, factor in zip((a, r), factors, strict=True):
            target.copy_(factor)
        return
    k = (n // tile_columns + 1) // 2 * tile_columns if n >= 2 * tile_columns else tile_columns
    left, right = slice(0, k), slice(k, n)
    _factorize(a[:, left], r[left, left], engine, tile_rows, tile_columns)
    q1, r12, rest = engine.operand(a[:, left]), r[left, right], a[:, right]
    engine.inner(q1, engine.operand(rest), r12)
    engine.gemm(q1, engine.operand(r12), rest, alpha=-1.0, beta=1.0)
    _factorize(rest, r[right, right], engine, tile_rows, tile_columns)


def _tree(a: torch.Tensor, engine: Engine, tile_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    q, r = a.clone(memory_format=torch.contiguous_format), a.new_empty(a.shape[1], a.shape[1])
    tile_tree(q[None], r[None], tile_rows, engine)
    return q, r


def tile_tree(a: torch.Tensor, r: torch.Tensor, tile_rows: int, engine: Engine | None = None) -> None:
    """Formula (8) in place for each matrix of a batch: factorize tiles, stack their R, factorize the stack,
    multiply back; between tiles by an engine, or in the full precision of A.
    """
    count, m, n = a.shape
    if m <= tile_rows:
        mgs_into(a, a, r)
        return
    # Tiles of nearly equal height: cut off by the fixed one, the last could have fewer rows than columns.
    blocks = -(-m // tile_rows)
    height = -(-m // blocks)
    even = m == blocks * height
    # Zero rows fill the last tile up where tiles of equal height do not fit; else tiles are views.
    rows = a if even else torch.cat([a, a.new_zeros(count, blocks * height - m, n)], 1)
    tiles = rows.view(count * blocks, height, n)
    if (tracer := getattr(engine, "trace", None)) is not None:
        tracer(TraceEvent("panel", shape=tuple(tiles.shape)))
    local_q, local_r = torch.empty_like(tiles), tiles.new_empty(count * blocks, n, n)
    mgs_into(tiles, local_q, local_r)
    tile_tree(local_r.view(count, blocks * n, n), r, tile_rows, engine)
    if engine is None:
        exactly(torch.bmm, local_q, local_r, out=tiles)
    else:
        tiles.copy_(engine.bmm(local_q, local_r))
    if not even:
        a.copy_(rows[:, :m])
