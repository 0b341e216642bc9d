"""The communication-avoiding panel of the paper: Gram-Schmidt tiles, reduced up a tree.

Zhang, Baharlouei, Wu, "High Accuracy Matrix Computations on Neural Engines" (HPDC 2020), section 3.1.3,
formula (8) and Algorithm 2.
"""

from __future__ import annotations

import torch

from neula.engines import Engine
from neula.engines.precision import exact_matmul

TILE_ROWS = 256
TILE_COLUMNS = 32


def caqr(
    a: torch.Tensor,
    engine: Engine,
    *,
    tile_rows: int = TILE_ROWS,
    tile_columns: int = TILE_COLUMNS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """QR of a panel: recursion down to ``tile_columns`` columns, each of them a tree of tiles.

    Parameters
    ----------
    a : Tensor, shape (m, n), m >= n
    engine : Engine
        Multiplies between tiles; fp32 in the paper's best variant, a low format for its ablation.
    tile_rows, tile_columns : int
        The shape of a tile, ``tile_rows >= 2 * tile_columns``; 256 x 32 in the paper.

    Returns
    -------
    Q : Tensor, shape (m, n)
    R : Tensor, shape (n, n)
    """
    if tile_rows < 2 * tile_columns:
        raise ValueError(
            f"tiles of {tile_rows} x {tile_columns} do not shrink up the tree: "
            f"take tile_rows >= {2 * tile_columns}"
        )
    n = a.shape[1]
    if n <= tile_columns:
        return _tree(a, engine, tile_rows)
    k = (n // tile_columns + 1) // 2 * tile_columns if n >= 2 * tile_columns else tile_columns
    q1, r11 = caqr(a[:, :k], engine, tile_rows=tile_rows, tile_columns=tile_columns)
    left = engine.operand(q1)
    r12 = engine.gemm(left.T, engine.operand(a[:, k:]))
    rest = a[:, k:] - engine.gemm(left, engine.operand(r12))
    q2, r22 = caqr(rest, engine, tile_rows=tile_rows, tile_columns=tile_columns)
    zero = r11.new_zeros(n - k, k)
    r = torch.cat([torch.cat([r11, r12], 1), torch.cat([zero, r22], 1)])
    return torch.cat([q1, q2], 1), r


def mgs(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Modified Gram-Schmidt of a batch of tiles (Algorithm 2).

    A column that vanishes gets a zero column of Q and a zero on the diagonal of R.

    Parameters
    ----------
    a : Tensor, shape (*batch, m, n)
    """
    n = a.shape[-1]
    q = a.clone()
    r = a.new_zeros(*a.shape[:-2], n, n)
    for k in range(n):
        norm = torch.linalg.vector_norm(q[..., k], dim=-1, keepdim=True)
        q[..., k] /= torch.where(norm > 0, norm, 1.0)
        column, rest = q[..., k : k + 1], q[..., k + 1 :]
        row = exact_matmul(column.mT, rest)
        rest -= column * row
        r[..., k, k] = norm[..., 0]
        r[..., k : k + 1, k + 1 :] = row
    return q, r


def _tree(a: torch.Tensor, engine: Engine, tile_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps 1 to 5 of formula (8): factorize tiles, stack their R, factorize the stack, multiply back."""
    m, n = a.shape
    if m <= tile_rows:
        return mgs(a)
    tiles = _split_evenly(a, tile_rows)
    local_q, local_r = mgs(tiles)
    stack_q, r = _tree(local_r.reshape(-1, n), engine, tile_rows)
    q = engine.bmm(local_q, stack_q.reshape(-1, n, n))
    return _join(q, m), r


def _split_evenly(a: torch.Tensor, tile_rows: int) -> torch.Tensor:
    """Tiles of nearly equal height: cut off by the fixed height, the last one could have fewer rows than
    columns. Zero rows fill them up.
    """
    m, n = a.shape
    count = -(-m // tile_rows)
    height = -(-m // count)
    padded = a.new_zeros(count * height, n)
    padded[:m] = a
    return padded.reshape(count, height, n)


def _join(tiles: torch.Tensor, m: int) -> torch.Tensor:
    """Stack the tiles and drop the rows that filled them up."""
    return tiles.reshape(-1, tiles.shape[-1])[:m]
