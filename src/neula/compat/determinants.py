"""Determinants and inverses by LU factors, measured: what the drop-ins of all three libraries share."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

import neula
from neula.certificates.factored import logdet_error
from neula.certificates.forward_error import SURE
from neula.certificates.orthogonality import directions
from neula.compat.drop_in import need
from neula.compat.least_squares import is_accurate_inverse
from neula.engines import FP32, FP64, format_of
from neula.engines.formats import in_double
from neula.errors import warn
from neula.kernels import scipy_linalg
from neula.kernels.phases import phases
from neula.kernels.precision import plain_arithmetic
from neula.pipeline.inputs import take

LAPACKS = {"f": "s", "d": "d", "F": "c", "D": "z"}
"""First letters of LAPACK's routines, by the characters of NumPy's dtypes."""


UNSURE = """IllConditionedWarning
    If no digit of a determinant is guaranteed."""
"""Warnings that the docstrings of drop-ins for determinants list."""


class Determinants(NamedTuple):
    """Determinants of matrices, shape (...), in the dtype of the matrices: arrays, or tensors of tensors."""

    sign: Any  # of complex matrices a number of magnitude 1
    logabsdet: Any
    product: Any  # the determinant itself, which may overflow


def measured_determinants(a: Any) -> Determinants:
    """Determinants by LU with partial pivoting, with a warning if no digit is guaranteed.

    Where that is so in single precision, they are computed in double precision. The factors solve for
    products of A with Gaussian vectors, from which :mod:`neula.certificates.factored` bounds the error.
    """
    need(a.ndim >= 2 and 0 not in a.shape and a.shape[-2] == a.shape[-1])
    if isinstance(a, torch.Tensor):
        alone = a.ndim == 2 and a.is_cpu
        found = _of_array(a.numpy()) if alone else _of_tensors(a)
        return Determinants(*(torch.from_numpy(np.asarray(x)) for x in found)) if alone else found
    if a.ndim == 2:
        return _of_array(a)
    return Determinants(*(x.numpy() for x in _of_tensors(take(a, "a", or_complex=True).tensor)))


def _of_array(a: np.ndarray) -> Determinants:
    """The determinant of one matrix: microseconds count."""
    with np.errstate(all="ignore"):  # NaN is not accepted, and the determinant may overflow
        sign, logs, error = _of_one(a)
        kind, real, logabsdet = a.dtype.type, a.real.dtype.type, logs.sum()
        if _is_unsure(error, logs, single=a.dtype.char in "fF"):
            found = _of_array(a.astype(np.result_type(a, np.float64)))
            return Determinants(kind(found.sign), real(found.logabsdet), kind(found.product))
        return Determinants(kind(sign), real(logabsdet), kind(sign * np.exp(logabsdet)))


def _of_tensors(a: torch.Tensor) -> Determinants:
    """Determinants of several matrices, on any device."""
    sign, logs, error = _of_batch(a)
    if _is_unsure(error, logs, single=format_of(a.dtype) is FP32):
        found = _of_tensors(in_double(a))
        return Determinants(found.sign.to(a.dtype), found.logabsdet.float(), found.product.to(a.dtype))
    product = (sign * logs.sum(-1).exp()).to(a.dtype)
    return Determinants(sign.to(a.dtype), logs.sum(-1).to(product.real.dtype), product)


def _is_unsure(error: Any, logs: Any, *, single: bool) -> bool:
    """Whether single precision leaves no digit; a warning where double precision leaves none."""
    rounded = logs.shape[-1] * (FP32 if single else FP64).u * abs(logs).sum(-1)
    worst = float((error + rounded).max())
    need(worst == worst)  # not NaN
    if not worst <= SURE and not single:
        text = f"no digit of the determinant is guaranteed: the bound on its relative error is {worst:.1e}"
        warn(text, neula.IllConditionedWarning)
    return single and not worst <= SURE


@lru_cache(256)
def _tools(n: int, char: str) -> tuple[Any, Any, np.ndarray, np.ndarray]:
    """LAPACK's routines to factorize and solve, and Gaussian vectors in double precision and in a dtype."""
    dtype = torch.complex128 if char in "FD" else torch.float64
    g = directions(n, torch.device("cpu"), dtype).numpy()
    routines = (getattr(scipy_linalg.lapack, f"{LAPACKS[char]}getr{x}") for x in "fs")
    return *routines, g, g.astype(char, copy=False)


def _of_one(a: np.ndarray) -> tuple[Any, Any, Any]:
    """Sign, logarithms of pivots and the bound of one matrix.

    Of the transpose, which is a matrix in Fortran's order and has the same determinant.
    """
    a = a.T
    factorize, solve, g, rounded = _tools(len(a), a.dtype.char)
    lu, pivots, singular = factorize(a)
    need(not singular)
    image = solve(lu, pivots, a @ rounded)[0] - g
    diagonal = lu.diagonal()
    swaps = (pivots != np.arange(len(a))).sum()
    sizes = abs(diagonal)
    return (
        (1 - 2 * (swaps % 2)) * (diagonal / sizes).prod(),
        np.log(sizes.astype(g.real.dtype)),
        logdet_error(image, g),
    )


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
