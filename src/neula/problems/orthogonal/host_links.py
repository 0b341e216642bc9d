"""The first links of QR on a CPU: Cholesky QR by the compiled core or by products, LAPACK's reflections.

A kernel does the same for small matrices on a GPU.

Cholesky QR takes half of the operations of reflections if one pass is enough, as many if it takes two, all of
them in products. The core does it for few columns.
"""

from __future__ import annotations

import math

import torch

from neula.algorithms.orthogonal.cholesky_qr import MOST_LOST, solved_cholesky_qr
from neula.certificates.bounds import orthogonality_bound
from neula.certificates.qr import measures_of_norms
from neula.engines import FP32, FP64, Format
from neula.engines.formats import matching_dtype
from neula.kernels.core import core, empty
from neula.kernels.magnitudes import largest_magnitude
from neula.kernels.precision import exact_matmul
from neula.kernels.qr.cholesky_qr_host import cholesky_qr
from neula.kernels.small_problems.small_qr import small_qr
from neula.pipeline.call import HostTuning
from neula.pipeline.chain import Answer, Declined, Link, answered
from neula.pipeline.inputs import check_finite, surely_finite
from neula.problems.orthogonal.judge import QRJudge
from neula.problems.orthogonal.problem import (
    QRMatrices,
    QROptions,
    QRValues,
    measured_on_host,
    probe_vectors,
    trusted,
)
from neula.problems.orthogonal.ways import QRLink, Solution, by_lapack

COLUMNS = 128
"""Up to so many the factor of a Gram matrix stays in a cache, and LAPACK's reflections take more time."""

PART = 0.5
"""Part of the bound on orthogonality that steps without repetition may lose."""


SMALL = 0.125
"""Part of the bound for the kernel of small matrices on a GPU, whose passes are short."""


def is_for_core(m: int, n: int, target: Format) -> bool:
    """Whether the core factorizes matrices of this shape to this accuracy."""
    return m >= n > 0 and n <= COLUMNS and target in (FP32, FP64) and core() is not None


def is_for_kernel(m: int, n: int, options: QROptions) -> bool:
    """Whether a kernel of a GPU takes less time for matrices of this shape than launches."""
    few = options.by_host and 0 < m * n * n <= options.engine.tuning[HostTuning].by_host
    return few and m >= n and options.target in (FP32, FP64)


def by_core(matrices: QRMatrices, before: Solution | None, *, label: str) -> Solution:
    """Cholesky QR of few columns by the compiled core, one matrix or a batch."""
    a, target = matrices.a, matrices.options.target
    n, found = a.shape[2], None
    if a.dtype == target.dtype:
        found = cholesky_qr(a, probe_vectors(n), PART * orthogonality_bound(target, n))
    if found is None:
        raise Declined
    q, r, numbers = found
    values = QRValues(q, r, torch.from_numpy(trusted(numbers, target)).T)
    return answered(values, label, matrices.options.progress)


def by_small_kernel(matrices: QRMatrices, before: Solution | None, *, label: str) -> Solution:
    """QR by one GPU kernel that also computes the norms of errors; reading these synchronizes."""
    a, target = matrices.a, matrices.options.target
    n, enough = a.shape[2], SMALL * orthogonality_bound(target, a.shape[2])
    if a.dtype != target.dtype or not small_qr.takes(a, enough):
        raise Declined
    q, r, norms = small_qr.kernel(a, enough)
    measured = measures_of_norms(norms.cpu().numpy(), n)
    # The judge reads what is on the host.
    return Answer(QRValues(q, r, norms.new_empty(len(a), len(measured))), label, measured=measured)


def alone_by_lapack(storage: Format) -> QRLink:
    """LAPACK's reflections of a single matrix, which must not hold NaN or Inf."""
    link = by_lapack(storage)

    def answer(matrices: QRMatrices, before: Solution | None) -> Solution:
        if not surely_finite(matrices.a):
            check_finite(matrices.a[0], largest_magnitude(matrices.a[0], 0), "A")
        return link.answer(matrices, before)

    return Link(link.label, answer)


def by_products(matrices: QRMatrices, before: Solution | None, *, label: str) -> Solution:
    """Cholesky QR of a single tall matrix, and of its Q where random vectors see that too little is
    orthogonal.
    """
    target, a = matrices.options.target, matrices.a[0]
    a = a.to(torch.promote_types(a.dtype, torch.float32))
    given = a.to(matching_dtype((FP64 if target is FP64 else FP32).dtype, a.dtype))
    by_rows = a.stride(1) == 1
    room = torch.empty if a.is_complex() else empty
    q = room(*a.shape, dtype=given.dtype) if by_rows else room(*a.T.shape, dtype=given.dtype).T
    r = solved_cholesky_qr(given, out=q)
    values = _measured(a, q, r, target)
    found = QRJudge(a.shape, target).certificate(values)
    if r is not None and found.orthogonality_bound < found.orthogonality <= MOST_LOST:
        again = solved_cholesky_qr(q, out=q)
        values = _measured(a, q, None if again is None else exact_matmul(again, r), target)
    return answered(values, label, matrices.options.progress)


def _measured(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor | None, target: Format) -> QRValues:
    """NaN is all that is measured where columns are too dependent: there are no factors."""
    if r is None:
        return QRValues.of_one(
            q, q.new_full((q.shape[1],) * 2, math.nan), q.new_full((4,), math.nan, dtype=torch.float64)
        )
    measures = torch.from_numpy(measured_on_host(a, q, r, target))[:, 0]
    return QRValues.of_one(q, r.to(torch.promote_types(a.dtype, r.dtype)), measures)
