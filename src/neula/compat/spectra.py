"""Eigenvectors and singular vectors of other libraries, measured; eigenvalues and singular values alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch

from neula.certificates.bounds import measurement_error
from neula.certificates.orthogonality import PROBES
from neula.certificates.spectra import SpectralBounds
from neula.compat.drop_in import SMALL, drop_in, need_finite, probes_of, squared, torch_dtype
from neula.engines import format_of
from neula.kernels.phases import adjoint


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
        copy = np.array(
            a, a.dtype if a.dtype.kind in "fc" else np.float64, order="C"
        )  # torch writes everywhere
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
