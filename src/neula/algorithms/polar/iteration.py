"""Orthogonal polar factors by products alone: odd polynomials of a matrix, through its Gram matrix.

With a wide matrix X, one step is ``X = q(X X^T) X``. Everything but the last product is symmetric, of the
order of the short side. Several steps could go by without X, since the Gram matrix of ``q(G) X`` is
``q(G)^2 G`` (Amsel, Persson, Musco, Gower, "The Polar Express", 2025, section 4). Measured, two steps in fp16
leave a backward error of up to 0.3 with one dominant singular value: the product of the q is large for small
singular values, its rounding errors are relative to that, and they mix the vectors of the large ones. Steps
one by one leave less than 0.01.

Rounding errors of q multiply X from the left, and so are small relative to each singular value; those of X
itself are relative to the largest one. In bf16, ``2^-9`` of it, they would bury the singular values near
``1e-3``; fp16, with 3 bits more, keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from neula.algorithms.polar.polynomials import OddPolynomial
from neula.engines import Engine
from neula.engines.random_vectors import gaussian
from neula.engines.reduction import HERE, Reduction
from neula.kernels.magnitudes import two_norms
from neula.kernels.polar.svd import converged_svd
from neula.kernels.precision import exact_matmul

PROBES = 32  # random vectors of :func:`norm_bound`

POWER = 6
"""Products of :func:`norm_bound`: with k equal eigenvalues the bound is ``k^(1/12)`` times too large."""

UNLUCKY = 0.3
"""A sum of the squares of :data:`PROBES` normal numbers is below this part of what is expected with a
probability of 4e-5 (chi-squared), which matters for a matrix with a single dominant singular value alone; by
more than the margin of polynomials in fp16 makes good, of 4e-7."""


def polar_factor(
    x: torch.Tensor,
    steps: Sequence[OddPolynomial],
    engine: Engine,
    *,
    size: torch.Tensor | None = None,
    hermitian: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices with the singular vectors of X, whose singular values polynomials have taken near 1.

    ``x``, shape (parts, batch, k, m), k <= m: as :meth:`~neula.engines.engine.Engine.parts` makes it, so
    scaled that no element of ``X X^T`` overflows. ``steps``: for numbers up to 1: X is divided by a bound on
    its norm. ``size``, shape (batch,): that bound, if one is known. ``hermitian``: whether X is: then all
    products are, and half of each is computed. Returns factor, shape (parts, batch, k, m): NaN and Inf stay
    in their matrix; zero stays zero; size, shape (batch,): that bound.

    Examples
    --------
    >>> import torch
    >>> from neula.algorithms.polar.iteration import polar_factor
    >>> from neula.algorithms.polar.polynomials import composition
    >>> from neula.engines import EmulatedEngine
    >>> engine = EmulatedEngine(format="fp64")
    >>> x = engine.parts(torch.tensor([[[0.0, 3.0], [0.5, 0.0]]]))
    >>> engine.joined(polar_factor(x, composition(0.1, 1e-14, 1e-3), engine)[0]).round(decimals=6)
    tensor([[[0., 1.],
             [1., 0.]]], dtype=torch.float64)
    """
    gram = engine.across(x, x)
    squared = norm_bound(gram, engine) if size is None else size.square()
    inverse = torch.where(squared > 0, squared, 1.0).reciprocal()
    w = engine.adjusted(gram, inverse, -steps[0].center)
    x = engine.product(_last(w, steps[0], engine), x, scales=inverse.sqrt(), symmetric=hermitian)
    return taken_on(x, steps[1:], engine, hermitian=hermitian), squared.sqrt()


def taken_on(
    x: torch.Tensor, steps: Sequence[OddPolynomial], engine: Engine, *, hermitian: bool = False
) -> torch.Tensor:
    """Apply the remaining polynomials to matrices with norms of at most 1."""
    for step in steps:
        w = engine.across(x, x, shift=-step.center)
        x = engine.product(_last(w, step, engine), x, symmetric=hermitian)
    return x


def _last(w: torch.Tensor, step: OddPolynomial, engine: Engine) -> torch.Tensor:
    """q, once the center is subtracted."""
    for factor, shift in step.squares:
        w = engine.product(w, w, factor=factor, shift=shift, symmetric=True)
    return w


