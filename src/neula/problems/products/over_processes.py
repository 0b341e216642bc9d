"""``A^T B`` of tall matrices whose rows are distributed over processes, a product that sums over rows."""

from __future__ import annotations

from typing import Any

import torch

from neula.engines import Engine
from neula.pipeline.distributed import ColumnSharded, OverProcesses
from neula.pipeline.inputs import Spread
from neula.problems.products.matmul import matmul


def multiply_over_processes(
    A: Any, B: Any, *, compute: str | None, alpha: float, beta: float, out: Any, engine: str | Engine
) -> Any:
    """:func:`neula.matmul` of an A whose columns are spread like the rows of B.

    Raises TypeError for operands that are spread otherwise. Raises ValueError if ``out`` is given.
    """
    if out is not None or beta != 0.0:
        raise ValueError("out= and beta= are for whole matrices: leave them out over processes")
    is_transposed = isinstance(A, ColumnSharded) or (
        isinstance(A, torch.Tensor) and not isinstance(A, Spread) and _is_sharded_by_columns(A)
    )
    if not is_transposed:
        raise TypeError(
            "over processes matmul takes A^T B of tall matrices: pass A.T, the transpose of a matrix whose "
            "rows are distributed. For A B with a B that every process has, multiply the rows of each"
        )
    return _transposed_product(A.T, B, compute=compute, alpha=alpha, engine=engine)


def _is_sharded_by_columns(a: torch.Tensor) -> bool:
    placements: Any = getattr(a, "placements", ())
    return a.ndim == 2 and len(placements) == 1 and placements[0].is_shard(1)


@OverProcesses(
    lambda product, tall, replicated: replicated(product),
    operands=("A", "B"),
    wide=lambda asked: True,
)
def _transposed_product(A: Any, B: Any, *, compute: str | None, alpha: float, engine: Any) -> torch.Tensor:
    """Products of the rows here, in the dtype of the sums, added up and rounded once."""
    dtype = torch.promote_types(A.dtype, B.dtype)
    if compute is None and dtype.itemsize == 2:
        own = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
        compute = own if own in engine.formats else "fp32"
    wide = torch.promote_types(dtype, torch.float32)
    here = (x.to(wide if x.is_complex() else wide.to_real()) for x in (A.T, B))
    part = matmul(*here, compute=compute, alpha=alpha, engine=engine.alone)
    total = engine.over_rows.agree(engine.over_rows.total(part))
    product = total.to(dtype)
    if bool((product.isinf() & total.isfinite()).any()):
        raise OverflowError(f"the result does not fit {dtype}: pass the input in a wider dtype")
    return product
