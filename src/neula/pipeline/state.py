"""Restore the state of torch after a call, also if the call fails."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

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
        restore = _modes()
        try:
            return function(*args, **kwargs)
        except BaseException:
            restore()
            raise

    return call


_DEVICES = ("cpu", "cuda")


def _modes() -> Callable[[], None]:
    """Restore the modes of this thread as they are now."""
    gradients, casts = torch.is_grad_enabled(), tuple(map(torch.is_autocast_enabled, _DEVICES))
    stream = None
    if torch.cuda.is_initialized():
        stream = torch.cuda.current_stream(torch.cuda.current_device())  # of a number: a third of the time

    def restore() -> None:
        torch.set_grad_enabled(gradients)
        for device, enabled in zip(_DEVICES, casts, strict=True):
            torch.set_autocast_enabled(device, enabled)
        if stream is not None:
            torch.cuda.set_stream(stream)  # and its device

    return restore


def _after_fork() -> None:
    """A child lacks the threads of torch's pool, for which it would wait forever: it computes alone."""
    if _parallel and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
