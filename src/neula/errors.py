"""Texts of errors and warnings: the given value, the problem, and what to change."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from numbers import Integral
from types import FrameType
from typing import Any


def unknown_name(what: str, given: object, known: Iterable[str]) -> ValueError:
    """Error for a name that is not in a table."""
    names = list(map(repr, known))
    return ValueError(f"unknown {what} {given!r}: choose {'one of ' * (len(names) > 1)}{', '.join(names)}")


def check_name(what: str, given: object, known: Collection[str], *, optional: bool = False) -> None:
    """Refuse a name that is not in a table; None is none, where it is optional.

    Raises
    ------
    ValueError
        That lists those that are.
    """
    if optional and given is None:
        return
    if not isinstance(given, str) or given not in known:
        raise unknown_name(what, given, known)


def number(name: str, given: Any, wanted: str, fits: Callable[[float], bool]) -> float:
    """A keyword that is one number, as a number of Python.

    Parameters
    ----------
    name : str
        Of the keyword.
    given : object
    wanted : str
        Condition on the number, in words.
    fits : callable
        Whether it is.

    Raises
    ------
    TypeError
        For what is no number.
    ValueError
        For a number that does not fit.
    """
    error: type[Exception] = TypeError
    if not isinstance(given, (str, bytes, bytearray)):  # which float would read
        try:
            found, error = float(given), ValueError
            if type(given) is not float and isinstance(given, Integral) and int(found) != int(given):
                wanted = "an integer that float64 holds, or a float"
            elif fits(found):
                return found
        except OverflowError:  # of a large integer
            error = ValueError
        except (TypeError, ValueError, RuntimeError):  # the last is torch's
            pass
    raise error(f"{name} must be {wanted}, got {given!r}")


def part_of_one(name: str, given: Any) -> float | None:
    """A part of the largest singular value, or of a norm, if one is given.

    Raises
    ------
    TypeError, ValueError
        For what is none.
    """
    return None if given is None else number(name, given, "at least 0 and below 1", lambda x: 0 <= x < 1)


def whole_number(name: str, given: Any, *, wanted: str = "a whole number, at least 1") -> int:
    """A keyword that counts something.

    Raises
    ------
    TypeError, ValueError
        For what is not a whole number, or below 1.
    """
    if type(given) is int and given >= 1:  # microseconds count
        return given
    return int(number(name, given, wanted, lambda x: x >= 1 and x.is_integer()))


def needs_extra(what: str, package: str, extra: str) -> ImportError:
    """Error for a package that comes with an optional part of the installation."""
    return ImportError(f"{what} needs {package}: pip install 'neula[{extra}]'")


def counted(count: int, what: str) -> str:
    """How many there are of something, in words.

    Examples
    --------
    >>> counted(1, "iteration"), counted(2, "iteration")
    ('1 iteration', '2 iterations')
    """
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def of_batch(reason: str, rejected: int, count: int, what: str) -> str:
    """The reason for a batch, from the reason for its worst member.

    Examples
    --------
    >>> of_batch("residual 0.1", 1, 2, "matrices")
    '1 of 2 matrices rejected; the worst: residual 0.1'
    >>> of_batch("residual 0.1", 1, 1, "matrices")
    'residual 0.1'
    """
    return f"{rejected} of {count} {what} rejected; the worst: {reason}" if count > 1 else reason


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line of the user's that called, whatever lies between it and here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_between(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_between(frame: FrameType) -> bool:
    """Whether code is neula's or torch's, or what torch has compiled a graph to."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in ("neula", "torch") or frame.f_code.co_filename.startswith("<eval_with_key>")
