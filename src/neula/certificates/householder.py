"""The certificate of a QR factorization in Householder form: of the Q that reflectors define."""

from __future__ import annotations

import torch

from neula.certificates.orthogonality import DIRECTIONS, PROBES, directions, gaussian_probes
from neula.certificates.qr import units
from neula.engines.formats import in_double
from neula.kernels.few_vectors.probes import norms, spectral_norms
from neula.kernels.qr.reflectors import Reflectors

CHUNK = {"cpu": 1 << 16, "cuda": 1 << 25}
"""Elements that are converted to double precision at a time: what a cache holds, and what fills a GPU."""


def householder_measures(
    a: torch.Tensor, h: torch.Tensor, tau: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Measure R and Q, given as reflectors, as :func:`neula.certificates.qr.qr_measures` does, in double
    precision.

    R is the upper triangle of h, shape (batch, m, n), with Householder vectors below; ``tau`` has the shape
    (batch, min(m, n)), and ``scales`` are those of the columns.
    """
    size = max(1, CHUNK[h.device.type] // (h.shape[1] * h.shape[2]))
    parts = zip(*(x.split(size) for x in (a, h, tau, scales)), strict=True)
    return torch.cat([_measured(*part) for part in parts], 1)


def _measured(a: torch.Tensor, h: torch.Tensor, tau: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    (batch, m, n), k = h.shape, tau.shape[1]
    g, probes = gaussian_probes(n, h.device, h.dtype), directions(k, h.device, h.dtype)
    dg = scales[:, :, None].double() * g
    reflectors = Reflectors.from_householder(h, tau, g.dtype)
    start = dg.new_zeros(batch, m, PROBES + DIRECTIONS)
    start[:, :k] = torch.cat([in_double(h[:, :k].triu()) @ dg, probes.expand(batch, -1, -1)], 2)
    image, basis = reflectors.apply(start).split((PROBES, DIRECTIONS), 2)
    given = in_double(a) @ dg
    loss = reflectors.apply(basis, transposed=True)[:, :k] - probes
    found = torch.stack([norms(given - image), norms(given), norms(loss), spectral_norms(loss)])
    return found * units(k, DIRECTIONS, g.dtype, found.device)[:, None]
