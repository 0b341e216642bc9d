"""Argument conversion shared by the operators, and dtypes and shapes of their results."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from importlib import import_module
from typing import Any

import torch

from neula.certificates.bounds import target_format
from neula.pipeline.inputs import is_spread
from neula.pipeline.operators import accuracy_of, name_of

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shapes and dtypes of results
Tensors = tuple[torch.Tensor, ...]
COMMON = 'str? accuracy=None, str engine="auto", bool strict=False'


def common_dtype(*operands: torch.Tensor) -> torch.dtype:
    numbers = (x.dtype if x.is_floating_point() or x.is_complex() else torch.float64 for x in operands)
    return reduce(torch.promote_types, numbers)


def shapes_of_evidence(batch: tuple[int, ...], *columns: int) -> Shapes:
    """Errors of each member, of each of its columns, and whether it is accepted."""
    return (batch, torch.float64), ((*batch, *columns), torch.float64), (batch, torch.bool)


def fields_of(place: str, *names: str) -> Callable[..., Tensors]:
    """Compute function of an operator: fields of the result of a public function, ``module:name``, which is
    imported at the first call; of two operands the second one is never a vector.
    """
    module, _, function = place.partition(":")

    def compute(*operands: torch.Tensor, **options: Any) -> Tensors:
        given = system(*operands) if len(operands) == 2 else operands
        found = getattr(import_module(f"neula.problems.{module}"), function)(*given, **options)
        return tuple(getattr(found, name) for name in names)

    return compute


def system(A: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give A and b equally many dimensions, so that b is never taken for a vector."""
    most = max(A.ndim, b.ndim)
    return A.reshape(*(1,) * (most - A.ndim), *A.shape), b.reshape(*(1,) * (most - b.ndim), *b.shape)


def shapes_of_system(A: torch.Tensor, b: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    batch = tuple(torch.broadcast_shapes(A.shape[:-2], b.shape[:-2]))
    return batch, (*batch, A.shape[-1], b.shape[-1])


def are_simple(*operands: Any, engine: Any = "auto", **others: Any) -> bool:
    """Whether an operator takes them: tensors of its own, and an engine by its name."""
    whole = all(isinstance(x, torch.Tensor) and x.ndim > 0 and not is_spread(x) for x in operands)
    return isinstance(engine, str) and whole


def settings(options: dict[str, Any], *operands: torch.Tensor) -> dict[str, Any]:
    """Engine and accuracy, as fields of a result; a number stays one: only the call finds a format for it."""
    asked, dtype = accuracy_of(name_of(options.get("accuracy"))), common_dtype(*operands)
    name = repr(asked) if isinstance(asked, float) else target_format(asked, dtype).name
    return {"engine": options.get("engine", "auto"), "accuracy": name}


def certified(result: Any, A: torch.Tensor) -> Tensors:
    """Residual, loss of orthogonality, and whether both are small enough, of each matrix."""
    batch = A.shape[:-2]
    found = result.certificate if batch else [result.certificate]
    residual, orthogonality = (
        torch.tensor([getattr(c, name) for c in found], dtype=torch.float64, device="cpu").reshape(batch)
        for name in ("residual", "orthogonality")
    )
    return residual, orthogonality, torch.tensor([c.accepted for c in found], device="cpu").reshape(batch)


def worst(errors: torch.Tensor) -> torch.Tensor:
    return errors.amax() if errors.numel() else errors.new_zeros(())


def may_be_vectors(A: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether b may be one vector for each matrix, which the function warns of."""
    return b.ndim > 1 and b.shape == A.shape[:-1]
