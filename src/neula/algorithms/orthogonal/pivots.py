"""Column pivots for a QR factorization that reveals the rank: which columns come first.

Pivoted Householder QR (Businger and Golub, "Linear least squares solutions by Householder transformations",
Numer. Math. 7, 1965) takes the column of largest norm, updates what is left, and so on: half of its
operations are products of the matrix with a vector, which are bound by memory. A random sketch of the matrix
has as many columns, of nearly the same norms up to a common factor, and few rows. It shows a whole block of
pivots at once, and the block then updates the others by products of matrices (Martinsson, Quintana-Ortí,
Heavner and van de Geijn, "Householder QR factorization with randomization for column pivoting (HQRRP)", SIAM
J. Sci. Comput. 39, 2017; Duersch and Gu, "Randomized QR with column pivoting", the same volume). Pivots of
the sketch are those of Gaussian elimination on its transpose, whose factors make Cholesky QR of the block
safe (Melnichenko, Murray, Killian, Demmel, Mahoney, Luszczek and Gates, "Anatomy of high-performance
column-pivoted QR decomposition", 2025).

Where elimination is fast, a sketch may have as many rows as the matrix has columns: then one elimination in
half precision finds all pivots. R, computed afterwards, shows where they are too short, and has what is left
of the columns there, for another one.

Only the order is wanted here. Whoever factorizes the columns in this order is free to do so in any way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from neula.algorithms.elimination.calu import eliminate_rows
from neula.algorithms.elimination.lu import WHOLE, LUTuning
from neula.algorithms.elimination.lu_panels import blocks
from neula.algorithms.orthogonal.cholesky_qr import cholesky_qr, upper_cholesky
from neula.algorithms.orthogonal.r_only import lower_gram
from neula.algorithms.orthogonal.reorthogonalize import refine_qr
from neula.engines import FP64, Engine
from neula.engines.formats import double_gram, in_double
from neula.kernels import scipy_linalg
from neula.kernels.cholesky.pivoted_cholesky import pivoted_cholesky, pivots_on_device
from neula.kernels.lu.tournament import ELSEWHERE, WIDTH, PanelFactors, find_pivots
from neula.kernels.magnitudes import two_norms
from neula.kernels.phases import with_nonnegative_diagonal
from neula.kernels.precision import exact_matmul
from neula.kernels.triangular_inverse import triangular_inverse

OVERSAMPLED = 16  # rows that a sketch has beyond the columns of a block

NOISE = 16.0
"""Unit roundoffs of the products, relative to the longest column, below which columns are rounding errors."""

MIXED = 1 / 16
"""Part of the longest column's norm that its mixed elements have: what is eliminated grows by some hundred
times at most, and half precision ends at 65504."""

_SEED = 20170117


@dataclass(frozen=True)
class PivotTuning:
    sketched_pivots: int  # columns (or rows) up to which they are found one by one, without a sketch
    pivot_block: int  # columns that one sketch picks


def eliminated_order(a: torch.Tensor, engine: Engine) -> torch.Tensor:
    """Order of the columns of one matrix, by one Gaussian elimination of all its columns, randomly mixed.

    A is an operand of the engine, in a format of two bytes, the largest element near 1. Pivot rows of ``(G
    A)^T`` with a square Gaussian G: what is left of a column after k steps is the product of its component
    orthogonal to the pivots with a random vector, the same for all columns. So the largest element belongs to
    a column that is among the longest. In half precision that is lost in rounding errors where what is left
    is a thousandth of what there was. Nothing synchronizes.
    """
    m, n = a.shape
    # Whole lines of memory: kernels and cuBLAS load several elements at a time only there.
    rows, columns = (-(-size // WHOLE) * WHOLE for size in (n, min(m, n)))
    generator = torch.Generator(a.device).manual_seed(_SEED)
    g = engine.empty(columns, m, dtype=a.dtype).normal_(generator=generator)
    longest = torch.linalg.vector_norm(a, dim=0, dtype=torch.float32).amax()
    g *= MIXED / longest.clamp_min(torch.finfo(torch.float16).tiny)
    mixed = a.new_zeros(rows, columns)
    engine.gemm_low(g, a, mixed[:n].T)
    order = eliminate_rows(mixed, engine, engine.tuning[LUTuning].pivoted_panel).long()
    return order[(order >= n).to(torch.int8).argsort(stable=True)][:n]


def sketched_pivots(
    a: torch.Tensor, engine: Engine, width: int, tolerance: float = 0.0
) -> tuple[torch.Tensor, int]:
    """Order of the columns, int64, and how many pivots there are before only rounding errors are left.

    The host waits for the device once a block of ``width`` columns. Columns after the pivots are in no
    particular order; those shorter than a part ``tolerance`` of the longest are not wanted. A is
    column-major, in the engine's storage precision, the largest element near 1. In it the columns of the
    pivots come first and are made orthonormal, up to ``u`` times the condition number.
    """
    m, n = a.shape
    order = torch.arange(n, device=a.device)
    exact = engine.using("fp64" if engine.format is FP64 else "fp32")
    generator = torch.Generator(a.device).manual_seed(_SEED)
    g = torch.randn(width + OVERSAMPLED, m, generator=generator, dtype=a.dtype, device=a.device)
    sketch = exact_matmul(g, a)
    noise = max(NOISE * engine.arithmetic.u, tolerance) * two_norms(sketch, 0).amax()
    workspace = engine.operand_buffer(a)
    start = 0
    while start < min(m, n):
        count = min(width, min(m, n) - start)
        chosen, triangle = _pivots(sketch[:, start:], count, noise, engine)
        if not chosen:
            break
        _bring_forward([a[:, start:], sketch[:, start:], order[None, start:]], chosen)
        stop = start + len(chosen)
        # Well conditioned, since the sketch of it is, however small the columns are; twice is orthonormal.
        q, first = cholesky_qr(exact_matmul(a[:, start:stop], triangle), exact)
        q, second = cholesky_qr(q, exact)
        a[:, start:stop] = q
        if stop < n:
            block = engine.operand(q, None if workspace is None else workspace[:, start:stop])
            projected = engine.empty(stop - start, n - stop)
            engine.project_out(
                block, a[:, stop:], projected, None if workspace is None else workspace[:, stop:]
            )
            q_of_sketch = torch.linalg.solve_triangular(
                exact_matmul(second, first),
                exact_matmul(sketch[:, start:stop], triangle),
                upper=True,
                left=False,
            )
            sketch[:, stop:] -= exact_matmul(q_of_sketch, projected)
        start = stop
    return order, start


def _pivots(
    sketch: torch.Tensor, count: int, noise: torch.Tensor, engine: Engine
) -> tuple[list[int], torch.Tensor]:
    """Next pivot columns of a sketch, shape (rows, n), in order, and the matrix that makes them well
    conditioned.

    There are fewer than ``count`` where only noise is left. The second is upper triangular, and makes the
    columns of the sketch orthonormal.
    """
    rows, some = sketch.T, None
    smallest = noise / sketch.shape[0] ** 0.5
    if engine.tuning.tournaments and len(rows) > sketch.shape[0] and not engine.is_complex:
        some = _by_tournaments(rows, count, engine)
        rows = rows[some]
    lu, interchanges, _ = torch.linalg.lu_factor_ex(rows)
    lu = lu[:count]
    good = (lu.diagonal().abs() > smallest).cumprod(0)
    known = [interchanges[:count].long() - 1, good, *(() if some is None else (some,))]
    places, left, *found = torch.stack(known).tolist()
    chosen = _interchanged(places[: sum(left)])
    lu = lu[: len(chosen)]
    triangle = _conditioner(lu[:, : len(chosen)], lu.triu())
    return [found[0][i] for i in chosen] if found else chosen, triangle


def _conditioner(lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """Upper triangular T for which the columns of ``S T`` are orthonormal, where ``S^T = L U``.

    ``S L^-T = U^T`` is well conditioned except for the lengths of its columns, whatever S is, so that
    Cholesky QR in double precision does the rest. L is what is below the diagonal of ``lower``, shape (c, c);
    U has the shape (c, k).
    """
    sizes = two_norms(upper, 1, keepdim=True)
    r = upper_cholesky(double_gram((upper / sizes).mT))[0]
    identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    inverse = triangular_inverse((lower.tril(-1) + identity)[None], upper=False)[0]
    triangle = torch.linalg.solve_triangular(r, in_double((inverse / sizes).T), upper=True, left=False)
    return triangle.to(upper.dtype)


def _by_tournaments(rows: torch.Tensor, count: int, engine: Engine) -> torch.Tensor:
    """Pivot rows that come into question of a matrix, shape (n, k) with k <= n, int64: ``count <= k``
    different ones.

    Elimination with partial pivoting of all rows waits for each pivot, and libraries do it column by column.
    Tournaments are in single precision; numbers which are too small for that cost quality alone.
    """
    n = len(rows)
    # Few different heights need few CUDA graphs, and leave memory for those of a QR.
    x = rows.new_zeros(1 << (n - 1).bit_length(), count)
    x[:n] = rows[:, :count]
    places = torch.full(x.shape[:1], -1, dtype=torch.int32, device=x.device)
    places[n:] = ELSEWHERE
    return engine.replay(_pivots_of_all, (x, places), "pivots of a sketch")[0]


def _pivots_of_all(left: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """:func:`_by_tournaments` of the rows whose place is -1, without synchronizing."""
    left, count = left.clone(), left.shape[1]
    found = PanelFactors.for_panel(left, torch.float32, places.clone())
    for index, k in enumerate(blocks(slice(0, count), WIDTH)):
        width = k.stop - k.start
        block = left.new_zeros(len(left), WIDTH)
        block[:, :width] = left[:, k]
        block /= block.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
        find_pivots(block.float(), found, k.start, width)
        l_inverse, u_inverse = (
            inverses[index, :width, :width].to(left.dtype)
            for inverses in (found.l_inverses, found.u_inverses)
        )
        right = exact_matmul(l_inverse, left[found.pivots[k].long(), k.stop :])
        left[:, k.stop :] -= exact_matmul(exact_matmul(block[:, :width], u_inverse), right)
    return (found.pivots.long(),)


def _interchanged(places: list[int]) -> list[int]:
    """The leading indices after interchanging element i with element ``places[i]``, for i = 0, 1, ...

    >>> _interchanged([2, 2])
    [2, 0]
    """
    moved: dict[int, int] = {}
    first = []
    for i, place in enumerate(places):
        first.append(moved.get(place, place))
        moved[place] = moved.get(i, i)
    return first


def _bring_forward(matrices: list[torch.Tensor], chosen: list[int]) -> None:
    """Bring some columns of each to the front; those that were there take their places."""
    count, taken = len(chosen), set(chosen)
    to = [*range(count), *(i for i in chosen if i >= count)]
    origin = [*chosen, *(i for i in range(count) if i not in taken)]
    moves = torch.tensor([to, origin], device=matrices[0].device)
    for x in matrices:
        x.T.index_copy_(0, moves[0], x.T[moves[1]])


def greedy_orders(a: torch.Tensor) -> torch.Tensor:
    """Order of the columns of each matrix of a batch, int64, column by column, without synchronizing.

    Of what is left the longest column is the next one, and is projected out of the others. Matrices, with
    largest elements near 1, are overwritten.

    >>> greedy_orders(torch.tensor([[[1.0, 3.0, 3.0], [1.0, 0.0, 0.1]]])).tolist()
    [[2, 0, 1]]
    """
    count, m, n = a.shape
    taken = torch.zeros(count, n, dtype=torch.bool, device=a.device)
    order: list[torch.Tensor] = []
    for _ in range(min(m, n)):
        norms = two_norms(a, 1).masked_fill_(taken, -1.0)
        size, place = norms.max(1, keepdim=True)
        q = a.take_along_dim(place[:, None], 2) / size.clamp_min(torch.finfo(a.dtype).tiny)[:, None]
        a -= q * (q.conj() * a).sum(1, keepdim=True)
        taken.scatter_(1, place, True)
        order.append(place)
    rest = taken.to(torch.int8).argsort(dim=1, stable=True)[:, : n - len(order)]
    return torch.cat([*order, rest], 1)


def lapack_factors(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pivoted QR by LAPACK's ``geqp3``, one after the other: the fastest for small matrices on a CPU.

    Of tall ones it takes R: for columns of few rows SciPy's library begins no threads, which would take the
    processor from those of torch for milliseconds. Returns Q, R with nonnegative diagonals, and the order,
    int64.
    """
    tall = a.shape[1] > a.shape[2]
    outer, given = torch.linalg.qr(a) if tall else (None, a)
    packed = given.mT.clone(memory_format=torch.contiguous_format)  # which geqp3 overwrites
    members = packed.numpy()
    geqp3 = scipy_linalg.get_lapack_funcs("geqp3", dtype=members.dtype)
    size = int(geqp3(members[0].T, lwork=-1)[3][0].real)
    found = [geqp3(x.T, lwork=size, overwrite_a=True)[1:3] for x in members]
    order, tau = (torch.from_numpy(np.array(x)) for x in zip(*found, strict=True))
    packed, k = packed.mT, tau.shape[1]
    if outer is None:
        q = torch.linalg.householder_product(packed[..., :k], tau)
    else:
        q = torch.ormqr(packed, tau, outer, left=False)
    return *with_nonnegative_diagonal(q, packed[:, :k].triu()), order.long() - 1


