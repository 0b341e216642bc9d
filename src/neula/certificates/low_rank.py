"""The certificate of leading singular triplets, and the error of a low-rank approximation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from neula.certificates.forward_error import RARE
from neula.certificates.orthogonality import gaussian_probes
from neula.certificates.verdict import within
from neula.engines import Engine
from neula.engines.formats import double_gram
from neula.engines.random_vectors import gaussian
from neula.engines.reduction import HERE, Reduction
from neula.kernels.few_vectors.thin import thin_product
from neula.kernels.magnitudes import two_norms

VECTORS = 8  # random vectors that look for what was missed: as many as are multiplied while A is read once
SEED = 2  # theirs: another one than that of any block from which triplets are found


@dataclass(frozen=True)
class SVDCertificate:
    """Measured quality of the leading singular triplets ``A V = U diag(s)``.

    ``E = A^H U - V diag(s)`` is the residual of the triplets that are returned. Each error is relative to a
    weight, which is ``||A||_F`` where the accuracy of a format was requested. Where it was a number, it is
    ``s_i``, plus what rounding errors come to: then every singular value counts by itself.

    Attributes
    ----------
    residual : float
        Norm of the ``||E_i|| / weight_i``.
    orthogonality : float
        The larger of ``||U^H U - I||_F / sqrt(k)`` and the same of V.
    missed : float
        Bound on ``(sigma_i - s_i) / weight_i``, the largest, where ``sigma_i`` are the singular values of A
        in order: a larger one that was missed would show here. From iterations it holds with probability
        ``1 - 1e-6`` (:func:`largest_beyond`, :func:`upper_bounds`); where all singular values were computed,
        it follows from these. Zero of :func:`neula.svd`, which misses none.
    bound, orthogonality_bound : float
        Largest accepted values.
    """

    residual: float
    orthogonality: float
    missed: float
    bound: float
    orthogonality_bound: float

    @property
    def accepted(self) -> Any:
        """Whether all three measures meet their bounds (NaN never does)."""
        errors = (self.residual, self.bound), (self.missed, self.bound)
        return within(*errors, (self.orthogonality, self.orthogonality_bound))

    @property
    def excess(self) -> tuple[float, float, float]:
        """Each measure in units of its bound; infinite where it is NaN."""
        measures = (
            self.residual / self.bound,
            self.orthogonality / self.orthogonality_bound,
            self.missed / self.bound,
        )
        residual, orthogonality, missed = (math.inf if math.isnan(x) else x for x in measures)
        return residual, orthogonality, missed

    def __str__(self) -> str:
        beyond = f", error from missed singular values at most {self.missed:.1e}" if self.missed else ""
        return (
            f"residual {self.residual:.1e} (bound {self.bound:.1e}), "
            f"orthogonality {self.orthogonality:.1e} (bound {self.orthogonality_bound:.1e})"
            f"{beyond if self.missed < math.inf else ', larger singular values may have been missed'}"
        )


def visible(vectors: int = VECTORS, missed: float = RARE) -> float:
    """Lower bound on ``||w^H G||`` for a unit vector w and Gaussian vectors G, which fails with probability
    ``missed``.

    The square has the chi-squared distribution with ``p`` degrees of freedom, for which
    ``P(chi^2 <= 2 h) <= h^(p/2) / (p/2)!`` (its density is at most ``x^(p/2-1) / (2^(p/2) (p/2-1)!)``). With
    complex vectors twice the square has ``2 p`` degrees of freedom, and is small with less probability.

    >>> round(visible(), 3)
    0.374
    """
    half = vectors // 2
    return math.sqrt(2 * (missed * math.factorial(half)) ** (1 / half))


@dataclass(frozen=True)
class Beyond:
    """Bounds on the part of a matrix outside singular triplets, ``D = (I - U U^H) A (I - V V^H)``."""

    bound: float  # on ||D||_2; infinite where A is not finite
    size: float  # estimate of ||D||_F
    products: int  # by A^H A that it took


def largest_beyond(
    a: torch.Tensor,
    u: torch.Tensor,
    v: torch.Tensor,
    edge: float,
    wanted: float,
    engine: Engine,
    *,
    most: int = 100,
) -> Beyond:
    """Bound on the norm of ``D = (I - U U^H) A (I - V V^H)``, which singular triplets leave.

    Let w be the singular vector of D for its norm d, and G Gaussian vectors that U and V do not depend on.
    For any polynomial T, ``w^H T(D^H D) G = T(d^2) w^H G``, so ``T(d^2) ||w^H G|| <= ||T(D^H D) G||_2``.
    Except with probability ``RARE``, ``||w^H G||`` is at least :func:`visible`, and then ``T(d^2) <= ||T(D^H
    D) G||_2 / visible``. With ``T(x) = x``, which takes two products with A, this bounds d by some ten times
    itself, which is enough where there is a gap. A Chebyshev polynomial of degree j, of ``2 x / edge^2 -
    1``, is at most 1 up to ``edge`` and ``cosh(2 j acosh(d / edge))`` beyond: ``d <= edge cosh(acosh(||T(D^H
    D) G||_2 / visible) / (2 j))`` comes as close to the edge as one likes. All of this rests on one event,
    whatever the polynomials, so that there is one probability.

    ``u``, ``v``: with orthonormal columns. ``edge``: about the norm of D. ``wanted``: a bound that would be
    good enough; it decides on the polynomial, whose degree is at most ``most``.

    >>> from neula.engines import CpuEngine
    >>> a = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    >>> one = torch.eye(3, dtype=torch.float64)[:, :1]
    >>> 2.0 <= largest_beyond(a, one, one, 2.0, 2.2, CpuEngine("cpu", "fp64")).bound <= 2.2001
    True
    """

    def times(x: torch.Tensor) -> torch.Tensor:
        return projected_out(u, engine.gemm(a, x), engine)

    def transposed_times(y: torch.Tensor) -> torch.Tensor:
        return projected_out(v, engine.inner(a, y), engine.alone)

    seen, over_rows = visible(), engine.over_rows
    g = projected_out(v, random_vectors(len(v), v.dtype, v.device), engine.alone)
    image = times(g)
    product = transposed_times(image)
    grams = [double_gram(g), over_rows.total(double_gram(image)), double_gram(product)]
    (start, _), (_, size), (largest, _) = _norms(torch.stack(grams), over_rows)
    bound, size = math.sqrt(largest / seen), size / math.sqrt(VECTORS)
    rate = 2 * math.acosh(wanted / edge) if 0 < edge < wanted else 0.0
    if bound <= wanted or rate == 0:
        return Beyond(bound, size, 1)
    degree = math.ceil(math.acosh(max(1.0, start / seen)) / rate)
    if not 1 < degree <= most:
        return Beyond(bound, size, 1)
    weight = 4 / edge**2
    before, block = g, product * (weight / 2) - g
    for _ in range(degree - 1):
        product = transposed_times(times(block))
        before, block = block, product.mul_(weight).sub_(block, alpha=2.0).sub_(before)
    largest = max(1.0, _norms(double_gram(block)[None], over_rows)[0][0] / seen)
    bound = min(bound, edge * math.cosh(math.acosh(largest) / (2 * degree)))
    return Beyond(bound, size, degree)


def random_vectors(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Probes for missed singular values, shape (n, ``VECTORS``); no triplet may depend on them."""
    return gaussian(n, VECTORS, dtype, device, seed=SEED)


