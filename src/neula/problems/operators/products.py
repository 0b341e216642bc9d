"""``torch.ops.neula.matmul``."""

from __future__ import annotations

from typing import Any

import torch

from neula.pipeline import derivatives
from neula.pipeline.operators import Operator, refuse_variable
from neula.problems.operators.arguments import Shapes, Tensors, are_simple, common_dtype


def _matmul(A: torch.Tensor, B: torch.Tensor, **options: Any) -> Tensors:
    from neula.problems.products.matmul import matmul

    return (matmul(A, B, **options),)


def _shapes_of_product(A: torch.Tensor, B: torch.Tensor) -> Shapes:
    batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    return (((*batch, A.shape[-2], B.shape[-1]), common_dtype(A, B)),)


def _multiply(**options: Any) -> Any:
    return lambda a, b: MATMUL.by_name(a, b, **options)[0]


MATMUL = Operator(
    'matmul(Tensor A, Tensor B, str? compute=None, float alpha=1.0, str engine="auto") -> Tensor',
    derivatives.ProductFunction,
    _matmul,
    _shapes_of_product,
    _multiply,
)


def traced_matmul(
    A: Any, B: Any, *, beta: float = 0.0, out: Any = None, **options: Any
) -> torch.Tensor | None:
    if out is not None or beta != 0.0 or not are_simple(A, B, **options):
        return None
    refuse_variable(options.get("alpha", 1.0), "alpha")
    rows, columns = A.ndim == 1, B.ndim == 1
    left, right = A.unsqueeze(0) if rows else A, B.unsqueeze(1) if columns else B
    (product,) = MATMUL.by_name(left, right, **options)
    product = product.squeeze(-2) if rows else product
    return product.squeeze(-1) if columns else product
