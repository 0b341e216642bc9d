"""The error of a low-rank approximation."""

from __future__ import annotations

import torch

from neula.certificates.probes import gaussian_probes
from neula.kernels.thin import thin_product


def low_rank_error(a: torch.Tensor, u: torch.Tensor, s: torch.Tensor, vh: torch.Tensor) -> float:
    """Estimate ``||A - U diag(s) Vh||_F / ||A||_F`` with random vectors, in float64."""
    g = gaussian_probes(a.shape[1], a.device)
    ag = thin_product(a, g)
    approximation = thin_product(u, s.double()[:, None] * thin_product(vh, g))
    size = float(torch.linalg.matrix_norm(ag))
    return float(torch.linalg.matrix_norm(ag - approximation)) / size if size > 0 else 0.0
