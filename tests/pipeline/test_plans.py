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
from neula.engines import FORMATS, CpuEngine
from neula.engines.shipped import cuda_tuning
from neula.kernels import core
from neula.pipeline import plans
from neula.pipeline.plans import Plans
from neula.problems.least_squares import run
from neula.problems.systems import together

normal = partial(normal_array, seed=None)

solve = importlib.import_module("neula.problems.systems.solve")

pytestmark = pytest.mark.skipif(core.core() is None, reason="plans are for the compiled core")


class OnAGPU(CpuEngine):
    """A CPU that takes the steps of a GPU."""

    tuning = cuda_tuning((9, 0), replayed_bytes=1 << 20, corrected=False)


DEVICE = OnAGPU("cpu")


@pytest.fixture(params=["auto", DEVICE], ids=["core", "device"])
def engine(request: pytest.FixtureRequest) -> Any:
    """Plans of the compiled core, and of a device: what its first link does not solve goes on."""
    return request.param


def dependent(m: int, n: int) -> np.ndarray:
    a = normal(m, n)
    a[:, -1] = a[:, 0]
    return a


SQUARE = normal(7, 7)
SKEW = normal(30, 30)
GRAM = SKEW @ SKEW.T + 30 * np.eye(30)
CASES: dict[str, tuple[Any, np.ndarray, np.ndarray, dict[str, Any]]] = {
    "system": (neula.solve, SQUARE, normal(7), {}),
    "some right-hand sides": (neula.solve, SQUARE, normal(7, 3), {}),
    "larger": (neula.solve, normal(270, 270), normal(270), {}),
    "float32": (neula.solve, SQUARE.astype(np.float32), normal(7, dtype=np.float32), {}),
    "mixed": (neula.solve, SQUARE.astype(np.float32), normal(7), {"certify": "forward"}),
    "definite": (neula.solve, GRAM, normal(30), {"assume_a": "pos"}),
    "complex": (neula.solve, normal(270, 270) + 1j * normal(270, 270).T, normal(270) + 1j, {}),
    "complex, definite": (neula.solve, GRAM + 1j * (SKEW - SKEW.T), normal(30) + 1j, {"assume_a": "pos"}),
    "coarse": (neula.solve, SQUARE, normal(7), {"accuracy": "fp32"}),
    "systems": (neula.solve, normal(3, 2, 20, 20), normal(3, 2, 20, 1), {}),
    "systems, complex": (neula.solve, normal(2, 3, 7, 7) + 1j * SQUARE, normal(2, 3, 7, 1) + 0j, {}),
    "one vector for all": (neula.solve, normal(3, 20, 20), normal(20), {}),
    "one matrix": (neula.solve, normal(20, 20), normal(3, 20, 2), {}),
    "tall": (neula.lstsq, normal(20, 5), normal(20), {}),
    "tall, some": (neula.lstsq, normal(20, 5), normal(20, 3), {"accuracy": "fp32"}),
    "tall, float32": (neula.lstsq, normal(20, 5, dtype=np.float32), normal(20, dtype=np.float32), {}),
    "wide": (neula.lstsq, normal(5, 20), normal(5), {}),
    "all digits": (neula.lstsq, normal(20, 5), normal(20), {"certify": "forward"}),
    "one column": (neula.lstsq, normal(3, 1), normal(3, 1), {}),
    "columns of a view": (neula.lstsq, normal(5, 20).T, normal(20, 2)[:, 0], {}),
    "tall ones": (neula.lstsq, normal(3, 20, 5), normal(3, 20, 2), {}),
    "wide ones, float32": (neula.lstsq, normal(3, 5, 20, dtype=np.float32), normal(3, 5, 1), {}),
    "one vector": (neula.lstsq, normal(3, 20, 5), normal(20), {"damp": 0.5}),
    "weights": (neula.lstsq, normal(50, 7), normal(50), {"weights": np.linspace(0.1, 2, 50)}),
    "damped": (neula.lstsq, normal(20, 5), normal(20), {"damp": 0.5}),
    "damped, wide": (neula.lstsq, normal(5, 20, dtype=np.float32), normal(5, 2), {"damp": 0.5}),
    "dependent": (neula.lstsq, dependent(20, 5), normal(20), {"rcond": 1e-10}),
    "weighted": (neula.lstsq, normal(20, 5), normal(20), {"weights": np.arange(20.0)}),
    "weighted, damped": (
        neula.lstsq,
        normal(20, 5, dtype=np.float32),
        normal(20, 2, dtype=np.float32),
        {"damp": 0.5, "weights": -np.arange(20.0, dtype=np.float32)},
    ),
    "weighted ones": (neula.lstsq, normal(3, 20, 5), normal(3, 20), {"weights": np.arange(20.0)}),
}


