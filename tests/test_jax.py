"""``neula.jax`` against finite differences and JAX's own functions, inside jit, vmap and grad.

Gradients are the conjugates of those of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

import neula

jax = pytest.importorskip("jax")

from jax import numpy as jnp  # noqa: E402

import neula.jax  # noqa: E402

SHAPES = [(6, 3), (3, 5), (4, 4), (2, 5, 3)]
REAL, COMPLEX = ("real", "real"), ("complex", "complex")
MIXED = [("real", "complex"), ("complex", "real")]


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    """Programs are compiled without most optimizations, in less time."""
    wanted = {"jax_enable_x64": True, "jax_disable_most_optimizations": True}
    before = {name: jax.config.read(name) for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def random(*shape: int, seed: int = 0, kind: str = "real") -> Any:
    parts = np.random.default_rng(seed).standard_normal((2, *shape))
    return jnp.asarray(parts[0] + 1j * parts[1] if kind == "complex" else parts[0])


def adjoint(x: Any) -> Any:
    return x.mT.conj()


def dot(x: Any, y: Any) -> Any:
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return sum((a * b).sum() for a, b in pairs).real


def check(function: Callable[..., Any], *operands: Any, order: int = 1) -> None:
    """Derivatives along a random direction beside differences, and backward ones beside these.

    A program each: to compile one takes longer than anything that it computes.
    """
    kinds = ("complex" if x.dtype.kind == "c" else "real" for x in operands)
    directions = [random(*x.shape, seed=7, kind=kind) for x, kind in zip(operands, kinds, strict=True)]

    @jax.jit
    def derivatives(*operands: Any) -> tuple[Any, Any, Any]:
        values, changes = jax.jvp(function, operands, tuple(directions))
        weights = jax.tree.map(jnp.cos, values)
        gradients = jax.vjp(function, *operands)[1](weights)
        return changes, dot(weights, changes), dot(gradients, directions)

    changes, forward, backward = derivatives(*operands)
    np.testing.assert_allclose(backward, forward, rtol=1e-9, atol=1e-12)
    step, values = 1e-5, jax.jit(function)
    near = (values(*(x + h * d for x, d in zip(operands, directions, strict=True))) for h in (step, -step))
    for change, one, other in zip(*map(jax.tree.leaves, (changes, *near)), strict=True):
        np.testing.assert_allclose(change, (one - other) / (2 * step), rtol=1e-6, atol=1e-7)
    if order == 2:
        check(lambda *x: jax.jvp(function, x, tuple(directions))[1], *operands)


@pytest.mark.parametrize(
    ("shape", "kinds"),
    [(SHAPES[0], REAL), *((shape, COMPLEX) for shape in SHAPES), *((SHAPES[0], x) for x in MIXED)],
)
def test_derivatives_of_least_squares(shape: tuple[int, ...], kinds: tuple[str, str]) -> None:
    A, b = random(*shape, kind=kinds[0]), random(*shape[:-1], 2, seed=1, kind=kinds[1])
    check(lambda A, b: neula.jax.lstsq(A, b).x, A, b, order=2 if (shape, kinds) == (SHAPES[0], REAL) else 1)
    found = neula.jax.lstsq(A, b)
    assert found.accepted.all()
    assert found.forward_errors.shape == (*shape[:-2], 2)
    np.testing.assert_allclose(found.x, np.linalg.pinv(A) @ np.asarray(b), rtol=1e-10)
    if len(shape) == 2:
        np.testing.assert_allclose(jax.jit(neula.jax.lstsq)(A, b[:, 0]).x, found.x[:, 0], rtol=1e-10)


@pytest.mark.parametrize(
    ("shape", "kind"), [((6, 3), "real"), *((shape, "complex") for shape in [*SHAPES, (1, 1)])]
)
def test_derivatives_of_qr(shape: tuple[int, ...], kind: str) -> None:
    A = random(*shape, kind=kind)
    check(lambda A: neula.jax.qr(A)[:2], A)
    Q, R, accepted = jax.jit(neula.jax.qr)(A)
    np.testing.assert_allclose(Q @ R, A, atol=1e-13)
    assert accepted.all()
    assert not jnp.diagonal(R, axis1=-2, axis2=-1).imag.any()


@pytest.mark.parametrize(("batch", "kinds"), [((), REAL), ((2,), COMPLEX), *(((), x) for x in MIXED)])
def test_derivatives_of_systems_and_cholesky(batch: tuple[int, ...], kinds: tuple[str, str]) -> None:
    A, b = random(*batch, 4, 4, kind=kinds[0]), random(*batch, 4, 2, seed=1, kind=kinds[1])
    check(lambda A, b: neula.jax.solve(A, b).x, A, b)
    np.testing.assert_allclose(jax.jit(neula.jax.solve)(A, b).x, np.linalg.solve(A, b), rtol=1e-10)
    check(lambda A: neula.jax.cholesky(A @ adjoint(A) + jnp.eye(4)).L, A)
    check(lambda A, b: neula.jax.solve(A @ adjoint(A) + jnp.eye(4), b, assume_a="pos").x, A, b)
    definite = np.asarray(A @ adjoint(A)) + np.eye(4)
    np.testing.assert_allclose(jax.jit(neula_factor)(definite), np.linalg.cholesky(definite), rtol=1e-10)


def test_the_gradient_of_a_cholesky_factor_is_symmetric() -> None:
    A = random(4, 4)
    spd = A @ A.mT + jnp.eye(4)
    factors = neula_factor, jnp.linalg.cholesky
    inner, outer = (jax.jit(jax.grad(lambda S, f=f: f(S)[-1].sum()))(spd) for f in factors)
    np.testing.assert_allclose(inner, (outer + outer.mT) / 2, rtol=1e-10, atol=1e-12)


def neula_factor(spd: Any) -> Any:
    return neula.jax.cholesky(spd).L


def test_batches_by_vmap_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    A, b = random(7, 5, 3), random(7, 5, seed=1)
    module, shapes = import_module("neula.problems.least_squares.lstsq"), []
    called = module.lstsq

    def counted(A: Any, b: Any, **options: Any) -> Any:
        shapes.append(tuple(A.shape))
        return called(A, b, **options)

    monkeypatch.setattr(module, "lstsq", counted)
    found = jax.vmap(neula.jax.lstsq)(A, b)
    assert shapes == [(7, 5, 3)]
    assert found.ranks.tolist() == [3] * 7
    expected = np.stack([np.linalg.lstsq(x, y, rcond=None)[0] for x, y in zip(A, b, strict=True)])
    np.testing.assert_allclose(found.x, expected, rtol=1e-10)
    assert (found.forward_errors < 1e-12).all()
    many = jax.jit(jax.vmap(neula.jax.lstsq, (None, 0)))(A[0], b)
    np.testing.assert_allclose(many.x, np.linalg.lstsq(A[0], b.T)[0].T, rtol=1e-10)
    gradients = jax.jit(jax.vmap(jax.grad(lambda A, b: neula.jax.lstsq(A, b).x.sum())))(A, b)
    one = jax.jit(jax.grad(lambda A: (jnp.linalg.pinv(A) @ b[3]).sum()))(A[3])
    np.testing.assert_allclose(gradients[3], one, rtol=1e-9, atol=1e-12)


def test_a_hessian_and_evidence() -> None:
    """Of the sum of squared residuals: twice the projector onto what A does not reach."""
    A, b = random(6, 2), random(6, seed=1)
    hessian = jax.jit(jax.hessian(lambda b: ((b - A @ neula.jax.lstsq(A, b).x) ** 2).sum()))(b)
    np.testing.assert_allclose(hessian, 2 * (np.eye(6) - A @ np.linalg.pinv(A)), atol=1e-12)
    found = jax.jit(neula.jax.solve)(A[:2], b[:2])
    assert found.accepted
    assert float(found.backward_errors) <= 1e-15


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64"])
def test_dtypes(dtype: str) -> None:
    A = jnp.asarray([[2, 1], [1, 3], [0, 1]], dtype)
    found = jax.jit(neula.jax.lstsq)(A, jnp.asarray([3, 4, 1], dtype))
    assert found.x.dtype == (jnp.float64 if dtype == "int64" else jnp.float32)
    np.testing.assert_allclose(found.x, [1, 1], rtol=1e-6)
    assert found.accepted


def test_below_full_rank_there_is_no_gradient() -> None:
    A, b = np.ones((4, 2)), np.arange(4.0)
    np.testing.assert_allclose(neula.jax.lstsq(A, b).x, [0.75, 0.75], rtol=1e-12)
    gradient = jax.jit(jax.grad(lambda b, A: abs(neula.jax.lstsq(A, b).x).sum()))
    for factor in (1, 1j):
        assert np.isnan(gradient(b, factor * A)).all()


def test_gradients_are_conjugates_of_those_of_torch() -> None:
    A, b = random(2, 5, 3, kind="complex"), random(2, 5, seed=1, kind="complex")
    loss = lambda A, b: abs(jax.vmap(neula.jax.lstsq)(A, b).x).sum() + abs(neula.jax.qr(A).R.sum())  # noqa: E731
    a, c = (torch.from_numpy(np.array(x)).requires_grad_() for x in (A, b))
    (neula.lstsq(a, c[..., None]).x.abs().sum() + neula.qr(a).R.sum().abs()).backward()
    for found, variable in zip(jax.jit(jax.grad(loss, argnums=(0, 1)))(A, b), (a, c), strict=True):
        np.testing.assert_allclose(found, variable.grad.conj().resolve_conj(), rtol=1e-9, atol=1e-12)


def test_real_operands_have_real_gradients_and_single_precision_stays() -> None:
    A, b = random(5, 3), random(5, seed=1, kind="complex")
    gradient = jax.jit(jax.grad(lambda A: abs(neula.jax.lstsq(A, b).x).sum()))(A)
    assert gradient.dtype == jnp.float64
    x = jax.jit(neula.jax.lstsq)(A.astype(jnp.float32), b.astype(jnp.complex64)).x
    assert x.dtype == jnp.complex64
    assert jax.jit(neula.jax.qr)(b[:, None].astype(jnp.complex64)).Q.dtype == jnp.complex64


def test_what_is_not_certified_is_said_when_the_program_runs() -> None:
    hilbert = jnp.asarray([[1 / (i + j + 1) for i in range(20)] for j in range(20)])
    with pytest.warns(neula.AccuracyWarning):
        found = jax.block_until_ready(jax.jit(neula.jax.solve)(hilbert, jnp.ones(20)))
    assert not found.accepted
    with pytest.raises(Exception, match="not positive definite"):
        jax.block_until_ready(neula.jax.cholesky(-jnp.eye(3)))


def test_subnormal_numbers_are_there_again() -> None:
    """JAX's programs flush them to zero in the thread that calls back."""
    tiny = 1e-310
    found = jax.jit(lambda A: neula.jax.qr(A).R)(jnp.eye(2))
    assert found.tolist() == [[1, 0], [0, 1]]
    assert tiny / 2 > 0
    flushed = []

    def inside(x: Any) -> Any:
        flushed.append(sys.float_info.min / 2 == 0)
        with neula.jax._subnormal_numbers():
            assert sys.float_info.min / 2 > 0
        flushed.append(sys.float_info.min / 2 == 0)
        return np.asarray(x)

    jax.block_until_ready(jax.pure_callback(inside, jnp.eye(2), jnp.eye(2)))
    assert flushed[0] == flushed[1]


CALLS: dict[str, Callable[[Any], Any]] = {
    "qr": neula.qr,
    "lstsq": lambda A: neula.lstsq(A, np.ones(3)),
    "solve": lambda A: neula.solve(A, np.ones(3)),
    "cholesky": neula.cholesky,
    "svd_lowrank": lambda A: neula.svd_lowrank(A, 1),
    "polar": neula.polar,
    "pinv": neula.pinv,
    "nnls": lambda A: neula.nnls(A, np.ones(3)),
    "matmul": lambda A: neula.matmul(A, A),
    "b": lambda A: neula.lstsq(np.eye(3), A[0]),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("transform", ["jit", "vmap", "grad"])
def test_a_tracer_gets_an_error_that_says_what_to_call(name: str, transform: str) -> None:
    operand = jnp.eye(3)[None] if transform == "vmap" else jnp.eye(3)
    with pytest.raises(TypeError, match=r"is a tracer of JAX.*of neula\.jax"):
        getattr(jax, transform)(CALLS[name])(operand)
