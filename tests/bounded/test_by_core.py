"""One problem by the compiled core: beside the chain, beside exact solutions, and where it is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import scipy.optimize
import torch
from tests.bounded.exact import error, solution
from tests.bounded.kkt import U, violation
from tests.bounded.test_bounded import bound, problem

import neula

pytestmark = pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")


def is_alone(result) -> bool:
    """Whether it took no chain, which notes how A was factorized before anything else."""
    return [attempt.method for attempt in result.attempts] == ["block pivoting cholesky"]


def by_chain(A, b, bounds):
    """The same as a batch of one, without the dimension of the batch."""
    return neula.lsq_linear(A[None], b, bounds)


@pytest.mark.parametrize("shape", [(1, 1), (10, 3), (9, 9), (64, 32), (90, 80), (400, 7)])
@pytest.mark.parametrize("width", [0.02, 1.0, np.inf])
def test_beside_the_chain(shape, width) -> None:
    A, b = problem(*shape, condition=30.0)
    n = shape[1]
    bounds = np.full(n, -width), np.where(np.arange(n) % 3, 2 * width, 0.01)
    alone, chain = neula.lsq_linear(A, b, bounds), by_chain(A, b, bounds)
    assert is_alone(alone)
    assert not is_alone(chain)
    assert alone.converged
    norms = np.linalg.norm(A, axis=0)
    apart = np.linalg.norm(norms * (alone.x - chain.x[0]))
    errors = alone.forward_error + chain.forward_error
    assert apart <= 2 * errors * np.linalg.norm(norms * alone.x)
    assert np.array_equal(alone.active_mask, chain.active_mask[0])
    assert (alone.status, alone.tolerance, alone.engine) == (chain.status, chain.tolerance, chain.engine)
    size = np.linalg.norm(b) + np.linalg.norm(norms * alone.x)
    assert np.allclose(alone.fun, chain.fun[0], atol=bound(n) * size)
    assert np.allclose(alone.cost, chain.cost[0], atol=bound(n) * size**2)
    assert np.allclose(alone.unbounded_sol, chain.unbounded_sol[0], rtol=1e3 * bound(n))
    assert alone.optimality <= bound(n) * size * norms.max()
    # Both estimate it, each up to a fourth root of n.
    assert 1 / 3 <= n**0.25 * alone.condition / chain.condition <= 3 * n**0.5


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_same_fields_of_the_same_kind(dtype) -> None:
    A, b = (x.astype(dtype) for x in problem(20, 5))
    for alone, whole in [
        (neula.nnls(A, b), neula.nnls(A, b, engine="emulated")),
        (neula.lsq_linear(A, b, (0, 1)), neula.lsq_linear(A, b, (0, 1), engine="emulated")),
    ]:
        assert is_alone(alone)
        assert not is_alone(whole)
        for name in (field.name for field in dataclasses.fields(whole)):
            ours, theirs = getattr(alone, name), getattr(whole, name)
            assert type(ours) is type(theirs), name
            if isinstance(ours, np.ndarray):
                assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name


@pytest.mark.parametrize(
    ("dtype", "accuracy"),
    [(torch.float16, None), (torch.float16, 1e-2), (torch.bfloat16, None), (torch.float32, "fp16")],
)
def test_rounding_counts(dtype, accuracy) -> None:
    A, b = (torch.from_numpy(x).to(dtype) for x in problem(30, 6))
    result = neula.nnls(A, b, accuracy=accuracy)
    assert result.x.dtype == dtype
    assert is_alone(result) == (dtype != torch.bfloat16)
    exact = solution(A.double().numpy(), b.double().numpy(), np.zeros(6), np.full(6, np.inf))
    assert error(A.double().numpy(), result.x.double().numpy(), exact) <= result.forward_error
    assert result.forward_error <= torch.finfo(dtype).eps
    assert U < result.backward_error <= result.tolerance


def test_what_does_not_fit_half_precision() -> None:
    A, b = problem(20, 5, condition=1.0)
    A, b = (A / 2**10).astype(np.float16), (2.0**12 * b).astype(np.float16)
    assert is_alone(neula.nnls(A, b / 2**12))
    with pytest.raises(OverflowError, match="does not fit"):
        neula.lsq_linear(A, b, (-1.0, 1.0))


@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("rhs", ["noise", "consistent", "corner", "degenerate"])
def test_sets_of_free_variables(condition, rhs) -> None:
    """Beside SciPy, also where gradients vanish and nobody knows which variables are free."""
    A, noise = problem(70, 40, condition=condition)
    x = np.maximum(np.random.default_rng(5).standard_normal(40), 0.0)
    b = {"noise": noise, "consistent": A @ x, "corner": -A.sum(1), "degenerate": A @ x + 1e-9 * noise}[rhs]
    result = neula.nnls(A, b)
    assert is_alone(result)
    assert violation(A, b, result.x, 0.0, np.inf) < bound(40)
    norms, expected = np.linalg.norm(A, axis=0), scipy.optimize.nnls(A, b)[0]
    apart = np.linalg.norm(norms * (result.x - expected))
    assert apart <= 4 * result.forward_error * np.linalg.norm(norms * expected) + bound(40) * condition


REFUSED = {
    "few rows": lambda A, b: (A[:5], b[:5]),
    "zero column": lambda A, b: (A * (np.arange(8) != 3), b),
    "dependent": lambda A, b: (np.column_stack([A, A[:, 0] + A[:, 1]]), b),
    "nearly dependent": lambda A, b: (np.column_stack([A, A[:, 0] + 1e-9 * b]), A[:, 0] + b),
    "no right-hand side": lambda A, b: (A, 0 * b),
    "tiny": lambda A, b: (A * 1e-150, b),
    "huge": lambda A, b: (A, b * 1e150),
    "one huge column": lambda A, b: (A * np.where(np.arange(8) == 3, 1e150, 1.0), b),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_left_to_the_chain(kind) -> None:
    A, b = REFUSED[kind](*problem(25, 8))
    result = neula.nnls(A, b)
    assert not is_alone(result)
    assert violation(A, b, result.x, 0.0, np.inf) < bound(8)


def test_bounds_that_are_left_to_the_chain() -> None:
    A, b = problem(25, 8)
    for bounds in [(-1e200, 1.0), (0.0, np.where(np.arange(8), 1.0, 1e-200))]:
        result = by_chain(A, b, bounds)
        alone = neula.lsq_linear(A, b, bounds)
        assert not is_alone(alone)
        assert np.array_equal(alone.x, result.x[0])


def test_who_else_is_left_to_the_chain() -> None:
    A, b = problem(25, 8)
    assert is_alone(neula.nnls(A, b))
    assert not is_alone(neula.nnls(A, b[:, None]))
    with pytest.warns(neula.AccuracyWarning):
        assert not is_alone(neula.nnls(*problem(60, 40), maxiter=1))
