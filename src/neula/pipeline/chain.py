"""Chains of links: try, measure, record, keep the best, stop.

A chain is a list of links, cheapest first, for a batch of problems; one problem is a batch of one. Only
:func:`run_chain` runs it. After each link the answers are measured on their device, in one small tensor;
that is read once, and the problems whose answers are not good enough go to the next link.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from neula.engines import FORMATS, Tuning, graphs
from neula.io.memory import sizes_here
from neula.pipeline.batches import ProblemBatch, Values
from neula.pipeline.progress import Progress
from neula.pipeline.result import Attempt, logged
from neula.pipeline.result.shown import Later

_ASKED = re.compile(r"allocate ([\d.]+) (\w+)")
_TEXTS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


@dataclass
class MemoryGuard:
    """Attempts that may run out of memory, so that the next one, which may need less, has its turn."""

    device: torch.device
    # The missing memory of an attempt: "LU fp16 needed 2.00 GiB more, 1.25 GiB of 80.0 GiB free".
    shortages: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def attempt(self, label: str) -> Iterator[None]:
        """Carry on behind the block, whose temporary tensors are free then, if memory does not suffice."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error):
                raise
            self.shortages.append(f"{label} {_needed(error)}, {_free(self.device)}")
            if self.device.type == "cuda":
                graphs.clear()

    def raise_if_short(self) -> None:
        """Where no attempt gave an answer: raise torch.OutOfMemoryError if one had too little memory."""
        if self.shortages:
            raise torch.OutOfMemoryError(
                f"not enough memory on {self.device}: {'; '.join(self.shortages)}. Free memory, or "
                "pass fewer right-hand sides, smaller batches or a narrower dtype"
            )


