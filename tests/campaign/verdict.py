"""What a verdict consists of, and what judges ask of an example."""

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
    """Something that is wrong with an answer.

    Attributes
    ----------
    kind : {"unsound", "false alarm", "violation"}
    reason : str
        One word, to count.
    text : str
        The numbers.
    """

    kind: str
    reason: str
    text: str


@dataclass
class Verdict:
    """What is wrong with an answer, and the numbers of every member of the batch.

    Attributes
    ----------
    numbers : list of dict
        ``errors``, ``forward_errors``, ``rank``, ``accepted``, ``warned`` as far as they are known, and
        whatever else explains the findings.
    raised : str
        Name of the error's class; empty if there is a result.
    rank_ambiguous : bool
        Whether a warning says so.
    seconds : float
        Of the call, without the judge.
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


def spacing_of(dtype: np.dtype) -> int:
    """``log2`` of the smallest positive number; that of float64 for integers."""
    smallest = np.finfo(dtype if dtype.kind == "f" else np.float64).smallest_subnormal
    return int(np.frexp(float(smallest))[1]) - 1


def is_default(example: Example) -> bool:
    """Whether the accuracy is asked for, and the algorithm is not named."""
    return set(keywords(example.recipe)) <= DEFAULT_OPTIONS


def unit_roundoff(example: Example, accuracy: str | None) -> float:
    """Of the accuracy asked for."""
    return FORMATS[accuracy].u if accuracy else format_of(take(example.a, "A").tensor.dtype).u
