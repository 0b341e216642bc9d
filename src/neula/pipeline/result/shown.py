"""How results show themselves: on one screen, whatever the size of their arrays."""

from __future__ import annotations

import html
import math
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from neula.errors import counted


@dataclass(slots=True)
class Later:
    """A function that computes a deferred field when it is first read.

    Attributes
    ----------
    make : callable
        Makes the value, once at most.
    """

    make: Callable[[], Any]


class Deferring:
    """A dataclass with such fields."""

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have all values, including those not read before."""
        return {name: getattr(self, name) for name in vars(self)}


class Deferrable:
    """A field of a dataclass whose value may be a :class:`Later`, which is never visible.

    Parameters
    ----------
    default : object
        None, or what else a field has that is not given; without, the field has no default.
    """

    def __init__(self, *default: Any) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:  # the dataclass looks for a default
            if not self._default:
                raise AttributeError(self._name)
            return self._default[0]
        fields = vars(instance)
        if self._name not in fields:
            raise AttributeError(self._name)
        value = fields[self._name]
        if isinstance(value, Later):
            value = fields[self._name] = value.make()
        return value

    def __set__(self, instance: object, value: Any) -> None:
        vars(instance)[self._name] = value


ArrayT = TypeVar("ArrayT")  # the type of the arrays in a result: that of the input

NUMBERS = 6  # numbers of a vector that are shown
COLUMNS = 100  # width of a screen

Rows = Iterable[tuple[str, str]]


class Shown(Deferring, ABC):
    """A result with rows of what matters in it.

    Results are equal only to themselves, and hash by what they are, as open files and tensors do. Fields are
    arrays, of which ``==`` makes arrays, NaN where something is unknown, and times: no two calls would have
    equal ones, and comparing them would wait for a GPU.
    """

    _answers: ClassVar[tuple[str, ...]] = ("x",)  # attributes with what was computed

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: NumPy would make an array of one object.

        Raises
        ------
        TypeError
        """
        *others, last = (f".{name}" for name in self._answers)
        answers = f"{', '.join(others)} and {last}" if others else last
        raise TypeError(f"{type(self).__name__} is not an array: take its {answers}")

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Construct a result from fields without calls of the constructor, in a tenth of its time."""
        result = object.__new__(cls)
        result.__dict__.update(fields)
        return result

    @abstractmethod
    def _headline(self) -> str:
        """First line of the printed result."""

    @abstractmethod
    def _rows(self) -> Rows:
        """Names and values below the headline."""

    def __repr__(self) -> str:
        rows = list(self._rows())
        width = max(len(name) for name, _ in rows)
        title = f"{type(self).__name__}: {self._headline()}"
        lines = textwrap.wrap(title, COLUMNS, subsequent_indent="  ")
        for name, value in rows:
            first, *more = textwrap.wrap(value, COLUMNS - width - 4) or [""]
            lines += [f"  {name:<{width}}  {first}", *(" " * (width + 4) + part for part in more)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Show the result as an HTML table in notebooks."""
        rows = "".join(
            f'<tr><th style="text-align:left">{html.escape(name)}</th>'
            f'<td style="text-align:left">{html.escape(value)}</td></tr>'
            for name, value in self._rows()
        )
        caption = html.escape(f"{type(self).__name__}: {self._headline()}")
        return f'<table><caption style="text-align:left">{caption}</caption>{rows}</table>'


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CertifiedResult(Shown):
    """A result with its measured errors, by which it was accepted or rejected.

    Attributes
    ----------
    attempts : tuple of Attempt
        Attempts of the chain, in order; the last one is accepted if any is.
    engine : str
        The engine that multiplied.
    accuracy : str
        The requested accuracy.
    seconds : float
        Time of the call.
    """

    attempts: Any = Deferrable(())
    engine: str = ""
    accuracy: str = ""
    seconds: float = math.nan
    _pending: Callable[[], Any] | None = None

    def _headline(self) -> str:
        return verdict(self.accuracy, converged=self.converged) + members(self.accepted)  # type: ignore[attr-defined]

    def _lines(
        self,
        before: Mapping[str, str],
        after: Mapping[str, str],
        method: str = "",
        answers: Sequence[str] | None = None,
    ) -> Rows:
        """The answers, other rows before and after that of the method, and the time."""
        rows = {name: array(getattr(self, name)) for name in (self._answers if answers is None else answers)}
        rows |= {**before, "method": attempted(self.attempts, method), **after}
        return {**rows, "time": f"{duration(self.seconds)}, engine {self.engine}"}.items()

    def _bounded(self, *names: str) -> dict[str, str]:
        pairs = {name: (getattr(self, name), getattr(self, f"{name}_bound")) for name in names}
        return {name: f"{found:.1e} (bound {bound:.1e})" for name, (found, bound) in pairs.items()}

    def _one_of(self, place: int, arrays: Sequence[str], **scalars: str) -> Self:
        """The result of one matrix of a batch: its part of each array, from which scalars follow."""
        known = {name: getattr(self, name) for name in arrays}
        of_one: dict[str, Any] = {name: None if x is None else x[place] for name, x in known.items()}
        numbers = {name: type(getattr(self, name))(of_one[array]) for name, array in scalars.items()}
        return replace(self, **of_one, **numbers)


