"""``||I - Q^H Q||_2`` from above, from products of ``E = I - Q^H Q`` with a few random vectors, or from the
Gram matrix.

Let lambda be the eigenvalue of E with the largest magnitude, ``|lambda| = ||E||_2``, v its unit
eigenvector, and H a matrix of b Gaussian vectors. Then ``||E H||_2 >= |lambda| ||v^H H||``, and ``||v^H
H||^2`` has the chi-squared distribution with b degrees of freedom. So ``||E H||_2`` times a :func:`margin`
is at least ``||E||_2`` (b = 8) or half of that (b = 4, where more would reject too much), except with a
probability of ``FAILURE``. It is too large by a factor of about 8 (b = 8) or 22 (b = 4) if other
eigenvalues are much smaller, and of up to ``3 sqrt(n)`` or ``11 sqrt(n)`` if they are not.

Where that is too much, b power methods start from the columns h of H: ``||E^q h|| / ||E^(q-1) h||`` never
exceeds ``||E||_2``. With the component c of h along v, the components ``c_i`` along other eigenvectors,
whose eigenvalues are ``lambda_i``, and ``z_i = (lambda_i / lambda)^2``, its square is less than ``t
||E||_2^2``, for t < 1, only if

    ``(1 - t) c^2 < sum c_i^2 z_i^(q-1) (t - z_i) <= sum c_i^2 t^q ((q-1) / q)^(q-1) / q``,

that is, if ``rho c^2 < sum c_i^2`` with ``rho = (1 - t) q (q / (q-1))^(q-1) t^-q``. Since ``c^2 / ||h||^2``
has the Beta distribution with parameters 1/2 and (n-1)/2, the probability of that is at most ``sqrt(2 n /
(pi rho))``, and the largest of b estimates fails with the b-th power of it: the more products, the closer to
1 may t be. (Kuczynski and Wozniakowski 1992 have bounds for one vector.)

For a complex E the vectors are complex. Then ``2 ||v^H H||^2`` has 2 b degrees of freedom, and
``|c|^2 / ||h||^2`` the parameters 1 and n-1: both probabilities are smaller.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import lru_cache, partial

import torch

from neula.engines.formats import double_of, in_double
from neula.engines.random_vectors import gaussian
from neula.engines.reduction import HERE, Reduction
from neula.kernels.few_vectors.probes import BLOCK, spectral_norms
from neula.kernels.few_vectors.thin import thin_product
from neula.kernels.magnitudes import two_norms
from neula.kernels.precision import exact_matmul, exactly

DIRECTIONS = 8  # random vectors that look for the direction in which Q is furthest from orthonormal
FAILURE = 5e-7  # probability that an estimate is too small; at most two estimates decide on a Q
QUANTILES = {4: 2.0007e-3, 8: 0.11915}  # of the chi-squared distribution at it, by degrees of freedom
COLUMNS = 64  # columns up to which the Gram matrix takes less time than repeated products with vectors

PROBES = 4
"""Random vectors in a certificate. With one dominant direction the estimate of a norm is at least a third of
it in 98% of all cases and a tenth in 99.98% (chi-squared with 4 degrees of freedom); where many directions
contribute it is far closer."""


def gaussian_probes(n: int, device: torch.device, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Gaussian vectors, shape (n, ``PROBES``), in double precision, complex for a complex dtype:
    always the same ones.

    As many as there are dimensions are orthogonal: with them a Frobenius norm is no estimate. Of thousands of
    tiny matrices with one large singular value some would lie across all vectors, and look inaccurate.
    Complex vectors have parts of variance 1/2, and squared norms with twice as many degrees of freedom.
    """
    return gaussian(n, PROBES, double_of(dtype), device, seed=n, orthogonal_rows=n <= PROBES)


def margin(n: int, vectors: int) -> float:
    """The factor by which ``||E H||_2`` becomes an upper bound of ``||E||_2``, or of half of it for four
    vectors, as many as kernels for batches take: except with ``FAILURE``.

    No fewer vectors than there are dimensions have orthogonal rows, of norm ``sqrt(vectors)``: nothing is
    estimated then.
    """
    part = 0.5 if vectors == PROBES else 1.0
    return vectors**-0.5 if n <= vectors else part * QUANTILES[vectors] ** -0.5


def directions(n: int, device: torch.device, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Gaussian vectors as :func:`gaussian_probes`, shape (n, ``DIRECTIONS``)."""
    return gaussian(n, DIRECTIONS, double_of(dtype), device, seed=n + 1, orthogonal_rows=n <= DIRECTIONS)


@lru_cache(maxsize=1024)
def power_margin(n: int, q: int) -> float:
    """The factor by which q products of the power method become an upper bound of the norm: ``t^(-1/2)``.

    Any number of products from 2 on may be the last, so each has a part of ``FAILURE``; all together are
    at most the whole.
    """
    most = (FAILURE / (q * (q - 1))) ** (1 / DIRECTIONS)
    rho, t = 2 * n / (math.pi * most**2), 0.0
    for _ in range(8):  # an even number of steps leads to the root from below
        t = (max(0.0, 1 - t) * q * (q / (q - 1)) ** (q - 1) / rho) ** (1 / q)
    return float(t**-0.5)


def by_power_method(
    image: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor], n: int, enough: float
) -> torch.Tensor:
    """``||E||_2`` of a matrix or a batch from above, within a factor of 2 unless it is at most ``enough``;
    the host waits.

    ``image`` is ``E H`` for the vectors of :func:`directions`. Products go on until it is clear which norms
    are at most ``enough``, or within a factor of 1.25.
    """
    for q in itertools.count(2):
        size = two_norms(image, -2, keepdim=True)
        image = multiply(image / size.masked_fill(size == 0, 1.0))
        least, factor = two_norms(image, -2).amax(-1), power_margin(n, q)
        upper = factor * least
        clear = (upper <= enough) | ((least > enough) & (factor < 2))
        if factor < 1.25 or bool(clear.all()):
            break
    return upper


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
    """``||I - Q^H Q||_2`` from above where a first estimate was too large, shape (batch,), as close as it
    takes to tell whether it is at most ``enough``, else within a factor of 2; the host waits.
    """
    n = q.shape[2]
    # One matrix on a GPU, order 1000: 0.2 ms, and 10 by products with vectors, each of which the host reads.
    if n <= (32 * COLUMNS if q.is_cuda and len(q) == 1 else COLUMNS):
        squared = exact_matmul(lost := gram_defect(q, over_rows), lost)
        if n <= COLUMNS:  # at most n^(1/8) = 1.7 times the norm
            return spectral_norms(squared).sqrt()
        return spectral_norms(exact_matmul(squared, squared)) ** 0.25  # at most n^(1/16) = 1.6 times
    wide = torch.promote_types(q.dtype, torch.float32)
    multiply = partial(_defect_times, q=q, over_rows=over_rows)
    image = multiply(directions(n, q.device, q.dtype).to(wide).expand(len(q), -1, -1))
    return by_power_method(image, multiply, n, enough)


def _defect_times(v: torch.Tensor, q: torch.Tensor, over_rows: Reduction) -> torch.Tensor:
    """``(I - Q^H Q) V`` of each Q, shape (batch, n, vectors), the same on all processes."""
    if len(q) == 1:  # as a kernel takes it
        product = thin_product(q[0].mH, thin_product(q[0], v[0]))[None]
    else:
        product = exact_matmul(q.mH.to(v.dtype), exact_matmul(q.to(v.dtype), v))
    return over_rows.agree(v - over_rows.total(product))
