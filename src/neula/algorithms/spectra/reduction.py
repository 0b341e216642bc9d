"""Eigenvectors of batches of Hermitian matrices by reduction to tridiagonal form.

Householder reflectors reduce A to a real tridiagonal T (:mod:`neula.kernels.spectra.tridiagonal`), whose
eigenvalues follow by bisection and whose eigenvectors, each by itself, by twisted factorizations. Those of
close eigenvalues would not be orthogonal. But A is in single precision, and T is decomposed in double
precision: a change of the diagonal far below the rounding errors of A separates all eigenvalues. A step of
Newton and Schulz restores the lost orthogonality. It keeps the residual small: with ``A V = V L + R`` its
change of V is ``V E`` with ``||L E - E L|| <= ||R||``.
"""

from __future__ import annotations

import torch

from neula.algorithms.spectra.divide import orthonormalized
from neula.engines import Engine
from neula.engines.formats import in_double
from neula.kernels.precision import exact_matmul, exactly
from neula.kernels.spectra.tridiagonal import Tridiagonal, tridiagonal, tridiagonal_eigenvectors
from neula.kernels.triangular_inverse import triangular_inverse

TOGETHER = 128
"""Reflectors that are applied together."""

SPREAD = 2.0**-30
"""Change of the diagonal, relative to a bound on the norm: a 64th of a rounding error of single precision."""

LEAST = 2.0**-60
"""Relative size that off-diagonal elements have at least: then no two eigenvalues are equal."""


def reduced_eigenvectors(a: torch.Tensor, engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues and eigenvectors of Hermitian matrices (batch, n, n) in single precision.

    ``engine`` multiplies as accurately as that. Returns w, shape (batch, n), ascending, in double precision;
    v, shape (batch, n, n). Nothing synchronizes on a GPU.
    """
    reduced = tridiagonal(a)
    d, e = in_double(reduced.diagonal), in_double(reduced.off_diagonal)
    size = d.abs() + e.abs() + e.abs().roll(1, 1)
    size = 1.001 * size.amax(1, keepdim=True)
    d, e = (x / torch.where(size > 0, size, 1.0) for x in (d, e))
    e = torch.where(e.abs() < LEAST, LEAST, e)
    w, v = tridiagonal_eigenvectors((d + _spread(d)) / (1 + SPREAD), e)
    v = _transformed_back(reduced, v.to(a.dtype))
    return w * size, orthonormalized(v, engine, engine)


def _spread(d: torch.Tensor) -> torch.Tensor:
    """Small numbers of which any k differ by some ``SPREAD / k``: multiples of the golden ratio, modulo 1
    (the three-distance theorem).
    """
    place = torch.arange(d.shape[1], dtype=d.dtype, device=d.device)
    return SPREAD * (place * ((5**0.5 - 1) / 2)).frac()


def _transformed_back(reduced: Tridiagonal, x: torch.Tensor) -> torch.Tensor:
    """``Q X``, in the place of X; products of reflectors are ``I - V T V^H`` (Schreiber and Van Loan, "A
    storage-efficient WY representation for products of Householder transformations", 1989).
    """
    for begin in reversed(range(0, x.shape[1] - 1, TOGETHER)):
        part = slice(begin, begin + TOGETHER)
        rows, factors = reduced.vectors[:, part, begin + 1 :], reduced.factors[:, part]
        below = x[:, begin + 1 :]
        inverse = exact_matmul(rows.conj(), rows.mT).triu(1)
        inverse.diagonal(0, 1, 2).copy_(torch.where(factors == 0, 1.0, 1 / factors))
        y = exact_matmul(triangular_inverse(inverse, upper=True), exact_matmul(rows.conj(), below))
        exactly(torch.baddbmm, below, rows.mT, y, alpha=-1.0, out=below)
    return x
