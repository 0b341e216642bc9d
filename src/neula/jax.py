"""Least squares, linear systems and factorizations inside JAX's transformations.

Functions that JAX traces have no numbers, and neula decides by numbers. So the functions here are called back
by the compiled program (:func:`jax.pure_callback`), on the host, with ``jit``, ``vmap`` (a batch is one call)
and derivatives of any order in both modes. Outside of traced functions those of :mod:`neula` take the arrays
of JAX where they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

from neula.errors import needs_extra

if find_spec("jax") is None:
    raise needs_extra("neula.jax", "JAX", "jax")

import jax
import numpy as np
import torch
from jax import numpy as jnp
from jax.scipy.linalg import solve_triangular

from neula.kernels.phases import adjoint
from neula.pipeline.operators import Operator
from neula.problems.operators.factorizations import CHOLESKY, QR
from neula.problems.operators.solutions import LSTSQ, SOLVE
from neula.problems.signatures import Structure

__all__ = ["cholesky", "lstsq", "qr", "solve"]

HALF = {"float16": "fp16", "bfloat16": "bf16"}
"""Accuracies of dtypes that are computed with, and returned, in float32."""

Options = tuple[Any, ...]
"""Options of an operator, which follow the operands."""


class TracedSolution(NamedTuple):
    """A solution with its evidence, one number for each system of a batch.

    Attributes
    ----------
    x : Array
    backward_errors : Array, shape (*batch,)
    forward_errors : Array
        Bounds on the errors of x, for each right-hand side.
    accepted : Array of bool, shape (*batch,)
        Whether x is certified to the requested accuracy.
    ranks : Array of int, shape (*batch,), or None
        Of least squares.
    """

    x: jax.Array
    backward_errors: jax.Array
    forward_errors: jax.Array
    accepted: jax.Array
    ranks: jax.Array | None = None


class TracedQR(NamedTuple):
    """Q and R, and for each matrix of a batch whether they are certified to the requested accuracy."""

    Q: jax.Array
    R: jax.Array
    accepted: jax.Array


class TracedCholesky(NamedTuple):
    """L, and for each matrix of a batch whether it is certified to the requested accuracy."""

    L: jax.Array
    accepted: jax.Array


def lstsq(
    A: Any,
    b: Any,
    *,
    accuracy: str | None = None,
    engine: str = "auto",
    rcond: float | None = None,
    strict: bool = False,
) -> TracedSolution:
    """Least squares ``min ||b - A x||`` by :func:`neula.lstsq`.

    Parameters
    ----------
    A : array_like, shape (..., m, n)
    b : array_like, shape (m,) or (..., m, k)
    accuracy, engine, rcond, strict : optional
        As for :func:`neula.lstsq`; the engine by its name.

    Returns
    -------
    TracedSolution
        Derivatives of x are those of the exact solution, computed in the dtype of x, and NaN below full rank.

    Warns
    -----
    AccuracyWarning
        When the compiled program runs, if x is not certified.

    Examples
    --------
    >>> from jax import config, grad, numpy as jnp
    >>> config.update("jax_enable_x64", True)
    >>> from neula.jax import lstsq
    >>> A, b = jnp.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]), jnp.array([1.0, 3.0, 5.0])
    >>> lstsq(A, b).x.round(12)
    Array([1., 2.], dtype=float64)
    >>> grad(lambda b: lstsq(A, b).x[1])(b).round(12)
    Array([-0.5,  0. ,  0.5], dtype=float64)
    """
    (matrix, rhs), accuracy = _operands(accuracy, A, b)
    options = accuracy, engine, strict, None, None, rcond
    x, ranks, backward, forward, accepted = _lstsq(*_system(matrix, rhs), options)
    return _solution(TracedSolution(x, backward, forward, accepted, ranks), rhs)


def solve(
    A: Any,
    b: Any,
    *,
    assume_a: Structure = "gen",
    accuracy: str | None = None,
    engine: str = "auto",
    strict: bool = False,
) -> TracedSolution:
    """Linear systems ``A x = b`` by :func:`neula.solve`.

    Parameters
    ----------
    A : array_like, shape (..., n, n)
    b : array_like, shape (n,) or (..., n, k)
    assume_a, accuracy, engine, strict : optional
        As for :func:`neula.solve`; the engine by its name.

    Returns
    -------
    TracedSolution
        Derivatives of x are solutions of systems with A, or its transpose, by :func:`neula.solve`.

    Warns
    -----
    AccuracyWarning
        When the compiled program runs, if x is not certified.

    Examples
    --------
    >>> from jax import jit, numpy as jnp
    >>> from neula.jax import solve
    >>> jit(solve)(jnp.array([[2.0, 1.0], [1.0, 3.0]]), jnp.array([4.0, 7.0])).x.round(5).tolist()
    [1.0, 2.0]
    """
    (matrix, rhs), accuracy = _operands(accuracy, A, b)
    options = accuracy, engine, strict, assume_a
    matrix, columns = _system(matrix, rhs)

    def solved(a: jax.Array, right: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x, *evidence = _called(SOLVE, (a, right), options)
        return x, tuple(evidence)

    x, evidence = jax.lax.custom_linear_solve(
        lambda y: matrix @ y,
        columns,
        lambda _, right: solved(matrix, right),
        lambda _, right: solved(matrix.mT, right),
        has_aux=True,
    )
    known = TracedSolution(x, *map(jax.lax.stop_gradient, evidence))
    return _solution(known, rhs)


def qr(A: Any, *, accuracy: str | None = None, engine: str = "auto", strict: bool = False) -> TracedQR:
    """Reduced QR factorization by :func:`neula.qr`; the diagonal of R is real and nonnegative.

    Parameters
    ----------
    A : array_like, shape (..., m, n)
    accuracy, engine, strict : optional
        As for :func:`neula.qr`; the engine by its name.

    Returns
    -------
    TracedQR

    Warns
    -----
    AccuracyWarning
        When the compiled program runs, if the factors are not certified.

    Examples
    --------
    >>> from jax import grad, numpy as jnp
    >>> from neula.jax import qr
    >>> grad(lambda A: qr(A).R.sum())(jnp.array([[3.0], [4.0]])).round(5).tolist()  # R is the norm of A
    [[0.6...], [0.8...]]
    """
    (matrix,), accuracy = _operands(accuracy, A)
    return TracedQR(*_qr(matrix, (accuracy, engine, strict)))


def cholesky(
    A: Any, *, accuracy: str | None = None, engine: str = "auto", strict: bool = False
) -> TracedCholesky:
    """Cholesky factorization ``A = L L^H`` by :func:`neula.cholesky`, which reads the lower triangle.

    Parameters
    ----------
    A : array_like, shape (..., n, n)
    accuracy, engine, strict : optional
        As for :func:`neula.cholesky`; the engine by its name.

    Returns
    -------
    TracedCholesky
        The gradient is Hermitian. If A is not positive definite, the compiled program ends with an error.

    Warns
    -----
    AccuracyWarning
        When the compiled program runs, if L is not certified.

    Examples
    --------
    >>> from jax import numpy as jnp, vmap
    >>> from neula.jax import cholesky
    >>> vmap(lambda x: cholesky(x * jnp.eye(2)).L[0, 0])(jnp.array([4.0, 9.0])).tolist()
    [2.0, 3.0]
    """
    (matrix,), accuracy = _operands(accuracy, A)
    return TracedCholesky(*_cholesky(matrix, (accuracy, engine, strict)))


def _operands(accuracy: str | None, *arrays: Any) -> tuple[list[jax.Array], str | None]:
    """Arrays in their common dtype, at least float32, and the requested accuracy; A stays real if b alone is
    complex.
    """
    dtype = jnp.result_type(*arrays)
    if not jnp.issubdtype(dtype, jnp.inexact):
        dtype = jnp.result_type(float)
    accuracy, dtype = accuracy or HALF.get(str(dtype)), jnp.promote_types(dtype, jnp.float32)
    real = dtype if _is_complex(arrays[0]) else jnp.finfo(dtype).dtype
    return [jnp.asarray(x, dtype if _is_complex(x) else real) for x in arrays], accuracy


def _is_complex(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.complexfloating))


def _system(A: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A, and the columns of b, with the same leading dimensions; of a real A, real and imaginary parts."""
    columns = b[:, None] if b.ndim == 1 else b
    if _is_complex(b) and not _is_complex(A):
        columns = jnp.concatenate([columns.real, columns.imag], axis=-1)
    batch = jnp.broadcast_shapes(A.shape[:-2], columns.shape[:-2])
    return tuple(jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (A, columns))  # type: ignore[return-value]


