"""Complex right-hand sides of real matrices, as twice as many real ones: A is not made complex."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from neula.pipeline.call import Call
from neula.pipeline.result import SolutionResult
from neula.pipeline.shapes import BatchedProblem

R = TypeVar("R", bound=SolutionResult)


def has_parts(a: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether only the right-hand sides are complex, given the dtype of the result."""
    return dtype.is_complex and not a.is_complex()


def real_columns(b: torch.Tensor) -> torch.Tensor:
    """``[Re B, Im B]``, shape (..., m, 2 k)."""
    return torch.cat([b.real, b.imag], -1)


def complex_columns(x: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`real_columns`."""
    return torch.complex(*x.split(x.shape[-1] // 2 or 1, -1)) if x.shape[-1] else x.to(x.dtype.to_complex())


def applied(apply: Callable[[torch.Tensor], torch.Tensor], a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``apply(x)``, a linear function of the columns of x made of A, also where only x is complex."""
    return complex_columns(apply(real_columns(x))) if has_parts(a, x.dtype) else apply(x)


def larger_part(errors: torch.Tensor) -> torch.Tensor:
    """The larger of what is known of both parts of each column, which bounds that of the complex one.

    With ``||x|| ^2 = ||x1||^2 + ||x2||^2`` a relative error of both parts is one of x.
    """
    return torch.maximum(*errors.split(errors.shape[-1] // 2, -1)) if errors.shape[-1] else errors


def by_parts(call: Call, shapes: BatchedProblem, solve: Callable[[torch.Tensor, torch.Tensor], R]) -> R:
    """Solutions for complex right-hand sides of real matrices.

    ``call``: of A and b. ``solve``: solves for real tensors.
    """
    a, b = (taken.graph for taken in call.operands.values())
    found = solve(a, real_columns(b.unsqueeze(-1) if shapes.is_vector else b))
    return _joined(call, shapes, found)


def _joined(call: Call, shapes: BatchedProblem, found: R) -> R:
    x, errors, pending = complex_columns(found.x), larger_part(found.forward_errors), found._pending
    if shapes.is_vector:
        x, errors = x.squeeze(-1), errors.squeeze(-1)
    wrap = call.first.wrap
    known = {name: wrap(getattr(found, name)) for name in ("accepted", "backward_errors", "conditions")}
    return replace(
        found,
        x=wrap(x),
        forward_errors=wrap(errors),
        **known,
        _pending=None if pending is None else lambda: _joined(call, shapes, pending()),
    )
