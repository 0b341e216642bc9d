"""Answers that nobody waits for: nothing is read before they are finished, and then they are as ever."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.matrices import normal
from torch.utils._python_dispatch import TorchDispatchMode

import neula
from neula.engines import CpuEngine
from neula.engines.formats import FORMATS
from neula.engines.shipped import cuda_tuning
from neula.pipeline.chain import first_answer
from neula.problems.polar.links import chain
from neula.problems.polar.problem import PolarJudge, PolarMatrices, PolarOptions

READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "allclose", "masked_select"}


class Gpu(CpuEngine):
    """A CPU that takes the steps of a GPU, in formats that any CPU has."""

    tuning = replace(
        cuda_tuning((9, 0), replayed_bytes=1 << 28), corrected=False, arithmetics=("fp32", "fp64")
    )


class NobodyLooks(TorchDispatchMode):
    """Fails where a host would have to wait for numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        assert name not in READS, f"{name} reads numbers"
        return func(*args, **(kwargs or {}))


def definite(*shape: int) -> torch.Tensor:
    a = normal(*shape)
    return a @ a.mT + torch.eye(shape[-1])


GPU = Gpu("cpu")
STEPS = ["qr", "orth", "polar", "lstsq", "solve", "cholesky"]
A = normal(4, 60, 40, dtype=torch.float32)
B = normal(60, seed=1, dtype=torch.float32)
TALL, SQUARE = normal(300, 60, dtype=torch.float32), normal(3, 20, 20)

CALLS: dict[str, Callable[..., Any]] = {
    "qr of a batch": lambda **k: neula.qr(A, engine=GPU, **k),
    "qr of one": lambda **k: neula.qr(TALL, engine=GPU, **k),
    "r in double": lambda **k: neula.qr(A.double(), mode="r", accuracy="fp32", engine=GPU, **k),
    "qr in half precision": lambda **k: neula.qr(A.half(), engine=GPU, **k),
    "orth": lambda **k: neula.orth(A, engine=GPU, **k),
    "polar": lambda **k: neula.polar(A, side="left", engine=GPU, **k),
    "polar for optimizers": lambda **k: neula.polar(A.mT, accuracy="bf16", engine=GPU, **k),
    "polar in half precision": lambda **k: neula.polar(A.bfloat16(), engine=GPU, **k),
    "orth by polar": lambda **k: neula.orth(TALL, method="polar", engine=GPU, **k),
    "cholesky": lambda **k: neula.cholesky(definite(3, 9, 9).float(), upper=True, engine=GPU, **k),
    "cholesky in double": lambda **k: neula.cholesky(definite(3, 9, 9), engine=GPU, **k),
    "lstsq of a batch": lambda **k: neula.lstsq(A, B, engine=GPU, **k),
    "lstsq of one": lambda **k: neula.lstsq(TALL, TALL[:, :2], engine=GPU, **k),
    "solve": lambda **k: neula.solve(SQUARE, B[:20].double(), engine=GPU, **k),
    "solve, definite": lambda **k: neula.solve(
        definite(2, 9, 9), B[:9].double(), assume_a="pos", engine=GPU, **k
    ),
}


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """Random vectors are made once, and normed on the host."""
    for call in CALLS.values():
        call()


