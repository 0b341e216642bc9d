"""Problems of a shape that was solved before: what does not depend on numbers is decided once.

A call of a small problem spends most of its time on what its arrays are, what is asked for, which chain that
makes, and what may be accepted. All of that depends on shapes, dtypes and keywords alone. A plan keeps it,
with the first link: what that link solves, and the verdict accepts, is the answer. All else goes through the
front end and the whole chain, as a first call does, which goes on from what a device has found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.autograd import forward_ad

from neula.certificates.forward_error import digits_of
from neula.engines import Engine, Tuning
from neula.kernels.core import core
from neula.pipeline.chain import Answer
from neula.pipeline.in_numpy import IN_NUMPY, Asked
from neula.pipeline.inputs import fetched_tensors
from neula.pipeline.result import Attempt, logged
from neula.pipeline.result.deferred import Later
from neula.pipeline.state import restored

KEPT = 512
"""Shapes of one function that are remembered. A program that has more of them begins anew."""

DTYPES = (np.dtype(np.float64), np.dtype(np.float32), torch.float64, torch.float32)

COPIED = 1 << 15
"""Elements of a view up to which its copy takes less time than the front end."""

_every: list[Plans] = []

Wrap = Callable[[np.ndarray], Any]
"""Makes an array one of the user's library."""


def _in_numpy(x: torch.Tensor) -> np.ndarray:
    found: np.ndarray = x.cpu().numpy()
    return found


class WithEngine(Protocol):
    """Options, which name an engine."""

    @property
    def engine(self) -> Engine:
        """The engine that multiplies."""


class Plan(Protocol):
    """The first link for problems of one shape, ready to be called."""

    @property
    def options(self) -> WithEngine:
        """The options of the calls."""

    def __call__(self, given: Given) -> Any | Answer[Any] | None:
        """The result; where it is not accepted None, or an answer from which the chain goes on."""


class Given(NamedTuple):
    """The operands of a call.

    Attributes
    ----------
    arrays : sequence of array, or of Tensor
        float64 or float32, with contiguous rows, small views as copies: arrays on the host, tensors where
        they are on a device.
    wrap : callable
    begun : float
        When the call began, in seconds of ``time.perf_counter``.
    give : callable
        Makes a tensor an array of the user's library, where the user's arrays are.
    operands : sequence of array_like
        As the user gave them.
    """

    arrays: Sequence[Any]
    wrap: Wrap
    begun: float
    give: Callable[[torch.Tensor], Any] = _in_numpy
    operands: Sequence[Any] = ()