def _solution(found: TracedSolution, b: jax.Array) -> TracedSolution:
    """The solution for this right-hand side: of parts a complex one, of a vector a vector."""
    if _is_complex(b) and not _is_complex(found.x):
        errors = jnp.maximum(*jnp.split(found.forward_errors, 2, axis=-1))
        found = found._replace(x=jax.lax.complex(*jnp.split(found.x, 2, axis=-1)), forward_errors=errors)
    if b.ndim > 1:
        return found
    return found._replace(x=found.x[..., 0], forward_errors=found.forward_errors[..., 0])


def _called(operator: Operator, operands: tuple[jax.Array, ...], options: Options) -> tuple[jax.Array, ...]:
    """The results of an operator of torch, by a function that the compiled program calls back."""
    function = operator.packet.default
    like = [torch.empty(x.shape, dtype=getattr(torch, str(x.dtype)), device="meta") for x in operands]
    shapes = [
        jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(str(x.dtype).removeprefix("torch.")))
        for x in function(*like, *options)
    ]

    def on_host(*arrays: Any) -> list[np.ndarray]:
        with _subnormal_numbers():
            found = function(*(torch.from_numpy(np.array(x)) for x in arrays), *options)
        return [x.numpy().astype(shape.dtype, copy=False) for x, shape in zip(found, shapes, strict=True)]

    called: list[jax.Array] = jax.pure_callback(on_host, shapes, *operands, vmap_method="expand_dims")
    return tuple(called)


