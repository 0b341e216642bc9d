"""Tables of links: for each problem the only place that says which link is tried when. A row is a link, its
arithmetics, the place where it runs, and the conditions under which it is tried. A case is shape and
options, without numbers; its chain is made of the rows that apply, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any, Generic, TypeVar

from neula.engines import FORMATS, Tuning
from neula.pipeline.chain import Answer, Link

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
KERNEL = "GPU, one kernel"
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
