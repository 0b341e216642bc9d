"""Unread answers of first links, and how they are completed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neula.pipeline.chain import Answer, Declined, Judge, Link, P, V


def answer_of_first(links: Sequence[Link[P, V]], problems: P) -> Answer[V] | None:
    """Answer of the first link; None if it declines these problems."""
    if not links:
        return None
    try:
        return links[0].answer(problems, None)
    except Declined:
        return None


def first_answer(links: Sequence[Link[P, V]], problems: P, judge: Judge[P, V]) -> Answer[V] | None:
    """Answer of the first link, measured on its device; None if the link synchronizes or declines these
    problems.

    :func:`~neula.pipeline.chain.run_chain` continues from it, when somebody has time to look.
    """
    if not links or not links[0].launches_only:
        return None
    answer = answer_of_first(links, problems)
    if answer is not None and answer.measured is None:
        answer.measured = judge.measure(problems, answer)
    return answer


def finish(result: Any) -> Any:
    """Wait for the result of a call with ``wait=False``, and solve the problems that its first link did not.

    The measured errors are read, and the problems whose answer is rejected go to the next link. A and b are
    read again: they must still hold the data of the first link, or of the last replay of your graph.

    Parameters
    ----------
    result : QRResult, PolarResult, LstsqResult, SolveResult or CholeskyResult
        Other results are complete and are returned unchanged.

    Returns
    -------
    QRResult, PolarResult, LstsqResult, SolveResult, CholeskyResult or array
        The result of the call with ``wait=True``.

    Raises
    ------
    ValueError, ArithmeticError
        As the function, also for NaN and Inf.

    Warns
    -----
    AccuracyWarning
        As the function.

    Examples
    --------
    >>> import torch, neula
    >>> result = neula.qr(torch.eye(3).repeat(2, 1, 1), wait=False)
    >>> Q, R = result
    >>> neula.finish(result).converged
    True
    """
    return result if getattr(result, "_pending", None) is None else result._pending()
