"""Observations: an intercept in addition to the columns of A, and the weights of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from neula.engines.formats import in_double
from neula.errors import counted
from neula.pipeline.call import Call
from neula.pipeline.inputs import Taken, take
from neula.pipeline.shapes import broadcast_system


def row_factors(weights: Any, sigma: Any, sample_weight: Any) -> Any:
    """Factors of the rows: ``weights``, the reciprocals of ``sigma``, or the roots of ``sample_weight``.

    Raises ValueError for several of them; for standard deviations that are not positive, and squares that are
    negative.
    """
    given = {"weights": weights, "sigma": sigma, "sample_weight": sample_weight}
    named = [name for name, x in given.items() if x is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} say the same: pass one of them")
    if not named or weights is not None:
        return weights
    (name,) = named
    x = take(given[name], name, differentiable=True).graph.double()
    wrong = ~(x > 0) if sigma is not None else ~(x >= 0)
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        wanted = "standard deviations must be positive" if sigma is not None else "must not be negative"
        raise ValueError(f"{name}{place} is {float(x[tuple(place)])}: {wanted}")
    return 1 / x if sigma is not None else x.sqrt()


def with_intercept(call: Call, damp: float) -> Call:
    """A call with a column of ones before those of A, and rows below that damp all other columns.

    The damped problem is ``min ||[1 A; 0 damp I] x - [b; 0]||``, in which nothing damps the intercept.

    Raises ValueError over processes, and for shapes that do not fit.
    """
    if call.engine.over_rows.spread:
        raise ValueError("intercept=True is for whole matrices: put a column of ones into the rows of A")
    a, b = (x.graph for x in call.operands.values())
    shapes = broadcast_system(a, b)
    bordered = torch.cat([a.new_ones(*a.shape[:-1], 1), a], -1)
    w = call.weights
    if damp:
        n = a.shape[-1]
        rows = torch.nn.functional.pad(damp * torch.eye(n, dtype=torch.float64, device=a.device), (1, 0))
        bordered = torch.cat([in_double(bordered), rows.expand(*a.shape[:-2], n, n + 1)], -2)
        below = shapes.b.new_zeros(*shapes.b.shape[:-2], n, shapes.b.shape[-1])
        b = torch.cat([shapes.b, below], -2)
        b = b[..., 0] if shapes.is_vector else b
        w = None if w is None else _like(w, torch.cat([w.graph, w.graph.new_ones(n)]))
    given = zip(call.operands.items(), (bordered, b), strict=True)
    return replace(call, operands={name: _like(taken, x) for (name, taken), x in given}, weights=w)


def with_intercept_of_constraints(c: torch.Tensor, n: int) -> torch.Tensor:
    """C with a column of zeros for the intercept, unless it has one.

    Raises ValueError for another number of columns.
    """
    if c.ndim == 2 and c.shape[1] == n - 1:
        return torch.nn.functional.pad(c, (1, 0))
    if c.ndim != 2 or c.shape[1] != n:
        columns = counted(n - 1, "column")
        raise ValueError(
            f"C must have {columns}, as A has, or one more, the first, for the intercept, and has shape "
            f"{tuple(c.shape)}"
        )
    return c


def _like(taken: Taken, graph: torch.Tensor) -> Taken:
    return replace(taken, tensor=graph.detach().resolve_neg(), graph=graph)
