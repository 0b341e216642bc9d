"""Restore the state of torch after a call, also if the call fails."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_parallel = False  # whether neula has computed in this process with torch's pool of threads


def restored(function: Callable[P, T]) -> Callable[P, T]:
    """A function that leaves the modes of its thread as they were, also when Ctrl-C breaks it off.

    A ``with`` statement cannot promise that: the interruption may come when the mode is set and the body has
    not begun.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        global _parallel
        _parallel = _parallel or torch.get_num_threads() > 1
        before = _Modes.now()
        try:
            return function(*args, **kwargs)
        except BaseException:
            before.restore()
            raise

    return call


_DEVICES = ("cpu", "cuda")


class _Modes(NamedTuple):
    gradients: bool
    casts: tuple[bool, ...]
    stream: torch.cuda.Stream | None

    @classmethod
    def now(cls) -> _Modes:
        return cls(
            gradients=torch.is_grad_enabled(),
            casts=tuple(map(torch.is_autocast_enabled, _DEVICES)),
            # Of a number that takes a third of the time.
            stream=torch.cuda.current_stream(torch.cuda.current_device())
            if torch.cuda.is_initialized()
            else None,
        )

    def restore(self) -> None:
        torch.set_grad_enabled(self.gradients)
        for device, enabled in zip(_DEVICES, self.casts, strict=True):
            torch.set_autocast_enabled(device, enabled)
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)  # and its device


def _after_fork() -> None:
    """A child lacks the threads of torch's pool, for which it would wait forever: it computes alone."""
    if _parallel and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
