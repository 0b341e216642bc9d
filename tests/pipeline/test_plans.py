"""Calls like one before give the answer that the whole chain gives."""

from __future__ import annotations

import importlib
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import neula
from neula.kernels import core
from neula.pipeline import plans
from neula.pipeline.plans import Plans
from neula.problems.least_squares import solution

solve = importlib.import_module("neula.problems.systems.solve")

pytestmark = pytest.mark.skipif(core.core() is None, reason="plans are for the compiled core")


def normal(*shape: int, dtype: Any = np.float64) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def dependent(m: int, n: int) -> np.ndarray:
    a = normal(m, n)
    a[:, -1] = a[:, 0]
    return a


SQUARE = normal(7, 7)
CASES: dict[str, tuple[Any, np.ndarray, np.ndarray, dict[str, Any]]] = {
    "system": (neula.solve, SQUARE, normal(7), {}),
    "some right-hand sides": (neula.solve, SQUARE, normal(7, 3), {}),
    "float32": (neula.solve, SQUARE.astype(np.float32), normal(7, dtype=np.float32), {}),
    "mixed": (neula.solve, SQUARE.astype(np.float32), normal(7), {}),
    "definite": (neula.solve, SQUARE @ SQUARE.T + np.eye(7), normal(7), {"assume_a": "pos"}),
    "coarse": (neula.solve, SQUARE, normal(7), {"accuracy": "fp32"}),
    "tall": (neula.lstsq, normal(20, 5), normal(20), {}),
    "tall, some": (neula.lstsq, normal(20, 5), normal(20, 3), {"accuracy": "fp32"}),
    "tall, float32": (neula.lstsq, normal(20, 5, dtype=np.float32), normal(20, dtype=np.float32), {}),
    "wide": (neula.lstsq, normal(5, 20), normal(5), {}),
    "dependent": (neula.lstsq, dependent(20, 5), normal(20), {"rcond": 1e-10}),
    "all digits": (neula.lstsq, normal(20, 5), normal(20), {"certify": "forward"}),
    "one column": (neula.lstsq, normal(3, 1), normal(3, 1), {}),
}


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("name", CASES)
def test_the_same_is_said(name: str, wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    function, a, b, asked = CASES[name]
    with monkeypatch.context() as patched:
        for module in (solution, solve):
            patched.setattr(module, "solved_by_plan", lambda *_: None)
        first = function(wrap(a), wrap(b), **asked)
    _, third = [function(wrap(a), wrap(b), **asked) for _ in range(2)]
    assert repr(third).splitlines()[:-1] == repr(first).splitlines()[:-1]
    for field in vars(third).keys() - {"seconds", "fit"}:
        one, other = getattr(first, field), getattr(third, field)
        assert type(one) is type(other), field
        if isinstance(one, np.ndarray | torch.Tensor):
            assert one.dtype == other.dtype, field
            assert np.array_equal(one, other), field
        else:
            assert one == other, field
    assert 0 < third.seconds < 10
    assert pickle.loads(pickle.dumps(third)).backward_error == first.backward_error


def test_statistics_are_those_of_the_problem() -> None:
    a, b = normal(30, 4), normal(30)
    first, _, third = [neula.lstsq(a, b) for _ in range(3)]
    assert np.array_equal(first.standard_errors(), third.standard_errors())


def test_what_is_not_accepted_goes_through_the_chain() -> None:
    a, b = normal(9, 9), normal(9)
    for _ in range(3):
        assert neula.solve(a, b).converged
    singular = dependent(9, 9)
    with pytest.warns(neula.AccuracyWarning):
        assert not neula.solve(singular, b).converged
    spoilt = a.copy()
    spoilt[3, 4] = np.nan
    with pytest.raises(ValueError, match=r"A\[3, 4\]"):
        neula.solve(spoilt, b)
    with pytest.raises(ValueError, match=r"A\[3, 4\]"):
        neula.lstsq(spoilt, b)
    huge = 1e300 * a
    assert np.allclose(neula.solve(huge, b).x, neula.solve(a, b).x / 1e300, rtol=1e-9)


def test_arguments_are_checked_as_at_first() -> None:
    a, b = normal(11, 3), normal(11)
    for _ in range(3):
        neula.lstsq(a, b, max_iterations=60, rcond=0.0)
    with pytest.raises((TypeError, ValueError)):
        neula.lstsq(a, b, max_iterations=60.5, rcond=0.0)
    with pytest.raises(ValueError, match="algorithm"):
        neula.lstsq(a, b, algorithm="none")
    for _ in range(3):
        assert np.allclose(neula.lstsq(a, b=b, weights=np.arange(11.0)).x, neula.lstsq(a, b).x, atol=9)


def test_views_of_arrays() -> None:
    a, b = normal(12, 6), normal(12)
    for _ in range(3):
        expected = neula.lstsq(a[::2], b[::2]).x
        neula.lstsq(a[::2].copy(), b[::2].copy())
    assert np.allclose(neula.lstsq(a[::2].copy(), b[::2].copy()).x, expected, rtol=1e-12)
    frozen = a[::2].copy()
    frozen.flags.writeable = False
    assert np.allclose(neula.lstsq(frozen, b[::2].copy()).x, expected, rtol=1e-12)


def test_gradients_are_not_lost() -> None:
    a, b = torch.from_numpy(normal(8, 8)), torch.from_numpy(normal(8))
    for _ in range(3):
        neula.solve(a, b)
    wanted = a.clone().requires_grad_()
    assert neula.solve(wanted, b).x.requires_grad
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
        x = neula.solve(dual, b).x
        assert torch.autograd.forward_ad.unpack_dual(x).tangent is not None


def test_a_plan_belongs_to_a_core_and_a_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = normal(10, 10), normal(10)
    for _ in range(3):
        neula.solve(a, b)
    asked: list[None] = []
    monkeypatch.setattr(plans, "core", lambda: asked.append(None))
    assert np.allclose(neula.solve(a, b).x, np.linalg.solve(a, b))
    assert asked


def test_so_many_shapes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "KEPT", 4)
    made: list[int] = []
    some = Plans(lambda x: made.append(len(x)))  # type: ignore[arg-type,func-returns-value]
    some._operands = 1
    for n in range(1, 6):
        for _ in range(3):
            assert some((np.ones(n),), {}) is None
    assert made == [1, 2, 3, 4, 5]
    assert len(some._plans) == len(some._seen) == 1


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("n", [1, 9, 95, 96])
@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
def test_cholesky(wrap: Any, n: int, dtype: Any, upper: bool) -> None:
    a = normal(n, n)
    a = (a @ a.T + np.eye(n)).astype(dtype)
    a[(0, -1) if not upper else (-1, 0)] += n > 1  # which is not read
    first, _, third = [neula.cholesky(wrap(a), upper=upper) for _ in range(3)]
    assert isinstance(third.factor, type(first.factor))
    assert third.residual <= third.bound == first.bound
    assert third.residual == pytest.approx(first.residual, rel=4, abs=1e-300)
    assert np.allclose(third.factor, first.factor, rtol=0, atol=8 * n * np.finfo(dtype).eps * np.abs(a).max())
    assert not np.asarray(third.L)[np.triu_indices(n, 1)].any()
    assert [x.method for x in third.attempts] == [x.method for x in first.attempts]
    assert bool(third.accepted)
    for spoilt, why in ((-a, np.linalg.LinAlgError), (a * np.nan, ValueError)):
        with pytest.raises(why):
            neula.cholesky(wrap(spoilt), upper=upper)


@pytest.mark.parametrize("shape", [(20, 5), (5, 20), (6, 6)])
@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
def test_pseudoinverses(shape: tuple[int, int], wrap: Any) -> None:
    a = normal(*shape)
    first, _, third = [neula.pinv(wrap(a)) for _ in range(3)]
    assert type(third) is type(first)
    assert np.array_equal(first, third)
    a[0, 0] = np.inf
    with pytest.raises(ValueError, match="must be finite"):
        neula.pinv(wrap(a))
