"""Lists of matrices, as optimizers hold them: those of one shape are worked on together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from neula.pipeline.inputs import Stack

P = ParamSpec("P")
T = TypeVar("T")


def over_lists(member: Callable[[Any, int], Any]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a function of a batch also take a list of torch matrices, and return a list.

    Matrices of one shape, dtype and device are stacked; the order is that of the list. Warnings name places
    in the list.

    ``member``: from the answer to a batch and a place in it to the answer to one matrix.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            matrices: Any = args[0] if args else keywords.get("A")
            if not is_list(matrices):
                return function(*args, **keywords)
            if keywords.get("wait") is False:
                raise ValueError("wait=False is for one batch at a time: pass a tensor of shape (..., m, n)")
            rest = {name: value for name, value in keywords.items() if name != "A"}
            answers: list[Any] = [None] * len(matrices)
            for places in groups(matrices):
                stack = Stack(torch.stack([matrices[place] for place in places]), tuple(places))
                found: Any = function(stack, *args[1:], **rest)  # type: ignore[arg-type]
                for i, place in enumerate(places):
                    answers[place] = member(found, i)
            return answers

        return call

    return decorate


def is_list(x: Any) -> bool:
    """Whether x is a list or tuple of torch matrices; an empty one is."""
    return isinstance(x, (list, tuple)) and all(isinstance(a, torch.Tensor) and a.ndim == 2 for a in x)


def groups(matrices: Sequence[torch.Tensor]) -> list[list[int]]:
    """Places of matrices that go together.

    Examples
    --------
    >>> groups([torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(2, 3)])
    [[0, 2], [1]]
    """
    found: dict[tuple[Any, ...], list[int]] = {}
    for place, a in enumerate(matrices):
        found.setdefault((a.shape, a.dtype, a.device), []).append(place)
    return list(found.values())
