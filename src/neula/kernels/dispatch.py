"""One way to ask for a kernel: a function in plain torch, and its version for GPUs where that runs.

A function decorated by :func:`kernel` is the reference: it says what is computed, and runs anywhere. On a GPU
calls that the kernel is made for go to the kernel instead, if a :class:`Trial` has shown that it runs on that
GPU.
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
"""Compute capability from which on kernels are likely to run: of the oldest GPUs that Triton is made for."""

P = ParamSpec("P")
R = TypeVar("R")


class Trial:
    """A launch of one or more kernels on something small, which shows whether they run on a device.

    Triton or a C compiler may be missing, or the GPU too old. Every device is tried once, by the first call
    that has use for a kernel, whatever its thread. ``launch`` takes the device, and the variant where kernels
    have several; ``what`` and ``instead`` are for the warning if it fails: which kernels, and what replaces
    them.
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

    def outcome(self, device: torch.device) -> bool | None:
        """Whether kernels without variants run on a device; None where they have not been tried."""
        return self._passed.get((device,))

    def run(self, device: torch.device, *variant: int) -> bool:
        """Launch now, and warn where that fails for another reason than a missing package."""
        try:
            self.launch(device, *variant)
        except ImportError:
            return False
        except Exception as error:
            message = f"{self.what} cannot run on {device}; {self.instead}. The reason: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=5)  # who has called the decorated function
            return False
        return True


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

    def __init__(
        self,
        reference: Callable[P, R],
        launch: str | Callable[..., Any],
        tried: Trial,
        when: Callable[..., bool] | None,
        variant: Callable[..., int] | None,
        or_complex: bool,
    ) -> None:
        update_wrapper(self, reference)
        self.reference, self.tried = reference, tried
        self._launch, self._when, self._variant, self._or_complex = launch, when, variant, or_complex

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        chosen = self.kernel if self.takes(*args, **kwargs) else self.reference
        return chosen(*args, **kwargs)

    def takes(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Whether the kernel computes this call; only the trial of a device launches anything."""
        first = _first_tensor((*args, *kwargs.values()))
        if not first.is_cuda or not _as_stored((*args, *kwargs.values()), self._or_complex):
            return False
        if not (self._when is None or self._when(*args, **kwargs)):
            return False
        if self._variant is None:
            return self.tried.passed(first.device)
        return self.tried.passed(first.device, self._variant(*args, **kwargs))

    def runs(self, device: torch.device) -> bool:
        """Whether the kernel, which has no variants, runs on a device."""
        return device.type == "cuda" and self.tried.passed(device)

    def expected(self, device: torch.device) -> bool:
        """Whether the kernel, which has no variants, is likely to run on a device.

        For decisions about speed alone: nothing is launched for them, since to compile a kernel takes a
        second. Once a trial has failed, it is no.
        """
        if device.type != "cuda" or self.tried.outcome(device) is False:
            return False
        name = self._launch if isinstance(self._launch, str) else self._launch.__name__
        return _compiles("cuda" if name.endswith("_cuda") else "triton", device)

    @property
    def kernel(self) -> Callable[P, R]:
        """The function that launches the kernel, whatever the device."""
        if not isinstance(self._launch, str):
            return self._launch
        launch: Callable[P, R] = self.reference.__globals__[self._launch]  # type: ignore[attr-defined]
        return launch


@lru_cache
def _compiles(language: str, device: torch.device) -> bool:
    there = language == "cuda" or find_spec("triton") is not None
    return there and torch.cuda.get_device_capability(device) >= OLDEST


def _first_tensor(given: Iterable[object]) -> torch.Tensor:
    for x in given:  # a generator takes longer than some of what is requested
        if isinstance(x, torch.Tensor):
            return x
    raise TypeError("a kernel's function takes a tensor")


def _as_stored(given: Iterable[object], or_complex: bool) -> bool:
    """Whether all are real numbers as they lie in memory, or complex ones: the imaginary part of a conjugate
    is a view of what is to be negated.
    """
    tensors = (x for x in given if isinstance(x, torch.Tensor))
    return not any(x.is_neg() or (x.is_complex() and not or_complex) for x in tensors)


def kernel(
    launch: str | Callable[..., Any],
    *,
    trial: Trial,
    when: Callable[..., bool] | None = None,
    variant: Callable[..., int] | None = None,
    or_complex: bool = False,
) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Let a kernel take the place of the decorated function on GPUs; that of the first tensor counts.

    ``launch`` is the function that launches the kernel, with the same parameters, or its name if it follows
    in the same module; it ends with ``_triton`` or ``_cuda``. The trial, which several may share, shows
    whether it runs, and ``when``, asked for tensors on a GPU only, whether it is made for these arguments.
    ``variant`` says which of several variants of the kernel they need, where each is tried by itself.
    ``or_complex``: whether it is for complex numbers, too, which may be views of their conjugates.
    """
    return lambda reference: Kernel(reference, launch, trial, when, variant, or_complex)
