"""The random vectors along which certificates estimate norms."""

from __future__ import annotations

import torch

from neula.engines.formats import double_of
from neula.engines.random_vectors import gaussian

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
