"""Memory: what a shortage does to a chain, and that calls leave none behind."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import neula
from neula.certificates.orthogonality import PROBES, gaussian_probes
from neula.engines import graphs, random_vectors
from neula.engines.random_vectors import gaussian
from neula.pipeline import chain as runner
from neula.pipeline.chain import MemoryGuard, is_shortage
from state_work import WORK, normal

CPU = torch.device("cpu")
TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.00 "
    "GiB is free. Including non-PyTorch memory, this process has 78.11 GiB memory in use."
)

# ---------------------------------------------------------------- shortages


def chain(guard: MemoryGuard, needs: dict[str, float], free: float) -> Iterator[str]:
    """Attempts as a generator, as the problem files have them."""
    for label, gib in needs.items():
        with guard.attempt(label):
            if gib > free:
                raise torch.OutOfMemoryError(TORCH_SAYS)
            yield label


def test_a_chain_goes_on_with_what_needs_less() -> None:
    guard = MemoryGuard(CPU)
    assert list(chain(guard, {"first": 8, "second": 6, "third": 2}, 4)) == ["third"]
    assert len(guard.shortages) == 2
    assert guard.shortages[0].startswith("first needed 2.00 GiB more, ")


def test_where_nothing_is_left_the_error_says_what_was_needed_and_what_was_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free, total, unused = 3 << 30, 80 << 30, 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * unused)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * unused)
    guard = MemoryGuard(torch.device("cuda", 0))
    assert not list(chain(guard, {"LU fp16": 8, "LU fp64": 9}, 4))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        guard.raise_if_short()
    message = str(caught.value)
    assert "cuda:0" in message
    for label in ("LU fp16", "LU fp64"):
        assert f"{label} needed 2.00 GiB more, 4.00 GiB of 80.00 GiB free" in message


def test_nothing_is_raised_where_nothing_was_short() -> None:
    guard = MemoryGuard(CPU)
    assert list(chain(guard, {"first": 1}, 4)) == ["first"]
    guard.raise_if_short()


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("shapes do not fit"), KeyboardInterrupt()])
def test_other_errors_come_through(error: BaseException) -> None:
    with pytest.raises(type(error)), MemoryGuard(CPU).attempt("it"):
        raise error


@pytest.mark.parametrize(
    ("error", "needed"),
    [
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate "
                      "4294967296 bytes. Error code 12 (Cannot allocate memory)"), "needed 4.00 GiB more"),
        (MemoryError("Unable to allocate 7.11 PiB for an array with shape (1,)"), "needed 7.11 PiB more"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
         "needed more than there was"),
        (torch.OutOfMemoryError("Allocation on device"), "needed more than there was"),
    ],
)  # fmt: skip
def test_who_says_it_in_which_words(error: BaseException, needed: str) -> None:
    assert is_shortage(error)
    guard = MemoryGuard(CPU)
    with guard.attempt("it"):
        raise error
    assert guard.shortages[0].startswith(f"it {needed}, ")


def test_the_memory_of_a_cpu_is_a_shortage_like_any() -> None:
    guard = MemoryGuard(CPU)
    with guard.attempt("all there is"):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert guard.shortages[0].startswith(f"all there is needed {(1 << 60) / 2**30:.2f} GiB more")


def test_what_is_free_is_not_known_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "sizes_here", lambda: None)
    assert "not known" in runner._free(CPU)


# ---------------------------------------------------------------- what calls leave behind


def few_shapes(count: int, seed: int, device: str = "cpu") -> None:
    """Calls of many functions, for as many different shapes as there are calls."""
    for i in range(count):
        m, n = 40 + (seed + 7 * i) % 53, 2 + (seed + 5 * i) % 29
        a = normal(m, n, i, (torch.float32, torch.float64)[i % 2], device)
        work = (
            lambda a=a: neula.qr(a),
            lambda a=a: neula.lstsq(a, a[:, :1]),
            lambda a=a, n=n: neula.solve(a[:n] + n * torch.eye(n, device=device), a[:n, 0]),
            lambda a=a: neula.svd_lowrank(a, 1),
            lambda a=a: neula.qr(a.expand(3, -1, -1)),
            lambda a=a: neula.matmul(a, a.T),
        )
        work[i % len(work)]()


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_calls_do_not_make_a_process_grow() -> None:
    """A matrix here has some 10 KB: 300 that stayed would be 3 MB in each round.

    One round may meet an allocator, or a kernel of Linux, that takes more at a time.
    """
    few_shapes(300, 0)
    growth = []
    for seed in range(1, 4):
        before = resident()
        few_shapes(300, seed)
        growth.append(resident() - before)
    assert min(growth) < 1 << 20


KNOWN: set[str] = set()


def test_no_cache_grows_with_what_it_is_asked_for() -> None:
    unbounded = set()
    for module in pkgutil.walk_packages(neula.__path__, "neula."):
        for name, function in vars(importlib.import_module(module.name)).items():
            if isinstance(function, functools._lru_cache_wrapper) and function.__module__ == module.name:
                bounded = function.cache_parameters()["maxsize"] is not None
                if not bounded and inspect.signature(function).parameters:
                    unbounded.add(f"{module.name}.{name}")
    assert unbounded <= KNOWN


def test_random_vectors_are_the_same_each_time_and_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_vectors, "_vectors", type(random_vectors._vectors)())
    state = torch.get_rng_state()
    first = gaussian(5, 2, torch.float64, CPU, seed=3)
    assert gaussian(5, 2, torch.float64, CPU, seed=3) is first
    for n in range(1, 3 * random_vectors.MOST):
        gaussian(n, 1, torch.float32, CPU, seed=3)
        gaussian(5, 2, torch.float64, CPU, seed=3)
    assert len(random_vectors._vectors) == random_vectors.MOST
    assert gaussian(5, 2, torch.float64, CPU, seed=3) is first, "used often"
    monkeypatch.setattr(random_vectors, "MOST_BYTES", 1000)
    large = gaussian(500, 1, torch.float64, CPU, seed=3)
    assert not random_vectors._vectors
    assert torch.equal(gaussian(5, 2, torch.float64, CPU, seed=3), first)
    assert torch.equal(gaussian(500, 1, torch.float64, CPU, seed=3), large)
    assert not torch.equal(gaussian(5, 2, torch.float64, CPU, seed=4), first)
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_ten_thousand_calls_do_not_reserve_more() -> None:
    """After some that see every shape twice: what is played back is recorded by then, or dropped."""
    few_shapes(4000, 0, "cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    few_shapes(10000, 0, "cuda")
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - before <= 64 << 20


@pytest.mark.gpu
def test_graphs_that_are_gone_give_back_their_memory() -> None:
    graphs.clear()
    a = normal(400, 400, 1, torch.float32, "cuda")

    def record() -> None:
        for _ in range(50):
            function = graphs.recorded(lambda x: (a @ x) @ x, a)
            assert torch.allclose(function(a), (a @ a) @ a, rtol=1e-3, atol=1.0)

    record()
    before = torch.cuda.memory_reserved()
    for _ in range(10):
        record()
    assert torch.cuda.memory_reserved() <= before + (4 << 20)


@pytest.mark.parametrize("n", range(1, PROBES + 1))
def test_norms_of_few_dimensions_are_no_estimates(n: int) -> None:
    """A matrix of rank one, most of whose images would be small along random vectors that lie across it."""
    g = gaussian_probes(n, torch.device("cpu"))
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn(1000, 1, n, generator=generator, dtype=torch.float64)
    norms = torch.linalg.matrix_norm(rows)
    error = torch.linalg.matrix_norm(rows @ g) / PROBES**0.5 / norms - 1
    assert error.abs().max() <= 20 * n * torch.finfo(torch.float64).eps


@pytest.mark.gpu
def test_graphs_keep_the_random_vectors_that_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs.clear()
    monkeypatch.setattr(random_vectors, "MOST", 1)
    device = torch.device("cuda", torch.cuda.current_device())

    def work(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x + gaussian(1000, 1, torch.float64, device, seed=8)[:, 0],)

    x = torch.zeros(1000, device=device, dtype=torch.float64)
    (expected,) = work(x)
    for _ in range(4):
        (found,) = graphs.replay(work, (x,), "vectors")
        assert torch.equal(found, expected)
        gaussian(1000, 1, torch.float64, device, seed=9)  # drops the other one
        torch.full((1000,), 7.0, dtype=torch.float64, device=device)  # where that was, if it was freed
    assert len(graphs._graphs) == 1
    graphs.clear()


@pytest.mark.gpu
def test_a_gpu_that_is_full() -> None:
    """The last of these needs nothing but what is there."""
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (256 << 20)) / total)
    guard = MemoryGuard(device)
    try:
        for size in (8 << 30, 1 << 30, 1 << 20):
            with guard.attempt(f"{size} bytes"):
                torch.empty(size, dtype=torch.uint8, device=device)
                break
        assert len(guard.shortages) == 2
        assert "needed 8.00 GiB more" in guard.shortages[0]
        assert "free" in guard.shortages[0]
        for function in WORK:
            function(1, "auto", "cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
