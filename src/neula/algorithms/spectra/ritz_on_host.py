"""Singular triplets of a matrix restricted to a subspace, on a CPU.

The same as :func:`~neula.algorithms.spectra.ritz.ritz_triplets` in a third of the calls: those of torch take
longer than the arithmetic where matrices are small. Other vectors come along, since a product with A takes
hardly longer with a few more, and reading A once more would.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from neula.algorithms.spectra.ritz import Ritz, orthonormal
from neula.certificates.low_rank import beside
from neula.engines import Engine
from neula.engines.formats import in_double
from neula.kernels.polar.small_svd import small_svd


def ritz_on_host(a: torch.Tensor, block: torch.Tensor, engine: Engine, others: torch.Tensor) -> Ritz:
    """Singular triplets of A restricted to the range of a block, by two products with A.

    Parameters
    ----------
    a : Tensor, shape (m, n), m >= n
        On the host, in the storage precision of the engine, all of its rows.
    block : Tensor, shape (n, l)
    engine : Engine
        Its products are as accurate as the triplets.
    others : Tensor, shape (m, p)
        ``A G`` for vectors G. Their part outside U is multiplied by the transpose of A together with U.

    Examples
    --------
    >>> import torch
    >>> from neula.engines import CpuEngine
    >>> a = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    >>> ritz_on_host(a, torch.eye(3)[:, :2], CpuEngine("cpu", "fp32"), a[:, 2:]).s
    tensor([3., 2.], dtype=torch.float64)
    """
    v = orthonormal(block, engine)[0]
    q, r = orthonormal(engine.image(a, v), engine)
    w, s, x = small_svd.reference(r)
    u, v = engine.image(q, w.to(q)), engine.image(v, x.to(v))
    left = beside(u, others, engine)
    image, back = engine.inner(a, torch.cat([u, left], 1)).split([len(s), left.shape[1]], 1)
    rest, loss, rounding = _measured(u, s, v, image)
    return Ritz(u, s, v, image, rest, loss, rounding, (left, back))


def _measured(
    u: torch.Tensor, s: torch.Tensor, v: torch.Tensor, image: torch.Tensor
) -> tuple[torch.Tensor, float, float]:
    """``E^H E`` of ``E = A^H U - V diag(s)``, the loss of orthogonality, and the norm of ``V^H E``."""
    size = len(s)
    both = _gram64(torch.cat([v, image - v * s.to(v.dtype.to_real())], 1))
    of_u, products, one = _gram64(u).numpy(), both.numpy(), np.eye(size)
    losses = [np.linalg.norm(gram - one) for gram in (of_u, products[:size, :size])]
    # Up to l^(1/4) times the spectral norm, whose singular values would take longer.
    across = products[:size, size:]
    largest = np.abs(across).max()
    scaled = across / largest if largest > 0 else across
    rounding = largest * math.sqrt(np.linalg.norm(scaled.conj().T @ scaled))
    return both[size:, size:], float(max(losses)) / math.sqrt(size), float(rounding)


def _gram64(b: torch.Tensor) -> torch.Tensor:
    wide = in_double(b)
    return wide.mH @ wide