class Unpacked:
    """A result that is taken apart as a tuple."""

    @abstractmethod
    def _parts(self) -> tuple[Any, ...]:
        """The elements of the tuple."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts())

    def __getitem__(self, index: int) -> Any:
        return self._parts()[index]

    def __len__(self) -> int:
        return len(self._parts())


def array(x: Any) -> str:
    """Shape, dtype, where it is unless in main memory, and of a vector the first and last numbers."""
    if x is None:
        return "not computed"
    device = str(getattr(x, "device", "cpu"))
    where = f" on {device}" if device.startswith("cuda") else ""
    text = f"{tuple(x.shape)} {str(x.dtype).rpartition('.')[2]}{where}"
    if len(x.shape) != 1 or not len(x):
        return text
    return f"{text}: [{numbers(x.detach() if hasattr(x, 'detach') else x)}]"


def count(x: Any) -> int:
    return math.prod(x.shape)


def numbers(x: Any) -> str:
    n, half = len(x), NUMBERS // 2
    scalar = complex if "complex" in str(getattr(x, "dtype", "")) else float
    if n <= NUMBERS:
        return ", ".join(f"{scalar(v):.4g}" for v in x)
    ends = [", ".join(f"{scalar(x[i]):.4g}" for i in part) for part in (range(half), range(n - half, n))]
    return ", ..., ".join(ends)


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "unknown"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def attempted(attempts: tuple[Any, ...], kept: str = "") -> str:
    """The method of the answer and the number of attempts; ``kept`` names it if it may not be the last."""
    if not attempts:
        return "nothing was tried"
    method = kept or attempts[-1].method
    if attempts[-1].accepted:
        return f"{method}, accepted at attempt {len(attempts)}"
    return f"{method}, the best of {len(attempts)}"


def correct(digits: float) -> str:
    """How many digits of x are guaranteed to be correct: whole ones, so never more than its dtype holds."""
    if not digits >= 1:  # also where a member of a batch holds NaN
        return "no digit of x is guaranteed"
    return f"{counted(int(digits), 'correct digit')} (rounding only; noise in the data is not counted)"


def verdict(accuracy: str, *, converged: bool) -> str:
    return f"{'certified' if converged else 'NOT certified'} to {accuracy} accuracy"


def members(accepted: Any) -> str:
    """How many problems of a batch are certified; nothing for a single one."""
    count = math.prod(accepted.shape) if accepted is not None and len(accepted.shape) else None
    return "" if count is None else f", {int(accepted.sum())} of {count} accepted"
