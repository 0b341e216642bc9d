"""The documented bounds of one QR factorization, real or complex."""

from __future__ import annotations

import math

import torch

from neula.engines.formats import in_double


def check(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor, u: float) -> None:
    """The documented bounds of one matrix, in the scaling of the certificate and the rounding of Q and R.

    Of ``||I - Q^H Q||`` half counts: an error of Q is in it twice. Random vectors see a third of an error.
    """
    (m, n), k = a.shape, min(a.shape)
    bound = 3 * 3 * u * (2 + math.log2(n)) + torch.finfo(q.dtype).eps + math.sqrt(m) * 2.0**-53
    assert (q.shape, r.shape) == ((m, k), (k, n))
    assert torch.equal(r, r.triu())
    diagonal = r.diagonal()
    assert bool((diagonal == diagonal.abs()).all())  # real and nonnegative
    a, q, r = in_double(a), in_double(q), in_double(r)
    sizes = torch.linalg.vector_norm(a, dim=0)
    assert not r[:, sizes == 0].any()
    sizes[sizes == 0] = 1
    norm = torch.linalg.matrix_norm
    assert norm((a - q @ r) / sizes) <= bound * norm(a / sizes)
    assert norm(q.mH @ q - torch.eye(k)) <= 2 * bound * k**0.5