@contextmanager
def _subnormal_numbers() -> Iterator[None]:
    """JAX's programs make this thread flush subnormal numbers to zero, which bounds on errors rely on."""
    flushed = sys.float_info.min / 2 == 0
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)


def _without_tangents(evidence: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    """Zeros, of the dtype that JAX wants where there are no derivatives."""
    return tuple(
        jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0)
        for x in evidence
    )


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _lstsq(A: jax.Array, b: jax.Array, options: Options) -> tuple[jax.Array, ...]:
    return _called(LSTSQ, (A, b), options)


@_lstsq.defjvp
def _change_of_lstsq(options: Options, operands: Any, changes: Any) -> tuple[Any, Any]:
    """As :class:`neula.pipeline.derivatives.Solution`."""
    (A, b), (dA, db) = operands, changes
    found = x, ranks, *_ = _lstsq(A, b, options)
    rest = db - dA @ x
    tall = A.shape[-2] >= A.shape[-1]
    Q, R, _ = _qr(A if tall else adjoint(A), (None, options[1]))
    if tall:
        image = adjoint(Q) @ rest + solve_triangular(adjoint(R), adjoint(dA) @ (b - A @ x), lower=True)
        dx = solve_triangular(R, image)
    else:
        y = adjoint(dA) @ solve_triangular(R, adjoint(Q) @ x)
        dx = Q @ solve_triangular(adjoint(R), rest, lower=True) + y - Q @ (adjoint(Q) @ y)
    # A factor: its transpose makes gradients NaN, too.
    dx = dx * jnp.where((ranks < min(A.shape[-2:]))[..., None, None], jnp.nan, 1.0).astype(x.dtype)
    return found, (dx, *_without_tangents(found[1:]))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _qr(A: jax.Array, options: Options) -> tuple[jax.Array, ...]:
    Q, R, *_, accepted = _called(QR, (A,), options)
    return Q, R, accepted


@_qr.defjvp
def _change_of_qr(options: Options, operands: Any, changes: Any) -> tuple[Any, Any]:
    """As :class:`neula.pipeline.derivatives.QRFunction`."""
    Q, R, accepted = found = _qr(*operands, options)
    k = Q.shape[-1]
    (U, V), (dX, dY) = (jnp.split(x, [k], axis=-1) for x in (R, changes[0]))
    scaled = solve_triangular(U.mT, dX.mT, lower=True).mT
    W = adjoint(Q) @ scaled
    triangle = jnp.triu(W + adjoint(jnp.tril(W, -1)), 1) + jnp.eye(k, dtype=R.dtype) * W.real
    dQ = scaled - Q @ triangle
    dR = jnp.concatenate([triangle @ U, adjoint(dQ) @ (Q @ V) + adjoint(Q) @ dY], axis=-1)
    return found, (dQ, dR, *_without_tangents((accepted,)))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _cholesky(A: jax.Array, options: Options) -> tuple[jax.Array, ...]:
    lower, _, accepted = _called(CHOLESKY, (A,), options)
    return lower, accepted


@_cholesky.defjvp
def _change_of_cholesky(options: Options, operands: Any, changes: Any) -> tuple[Any, Any]:
    """As :class:`neula.pipeline.derivatives.CholeskyFunction`."""
    L, accepted = found = _cholesky(*operands, options)
    dA = (changes[0] + adjoint(changes[0])) / 2
    M = solve_triangular(L, adjoint(solve_triangular(L, dA, lower=True)), lower=True)
    dL = L @ (jnp.tril(M) - jnp.eye(L.shape[-1], dtype=L.dtype) * M / 2)
    return found, (dL, *_without_tangents((accepted,)))
