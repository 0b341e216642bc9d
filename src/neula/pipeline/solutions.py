"""Code shared by ``solve`` and ``lstsq``: options, measured solutions, and results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch

from neula.certificates.forward_error import SURE, digits_of
from neula.certificates.verdict import Evidence, Limits
from neula.engines import FP64, Engine, format_of, select_engine
from neula.engines.complex import over
from neula.engines.formats import double_of
from neula.kernels.magnitudes import largest_magnitude
from neula.pipeline.batches import Values
from neula.pipeline.call import Call, HostTuning, ProblemOptions
from neula.pipeline.chain import Answer, Run
from neula.pipeline.result import SolutionResult
from neula.pipeline.result.shown import Later
from neula.pipeline.shapes import BatchedProblem

FORWARD = 16
"""Unit roundoffs of a forward error that is at the level of a format. Refinement ends at half of one, x is
rounded by another, and the rest are margins of what is measured."""

LEAST_WORK = 4096  # operations that the calls for a problem come to, at least


@dataclass(frozen=True, kw_only=True)
class SolutionOptions(ProblemOptions):
    dtype: torch.dtype  # of x as it is returned
    max_iterations: int
    forward: bool = False  # whether to refine until the forward error is that of the accuracy
    # Whether the host may wait for the device: it reads some numbers to leave out what changes nothing.
    may_wait: bool = True
    # Whether the host may take over small problems that a first link has left: no engine was named.
    by_host: bool = False

    @property
    def digits(self) -> float:
        """Forward error of a solution that was refined to the end, before it is rounded."""
        # Digits beyond those of a narrower dtype would be rounded away.
        return self.target.u / (2 if self.target is FP64 else 16)

    @property
    def largest_error(self) -> float:
        """Largest accepted forward error: one guaranteed digit, or nearly all of them."""
        return min(SURE, FORWARD * self.target.u) if self.forward else SURE


@dataclass(frozen=True)
class Solutions(Values):
    # Shape (batch, n, k): in double precision, already rounded to the dtype of the result.
    x: torch.Tensor
    forward_error: torch.Tensor  # shape (batch, k)
    doubtful: torch.Tensor  # bool, shape (batch,)
    # residual, refined_error, backward_error, condition_bound, shape (batch,): as of
    # neula.certificates.verdict.Evidence: the worst right-hand side counts.
    residual: torch.Tensor
    refined_error: torch.Tensor
    backward_error: torch.Tensor
    condition_bound: torch.Tensor
    condition: torch.Tensor  # shape (batch,): estimate of the condition number, which users see

    names: ClassVar[tuple[str, ...]] = (*Evidence._fields, "condition", "largest")
    """Measured numbers of each problem; the worst right-hand side, or element of x, counts."""

    columns: ClassVar[tuple[str, ...]] = ("forward_error",)  # fields with one value for each right-hand side
    dtypes: ClassVar[dict[str, torch.dtype]] = {"doubtful": torch.bool}  # fields that are not float64

    def numbers(self) -> list[torch.Tensor]:
        """The numbers called :attr:`names`, shape (batch,) each."""
        forward_error, x = self.forward_error, self.x
        return [
            self.doubtful.double(),
            self.residual,
            self.refined_error,
            self.backward_error,
            forward_error.amax(1) if forward_error.numel() else self.backward_error,
            self.condition_bound,
            self.condition,
            largest_magnitude(x, (1, 2)) if x.numel() else self.backward_error,
        ]

    @property
    def evidence(self) -> Evidence[torch.Tensor]:
        """The numbers of the verdict, shape (batch,) each."""
        return Evidence.from_numbers(self.numbers())

    def measured(self) -> torch.Tensor:
        return torch.stack(self.numbers())

    @classmethod
    def from_numbers(
        cls, x: torch.Tensor, numbers: np.ndarray | torch.Tensor, **columns: np.ndarray | torch.Tensor
    ) -> Self:
        """Solutions with measured numbers, (numbers, batch), of which tensors are made when asked for."""
        found = object.__new__(cls)
        for name, known in (("x", x), ("_known", (numbers, columns))):
            object.__setattr__(found, name, known)
        return found

    def __getattr__(self, name: str) -> Any:
        if name not in self._names():  # nor is anything known where the constructor has made all
            raise AttributeError(name)
        numbers, columns = self._known
        known = columns[name] if name in columns else numbers[self.names.index(name)]
        found = known if isinstance(known, torch.Tensor) else torch.from_numpy(known)
        found = found.to(self.dtypes.get(name, torch.float64))
        object.__setattr__(self, name, found)
        return found

    @classmethod
    def full(
        cls, value: float, count: int, n: int, k: int, device: torch.device, of_x: torch.dtype = torch.float64
    ) -> Self:
        """Solutions filled with one value, x in double precision for a dtype of the result."""
        found = {}
        for name in cls._names():
            dtype = double_of(of_x) if name == "x" else cls.dtypes.get(name, torch.float64)
            shape = (n, k) if name == "x" else (k,) if name in cls.columns else ()
            number = 0 if name in cls.dtypes else value
            found[name] = torch.full((count, *shape), number, dtype=dtype, device=device)
        return cls(**found)


S = TypeVar("S", bound=Solutions)
R = TypeVar("R", bound=SolutionResult)


def nothing_to_do(zero: S, a: torch.Tensor) -> Run[S]:
    """Exact zero solutions for empty problems, as in NumPy. Shapes: a (batch, m, n)."""
    zero.condition.fill_(1.0)
    why = f"A is {tuple(a.shape[-2:])}, {len(a)} times"
    return Run.nothing_to_do(zero, zero.measured().cpu().numpy(), why)


def numbers_of(run: Run[S]) -> dict[str, np.ndarray]:
    """Numbers measured of the best answers, shape (batch,) each, by name; views of the run's array."""
    return dict(zip(run.found.names, run.numbers, strict=True))


