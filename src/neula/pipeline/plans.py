"""Small problems of a shape that was solved before: what does not depend on numbers is decided once.

A call spends most of its microseconds on what its arrays are, what is asked for, which chain that makes, and
what may be accepted. For arrays on the host all of that depends on shapes, dtypes and keywords alone. A plan
keeps it, with the first link: what that link solves, and the verdict accepts, is the answer. All else goes
through the front end and the whole chain, as a first call does.
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
from neula.pipeline.in_numpy import IN_NUMPY, Asked
from neula.pipeline.result import Attempt
from neula.pipeline.result.deferred import Later

KEPT = 512
"""Shapes of one function that are remembered. A program that has more of them begins anew."""

DTYPES = (np.dtype(np.float64), np.dtype(np.float32))

_every: list[Plans] = []

Wrap = Callable[[np.ndarray], Any]
"""Makes an array one of the user's library."""


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

    def __call__(self, given: Given) -> Any | None:
        """The result; None where it is not accepted."""


class Given(NamedTuple):
    """The operands of a call.

    Attributes
    ----------
    arrays : sequence of array
        float64 or float32, with contiguous rows.
    wrap : callable
    begun : float
        When the call began, in seconds of ``time.perf_counter``.
    """

    arrays: Sequence[np.ndarray]
    wrap: Wrap
    begun: float


class Plans:
    """Plans of one function, by shapes, dtypes and keywords.

    Parameters
    ----------
    make : callable
        From the arguments of a call to its plan; None where the compiled core is not the first link.
    operands : int, optional
        Arrays, which are positional.
    """

    def __init__(self, make: Callable[..., Plan | None], operands: int = 2) -> None:
        self._make, self._operands = make, operands
        self._plans: dict[Any, tuple[Plan | None, object, Tuning | None]] = {}
        self._seen: set[Any] = set()
        _every.append(self)

    def __call__(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any | None:
        """The result of a call; None where the whole chain is asked."""
        begun = perf_counter()
        if len(args) != self._operands or (given := host_arrays(args, begun)) is None:
            return None
        key: list[Any] = []
        for x in given.arrays:
            key += x.shape, x.dtype
        for name, value in keywords.items():
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
        return plan(given)

    def _plan(self, key: Any, arrays: Sequence[np.ndarray], keywords: Mapping[str, Any]) -> None:
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


def host_arrays(args: Sequence[Any], begun: float) -> Given | None:
    """Aligned arrays of one library on the host, row by row, that nobody differentiates by; else None."""
    if type(args[0]) is np.ndarray:
        for x in args:
            # A single row is contiguous whatever its stride, and torch takes no negative one.
            if type(x) is not np.ndarray or not x.flags.carray or min(x.strides, default=0) < 0:
                return None
        return Given(args, _as_it_is, begun)
    if type(args[0]) is not torch.Tensor or forward_ad._current_level >= 0:
        return None
    for x in args:
        if type(x) is not torch.Tensor or x.dtype not in (torch.float64, torch.float32):
            return None
        if not x.is_cpu or x.layout is not torch.strided or not x.is_contiguous():
            return None
        if x.requires_grad or x.is_neg():
            return None
    return Given([x.numpy() for x in args], torch.from_numpy, begun)


def _as_it_is(x: np.ndarray) -> np.ndarray:
    return x


def fields_of_single(
    given: Given,
    options: Asked,
    label: str,
    numbers: tuple[float, float, float],
    forward_errors: Any,
    reason: Callable[[], str],
) -> dict[str, Any]:
    """Fields that results of linear systems and of least squares share, for one accepted problem.

    Parameters
    ----------
    given : Given
    options : Asked
    label : str
    numbers : (float, float, float)
        Backward error, forward error and condition number.
    forward_errors : float or list of float
        Of each right-hand side.
    reason : callable
        Why it is accepted, in words.
    """
    backward_error, forward_error, condition = numbers
    wrap = given.wrap

    def later(known: Any) -> Later:
        return Later(lambda: wrap(np.array(known)))

    return {
        "converged": True,
        "backward_error": backward_error,
        "condition": condition,
        "forward_error": forward_error,
        "digits": digits_of(forward_error, options.dtype),
        "attempts": Later(lambda: (Attempt(label, True, reason()),)),
        "engine": str(options.engine),
        "accuracy": options.target.name,
        "accepted": later(True),
        "backward_errors": later(backward_error),
        "conditions": later(condition),
        "forward_errors": later(forward_errors),
        "seconds": perf_counter() - given.begun,
    }


def returned(given: Given, x: np.ndarray, options: Asked) -> Any:
    """The solution for the user, from one in float64 that is rounded to the dtype of the result."""
    return given.wrap(x.astype(IN_NUMPY[options.dtype], copy=False))
