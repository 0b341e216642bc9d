"""Answers of other libraries, measured, and better ones; those that need no measurement."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

import neula
from neula.certificates.bounds import measurement_error
from neula.certificates.factored import logdet_error
from neula.certificates.forward_error import SURE
from neula.certificates.orthogonality import PROBES, directions
from neula.certificates.spectra import SpectralBounds
from neula.compat.drop_in import (
    SMALL,
    drop_in,
    need,
    need_finite,
    numbers_of,
    probes_of,
    squared,
    torch_dtype,
)
from neula.engines import FP32, FP64, format_of
from neula.engines.formats import in_double
from neula.errors import warn
from neula.kernels import scipy_linalg
from neula.kernels.phases import adjoint, phases
from neula.kernels.precision import plain_arithmetic
from neula.pipeline.call import restored
from neula.pipeline.inputs import take

EPS = float(np.finfo(np.float64).eps)


def is_accurate_solution(a: np.ndarray, b: np.ndarray, x: np.ndarray, s: np.ndarray) -> bool:
    """Whether half of the digits, or more, of solutions of least squares of full rank are correct.

    The error is ``(A^H A)^-1 A^H (b - A x)``; its norm is at most that of the gradient, which is computed,
    and of the rounding errors of that over the square of the smallest singular value. The s are the singular
    values of A. There may be several right-hand sides.
    """
    if len(a) < a.shape[1]:  # wide matrices have other solutions: of these nothing is said
        return False
    with np.errstate(all="ignore"):  # NaN is not accepted
        residual = b - a @ x
        gradient, size, left = (np.sqrt(squared(y).sum(0)) for y in (adjoint(a) @ residual, x, residual))
        largest, smallest = (float(each) for each in (s[0], s[-1]))
        rounding = sum(a.shape) * np.finfo(x.dtype).eps * largest * (left + largest * size)
        return bool((gradient + rounding <= np.finfo(x.dtype).eps ** 0.5 * smallest**2 * size).all())


def is_accurate_minimum(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> bool:
    """Whether half of the digits, or more, of the solution of a problem with ``x >= 0`` are correct.

    Let v be ``A^T (b - A x)`` where x is positive, and its positive part elsewhere. The minimum y has
    ``(x - y)^T A^T (b - A y) <= 0``, so that ``||A (x - y)||^2 <= v^T (y - x)``, and the error is at most
    ``||v||`` over the square of the smallest singular value of A. That is at least ``1 / ||R^-1||_F`` for the
    R of A. The x is not negative.
    """
    with np.errstate(all="ignore"):  # NaN is not accepted
        gram = a.T @ a
        r, dependent = scipy_linalg.lapack.dpotrf(gram)
        if dependent:
            return False
        inverse, _ = scipy_linalg.lapack.dtrtri(r, overwrite_c=1)
        square, norm = 1 / np.vdot(inverse, inverse), gram.trace() ** 0.5
        residual = b - a @ x
        gradient = residual @ a
        wrong = np.where(x > 0, gradient, np.maximum(gradient, 0.0))
        wrong, size, left = (math.sqrt(y @ y) for y in (wrong, x, residual))
        rounding = sum(a.shape) * EPS * norm
        return bool(
            2 * rounding * norm <= square
            and wrong + rounding * (left + norm * size) <= EPS**0.5 * square / 2 * size
        )


def refined_solution(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The solution of a problem of full rank by :func:`neula.lstsq`, and the squares of its residuals.

    neula's cutoff is for A with normalized columns. Full rank by another cutoff stays full rank here. There
    are no squares unless A is tall.
    """
    result = neula.lstsq(a, b, rcond=0.0)
    squares = np.square(np.atleast_1d(result.residual_norm)).astype(result.x.real.dtype)
    return result.x, squares if len(a) > a.shape[1] else squares[:0]