def is_shortage(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # The allocator of the CPU, cuBLAS and cuSOLVER have no class of their own.
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def _needed(error: BaseException) -> str:
    found = _ASKED.search(str(error))
    if found is None:
        return "needed more than there was"
    size, unit = found.groups()
    return f"needed {_in_gib(int(size)) if unit == 'bytes' else f'{size} {unit}'} more"


def _free(device: torch.device) -> str:
    sizes = sizes_here()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # Reserved but unused memory of torch is free for torch.
        sizes = free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total
    if sizes is None:
        return "how much was free is not known"
    return f"{_in_gib(sizes[0])} of {_in_gib(sizes[1])} free"


def _in_gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


P = TypeVar("P", bound=ProblemBatch)
V = TypeVar("V", bound=Values)
Result = TypeVar("Result")  # of a public function

Settled = Callable[[Any], bool]  # whether nothing is left to do, from the largest of each number
MANY = 2048  # problems of which a GPU reads the worst alone if all are accepted: it solves them sooner


class Declined(Exception):
    """No answer, and why; a link that does not say why leaves no attempt. ``label``: how far it got."""

    def __init__(self, why: str = "", label: str = "") -> None:
        super().__init__(why)
        self.label = label


class Unanswered(ArithmeticError):
    """No link gave an answer; ``attempts`` of those that said why."""

    def __init__(self, attempts: list[Attempt]) -> None:
        reason = attempts[-1].reason if attempts else "nothing suits this problem"
        super().__init__(f"no attempt gave a solution: {reason}")
        self.attempts = attempts


@dataclass
class Answer(Generic[V]):
    """Solutions that a link has found for its problems, and what is said of them."""

    values: V
    label: str  # that of the link, or more
    doubt: str = ""  # why it is not to be accepted whatever is measured
    iterations: int = 0
    history: tuple[float, ...] = ()  # errors on the way
    # Shape (numbers, batch): numbers for the judge that the link has launched or computed.
    measured: torch.Tensor | np.ndarray | None = None
    numbers: np.ndarray | None = None  # what the judge has measured, for a link that inherits
    factors: Any = None  # what a link that inherits continues with
    judged: bool = False  # whether another chain has done all that can be done
    again: bool = False  # whether the next link refines what is not accepted with the same factors

    def at(self, places: np.ndarray, device: torch.device) -> Answer[V]:
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
    label: str
    # From problems, and the answer of the link before for the same problems if it inherits, to an answer; may
    # raise :class:`Declined` after a check of the numbers.
    answer: Callable[[P, Answer[V] | None], Answer[V]]
    inherits: bool = False  # the answer before; for other links that is freed before they begin
    improves: bool = False  # the best answer so far, which it is given instead
    overwrites: bool = False  # what it is given: if it runs out of memory, nothing is left
    launches_only: bool = False  # the host waits for nothing in it


@dataclass(frozen=True)
class Verdict:
    accepted: np.ndarray  # shape (batch,)
    # Shape (levels, batch): of answers to one problem that with the smallest is kept, compared level by
    # level, NaN being larger than any number; of equals the last.
    penalty: np.ndarray
    reason: str  # the measured numbers, in words
    final: np.ndarray | None = None  # problems that no later link is to try: by default the accepted ones
    evidence: Any = None  # what else the judge has made of the numbers


def worst_of(penalty: np.ndarray) -> int:
    """The problem with the largest penalty, of equals the last.

    >>> worst_of(np.array([[1.0, 0.0, 1.0], [2.0, 9.0, 1.0]]))
    0
    """
    places = np.arange(penalty.shape[1])
    for level in penalty:  # a few maxima; sorting takes 2 ms of 20,000
        level = level[places]
        places = places[np.isnan(level) if np.isnan(level.max()) else level == level.max()]
    return int(places[-1])


class Judge(Protocol[V]):
    def verdict(self, answer: Answer[V], numbers: np.ndarray) -> Verdict:
        """Judge the answers by the measured numbers."""


@dataclass
class Run(Generic[V]):
    """State of a chain: the best answers so far."""

    values: V | None  # the best of each problem; None before the first answer
    numbers: np.ndarray  # shape (numbers, batch): measured; of many that were accepted at once the worst
    accepted: np.ndarray  # shape (batch,)
    penalty: np.ndarray  # shape (levels, batch)
    open: np.ndarray  # problems that are left for other links
    attempts: list[Attempt] = field(default_factory=list)
    # label, doubt, history: of the last values that were kept.
    label: str = ""
    doubt: str = ""
    iterations: int = 0
    history: tuple[float, ...] = ()
    evidence: Any = None  # of the verdict, if all values are from one answer

    @classmethod
    def begin(cls, count: int, values: V | None = None) -> Run[V]:
        """A run of so many problems without answers; arrays for their values may be given."""
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
        assert self.values is not None
        return self.values

    def best(self) -> Answer[V] | None:
        if self.values is None:
            return None
        return Answer(self.values.at(torch.from_numpy(self.open).to(self.values.device)), self.label)

    def weigh(self, answer: Answer[V], judge: Judge[V], settled: Settled | None) -> np.ndarray:
        """Have answers to the open problems judged, and keep what is better than before; which are left."""
        measured = answer.values.measured() if answer.measured is None else answer.measured
        settled = None if len(self.penalty) or len(self.open) < len(self.accepted) else settled
        if settled is not None and isinstance(measured, torch.Tensor) and measured.shape[1] >= MANY:
            worst = _read(measured[:, measured.argmax(1)])  # NaN is the largest
            if settled(worst.diagonal().tolist()):
                return self._accept(answer, worst, judge)
        answer.numbers = numbers = _read(measured)
        largest = numbers[:, 0] if numbers.shape[1] == 1 else numbers.max(1)
        if settled is not None and settled(largest.tolist()):
            return self._accept(answer, numbers, judge)
        return self.keep(answer, numbers, judge.verdict(answer, numbers))

    def keep(self, answer: Answer[V], numbers: np.ndarray, verdict: Verdict) -> np.ndarray:
        """Take what is better than before of answers to the open problems; which are left."""
        accepted = verdict.accepted
        self.attempts.append(logged(Attempt(answer.label, bool(accepted.all()), verdict.reason)))
        self.iterations += answer.iterations
        self._keep_better(answer, numbers, verdict)
        left = (~(accepted if verdict.final is None else verdict.final)).nonzero()[0]
        self.open = self.open[left]
        return left

    def _accept(self, answer: Answer[V], numbers: np.ndarray, judge: Judge[V]) -> np.ndarray:
        """Take first answers to all problems, given the numbers of each, or of the worst alone."""
        said = answer.without_values()
        reason = Later(lambda: judge.verdict(said, numbers).reason)
        self.attempts.append(logged(Attempt(answer.label, True, reason)))
        self.label, self.history, self.values = answer.label, answer.history, answer.values
        self.iterations, self.numbers, self.accepted[:] = self.iterations + answer.iterations, numbers, True
        self.open = self.open[:0]
        return self.open

    def _keep_better(self, answer: Answer[V], numbers: np.ndarray, verdict: Verdict) -> None:
        better = np.ones(len(self.open), dtype=bool)  # the first answers
        if len(self.penalty):
            better = _no_worse(verdict.penalty, self.penalty[:, self.open])
        if not better.any():
            return
        self.label, self.history, self.doubt = answer.label, answer.history, answer.doubt
        if better.all() and len(better) == len(self.accepted):
            self.values, self.evidence = answer.values, verdict.evidence
            self.numbers, self.penalty, self.accepted = numbers, verdict.penalty, verdict.accepted
            return
        places, self.evidence = self.open[better], None
        if not len(self.penalty):
            self.numbers = np.full((len(numbers), len(self.accepted)), np.nan)
            self.penalty = np.full((len(verdict.penalty), len(self.accepted)), np.inf)
        self.numbers[:, places], self.penalty[:, places] = numbers[:, better], verdict.penalty[:, better]
        self.accepted[places] = verdict.accepted[better]
        chosen, values, device = answer.values, self.found, self.found.device
        if not better.all():
            chosen = chosen.at(torch.from_numpy(np.flatnonzero(better)).to(device))
        self.values = values.put(torch.from_numpy(places).to(device), chosen)

    def worst(self, errors: np.ndarray) -> int:
        """The problem with the largest error: of those that were not accepted, if there are any."""
        if self.accepted.all():
            return int(errors.argmax())  # NaN is the largest
        return int(np.where(self.accepted, -1.0, np.where(np.isnan(errors), np.inf, errors)).argmax())

    def take(self, place: int, other: Run[V]) -> None:
        """Put what was found for one problem alone in its place, if it is no worse than what is there."""
        self.iterations += other.iterations
        before, self.open = self.open, np.array([place])
        verdict = Verdict(other.accepted, other.penalty, "")
        self._keep_better(Answer(other.found, other.label), other.numbers, verdict)
        self.open = before


def run_chain(
    links: Iterable[Link[P, V]],
    problems: P,
    judge: Judge[V],
    known: V | None = None,
    begun: Answer[V] | None = None,
    settled: Settled | None = None,
) -> Run[V]:
    """Try links, cheapest first, until the answers of all problems are accepted; of each problem the best
    answer is kept.

    ``known``: earlier answers, for a link that improves them; any answer replaces them. ``begun``: answer of
    the first link (:func:`first_answer`); not changed. Raises Unanswered if no link gave an answer,
    torch.OutOfMemoryError if that was for lack of memory.
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
    """Continue with each open problem by itself; the attempts that are recorded are those of the worst."""
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
    try:
        return links[0].answer(problems, None) if links else None
    except Declined:
        return None


def first_answer(links: Sequence[Link[P, V]], problems: P) -> Answer[V] | None:
    """Answer of the first link, measured on its device; None if the link synchronizes or declines these
    problems.

    :func:`~neula.pipeline.chain.run_chain` continues from it later.
    """
    answer = answer_of_first(links, problems) if links and links[0].launches_only else None
    if answer is not None and answer.measured is None:
        answer.measured = answer.values.measured()
    return answer


def finish(result: Result) -> Result:
    """Wait for the result of a call with ``wait=False``, and make further attempts where it was rejected.

    The measured errors are read, and problems whose answer is rejected are solved by further attempts. A and
    b are read again: they must still hold the data of the call, or of the last replay of your CUDA graph.

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
    pending = getattr(result, "_pending", None)
    return result if pending is None else pending()


C = TypeVar("C")
T = TypeVar("T")


@dataclass(frozen=True)
class Rule(Generic[C, T]):
    """A column that depends on the case, in words and as a function."""

    words: str
    rule: Callable[[C], T]

    def __call__(self, case: C) -> T:
        return self.rule(case)


def ruled(words: str) -> Callable[[Callable[[C], T]], Rule[C, T]]:
    """Decorator that makes a rule of a function of several lines."""
    return lambda rule: Rule(words, rule)


CORE = "compiled core"
HOST = "host of a GPU"
ANY = "any device"
LAUNCHED = "GPU, asynchronous"


@dataclass(frozen=True)
class Row(Generic[C]):
    factorization: str  # its arithmetic takes the place of {}
    make: Callable[[C, str, str], Link[Any, Any]]  # from a case, the label and an arithmetic
    when: tuple[Rule[C, bool], ...]  # conditions, of which all must hold
    refiner: str | Rule[C, str] = ""  # suffix of the label
    arithmetics: tuple[str, ...] | Rule[C, Sequence[str]] = ("fp64",)  # a link is made for each of them
    place: str = ANY  # where it runs

    def links(self, case: C) -> dict[str, Link[Any, Any]]:
        """The links of a case by their arithmetic; none where a condition does not hold."""
        for condition in self.when:
            if not condition.rule(case):
                return {}
        end = self.refiner(case) if callable(self.refiner) else self.refiner
        names = self.arithmetics(case) if callable(self.arithmetics) else self.arithmetics
        label = self.factorization + (f" + {end}" if end else "")
        return {name: self.make(case, label.format(name), name) for name in names}


Make = Callable[[Any, str, str], Link[Any, Any]]  # from the case, label and arithmetic to a link


def way(answer: Callable[..., Answer[Any]], **flags: bool) -> Make:
    """A link of one function, whatever the case."""
    return lambda case, label, name: Link(label, answer, **flags)


def labelled(answer: Callable[..., Answer[Any]], *, improves: bool = False, **given: Any) -> Make:
    """A link of one function, which is passed the label."""
    return lambda case, label, name: Link(label, partial(answer, label=label, **given), improves=improves)


def formatted(answer: Callable[..., Answer[Any]], **flags: bool) -> Make:
    """A link of one function, which is passed the label and the format."""
    return lambda case, label, name: Link(label, partial(answer, label=label, format=FORMATS[name]), **flags)


def computed(answer: Callable[..., Answer[Any]]) -> Make:
    """A link of one function, which is passed the label and the name of the arithmetic."""
    return lambda case, label, name: Link(label, partial(answer, label=label, compute=name))


class Case:
    """Shape and options of a problem, without numbers, for the conditions of a table of links."""

    options: Any

    @cached_property
    def tuning(self) -> Tuning:
        return self.options.engine.tuning


Table = Sequence[Row[C] | tuple[Row[C], ...]]
"""Rows, cheapest first. Of the rows in a tuple all links in one arithmetic come before those in the next."""


class Chain(Sequence[Link[Any, Any]]):
    """The links of a case, each made when it is its turn: the first solves most problems."""

    def __init__(self, table: Table[Any], case: Any) -> None:
        self._made: list[Link[Any, Any]] = []
        self._rest = _links_of(table, case)

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None

    def __len__(self) -> int:
        return len(self[:])

    def __getitem__(self, place: Any) -> Any:
        counts = isinstance(place, int) and place >= 0
        self._made += islice(self._rest, max(0, place + 1 - len(self._made)) if counts else None)
        return self._made[place]


def _links_of(table: Table[C], case: C) -> Iterator[Link[Any, Any]]:
    for rows in table:
        if isinstance(rows, Row):
            yield from rows.links(case).values()
            continue
        found = [row.links(case) for row in rows]
        for name in dict.fromkeys(name for each in found for name in each):
            yield from (each[name] for each in found if name in each)