def norm_bound(gram: torch.Tensor, engine: Engine) -> torch.Tensor:
    """Bound on the norms of symmetric matrices G from the traces of ``G^12``, estimated by random vectors.

    ``gram``, shape (parts, batch, k, k): positive semidefinite. Returns shape (batch,): in the storage
    precision; zero for zero. :data:`UNLUCKY` says how often it is below the norm.
    """
    count, k = engine.members(gram), gram.shape[2]
    single = torch.complex64 if engine.is_complex else torch.float32
    v = gaussian(k, PROBES, single, gram.device, seed=k).to(engine.storage).expand(count, -1, -1)
    logarithm = torch.zeros(count, dtype=engine.storage.to_real(), device=gram.device)
    for _ in range(POWER):
        v = engine.thin(gram, v)
        # Elements near 1 on the way, whatever the format.
        size = two_norms(v, 1, 2) / (k * PROBES) ** 0.5
        logarithm += size.log()
        v = v / torch.where(size > 0, size, 1.0)[:, None, None]
    trace = k / UNLUCKY
    return (logarithm / POWER).exp() * trace ** (0.5 / POWER)


def isometry(
    wide: torch.Tensor,
    cutoff: float,
    *,
    unknown: float = 0.0,
    completion: bool = False,
    over_rows: Reduction = HERE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``W V^H`` of ``W S V^H``, without the vectors of singular values that count as zero.

    Matrices, shape (batch, k, m) with k <= m, hold neither NaN nor Inf; ``over_rows`` is that of their
    columns. Singular values up to a part ``cutoff`` of the largest count as zero; their vectors are taken all
    the same for a ``completion``. Up to the part ``unknown`` they may be zero or not. Returns the factor, how
    many do not count as zero, and whether one is unknown, each of shape (batch,).

    Examples
    --------
    >>> import torch
    >>> from neula.algorithms.polar.iteration import isometry
    >>> isometry(torch.tensor([[[3.0, 0.0], [0.0, 0.0]]]), 1e-6)
    (tensor([[[1., 0.],
             [0., 0.]]]), tensor([1]), tensor([False]))
    """
    # MKL's reflectors of subnormal columns in complex64 are NaN: what is left of matrices of low rank.
    work = wide.to(torch.complex128) if wide.dtype == torch.complex64 and wide.is_cpu else wide
    q, r = over_rows.merged(work.mH, torch.linalg.qr)
    v, s, wh = converged_svd(r)
    counts = (s > cutoff * s[:, :1]) & (s > 0)
    doubtful = ((s <= unknown * s[:, :1]) & (s > 0)).any(1)
    kept = torch.ones_like(counts) if completion else counts
    left = wh.mH * kept[:, None, :]
    if s.dtype == torch.float64:  # in float32 LAPACK's tolerance is a tenth of that, in units of rounding
        left = left + exact_matmul(left, _turn(r, v, s, wh.mH)) * kept[:, None, :]
        small = _orthonormal(exact_matmul(left, v.mH))
    else:
        small = exact_matmul(left, v.mH)
    small, counts, doubtful = over_rows.agreed(small, counts, doubtful)
    return exact_matmul(small, q.mH).to(wide.dtype), counts.sum(1), doubtful


def _turn(r: torch.Tensor, v: torch.Tensor, s: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The small skew-Hermitian Z for which ``W (I + Z) V^H`` is the polar factor of ``R^H`` to first order.

    LAPACK's iteration takes off-diagonal elements for zero from ``u^(-1/8) u`` on (TOLMUL of DBDSQR),
    in float64 99 u, so that ``W^H R^H V = S + E`` with an E of that size. A polar factor leaves a Hermitian
    ``(S + E) (I - Z)``: ``S Z + Z S = E - E^H``. Where Z is not below the root of u (zero by zero is not,
    either) it is left out, or ``I + Z`` would not be orthonormal; singular values are too small there for E
    to count.
    """
    core = exact_matmul(v.mH, exact_matmul(r, w))
    z = (core.mH - core) / (s[:, :, None] + s[:, None, :])
    most = (torch.finfo(s.dtype).eps / 2) ** 0.5 / s.shape[1]
    return torch.where(z.abs() <= most, z, 0.0)


def _orthonormal(x: torch.Tensor) -> torch.Tensor:
    """Newton's and Schulz's step: V and W are orthonormal except for rounding errors, which would count
    twice.
    """
    return x + (x - exact_matmul(exact_matmul(x, x.mH), x)) / 2