def compare(found: Any, expected: Any, but: set[str]) -> None:
    """All fields, with their types, and what is shown."""
    assert vars(found).keys() <= vars(expected).keys()
    for field in vars(found).keys() - {"seconds", "_fit"} - but:
        one, other = getattr(found, field), getattr(expected, field)
        assert type(one) is type(other), field
        if isinstance(one, np.ndarray | torch.Tensor):
            assert one.dtype == other.dtype, field
            assert np.array_equal(one, other), field
        else:
            assert one == other, field
    assert repr(found).splitlines()[:-1] == repr(expected).splitlines()[:-1]
    assert 0 < found.seconds < 10


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("name", CASES)
def test_the_same_is_said(name: str, wrap: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    function, a, b, asked = CASES[name]
    call = partial(function, wrap(a), wrap(b), engine=engine, **asked)
    with monkeypatch.context() as patched:
        for module in (run, solve):
            patched.setattr(module, "solved_by_plan", lambda *_: None)
        expected = call()
    first, _, third = [call() for _ in range(3)]
    # Of a batch a device gives the largest optimality, and the chain that of the worst problem.
    but = set() if engine == "auto" else {"optimality", "attempts"}
    for found in (first, third):
        compare(found, expected, but)
        assert [x.method for x in found.attempts] == [x.method for x in expected.attempts]
        if found.accepted.ndim == 0 or function is neula.lstsq:  # of systems the chain tells of the worst one
            assert [x.reason for x in found.attempts] == [x.reason for x in expected.attempts]
    assert pickle.loads(pickle.dumps(third)).backward_error == expected.backward_error


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize(
    "name", ["lu_factor", "qr", "cholesky", "eigh", "svd", "polar", "sqrtm", "orth", "pinv"]
)
def test_results_travel(name: str, wrap: Any) -> None:
    a = SQUARE @ SQUARE.T + np.eye(7)
    for _ in range(3):
        found = getattr(neula, name)(wrap(a))
        assert repr(pickle.loads(pickle.dumps(found))) == repr(found)


def test_what_is_not_accepted_goes_through_the_chain(engine: Any) -> None:
    a, b = normal(9, 9), normal(9)
    for function in (neula.solve, neula.lstsq):
        for _ in range(3):
            assert function(a, b, engine=engine).converged
        spoilt = a.copy()
        spoilt[3, 4] = np.nan
        with pytest.raises(ValueError, match=r"A\[3, 4\]"):
            function(spoilt, b, engine=engine)
    with pytest.raises((np.linalg.LinAlgError, neula.AccuracyError), match="singular"):
        neula.solve(dependent(9, 9), b, engine=engine, strict=True)
    expected = neula.solve(a, b, engine=engine).x / 1e300
    assert np.allclose(neula.solve(1e300 * a, b, engine=engine).x, expected, rtol=1e-9)
    with pytest.raises(OverflowError):
        neula.solve(1e-300 * np.eye(9), np.full(9, 1e300), engine=engine)


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


def test_gradients_and_weights_take_no_plan(engine: Any) -> None:
    a, b = torch.from_numpy(normal(8, 8)), torch.from_numpy(normal(8))
    weights = torch.linspace(1, 2, 8, dtype=torch.float64)
    wanted, tall = a.clone().requires_grad_(), a[:, :3].clone()
    for _ in range(3):
        neula.solve(a, b, engine=engine)
        plain = neula.lstsq(tall, b, engine=engine).x
        weighted = neula.lstsq(tall, b, weights=weights, engine=engine).x
    assert not torch.allclose(plain, weighted)
    weights[0] = 100.0
    assert not torch.equal(neula.lstsq(tall, b, weights=weights, engine=engine).x, weighted)
    assert neula.solve(wanted, b, engine=engine).x.requires_grad
    assert neula.lstsq(wanted[:, :3], b, engine=engine).x.requires_grad
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
        x = neula.solve(dual, b, engine=engine).x
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


@pytest.mark.parametrize("asked", [{}, {"upper": True}, {"accuracy": "fp32"}], ids=str)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    "shape", [(1, 1), (9, 9), (95, 95), (96, 96), (255, 255), (260, 260), (3, 2, 30, 30)]
)
@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
def test_cholesky(wrap: Any, shape: tuple[int, ...], dtype: Any, asked: dict[str, Any], engine: Any) -> None:
    a, n = normal(*shape), shape[-1]
    a = (a @ a.swapaxes(-1, -2) + np.eye(n)).astype(dtype)
    call = partial(neula.cholesky, engine=engine, **asked)
    given = a.copy()
    given[(..., 0, -1) if "upper" not in asked else (..., -1, 0)] += n > 1  # which is not read
    first, _, third = [call(wrap(given)) for _ in range(3)]
    factor = np.asarray(third.factor, float)
    lower = factor.swapaxes(-1, -2) if "upper" in asked else factor
    assert np.linalg.norm(lower @ lower.swapaxes(-1, -2) - a) <= third.bound * np.linalg.norm(a.astype(float))
    assert third.residual <= third.bound == first.bound
    assert third.residual == pytest.approx(first.residual, rel=4, abs=1e-300) or "accuracy" in asked
    eps = np.finfo(np.float32 if "accuracy" in asked else dtype).eps
    assert np.allclose(third.factor, first.factor, rtol=0, atol=8 * n * eps * np.abs(a).max())
    for field in ("factor", "residuals", "accepted"):
        one, other = getattr(first, field), getattr(third, field)
        assert type(one) is type(other) is type(wrap(a)), field
        assert (one.dtype, one.shape) == (other.dtype, other.shape), field
    assert not np.asarray(third.L)[..., *np.triu_indices(n, 1)].any()
    assert neula.finish(call(wrap(given), wait=False)).converged
    for spoilt, why in ((-a, np.linalg.LinAlgError), (a * np.nan, ValueError)):
        with pytest.raises(why):
            call(wrap(spoilt))


