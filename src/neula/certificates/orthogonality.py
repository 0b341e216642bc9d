"""``||I - Q^H Q||_2``, from products of ``E = I - Q^H Q`` with a few random vectors, or from the Gram matrix.

Let lambda be the eigenvalue of E with the largest magnitude, ``|lambda| = ||E||_2``, v its unit
eigenvector, and H a matrix of b Gaussian vectors. Then ``||E H||_2 >= |lambda| ||v^H H||``, and ``||v^H
H||^2`` has the chi-squared distribution with b degrees of freedom. So ``||E H||_2`` times a :func:`margin`
is an *upper estimate*: it is less than half of ``||E||_2`` with a probability of :data:`FAILURE`. It is too
large by a factor of about 22 (b = 4) or 4 (b = 8) if other eigenvalues are much smaller, and of about
``8 sqrt(n)`` or ``sqrt(n)`` if they are not.

Where that is too much, b power methods start from the columns h of H: ``||E^q h|| / ||E^(q-1) h||`` never
exceeds ``||E||_2``. With the component c of h along v, the components ``c_i`` along other eigenvectors,
whose eigenvalues are ``lambda_i``, and ``z_i = (lambda_i / lambda)^2``, it is less than half of ``||E||_2``
only if

    ``3 c^2 < sum c_i^2 z_i^(q-1) (1 - 4 z_i) <= sum c_i^2 ((q-1) / (4q))^(q-1) / q``,

that is, if ``rho c^2 < sum c_i^2`` with ``rho = 3 q (4q / (q-1))^(q-1)``. Since ``c^2 / ||h||^2`` has the
Beta distribution with parameters 1/2 and (n-1)/2, the probability of that is at most ``sqrt(2 n / (pi
rho))``, and the largest of b estimates fails with the b-th power of it. (Kuczynski and Wozniakowski 1992
have bounds for one vector.)

For a complex E the vectors are complex. Then ``2 ||v^H H||^2`` has 2 b degrees of freedom, and
``|c|^2 / ||h||^2`` the parameters 1 and n-1: both probabilities are smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from neula.engines.formats import double_of, in_double
from neula.engines.random_vectors import gaussian
from neula.engines.reduction import HERE, Reduction
from neula.kernels.few_vectors.probes import BLOCK, spectral_norms
from neula.kernels.few_vectors.thin import thin_product
from neula.kernels.precision import exact_matmul, exactly

DIRECTIONS = 8
"""Random vectors that look for the direction in which Q is furthest from orthonormal."""

FAILURE = 5e-7
"""Probability that an estimate is less than half of the norm. Two estimates, at most, decide on a Q."""

QUANTILES = {4: 2.0007e-3, 8: 0.11915}
"""Quantiles of the chi-squared distribution at that probability, by degrees of freedom."""

COLUMNS = 64
"""Columns up to which the Gram matrix takes less time than repeated products with vectors."""


PROBES = 4
"""Random vectors in a certificate. With one dominant direction the estimate of a norm is at least a third of
it in 98% of all cases and a tenth in 99.98% (chi-squared with 4 degrees of freedom); where many directions
contribute it is far closer."""


def gaussian_probes(n: int, device: torch.device, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Gaussian vectors, shape (n, :data:`PROBES`), in double precision, complex for a complex dtype:
    always the same ones.

    As many as there are dimensions are orthogonal: with them a Frobenius norm is no estimate. Of thousands of
    tiny matrices with one large singular value some would lie across all vectors, and look inaccurate.
    Complex vectors have parts of variance 1/2, and squared norms with twice as many degrees of freedom.
    """
    return gaussian(n, PROBES, double_of(dtype), device, seed=n, orthogonal_rows=n <= PROBES)


def margin(n: int, vectors: int) -> float:
    """The factor by which ``||E H||_2`` becomes an upper estimate of ``||E||_2``.

    No fewer vectors than there are dimensions have orthogonal rows, of norm ``sqrt(vectors)``: nothing is
    estimated then.
    """
    return vectors**-0.5 if n <= vectors else 0.5 * QUANTILES[vectors] ** -0.5


def directions(n: int, device: torch.device, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Gaussian vectors, shape (n, :data:`DIRECTIONS`), in double precision, complex for a complex dtype:
    always the same ones.
    """
    return gaussian(n, DIRECTIONS, double_of(dtype), device, seed=n + 1, orthogonal_rows=n <= DIRECTIONS)


def products_needed(n: int) -> int:
    """Products with E after which the power method is right within a factor of 2."""
    most = FAILURE ** (1 / DIRECTIONS)
    q = 2
    while 2 * n > math.pi * most**2 * 3 * q * (4 * q / (q - 1)) ** (q - 1):
        q += 1
    return q


def by_power_method(
    image: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor], n: int
) -> torch.Tensor:
    """``||E||_2`` of a matrix or a batch, right within a factor of 2, without synchronizing.

    ``image`` is ``E H`` for the vectors of :func:`directions`; ``multiply`` multiplies E by vectors.
    """
    for _ in range(products_needed(n) - 1):
        size = torch.linalg.vector_norm(image, dim=-2, keepdim=True)
        image = multiply(image / size.masked_fill(size == 0, 1.0))
    return torch.linalg.vector_norm(image, dim=-2).amax(-1)


def gram_defect(q: torch.Tensor, over_rows: Reduction = HERE) -> torch.Tensor:
    """``I - Q^H Q`` of each Q, shape (batch, m, n), in double precision; on a GPU products keep that of Q."""
    _, rows, n = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    if q.is_cpu:
        rows, wide = max(1, BLOCK["cpu"] // n), double_of(q.dtype)
    defect = torch.eye(n, dtype=wide, device=q.device).mul(float(over_rows.begins)).expand(len(q), n, n)
    for some in (x.to(wide) for x in q.split(rows, 1)):
        defect = exactly(torch.baddbmm, defect, some.mH, some, alpha=-1.0)
    return in_double(over_rows.agree(over_rows.total(defect)))


def measured_again(q: torch.Tensor, enough: float, over_rows: Reduction = HERE) -> torch.Tensor:
    """``||I - Q^H Q||_2`` where a first upper estimate was too large, shape (batch,); the host waits.

    An upper estimate of no more than ``enough`` is returned as it is.
    """
    n = q.shape[2]
    if n <= COLUMNS:
        lost = gram_defect(q, over_rows)
        return spectral_norms(exact_matmul(lost, lost)).sqrt()  # at most n^(1/8) = 1.7 times the norm
    wide = torch.promote_types(q.dtype, torch.float32)
    image = _defect_times(directions(n, q.device, q.dtype).to(wide).expand(len(q), -1, -1), q, over_rows)
    upper = over_rows.agree(margin(n, DIRECTIONS) * spectral_norms(image))
    again = ~(upper <= enough)
    if bool(again.any()):
        rest = q if bool(again.all()) else q[again]
        multiply = partial(_defect_times, q=rest, over_rows=over_rows)
        upper[again] = over_rows.agree(by_power_method(image[again], multiply, n))
    return upper


def _defect_times(v: torch.Tensor, q: torch.Tensor, over_rows: Reduction) -> torch.Tensor:
    """``(I - Q^H Q) V`` of each Q, shape (batch, n, vectors)."""
    if len(q) == 1:  # as a kernel takes it
        product = thin_product(q[0].mH, thin_product(q[0], v[0]))[None]
    else:
        product = exact_matmul(q.mH.to(v.dtype), exact_matmul(q.to(v.dtype), v))
    return v - over_rows.total(product)