class Plans:
    """Plans of one function, by shapes, dtypes and keywords.

    Parameters
    ----------
    make : callable
        From the arguments of a call to its plan; None where the compiled core is not the first link.
    operands : int, optional
        Arrays, which are positional.
    go_on : callable, optional
        From what a first link has found, and the arguments of a call, to the result: for plans that return
        answers.
    fetches : bool, optional
        Whether a plan on the host also takes copies: of views, and what is fetched from a device.
    """

    def __init__(
        self,
        make: Callable[..., Plan | None],
        operands: int = 2,
        go_on: Callable[..., Any] | None = None,
        fetches: bool = True,
    ) -> None:
        self._make, self._operands, self._fetches = make, operands, fetches
        self._go_on = None if go_on is None else restored(go_on)
        self._plans: dict[Any, tuple[Plan | None, object, Tuning | None]] = {}
        self._seen: set[Any] = set()
        _every.append(self)

    def __call__(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any | None:
        """The result of a call; None where the whole chain is asked."""
        begun = perf_counter()
        if len(args) != self._operands or (given := given_arrays(args, begun, self._fetches)) is None:
            return None
        key: list[Any] = []
        for x in given.arrays:
            key += x.shape, x.dtype
        if isinstance(given.arrays[0], torch.Tensor):
            key.append(given.arrays[0].device)
        for name, value in keywords.items():
            if isinstance(value, torch.Tensor):  # which a key would keep
                return None
            key += name, value, type(value)
        try:
            plan, kernels, tuning = self._plans[tuple(key)]
        except KeyError:
            self._plan(tuple(key), given.arrays, keywords)
            return None
        except TypeError:  # a keyword that cannot be hashed
            return None
        if plan is None or kernels is not core() or tuning is not plan.options.engine.tuning:
            return None
        device, there = plan.options.engine.device, isinstance(given.arrays[0], torch.Tensor)
        if there and device.type == "cpu" and not self._fetches:
            return None
        if there and device.type == "cpu":
            given = given._replace(arrays=[x.numpy() for x in fetched_tensors(given.arrays)])
        if not there and device.type == "cuda" and device.index != torch.cuda.current_device():
            return None  # arrays on the host go to the current device
        found = plan(given)
        if not isinstance(found, Answer):
            return found
        assert self._go_on is not None
        return self._go_on(found, *args, **keywords)

    def _plan(self, key: Any, arrays: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Make a plan at the second call: a first one is not slowed down, and is often the only one."""
        if key not in self._seen:
            if len(self._seen) >= KEPT:
                self.forget()
            self._seen.add(key)
            return
        plan = self._make(*arrays, **keywords) if all(x.dtype in DTYPES for x in arrays) else None
        self._plans[key] = plan, core(), None if plan is None else plan.options.engine.tuning

    def forget(self) -> None:
        """Begin anew."""
        self._seen.clear()
        self._plans.clear()


def forget_all() -> None:
    """Forget the plans of all functions: for who changes what they depend on, as tests do."""
    for plans in _every:
        plans.forget()


def given_arrays(args: Sequence[Any], begun: float, copies: bool = True) -> Given | None:
    """Aligned arrays of one library in one place, row by row, that nobody differentiates by; else None."""
    if type(args[0]) is np.ndarray:
        arrays = args
        for place, x in enumerate(args):
            # A single row is contiguous whatever its stride, and torch takes no negative one.
            if type(x) is not np.ndarray:
                return None
            if not x.flags.carray or min(x.strides, default=0) < 0:
                if not copies or x.size > COPIED or x.dtype not in DTYPES:
                    return None
                arrays = [*arrays[:place], x.copy(), *arrays[place + 1 :]]
        return Given(arrays, _as_it_is, begun, _in_numpy, args)
    if type(args[0]) is not torch.Tensor or forward_ad._current_level >= 0:
        return None
    device = args[0].device
    for x in args:
        if type(x) is not torch.Tensor or x.dtype not in (torch.float64, torch.float32):
            return None
        if x.device != device or x.layout is not torch.strided or not x.is_contiguous():
            return None
        if x.requires_grad or x.is_neg():
            return None
    if device.type == "cpu":
        return Given([x.numpy() for x in args], torch.from_numpy, begun, torch.Tensor.cpu, args)
    return Given(args, lambda x: torch.from_numpy(x).to(device), begun, lambda x: x.to(device), args)


def host_arrays(args: Sequence[Any], begun: float) -> Given | None:
    """The same where they are on the host, else None."""
    given = given_arrays(args, begun)
    return given if given is not None and isinstance(given.arrays[0], np.ndarray) else None


def _as_it_is(x: np.ndarray) -> np.ndarray:
    return x


def fields_of_accepted(
    given: Given,
    options: Asked,
    label: str,
    numbers: tuple[float, float, float],
    each: Callable[[str], Any],
    reason: Callable[[], str],
) -> dict[str, Any]:
    """Fields that results of linear systems and of least squares share, for problems that are all accepted.

    Parameters
    ----------
    given : Given
    options : Asked
    label : str
    numbers : (float, float, float)
        Backward error, forward error and condition number, the largest ones.
    each : callable
        From the name of a field to the user's array of what is known of each problem.
    reason : callable
        Why they are accepted, in words.
    """
    backward_error, forward_error, condition = numbers
    logged(Attempt(label, True, Later(reason)))
    return {
        "converged": True,
        "backward_error": backward_error,
        "condition": condition,
        "forward_error": forward_error,
        "digits": digits_of(forward_error, options.dtype),
        "attempts": Later(lambda: (Attempt(label, True, reason()),)),
        "engine": str(options.engine),
        "accuracy": options.target.name,
        "accepted": Later(lambda: each("accepted")),
        "backward_errors": Later(lambda: each("backward_errors")),
        "conditions": Later(lambda: each("conditions")),
        "forward_errors": Later(lambda: each("forward_errors")),
        "seconds": perf_counter() - given.begun,
    }


def fields_of_single(
    given: Given,
    options: Asked,
    label: str,
    numbers: tuple[float, float, float],
    forward_errors: Any,
    reason: Callable[[], str],
) -> dict[str, Any]:
    """The same of one problem, of whose right-hand sides the forward errors are known on the host."""

    def each(name: str) -> Any:
        backward_error, _, condition = numbers
        known = {"accepted": True, "backward_errors": backward_error, "conditions": condition}
        return given.wrap(np.array(known.get(name, forward_errors)))

    return fields_of_accepted(given, options, label, numbers, each, reason)


def returned(given: Given, x: np.ndarray, options: Asked) -> Any:
    """The solution for the user, from one in float64 that is rounded to the dtype of the result."""
    return given.wrap(x.astype(IN_NUMPY[options.dtype], copy=False))
