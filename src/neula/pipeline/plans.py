"""Problems like some that were solved before: what does not depend on numbers is decided once.

A call of a small problem spends most of its time on what its arrays are, what is requested, which chain that
makes, and what may be accepted. A plan keeps what shapes, dtypes and keywords decide, with the first link:
what that link solves, and the verdict accepts, is the answer. All else goes through the front end and the
whole chain, which continues from what a device has found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from time import perf_counter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch.autograd import forward_ad

from neula.certificates.forward_error import digits_of
from neula.engines import Tuning
from neula.kernels.core import core
from neula.kernels.precision import plain_arithmetic
from neula.pipeline.batches import ProblemBatch
from neula.pipeline.call import Call, restored
from neula.pipeline.chain import Answer, Link, MemoryGuard, answer_of_first
from neula.pipeline.inputs import fetched_tensors
from neula.pipeline.result import Attempt, SolutionResult, logged
from neula.pipeline.result.shown import Later, Shown
from neula.pipeline.shapes import BatchedProblem, broadcast_system
from neula.pipeline.solutions import SolutionOptions, Solutions

KEPT = 512  # shapes of one function that are remembered. A program that has more of them begins anew.

IN_NUMPY = {torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float16}
IN_NUMPY |= {torch.complex128: np.complex128, torch.complex64: np.complex64}
"""Dtypes that NumPy has as well."""

DTYPES = frozenset({*IN_NUMPY, *map(np.dtype, IN_NUMPY.values())} - {torch.float16, np.dtype(np.float16)})

OF_EACH = {"accepted": "doubtful", "backward_errors": "backward_error"}
OF_EACH |= {"conditions": "condition", "forward_errors": "forward_error"}
"""Fields of results with what is known of each problem, and where solutions have it."""

Acceptance = tuple[str, Callable[[], str]]  # the label of a link, and why its answer is accepted, in words
COPIED = 1 << 15  # elements of a view up to which its copy takes less time than the front end

LINALG_ERRORS = np.linalg.LinAlgError, torch.linalg.LinAlgError

R = TypeVar("R", bound=Shown)
P = TypeVar("P", bound=ProblemBatch)
S = TypeVar("S", bound=Solutions)
Solved = TypeVar("Solved", bound=SolutionResult[Any])

NEW: Any = object()  # what is kept of a shape that was not seen yet

_every: list[Plans] = []

Wrap = Callable[[np.ndarray], Any]  # makes an array one of the user's library


def _in_numpy(x: torch.Tensor) -> np.ndarray:
    return x.cpu().numpy()


class Plan(Protocol):
    """The first link for problems of one shape, ready to be called."""

    @property
    def options(self) -> Any:
        """The options of the calls."""

    def __call__(self, given: Given) -> Any | Answer[Any] | None:
        """The result; where it is not accepted None, or an answer from which the chain continues."""


class Given(NamedTuple):
    # float64 or float32, with contiguous rows, small views as copies: arrays on the host, tensors where they
    # are on a device.
    arrays: Sequence[Any]
    wrap: Wrap
    begun: float  # when the call began, in seconds of time.perf_counter
    # Makes a tensor an array of the user's library, where the user's arrays are.
    give: Callable[[torch.Tensor], Any] = _in_numpy
    operands: Sequence[Any] = ()  # as the user gave them

    @classmethod
    def of_call(cls, call: Call) -> Given:
        first = call.first
        return cls((first.graph,), first.wrap_array, call.begun, lambda x: call.hand_back(x, x.dtype))


class Plans:
    """Plans of one function, by shapes, dtypes and keywords; its operands, so many arrays, are positional."""

    # ``make``: from the arguments of a call to its plan; None where the whole chain is asked. ``go_on``: from
    # what a first link has found, and the arguments, to the result. ``fetches``: whether a plan on the host
    # also takes what is fetched from a device, and copies of views of up to ``copied`` elements. ``then``:
    # names of the arguments after the operands, which may be positional, too. ``also``: the keyword whose
    # value is one more operand, unless that is None.

    def __init__(
        self,
        make: Callable[..., Plan | None],
        operands: int = 2,
        go_on: Callable[..., Any] | None = None,
        fetches: bool = True,
        then: Sequence[str] = (),
        copied: float = COPIED,
        also: str = "",
    ) -> None:
        self._then, self._copied, self._also = then, copied if fetches else 0, also
        self._make, self._operands, self._fetches = make, operands, fetches
        self.signature = signature(make)  # or that of the function itself
        self._go_on = None if go_on is None else restored(go_on)
        self._plans: dict[Any, tuple[Plan | None, object, Tuning | None] | None] = {}  # None after one call
        _every.append(self)

    def __call__(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any | None:
        """The result of a call; None where the whole chain is asked."""
        begun = perf_counter()
        if len(args) > self._operands:
            rest, args = args[self._operands :], args[: self._operands]
            if len(rest) > len(self._then) or not keywords.keys().isdisjoint(self._then[: len(rest)]):
                return None
            keywords = {**dict(zip(self._then, rest, strict=False)), **keywords}
        if len(args) != self._operands:
            return None
        if keywords.get(self._also) is not None:
            args = (*args, keywords[self._also])
            keywords = {name: x for name, x in keywords.items() if name != self._also}
        if (given := given_arrays(args, begun, self._copied)) is None:
            return None
        given_as: list[Any] = [x.dtype for x in given.arrays]
        if isinstance(given.arrays[0], torch.Tensor):
            given_as.append(given.arrays[0].device)
        for name, value in keywords.items():
            if isinstance(value, torch.Tensor):  # which a key would keep
                return None
            given_as += name, value, type(value)
        key = tuple(given_as), tuple([x.shape for x in given.arrays])
        try:
            found = self._plans.get(key, NEW)
        except TypeError:  # a keyword that cannot be hashed
            return None
        if found is NEW:  # a first call, often the only one, is not slowed down
            self._remember(key, None)
            return None
        if found is None:
            taken = all(x.dtype in DTYPES for x in given.arrays)
            made = self._made(given.arrays, keywords) if taken else None
            found = made, core(), None if made is None else made.options.engine.tuning
            self._remember(key, found)
        plan, kernels, tuning = found
        if plan is None or kernels is not core() or tuning is not plan.options.engine.tuning:
            return None
        device, there = plan.options.engine.device, isinstance(given.arrays[0], torch.Tensor)
        if there and device.type == "cpu" and not self._fetches:
            return None
        if there and device.type == "cpu":
            given = given._replace(arrays=[x.numpy() for x in fetched_tensors(given.arrays)])
        if not there and device.type == "cuda" and device.index != torch.cuda.current_device():
            return None  # arrays on the host go to the current device
        try:
            answer = plan(given)
        except LINALG_ERRORS:  # the chain has other routines, and knows what to say
            return None
        if not isinstance(answer, Answer):
            return answer
        assert self._go_on is not None
        return self._go_on(answer, *args[: self._operands], **self._asked(self._named(args, keywords)))

    def _named(self, arrays: Sequence[Any], keywords: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keywords, with the operand that is one."""
        return {**keywords, self._also: arrays[-1]} if len(arrays) > self._operands else keywords

    def _asked(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords that are not given as they are by default."""
        by_default = self.signature.parameters
        return {name: x for name, x in keywords.items() if x is not by_default[name].default}

    def _made(self, arrays: Sequence[Any], keywords: Mapping[str, Any]) -> Plan | None:
        keywords, arrays = self._named(arrays, keywords), arrays[: self._operands]
        try:
            self.signature.bind(*arrays, **keywords)
        except TypeError:  # which the function itself says better
            return None
        asked = self._asked(keywords)
        return None if "progress" in asked else self._make(*arrays, **asked)  # a plan reports nothing

    def _remember(self, key: Any, found: tuple[Plan | None, object, Tuning | None] | None) -> None:
        if len(self._plans) >= KEPT:
            self.forget()
        self._plans[key] = found

    def forget(self) -> None:
        self._plans.clear()


def forget_all() -> None:
    """Forget the plans of all functions: for who changes what they depend on, as tests do."""
    for plans in _every:
        plans.forget()


def given_arrays(args: Sequence[Any], begun: float, copied: float = COPIED) -> Given | None:
    """Aligned arrays of one library in one place, row by row, without gradients; else None. On the
    host views of up to ``copied`` elements are copied.
    """
    if type(args[0]) is np.ndarray:
        arrays = args
        for place, x in enumerate(args):
            # A single row is contiguous whatever its stride, and torch takes no negative one.
            if type(x) is not np.ndarray:
                return None
            if not x.flags.carray or min(x.strides, default=0) < 0:
                if x.size > copied or x.dtype not in DTYPES:
                    return None
                arrays = [*arrays[:place], x.copy(), *arrays[place + 1 :]]
        return Given(arrays, lambda x: x, begun, _in_numpy, args)
    if type(args[0]) is not torch.Tensor or forward_ad._current_level >= 0:
        return None
    device, tensors = args[0].device, list(args)
    for place, x in enumerate(args):
        if type(x) is not torch.Tensor or x.dtype not in DTYPES:
            return None
        if x.device != device or x.layout is not torch.strided or x.requires_grad:
            return None
        if not x.is_contiguous() or x.is_neg() or x.is_conj():
            if device.type != "cpu" or x.numel() > copied:
                return None
            tensors[place] = x.resolve_conj().resolve_neg().contiguous()
    if device.type == "cpu":
        return Given([x.numpy() for x in tensors], torch.from_numpy, begun, torch.Tensor.cpu, args)
    return Given(args, lambda x: torch.from_numpy(x).to(device), begun, lambda x: x.to(device), args)


def tensors_of(arrays: Sequence[Any]) -> list[torch.Tensor]:
    return [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in arrays]


def host_arrays(args: Sequence[Any], begun: float) -> Given | None:
    given = given_arrays(args, begun)
    return given if given is not None and isinstance(given.arrays[0], np.ndarray) else None


def accepted_result(
    kind: type[R], given: Given, options: Any, label: str, reason: Callable[[], str], fields: dict[str, Any]
) -> R:
    """The result of problems that one link has solved; ``fields`` gets those that all results have."""
    fields["attempts"] = (logged(Attempt(label, True, Later(reason))),)
    fields["engine"], fields["accuracy"] = str(options.engine), options.target.name
    fields["seconds"] = perf_counter() - given.begun
    return kind._from_fields(fields)


def numbers_later(given: Given, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with arrays of one number each."""
    wrap = given.wrap  # results do not keep A

    def later(number: Any) -> Later:
        return Later(lambda: wrap(np.array(number)))

    return {name: later(number) for name, number in numbers.items()}


def accepted_solutions(
    kind: type[R],
    given: Given,
    options: Any,
    acceptance: Acceptance,
    fields: dict[str, Any],
    each: Callable[[str], Any],
) -> R:
    """Accepted result of solutions; ``each`` makes the user's array of a name in ``OF_EACH``."""
    fields["converged"], fields["digits"] = True, digits_of(fields["forward_error"], options.dtype)
    for name in OF_EACH:
        fields[name] = Later(partial(each, name))
    return accepted_result(kind, given, options, *acceptance, fields)


def accepted_solution(
    kind: type[R],
    given: Given,
    options: Any,
    acceptance: Acceptance,
    fields: dict[str, Any],
    x: np.ndarray,
    forward_errors: list[float],
) -> R:
    """Accepted result of one problem on the host, from x, shape (n, k), and errors of its columns."""
    is_vector, wrap = given.arrays[1].ndim == 1, given.wrap
    errors = forward_errors[0] if is_vector else forward_errors
    known = dict(zip(OF_EACH, (True, fields["backward_error"], fields["condition"], errors), strict=True))
    fields["x"] = returned(given, x[:, 0] if is_vector else x, options)
    return accepted_solutions(
        kind, given, options, acceptance, fields, lambda name: wrap(np.array(known[name]))
    )


def returned(given: Given, x: np.ndarray, options: Any) -> Any:
    """The solution for the user, from one in float64 that is rounded to the dtype of the result."""
    return given.wrap(x.astype(IN_NUMPY[options.dtype], copy=False))


Extremes = dict[str, tuple[float, float]]  # the smallest and the largest of each measured number, by name


class LaunchedPlan(ABC, Generic[P, S, Solved]):
    """The first link for linear systems or least-squares problems of one shape."""

    result: type[Solved]
    problems: type[Any]  # P, made of matrices, shape (P, m, n), right-hand sides, (P, m, K), and options

    def __init__(self, link: Link[P, S], judge: Any, options: SolutionOptions) -> None:
        self.link, self.judge, self.options = link, judge, options

    @abstractmethod
    def fields(self, given: Given, shapes: BatchedProblem, found: Answer[S], of: Extremes) -> dict[str, Any]:
        """Fields of the result that are not common to all."""

    @abstractmethod
    def reason(self, found: Answer[Any], of: Extremes) -> str:
        """Why all are accepted, in words."""

    @restored
    def begin(self, problems: P) -> Answer[S] | None:
        with plain_arithmetic(self.options.engine.device):
            return answer_of_first([self.link], problems)

    def __call__(self, given: Given) -> Solved | Answer[S] | None:
        return self.solved(given, broadcast_system(*tensors_of(given.arrays)))

    def solved(self, given: Given, shapes: BatchedProblem) -> Solved | Answer[S] | None:
        device, found = self.options.engine.device, None
        problems = self.problems(shapes.matrices.to(device), shapes.columns.to(device), self.options)
        with MemoryGuard(device).attempt(self.link.label):
            found = self.begin(problems)
        if found is None or found.doubt or found.measured is None:
            return found
        # Launched before the look.
        give = given.give
        x = give(shapes.solutions(found.values.x).to(self.options.dtype))
        smallest, largest = _extremes(found)
        of = dict(zip(found.values.names, zip(smallest, largest, strict=True), strict=True))
        fits = of["largest"][1] <= torch.finfo(self.options.dtype).max
        if not (fits and self.judge.settled(largest)):
            return found
        values, layout, said = found.values, shapes.without_numbers(), found.without_values()

        def each(name: str) -> Any:
            known = getattr(values, OF_EACH[name])
            if name == "forward_errors":
                return give(layout.of_columns(known).contiguous())
            return give(layout.of_members(~known if name == "accepted" else known).contiguous())

        fields = {"x": x, "iterations": found.iterations, "history": found.history}
        fields |= self.fields(given, shapes, found, of)
        fields |= {name: of[name][1] for name in ("backward_error", "forward_error")}
        fields["condition"] = max(1.0, of["condition"][1])
        acceptance = found.label, lambda: self.reason(said, of)
        return accepted_solutions(self.result, given, self.options, acceptance, fields, each)


def solved_by_plan(
    plan: Plan | LaunchedPlan[Any, Any, Solved] | None,
    call: Call,
    shapes: BatchedProblem,
    also: torch.Tensor | None = None,
) -> Solved | Answer[Any] | None:
    """The result where all problems are accepted, else what the first link of a device has found, if any.

    ``also``: an operand after A and b, such as weights.
    """
    if isinstance(plan, LaunchedPlan):
        return plan.solved(Given.of_call(call), shapes)
    if plan is None:
        return None
    right = shapes.b[:, 0] if shapes.is_vector else shapes.b
    operands = [shapes.a, right] if also is None else [shapes.a, right, also]
    return plan(Given([x.numpy() for x in operands], call.first.wrap_array, call.begun))


def _extremes(found: Answer[Any]) -> tuple[list[float], list[float]]:
    """The smallest and the largest of each number that was measured, NaN where one is; the host waits."""
    measured = found.measured
    assert measured is not None
    if isinstance(measured, np.ndarray):
        return measured.min(1).tolist(), measured.max(1).tolist()
    if measured.shape[1] > 1:
        smallest, largest = torch.stack(measured.aminmax(dim=1)).tolist()
        return smallest, largest
    found.measured = measured.cpu()
    numbers: list[float] = found.measured.flatten().tolist()
    return numbers, numbers
