"""``--trace``: run the algorithm of a command step by step, on its matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from neula.algorithms.corrected import corrected_product
from neula.algorithms.elimination.lu import lu_factorize
from neula.algorithms.krylov.cgls import LeastSquaresOperator, Stop, cgls, lsqr
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.orthogonal.tsqr import tsqr
from neula.algorithms.scaling import power_of_two_scales
from neula.algorithms.trace import Trace, traced
from neula.engines import FORMATS, select_engine
from neula.engines.formats import format_named
from neula.problems.orthogonal.tsqr import tree_options

LONGEST = 60  # steps in a table; the rest is counted


def _prepared(a: np.ndarray, engine_name: str, compute: str | None = None) -> tuple[torch.Tensor, Any, Trace]:
    """A matrix in an engine's storage precision; the engine, by default in its cheapest format; the trace."""
    engine = select_engine(engine_name, torch.device("cpu"))
    engine = engine if compute is None else engine.using(compute)
    if a.ndim != 2:
        raise ValueError(f"--trace shows the steps of one matrix, got an array of shape {a.shape}")
    if np.iscomplexobj(a):
        raise ValueError(f"--trace shows the steps of a real matrix, got a {a.dtype} one: leave it out")
    return torch.from_numpy(a).to(engine.device, engine.storage), engine, Trace()


def show_qr(
    a: np.ndarray, engine_name: str, panel: str | None, cutoff: int | None, accuracy: str | None
) -> Trace:
    """Recursive Gram-Schmidt QR of the scaled matrix, in the arithmetic for an accuracy."""
    matrix, engine, trace = _prepared(a, engine_name)
    if accuracy is not None:
        compute = engine.tuning.cheapest(FORMATS[accuracy])
        matrix, engine, trace = _prepared(a, engine_name, compute)
    scaled = matrix * power_of_two_scales(engine.column_max(matrix))
    rgsqrf(scaled, engine, panel=panel, cutoff=cutoff, trace=trace)
    return _shown(trace, f"rgsqrf {engine.format.name}")


def show_lu(
    a: np.ndarray, engine_name: str, compute: str | None, storage: str | None, **options: Any
) -> Trace:
    """LU factorization by one of the paper's algorithms."""
    matrix, engine, trace = _prepared(a, engine_name, compute)
    kept = None if storage is None else format_named(storage)
    lu_factorize(matrix, engine, storage=kept, trace=trace, **options)
    return _shown(trace, f"Algorithm {options['variant']} {engine.format.name}")


def show_lstsq(a: np.ndarray, b: np.ndarray, engine_name: str, algorithm: str, most: int) -> Trace:
    """R of recursive Gram-Schmidt QR, then CGLS or LSQR with it."""
    matrix, engine, trace = _prepared(a, engine_name)
    scales = power_of_two_scales(engine.column_max(matrix))
    r = rgsqrf(matrix * scales, engine, trace=trace)[1].double() / scales
    exact = torch.from_numpy(a).to(matrix.device, torch.float64)
    rhs = torch.from_numpy(b).to(matrix.device, torch.float64).reshape(len(exact), -1)
    start = torch.linalg.vector_norm(torch.linalg.solve_triangular(r.T, exact.T @ rhs, upper=False), dim=0)
    solver = lsqr if algorithm == "lsqr" else cgls
    stop = Stop(torch.finfo(torch.float64).eps * start)
    solver(LeastSquaresOperator(exact), r, rhs, stop=stop, max_iterations=most, trace=trace)
    return _shown(trace, f"rgsqrf {engine.format.name} + {solver.__name__}")


def show_tsqr(a: np.ndarray, engine_name: str, compute: str) -> Trace:
    """The tree of Householder factorizations, by default with corrected products in fp16."""
    matrix, engine, trace = _prepared(a, engine_name)
    compute = "fp16_cor" if compute == "auto" else compute
    options = tree_options(compute, traced(engine, trace), matrix.shape[1])
    tsqr((matrix * power_of_two_scales(engine.column_max(matrix)))[None], trace=trace, **options)
    return _shown(trace, f"tsqr {compute}")


def show_matmul(a: np.ndarray, b: np.ndarray, engine_name: str, compute: str | None) -> Trace:
    """The product with error correction, by default in fp16."""
    format = (compute or "fp16").removesuffix("_cor")
    (left, engine, trace), (right, *_) = (_prepared(x, engine_name, format) for x in (a, b))
    corrected_product(left, right, engine, trace=trace)
    return _shown(trace, f"corrected product in {format}")


def _shown(trace: Trace, title: str) -> Trace:
    """Print the steps as a table and the recursion as a picture, to the standard error."""
    console = Console(stderr=True)
    table = Grid(
        "step", "columns", "shape", "format", "value", title=f"trace of {title}", box=box.SIMPLE_HEAD
    )
    for row in trace.rows()[:LONGEST]:
        table.add_row(*map(escape, row.values()))
    console.print(table)
    if len(trace) > LONGEST:
        console.print(f"and {len(trace) - LONGEST} more steps, which --json has", highlight=False)
    console.print(trace.picture(), markup=False, highlight=False, soft_wrap=True)
    return trace
