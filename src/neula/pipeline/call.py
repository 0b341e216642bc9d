"""The front end of every public function: takes arrays and options, chooses the engine, gives the answer
back in kind, and says where the accuracy was missed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from neula.certificates.bounds import Accuracy, qr_bound, target_format
from neula.engines import FP32, FP64, Engine, Format, Tuning, select_engine
from neula.engines.complex import over
from neula.engines.reduction import Reduction
from neula.kernels.precision import plain_arithmetic
from neula.pipeline.inputs import Taken, check_finite, fetched, flattened, gradient_wanted, take
from neula.pipeline.progress import Progress
from neula.pipeline.result import report_missed

OPENBLAS_THREADS = 2304 * 4
"""Elements of a matrix from which on OpenBLAS takes several threads to multiply it by a vector (its
``interface/gemv.c``, with the GEMM_MULTITHREAD_THRESHOLD of its builds)."""


@dataclass(frozen=True)
class HostTuning:
    """Values of m n (n + k) up to which a GPU's host solves one matrix: launches take longer."""

    by_host: int  # with LAPACK; not for systems that are queued
    by_host_kernel: int  # with the compiled core, in one thread
    left_to_host: int  # of all problems together that a first link has not solved, passes over them counted
    passes: float  # over ill-conditioned problems, each as long as one over others
    passes_left: float  # where all that takes batches has failed, and problems would go one by one to an SVD


@dataclass(frozen=True)
class ProblemOptions:
    target: Format  # whose accuracy the answer is to have
    engine: Engine
    progress: Progress | None = field(default=None, kw_only=True)

    @cached_property
    def tuning(self) -> Tuning:  # looking it up takes some microseconds
        return self.engine.tuning

    @property
    def work(self) -> Format:
        """The format in which answers are computed and measured unless a cheaper one is accurate enough."""
        return FP64 if self.target is FP64 else FP32

    @property
    def over_rows(self) -> Reduction:
        return self.engine.over_rows

    def shape_of(self, here: torch.Size) -> tuple[int, int]:
        """Shape of a matrix of whose rows these are here."""
        return self.over_rows.count(here[-2]), here[-1]


