"""Answers of first links that nobody has looked at, and how they are finished."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neula.pipeline.chain import Answer, Judge, Link, P, V
from neula.pipeline.refusals import Declined


def answer_of_first(links: Sequence[Link[P, V]], problems: P) -> Answer[V] | None:
    """What the first link finds; None where it has nothing for these problems."""
    if not links:
        return None
    try:
        return links[0].answer(problems, None)
    except Declined:
        return None


def first_answer(links: Sequence[Link[P, V]], problems: P, judge: Judge[P, V]) -> Answer[V] | None:
    """What the first link finds, measured where it is; None where that link waits for the host, or has
    nothing for these problems.

    :func:`~neula.pipeline.chain.run_chain` goes on from it, when somebody has time to look.
    """
    if not links or not links[0].launches_only:
        return None
    answer = answer_of_first(links, problems)
    if answer is not None and answer.measured is None:
        answer.measured = judge.measure(problems, answer)
    return answer


def finish(result: Any) -> Any:
    """Wait for an answer that was asked for with ``wait=False``, and go on where it was rejected.

    What the first link has found is read now, and judged; what it has not solved goes on to the next link.
    A and b are read again then: they must be what the first link has seen, or the last replay of your graph.

    Parameters
    ----------
    result : QRResult, PolarResult, LstsqResult, SolveResult or CholeskyResult
        Others are complete, and come back as they are.

    Returns
    -------
    QRResult, PolarResult, LstsqResult, SolveResult, CholeskyResult or array
        What the function returns with ``wait=True``.

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
