"""``neula svd``."""

from __future__ import annotations

from typing import Annotated

import typer

from neula.cli import options as opt
from neula.cli import show
from neula.cli.run import running


def svd(
    a: opt.MatrixFile,
    rank: Annotated[
        int | None, typer.Option(help="How many singular values and vectors; all by default.")
    ] = None,
    tol: Annotated[
        float | None, typer.Option(help="Relative error of the approximation; takes as few as reach it.")
    ] = None,
    values_only: opt.ValuesOnlyOption = False,
    accuracy: opt.AccuracyOption = None,
    engine: opt.EngineOption = opt.EngineName.auto,
    output: Annotated[
        str | None, opt.output_option("U, s and Vh (.npz, .h5 or .mat); any kind with --values-only")
    ] = None,
    decimal: opt.DecimalOption = opt.Decimal.point,
    header: opt.HeaderOption = None,
    missing: opt.MissingOption = opt.Missing.error,
    stream: opt.StreamOption = False,
    memory: opt.MemoryOption = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Decompose A = U diag(s) Vh; with --rank or --tol, approximate it by such a product of low rank."""
    with running("svd", as_json) as run:
        if rank is not None and tol is not None:
            raise ValueError("give one of --rank and --tol: the rank, or the relative error to reach")
        run.check([a], (output, 1 if values_only else 3))
        matrix = run.rows_in_blocks(a, stream=stream, memory=memory)
        if matrix is None:
            matrix = run.read({"A": a}, decimal=decimal.value, header=header, missing=missing)["A"].values
            if matrix.ndim != 2:
                raise ValueError(f"svd is for one matrix, got an array of shape {matrix.shape}")
        common = {"accuracy": accuracy, "engine": engine, "progress": run.progress}
        if rank is None and tol is None:
            whole = {"full_matrices": False, "compute_uv": not values_only}
            result = run.compute("svd", matrix, **whole, **common)
        else:
            result = run.compute("svd_lowrank", matrix, rank=rank, tol=tol, **common)
        names = ("s",) if values_only else ("U", "s", "Vh")
        run.write((output, {name: getattr(result, name) for name in names}))
    reached = None if result.qr.converged else show.certificate(result.qr.certificate)
    run.finish(show.svd(result), reached=reached)
