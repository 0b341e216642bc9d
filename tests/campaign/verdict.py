"""Findings and verdicts, and facts about an example that judges need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neula.engines import FORMATS, format_of
from neula.pipeline.inputs import take

from .calls import Answer
from .recipes import Example, keywords

DEFAULT_OPTIONS = {"certify", "accuracy", "mode"}
"""Options that do not name an algorithm."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with an answer: unsound, a false alarm or a violation; the reason in a word,
    to count; and the numbers in words.
    """

    kind: str
    reason: str
    text: str


@dataclass
class Verdict:
    """Findings about an answer, and for every member of the batch ``errors``, ``forward_errors``, ``rank``,
    ``accepted``, ``warned`` as far as they are known. ``raised`` is the class of the error,
    ``rank_ambiguous`` says that a warning says so, ``seconds`` are those of the call without the judge.
    """

    findings: list[Finding] = field(default_factory=list)
    numbers: list[dict[str, Any]] = field(default_factory=list)
    raised: str = ""
    rank_ambiguous: bool = False
    seconds: float = 0.0

    @classmethod
    def on(cls, answer: Answer) -> Verdict:
        """An empty verdict that knows what was called."""
        ambiguous = any("doubtful" in str(w.message) for w in answer.warnings)
        return cls([], [], type(answer.error).__name__ if answer.error else "", ambiguous, answer.seconds)

    def has(self, kind: str) -> bool:
        return any(finding.kind == kind for finding in self.findings)

    def add(self, kind: str, reason: str, text: str) -> None:
        self.findings.append(Finding(kind, reason, text))

    def __str__(self) -> str:
        lines = [f"{f.kind} ({f.reason}): {f.text}" for f in self.findings] or ["sound"]
        return "\n".join([*lines, *(f"  {numbers}" for numbers in self.numbers)])


def as_python(call: str, **arrays: np.ndarray) -> str:
    """A call in Python, with the numbers that were given: floats are printed exactly."""
    given = [f"{name} = np.array({x.tolist()!r}, {str(x.dtype)!r})" for name, x in arrays.items()]
    return "\n".join(["import numpy as np, neula", "nan, inf = np.nan, np.inf", *given, call])


def limits_of(dtype: np.dtype) -> np.finfo:
    """Of the numbers of a dtype, or of the parts of complex ones; those of float64 for integers."""
    return np.finfo(dtype if dtype.kind in "fc" else np.float64)


def spacing_of(dtype: np.dtype) -> int:
    """``log2`` of the smallest positive number; that of float64 for integers."""
    return int(np.frexp(float(limits_of(dtype).smallest_subnormal))[1]) - 1


def is_default(example: Example) -> bool:
    """Whether the accuracy is asked for, and the algorithm is not named."""
    return set(keywords(example.recipe)) <= DEFAULT_OPTIONS


def stored_unit(x: Any) -> float:
    """Unit roundoff of the dtype of an array, float64 for integers."""
    return format_of(take(x, "x", or_complex=True).tensor.dtype).u


def unit_roundoff(example: Example, accuracy: str | None) -> float:
    """Of the accuracy asked for."""
    return FORMATS[accuracy].u if accuracy else stored_unit(example.a)
