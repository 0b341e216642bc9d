"""How far determinants and solutions by factors ``A = M1 M2`` are from those of A itself.

Higham ("Accuracy and Stability of Numerical Algorithms", 2002, theorems 9.3, 10.3 and 19.4) bounds
``A - M1 M2``; the bounds are far too large in practice. So ``E = M1^-1 A M2^-1 - I`` is measured along
Gaussian vectors G, with which A is multiplied: ``det A = det M1 det M2 det(I + E)``, and ``A^-1 = M2^-1
(I + E)^-1 M1^-1``.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from neula.certificates.forward_error import ESTIMATED, enlarged, where
from neula.certificates.orthogonality import DIRECTIONS, FAILURE, margin
from neula.kernels.magnitudes import two_norms


def shown_norm(image: torch.Tensor) -> torch.Tensor:
    """``||B||_2`` from above, shape (..., 1), from ``B G`` for the same vectors: three times an estimate.

    For independent Gaussian g and h the mean of ``|g^H B^H B h|^2`` is the sum of the fourth powers of the
    singular values of B (Kong and Valiant, "Spectrum estimation from samples", Ann. Statist. 45, 2017): the
    estimate is up to ``n^(1/4)`` times the norm, and below a third of it in 0.2% of all cases at most, where
    one singular value dominates. Of no more rows than vectors it is the Frobenius norm.
    """
    n, m = image.shape[-2:]
    if n <= m:
        return two_norms(image, -2, -1)[..., None] / m**0.5
    size = image.abs().amax((-2, -1), keepdim=True)
    scaled = image / size.masked_fill(size == 0, 1.0)
    gram = scaled.mH @ scaled
    off = gram.abs().square()
    squares = off.sum((-2, -1)) - off.diagonal(dim1=-2, dim2=-1).sum(-1)
    return ESTIMATED * size[..., 0] * (squares / (m * (m - 1))).clamp_min(0)[..., None] ** 0.25


def logdet_error(image: Any, vectors: Any, noise: Any = None) -> Any:
    """Bound on ``|log |det(I + E)||``, or ``|log det(I + E)|``, from ``E G`` and the vectors G, shape (...,
    n, m), and magnitudes of the rounding errors of E G.

    Infinite where ``||E||_F`` may be 1 or more. The logarithm is ``tr E`` and at most ``||E||_F^2 / (2 (1 -
    ||E||_F))``. The mean of ``g^T E g`` over m vectors differs from the trace by at most ``2 ||E||_F (sqrt(x
    / m) + x / m)``, but with a probability of ``2 exp(-x)`` (Laurent and Massart, "Adaptive estimation of a
    quadratic functional by model selection", Ann. Statist. 28, 2000, lemma 1). The trace is also at most
    ``sqrt(n) ||E||_F``. For complex vectors the deviations of both parts together are no larger.
    """
    n, m = vectors.shape[-2:]
    # A sum of squares of the singular values of E times chi-squared numbers: it is the least likely to be too
    # small where one singular value dominates.
    unknown = 0.0 if noise is None else ((noise * noise).sum((-2, -1)) / m) ** 0.5
    norm = margin(n, DIRECTIONS) * (image * image.conj()).real.sum((-2, -1)) ** 0.5 + unknown
    trace = abs((vectors.conj() * image).sum((-2, -1))) / m + unknown
    if n > m:  # else no trace is estimated
        x = -math.log(FAILURE / 2) / m  # with the probability of the other estimates on either side
        likely, always = trace + 2 * norm * (x**0.5 + x), n**0.5 * norm
        trace = where(likely < always, likely, always)
    return trace + enlarged(norm * norm / 2, norm)