def is_accurate_inverse(a: Any, x: Any) -> bool:
    """Whether half of the digits, or more, of all rows of pseudoinverses by an SVD are correct.

    The SVD is that of A + E, with ``||E|| <= max(m, n) u ||A||``. Whatever counts as zero,
    ``X (A + E) X = X`` and ``(A + E) X`` is Hermitian: what :func:`is_pseudoinverse` measures is at most
    ``3 ||E|| ||X||``, and need not be measured where A is well-conditioned.
    """
    eps = numbers_of(x).eps
    with np.errstate(all="ignore"):
        # Norms of whole batches: each matrix has a smaller one. No BLAS: SciPy's threads still look for work.
        norms = _norm_of_all(a) * _norm_of_all(x)
    return 3 * max(a.shape[-2:]) * eps * norms <= eps**0.5 or is_pseudoinverse(a, x)


def _norm_of_all(x: Any) -> float:
    return float(torch.linalg.vector_norm(x) if isinstance(x, torch.Tensor) else squared(x).sum() ** 0.5)


def is_pseudoinverse(a: Any, x: Any) -> bool:
    """Whether half of the digits, or more, of all rows of pseudoinverses are measured to be correct.

    For a tall A of full rank and ``S = A X - (A X)^H``, the error ``X - A^+`` is
    ``(X A - I) A^+ + A^+ S (I - A A^+)``. Five products with random vectors estimate the norms of S and of
    ``D (X A X - X)``, where D divides rows of X by their norms. Below full rank, which the peer decides, both
    vanish if X is the pseudoinverse of the part of A that it has kept. Both are arrays, or both tensors.
    """
    if a.shape[-2] < a.shape[-1]:
        a, x = adjoint(a), adjoint(x)
    m, n = a.shape[-2:]
    vectors = probes_of(m, x).swapaxes(-1, -2)  # rows: torch multiplies columns in three times the time
    at, xt = adjoint(a), adjoint(x)
    with np.errstate(all="ignore"):  # NaN is not accepted
        norms = squared(x).sum(-1)[..., None, :] ** 0.5
        once = vectors @ xt
        image = once @ at
        twice, skew = (image @ xt - once) / norms, image - (vectors @ a) @ x
        errors = squared(twice).sum((-2, -1)) / n + squared(skew).sum((-2, -1))
        return bool((errors <= PROBES * numbers_of(x).eps).all())


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
        single = a.dtype.char in "fF"
        if _is_doubtful(float(error + _rounding(logs, single=single)), single=single):
            found = _of_array(a.astype(np.result_type(a, np.float64)))
            return Determinants(kind(found.sign), real(found.logabsdet), kind(found.product))
        return Determinants(kind(sign), real(logabsdet), kind(sign * np.exp(logabsdet)))


def _of_tensors(a: torch.Tensor) -> Determinants:
    """Determinants of several matrices, on any device."""
    sign, logs, error = _of_batch(a)
    single = format_of(a.dtype) is FP32
    if _is_doubtful(float((error + _rounding(logs, single=single)).max()), single=single):
        found = _of_tensors(in_double(a))
        return Determinants(found.sign.to(a.dtype), found.logabsdet.float(), found.product.to(a.dtype))
    product = (sign * logs.sum(-1).exp()).to(a.dtype)
    return Determinants(sign.to(a.dtype), logs.sum(-1).to(product.real.dtype), product)


def _rounding(logs: Any, *, single: bool) -> Any:
    return logs.shape[-1] * (FP32 if single else FP64).u * abs(logs).sum(-1)


def _is_doubtful(worst: float, *, single: bool) -> bool:
    """Whether single precision leaves no digit; a warning where double precision leaves none."""
    need(worst == worst)  # not NaN
    if not worst <= SURE and not single:
        text = f"no digit of the determinant is guaranteed: the bound on its relative error is {worst:.1e}"
        warn(text, neula.IllConditionedWarning)
    return single and not worst <= SURE


