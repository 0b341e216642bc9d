"""``neula solve``, ``neula lu`` and ``neula cholesky``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from neula.cli import options as opt
from neula.cli import show
from neula.cli.run import running
from neula.cli.solutions import finish_solution, named

Structure = StrEnum("Structure", ["gen", "pos"])
Pivot = StrEnum("Pivot", ["partial", "none"])
VARIANT = "5.2/5.1"
"""Defaults of ``neula.lu_factor``."""


def solve(
    a: opt.MatrixFile,
    b: opt.RightHandSideFile,
    assume_a: Annotated[
        Structure, typer.Option("--assume-a", help="pos: A is positive definite, symmetric or Hermitian.")
    ] = Structure.gen,
    accuracy: opt.AccuracyOption = None,
    certify: opt.CertifyOption = opt.Certify.backward,
    engine: opt.EngineOption = opt.EngineName.auto,
    output: opt.SolutionOption = None,
    decimal: opt.DecimalOption = opt.Decimal.point,
    header: opt.HeaderOption = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Solve the linear system Ax = b with a square matrix A."""
    with running("solve", as_json) as run:
        run.check([a, b], (output, 1))
        given = run.read({"A": a, "b": b}, decimal=decimal.value, header=header)
        result = run.compute(
            "solve",
            given["A"].values,
            given["b"].values,
            assume_a=assume_a,
            accuracy=accuracy,
            certify=certify,
            engine=engine,
            progress=run.progress,
        )
        run.write((output, {"x": named(result.x, given["A"], given["b"])}))
    finish_solution(run, result, show.solve(result), given["A"])


def lu(
    a: opt.MatrixFile,
    variant: Annotated[
        str,
        typer.Option(metavar="NUMBER", help="Algorithm of Lopez and Mary: 2.1, 3.1, 4.1, 5.1, 5.2/5.1, ..."),
    ] = VARIANT,
    block: Annotated[
        int | None, typer.Option("--block", "--panel", min=1, help="Columns r of a panel; 256 in the paper.")
    ] = None,
    inner_panel: Annotated[
        str | None,
        typer.Option(
            metavar="s[,t]",
            help="Columns of an inner panel of Algorithm 5.2, 8 in the paper; s,t: partitioned once more.",
        ),
    ] = None,
    pivot: Annotated[
        Pivot, typer.Option(help="none is faster, but only for matrices that need no pivoting.")
    ] = Pivot.partial,
    compute: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="Format of the operands of products; by default the cheapest."),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="Format of L and U; by default that of --compute."),
    ] = None,
    engine: opt.EngineOption = opt.EngineName.auto,
    output: Annotated[str | None, opt.output_option("L, U and the permutation (.npz, .h5 or .mat)")] = None,
    decimal: opt.DecimalOption = opt.Decimal.point,
    header: opt.HeaderOption = None,
    trace: opt.TraceOption = False,
    as_json: opt.JsonOption = False,
) -> None:
    """Factorize A = LU with interchanges of rows, in low precision unless --compute says otherwise.

    To solve systems, use neula solve, which certifies the solution.
    """
    import numpy as np
    import torch

    from neula.engines import select_engine

    with running("lu", as_json) as run:
        run.check([a], (output, 3))
        matrix = run.read({"A": a}, decimal=decimal.value, header=header)["A"].values
        if compute is None and storage is None:  # what the papers are about
            compute = select_engine(engine.value, torch.device("cpu")).format.name
        inner = None if inner_panel is None else _widths(inner_panel)
        widths: dict[str, Any] = {"variant": variant, "panel": block, "inner_panel": inner}
        options = {"pivot": pivot, "compute": compute, "storage": storage, "engine": engine} | widths
        factors = run.compute("lu_factor", matrix, progress=run.progress, **options)
        if trace:
            from neula.cli import tracing

            run.steps = tracing.show_lu(
                matrix, engine.value, compute, storage, pivoting=pivot is Pivot.partial, **widths
            )
        lower, upper, permutation = factors.L, factors.U, np.asarray(factors.permutation, dtype=np.int64)
        run.write((output, {"L": lower, "U": upper, "permutation": permutation}))
    rows = np.take_along_axis(matrix, permutation[..., np.newaxis], axis=-2)
    run.finish(show.lu(factors, rows, lower, upper), judged=False)


def _widths(text: str) -> int | tuple[int, ...]:
    """``8`` or ``8,4``."""
    try:
        widths = tuple(map(int, text.split(",")))
    except ValueError:
        raise ValueError(f"--inner-panel takes one or two widths, such as 8 or 8,4, got {text!r}") from None
    return widths[0] if len(widths) == 1 else widths


def cholesky(
    a: opt.MatrixFile,
    upper: Annotated[
        bool, typer.Option("--upper", help="U with A = U'U, from the upper triangle of A, in place of L.")
    ] = False,
    accuracy: opt.AccuracyOption = None,
    engine: opt.EngineOption = opt.EngineName.auto,
    output: Annotated[str | None, opt.output_option("L, or U")] = None,
    decimal: opt.DecimalOption = opt.Decimal.point,
    header: opt.HeaderOption = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Factorize a positive definite A = LL', symmetric or Hermitian; only its lower triangle is read."""
    with running("cholesky", as_json) as run:
        run.check([a], (output, 1))
        matrix = run.read({"A": a}, decimal=decimal.value, header=header)["A"].values
        result = run.compute(
            "cholesky", matrix, upper=upper, accuracy=accuracy, engine=engine, progress=run.progress
        )
        run.write((output, {"U" if upper else "L": result.factor}))
    error = f"residual {result.residual:.1e}, bound {result.bound:.1e}"
    run.finish(show.cholesky(result), reached=None if result.converged else error)
