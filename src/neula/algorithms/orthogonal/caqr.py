"""The communication-avoiding panel of the paper: Gram-Schmidt tiles, reduced up a tree.

Zhang, Baharlouei, Wu, "High Accuracy Matrix Computations on Neural Engines" (HPDC 2020), section 3.1.3,
formula (8) and Algorithm 2.
"""

from __future__ import annotations

import torch

from neula.algorithms.trace import TraceEvent, Tracer, traced
from neula.engines import Engine
from neula.kernels import mgs
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
    """Steps 1 to 5 of formula (8): factorize tiles, stack their R, factorize the stack, multiply back."""
    m, n = a.shape
    if m <= tile_rows:
        return mgs(a)
    tiles = _split_evenly(a, tile_rows)
    tracer = getattr(engine, "trace", None)
    if tracer is not None:
        tracer(TraceEvent("panel", shape=tuple(tiles.shape)))
    local_q, local_r = mgs(tiles)
    stack_q, r = _tree(local_r.reshape(-1, n), engine, tile_rows)
    q = engine.bmm(local_q, stack_q.reshape(-1, n, n))
    return q.reshape(-1, n)[:m], r  # without the rows that filled tiles up


def _split_evenly(a: torch.Tensor, tile_rows: int) -> torch.Tensor:
    """Tiles of nearly equal height: cut off by the fixed height, the last one could have fewer rows than
    columns. Zero rows fill them up; where none are needed, tiles are views.
    """
    m, n = a.shape
    count = -(-m // tile_rows)
    height = -(-m // count)
    if m == count * height:
        return a.unflatten(0, (count, height))
    padded = a.new_zeros(count * height, n)
    padded[:m] = a
    return padded.reshape(count, height, n)
