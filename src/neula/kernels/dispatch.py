"""One way to ask for a kernel: a function in plain torch, and its version for GPUs where that runs.

A function decorated by :func:`kernel` is the reference: it says what is computed, and runs anywhere. On a GPU
calls that the kernel is made for go to the kernel instead, until its machine code can neither be made nor
loaded there.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache, update_wrapper
from importlib.util import find_spec
from typing import Any, Generic, ParamSpec, TypeVar

import torch

OLDEST = (8, 0)
"""Compute capability from which on kernels run: of the oldest GPUs that Triton is made for."""

P = ParamSpec("P")
R = TypeVar("R")


class NotReadyError(RuntimeError):
    """Machine code of a kernel cannot be made, or not loaded; so it was not launched."""


class _Launched(threading.local):
    count = 0


launched = _Launched()
"""How many kernels this thread has launched."""


class Trial:
    """A launch of kernels on something small, which shows whether their results are right on a device.

    Every device is tried once, by the first call that has use for a kernel, whatever its thread. ``launch``
    takes the device, and the variant where kernels have several; ``what`` and ``instead`` are for the warning
    if it fails: which kernels, and what replaces them.
    """

    def __init__(self, launch: Callable[..., object], what: str, instead: str) -> None:
        self.launch, self.what, self.instead = launch, what, instead
        self._passed: dict[tuple, bool] = {}
        self._lock = threading.RLock()

    def passed(self, device: torch.device, *variant: int) -> bool:
        """Whether the kernels run on a device, in one of their variants.

        RuntimeError if that is not known yet, and a CUDA graph is being captured.
        """
        key = (device, *variant)
        if key not in self._passed:
            refuse_capture(self.what)
            with self._lock:
                if key not in self._passed:
                    self._passed[key] = self.run(device, *variant)
        return self._passed[key]

    def run(self, device: torch.device, *variant: int) -> bool:
        """Launch now, and warn where that fails for another reason than a missing package."""
        try:
            self.launch(device, *variant)
        except Exception as error:
            _warn(f"{self.what} cannot run on {device}; {self.instead}", error)
            return False
        return True


def _warn(message: str, error: Exception) -> None:
    if not isinstance(error, ImportError) and not isinstance(error.__cause__, ImportError):
        warnings.warn(f"{message}. The reason: {error}", RuntimeWarning, stacklevel=5)  # who has called it


def refuse_capture(what: str) -> None:
    """Refuse one-time preparation of something, given with an article, while a CUDA graph is captured, which
    it would break.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what[0].lower()}{what[1:]} must be made ready before a CUDA graph is captured: make the same "
            "calls, for tensors of the same shapes, once before the capture"
        )


def trial(what: str, instead: str) -> Callable[[Callable[..., object]], Trial]:
    """Make a :class:`Trial` of the function that launches."""
    return lambda launch: Trial(launch, what, instead)


class Kernel(Generic[P, R]):
    """A function of tensors, its ``reference`` in plain torch, that a kernel computes where it can; made by
    :func:`kernel`.
    """

    __name__: str

    def __init__(
        self,
        reference: Callable[P, R],
        launch: str | Callable[..., Any],
        tried: Trial | None,
        when: Callable[..., bool] | None,
        variant: Callable[..., int] | None,
    ) -> None:
        update_wrapper(self, reference)
        self.reference = reference
        self._launch, self._tried, self._when, self._variant = launch, tried, when, variant
        self._runs: dict[torch.device, bool] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self.takes(*args, **kwargs):
            return self.reference(*args, **kwargs)
        before = launched.count
        try:
            return self.kernel(*args, **kwargs)
        except NotReadyError as error:
            device = _first_tensor((*args, *kwargs.values())).device
            self._runs[device] = False
            if launched.count > before:  # which may have overwritten what was given
                raise
            _warn(f"The kernel of {self.__name__} cannot run on {device}; plain torch takes its place", error)
        return self.reference(*args, **kwargs)

    def takes(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Whether the kernel computes this call; only the trial of a device launches anything."""
        first = _first_tensor((*args, *kwargs.values()))
        if not first.is_cuda or _complex_among((*args, *kwargs.values())):
            return False
        if not (self._when is None or self._when(*args, **kwargs)):
            return False
        if self._variant is not None and self._tried is not None:
            return self._tried.passed(first.device, self._variant(*args, **kwargs))
        if first.device not in self._runs:
            refuse_capture(f"the kernel of {self.__name__}")
        return self.runs(first.device)

    def runs(self, device: torch.device) -> bool:
        """Whether the kernel, if it has no variants, is made for a device and has not failed there."""
        if device.type != "cuda":
            return False
        if device not in self._runs:
            passed = self._tried is None or self._tried.passed(device)
            self._runs[device] = passed and _is_made_for(device)
        return self._runs[device]

    @property
    def kernel(self) -> Callable[P, R]:
        """The function that launches the kernel, whatever the device."""
        if not isinstance(self._launch, str):
            return self._launch
        launch: Callable[P, R] = self.reference.__globals__[self._launch]  # type: ignore[attr-defined]
        return launch


@lru_cache
def _is_made_for(device: torch.device) -> bool:
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= OLDEST


def _first_tensor(given: Iterable[object]) -> torch.Tensor:
    for x in given:  # a generator takes longer than some of what is requested
        if isinstance(x, torch.Tensor):
            return x
    raise TypeError("a kernel's function takes a tensor")


def _complex_among(given: Iterable[object]) -> bool:
    """Kernels read real numbers."""
    return any(isinstance(x, torch.Tensor) and x.is_complex() for x in given)


def kernel(
    launch: str | Callable[..., Any],
    *,
    trial: Trial | None = None,
    when: Callable[..., bool] | None = None,
    variant: Callable[..., int] | None = None,
) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Let a kernel take the place of the decorated function on GPUs; that of the first tensor counts.

    ``launch`` is the function that launches the kernel, with the same parameters, or its name if it follows
    in the same module; it ends with ``_triton`` or ``_cuda``. ``when``, asked for tensors on a GPU only, says
    whether the kernel is made for these arguments. A ``trial`` shows whether results are right on a device,
    if that depends on more than what is written; ``variant`` says which of several variants of the kernel the
    arguments need, where each is tried by itself.
    """
    return lambda reference: Kernel(reference, launch, trial, when, variant)
