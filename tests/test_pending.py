"""Answers that nobody waits for: nothing is read before they are finished, and then they are as ever."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import neula
from neula.engines import CpuEngine
from neula.engines.tuning import cuda_tuning

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


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def definite(*shape: int) -> torch.Tensor:
    a = random(*shape)
    return a @ a.mT + torch.eye(shape[-1])


GPU = Gpu("cpu")
A = random(4, 60, 40, dtype=torch.float32)
B = random(60, seed=1, dtype=torch.float32)
TALL, SQUARE = random(300, 60, dtype=torch.float32), random(3, 20, 20)

CALLS: dict[str, Callable[..., Any]] = {
    "qr of a batch": lambda **k: neula.qr(A, engine=GPU, **k),
    "qr of one": lambda **k: neula.qr(TALL, engine=GPU, **k),
    "r in double": lambda **k: neula.qr(A.double(), mode="r", accuracy="fp32", engine=GPU, **k),
    "qr in half precision": lambda **k: neula.qr(A.half(), engine=GPU, **k),
    "orth": lambda **k: neula.orth(A, engine=GPU, **k),
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
    assert pending.pending is not None
    assert pending.accepted.all()
    finished, expected = neula.finish(pending), CALLS[name]()
    assert same(finished, expected)
    answer = expected if isinstance(expected, torch.Tensor) else numbers(expected)[0]
    assert torch.equal(numbers(pending)[0], answer)
    assert neula.finish(finished) is finished


def test_what_the_first_link_has_not_done_is_done_by_others() -> None:
    """And leaves what was returned before as it was."""
    a = A.clone()
    a[1, :, 7], a[2, 3, 5] = a[1, :, 2], math.nan
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
    b = random(5, 60, 1, seed=2)
    b[3, 0] = math.nan
    with NobodyLooks():
        pending = neula.lstsq(A[0], b, engine=GPU, wait=False)
    assert not pending.accepted.any()
    with pytest.warns(neula.AccuracyWarning):
        expected = neula.lstsq(A[0], b, engine=GPU)
    with pytest.warns(neula.AccuracyWarning):
        assert same(neula.finish(pending), expected)


def test_an_overflow_is_not_accepted() -> None:
    a = torch.full((2, 40, 3), 6e4, dtype=torch.float16) * random(2, 40, 3).sign().half()
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
        assert result.pending is None
        assert result.converged
    assert neula.solve(torch.zeros(0, 0), torch.zeros(0), wait=False).pending is None
    assert neula.qr(torch.zeros(0, 4, 3), wait=False).converged
    basis = neula.orth(torch.eye(3), wait=False)
    assert torch.equal(neula.finish(basis), basis.Q)


def test_what_cannot_be_left_for_later() -> None:
    with pytest.raises(ValueError, match="wait=False is for the modes"):
        neula.qr(A, mode="complete", wait=False)
    with pytest.raises(ValueError, match="depends on the numbers"):
        neula.orth(A, rcond=1e-3, wait=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qr", "orth", "lstsq", "solve"])
def test_a_graph_of_the_caller_has_it(name: str) -> None:
    """Nothing synchronizes, so that a CUDA graph captures the call, and replays it with other numbers."""
    a, b = random(8, 96, 96, dtype=torch.float32).cuda(), random(96, 1, seed=1, dtype=torch.float32).cuda()
    operands = (a,) if name in ("qr", "orth") else (a, b)
    call = lambda **k: getattr(neula, name)(*operands, **k)  # noqa: E731
    for _ in range(3):
        call(wait=False)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(wait=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pending = call(wait=False)
    a.copy_(random(8, 96, 96, seed=5, dtype=torch.float32))
    graph.replay()
    found, expected = neula.finish(pending), call()
    for x, y in zip(numbers(found)[:2], numbers(expected)[:2], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4, equal_nan=True)
