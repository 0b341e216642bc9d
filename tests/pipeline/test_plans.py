"""Calls like one before give the answer that the whole chain gives."""

from __future__ import annotations

import gc
import importlib
import pickle
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.matrices import normal_array

import neula
from neula.certificates.bounds import lstsq_bound
from neula.compat.scipy import lu_factor, lu_solve
from neula.engines import FORMATS
from neula.kernels import core
from neula.pipeline import plans
from neula.pipeline.plans import Plans
from neula.problems.least_squares import run

normal = partial(normal_array, seed=None)

solve = importlib.import_module("neula.problems.systems.solve")

pytestmark = pytest.mark.skipif(core.core() is None, reason="plans are for the compiled core")


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
    "columns of a view": (neula.lstsq, normal(5, 20).T, normal(20, 2)[:, 0], {}),
    "systems": (neula.solve, normal(3, 7, 7), normal(3, 7, 2), {}),
    "systems, complex": (neula.solve, normal(2, 3, 7, 7) + 1j * SQUARE, normal(2, 3, 7, 1) + 0j, {}),
    "tall ones": (neula.lstsq, normal(3, 20, 5), normal(3, 20, 2), {}),
    "wide ones, float32": (neula.lstsq, normal(3, 5, 20, dtype=np.float32), normal(3, 5, 1), {}),
    "one vector": (neula.lstsq, normal(3, 20, 5), normal(20), {"damp": 0.5}),
    "damped": (neula.lstsq, normal(20, 5), normal(20), {"damp": 0.5}),
    "damped, wide": (neula.lstsq, normal(5, 20, dtype=np.float32), normal(5, 2), {"damp": 0.5}),
    "weighted": (neula.lstsq, normal(20, 5), normal(20), {"weights": np.arange(20.0)}),
    "weighted, damped": (
        neula.lstsq,
        normal(20, 5, dtype=np.float32),
        normal(20, 2, dtype=np.float32),
        {"damp": 0.5, "weights": -np.arange(20.0, dtype=np.float32)},
    ),
    "weighted ones": (neula.lstsq, normal(3, 20, 5), normal(3, 20), {"weights": np.arange(20.0)}),
}


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("name", CASES)
def test_the_same_is_said(name: str, wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    function, a, b, given = CASES[name]
    asked = {key: wrap(x) if isinstance(x, np.ndarray) else x for key, x in given.items()}
    with monkeypatch.context() as patched:
        for module in (run, solve):
            patched.setattr(module, "solved_by_plan", lambda *_: None)
        first = function(wrap(a), wrap(b), **asked)
    _, third = [function(wrap(a), wrap(b), **asked) for _ in range(2)]
    assert repr(third).splitlines()[:-1] == repr(first).splitlines()[:-1]
    for field in vars(third).keys() - {"seconds", "_fit"}:
        one, other = getattr(first, field), getattr(third, field)
        assert type(one) is type(other), field
        if isinstance(one, np.ndarray | torch.Tensor):
            assert one.dtype == other.dtype, field
            assert np.array_equal(one, other), field
        else:
            assert one == other, field
    assert 0 < third.seconds < 10
    assert pickle.loads(pickle.dumps(third)).backward_error == first.backward_error


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize(
    "name", ["lu_factor", "qr", "cholesky", "eigh", "svd", "polar", "sqrtm", "orth", "pinv"]
)
def test_results_travel(name: str, wrap: Any) -> None:
    a = SQUARE @ SQUARE.T + np.eye(7)
    for _ in range(3):
        found = getattr(neula, name)(wrap(a))
        assert repr(pickle.loads(pickle.dumps(found))) == repr(found)


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
    for wrong in ({"certify": "twice"}, {"rcond": -1.0}, {"max_iterations": 0}):
        for _ in range(3):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                neula.lstsq(a, b, **wrong)
    with pytest.raises(ValueError, match="algorithm"):
        neula.lstsq(a, b, algorithm="none")
    for _ in range(3):
        assert np.allclose(neula.lstsq(a, b=b, weights=np.arange(11.0)).x, neula.lstsq(a, b).x, atol=9)


def test_weights_are_those_of_a_call() -> None:
    """In solutions and all that is computed from them, not those for which the plan was made."""
    a, b = normal(12, 3), normal(12)
    for seed in range(4):
        weights = np.exp(normal_array(12, seed=seed))
        found = neula.lstsq(a, b, weights=weights)
        alone = neula.lstsq(weights[:, None] * a, weights * b)
        assert np.allclose(found.x, alone.x, rtol=1e-12)
        assert np.allclose(found.residual_norm, alone.residual_norm, rtol=1e-12)
        assert np.allclose(found.covariance(), alone.covariance(), rtol=1e-10)
        assert found.forward_error > alone.forward_error  # weighted elements are rounded
    weights[3] = np.nan
    with pytest.raises(ValueError, match="weights"):
        neula.lstsq(a, b, weights=weights)
    for _ in range(3):
        with pytest.raises(ValueError, match="weights must have shape"):
            neula.lstsq(a, b, weights=np.ones(11))


def test_views_of_arrays() -> None:
    a, b = normal(12, 6), normal(12)
    for _ in range(3):
        expected = neula.lstsq(a[::2], b[::2]).x
        neula.lstsq(a[::2].copy(), b[::2].copy())
    assert np.allclose(neula.lstsq(a[::2].copy(), b[::2].copy()).x, expected, rtol=1e-12)
    frozen = a[::2].copy()
    frozen.flags.writeable = False
    assert np.allclose(neula.lstsq(frozen, b[::2].copy()).x, expected, rtol=1e-12)


def test_reversed_rows() -> None:
    """A single row is contiguous in memory, whatever its stride."""
    a, b = normal(2, 1)[::-2], normal(2)[::-2]
    assert a.flags.carray
    for function in (
        neula.lu_factor,
        neula.qr,
        neula.cholesky,
        neula.pinv,
        lambda x: neula.orth(x, rcond=0.1),
    ):
        for _ in range(3):
            function(a**2 if function is neula.cholesky else a)
    factors = neula.lu_factor(a)
    for _ in range(3):
        assert np.allclose(neula.lu_solve(factors, b), b / a[0])
        assert np.allclose(neula.solve(a, b).x, b / a[0])
        assert np.allclose(neula.lstsq(a, b).x, b / a[0])


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
    some = Plans(lambda x: made.append(len(x)), operands=1)  # type: ignore[arg-type,func-returns-value]
    for n in range(6):
        for _ in range(3):
            assert some((np.ones(n),), {}) is None
    assert made == [0, 1, 2, 3, 4, 5]
    assert 0 < len(some._plans) <= 4


def test_new_shapes_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second call on; wrong ones are errors as in a first call."""
    functions: list[Any] = [neula.solve, neula.lstsq]
    shapes = (7, 7), (9, 9), (9, 2), (2, 9), (30, 1)
    for _ in range(2):
        for function in functions:
            with pytest.raises(ValueError, match="do not fit"):
                function(normal(5, 5), normal(6))
        with pytest.raises(ValueError, match="A must be square"):
            neula.solve(normal(6, 5), normal(6))
    for m, n in shapes:
        neula.lstsq(normal(m, n), normal(m))
        if m == n:
            neula.solve(normal(m, n), normal(m))
    begun: list[None] = []
    for module in (run, solve):
        monkeypatch.setattr(module, "solved_by_plan", lambda *_: begun.append(None))
    for m, n in shapes:
        a, b = normal(m, n), normal(m)
        found = neula.lstsq(a, b)
        assert np.allclose(found.x, np.linalg.pinv(a) @ b)
        assert found.rank == found.full_rank == min(m, n)
        if m == n:
            assert np.allclose(neula.solve(a, b).x, found.x)
    assert not begun


@pytest.mark.parametrize("asked", [{}, {"accuracy": "fp32"}, {"assume_a": "pos"}])
def test_larger_systems_are_planned(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that LAPACK factorizes, and the core measures."""
    half, b = normal(410, 820), normal(410, 2)
    a = half @ half.T
    first, _ = [neula.solve(a, b, **asked) for _ in range(2)]
    begun: list[None] = []
    monkeypatch.setattr(solve, "solved_by_plan", lambda *_: begun.append(None))
    third = neula.solve(a, b, **asked)
    assert not begun
    assert third.converged
    for name in ("method", "iterations", "accuracy", "tolerance", "digits"):
        assert getattr(third, name) == getattr(first, name), name
    exact = np.linalg.solve(a, b)
    sizes = np.linalg.norm(a, axis=0)[:, None]
    error = np.linalg.norm(sizes * (third.x - exact), axis=0) / np.linalg.norm(sizes * exact, axis=0)
    assert (error <= 2 * np.asarray(third.forward_errors)).all()
    a[3, 4] = np.nan
    with pytest.raises(ValueError, match=r"A\[3, 4\]"):
        neula.solve(a, b, **{**asked, "assume_a": "gen"})


def test_an_accuracy_that_is_a_number_is_that_of_a_shape() -> None:
    error = 1.1 * lstsq_bound(FORMATS["fp64"], 2)
    for _ in range(3):
        assert neula.lstsq(normal(9, 2), normal(9), accuracy=error).accuracy == "fp64"
        with pytest.raises(ValueError, match="finer than can be certified"):
            neula.lstsq(normal(90, 80), normal(90), accuracy=error)


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("n", [1, 9, 95, 96, 255, 256])
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


@pytest.mark.parametrize("mode", ["reduced", "r"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("shape", [(1, 1), (20, 5), (9, 9), (300, 40), (6, 20, 5)])
@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
def test_qr(wrap: Any, shape: tuple[int, ...], dtype: Any, mode: str) -> None:
    a = normal(*shape, dtype=dtype)
    first, _, third = [neula.qr(wrap(a), mode=mode) for _ in range(3)]
    assert repr(third).splitlines()[:-1] == repr(first).splitlines()[:-1]
    for name in ("Q", "R", "certificate", "attempts", "engine", "accuracy", "converged"):
        one, other = getattr(first, name), getattr(third, name)
        assert type(one) is type(other), name
        same = np.array_equal(one, other) if name in "QR" and one is not None else repr(one) == repr(other)
        assert same, name
    assert np.asarray(third.accepted).all()
    a[(0,) * a.ndim] = np.nan
    if a.ndim == 2:
        with pytest.raises(ValueError, match=r"A\[0, 0\]"):
            neula.qr(wrap(a), mode=mode)
    else:
        with pytest.warns(neula.AccuracyWarning, match="hold NaN"):
            neula.qr(wrap(a), mode=mode)
    assert not np.asarray(neula.qr(wrap(np.zeros(shape, dtype)), mode=mode).R).any()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("shape", [(1, 1), (20, 5), (9, 9), (300, 40)])
@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
def test_bases_of_ranges(wrap: Any, shape: tuple[int, int], dtype: Any) -> None:
    a = normal(*shape, dtype=dtype)
    first, _, third = [neula.orth(wrap(a), rcond=1e-5) for _ in range(3)]
    assert type(first) is type(third)
    assert np.array_equal(first, third)
    if shape[1] > 1:
        a[:, -1] = a[:, 0]
        assert neula.orth(wrap(a), rcond=1e-5).shape == (shape[0], shape[1] - 1)
    a[0, 0] = np.inf
    with pytest.raises(ValueError, match=r"A\[0, 0\]"):
        neula.orth(wrap(a), rcond=1e-5)


FIELDS = ("variant", "panel", "inner_panel", "compute", "storage", "engine", "dtype", "growth", "shape")


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("n", [1, 9, 120])
@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
def test_lu_factors(wrap: Any, n: int, dtype: Any) -> None:
    a = normal(n, n, dtype=dtype)
    first, _, third = [neula.lu_factor(wrap(a)) for _ in range(3)]
    for name in FIELDS:
        assert getattr(first, name) == getattr(third, name), name
    assert first.pivots == third.pivots
    for one, other in ((first.L, third.L), (first.U, third.U)):
        assert type(one) is type(other)
        assert np.array_equal(one, other)
    assert third.keeps_a
    assert not [neula.lu_factor(wrap(a), keep_a=False) for _ in range(3)][-1].keeps_a
    spoilt = a.copy()
    spoilt[0] = 0
    with pytest.raises(np.linalg.LinAlgError):
        neula.lu_factor(wrap(spoilt))
    spoilt[0] = np.inf
    with pytest.raises(ValueError, match="inf"):
        neula.lu_factor(wrap(spoilt))
    small = a * np.finfo(dtype).tiny
    assert np.allclose(neula.lu_factor(wrap(small)).L, first.L, rtol=0, atol=1e-2)


@pytest.mark.parametrize("k", [(), (3,)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("n", [1, 9, 120])
@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
def test_solutions_with_factors_are_measured(wrap: Any, n: int, dtype: Any, k: tuple[int, ...]) -> None:
    a, b = normal(n, n, dtype=dtype), normal(n, *k, dtype=dtype)
    factors = neula.lu_factor(wrap(a))
    first, second = [neula.lu_solve(factors, wrap(b)) for _ in range(2)]
    assert type(first) is type(second)
    assert first.shape == second.shape == b.shape
    exact, condition = np.linalg.solve(a.astype(float), b.astype(float)), np.linalg.cond(a.astype(float))
    for x in (first, second):
        error = np.linalg.norm(np.asarray(x) - exact) / np.linalg.norm(exact)
        assert error <= (8 + n**0.5) * np.finfo(dtype).eps * condition
    measured = factors._solvers.measured
    assert measured is not None
    assert np.array_equal(measured(wrap(b)), second)
    assert measured(wrap(0 * b)) is None
    assert measured(wrap(np.nan * b)) is None
    measured._lu = measured._lu * (1 + 1e-3 * normal(n, n, dtype=dtype))  # type: ignore[attr-defined]
    assert measured(wrap(b)) is None


def test_factors_of_a_matrix_that_changes() -> None:
    a, b = normal(30, 30), normal(30)
    factors, pair = neula.lu_factor(a), lu_factor(a)
    x = [(neula.lu_solve(factors, b), lu_solve(pair, b)) for _ in range(2)][-1][1]
    a[3, 4] += 1
    with pytest.raises(ValueError, match="A was changed"):
        neula.lu_solve(factors, b)
    assert np.array_equal(lu_solve(pair, b), x)


def test_ill_conditioned_factors_are_not_trusted() -> None:
    a = normal(12, 12)
    a[:, 0] = a[:, 1] + 1e-16 * a[:, 0]
    factors = neula.lu_factor(a)
    for _ in range(3):
        with pytest.warns(neula.IllConditionedWarning):
            neula.lu_solve(factors, np.ones(12))


DEFINITE, TALL, SMALL = SQUARE @ SQUARE.T + np.eye(7), normal(20, 5), np.array([[1.0, 2], [3, 4], [5, 7]])
SUBNORMAL = (np.arange(1, 17, dtype="f").reshape(4, 4) + 8 * np.eye(4, dtype="f")) * np.float32(1e-42)
THRICE: list[tuple[Any, np.ndarray, dict[str, Any], str]] = [
    (neula.polar, SMALL * 1e-310, {}, "True"),
    (neula.polar, SUBNORMAL, {}, "True"),
    (neula.polar, SUBNORMAL.astype("F"), {}, "True"),
    (neula.qr, normal(5, 20), {"cutoff": 0}, "ValueError"),
    (neula.qr, TALL, {"cutoff": 0}, "ValueError"),
    *((neula.qr, TALL, {name: ""}, "ValueError") for name in ("panel", "algorithm", "compute")),
    (neula.orth, TALL, {"progress": 0}, "TypeError: progress is 0"),
    (neula.cholesky, DEFINITE, {"progress": 0}, "TypeError: progress is 0"),
    (neula.cholesky, DEFINITE, {"upper": "yes"}, "True"),
    (neula.eigh, DEFINITE, {"upper": None}, "True"),
    (lambda a, **asked: neula.lstsq(a, a[:, 0], **asked), TALL, {"certify": None}, "ValueError"),
    (neula.fractional_matrix_power, DEFINITE, {}, "missing 1 required positional argument: 'p'"),
    (neula.polar, DEFINITE, {"foo": 1}, "polar() got an unexpected keyword argument 'foo'"),
    (neula.eigh, DEFINITE, {"foo": None}, "eigh() got an unexpected keyword argument 'foo'"),
    (neula.lu_factor, DEFINITE, {"foo": None}, "lu_factor() got an unexpected keyword argument 'foo'"),
]


@pytest.mark.parametrize(("function", "a", "asked", "expected"), THRICE)
def test_each_call_says_the_same(function: Any, a: np.ndarray, asked: dict[str, Any], expected: str) -> None:
    def said() -> str:
        try:
            return str(function(a, **asked).converged)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    first, *others = [said() for _ in range(3)]
    assert expected in first
    assert others == [first, first]


ROOT = partial(neula.fractional_matrix_power, p=0.3)


@pytest.mark.parametrize("function", [neula.eigh, neula.svd, neula.polar, neula.sqrtm, ROOT])
def test_results_do_not_keep_matrices(function: Any) -> None:
    for place in range(4):
        a = DEFINITE.copy()
        known, found = weakref.ref(a), function(a)
        del a
        gc.collect()
        assert found.converged
        assert known() is None or not place  # the front end of a first call may


@pytest.mark.parametrize("function", [neula.eigh, neula.svd, neula.polar, neula.sqrtm, ROOT])
def test_where_lapack_fails_the_chain_goes_on(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = function(DEFINITE), function(DEFINITE)

    def fail(*_: Any, **__: Any) -> None:
        raise torch.linalg.LinAlgError("did not converge")

    for name in ("eigh", "svd"):
        monkeypatch.setattr(torch.linalg, name, fail)
    found = function(DEFINITE)
    for name in {"eigenvalues", "s", "U", "X"} & {*vars(first)}:
        assert np.allclose(abs(getattr(found, name)), abs(getattr(first, name))), name


@pytest.mark.parametrize("vectors", [True, False])
def test_bounds_are_those_of_what_was_returned(vectors: bool) -> None:
    values = partial(neula.eigh, eigvals_only=not vectors), partial(neula.svd, compute_uv=vectors)
    for function, name in zip(values, ("eigenvalues", "s"), strict=True):
        _, one, other = [function(DEFINITE) for _ in range(3)]
        getattr(one, name)[:] *= 1e6
        for of in ("errors", "gaps", "vector_errors")[: 3 if vectors else 1]:
            assert np.array_equal(getattr(one, of), getattr(other, of)), of
