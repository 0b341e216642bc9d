"""Tables of links: for each problem the only place that says which link is tried when.

A row is a link: a factorization, and what refines with it. Its arithmetics, the place where it runs, and the
conditions under which it is tried are columns. A case is shape and options, without numbers; its chain is
made of the rows that apply, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from neula.pipeline.chain import Link

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
    """The same from a function of several lines, as a decorator."""
    return lambda rule: Rule(words, rule)


CORE = "compiled core"
HOST = "host of a GPU"
ANY = "any device"
LAUNCHED = "GPU, launched before any number is read"


@dataclass(frozen=True)
class Row(Generic[C]):
    """A link of a table.

    Attributes
    ----------
    factorization : str
        Its arithmetic takes the place of ``{}``.
    make : callable
        From a case, the label and an arithmetic to the link.
    when : tuple of Rule
        Conditions, of which all must hold.
    refiner : str or Rule
        What is added to the label; of a case, where it depends on that.
    arithmetics : tuple of str, or Rule
        A link is made for each of them; of a case, where they depend on that.
    place : str
        Where it runs.
    """

    factorization: str
    make: Callable[[C, str, str], Link[Any, Any]]
    when: tuple[Rule[C, bool], ...]
    refiner: str | Rule[C, str] = ""
    arithmetics: tuple[str, ...] | Rule[C, Sequence[str]] = ("fp64",)
    place: str = ANY

    def links(self, case: C) -> dict[str, Link[Any, Any]]:
        """The links of a case by their arithmetic; none where a condition does not hold."""
        if not all(holds(case) for holds in self.when):
            return {}
        end = self.refiner(case) if callable(self.refiner) else self.refiner
        names = self.arithmetics(case) if callable(self.arithmetics) else self.arithmetics
        label = self.factorization + (f" + {end}" if end else "")
        return {name: self.make(case, label.format(name), name) for name in names}


Table = Sequence[Row[C] | tuple[Row[C], ...]]
"""Rows, cheapest first. Of the rows in a tuple all links in one arithmetic come before those in the next."""


def chain_of(table: Table[C], case: C) -> list[Link[Any, Any]]:
    """What is tried for a case."""
    links = []
    for rows in table:
        found = [row.links(case) for row in (rows if isinstance(rows, tuple) else (rows,))]
        names = dict.fromkeys(name for each in found for name in each)
        links += [each[name] for name in names for each in found if name in each]
    return links