@pytest.mark.parametrize("mode", ["reduced", "r"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("shape", [(1, 1), (20, 5), (9, 9), (300, 40), (6, 20, 5)])
@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
def test_qr(wrap: Any, shape: tuple[int, ...], dtype: Any, mode: str) -> None:
    a = normal(*shape, dtype=dtype)
    first, _, third = [neula.qr(wrap(a), mode=mode) for _ in range(3)]
    compare(third, first, {"_factors", "certificate"})
    assert repr(third.certificate) == repr(first.certificate)
    assert np.array_equal(third.R, first.R)
    assert mode == "r" or np.array_equal(third.Q, first.Q)
    assert np.asarray(third.accepted).all()
    a[(0,) * a.ndim] = np.nan
    if a.ndim == 2:
        with pytest.raises(ValueError, match=r"A\[0, 0\]"):
            neula.qr(wrap(a), mode=mode)
    else:
        with pytest.warns(neula.AccuracyWarning, match="hold NaN"):
            neula.qr(wrap(a), mode=mode)
    assert not np.asarray(neula.qr(wrap(np.zeros(shape, dtype)), mode=mode).R).any()


BASES = [
    (partial(neula.orth, rcond=1e-5), r"A\[0, 0\]", [(1, 1), (20, 5), (9, 9), (300, 40)]),
    (neula.pinv, "must be finite", [(20, 5), (5, 20), (6, 6)]),
]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("function", "message", "shapes"), BASES)
@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
def test_matrices(wrap: Any, function: Any, message: str, shapes: list[tuple[int, int]], dtype: Any) -> None:
    for shape in shapes:
        a = normal(*shape, dtype=dtype)
        first, _, third = [function(wrap(a)) for _ in range(3)]
        assert type(first) is type(third)
        assert np.array_equal(first, third)
        a[:, -1] = a[:, 0]
        if function is not neula.pinv and shape[1] > 1:
            assert function(wrap(a)).shape == (shape[0], shape[1] - 1)
        a[0, 0] = np.inf
        with pytest.raises(ValueError, match=message):
            function(wrap(a))


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
    exact, condition = np.linalg.solve(a, b), np.linalg.cond(a)
    factors, pair = neula.lu_factor(a), lu_factor(a)
    for _ in range(2):
        neula.lu_solve(factors, b)
        lu_solve(pair, b)
    a[3, 4] += 1
    with pytest.raises(ValueError, match="A was changed"):
        neula.lu_solve(factors, b)
    # Solutions with the factors alone, which are those of the matrix before: of this one and of NumPy.
    assert np.linalg.norm(lu_solve(pair, b) - exact) <= 2 * 30 * 2.0**-53 * condition * np.linalg.norm(exact)


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


@pytest.mark.parametrize("engine", [CpuEngine("cpu"), DEVICE])
def test_operands_of_a_device(engine: CpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands that the host solves sooner are fetched, and results are tensors where the operands are."""

    def given(args: Any, begun: float, copied: float) -> plans.Given:
        return plans.Given(args, lambda x: torch.from_numpy(x).clone(), begun, lambda x: x, args)

    monkeypatch.setattr(plans, "given_arrays", given)
    a, b = torch.from_numpy(normal(32, 8)), torch.from_numpy(normal(32))
    square = a @ a.mT + torch.eye(32, dtype=a.dtype)
    calls: list[Any] = [
        lambda: neula.lstsq(a, b, engine=engine).x,
        lambda: neula.lstsq(a, b, engine=engine).forward_errors,
        lambda: neula.lstsq(a, b, engine=engine).standard_errors(),
        lambda: neula.solve(square, b, engine=engine).x,
        lambda: neula.cholesky(square, engine=engine).L,
        lambda: neula.pinv(a, engine=engine),
    ]
    for call in calls:
        first, _, third = [call() for _ in range(3)]
        assert type(third) is torch.Tensor
        assert third.dtype == first.dtype
        assert torch.allclose(third, first, rtol=1e-12, atol=1e-14)


def test_what_is_not_waited_for_stays_so() -> None:
    a, b = normal(26, 26), normal(26)
    for function in (neula.solve, neula.lstsq):
        for _ in range(3):
            assert function(a, b, engine=DEVICE)._pending is None
        for _ in range(3):
            found = function(a, b, engine=DEVICE, wait=False)
            assert found._pending is not None
            assert neula.finish(found).converged


def test_too_little_memory_is_left_to_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    a, b = normal(28, 28), normal(28)
    for _ in range(3):
        neula.solve(a, b, engine=DEVICE)
    monkeypatch.setattr(together, "_supposed", short)
    monkeypatch.setattr(together, "_launched", short)
    found = neula.solve(a, b, engine=DEVICE)
    assert found.converged
    assert found.attempts[0].method == "out of memory"


@pytest.mark.gpu
@pytest.mark.parametrize("n", [8, 64, 150, 500])
@pytest.mark.parametrize("name", ["solve", "pos", "lstsq"])
def test_on_a_gpu(n: int, name: str) -> None:
    """Tensors stay there, results are not overwritten by the next call, whatever its stream."""
    function = neula.lstsq if name == "lstsq" else neula.solve
    asked = {"assume_a": "pos"} if name == "pos" else {}
    many = [torch.randn(2 * n, n, dtype=torch.float64, device="cuda") for _ in range(6)]
    if name != "lstsq":
        many = [a.mT @ a + n * torch.eye(n, device="cuda", dtype=a.dtype) for a in many]
    x = torch.ones(n, dtype=torch.float64, device="cuda")
    results = []
    for i, a in enumerate(many):
        with torch.cuda.stream(torch.cuda.Stream() if i > 3 else torch.cuda.current_stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            results.append(function(a, a @ (x * (i + 1)), **asked))
    torch.cuda.synchronize()
    for i, found in enumerate(results):
        assert found.converged
        assert found.engine == results[0].engine
        assert found.x.device == x.device
        assert found.forward_errors.device == found.accepted.device == x.device
        assert float((found.x / (i + 1) - x).abs().max()) <= 1e-9
    if name == "lstsq":
        assert results[-1].standard_errors().device == x.device


@pytest.mark.gpu
def test_what_a_gpu_does_not_solve_goes_on() -> None:
    a = torch.randn(300, 40, dtype=torch.float64, device="cuda")
    b = torch.randn(300, dtype=torch.float64, device="cuda")
    for _ in range(3):
        assert neula.lstsq(a, b).rank == 40
    dependent = a.clone()
    dependent[:, 7] = dependent[:, 3]
    assert neula.lstsq(dependent, b).rank == 39
    dependent[2, 3] = torch.nan
    with pytest.raises(ValueError, match=r"A\[2, 3\]"):
        neula.lstsq(dependent, b)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [50, 1000])
def test_cholesky_factors_on_a_gpu(n: int) -> None:
    u = torch.randn(n, n, dtype=torch.float64, device="cuda")
    many = [u @ u.mT + (i + 1) * n * torch.eye(n, dtype=u.dtype, device="cuda") for i in range(5)]
    found = [neula.cholesky(a) for a in many]
    for a, each in zip(many, found, strict=True):
        assert each.accepted.device == each.residuals.device == a.device
        assert float((each.L @ each.L.mT - a).norm() / a.norm()) <= each.bound