def upper_bounds(
    s: np.ndarray, rest: np.ndarray, rank: int, beyond: float, margin: float, enough: np.ndarray | None = None
) -> np.ndarray:
    """Bounds on the leading singular values of A from all triplets of a subspace, ``A V = U diag(s)``.

    In bases that begin with U and V, A is ``[[S, E^H], [0, D]]``. For ``t > ||D||`` the Schur complement of
    ``t^2 I - A A^H`` says that as many singular values of A exceed t as eigenvalues of ``S^2 + E^H (I - D^H
    D / t^2)^-1 E`` exceed ``t^2``, and those of ``S^2 + E^H E / (1 - ||D||^2 / t^2)`` are no smaller. So the
    i-th singular value of A is at most the larger of t and the root of the i-th eigenvalue. (It is at least
    ``s_i``, as Ritz values are.) Errors are of second order in E. Nothing is said of convergence: triplets
    of V that are not wanted, and no good yet, serve to make D small.

    By norms of its blocks the i-th eigenvalue of ``[[S_1^2 + L_11, L_12], [L_12^H, S_2^2 + L_22]]`` is at
    most the larger one of ``[[s_i^2 + ||L_11||, ||L_12||], [||L_12||, s_(k+1)^2 + ||L_22||]]``. Where that
    is not enough, eigenvalues are computed.

    ``rest``: ``E^H E``. ``beyond``: bound on ``||D||``. ``margin``: by how much t may exceed the last one
    that counts. ``enough``: differences to the singular values that are small enough: no eigenvalues are
    computed for less. Infinite where D may be too large.

    >>> import numpy as np
    >>> upper_bounds(np.array([2.0, 1.0]), np.zeros((2, 2)), 2, 0.5, 0.0)
    array([2., 1.])
    """
    bounds, last = np.full(rank, math.inf), float(s[rank - 1])
    for t in (last, last + 0.75 * margin):
        if beyond < t or beyond == 0:
            larger = rest / (1 - (beyond / t) ** 2 if beyond > 0 else 1.0)
            found = _by_norms(s, larger, rank)
            if enough is None or (found - s[:rank] > enough).any():
                found = np.minimum(found, _by_eigenvalues(s, larger, rank))
            bounds = np.minimum(bounds, np.maximum(found, t))
    return bounds


