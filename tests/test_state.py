"""Threads, processes, interruptions: neula leaves everything as it was, whatever becomes of a call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import neula
from neula.engines import CudaEngine, cpu, graphs
from neula.kernels.precision import no_tf32
from neula.pipeline.call import restored
from state_work import WORK, normal

SCRIPT = Path(__file__).with_name("state_work.py")

# ---------------------------------------------------------------- threads and processes


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sixteen_threads_from_the_first_use_on_and_children_afterwards(device: str) -> None:
    """Every function in every thread; then a child by fork, whose pool of threads is gone, and one by spawn.

    A child by fork that uses CUDA where its parent did is refused by torch, and does not hang.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_locks_of_other_threads_are_free_in_a_child() -> None:
    """Another thread may hold them when a process is forked; nobody would release them in the child."""
    from neula.engines import random_vectors

    with graphs._lock, random_vectors._lock:
        pid = os.fork()
        if pid == 0:
            free = [lock.acquire(timeout=5) for lock in (graphs._lock, random_vectors._lock)]
            os._exit(0 if all(free) and not graphs.records() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# ---------------------------------------------------------------- interruptions


class InterruptionError(KeyboardInterrupt):
    """Ctrl-C, but not one of the person at the keyboard."""


@pytest.fixture
def state(global_state: Callable[[], list[object]]) -> Iterator[Callable[[], list[object]]]:
    """Reads all that there is, with modes of the user's switched on that neula switches off for itself."""

    def read() -> list[object]:
        nesting = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        guard = no_tf32()
        return [
            *global_state(),
            *(f("cpu") for f in (torch.is_autocast_enabled, torch.get_autocast_dtype)),
            *(
                torch.is_autocast_cache_enabled(),
                nesting,
                guard is not None and guard.is_on(),
                graphs.records(),
            ),
        ]

    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        yield read


def call(name: str, **more: Any) -> Any:
    """A small problem for a public function."""
    a, b = normal(60, 24, 1, torch.float64, "cpu"), normal(60, 1, 2, torch.float64, "cpu")
    if name in ("lu_factor", "solve", "cholesky", "eigh", "inv_sqrt"):
        a = a.T @ a + torch.eye(24, dtype=a.dtype)
    arguments = {"lstsq": (a, b), "solve": (a, b[:24]), "svd_lowrank": (a, 3)}.get(name, (a,))
    return getattr(neula, name)(*arguments, **more)


@pytest.mark.parametrize(
    "name",
    ["qr", "orth", "lstsq", "solve", "cholesky", "svd_lowrank", "lu_factor", "eigh", "svd", "inv_sqrt"],
)
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_progress_that_breaks_off(name: str, calls: int, state: Callable[[], list[object]]) -> None:
    told: list[str] = []

    def progress(stage: str, fraction: float) -> None:
        told.append(stage)
        if len(told) > calls:
            raise InterruptionError

    before = state()
    try:
        call(name, progress=progress, engine="emulated")
    except InterruptionError:
        assert len(told) == calls + 1
    assert state() == before


def test_a_product_that_breaks_off(
    monkeypatch: pytest.MonkeyPatch, state: Callable[[], list[object]]
) -> None:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise InterruptionError

    before, a = state(), normal(400, 200, 1, torch.float32, "cpu")
    monkeypatch.setattr(cpu, "onednn_matmul", product)
    with pytest.raises(InterruptionError):
        neula.qr(a, engine="cpu", algorithm="rgsqrf")
    assert state() == before


def held() -> None:
    fit = neula.LeastSquares(2)
    for seed in range(3):
        fit.update(normal(20, 2, seed, torch.float64, "cpu"), torch.ones(20))
    fit.downdate(normal(20, 2, 0, torch.float64, "cpu"), torch.ones(20))
    fit.solve()


SMALL = {
    name: normal(9, 9, 3, torch.float64, "cpu").mT @ normal(9, 9, 3, torch.float64, "cpu")
    for name in ("eigh", "svd", "polar", "inv_sqrt", "cholesky")
}
BROKEN_OFF: dict[str, Callable[[], object]] = {
    **{name: partial(call, name) for name in ("qr", "lstsq", "solve")},
    **{f"small {name}": partial(getattr(neula, name), a) for name, a in SMALL.items()},
    "statistics": lambda: call("lstsq").covariance(),
    "incremental": held,
}


class Interrupter:
    """Runs a function and lets Ctrl-C come where Python looks for it: when a function of Python's own begins,
    and when one written in C has returned.
    """

    FILES = ("/neula/", "grad_mode.py", "contextlib.py")

    def __init__(self, last: int | None = None) -> None:
        self.last, self.seen = last, 0

    def run(self, function: Callable[[], object]) -> None:
        before = sys.getprofile()
        try:
            sys.setprofile(self.look)
            function()
        except InterruptionError:
            pass
        finally:
            sys.setprofile(before)

    def look(self, frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename.replace(os.sep, "/")
        if event in ("call", "c_return") and any(name in file for name in self.FILES):
            self.seen += 1
            if self.seen == self.last:
                sys.setprofile(None)
                raise InterruptionError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("work", BROKEN_OFF)
def test_interrupted_anywhere(work: str, state: Callable[[], list[object]]) -> None:
    """At the beginning, where modes are set, and at fifty places all over the call."""
    function = BROKEN_OFF[work]
    function()
    whole = Interrupter()
    whole.run(function)
    before = state()
    for last in {*range(1, 60), *range(60, whole.seen, max(1, whole.seen // 50))}:
        Interrupter(last).run(function)
        assert state() == before, f"at place {last}"
    for work in WORK:
        work(3, "cpu", "cpu")


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers")
def test_interrupted_by_a_signal(state: Callable[[], list[object]]) -> None:
    """Wherever it comes; where it comes too late, nothing is tested, and nothing fails."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals come to the main thread")

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise InterruptionError

    call("lstsq")
    before, handler = state(), signal.signal(signal.SIGALRM, interrupt)
    try:
        for delay in range(1, 20):
            try:
                signal.setitimer(signal.ITIMER_REAL, delay * 2e-4)
                for _ in range(5):
                    call("lstsq")
            except InterruptionError:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert state() == before
    finally:
        signal.signal(signal.SIGALRM, handler)


def test_modes_are_restored_after_an_error_and_left_alone_otherwise(
    state: Callable[[], list[object]],
) -> None:
    @restored
    def work(breaks_off: bool) -> None:
        torch.set_grad_enabled(False)
        if breaks_off:
            torch.set_autocast_enabled("cpu", False)
            raise InterruptionError

    before = state()
    with pytest.raises(InterruptionError):
        work(True)
    assert state() == before
    with torch.no_grad():
        work(False)
    assert state() == before


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_a_thread_of_the_user_sees_and_feels_nothing() -> None:
    """Its products are the same in every bit, and its switches what it has set, whatever others compute.

    Threads draw from generators of their own: torch 2.11 refuses the default one during a capture.
    """
    matmul = torch.backends.cuda.matmul
    names = (
        "fp32_precision",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    )
    before = [getattr(matmul, name) for name in names]
    stop, wrong = threading.Event(), []

    def work(number: int) -> None:
        generator = torch.Generator("cuda").manual_seed(number)
        try:
            while not stop.is_set():
                for function in WORK:
                    function(number, "auto", "cuda")
                a = torch.randn(600, 600, generator=generator, device="cuda")
                a += 600 * torch.eye(600, device="cuda")
                for compute in ("fp16", "tf32"):
                    neula.matmul(a, a, compute=compute)
                neula.lu_factor(a, compute="fp16")
        except BaseException as error:
            wrong.append(error)

    try:
        for precision in ("tf32", "ieee"):
            matmul.fp32_precision = precision
            seen = [getattr(matmul, name) for name in names]
            a = torch.randn(500, 500, device="cuda")
            half = torch.randn(64, 20000, device="cuda", dtype=torch.float16)
            expected = a @ a, half @ half.T
            stop.clear()
            threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
            for thread in threads:
                thread.start()
            for _ in range(2000):
                if [getattr(matmul, name) for name in names] != seen:
                    wrong.append(AssertionError("a switch has changed"))
                if not all(map(torch.equal, (a @ a, half @ half.T), expected)):
                    wrong.append(AssertionError("a product has changed"))
            stop.set()
            for thread in threads:
                thread.join()
            assert not wrong, wrong[:3]
    finally:
        stop.set()
        for name, value in zip(names, before, strict=True):
            setattr(matmul, name, value)


@pytest.mark.gpu
@pytest.mark.parametrize("error", [InterruptionError, ValueError])
def test_a_recording_that_breaks_off(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "BEFORE", 1)
    engine, calls = CudaEngine("cuda"), []
    x = torch.randn(100, device="cuda")

    def work(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append(torch.cuda.is_current_stream_capturing())
        y = 2 * x + 1
        if len(calls) == 3:
            raise error
        return (y,)

    graphs.clear()
    stream = torch.cuda.current_stream()
    engine.replay(work, (x,), "breaks off")
    with pytest.raises(error):
        engine.replay(work, (x,), "breaks off")
    assert calls == [False, False, True]
    assert not torch.cuda.is_current_stream_capturing()
    assert not graphs.records()
    assert torch.cuda.current_stream() == stream
    assert not graphs._graphs
    for _ in range(3):
        (y,) = engine.replay(work, (x,), "breaks off")
        assert torch.equal(y, 2 * x + 1)
    assert len(graphs._graphs) == 1
    assert torch.rand(3, device="cuda").shape == (3,)
    graphs.clear()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupted_on_a_gpu() -> None:
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
    a = normal(300, 120, 1, torch.float32, "cuda")

    def work() -> None:
        neula.qr(a)
        neula.lstsq(a, a[:, :1])
        neula.solve(a[:120] + 20 * torch.eye(120, device="cuda"), a[:120, :1])

    graphs.clear()
    work()
    whole = Interrupter()
    whole.run(work)
    for last in range(1, whole.seen, max(1, whole.seen // 60)):
        graphs.clear()
        Interrupter(last).run(lambda: [work() for _ in range(2)])
        assert (torch.cuda.current_device(), torch.cuda.current_stream()) == (device, stream), last
        assert not torch.cuda.is_current_stream_capturing(), last
        assert torch.is_grad_enabled()
        assert not graphs.records()
        assert graphs._lock.acquire(timeout=1)
        graphs._lock.release()
    for function in WORK:
        function(3, "auto", "cuda")
