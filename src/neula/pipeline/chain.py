"""Chains of links: try, measure, record, keep the best, stop.

A chain is a list of links, cheapest first, for a batch of problems; one problem is a batch of one. Only
:func:`run_chain` runs it. After each link a judge measures the answers on their device, in one small tensor;
that is read once, and the problems whose answers are not good enough go to the next link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from neula.pipeline.batches import ProblemBatch, Values
from neula.pipeline.memory import MemoryGuard
from neula.pipeline.progress import Progress
from neula.pipeline.result import Attempt, logged
from neula.pipeline.result.deferred import Later

P = TypeVar("P", bound=ProblemBatch)
V = TypeVar("V", bound=Values)

Settled = Callable[[Any], bool]
"""Whether nothing is left to do for any problem of a batch, from the largest of each measured number."""

MANY = 2048
"""Problems from which on the host reads the worst alone if all are accepted: a GPU solves them sooner."""


class Declined(Exception):
    """No answer, and why; a link that does not say why leaves no attempt behind.

    ``label`` is how far it got, if further than the label of the link says.
    """

    def __init__(self, why: str = "", label: str = "") -> None:
        super().__init__(why)
        self.label = label


class Unanswered(ArithmeticError):
    """No link gave an answer.

    ``attempts``: those of links that said why.
    """

    def __init__(self, attempts: list[Attempt]) -> None:
        reason = attempts[-1].reason if attempts else "nothing suits this problem"
        super().__init__(f"no attempt gave a solution: {reason}")
        self.attempts = attempts


@dataclass
class Answer(Generic[V]):
    """Solutions that a link has found for its problems.

    ``label``: how: that of the link, or more. ``doubt``: why it is not to be accepted whatever is measured.
    ``history``: errors on the way. ``measured``, shape (numbers, batch), or None: measured numbers for the
    judge, if the link has launched or computed them. ``numbers``, shape (numbers, batch), or None: what the
    judge has measured: for a link that inherits. ``factors``: what a link that inherits continues with.
    ``judged``: whether another chain has done all that can be done. ``again``: whether the next link refines
    what is not accepted with the same factors.
    """

    values: V
    label: str
    doubt: str = ""
    iterations: int = 0
    history: tuple[float, ...] = ()
    measured: torch.Tensor | np.ndarray | None = None
    numbers: np.ndarray | None = None
    factors: Any = None
    judged: bool = False
    again: bool = False

    def at(self, places: np.ndarray, device: torch.device) -> Answer[V]:
        """The answers to some of the problems."""
        numbers = None if self.numbers is None else self.numbers[:, places]
        values = self.values.at(torch.from_numpy(places).to(device))
        return replace(self, values=values, numbers=numbers)

    def without_values(self) -> Answer[Any]:
        """The answer without its values, so that it keeps no memory."""
        places: Any = range(len(self.values))
        return Answer(places, self.label, self.doubt, self.iterations, self.history, judged=self.judged)


def answered(values: V, label: str, progress: Progress | None) -> Answer[V]:
    """The answer of a link whose work is one stage of the progress."""
    if progress is not None:
        progress(label, 1.0)
    return Answer(values, label)


@dataclass(frozen=True)
class Link(Generic[P, V]):
    """One way to an answer.

    ``answer``: from problems, and the answer of the link before for the same problems if it inherits, to an
    answer; may raise :class:`Declined` after a look at the numbers. ``inherits``: whether it needs what the
    link before has found. Of others that is freed before they begin. ``improves``: whether it needs the best
    that has been found instead. ``overwrites``: whether it works in the memory of what it is given: if it
    runs out of memory, nothing is left. ``launches_only``: whether it only launches: the host waits for
    nothing in it.
    """

    label: str
    answer: Callable[[P, Answer[V] | None], Answer[V]]
    inherits: bool = False
    improves: bool = False
    overwrites: bool = False
    launches_only: bool = False


@dataclass(frozen=True)
class Verdict:
    """Verdict on the answers of one link.

    Shapes: accepted (batch,). ``penalty``, shape (levels, batch): of answers to one problem that with the
    smallest is kept, compared level by level, NaN being larger than any number; of equals the last.
    ``reason``: the measured numbers, in words. ``final``, shape (batch,), or None: problems that no later
    link is to try: those that are accepted, by default. ``evidence``: what else the judge has made of the
    numbers; kept where all values are from this answer.
    """

    accepted: np.ndarray
    penalty: np.ndarray
    reason: str
    final: np.ndarray | None = None
    evidence: Any = None


class Judge(Protocol[V]):
    """Decides by what was measured."""

    def verdict(self, answer: Answer[V], numbers: np.ndarray) -> Verdict:
        """Judge the answers by the measured numbers."""


@dataclass
class Run(Generic[V]):
    """State of a chain: the best answers so far.

    Shapes: accepted (batch,), penalty (levels, batch). ``values``: the best of each problem; None before the
    first answer. ``numbers``, shape (numbers, batch): their measured numbers; if many were accepted at once,
    the worst of each number. ``open``: problems that are left for other links. ``label``: how the last values
    that were kept were found. ``doubt``: why these are not to be accepted whatever was measured.
    ``evidence``: of the verdict, if all values are from one answer.
    """

    values: V | None
    numbers: np.ndarray
    accepted: np.ndarray
    penalty: np.ndarray
    open: np.ndarray
    attempts: list[Attempt] = field(default_factory=list)
    label: str = ""
    doubt: str = ""
    iterations: int = 0
    history: tuple[float, ...] = ()
    evidence: Any = None

    @classmethod
    def begin(cls, count: int, values: V | None = None) -> Run[V]:
        """Nothing is known yet of so many problems, whose values may have room already."""
        nothing = np.empty((0, count))
        return cls(values, nothing, np.zeros(count, dtype=bool), nothing, np.arange(count))

    @classmethod
    def nothing_to_do(cls, values: V, numbers: np.ndarray, why: str) -> Run[V]:
        """All problems are solved, since they have no elements, given what is known of them."""
        run = cls.begin(len(values), values)
        run.numbers, run.accepted[:], run.open = numbers, True, run.open[:0]
        run.attempts.append(Attempt("nothing to do", True, why))
        return run

    @property
    def found(self) -> V:
        """The best of each problem, at the end."""
        assert self.values is not None
        return self.values

    def best(self) -> Answer[V] | None:
        """Best answer so far for the open problems."""
        if self.values is None:
            return None
        return Answer(self.values.at(torch.from_numpy(self.open).to(self.values.device)), self.label)

    def weigh(self, answer: Answer[V], judge: Judge[V], settled: Settled | None) -> np.ndarray:
        """Have answers to the open problems judged, and keep what is better than before; which are left."""
        measured = answer.values.measured() if answer.measured is None else answer.measured
        settled = settled if self._is_first(len(self.open)) else None
        if settled is not None and isinstance(measured, torch.Tensor) and measured.shape[1] >= MANY:
            worst = _read(measured[:, measured.argmax(1)])  # NaN is the largest
            if settled(worst.diagonal().tolist()):
                return self._accept(answer, worst, judge)
        answer.numbers = numbers = _read(measured)
        largest = numbers[:, 0] if numbers.shape[1] == 1 else numbers.max(1)
        if settled is not None and settled(largest.tolist()):
            return self._accept(answer, numbers, judge)
        return self.keep(answer, numbers, judge.verdict(answer, numbers))

    def _is_first(self, count: int) -> bool:
        """Whether answers to so many problems are the first, and to all of them."""
        return not len(self.penalty) and count == len(self.accepted)

    def keep(self, answer: Answer[V], numbers: np.ndarray, verdict: Verdict) -> np.ndarray:
        """Take what is better than before of answers to the open problems; which are left."""
        accepted = verdict.accepted
        self.attempts.append(logged(Attempt(answer.label, bool(accepted.all()), verdict.reason)))
        self.iterations += answer.iterations
        if self._is_first(len(self.open)):
            self.label, self.history, self.values = answer.label, answer.history, answer.values
            self.doubt = answer.doubt
            self.numbers, self.penalty, self.accepted = numbers, verdict.penalty, accepted
            self.evidence = verdict.evidence
        else:
            self._keep_better(answer, numbers, verdict)
        left = (~(accepted if verdict.final is None else verdict.final)).nonzero()[0]
        self.open = self.open[left]
        return left

    def _accept(self, answer: Answer[V], numbers: np.ndarray, judge: Judge[V]) -> np.ndarray:
        """Take first answers to all problems, given what was measured of them, or of the worst by each number
        alone; none is left.
        """
        said = answer.without_values()
        reason = Later(lambda: judge.verdict(said, numbers).reason)
        self.attempts.append(logged(Attempt(answer.label, True, reason)))
        self.label, self.history, self.values = answer.label, answer.history, answer.values
        self.iterations, self.numbers, self.accepted[:] = self.iterations + answer.iterations, numbers, True
        self.open = self.open[:0]
        return self.open

    def _keep_better(self, answer: Answer[V], numbers: np.ndarray, verdict: Verdict) -> None:
        better = _no_worse(verdict.penalty, self.penalty[:, self.open])
        if not better.any():
            return
        self.label, self.history, self.doubt = answer.label, answer.history, answer.doubt
        self.evidence = verdict.evidence if better.all() and len(better) == len(self.accepted) else None
        self._put(answer.values, better)
        self._note(self.open[better], numbers[:, better], verdict.penalty[:, better])
        self.accepted[self.open[better]] = verdict.accepted[better]

    def worst(self, errors: np.ndarray) -> int:
        """The problem with the largest error: of those that were not accepted, if there are any."""
        if self.accepted.all():
            return int(errors.argmax())  # NaN is the largest
        return int(np.where(self.accepted, -1.0, np.where(np.isnan(errors), np.inf, errors)).argmax())

    def _put(self, values: V, which: np.ndarray) -> None:
        if self.values is None or (which.all() and len(which) == len(self.accepted)):
            self.values = values
            return
        device = values.device
        where = torch.from_numpy(self.open[which]).to(device)
        chosen = values if which.all() else values.at(torch.from_numpy(np.flatnonzero(which)).to(device))
        self.values = self.values.put(where, chosen)

    def _note(self, places: np.ndarray, numbers: np.ndarray, penalty: np.ndarray) -> None:
        if not len(self.numbers):
            self.numbers = np.full((len(numbers), len(self.accepted)), np.nan)
            self.penalty = np.full((len(penalty), len(self.accepted)), np.inf)
        self.numbers[:, places], self.penalty[:, places] = numbers, penalty

    def take(self, place: int, other: Run[V]) -> None:
        """Put what was found for one problem alone in its place, if it is no worse than what is there."""
        self.iterations += other.iterations
        if len(self.penalty) and not _no_worse(other.penalty, self.penalty[:, [place]])[0]:
            return
        before, self.open, self.evidence = self.open, np.array([place]), None
        self._put(other.found, np.ones(1, dtype=bool))
        self._note(self.open, other.numbers, other.penalty)
        self.accepted[place] = other.accepted[0]
        self.open = before


def run_chain(
    links: Iterable[Link[P, V]],
    problems: P,
    judge: Judge[V],
    known: V | None = None,
    begun: Answer[V] | None = None,
    settled: Settled | None = None,
) -> Run[V]:
    """Try links until the answers of all problems are accepted; of each problem the best answer is kept.

    ``links``: cheapest first. ``problems``: at least one. ``known``: earlier answers, for a link that
    improves them; any answer replaces them. ``begun``: answer of the first link
    (``neula.pipeline.chain.first_answer``); not changed. ``settled``: whether nothing is left to do for any
    problem, from the largest of each number that was measured. Raises Unanswered if no link gave an answer.
    Raises torch.OutOfMemoryError if that was for lack of memory: a link that runs out of it is left for the
    next one, unless it overwrites.
    """
    run: Run[V] = Run.begin(len(problems), known)
    guard = MemoryGuard(problems.device)
    mine, previous, left = problems, None, run.open
    for link in links:
        previous = run.best() if link.improves else previous if link.inherits else None
        if len(left) < len(mine):
            mine = mine.at(torch.from_numpy(left).to(problems.device))
            if previous is not None and not link.improves:
                previous = previous.at(left, problems.device)
        with nullcontext() if link.overwrites else guard.attempt(link.label):
            try:
                previous = link.answer(mine, previous) if begun is None else begun
            except Declined as why:
                if str(why):
                    run.attempts.append(logged(Attempt(why.label or link.label, False, str(why))))
                continue
            left = run.weigh(previous, judge, settled)
            if begun is not None and not run.accepted.all():
                run.values = run.found.copied()
            begun = None
            if not len(left):
                break
    run.attempts[:0] = [logged(Attempt("out of memory", False, shortage)) for shortage in guard.shortages]
    if not len(run.numbers):
        guard.raise_if_short()
        raise Unanswered(run.attempts)
    return run


def _read(numbers: torch.Tensor | np.ndarray) -> np.ndarray:
    """Numbers of the device, for which the host waits."""
    if isinstance(numbers, np.ndarray):
        return numbers
    try:
        return numbers.cpu().numpy().astype(np.float64)
    except RuntimeError:  # torch.func hides its tensors from NumPy
        return np.array(numbers.tolist(), dtype=np.float64)


def run_each(run: Run[V], alone: Callable[[int], Run[V] | None]) -> None:
    """Continue with each open problem by itself; the attempts that are recorded are those of the worst.

    ``run``: changes. ``alone``: runs a chain for the problem at a place; None where that does not help.
    """
    worst: Run[V] | None = None
    for place in run.open.tolist():
        one = alone(place)
        if one is None:
            continue
        run.take(place, one)
        if worst is None or not _no_worse(one.penalty, worst.penalty)[0]:
            worst = one
    if worst is not None:
        run.attempts += worst.attempts
        run.label, run.history, run.doubt = worst.label, worst.history, worst.doubt


def _no_worse(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Mask where new penalties, shape (levels, batch), are not larger; the first level counts most."""
    new, old = (np.where(np.isnan(x), np.inf, x) for x in (new, old))
    no_worse = np.ones(new.shape[1], dtype=bool)
    for mine, other in zip(new[::-1], old[::-1], strict=True):
        no_worse = (mine < other) | ((mine == other) & no_worse)
    return no_worse