GRAM_ROUNDING = 4.0
"""Unit roundoffs, times the root of the rows, that a Gram matrix is off by, relative to its norm."""

CERTAIN = 100.0  # times its rounding errors a pivot of a Gram matrix is one
ROUNDS = 8  # Gram matrices of what is left: each has three or four digits of the singular values


def gram_noise(rows: int, norm: float) -> float:
    """Bound on the rounding errors of the elements of a Gram matrix, given its Frobenius norm."""
    return GRAM_ROUNDING * rows**0.5 * FP64.u * norm


def column_basis(a: torch.Tensor, tolerance: float, engine: Engine, width: int) -> torch.Tensor:
    """Orthonormal basis of the columns, except for remainders below a part ``tolerance`` of the longest.

    The engine multiplies in float64; blocks of pivots have ``width`` columns.
    """
    basis = basis_by_gram(a, tolerance)
    if basis is None:
        work = engine.empty(*a.shape).copy_(a)
        basis = work[:, : sketched_pivots(work, engine, width, tolerance)[1]]
    return basis


def basis_by_gram(b_matrix: torch.Tensor, tolerance: float) -> torch.Tensor | None:
    """Basis of the numerical range from Gram matrices; None if there is no kernel, or it does not finish.

    Pivots of a Cholesky factorization of ``A^T A`` with diagonal pivoting are those of QR of A with column
    pivoting, down to the root of rounding errors. Their columns are projected out, and the remainder has a
    Gram matrix with smaller errors. Nearly all operations are products, and one read of a block of pivots
    does: least squares with a Gaussian kernel of 8000 x 4000 take an H200 210 ms, and 258 by sketches.
    """
    m, n = b_matrix.shape
    if m < n or not pivots_on_device(b_matrix):
        return None
    basis, rest, least = b_matrix[:, :0], b_matrix, 0.0
    for _ in range(ROUNDS):
        gram = lower_gram(rest[None])[0]
        gram = gram.tril() + gram.tril(-1).mH
        norms = torch.stack([gram.diagonal().amax(), torch.linalg.matrix_norm(gram)])
        largest, size = norms.tolist()
        least = least or tolerance**2 * largest
        if not largest > least:
            return basis
        noise = gram_noise(m, size)
        r, pivots, _ = pivoted_cholesky(gram, max(least, CERTAIN * noise))
        if not len(r):
            return None
        q = torch.linalg.solve_triangular(r[:, pivots], rest[:, pivots], upper=True, left=False)
        q = refine_qr(q)[0]
        if basis.shape[1]:  # of which rounding errors of small columns have parts
            q = refine_qr(q - basis @ (basis.mH @ q))[0]
        for _ in range(2):
            rest = rest - q @ (q.mH @ rest)
        basis = torch.cat([basis, q], 1)
        if basis.shape[1] >= n:
            return basis[:, :n]
    return None
