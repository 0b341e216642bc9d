"""Cholesky QR on a CPU by calls of the library, for more columns than the compiled core takes.

Half of the operations of reflections where one pass will do, as many where it takes two, all of them in
products.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from neula.algorithms.orthogonal.cholesky_qr import MOST_LOST, solved_cholesky_qr
from neula.engines import FP32, FP64, Format
from neula.kernels.core import empty
from neula.kernels.precision import exact_matmul
from neula.kernels.probes_host import FOUND
from neula.problems.orthogonal.by_kernel import KernelQRFactors, certified
from neula.problems.orthogonal.on_host import measured_on_host
from neula.problems.orthogonal.problem import QROptions


def label_of(target: Format) -> str:
    """Says what was done for an accuracy."""
    return f"cholesky-qr {_storage(target).name}, repeated"


def factorized_by_products(a: torch.Tensor, options: QROptions) -> KernelQRFactors:
    """Cholesky QR of one matrix, and of its Q where random vectors see that too little is orthogonal.

    Parameters
    ----------
    a : Tensor, shape (m, n), m >= n
        On the host, of any floating-point dtype.
    options : QROptions

    Returns
    -------
    KernelQRFactors
        NaN is all that is measured where columns are too dependent: there are no factors.
    """
    a = a.to(torch.promote_types(a.dtype, torch.float32))
    given = a.to(_storage(options.target).dtype)
    q = empty(*a.shape, dtype=given.dtype) if a.stride(1) == 1 else empty(*a.T.shape, dtype=given.dtype).T
    r = solved_cholesky_qr(given, out=q)
    found = _measured(a, q, r, options)
    lost = found.certificate.orthogonality
    if r is None or not found.certificate.orthogonality_bound < lost <= MOST_LOST:
        return found
    again = solved_cholesky_qr(q, out=q)
    return _measured(a, q, None if again is None else exact_matmul(again, r), options)


def _storage(target: Format) -> Format:
    return FP64 if target is FP64 else FP32


def _measured(
    a: torch.Tensor, q: torch.Tensor, r: torch.Tensor | None, options: QROptions
) -> KernelQRFactors:
    if r is None:
        r, measures = q, np.full((FOUND, 1), math.nan)
    else:
        measures = measured_on_host(a, q, r, options)
    return KernelQRFactors(q, r, measures, *certified(measures, a.shape, options.target))
