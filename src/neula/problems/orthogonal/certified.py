"""An R that is certified in double precision, for whatever continues with it in place of A.

Bounds, constraints, statistics and steps of non-linear fits are small problems on R once A is factorized. The
R of a preconditioner will not do for them: it errs by its unit roundoff times the condition number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from neula.algorithms.krylov.batched_lstsq import MARGINS
from neula.algorithms.orthogonal.cholesky_qr import upper_cholesky
from neula.algorithms.orthogonal.reorthogonalize import WELL_CONDITIONED
from neula.algorithms.spectra.gram import GramTuning, gram_r
from neula.certificates.orthogonality import PROBES, gaussian_probes
from neula.engines import FP16_COR, FP64, Engine, Tuning
from neula.engines.complex import over
from neula.engines.formats import in_double
from neula.kernels.magnitudes import two_norms
from neula.kernels.precision import plain_arithmetic
from neula.pipeline.call import restored
from neula.pipeline.result import Attempt
from neula.problems.orthogonal.factorize import factorize
from neula.problems.orthogonal.problem import QRFactors, QRMatrices, QROptions


@restored
def certified_qr(a: torch.Tensor, engine: Engine) -> QRFactors:
    """QR in double precision of each matrix of a batch, certified as that of :func:`neula.qr` is."""
    # For matrices that are not accepted it returns the best that was found; the caller has to say so.
    a = in_double(a)
    return factorize(a, "reduced", QROptions(FP64, over(engine, a.dtype)))


def coarse_arithmetic(m: int, n: int, tuning: Tuning) -> str | None:
    """In what the Gram matrix is computed whose R Cholesky QR of ``A R^-1`` starts from; None: there is none.

    Worth it where an error-corrected product takes a part of the time of one in double precision. Nearly
    square matrices are too ill-conditioned for a Gram matrix more often than not.
    """
    tall = m >= 2 * n > 0 and n <= tuning[GramTuning].gram_columns and not tuning.lapack_first(m, n)
    return FP16_COR if tall and tuning.corrected else None


FAITHFUL = 0.25
"""How far ``(R^H R)^-1 A^H A`` may be from the identity: singular values are right within a seventh then."""

RIGHT_HAND_SIDES = 4
"""Reflections are applied to B as to columns of A, one by one, up to one for so many columns of A; with more
of them Q and one product take less."""


@dataclass(frozen=True)
class RFactors:
    """``A = Q R`` of each matrix of a batch, with k = min(m, n)."""

    # Shape (batch, k, n). In double precision, in the units of A. Nothing is said of its rank. NaN where A
    # holds NaN or Inf.
    r: torch.Tensor
    c: torch.Tensor  # shape (batch, k, K): Q^H B
    accepted: bool  # whether all of them are certified
    attempts: tuple[Attempt, ...]


@restored
def certified_triangle(a: torch.Tensor, b: torch.Tensor, engine: Engine) -> RFactors:
    """R and ``Q^H B`` by reflections alone where the library's are fastest, on a GPU by Cholesky factors."""
    # Without Q the difference of ``A^H A`` and ``R^H R`` is measured, enough for condition numbers up to
    # about 1e6; R itself is as good as Householder's is. Beyond that, a certified QR.
    # Shapes: a (batch, m, n), b (batch, m, K), in double precision, on the engine's device.
    m, n = a.shape[1:]
    few, engine = RIGHT_HAND_SIDES * b.shape[2] <= n, over(engine, a.dtype)
    if a.numel() and m >= n and few:
        found = None
        with plain_arithmetic(engine.device):
            if engine.tuning.lapack_first(m, n):
                found = _by_reflections(a, b)
            elif len(a) == 1 and (compute := coarse_arithmetic(m, n, engine.tuning)):
                found = _by_cholesky(a, b, engine.using(compute))
        if found is not None:
            return found
    whole = certified_qr(a, engine)
    with plain_arithmetic(engine.device):
        c = whole.q.mH @ b
    return RFactors(whole.r, c, bool(whole.accepted.all()), whole.attempts)


def _by_reflections(a: torch.Tensor, b: torch.Tensor) -> RFactors | None:
    """The triangle of [A B]."""
    n = a.shape[2]
    # By columns, as LAPACK works: transposed copies take longer than the reflections.
    r = torch.linalg.qr(torch.cat([a.mT, b.mT], 1).mT, mode="r")[1]
    return _believed(a, r[:, :n, :n], r[:, :n, n:], "householder fp64")


def _by_cholesky(a: torch.Tensor, b: torch.Tensor, coarse: Engine) -> RFactors | None:
    """R of a coarse Gram matrix, and that of ``W = A R^-1`` in double precision."""
    matrix = QRMatrices(a, QROptions(FP64, coarse)).single.leading
    first = in_double(gram_r(coarse.operand(matrix.scaled(coarse)), coarse)) / matrix.scales.double()
    w = torch.linalg.solve_triangular(first, a[0], upper=True, left=False)
    gram = w.mH @ w
    second, info = upper_cholesky(gram)
    second = second.masked_fill(info > 0, math.nan)
    gram.diagonal().sub_(1.0)
    # Of a W that is nearly orthonormal Q^H B needs no Q.
    second = torch.where(torch.linalg.matrix_norm(gram) <= WELL_CONDITIONED, second, math.nan)
    c = torch.linalg.solve_triangular(second.mH, w.mH @ b[0], upper=False)
    r = (second @ first).triu_()
    return _believed(a, r[None], c[None], f"cholesky {coarse.arithmetic.name} + cholesky fp64")


def _believed(a: torch.Tensor, r: torch.Tensor, c: torch.Tensor, method: str) -> RFactors | None:
    """R and ``Q^H B``, if R is as good as condition numbers need."""
    rate = float(_rate(a, r).max())
    if not rate <= FAITHFUL:
        return None
    reason = f"(R^H R)^-1 A^H A differs from the identity by {rate:.1e} (bound {FAITHFUL})"
    return RFactors(r, c, True, (Attempt(f"{method} without Q", True, reason),))


def _rate(a: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """``||(R^H R)^-1 A^H A - I||`` for columns of norm 1, estimated from above, shape (batch,)."""
    norms = two_norms(r, 1, keepdim=True)
    norms = torch.where(norms > 0, norms, 1.0)
    # In rows: MKL takes three times as long for a few columns.
    vectors = gaussian_probes(r.shape[2], r.device, r.dtype).mT / norms
    difference = ((vectors @ a.mH) @ a - (vectors @ r.mH) @ r) / norms
    identity = torch.eye(r.shape[2], dtype=r.dtype, device=r.device).expand_as(r)
    inverse = norms.mT * torch.linalg.solve_triangular(r, identity, upper=True)
    distance = torch.linalg.matrix_norm(difference) / PROBES**0.5
    rate = MARGINS[PROBES] * distance * torch.linalg.matrix_norm(inverse).square()
    return torch.nan_to_num(rate, torch.inf)
