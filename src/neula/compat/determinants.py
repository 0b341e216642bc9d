"""Determinants and inverses by LU factors, measured: what the drop-ins of all three libraries share."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

import neula
from neula.certificates.factored import logdet_error
from neula.certificates.forward_error import SURE
from neula.certificates.orthogonality import directions
from neula.compat.drop_in import need
from neula.compat.least_squares import is_accurate_inverse
from neula.engines import FP32, format_of
from neula.engines.formats import double_of, in_double
from neula.errors import warn
from neula.kernels import scipy_linalg
from neula.kernels.phases import phases
from neula.kernels.precision import plain_arithmetic

LAPACKS = {"f": "s", "d": "d", "F": "c", "D": "z"}
"""First letters of LAPACK's routines, by the characters of NumPy's dtypes."""


UNSURE = """IllConditionedWarning
    If no digit of a determinant is guaranteed."""
"""Warnings that the docstrings of drop-ins for determinants list."""


class Determinants(NamedTuple):
    """Determinants of matrices, shape (...), in the dtype that they were factorized in."""

    sign: torch.Tensor  # of complex matrices a number of magnitude 1
    logabsdet: torch.Tensor
    product: torch.Tensor  # the determinant itself, which may overflow


def measured_determinants(a: torch.Tensor) -> Determinants:
    """Determinants by LU with partial pivoting, with a warning if no digit is guaranteed.

    Where that is so in single precision, they are computed in double precision. The factors solve for
    products of A with Gaussian vectors, from which :mod:`neula.certificates.factored` bounds the error.
    """
    need(a.ndim >= 2 and a.numel() > 0 and a.shape[-2] == a.shape[-1])
    sign, logs, error = _of_one(a.numpy()) if a.is_cpu and a.ndim == 2 else _of_batch(a)
    error = error + a.shape[-1] * format_of(a.dtype).u * abs(logs).sum(-1)
    worst, logabsdet = float(error.max()), logs.sum(-1)
    need(worst == worst)  # not NaN
    if not worst <= SURE and format_of(a.dtype) is FP32:
        sign, logs, product = measured_determinants(in_double(a))
        return Determinants(sign.to(a.dtype), logs.float(), product.to(a.dtype))
    if not worst <= SURE:
        text = f"no digit of the determinant is guaranteed: the bound on its relative error is {worst:.1e}"
        warn(text, neula.IllConditionedWarning)
    logabsdet = torch.as_tensor(logabsdet, dtype=torch.float64, device=a.device)
    sign = torch.as_tensor(sign, dtype=double_of(a.dtype), device=a.device)
    product = (sign * logabsdet.exp()).to(a.dtype)
    return Determinants(sign.to(a.dtype), logabsdet.to(product.real.dtype), product)


def _of_one(a: np.ndarray) -> tuple[Any, Any, Any]:
    """Sign, logarithms of pivots and the bound of one matrix: microseconds count.

    Of the transpose, which is a matrix in Fortran's order and has the same determinant.
    """
    a = a.T
    kind, dtype = LAPACKS[a.dtype.char], torch.complex128 if a.dtype.kind == "c" else torch.float64
    g = directions(len(a), torch.device("cpu"), dtype).numpy()
    factorize, solve = (getattr(scipy_linalg.lapack, f"{kind}getr{x}") for x in "fs")
    lu, pivots, singular = factorize(a)
    need(not singular)
    with np.errstate(all="ignore"):  # NaN is not accepted
        image = solve(lu, pivots, a @ g.astype(a.dtype, copy=False))[0] - g
        diagonal = lu.diagonal()
        swaps = (pivots != np.arange(len(a))).sum()
        logs = np.log(abs(diagonal.astype(g.dtype)))
        return (1 - 2 * (swaps % 2)) * (diagonal / abs(diagonal)).prod(), logs, logdet_error(image, g)


def _of_batch(a: torch.Tensor) -> tuple[Any, Any, Any]:
    """Signs, logarithms of pivots and bounds of several matrices, on any device."""
    n, g = a.shape[-1], directions(a.shape[-1], a.device, a.dtype).to(a.dtype)
    with plain_arithmetic(a.device):
        lu, pivots, info = torch.linalg.lu_factor_ex(a)
        need(not bool(info.any()))
        image = torch.linalg.lu_solve(lu, pivots, a @ g) - g
        diagonal = lu.diagonal(dim1=-2, dim2=-1)
        swapped = pivots != torch.arange(1, n + 1, dtype=pivots.dtype, device=a.device)
        sign = (1 - 2 * (swapped.sum(-1) % 2)) * phases(in_double(diagonal)).prod(-1)
        return sign, in_double(diagonal).abs().log(), logdet_error(image, g)


def measured_inverse(a: Any, found: Any) -> Any:
    """An inverse by another library, or where fewer than half of its digits are correct neula's."""
    need(0 not in a.shape)
    tensors = isinstance(a, torch.Tensor)
    if is_accurate_inverse(*((a.detach(), found.detach()) if tensors else (a, found))):
        return found
    n = a.shape[-1]
    eye = torch.eye(n, dtype=a.dtype, device=a.device) if tensors else np.eye(n, dtype=a.dtype)
    return neula.solve(a, eye).x
