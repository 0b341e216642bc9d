"""Exceptions that links and chains raise if they have no answer."""

from __future__ import annotations

from neula.pipeline.result import Attempt


class Declined(Exception):
    """No answer, and why; a link that does not say why leaves no attempt behind.

    ``label`` is how far it got, if further than the label of the link says.
    """

    def __init__(self, why: str = "", label: str = "") -> None:
        super().__init__(why)
        self.label = label


class Unanswered(ArithmeticError):
    """No link gave an answer.

    Attributes
    ----------
    attempts : list of Attempt
        Those of links that said why.
    """

    def __init__(self, attempts: list[Attempt]) -> None:
        reason = attempts[-1].reason if attempts else "nothing suits this problem"
        super().__init__(f"no attempt gave a solution: {reason}")
        self.attempts = attempts