def _by_norms(s: np.ndarray, larger: np.ndarray, rank: int) -> np.ndarray:
    """Bounds on roots of the leading eigenvalues of ``S^2 + larger`` by norms of its blocks."""
    if rank == len(s):
        return np.sqrt(s * s + np.linalg.norm(larger))
    first = s[:rank] ** 2 + np.linalg.norm(larger[:rank, :rank])
    second = s[rank] ** 2 + np.linalg.norm(larger[rank:, rank:])
    root = np.hypot(first - second, 2 * np.linalg.norm(larger[:rank, rank:]))
    return np.sqrt((first + second + root) / 2)


def _by_eigenvalues(s: np.ndarray, larger: np.ndarray, rank: int) -> np.ndarray:
    """Bounds on these roots by eigenvalues: small ones have half the digits; a norm bound may be less."""
    values = np.linalg.eigvalsh(np.diag(s * s) + larger)[::-1][:rank]
    return np.minimum(np.sqrt(np.maximum(values, 0.0)), s[:rank] + np.sqrt(np.trace(larger).real))


def projected_out(q: torch.Tensor, x: torch.Tensor, engine: Engine) -> torch.Tensor:
    """``(I - Q Q^H) X`` for a Q with orthonormal columns."""
    return x - engine.gemm(q, engine.inner(q, x))


def _norms(grams: torch.Tensor, over_rows: Reduction) -> list[tuple[float, float]]:
    """``||X||_2`` and ``||X||_F`` by the Gram matrices of a few columns; infinite where one is not finite."""
    found = over_rows.agree(grams).cpu().numpy()
    finite = np.isfinite(found).all((1, 2))
    squares = np.maximum(np.linalg.eigvalsh(np.where(finite[:, None, None], found, 0.0)), 0.0)
    norms = np.sqrt(np.stack([squares[:, -1], squares.sum(1)], 1))
    return [(x, y) for x, y in np.where(finite[:, None], norms, math.inf).tolist()]


def low_rank_error(
    a: torch.Tensor, u: torch.Tensor, s: torch.Tensor, vh: torch.Tensor, over_rows: Reduction = HERE
) -> float:
    """Estimate ``||A - U diag(s) Vh||_F / ||A||_F`` with random vectors, in float64."""
    g = gaussian_probes(a.shape[1], a.device, a.dtype)
    ag = thin_product(a, g)
    approximation = thin_product(u, s.double()[:, None] * thin_product(vh, g))
    sizes = over_rows.norms(ag, ag - approximation)
    size, error = (float(two_norms(norms)) for norms in over_rows.agreed(*sizes))
    return error / size if size > 0 else 0.0