@dataclass(frozen=True)
class Call:
    """One call of a public function."""

    # By the names that the user knows them by. The answer goes back to the library and the device of the
    # first.
    operands: dict[str, Taken]
    engine: Engine
    dtype: torch.dtype  # the common one of the operands
    target: Format  # whose accuracy the answer is to have
    strict: bool = False  # whether it is an error to miss that
    differentiable: bool = False  # whether the answer is to be attached to the graph of an operand
    weights: Taken | None = None  # factors of the rows of the operands, if there are any
    begun: float = field(default_factory=perf_counter)  # when, in seconds of time.perf_counter

    @classmethod
    def begin(
        cls,
        operands: Mapping[str, Any],
        *,
        engine: str | Engine = "auto",
        accuracy: Accuracy | None = None,
        bound: Callable[[Format, tuple[int, ...]], float] = qr_bound,
        strict: bool = False,
        gradients: bool = False,
        weights: Any = None,
        or_complex: bool = True,
    ) -> Call:
        """Take the arrays, and choose what to compute with.

        Operands are arrays of any library, by name; the dtype of weights does not count. An accuracy that is
        a number is compared with ``bound``, the largest accepted backward error in a format, for a first
        operand of some shape. Without ``gradients``, where the function does not attach its answer, operands
        that require one are refused. Raises TypeError or ValueError as :func:`neula.pipeline.inputs.take`,
        and for unknown names.
        """
        taken = {
            name: take(x, name, differentiable=gradients, or_complex=or_complex)
            for name, x in operands.items()
        }
        factors = None if weights is None else take(weights, "weights", differentiable=gradients)
        first, *others = taken.values()
        dtype = first.tensor.dtype
        for other in others:
            if other.tensor.dtype != dtype:
                dtype = torch.promote_types(dtype, other.tensor.dtype)
        return cls(
            taken,
            over(select_engine(engine, first.tensor.device), dtype),
            dtype,
            target_format(accuracy, dtype, lambda target: bound(target, tuple(first.tensor.shape))),
            strict,
            gradients and gradient_wanted(first, *others, factors),
            factors,
        )

    def by_host(
        self,
        asked: str | Engine,
        *,
        has_kernel: Callable[[int, int], bool] = lambda m, n: False,
        most: int = 0,
        library: bool = True,
        gradients: bool = True,
    ) -> Call:
        """Run on the CPU, if the user leaves the choice (``asked="auto"``) and one matrix is so small that
        launches elsewhere take longer: up to ``most = m n (n + k)`` by the compiled core, in one thread.
        ``library``: whether the host's library takes less time, too; ``gradients``: whether calls that attach
        one may go.
        """
        a, *others = self.tensors
        tuning = self.engine.tuning
        may_go = asked == "auto" and (gradients or not self.differentiable)
        limit = max(tuning[HostTuning].by_host, most) if may_go else 0
        if not limit or a.ndim != 2 or not all(0 < b.ndim <= 2 for b in others):
            return self
        m, n = a.shape
        work = m * n * (min(m, n) + sum(b[:1].numel() for b in others))
        if not 0 < work <= limit:
            return self
        host = over(select_engine("cpu", torch.device("cpu")), self.dtype)
        # Several threads of a library would work on larger ones, and sooner on complex numbers: 64 x 32 of
        # them take 16 cores 8 to 24 ms, and one 0.5.
        size = m * n * (16 if self.dtype.is_complex else 1)
        by_library = library and work <= tuning[HostTuning].by_host and size < OPENBLAS_THREADS
        if not by_library and not (work <= most and has_kernel(m, n)):
            return self
        operands = dict(zip(self.operands, fetched([*self.operands.values()]), strict=True))
        weights = None if self.weights is None else fetched([self.weights])[0]
        return replace(self, operands=operands, weights=weights, engine=host)

    @property
    def seconds(self) -> float:
        """Time since it was begun. Results say so; nothing is decided by it."""
        return perf_counter() - self.begun

    @property
    def first(self) -> Taken:
        """The operand that the answer is like."""
        return next(iter(self.operands.values()))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(taken.tensor for taken in self.operands.values())

    def matrices(self) -> torch.Tensor:
        """A as one batch of matrices on the engine's device, shape (P, m, n); P is 1 for a single one."""
        return self.here(flattened(self.first.tensor))

    def here(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.engine.device)

    def computing(self) -> AbstractContextManager[None]:
        """Context for computing: without gradients, and in the arithmetic that was chosen."""
        return plain_arithmetic(self.engine.device)

    def give_back(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
        """As :meth:`Taken.give_back`, of the first operand."""
        return self.first.give_back(x, dtype)

    def hand_back(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
        """Return x in the library of A without checking for overflow."""
        kept = x.to(device=self.first.tensor.device, dtype=dtype or self.first.tensor.dtype)
        return self.first.wrap(kept.resolve_conj())

    def of_members(self, x: np.ndarray | torch.Tensor) -> Any:
        """An array of what is known of each matrix of a batch."""
        known = x if isinstance(x, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(x))
        return self.hand_back(known.reshape(self.first.tensor.shape[:-2]), known.dtype)

    def diagnostics(self, attempts: Sequence[Any]) -> dict[str, Any]:
        known = {"engine": str(self.engine), "accuracy": self.target.name, "seconds": self.seconds}
        return {"attempts": tuple(attempts), **known}

    def missed(self, accepted: np.ndarray) -> list[list[int]]:
        """Indices of the matrices of a batch that are not accepted; the empty index of a single one."""
        return np.argwhere(~accepted.reshape(self.first.tensor.shape[:-2])).tolist()

    def report_missed(
        self, what: str, why: str, result: Any, indices: Sequence[Sequence[int]], *, no_digits: bool = False
    ) -> None:
        """Warn that the accuracy was missed, or raise where the call is strict: ValueError for a batch that
        holds NaN or Inf. ``result``: the best that was found. ``indices``: of the rejected matrices of a
        batch; the empty index for a single one. ``no_digits``: whether a solution has no guaranteed digit.
        """
        if self.strict and any(map(len, indices)):  # a single matrix was checked before
            for name, taken in self.operands.items():
                check_finite(taken.tensor, taken.tensor, name)
        if places := self.first.places:  # the user's, of a list
            indices = [(places[first], *rest) for first, *rest in indices]
        report_missed(what, why, result, indices, strict=self.strict, no_digits=no_digits)


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
