"""What was tried, and what is said where the accuracy was not reached."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neula.errors import warn
from neula.pipeline.result.deferred import Deferrable, Deferring

_log = logging.getLogger("neula")

NAMED = 5
"""Matrices of a batch, columns, or keys, that a message names; it counts the others."""


@dataclass(frozen=True)
class Attempt(Deferring):
    """One link of the chain: what was tried, and what its certificate said.

    Attributes
    ----------
    method : str
        The algorithm and its arithmetic, e.g. ``"rgsqrf fp16 + cgls"``.
    accepted : bool
        Whether the measured certificate met the accuracy asked for.
    reason : str
        The measured numbers, in words.
    """

    method: str
    accepted: bool
    reason: Any = Deferrable()  # noqa: RUF009


def logged(attempt: Attempt) -> Attempt:
    """An attempt, after a line about it for those who want to see these: level DEBUG of logger ``neula``."""
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug(
            "%s: %s, %s", attempt.method, "accepted" if attempt.accepted else "rejected", attempt.reason
        )
    return attempt


class AccuracyWarning(UserWarning):
    """The result is the best that was found, but it is not certified to the accuracy asked for."""


class IllConditionedWarning(AccuracyWarning):
    """The problem is so ill-conditioned, or singular, that no digit of the solution is sure."""


class AccuracyError(ArithmeticError):
    """The accuracy was not reached, and ``strict=True`` asked for an exception instead of a warning.

    Attributes
    ----------
    result : QRResult, LstsqResult or SolveResult
        The best that was found, as it would have been returned with a warning.
    indices : tuple of tuple of int
        Which matrices of the batch missed; of a single matrix the empty index.
    """

    def __init__(self, message: str, result: Any, indices: Sequence[Sequence[int]]) -> None:
        super().__init__(message)
        self.result = result
        self.indices = tuple(tuple(index) for index in indices)

    def __reduce__(self) -> tuple[Any, ...]:
        """All three arguments, so that it travels between processes."""
        return type(self), (str(self), self.result, self.indices)


for _one in (AccuracyWarning, IllConditionedWarning, AccuracyError):
    _one.__module__ = "neula"  # the name that users know, in tracebacks and warnings


def report_missed(
    what: str,
    why: str,
    result: Any,
    indices: Sequence[Sequence[int]],
    *,
    strict: bool,
    unsure: bool = False,
    name: str = "A",
) -> None:
    """Warn the caller of a public function, or raise, and name the matrices of a batch.

    ``unsure`` says that no digit of one of the solutions is sure, ``name`` what the batch is called.

    Raises
    ------
    AccuracyError
        If ``strict``.
    """
    named = [f"{name}[{', '.join(map(str, index))}]" for index in indices[:NAMED] if index]
    more = [f"{len(indices) - NAMED} more"] if len(indices) > NAMED else []
    message = f"{what}{' for ' * bool(named)}{', '.join(named + more)}: {why}"
    if strict:
        raise AccuracyError(message, result, indices)
    warn(message, IllConditionedWarning if unsure else AccuracyWarning)
