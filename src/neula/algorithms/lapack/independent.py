"""Which columns of a matrix count, in NumPy and LAPACK: pivoted QR, and what it says of the rank."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.linalg import lapack

from neula.algorithms.lapack.products import WIDE, gram_matrix, products
from neula.algorithms.lapack.refinement import length
from neula.algorithms.lapack.triangle import TriangularFactor
from neula.algorithms.lapack.vectors import probe_array
from neula.algorithms.spectra.rank_revealing import Spectrum
from neula.certificates.forward_error import ESTIMATED
from neula.certificates.rank import GAP
from neula.engines import FP64

PIVOTED = 95
"""Columns up to which a QR with pivots takes no threads of a library of its own."""

Ordered = tuple[np.ndarray, np.ndarray, int]
"""R, shape (min(m, n), n), where its columns are in B, and how many of them count."""


class Independent(NamedTuple):
    """r columns of B that count, and how the others depend on them.

    Attributes
    ----------
    triangle : TriangularFactor
        R of the columns that count.
    rest : array, shape (r, n - r)
        F.
    order : array, shape (n,)
        Where columns are, those that count first.
    norm, norm_bound : float
        ``||B||_2`` from below and from above.
    dropped : float
        ``sigma_(r+1)`` from above.
    """

    triangle: TriangularFactor
    rest: np.ndarray
    order: np.ndarray
    norm: float
    norm_bound: float
    dropped: float

    @property
    def rank(self) -> int:
        """How many count."""
        return len(self.rest)

    @classmethod
    def factorize(
        cls,
        core: np.ndarray,
        shape: tuple[int, int],
        rcond: float,
        *,
        rounding: float = math.inf,
        large: bool,
    ) -> Independent | None:
        """By QR with pivots; None where the rank is in doubt, rounding errors included.

        Parameters
        ----------
        core : array, shape (k, n)
            B, with columns of norm 1, or its R: a trapezoid where B is large.
        shape : (int, int)
            Of B.
        rcond : float
            Singular values below ``rcond`` times the largest do not count.
        rounding : float, optional
            What rounding makes of singular values that are zero; others leave a doubt.
        large : bool
        """
        few = len(core.T) <= PIVOTED or not large
        upper, order, rank = (_by_pivots if few else _by_elimination)(core, rcond)
        if not rank:
            return None
        first, others, larger = upper[:rank, :rank], upper[:rank, rank:], max(shape)
        left, full = length(upper[rank:].ravel()), rank == min(shape)
        triangle = TriangularFactor(np.asfortranarray(first.T), np.ones(rank), large=large)
        low, high = _norm_bounds(upper[:rank], large=large)
        high, noise, kept = high + left, larger * FP64.u, 1 / triangle.inverse_norm
        most = min((rcond - noise) * low, rounding, kept / GAP)
        if not kept > (rcond + noise) * high or not (full or left < most):
            return None
        dropped = 0.0 if full else left + Spectrum.rounding(sum(shape)) * high
        together = large or not others.size
        rest = _solved_together(first, others) if together else triangle.solve(others)
        return cls(triangle, rest, order, low, high, dropped)


def reflected(b: np.ndarray, *, large: bool) -> np.ndarray:
    """R of B by reflections, a trapezoid where B has fewer rows than columns."""
    factors = torch.geqrf(torch.from_numpy(b))[0].numpy() if large else lapack.dgeqrf(b)[0]
    upper: np.ndarray = np.triu(factors[: b.shape[1]])
    return upper


def _by_pivots(core: np.ndarray, rcond: float) -> Ordered:
    """R of a QR with pivots, their order, and how many count by their sizes."""
    factors, order, *_ = lapack.dgeqp3(core)
    upper = np.triu(factors)
    pivots = np.abs(upper.diagonal())
    return upper, order - 1, int(np.count_nonzero(pivots > rcond * pivots[0]))


def _by_elimination(core: np.ndarray, rcond: float) -> Ordered:
    """The same from an R without pivots, by level 3 operations of a library that shares its threads with the
    rest.

    Its diagonal says how many columns depend on those before. Partial pivoting picks as many that count: rows
    of the transposed R. How good they are is looked at afterwards.
    """
    upper, n = torch.from_numpy(core), core.shape[1]
    rank = int((upper.diagonal().abs() > rcond * n**0.5).sum())
    if not 0 < rank < len(upper):
        return core, np.arange(n), rank
    packed, pivots, failed = torch.linalg.lu_factor_ex(upper[:rank].mT)
    if int(failed):  # as many rows of R do not count
        return core, np.arange(n), 0
    order = torch.lu_unpack(packed, pivots, unpack_data=False)[0].argmax(0)
    upper = upper[:, order]
    factors, scales = torch.geqrf(upper[:, :rank].contiguous())
    upper[:, rank:] = torch.ormqr(factors, scales, upper[:, rank:], transpose=True)
    upper[:, :rank] = factors.triu_()
    return upper.numpy(), order.numpy(), rank


def _norm_bounds(r: np.ndarray, *, large: bool) -> tuple[float, float]:
    """``||R||_2`` from below and from above: from Schatten norms, or estimated where those take too long."""
    size = length(r.ravel())
    if len(r) < WIDE:
        square = length(gram_matrix(r.T, large=large).ravel())
        return square / size, math.sqrt(square)
    known, v = products(r, large=large), probe_array(r.shape[1], 1)[:, 0]
    image = known.times(v)
    norm = length(known.transposed_times(image)) / length(image)
    return norm, min(ESTIMATED * norm, size)


def _solved_together(r: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``R^-1 B`` by all threads."""
    tensors = torch.from_numpy(r), torch.from_numpy(b)
    found: np.ndarray = torch.linalg.solve_triangular(*tensors, upper=True).numpy()
    return found
