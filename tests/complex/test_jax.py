"""``neula.jax`` in complex numbers, whose gradients are the conjugates of torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import neula

jax = pytest.importorskip("jax")

from jax import numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import neula.jax  # noqa: E402

SHAPES = [(6, 3), (3, 5), (4, 4), (2, 5, 3), (1, 1)]
KINDS = [(1j, 1j), (0.0, 1j), (1j, 0.0)]


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def random(*shape: int, seed: int = 0, factor: complex = 1j) -> Any:
    real, imaginary = np.random.default_rng(seed).standard_normal((2, *shape))
    return jnp.asarray(real + factor * imaginary if factor else real)


def check(function: Callable[..., Any], *operands: Any, order: int = 1) -> None:
    """Derivatives, forward and backward."""
    check_grads(jax.jit(function), operands, order=order, rtol=1e-4, atol=1e-4)


def adjoint(x: Any) -> Any:
    return x.mT.conj()


@pytest.mark.parametrize(
    ("shape", "kinds"),
    [*((shape, KINDS[0]) for shape in SHAPES), (SHAPES[0], KINDS[1]), (SHAPES[1], KINDS[2])],
)
def test_least_squares(shape: tuple[int, ...], kinds: tuple[complex, complex]) -> None:
    A, b = random(*shape, factor=kinds[0]), random(*shape[:-1], 2, seed=1, factor=kinds[1])
    check(lambda A, b: neula.jax.lstsq(A, b).x, A, b, order=2 if shape == SHAPES[0] and all(kinds) else 1)
    found = neula.jax.lstsq(A, b)
    assert found.accepted.all()
    assert found.forward_errors.shape == (*shape[:-2], 2)
    np.testing.assert_allclose(found.x, jnp.linalg.pinv(A) @ b, rtol=1e-10)
    if len(shape) == 2:
        np.testing.assert_allclose(neula.jax.lstsq(A, b[:, 0]).x, found.x[:, 0], rtol=1e-10)


@pytest.mark.parametrize(("batch", "kinds"), [((2,), KINDS[0]), ((), KINDS[1]), ((), KINDS[2])])
def test_systems_and_cholesky(batch: tuple[int, ...], kinds: tuple[complex, complex]) -> None:
    A, b = random(*batch, 4, 4, factor=kinds[0]), random(*batch, 4, 2, seed=1, factor=kinds[1])
    check(lambda A, b: neula.jax.solve(A, b).x, A, b)
    np.testing.assert_allclose(neula.jax.solve(A, b).x, jnp.linalg.solve(A, b), rtol=1e-10)
    definite = A @ adjoint(A) + jnp.eye(4)
    check(lambda A: neula.jax.cholesky(A @ adjoint(A) + jnp.eye(4)).L, A)
    check(lambda A, b: neula.jax.solve(A @ adjoint(A) + jnp.eye(4), b, assume_a="pos").x, A, b)
    np.testing.assert_allclose(neula.jax.cholesky(definite).L, jnp.linalg.cholesky(definite), rtol=1e-10)


def test_gradients_are_conjugates_of_those_of_torch() -> None:
    A, b = random(2, 5, 3), random(2, 5, seed=1)
    loss = lambda A, b: abs(jax.vmap(neula.jax.lstsq)(A, b).x).sum() + abs(neula.jax.qr(A).R.sum())  # noqa: E731
    a, c = (torch.from_numpy(np.array(x)).requires_grad_() for x in (A, b))
    (neula.lstsq(a, c[..., None]).x.abs().sum() + neula.qr(a).R.sum().abs()).backward()
    for found, variable in zip(jax.grad(loss, argnums=(0, 1))(A, b), (a, c), strict=True):
        np.testing.assert_allclose(found, variable.grad.conj().resolve_conj(), rtol=1e-9, atol=1e-12)


def test_below_full_rank_there_is_no_gradient() -> None:
    A, b = jnp.ones((4, 2)) * 1j, random(4)
    assert jnp.isnan(jax.grad(lambda b: abs(neula.jax.lstsq(A, b).x).sum())(b)).all()


def test_real_operands_have_real_gradients_and_single_precision_stays() -> None:
    A, b = random(5, 3, factor=0.0), random(5, seed=1)
    gradient = jax.grad(lambda A: abs(neula.jax.lstsq(A, b).x).sum())(A)
    assert gradient.dtype == jnp.float64
    x = neula.jax.lstsq(A.astype(jnp.float32), b.astype(jnp.complex64)).x
    assert x.dtype == jnp.complex64
    assert neula.jax.qr(b[:, None].astype(jnp.complex64)).Q.dtype == jnp.complex64
