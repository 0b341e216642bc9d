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

PROBES = 32
"""Random vectors of :func:`norm_bound`."""

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

    Parameters
    ----------
    x : Tensor, shape (parts, batch, k, m), k <= m
        As :meth:`~neula.engines.engine.Engine.parts` makes it, so scaled that no element of ``X X^T``
        overflows.
    steps : sequence of OddPolynomial
        For numbers up to 1: X is divided by a bound on its norm.
    size : Tensor, shape (batch,), optional
        That bound, if one is known.
    hermitian : bool
        Whether X is: then all products are, and half of each is computed.

    Returns
    -------
    factor : Tensor, shape (parts, batch, k, m)
        NaN and Inf stay in their matrix; zero stays zero.
    size : Tensor, shape (batch,)
        That bound.

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

    Parameters
    ----------
    gram : Tensor, shape (parts, batch, k, k)
        Positive semidefinite.

    Returns
    -------
    Tensor, shape (batch,)
        In the storage precision; zero for zero. :data:`UNLUCKY` says how often it is below the norm.
    """
    count, k = engine.members(gram), gram.shape[2]
    single = torch.complex64 if engine.is_complex else torch.float32
    v = gaussian(k, PROBES, single, gram.device, seed=k).to(engine.storage).expand(count, -1, -1)
    logarithm = torch.zeros(count, dtype=engine.storage.to_real(), device=gram.device)
    for _ in range(POWER):
        v = engine.thin(gram, v)
        # Elements near 1 on the way, whatever the format.
        size = torch.linalg.vector_norm(v, dim=(1, 2)) / (k * PROBES) ** 0.5
        logarithm += size.log()
        v = v / torch.where(size > 0, size, 1.0)[:, None, None]
    trace = k / UNLUCKY
    return (logarithm / POWER).exp() * trace ** (0.5 / POWER)
