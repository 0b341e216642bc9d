"""``torch.compile`` and the public functions: it takes their operators, or goes around them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from neula.pipeline.inputs import tensors_in
from neula.pipeline.operators import is_hidden, is_traced
from neula.pipeline.plans import Plans
from neula.pipeline.progress import showing
from neula.pipeline.state import restored

P = ParamSpec("P")
T = TypeVar("T")


def with_operator(
    traced: Callable[..., Any], plans: Plans | None = None
) -> Callable[[Callable[P, T]], Callable[..., T]]:
    """:func:`eager` for a function that has an operator of torch, which takes its place in a graph."""
    return lambda function: eager(function, traced, plans)


def eager(
    function: Callable[P, T], traced: Callable[..., Any] | None = None, plans: Plans | None = None
) -> Callable[..., T]:
    """Run a function as it stands, a graph break for ``torch.compile``, and leave modes as they were.

    The chains look at their numbers at every step. Traced, they are many graphs, compiled anew for each
    shape, and not faster. ``progress=True`` becomes a bar here.

    ``traced``: replacement by an operator of torch if numbers cannot be read; it returns None for unsupported
    arguments. ``plans``: replacement for problems like an earlier one. Type checkers know its parameters from
    its overloads, which let ``progress`` be a bool.
    """
    disabled: Callable[P, T] | None = None
    name = function.__name__
    careful = restored(showing(function))

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal disabled
        given = (*args, *kwargs.values())
        if is_traced(given):
            found: T | None = None if traced is None else traced(*args, **kwargs)
            if found is not None:
                return found
            if any(map(is_hidden, tensors_in(given))):
                raise ValueError(
                    f"a transform of torch.func hides an operand of {name}, which has neither derivatives "
                    "nor vmap for these arguments: call it outside of the transform; batches need none"
                )
        elif plans is not None and (soon := plans(args, kwargs)) is not None:
            planned: T = soon
            return planned
        # The compiler takes longer to import than torch itself; if it is not imported, nothing is compiled.
        if "torch._dynamo" not in sys.modules:
            return careful(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(careful)
        return disabled(*args, **kwargs)

    # The compiler counts the versions of a code object, and gives up at eight: one object for each function.
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return functools.wraps(function)(call)
