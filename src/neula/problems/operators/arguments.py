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


def results_of(*results: str) -> Callable[..., Shapes]:
    """Shapes and dtypes of results, by the sizes m, n and k = min(m, n) of A, and p of the columns of b.

    ``"m k"`` is a matrix, or a batch, in the common dtype of the operands; ``"float64 p"`` has another dtype,
    or the dtype of the parts of complex numbers (``"real"``); ``"bool"`` is one element for each matrix.
    """

    def shapes(A: torch.Tensor, *others: torch.Tensor) -> Shapes:
        common, (m, n) = common_dtype(A, *others), A.shape[-2:]
        batch = torch.broadcast_shapes(*(x.shape[:-2] for x in (A, *others)))
        sizes = {"m": m, "n": n, "k": min(m, n), "p": others[0].shape[-1] if others else 0}
        found = []
        for words in map(str.split, results):
            name = words.pop(0) if words[0] not in sizes else ""
            dtype = common.to_real() if name == "real" else getattr(torch, name) if name else common
            found.append(((*batch, *(sizes[size] for size in words)), dtype))
        return tuple(found)

    return shapes


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


OF_ALL = {"residuals": "residual", "orthogonalities": "orthogonality"}
OF_ALL |= {"backward_errors": "backward_error", "forward_errors": "forward_error"}
"""Fields with the largest of the errors of a batch."""


def unread(accepted: torch.Tensor, **errors: torch.Tensor) -> dict[str, Any]:
    """Evidence of a result whose numbers may not be read: they stay tensors."""
    known: dict[str, Any] = {"converged": accepted.all(), "accepted": accepted, **errors}
    return known | {OF_ALL[name]: worst(x) for name, x in errors.items()}


def may_be_vectors(A: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether b may be one vector for each matrix, which the function warns of."""
    return b.ndim > 1 and b.shape == A.shape[:-1]