@lru_cache(256)
def _tools(n: int, char: str) -> tuple[Any, np.ndarray, np.ndarray]:
    """LAPACK's driver, and Gaussian vectors in double precision and in a dtype.

    Not its two routines: OpenBLAS substitutes in all of its threads, whatever the order.
    """
    dtype = torch.complex128 if char in "FD" else torch.float64
    g = directions(n, torch.device("cpu"), dtype).numpy()
    solve = getattr(scipy_linalg.lapack, f"{LAPACKS[char]}gesv")
    return solve, g, g.astype(char, copy=False)


def _of_one(a: np.ndarray) -> tuple[Any, Any, Any]:
    """Sign, logarithms of pivots and the bound of one matrix.

    Of the transpose, which is a matrix in Fortran's order and has the same determinant.
    """
    a = a.T
    solve, g, rounded = _tools(len(a), a.dtype.char)
    lu, pivots, image, singular = solve(a, a @ rounded)
    need(not singular)
    image -= g
    diagonal = lu.diagonal()
    swaps = np.count_nonzero(pivots != np.arange(len(a)))
    sizes = abs(diagonal)
    return (
        (1 - 2 * (swaps % 2)) * (diagonal / sizes).prod(),
        np.log(sizes.astype(g.real.dtype)),
        logdet_error(image, g),
    )


@restored
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


