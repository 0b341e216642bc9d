"""Householder reflectors from an explicit orthonormal Q.

Ballard, Demmel, Grigori, Jacquelin, Knight and Nguyen, "Reconstructing Householder vectors from tall-skinny
QR" (J. Parallel Distrib. Comput. 85, 2015), section 5: if ``Q = (I - Y T Y_1^H) [S; 0]`` with the signs S,
then ``Q - [S; 0] = Y (-T Y_1^H S)`` is an LU factorization, whose L are the Householder vectors.
"""

from __future__ import annotations

import torch

from neula.engines.formats import double_of
from neula.kernels.phases import phases
from neula.kernels.precision import exact_matmul, exactly
from neula.kernels.qr.signed_lu import WIDTH, signed_lu

OUTER = 256
"""Columns that products with all columns before them bring up to date together: products with 32 columns
alone take half of the time of order 4096."""


def householder_form(q: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The QR factorizations ``A = Q R`` of a batch as LAPACK keeps them.

    LU by Crout's order of the loops, twice: a wide block of columns of L and one of rows of U are two
    products with what is there already, and so are narrow blocks inside. Each step is some launches for all
    matrices.

    ``q``, shape (batch, m, k), m >= k: at least in single precision, with orthonormal columns. ``r``, shape
    (batch, k, n), n >= k: upper triangular, with zeros below. Returns h, shape (batch, m, n): ``S R``
    in the upper triangle, Householder vectors below, in the dtype of Q; tau, shape (batch, k): factors that
    make the reflectors orthogonal to rounding errors, even if Q is not.

    >>> q = torch.tensor([[[0.6], [0.8]]])
    >>> h, tau = householder_form(q, torch.tensor([[[5.0]]]))
    >>> h, torch.linalg.householder_product(h / torch.tensor([[-5.0], [1.0]]), tau)
    (tensor([[[-5.0000],
             [ 0.5000]]]), tensor([[[-0.6000],
             [-0.8000]]]))
    """
    k, (work, signs) = q.shape[2], _less_signs(q)
    pivots = work.diagonal(dim1=1, dim2=2).clone()
    vectors = work.tril_(-1)
    tau = 2 / (1 + torch.linalg.vector_norm(vectors, dim=1, dtype=double_of(q.dtype)).square())
    if q.is_complex():  # I - tau y y^H is unitary for 2 Re tau = |tau|^2 |y|^2, with the phase of what T has
        turn = phases(-pivots * signs)
        tau = tau * turn.real * turn
    r = r.to(q.dtype)
    vectors[:, :k].addcmul_(signs[..., None], r[..., :k])  # zero below the diagonal
    if r.shape[2] > k:
        vectors = torch.cat([vectors, signs[..., None] * r[..., k:]], 2)
    return vectors, tau.to(q.dtype)


def complement(q: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns, shape (batch, m, m - k), that make orthonormal ones of shape (batch, m, k) square.

    >>> complement(torch.tensor([[[0.6], [0.8]]])).abs()
    tensor([[[0.8000],
             [0.6000]]])
    """
    # Of a batch on a GPU the library takes one matrix after the other.
    if q.is_cpu or len(q) == 1:
        return torch.linalg.qr(q, mode="complete")[0][:, :, q.shape[2] :]
    return complement_by_reflectors(q)


def complement_by_reflectors(q: torch.Tensor) -> torch.Tensor:
    """:func:`complement` from Householder vectors of Q, for all matrices together."""
    k = q.shape[2]
    # Reflectors keep what Q lacks, up to a tenth: it is squared each time (Newton and Schulz).
    for _ in range(4):
        q = exactly(torch.baddbmm, q, q, exact_matmul(q.mH, q), beta=1.5, alpha=-0.5)
    work, signs = _less_signs(q)
    y = work.tril(-1)
    y.diagonal(0, 1, 2).fill_(1)
    # The last columns of I - Y T Y^H, whose first ones are Q S^H: T Y_1^H = -U S^H.
    t = (work[:, :k].triu() * signs[:, None].conj()).neg_()
    t = torch.linalg.solve_triangular(y[:, :k].mH, t, upper=True, left=False, unitriangular=True)
    found = exact_matmul(y, exact_matmul(t, y[:, k:].mH)).neg_()
    found[:, k:].diagonal(0, 1, 2).add_(1)
    return found


def _less_signs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """L and U of ``Q - [S; 0]`` in one matrix, and S."""
    batch, _, k = q.shape
    work = q.clone(memory_format=torch.contiguous_format)
    signs = work.new_empty(batch, k)
    for start in range(0, k, WIDTH):
        stop, outer = min(start + WIDTH, k), start - start % OUTER
        panel, row, done = work[:, start:, start:stop], work[:, start:stop, stop:], slice(outer, start)
        if start == outer > 0:
            wide, before = slice(start, min(start + OUTER, k)), slice(0, start)
            _subtract(work[:, start:, wide], work[:, start:, before], work[:, before, wide])
            _subtract(work[:, wide, wide.stop :], work[:, wide, before], work[:, before, wide.stop :])
        elif start > outer:
            _subtract(panel, work[:, start:, done], work[:, done, start:stop])
            _subtract(row, work[:, start:stop, done], work[:, done, stop:])
        below = panel[:, stop - start :]
        signs[:, start:stop], l_inverse, u_inverse = signed_lu(panel[:, : stop - start])
        below.copy_(exact_matmul(below, u_inverse))
        row.copy_(exact_matmul(l_inverse, row))
    return work, signs


def _subtract(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if c.numel():
        exactly(torch.baddbmm, c, a, b, alpha=-1.0, out=c)
