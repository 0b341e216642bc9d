"""Leading singular triplets of a tall matrix from the eigenvectors of its Gram matrix.

``A^T A`` squares the condition number: a singular value below the square root of the precision times the
largest is lost in it. The few largest are not, and their vectors are good enough to begin with: one step of
subspace iteration on A itself, with the projected problem solved in double precision, makes the triplets as
accurate as A is, and says how accurate they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from neula.algorithms.scaling import SAFE_NORMS
from neula.algorithms.spectra.gram import gram
from neula.engines import Engine
from neula.engines.formats import double_gram, in_double
from neula.engines.reduction import Reduction
from neula.kernels.polar.svd import converged_eigh
from neula.kernels.precision import exact_matmul

MAX_STEPS = 3
"""Steps of subspace iteration. Each damps what the Gram matrix hid by the square of its ratio to the smallest
singular value that is kept."""


@dataclass(frozen=True)
class MeasuredTriplets:
    """``A V = U diag(s)``, with what was measured."""

    u: torch.Tensor  # shape (m, k)
    s: torch.Tensor  # shape (k,): descending
    v: torch.Tensor  # shape (n, k)
    # ||A^T U - V diag(s)||_F / ||A||_F: they are exact for a matrix that differs from A by so much.
    residual: float
    orthogonality: float  # ||U^T U - I||_F / sqrt(k)
    norm: float  # ||A||_F
    beyond: float  # the next singular value, as the Gram matrix knows it


def gram_svd(
    a: torch.Tensor, rank: int, engine: Engine, residual: float, norm: float | None = None
) -> MeasuredTriplets:
    """The ``rank`` largest singular values of A with their vectors.

    ``a``, shape (m, n), m >= n: float32, or float64 for an engine in that format. ``engine``: multiplies
    ``A^T A``, also of rows that are distributed over processes. ``residual``: iterate until it is as small as
    this, or :data:`MAX_STEPS` times. ``norm``: ``||A||_F``, to be given where rows of A are distributed over
    processes. Returns MeasuredTriplets: NaN where the Gram matrix overflows, or A has no ``rank`` singular
    values above zero.

    Examples
    --------
    >>> import torch
    >>> from neula.engines import CpuEngine
    >>> a = torch.diag(torch.tensor([1.0, 3.0, 2.0]))
    >>> gram_svd(a, 2, CpuEngine("cpu", "fp32"), 1e-6).s
    tensor([3., 2.])
    """
    over_rows = engine.over_rows
    g = in_double(gram(a.to(engine.operand_dtype), engine))
    norm = frobenius_norm(a) if norm is None else norm
    if not math.isfinite(float(over_rows.agree(g.trace().real))):
        nan = [x.new_full((len(x), rank), math.nan) for x in (a, a.mH)]
        return MeasuredTriplets(nan[0], nan[0][0].real, nan[1], math.nan, math.nan, norm, math.nan)
    eigenvalues, vectors = over_rows.agreed(*converged_eigh(g))
    beyond = float(eigenvalues[-rank - 1].clamp_min(0).sqrt()) if rank < len(g) else 0.0
    v = vectors[:, -rank:].flip(1)
    for step in range(MAX_STEPS):
        found, image = _project(a, v.to(a.dtype), norm, over_rows)
        if step + 1 == MAX_STEPS or not found.residual > residual:
            return replace(found, beyond=beyond)
        v = over_rows.agree(torch.linalg.qr(in_double(image)).Q)
    raise AssertionError  # unreachable


def frobenius_norm(a: torch.Tensor) -> float:
    """``||A||_F``, from norms of rows in the precision of A where squares are in its range.

    Torch would copy A to sum in a wider one.
    """
    norm = float(torch.linalg.vector_norm(torch.linalg.vector_norm(a, dim=1), dtype=torch.float64))
    low, high = SAFE_NORMS[a.dtype.to_real()]
    return norm if low < norm < high else float(torch.linalg.matrix_norm(in_double(a)))


def _project(
    a: torch.Tensor, v: torch.Tensor, norm: float, over_rows: Reduction
) -> tuple[MeasuredTriplets, torch.Tensor]:
    """Singular triplets of ``A V V^T``, measured, and ``A^T U``."""
    b = exact_matmul(a, v)
    theta, w = over_rows.agreed(*converged_eigh(over_rows.total(double_gram(b))))
    s, w = theta.flip(0).clamp_min(0).sqrt(), w.flip(1)
    u = exact_matmul(b, (w / s).to(a.dtype))
    v = exact_matmul(v, w.to(a.dtype))
    image = over_rows.total(exact_matmul(a.mH, u))
    gap = torch.linalg.matrix_norm(in_double(image) - v * s)
    of_u = over_rows.total(double_gram(u))
    loss = torch.linalg.matrix_norm(of_u - torch.eye(len(s), dtype=s.dtype, device=s.device))
    measured = torch.stack([gap / norm if norm > 0 else gap, loss / len(s) ** 0.5])
    residual, orthogonality = over_rows.agree(measured).tolist()
    return MeasuredTriplets(u, s.to(a.dtype.to_real()), v, residual, orthogonality, norm, math.nan), image
