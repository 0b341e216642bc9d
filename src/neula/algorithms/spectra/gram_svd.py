"""Leading singular triplets of a tall matrix from the eigenvectors of its Gram matrix.

``A^T A`` squares the condition number: a singular value below the square root of the precision times the
largest is lost in it. The few largest are not, and their vectors are good enough to begin with: one step of
subspace iteration on A itself makes the triplets as accurate as A is, and says how accurate they are.
"""

from __future__ import annotations

import math

import torch

from neula.algorithms.spectra.gram import gram
from neula.algorithms.spectra.ritz import Ritz, ritz_triplets
from neula.engines import Engine
from neula.engines.formats import in_double
from neula.kernels.polar.svd import converged_eigh

MAX_STEPS = 3
"""Steps of subspace iteration. Each damps what the Gram matrix hid by the square of its ratio to the smallest
singular value that is kept."""


def gram_svd(
    a: torch.Tensor, rank: int, low: Engine, exact: Engine, residual: float
) -> tuple[Ritz, float] | None:
    """The ``rank`` largest singular values of A with their vectors.

    ``a``, shape (m, n), m >= n: in the storage precision of both engines. ``low`` multiplies ``A^T A``, and
    ``exact`` the triplets. ``residual``: iterate until that of the triplets is as small as this, or
    :data:`MAX_STEPS` times. Returns the triplets, and the next singular value as the Gram matrix knows it;
    None where it overflows.

    Examples
    --------
    >>> import torch
    >>> from neula.engines import CpuEngine
    >>> a, engine = torch.diag(torch.tensor([1.0, 3.0, 2.0])), CpuEngine("cpu", "fp32")
    >>> gram_svd(a, 2, engine, engine, 1e-6)[0].s
    tensor([3., 2.], dtype=torch.float64)
    """
    over_rows = low.over_rows
    g = in_double(gram(a.to(low.operand_dtype), low))
    if not math.isfinite(float(over_rows.agree(g.trace().real))):
        return None
    eigenvalues, vectors = over_rows.agreed(*converged_eigh(g))
    beyond = float(eigenvalues[-rank - 1].clamp_min(0).sqrt()) if rank < len(g) else 0.0
    block = vectors[:, -rank:].flip(1).to(a.dtype)
    for _ in range(MAX_STEPS):
        found = ritz_triplets(a, block, exact)
        if not found.residual > residual:
            break
        block = found.image
    return found, beyond