@dataclass
class Report:
    call: Call
    shapes: BatchedProblem
    options: SolutionOptions
    run: Run[Any]
    # bool, shape (P, copies): right-hand sides with NaN or Inf among those that share a matrix: nothing is
    # known of them.
    nonfinite: torch.Tensor | None = None

    @cached_property
    def layout(self) -> BatchedProblem:
        return self.shapes.without_numbers()

    def of_members(self, known: Callable[[], torch.Tensor], missing: float = math.nan) -> Later:
        """An array with what is known of each problem."""
        nonfinite = self.nonfinite

        def arranged(shapes: BatchedProblem) -> torch.Tensor:
            x = shapes.of_members(known())
            return (
                x if nonfinite is None else x.masked_fill(shapes.of_copies(nonfinite.to(x.device)), missing)
            )

        return self.later(arranged)

    def later(self, arranged: Callable[[BatchedProblem], torch.Tensor]) -> Later:
        """An array that is made of a tensor when it is first read; until then no operand is kept for it."""
        shapes, first = self.layout, self.call.first
        wrap, device = first.wrap, first.tensor.device
        return Later(lambda: wrap(arranged(shapes).contiguous().to(device)))

    def missed(self) -> list[list[int]]:
        """Indices in the batch of the problems that were not accepted."""
        accepted = self.shapes.of_members(torch.from_numpy(self.run.accepted))
        if self.nonfinite is not None:
            accepted = accepted & ~self.shapes.of_copies(self.nonfinite).cpu()
        return (~accepted).nonzero().tolist()

    @cached_property
    def worst(self) -> dict[str, float]:
        """Measured numbers of the worst problem, by name; empty if there are no problems."""
        run = self.run
        names, numbers = run.found.names, run.numbers
        if not len(run.accepted):
            return {}
        if self.nonfinite is not None:
            return dict.fromkeys(names, math.nan)
        place = 0 if numbers.shape[1] == 1 else run.worst(numbers_of(run)["backward_error"])
        return dict(zip(names, numbers[:, place].tolist(), strict=True))

    def most(self, name: str, least: float) -> float:
        """The largest of some numbers that were measured, at least something; NaN is the largest."""
        if self.run.numbers.shape[1] == 1 and self.nonfinite is None:
            found = self.worst[name]
            return least if found < least else found
        return float(numbers_of(self.run)[name].max(initial=least))

    def common(self) -> dict[str, Any]:
        """Fields that results of ``solve`` and ``lstsq`` share; scalars describe the worst problem."""
        run = self.run
        values, forward_error = run.found, self.most("forward_error", 0.0)
        return {
            # It is rounded already, and its largest element was checked.
            "x": self.call.hand_back(self.shapes.solutions(values.x), self.options.dtype),
            "converged": self.nonfinite is None and bool(run.accepted.all()),
            "iterations": run.iterations,
            "backward_error": self.worst.get("backward_error", 0.0),
            "condition": self.most("condition", 1.0) if self.nonfinite is None else math.nan,
            "forward_error": forward_error,
            "digits": digits_of(forward_error, self.options.dtype),
            "history": run.history,
            **self.call.diagnostics(run.attempts),
            "accepted": self.of_members(lambda: torch.from_numpy(run.accepted), False),
            "backward_errors": self.of_members(lambda: values.backward_error),
            "conditions": self.of_members(lambda: values.condition),
            "forward_errors": self.later(lambda shapes: shapes.of_columns(values.forward_error)),
        }


def attached(
    call: Call,
    shapes: BatchedProblem,
    result: R,
    attach: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> R:
    """A result, its x attached to the graph of A and b by ``attach`` where that is required."""
    if not call.differentiable:
        return result
    a, b = (taken.graph for taken in call.operands.values())
    x, b, batch = result.x, b.to(result.x.device), shapes.batch
    if shapes.is_vector:
        x, b = x.unsqueeze(-1), b.unsqueeze(-1)
    x = attach(a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:]), x)
    return replace(result, x=x.squeeze(-1) if shapes.is_vector else x)


