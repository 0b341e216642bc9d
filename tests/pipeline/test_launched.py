"""Plans of a device: what its first link solves is told of as by the chain, and what it does not goes on."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.matrices import normal_array

import neula
from neula.engines import CpuEngine
from neula.engines.shipped import cuda_tuning
from neula.pipeline import plans
from neula.problems.least_squares import run
from neula.problems.systems import together

normal = partial(normal_array, seed=None)

solve = importlib.import_module("neula.problems.systems.solve")

AS_BY_THE_CHAIN = {"optimality", "_fit", "seconds", "attempts"}
"""Fields that differ: of a batch the optimality is the largest, not that of the worst problem."""


class OnAGPU(CpuEngine):
    """A CPU that takes the steps of a GPU."""

    tuning = cuda_tuning((9, 0), replayed_bytes=1 << 20, corrected=False)


ENGINE = OnAGPU("cpu")


DEFINITE = normal(30, 30) @ normal(30, 30).T + 30 * np.eye(30)
SKEW = normal(30, 30)
CASES: dict[str, tuple[Any, np.ndarray, np.ndarray, dict[str, Any]]] = {
    "system": (neula.solve, normal(30, 30), normal(30), {}),
    "some right-hand sides": (neula.solve, normal(30, 30), normal(30, 3), {}),
    "larger": (neula.solve, normal(270, 270), normal(270), {}),
    "definite": (neula.solve, DEFINITE, normal(30), {"assume_a": "pos"}),
    "float32": (neula.solve, normal(30, 30, dtype=np.float32), normal(30, dtype=np.float32), {}),
    "mixed": (neula.solve, normal(30, 30, dtype=np.float32), normal(30), {"certify": "forward"}),
    "complex": (neula.solve, normal(270, 270) + 1j * normal(270, 270).T, normal(270) + 1j, {}),
    "complex, definite": (neula.solve, DEFINITE + 1j * (SKEW - SKEW.T), normal(30) + 1j, {"assume_a": "pos"}),
    "complex, batch": (neula.solve, normal(3, 20, 20) + 1j * normal(3, 20, 20), normal(3, 20, 1) + 1j, {}),
    "batch": (neula.solve, normal(3, 2, 20, 20), normal(3, 2, 20, 1), {}),
    "one vector for all": (neula.solve, normal(3, 20, 20), normal(20), {}),
    "one matrix": (neula.solve, normal(20, 20), normal(3, 20, 2), {}),
    "tall": (neula.lstsq, normal(50, 7), normal(50), {}),
    "tall, some": (neula.lstsq, normal(50, 7), normal(50, 3), {"accuracy": "fp32"}),
    "tall, float32": (neula.lstsq, normal(50, 7, dtype=np.float32), normal(50, dtype=np.float32), {}),
    "tall, batch": (neula.lstsq, normal(4, 50, 7), normal(4, 50, 2), {}),
    "tall, one vector for all": (neula.lstsq, normal(4, 50, 7), normal(50), {}),
    "wide": (neula.lstsq, normal(7, 50), normal(7), {}),
    "weights": (neula.lstsq, normal(50, 7), normal(50), {"weights": np.linspace(0.1, 2, 50)}),
    "damping": (neula.lstsq, normal(50, 7), normal(50), {"damp": 0.5}),
}


def by_chain(monkeypatch: pytest.MonkeyPatch, function: Any, *args: Any, **asked: Any) -> Any:
    with monkeypatch.context() as patched:
        for module in (run, solve):
            patched.setattr(module, "solved_by_plan", lambda *_: None)
        return function(*args, engine=OnAGPU("cpu"), **asked)


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("name", CASES)
def test_the_same_is_said(name: str, wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    function, a, b, asked = CASES[name]
    a, b = wrap(a), wrap(b)
    expected = by_chain(monkeypatch, function, a, b, **asked)
    first, _, third = [function(a, b, engine=ENGINE, **asked) for _ in range(3)]
    for found in (first, third):
        assert [x.method for x in found.attempts] == [x.method for x in expected.attempts]
        if found.accepted.ndim == 0 or function is neula.lstsq:  # of systems the chain tells of the worst one
            assert [x.reason for x in found.attempts] == [x.reason for x in expected.attempts]
        assert vars(found).keys() <= vars(expected).keys()
        for field in vars(found).keys() - AS_BY_THE_CHAIN:
            one, other = getattr(found, field), getattr(expected, field)
            assert type(one) is type(other), field
            if isinstance(one, np.ndarray | torch.Tensor):
                assert one.dtype == other.dtype, field
                assert np.array_equal(one, other), field
            else:
                assert one == other, field
        assert repr(found).splitlines()[:-1] == repr(expected).splitlines()[:-1]
        assert 0 < found.seconds < 10


@pytest.mark.parametrize("engine", [CpuEngine("cpu"), ENGINE])
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


def test_what_cannot_be_solved_is_told_of_as_at_first() -> None:
    a, b = normal(12, 12), normal(12)
    for _ in range(3):
        neula.solve(a, b, engine=ENGINE)
        neula.lstsq(a, b, engine=ENGINE)
    spoilt = a.copy()
    spoilt[3, 4] = np.nan
    for function in (neula.solve, neula.lstsq):
        with pytest.raises(ValueError, match=r"A\[3, 4\]"):
            function(spoilt, b, engine=ENGINE)
    singular = a.copy()
    singular[:, 5] = singular[:, 2]
    with pytest.raises((np.linalg.LinAlgError, neula.AccuracyError), match="singular"):
        neula.solve(singular, b, engine=ENGINE, strict=True)
    huge = 1e300 * np.eye(12)
    with pytest.raises(OverflowError):
        neula.solve(1e-300 * huge / 1e300, np.full(12, 1e300), engine=ENGINE)


def test_what_is_not_waited_for_stays_so() -> None:
    a, b = normal(26, 26), normal(26)
    for function in (neula.solve, neula.lstsq):
        for _ in range(3):
            assert function(a, b, engine=ENGINE)._pending is None
        for _ in range(3):
            found = function(a, b, engine=ENGINE, wait=False)
            assert found._pending is not None
            assert neula.finish(found).converged


def test_gradients_and_weights_take_no_plan() -> None:
    a, b = torch.from_numpy(normal(22, 5)), torch.from_numpy(normal(22))
    weights = torch.linspace(1, 2, 22, dtype=torch.float64)
    for _ in range(3):
        plain = neula.lstsq(a, b, engine=ENGINE).x
        weighted = neula.lstsq(a, b, weights=weights, engine=ENGINE).x
    assert not torch.allclose(plain, weighted)
    weights[0] = 100.0
    assert not torch.equal(neula.lstsq(a, b, weights=weights, engine=ENGINE).x, weighted)
    assert neula.lstsq(a.clone().requires_grad_(), b, engine=ENGINE).x.requires_grad


def test_too_little_memory_is_left_to_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    a, b = normal(28, 28), normal(28)
    for _ in range(3):
        neula.solve(a, b, engine=ENGINE)
    monkeypatch.setattr(together, "_supposed", short)
    monkeypatch.setattr(together, "_launched", short)
    found = neula.solve(a, b, engine=ENGINE)
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


@pytest.mark.parametrize("engine", [CpuEngine("cpu"), ENGINE])
@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize(
    ("shape", "asked"),
    [
        ((260, 260), {}),  # smaller ones have a plan of their own
        ((270, 270), {"upper": True}),
        ((3, 2, 30, 30), {}),
        ((280, 280), {"accuracy": "fp32"}),
    ],
)
def test_cholesky_factors(
    shape: tuple[int, ...], asked: dict[str, Any], wrap: Any, engine: CpuEngine
) -> None:
    u = normal(*shape)
    a = u @ u.swapaxes(-1, -2) + np.eye(shape[-1])
    first, _, third = [neula.cholesky(wrap(a), engine=engine, **asked) for _ in range(3)]
    factor = np.asarray(third.factor)
    lower = factor.swapaxes(-1, -2) if asked.get("upper") else factor
    bound = third.bound * np.linalg.norm(a)
    assert np.linalg.norm(lower @ lower.swapaxes(-1, -2) - a) <= bound
    for field in ("factor", "residuals", "accepted"):
        one, other = getattr(first, field), getattr(third, field)
        assert type(one) is type(other) is type(wrap(a)), field
        assert one.dtype == other.dtype, field
        assert one.shape == other.shape, field
    assert np.array_equal(first.factor, third.factor)
    assert repr(first).splitlines()[:-1] == repr(third).splitlines()[:-1]
    # Pending where it may be, and what is not definite is told of as at first.
    assert neula.finish(neula.cholesky(wrap(a), engine=engine, wait=False, **asked)).converged
    a[..., 7, 7] = -1.0
    for _ in range(3):
        with pytest.raises(np.linalg.LinAlgError, match="not positive definite"):
            neula.cholesky(wrap(a), engine=engine, **asked)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [50, 1000])
def test_cholesky_factors_on_a_gpu(n: int) -> None:
    u = torch.randn(n, n, dtype=torch.float64, device="cuda")
    many = [u @ u.mT + (i + 1) * n * torch.eye(n, dtype=u.dtype, device="cuda") for i in range(5)]
    found = [neula.cholesky(a) for a in many]
    for a, each in zip(many, found, strict=True):
        assert each.accepted.device == each.residuals.device == a.device
        assert float((each.L @ each.L.mT - a).norm() / a.norm()) <= each.bound