def answer_of_first(links: Sequence[Link[P, V]], problems: P) -> Answer[V] | None:
    """Answer of the first link; None if it declines these problems."""
    if not links:
        return None
    try:
        return links[0].answer(problems, None)
    except Declined:
        return None


def first_answer(links: Sequence[Link[P, V]], problems: P) -> Answer[V] | None:
    """Answer of the first link, measured on its device; None if the link synchronizes or declines these
    problems.

    :func:`~neula.pipeline.chain.run_chain` continues from it, when somebody has time to look.
    """
    if not links or not links[0].launches_only:
        return None
    answer = answer_of_first(links, problems)
    if answer is not None and answer.measured is None:
        answer.measured = answer.values.measured()
    return answer


def finish(result: Any) -> Any:
    """Wait for the result of a call with ``wait=False``, and run the other links where it was rejected.

    The measured errors are read, and the problems whose answer is rejected go to the next link. A and b are
    read again: they must still hold the data of the first link, or of the last replay of your graph.

    Parameters
    ----------
    result : QRResult, PolarResult, LstsqResult, SolveResult or CholeskyResult
        Other results are complete and are returned unchanged.

    Returns
    -------
    QRResult, PolarResult, LstsqResult, SolveResult, CholeskyResult or array
        The result of the call with ``wait=True``.

    Raises
    ------
    ValueError, ArithmeticError
        As the function, also for NaN and Inf.

    Warns
    -----
    AccuracyWarning
        As the function.

    Examples
    --------
    >>> import torch, neula
    >>> result = neula.qr(torch.eye(3).repeat(2, 1, 1), wait=False)
    >>> Q, R = result
    >>> neula.finish(result).converged
    True
    """
    return result if getattr(result, "_pending", None) is None else result._pending()