def numbers(result: Any) -> list[torch.Tensor]:
    """The answer, which are accepted, and the evidence of each member."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, neula.QRResult):
        return [x for x in (result.Q, result.R, result.accepted) if x is not None]
    if isinstance(result, neula.PolarResult):
        return [x for x in (result.U, result.H, result.accepted, result.ranks) if x is not None]
    if isinstance(result, neula.CholeskyResult):
        return [result.factor, result.residuals, result.accepted]
    return [result.x, result.accepted, result.backward_errors, result.forward_errors, result.conditions]


def same(found: Any, expected: Any) -> bool:
    if getattr(found, "attempts", ()) != getattr(expected, "attempts", ()):
        return False
    pairs = list(zip(numbers(found), numbers(expected), strict=True))
    for x, y in pairs[2:]:  # a waiting call leaves out scales that are one, and rounds elsewhere
        torch.testing.assert_close(x, y, rtol=1e-10, atol=0, equal_nan=True)
    return all(torch.equal(x.nan_to_num(-1.0), y.nan_to_num(-1.0)) for x, y in pairs[:2])


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_read_and_finish_equals_the_waiting_call(name: str) -> None:
    with NobodyLooks():
        pending = CALLS[name](wait=False)
    assert pending._pending is not None
    assert pending.accepted.all()
    finished, expected = neula.finish(pending), CALLS[name]()
    assert same(finished, expected)
    answer = expected if isinstance(expected, torch.Tensor) else numbers(expected)[0]
    assert torch.equal(numbers(pending)[0], answer)
    assert neula.finish(finished) is finished


def test_what_the_first_link_has_not_done_is_done_by_others() -> None:
    """And leaves what was returned before as it was."""
    a = A.clone()
    a[1], a[2, 3, 5] = a[1, :, :1], math.nan
    with NobodyLooks():
        pending = neula.qr(a, engine=GPU, wait=False)
    before = [x.clone() for x in numbers(pending)]
    assert pending.accepted.tolist() == [True, False, False, True]
    with pytest.warns(neula.AccuracyWarning, match=r"A\[2\]"):
        finished = neula.finish(pending)
    with pytest.warns(neula.AccuracyWarning, match=r"A\[2\]"):
        expected = neula.qr(a, engine=GPU)
    assert same(finished, expected)
    assert finished.accepted.tolist() == [True, True, False, True]
    after = zip(numbers(pending), before, strict=True)
    assert all(torch.equal(x.nan_to_num(-1.0), y.nan_to_num(-1.0)) for x, y in after)
    with pytest.warns(neula.AccuracyWarning):
        assert same(neula.finish(pending), expected)


def test_polar_factors_are_judged_where_they_are() -> None:
    """As they are on the host, whatever the spectrum, and a batch goes on with what was rejected."""
    a, _, v = torch.linalg.svd(normal(7, 30, 24), full_matrices=False)
    spectra = [torch.ones(24), torch.logspace(0, -2, 24), torch.logspace(0, -5, 24), torch.zeros(24)]
    spectra += [torch.cat([torch.ones(1), torch.full((23,), small)]) for small in (1e-2, 1e-4, 0.0)]
    a = (a * torch.stack(spectra)[:, None]) @ v
    a = torch.cat([a, torch.full_like(a[:1], math.nan)]).float()
    for accuracy in ("bf16", "fp32"):
        neula.finish(neula.polar(a[:1], accuracy=accuracy, engine=GPU))
        with NobodyLooks():
            pending = neula.polar(a, accuracy=accuracy, engine=GPU, wait=False)
        options = PolarOptions(FORMATS[accuracy], GPU)
        judge = PolarJudge.for_batch(a, options)
        first = first_answer(chain(options), PolarMatrices(a, options))
        assert first is not None
        verdict = judge.verdict(first, first.values.measured().numpy())
        assert pending.accepted.tolist() == verdict.accepted.tolist()
        assert pending.accepted[[0, 1, 7]].tolist() == [True, True, False]
        with pytest.warns(neula.AccuracyWarning, match=r"A\[7\]: residual nan"):
            expected = neula.polar(a, accuracy=accuracy, engine=GPU)
        with pytest.warns(neula.AccuracyWarning, match=r"A\[7\]"):
            assert same(neula.finish(pending), expected)


def test_what_is_not_definite_is_an_error_when_it_is_finished() -> None:
    a = torch.stack([definite(5, 5), -torch.eye(5)])
    for accuracy in ("fp32", "fp64"):
        neula.cholesky(a[:1], accuracy=accuracy, engine=GPU)
        with NobodyLooks():
            pending = neula.cholesky(a, accuracy=accuracy, engine=GPU, wait=False)
        assert pending.accepted.tolist() == [True, False]
        with pytest.raises(np.linalg.LinAlgError, match=r"A\[1\] of the batch is not positive definite"):
            neula.finish(pending)
    a = definite(5, 5) * torch.logspace(-120, 100, 5, dtype=torch.float64)
    a = a * torch.logspace(-120, 100, 5, dtype=torch.float64)[:, None]
    assert same(neula.finish(neula.cholesky(a, engine=GPU, wait=False)), neula.cholesky(a, engine=GPU))


def test_systems_without_digits_go_on() -> None:
    a = SQUARE.clone()
    a[1] = a[1] @ torch.diag(torch.logspace(0, -12, 20, dtype=torch.float64)) @ a[0]
    b = B[:20].double()
    with NobodyLooks():
        pending = neula.solve(a, b, engine=GPU, wait=False)
    assert pending.accepted.tolist() == [True, False, True]
    assert same(neula.finish(pending), neula.solve(a, b, engine=GPU))
    with NobodyLooks():
        pending = neula.lstsq(a[..., :9], b, engine=GPU, wait=False)
    assert same(neula.finish(pending), neula.lstsq(a[..., :9], b, engine=GPU))


def test_right_hand_sides_with_nan_that_share_a_matrix() -> None:
    b = normal(5, 60, 1, seed=2)
    b[3, 0] = math.nan
    with NobodyLooks():
        pending = neula.lstsq(A[0], b, engine=GPU, wait=False)
    assert not pending.accepted.any()
    with pytest.warns(neula.AccuracyWarning):
        expected = neula.lstsq(A[0], b, engine=GPU)
    with pytest.warns(neula.AccuracyWarning):
        assert same(neula.finish(pending), expected)


def test_an_overflow_is_not_accepted() -> None:
    a = torch.full((2, 40, 3), 6e4, dtype=torch.float16) * normal(2, 40, 3).sign().half()
    neula.qr(a / 1000, engine=GPU)
    with NobodyLooks():
        pending = neula.qr(a, engine=GPU, wait=False)
    assert not pending.accepted.any()
    with pytest.raises(OverflowError):
        neula.finish(pending)


def test_gradients() -> None:
    a = A.double().requires_grad_()
    for function in (
        lambda **k: neula.qr(a, engine=GPU, **k).R.sin().sum(),
        lambda **k: neula.lstsq(a, B.double(), engine=GPU, **k).x.sin().sum(),
        lambda **k: neula.solve(a[:, :20, :20], B[:20].double(), engine=GPU, **k).x.sin().sum(),
    ):
        found, expected = (torch.autograd.grad(function(wait=wait), a)[0] for wait in (False, True))
        assert torch.equal(found, expected)


def test_where_there_is_nothing_to_wait_for() -> None:
    """LAPACK looks at a matrix first, and empty input is answered at once."""
    for result in (neula.qr(torch.eye(3), wait=False), neula.lstsq(torch.eye(3), torch.ones(3), wait=False)):
        assert result._pending is None
        assert result.converged
    assert neula.solve(torch.zeros(0, 0), torch.zeros(0), wait=False)._pending is None
    assert neula.qr(torch.zeros(0, 4, 3), wait=False).converged
    basis = neula.orth(torch.eye(3), wait=False)
    assert torch.equal(neula.finish(basis), basis.Q)


def test_what_cannot_be_left_for_later() -> None:
    with pytest.raises(ValueError, match="wait=False is for the modes"):
        neula.qr(A, mode="complete", wait=False)
    with pytest.raises(ValueError, match="depends on the numbers"):
        neula.orth(A, rcond=1e-3, wait=False)


def step(name: str, a: torch.Tensor, b: torch.Tensor, **keywords: Any) -> Any:
    """A call of one of the functions, of a matrix that it takes."""
    if name == "polar":
        return neula.polar(a, side="right", **keywords)
    if name == "cholesky":
        return neula.cholesky(a @ a.mT + torch.eye(a.shape[-1], device=a.device), **keywords)
    return getattr(neula, name)(a, *(() if name in ("qr", "orth") else (b,)), **keywords)


@pytest.mark.gpu
@pytest.mark.parametrize("names", [*([name] for name in STEPS), STEPS], ids=[*STEPS, "all of them"])
def test_a_graph_of_the_caller_has_it(names: list[str]) -> None:
    """Nothing synchronizes, so that a CUDA graph captures calls, and replays them with other numbers."""
    a, b = normal(8, 96, 96, dtype=torch.float32).cuda(), normal(96, 1, seed=1, dtype=torch.float32).cuda()

    def calls() -> list[Any]:
        return [step(name, a, b, wait=False) for name in names]

    for _ in range(4):
        calls()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pending = calls()
    a.copy_(normal(8, 96, 96, seed=5, dtype=torch.float32))
    graph.replay()
    for name, one in zip(names, pending, strict=True):
        found, expected = neula.finish(one), step(name, a, b)
        for x, y in zip(numbers(found)[:2], numbers(expected)[:2], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.gpu
def test_a_first_call_cannot_be_captured() -> None:
    """It says what to do, in a process where nothing was called before, and works afterwards."""
    program = """
import torch, neula
a, b = torch.randn(96, 96, device="cuda").double(), torch.randn(96, 1, device="cuda").double()
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        neula.lstsq(a, b, wait=False)
    except RuntimeError as error:
        print(error)
    try:
        graph.capture_end()
    except RuntimeError:
        pass
torch.cuda.synchronize()
print(neula.lstsq(a, b).converged)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "once before the capture" in found.stdout, found.stderr
    assert found.stdout.endswith("True\n"), found.stderr
    assert "cannot run" not in found.stderr
