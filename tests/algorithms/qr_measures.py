"""Matrices to factorize, errors in float64 by their definitions, and the bounds that theory gives them."""

import math
from functools import lru_cache

import torch

from neula.engines import EmulatedEngine
from neula.io.matrices import random_matrix

U32, U64 = 2.0**-24, 2.0**-53


def emulated(format: str, **options: object) -> EmulatedEngine:
    return EmulatedEngine("cpu", format, **options)  # type: ignore[arg-type]


def normal(m: int, n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return random_matrix("normal", m, n, seed=seed, dtype=dtype)


@lru_cache(maxsize=64)
def spectrum(kind: str, m: int, n: int, cond: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return random_matrix(kind, m, n, cond=cond, seed=1).to(dtype)


def residual(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> float:
    """``||A - Q R||_F / ||A||_F``; infinite for NaN."""
    a, q, r = a.double(), q.double(), r.double()
    error = float(torch.linalg.matrix_norm(a - q @ r) / torch.linalg.matrix_norm(a))
    return error if math.isfinite(error) else math.inf


def column_residuals(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """``||a_j - Q r_j|| / ||a_j||`` of each column; 0 where both vanish."""
    a, q, r = a.double(), q.double(), r.double()
    errors, sizes = torch.linalg.vector_norm(a - q @ r, dim=0), torch.linalg.vector_norm(a, dim=0)
    return torch.where(errors == 0, 0.0, errors / sizes)


def orthogonality(q: torch.Tensor) -> float:
    """``||I - Q^T Q||_2``; infinite for NaN."""
    q = q.double()
    if not bool(torch.isfinite(q).all()):
        return math.inf
    identity = torch.eye(q.shape[1], dtype=torch.float64)
    return float(torch.linalg.matrix_norm(identity - q.T @ q, 2))


def batch_errors(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Relative residual and loss of orthogonality of each matrix in Frobenius norms; infinite for NaN."""
    a, q, r = (x.double() for x in (a, q, r))
    norm, identity = torch.linalg.matrix_norm, torch.eye(q.shape[-1], dtype=torch.float64, device=q.device)
    size = norm(a)
    found = norm(a - q @ r) / torch.where(size == 0, 1.0, size), norm(identity - q.mT @ q)
    return found[0].nan_to_num(math.inf), found[1].nan_to_num(math.inf)


def check_triangular(r: torch.Tensor) -> None:
    assert torch.equal(r, r.triu()), "exact zeros below the diagonal"
    assert (r.diagonal(dim1=-2, dim2=-1) >= 0).all()


def recursion_bound(u: float, n: int) -> float:
    """``3 u (2 + log2 n)``: three roundings a level (of Q1, A2 and R12), at most ``1 + log2 n`` levels."""
    return 3 * u * (2 + math.log2(n))


def panel_bound(u: float, n: int) -> float:
    """``4 n u``: Gram-Schmidt subtracts up to n projections from a column, each with two roundings of at
    most ``u ||a_j||``, a product of n terms doubles that; Householder and Cholesky QR are no worse.
    """
    return 4 * n * u


def orthogonality_bound(u: float, m: int, n: int) -> float:
    """``4 (n + sqrt(m)) u``: as above, and inner products of m terms, which err by ``sqrt(m) u`` (Higham and
    Mary, 2019: rounding errors of both signs).
    """
    return 4 * (n + math.sqrt(m)) * u


def column_major(a: torch.Tensor) -> torch.Tensor:
    """A copy with contiguous columns."""
    return a.T.contiguous().T


def with_widths(shapes: list[tuple[int, int]], widths: list[int]) -> list[tuple[int, int, int]]:
    """Each shape with every width below its number of columns, and with one that is not, if there is one."""
    return [
        (m, n, width)
        for m, n in shapes
        for width, narrower in zip(widths, [0, *widths[:-1]], strict=True)
        if narrower < n
    ]