def unread(
    call: Call, shapes: BatchedProblem, begun: Answer[Any], limits: Limits, options: SolutionOptions
) -> dict[str, Any]:
    """Fields of a result of a first link whose numbers have not been read: tensors on the device."""
    values, measured = begun.values, begun.measured
    assert measured is not None
    of = dict(zip(values.names, measured, strict=True))
    with call.computing():
        certain = (of["largest"] <= torch.finfo(options.dtype).max) & (of.get("zero", 0) == 0)
        accepted = limits.accept(Evidence.from_numbers(measured)) & certain
    found = {
        "accepted": shapes.of_members(accepted),
        "backward_errors": shapes.of_members(values.backward_error),
        "conditions": shapes.of_members(values.condition),
        "forward_errors": shapes.of_columns(values.forward_error),
    }
    return {
        "x": call.hand_back(shapes.solutions(values.x), options.dtype),
        "converged": accepted.all(),
        "backward_error": values.backward_error.amax(),
        "engine": str(options.engine),
        "accuracy": options.target.name,
        **{name: call.hand_back(x.contiguous(), x.dtype) for name, x in found.items()},
    }


def rounded_away(run: Run[S], bound: float, dtype: torch.dtype) -> str:
    """Text of a warning if rounding x to the dtype of the result has lost its accuracy; else empty."""
    of = numbers_of(run)
    if not ((of["refined_error"] <= bound) & (of["backward_error"] > bound)).any():
        return ""
    wider = "" if format_of(dtype) is FP64 else ", or the input in a wider dtype"
    return f": x underflows in {str(dtype).removeprefix('torch.')}, pass b times a power of two{wider}"


def no_digits(run: Run[S]) -> bool:
    """Whether x of any problem without NaN or Inf has no guaranteed digit."""
    of = numbers_of(run)
    return bool((~(of["forward_error"] <= SURE) & ~np.isnan(of["backward_error"])).any())


def does_not_fit(dtype: torch.dtype) -> OverflowError:
    """The error if a solution overflows in the dtype of the result."""
    return OverflowError(
        f"the solution does not fit {str(dtype).removeprefix('torch.')}: scale b down"
        if format_of(dtype) is FP64
        else f"the solution does not fit {dtype}: pass the input in a wider dtype"
    )


def host_for(options: SolutionOptions, count: int, work: float) -> Engine | None:
    """The engine of the host, where it solves so many problems of ``m n (n + k)`` operations sooner."""
    most = options.engine.tuning[HostTuning].left_to_host if options.by_host else 0
    if count * max(work, LEAST_WORK) > most:
        return None
    return over(select_engine("cpu", torch.device("cpu")), options.dtype)


def has_parts(a: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether only the right-hand sides are complex, given the dtype of the result."""
    return dtype.is_complex and not a.is_complex()


def real_columns(b: torch.Tensor) -> torch.Tensor:
    """``[Re B, Im B]``, shape (..., m, 2 k)."""
    return torch.cat([b.real, b.imag], -1)


def complex_columns(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(*x.split(x.shape[-1] // 2 or 1, -1)) if x.shape[-1] else x.to(x.dtype.to_complex())


def applied(apply: Callable[[torch.Tensor], torch.Tensor], a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``apply(x)``, a linear function of the columns of x made of A, also where only x is complex."""
    return complex_columns(apply(real_columns(x))) if has_parts(a, x.dtype) else apply(x)


def by_parts(call: Call, shapes: BatchedProblem, solve: Callable[[torch.Tensor, torch.Tensor], R]) -> R:
    """Solutions for complex right-hand sides of real matrices, by a ``solve`` for real tensors."""
    a, b = (taken.graph for taken in call.operands.values())
    found = solve(a, real_columns(b.unsqueeze(-1) if shapes.is_vector else b))
    return _joined(call, shapes, found)


def _joined(call: Call, shapes: BatchedProblem, found: R) -> R:
    x, errors, pending = complex_columns(found.x), found.forward_errors, found._pending
    if errors.shape[-1]:  # the larger of both parts of each column bounds that of the complex one
        errors = torch.maximum(*errors.split(errors.shape[-1] // 2, -1))
    if shapes.is_vector:
        x, errors = x.squeeze(-1), errors.squeeze(-1)
    wrap = call.first.wrap
    known = {name: wrap(getattr(found, name)) for name in ("accepted", "backward_errors", "conditions")}
    return replace(
        found,
        x=wrap(x),
        forward_errors=wrap(errors),
        **known,
        _pending=None if pending is None else lambda: _joined(call, shapes, pending()),
    )