def are_values(peer: ModuleType, name: str, home: str, check: Callable[..., None]) -> Any:
    """Drop-in of a function of eigenvalues or singular values alone: the peer's own, of finite matrices.

    Householder reductions and the QR algorithm, or divide and conquer, compute the values of a matrix that
    differs from A by a modest multiple of u times its norm (G. H. Golub, C. F. Van Loan, "Matrix
    Computations", 2013, sections 8.3.5 and 8.6.3), and there is no evidence to return. With NaN and Inf
    LAPACK may not end, or return zeros: ``check`` takes the arguments and refuses them. The drop-in says that
    it is from the module ``home``.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return getattr(peer, name)(*args, **kwargs)

    if inspect.isfunction(inspect.unwrap(getattr(peer, name))):  # a builtin has no signature to take over
        functools.update_wrapper(call, getattr(peer, name))
    call.__module__, call.__name__, call.__qualname__ = home, name, name
    call.__doc__ = f""":func:`{peer.__name__}.{name}` of finite matrices.

    NaN and Inf are the error that decompositions raise if they do not converge: with these LAPACK may never
    end.
    """
    return drop_in(peer, warns="")(call)


def need_finite_triangle(a: np.ndarray, error: Exception, *, lower: bool) -> None:
    """Refuse NaN and Inf in the triangle that is read."""
    if a.ndim >= 2 and a.dtype.kind in "fc" and not np.isfinite(a).all():
        need_finite((np.tril if lower else np.triu)(a), error)


def is_for_lapack(a: Any) -> bool:
    """Whether matrices are small, and LAPACK's vectors as accurate as their precision allows.

    Its drivers take the QR algorithm up to 25 columns, and divide and conquer beyond, which computes vectors
    as stably as values (:func:`are_values`; M. Gu, S. C. Eisenstat, "A divide-and-conquer algorithm for the
    symmetric tridiagonal eigenproblem", 1995).
    """
    return bool(a.shape[-2] * a.shape[-1] <= SMALL)


def mirrored(a: Any, *, upper: bool = False, hermitian: bool = True) -> Any:
    """The Hermitian or symmetric matrix of which one triangle is read; in float64 unless it has floats."""
    if isinstance(a, np.ndarray):
        other = adjoint(a) if hermitian else a.swapaxes(-1, -2)
        if a.dtype.kind in "fc" and bool((a == other).all()):
            return a
        # In C's order: torch writes everywhere.
        copy = np.array(a, a.dtype if a.dtype.kind in "fc" else np.float64, order="C")
        return mirrored(torch.from_numpy(copy), upper=upper, hermitian=hermitian).numpy()
    turned = "mH" if hermitian else "mT"
    low = (getattr(a, turned) if upper else a).tril()
    whole = low + getattr(low.tril(-1), turned)
    if hermitian and whole.is_complex():
        whole.diagonal(0, -2, -1).imag.zero_()
    return whole


def are_eigenvectors(a: Any, w: Any, v: Any) -> bool:
    """Whether ``A V = V diag(w)`` and ``V^H V = I``, as accurately as neula accepts it.

    Gaussian vectors estimate Frobenius norms. A is Hermitian; there may be fewer eigenvalues than columns.
    """
    with np.errstate(all="ignore"):  # NaN is not accepted
        g = probes_of(v.shape[-1], v)
        image, gram, scale = v @ (w[..., None] * g), v @ g, _norm_of(a, w)
        residual = _norm((a @ gram - image) / scale[..., None, None]) + 0 * scale  # NaN if the norm overflows
        return _are_small(residual, _norm(adjoint(v) @ gram - g), v)


def are_eigenvectors_of_pencil(a: Any, b: Any, w: Any, v: Any) -> bool:
    """Whether ``A V = B V diag(w)`` and ``V^H B V = I``, for a positive definite B.

    As :func:`are_eigenvectors`; each column of the residual is relative to ``(||A|| + |w| ||B||) ||v||``.
    """
    with np.errstate(all="ignore"):
        g = probes_of(v.shape[-1], v)
        scale = (_norm(a) + abs(w) * _norm(b)) * squared(v).sum(-2) ** 0.5
        scaled, gram = g / scale[..., None], b @ (v @ g)
        residual = _norm(a @ (v @ scaled) - b @ (v @ (w[..., None] * scaled))) + 0 * scale.sum(-1)
        return _are_small(residual, _norm(adjoint(v) @ gram - g), v, 0.1)


def are_singular_vectors(a: Any, u: Any, s: Any, vh: Any) -> bool:
    """Whether ``A = U diag(s) V^H`` with orthonormal U and V, full or not (:func:`are_eigenvectors`)."""
    if a.shape[-2] < a.shape[-1]:
        a, u, vh = adjoint(a), adjoint(vh), adjoint(u)
    with np.errstate(all="ignore"):
        v, scale = adjoint(vh), _norm_of(a, s)
        g, h = probes_of(v.shape[-1], v), probes_of(u.shape[-1], u)
        image, gram = u[..., : s.shape[-1]] @ (s[..., None] * g), v @ g
        residual = _norm((a @ gram - image) / scale[..., None, None]) + 0 * scale
        lost = _norm(vh @ gram - g), _norm(adjoint(u) @ (u @ h) - h)
        return all(_are_small(residual, each, u) for each in lost)


def _are_small(residual: Any, lost: Any, v: Any, least: float = 0.0) -> bool:
    """Whether measured norms are within their bounds and the rounding errors of the measurement."""
    bounds = _bounds(torch_dtype(v), *v.shape[-2:], least)
    return all(float(x.max() if x.ndim else x) <= y for x, y in zip((residual, lost), bounds, strict=True))


@functools.lru_cache(maxsize=64)
def _bounds(dtype: torch.dtype, m: int, k: int, least: float) -> tuple[float, float]:
    bounds = SpectralBounds.for_order(format_of(dtype), k, symmetric=False)
    rounding = measurement_error(m, dtype.to_real())
    residual, lost = bounds.residual + rounding, max(bounds.orthogonality, least) + rounding
    return PROBES**0.5 * residual, PROBES**0.5 * lost


def _norm_of(a: Any, values: Any) -> Any:
    """The norm of A, which is that of all of its values if they are accepted."""
    return (squared(values).sum(-1) ** 0.5) if values.shape[-1] == min(a.shape[-2:]) else _norm(a)


def _norm(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.linalg.vector_norm(x, dim=(-2, -1))
    return np.vdot(x, x).real ** 0.5 if x.ndim == 2 else squared(x).sum((-2, -1)) ** 0.5
