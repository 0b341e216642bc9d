"""Rows over processes beside one of them: ``torchrun --nproc-per-node=4 -m benchmarks distributed``.

Each case is solved by 2, 4, 8, ... of the processes, as many as there are, the others waiting, and by one
without messages. A row has the time, that of one process with the whole problem (weak scaling: with the rows
of one process), what all processes send, and which part of the time they wait for messages. The last two are
from a run that waits for the device before and after each message, so that it is not the one that is timed.
Last come the constants of the model of time (:mod:`benchmarks.model`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

import neula
from benchmarks import constants
from benchmarks.harness import Results
from neula.engines.sharded import RowsOfGroup
from neula.papers.measuring import median_seconds, timed
from neula.pipeline.distributed import RowSharded

REPEATS, WARMUP = 5, 2
"""Graphs are captured at the second call for a shape."""


@dataclass(frozen=True)
class Case:
    """One problem.

    Attributes
    ----------
    problem : {"lstsq", "qr"}
    m, n : int
        Of the whole matrix, or, for weak scaling, of one process.
    dtype : torch.dtype
    accuracy : str, optional
    weak : bool
        Whether each process has as many rows as one alone.
    """

    problem: str
    m: int
    n: int
    dtype: torch.dtype = torch.float64
    accuracy: Any = None
    weak: bool = False

    @property
    def name(self) -> str:
        """As in the data."""
        what = self.accuracy or str(self.dtype).removeprefix("torch.")
        return f"{self.problem} {what}" + (" weak" if self.weak else "")


GPU_CASES = (
    Case("lstsq", 262144, 4096),
    Case("lstsq", 524288, 4096),
    Case("lstsq", 524288, 2048),
    Case("qr", 524288, 1024, torch.float32),
    Case("qr", 1048576, 1024, torch.float32),
    Case("qr", 131072, 4096, torch.float32),
    Case("qr", 32768, 16384, torch.float32),
    Case("qr", 32768, 16384, torch.float32, "fp16"),
    Case("lstsq", 262144, 2048, weak=True),
    Case("lstsq", 262144, 4096, weak=True),
    Case("qr", 524288, 1024, torch.float32, weak=True),
)
CPU_CASES = (
    Case("lstsq", 40000, 256),
    Case("qr", 40000, 256, torch.float32),
    Case("tsqr", 200000, 32),
    Case("lstsq", 20000, 256, weak=True),
)


class Measured(RowsOfGroup):
    """Counts what it sends, and how long that takes.

    Attributes
    ----------
    sent, messages : int
        Bytes and messages of this process.
    seconds : float
    """

    def __init__(self, like: RowsOfGroup) -> None:
        super().__init__(like.counts, like.group)
        self.sent, self.messages, self.seconds = 0, 0, 0.0

    def _measure(self, message: torch.Tensor, send: Callable[[], Any]) -> Any:
        found, seconds = timed(send)
        self.sent += message.nbytes
        self.messages += 1
        self.seconds += seconds
        return found

    def all_reduce(self, message: torch.Tensor, operation: Any) -> None:
        reduce = super().all_reduce
        self._measure(message, lambda: reduce(message, operation))

    def broadcast(self, message: torch.Tensor) -> None:
        broadcast = super().broadcast
        self._measure(message, lambda: broadcast(message))

    def all_gather(self, message: torch.Tensor) -> list[torch.Tensor]:
        gather = super().all_gather
        gathered: list[torch.Tensor] = self._measure(message, lambda: gather(message))
        return gathered

    def send(self, message: torch.Tensor, to: int) -> None:
        send = super().send
        self._measure(message, lambda: send(message, to))

    def receive(self, message: torch.Tensor, of: int) -> torch.Tensor:
        receive = super().receive
        received: torch.Tensor = self._measure(message[:0], lambda: receive(message, of))
        return received


def run(device: torch.device, only: str = "") -> Results:
    """Time the cases whose name has ``only`` in it, on all processes that torchrun has started.

    The constants of the model are measured if all cases are.
    """
    rank = int(os.environ.get("RANK", 0))
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
    gpu = device.type == "cuda"
    if gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    results = Results("distributed", device)
    sizes = _sizes(distributed.get_world_size())
    groups = {size: distributed.new_group(range(size)) for size in sizes}
    try:
        for case in GPU_CASES if gpu else CPU_CASES:
            if only in case.name:
                for row in _rows(case, device, groups):
                    results.add(**row)
        for size, group in groups.items():
            for row in constants.measured(device, group, size) if not only and rank < size else []:
                results.add(**row)
            distributed.barrier()
    finally:
        distributed.destroy_process_group()
    return results


def _sizes(processes: int) -> list[int]:
    """Powers of two below all of them, and these; one alone is what it is."""
    return [size for size in (2**i for i in range(1, processes)) if size < processes] + [processes]


def _rows(case: Case, device: torch.device, groups: Mapping[int, Any]) -> Iterator[dict[str, Any]]:
    """One for each number of processes, all of which call this."""
    rank, one_ms = distributed.get_rank(), 0.0
    if rank == 0:
        problem = _problem(case, case.m, device, 0)
        one_ms = 1e3 * median_seconds(lambda: _solve(case, *problem), REPEATS, WARMUP)
        del problem
    for size, group in groups.items():
        distributed.barrier()
        if rank < size:
            yield _row(case, device, group, size, one_ms * (size if case.weak else 1))
    distributed.barrier()


def _row(case: Case, device: torch.device, group: Any, size: int, one_ms: float) -> dict[str, Any]:
    m, rank = case.m, distributed.get_rank()
    share = m if case.weak else m // size + (rank < m % size)
    a, b = (neula.distributed.rows(x, group) for x in _problem(case, share, device, rank))
    ms = 1e3 * median_seconds(lambda: _solve(case, a, b), REPEATS, WARMUP)
    over_rows = Measured(a.over_rows)
    start = time.perf_counter()
    result = _solve(case, RowSharded(a.local, over_rows), RowSharded(b.local, over_rows))
    waiting = over_rows.seconds / (time.perf_counter() - start)
    sent = torch.tensor([over_rows.sent, over_rows.messages], device=device)
    distributed.all_reduce(sent, group=group)
    return {
        "problem": case.name,
        "m": size * m if case.weak else m,
        "n": case.n,
        "processes": size,
        "ms": ms,
        "one_ms": one_ms,
        "ratio": one_ms / ms,
        "sent_mb": float(sent[0]) / 1e6,
        "messages": int(sent[1]),
        "waiting": waiting,
        "certified": result.converged,
        "method": result.attempts[-1].method,
    }


def _problem(case: Case, m: int, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    a = torch.randn(m, case.n, dtype=case.dtype, device=device, generator=generator)
    return a, torch.randn(m, dtype=case.dtype, device=device, generator=generator)


def _solve(case: Case, a: Any, b: Any) -> Any:
    if case.problem == "lstsq":
        return neula.lstsq(a, b, accuracy=case.accuracy)
    if case.problem == "tsqr":
        return neula.tsqr(a)
    return neula.qr(a, accuracy=case.accuracy)
