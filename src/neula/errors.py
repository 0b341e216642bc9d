"""What is said to the user: errors that repeat what was given and say what to change, and warnings."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable
from types import FrameType


def unknown_name(what: str, given: object, known: Iterable[str]) -> ValueError:
    """Error for a name that is not in a table."""
    return ValueError(f"unknown {what} {given!r}: choose one of {', '.join(map(repr, known))}")


def check_name(what: str, given: object, known: Collection[str], *, optional: bool = False) -> None:
    """Refuse a name that is not in a table; None is none, where it is optional.

    Raises
    ------
    ValueError
        That lists those that are.
    """
    if given not in known and not (optional and given is None):
        raise unknown_name(what, given, known)


def needs_extra(what: str, package: str, extra: str) -> ImportError:
    """Error for a package that comes with an optional part of the installation."""
    return ImportError(f"{what} needs {package}: pip install 'neula[{extra}]'")


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
