"""Records of attempts, and warnings if none of them reached the accuracy."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neula.errors import warn
from neula.pipeline.result.shown import Deferrable, Deferring

_log = logging.getLogger("neula")

NAMED = 5  # matrices of a batch, columns, or keys, that a message names; it counts the others


@dataclass(frozen=True)
class Attempt(Deferring):
    """One attempt at an answer: its method, and whether its measured errors were accepted.

    Attributes
    ----------
    method : str
        The algorithm and its arithmetic, e.g. ``"rgsqrf fp16 + cgls"``.
    accepted : bool
        Whether the measured errors meet the requested accuracy.
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
    """The result is the best of all attempts, but not certified to the requested accuracy."""


class IllConditionedWarning(AccuracyWarning):
    """The problem is singular, or so ill-conditioned that no digit of the solution is guaranteed."""


class AccuracyError(ArithmeticError):
    """Raised with ``strict=True`` if the accuracy was not reached.

    Attributes
    ----------
    result : QRResult, LstsqResult or SolveResult
        The best result, as returned without ``strict``.
    indices : tuple of tuple of int
        Indices of the rejected matrices of a batch; the empty index for a single matrix.
    """

    def __init__(self, message: str, result: Any, indices: Sequence[Sequence[int]]) -> None:
        super().__init__(message)
        self.result = result
        self.indices = tuple(tuple(index) for index in indices)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all three arguments."""
        return type(self), (str(self), self.result, self.indices)


for _one in (AccuracyWarning, IllConditionedWarning, AccuracyError):
    _one.__module__ = "neula"  # the name that users know, in tracebacks and warnings


def listed(names: Sequence[str], count: int) -> str:
    """Some names, the first of so many, and how many others there are."""
    return ", ".join([*names[:NAMED], *([f"{count - NAMED} more"] if count > NAMED else [])])


def report_missed(
    what: str,
    why: str,
    result: Any,
    indices: Sequence[Sequence[int]],
    *,
    strict: bool,
    no_digits: bool = False,
    name: str = "A",
) -> None:
    """Warn the caller of a public function, or raise, and name the matrices of a batch.

    ``no_digits`` says that one of the solutions has no guaranteed digit, ``name`` names the batch.

    Raises
    ------
    AccuracyError
        If ``strict``.
    """
    named = [f"{name}[{', '.join(map(str, index))}]" for index in indices[:NAMED] if index]
    message = f"{what}{' for ' * bool(named)}{listed(named, len(indices))}: {why}"
    if strict:
        raise AccuracyError(message, result, indices)
    warn(message, IllConditionedWarning if no_digits else AccuracyWarning)
