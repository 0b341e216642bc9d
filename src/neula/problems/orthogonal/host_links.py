"""The first links of QR on a CPU: Cholesky QR by the compiled core or by products, LAPACK's reflections.

Cholesky QR takes half of the operations of reflections if one pass is enough, as many if it takes two, all of
them in products. The core does it for few columns.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from neula.algorithms.orthogonal.cholesky_qr import MOST_LOST, solved_cholesky_qr
from neula.engines import FP32, FP64, Format
from neula.kernels.core import empty
from neula.kernels.magnitudes import largest_magnitude
from neula.kernels.precision import exact_matmul
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer, Link
from neula.pipeline.inputs import check_finite, surely_finite
from neula.pipeline.refusals import Declined
from neula.problems.orthogonal.by_kernel import LABEL, MeasuredFactors, factorized_by_core
from neula.problems.orthogonal.on_host import measured_on_host
from neula.problems.orthogonal.problem import QRMatrices, QROptions
from neula.problems.orthogonal.ways import QRLink, Solution, by_lapack, reflections


def alone_by_lapack(storage: Format) -> QRLink:
    """LAPACK's reflections of a single matrix, which must not hold NaN or Inf."""
    link = by_lapack(storage)

    def answer(matrices: QRMatrices, before: Solution | None) -> Solution:
        if not surely_finite(matrices.a):
            check_finite(matrices.a[0], largest_magnitude(matrices.a[0], 0), "A")
        return link.answer(matrices, before)

    return Link(link.label, answer)


def by_core(matrices: QRMatrices, before: Solution | None) -> Solution:
    """Cholesky QR of few columns by the compiled core, one matrix or a batch."""
    found = factorized_by_core(matrices.a, matrices.options.target)
    if found is None:
        raise Declined
    return _answer(found, LABEL, matrices)


def by_products(target: Format) -> QRLink:
    """Cholesky QR of a single tall matrix, on the host."""
    label = label_of(target)

    def answer(matrices: QRMatrices, before: Solution | None) -> Solution:
        a = matrices.a[0]
        found = factorized_by_products(a, matrices.options.target)
        if not found.all_accepted:
            raise Declined(f"{found.certificate}: columns may be too dependent for their Gram matrix")
        r = found.r.to(torch.promote_types(a.dtype, found.r.dtype))
        return _answer(found._replace(r=r), label, matrices)

    return Link(label, answer)


def _answer(found: MeasuredFactors, label: str, matrices: QRMatrices) -> Solution:
    """Factors and their measures as an answer."""
    if matrices.options.progress is not None:
        matrices.options.progress(label, 1.0)
    return Answer(found.values, label)


def first_on_host(call: Call, options: QROptions) -> tuple[MeasuredFactors, str] | None:
    """Factors by the first link of the chains on a CPU, and its label; some may not be accepted.

    Of small matrices the records of a chain take longer than the link.
    """
    a, tuning, target = call.first.tensor, options.engine.tuning, options.target
    asked = options.named or options.in_place or options.progress is not None or call.differentiable
    here = a.is_cpu and options.engine.device.type == "cpu" and not call.first.places
    if asked or not (here and 2 <= a.ndim <= 3 and a.dtype == target.dtype and target in (FP32, FP64)):
        return None
    m, n = a.shape[-2:]
    if not (m >= n and a.numel() and tuning.lapack_first(m, n)):
        return None
    with call.computing():
        if (found := factorized_by_core(a, target)) is not None:
            return found, LABEL
        if a.ndim > 2:
            return None
        if tuning.cholesky_qr_first(m, n):
            return factorized_by_products(a, target), label_of(target)
        q, r = torch.linalg.qr(a)
        found = MeasuredFactors.certified(q, r, measured_on_host(a, q, r, target), target)
        return (found, reflections(target)) if found.all_accepted else None


def label_of(target: Format) -> str:
    """Says what was done for an accuracy."""
    return f"cholesky-qr {_storage(target).name}, repeated"


def factorized_by_products(a: torch.Tensor, target: Format) -> MeasuredFactors:
    """Cholesky QR of one matrix, and of its Q where random vectors see that too little is orthogonal.

    Parameters
    ----------
    a : Tensor, shape (m, n), m >= n
        On the host, of any floating-point dtype.
    target : Format

    Returns
    -------
    MeasuredFactors
        NaN is all that is measured where columns are too dependent: there are no factors.
    """
    a = a.to(torch.promote_types(a.dtype, torch.float32))
    given = a.to(_storage(target).dtype)
    q = empty(*a.shape, dtype=given.dtype) if a.stride(1) == 1 else empty(*a.T.shape, dtype=given.dtype).T
    r = solved_cholesky_qr(given, out=q)
    found = _measured(a, q, r, target)
    lost = found.certificate.orthogonality
    if r is None or not found.certificate.orthogonality_bound < lost <= MOST_LOST:
        return found
    again = solved_cholesky_qr(q, out=q)
    return _measured(a, q, None if again is None else exact_matmul(again, r), target)


def _storage(target: Format) -> Format:
    return FP64 if target is FP64 else FP32


def _measured(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor | None, target: Format) -> MeasuredFactors:
    if r is None:
        nothing = q.new_full((q.shape[1],) * 2, math.nan), np.full((4, 1), math.nan)
        return MeasuredFactors.certified(q, *nothing, target)
    return MeasuredFactors.certified(q, r, measured_on_host(a, q, r, target), target)
