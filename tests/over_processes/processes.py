"""Processes that do what tests ask of them: started once, used by all tests of a module."""

from __future__ import annotations

import os
import socket
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing import get_context

PATIENCE = 60
"""Seconds that a process waits for the others before it gives up."""


class Processes:
    """Some processes with groups of the first 1, 2, ... of them.

    A task is a function of the rank, the group and arguments that can be pickled; its results are those of
    all processes of the group, exceptions included.
    """

    def __init__(self, count: int, backend: str = "gloo", patience: float = PATIENCE) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = get_context("forkserver" if backend == "gloo" else "spawn")
        if backend == "gloo":  # torch is imported once, by the server
            context.set_forkserver_preload(["torch.distributed.tensor", "neula.problems.least_squares.lstsq"])
        self.count, self.pipes, self.processes = count, [], []
        for rank in range(count):
            here, there = context.Pipe()
            arguments = (rank, count, port, backend, patience, there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()  # so that who waits for a process that has died hears of it
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, size: int, task: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Results of a task of the first ``size`` processes; an error if one of them has died."""
        for pipe in self.pipes[:size]:
            pipe.send((size, task, arguments))
        return [self._received(rank) for rank in range(size)]

    def _received(self, rank: int) -> Any:
        try:
            return self.pipes[rank].recv()
        except EOFError:
            self.processes[rank].join()
            code = self.processes[rank].exitcode
            raise AssertionError(f"process {rank} has died with exit code {code}") from None

    def check(self, size: int, task: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The same of a task that may not fail."""
        found = self.run(size, task, *arguments)
        failed = [x for x in found if isinstance(x, Failure)]
        assert not failed, failed[0].trace
        return found

    def stop(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.terminate()
            process.join()


class Failure:
    """An exception of a task.

    Attributes
    ----------
    error : str
        Name of its class.
    message, trace : str
    """

    def __init__(self, error: Exception) -> None:
        self.error, self.message, self.trace = type(error).__name__, str(error), traceback.format_exc()

    def __repr__(self) -> str:
        return f"{self.error}: {self.message}"


def _serve(rank: int, count: int, port: int, backend: str, patience: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if backend == "nccl":
        torch.cuda.set_device(rank)
    timeout = timedelta(seconds=patience)
    distributed.init_process_group(backend, rank=rank, world_size=count, timeout=timeout)
    groups = {size: distributed.new_group(range(size), timeout=timeout) for size in range(1, count + 1)}
    while True:
        size, task, arguments = pipe.recv()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pipe.send(task(rank, groups[size], *arguments))
        except Exception as error:
            pipe.send(Failure(error))
