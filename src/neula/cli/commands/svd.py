"""``neula svd``."""

from __future__ import annotations

from typing import Annotated

import typer

from neula.cli import options as opt
from neula.cli import show
from neula.cli.run import running


def svd(
    a: opt.MatrixFile,
    rank: Annotated[int | None, typer.Option(help="How many singular values and vectors.")] = None,
    tol: Annotated[
        float | None, typer.Option(help="Relative error of the approximation; takes as few as reach it.")
    ] = None,
    accuracy: opt.AccuracyOption = None,
    engine: opt.EngineOption = opt.EngineName.auto,
    output: Annotated[str | None, opt.output_option("U, s and Vh (.npz, .h5 or .mat)")] = None,
    decimal: opt.DecimalOption = opt.Decimal.point,
    header: opt.HeaderOption = None,
    missing: opt.MissingOption = opt.Missing.error,
    stream: opt.StreamOption = False,
    memory: opt.MemoryOption = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Approximate A by a product U diag(s) Vh of low rank."""
    with running("svd", as_json) as run:
        if (rank is None) == (tol is None):
            raise ValueError("give one of --rank and --tol: the rank, or the relative error to reach")
        run.check([a], (output, 3))
        matrix = run.rows_in_blocks(a, stream=stream, memory=memory)
        if matrix is None:
            matrix = run.read({"A": a}, decimal=decimal.value, header=header, missing=missing)["A"].values
            if matrix.ndim != 2:
                raise ValueError(f"svd is for one matrix, got an array of shape {matrix.shape}")
        options = {"rank": rank, "tol": tol, "accuracy": accuracy, "engine": engine}
        result = run.compute("svd_lowrank", matrix, progress=run.progress, **options)
        run.write((output, {"U": result.U, "s": result.s, "Vh": result.Vh}))
    reached = None if result.qr.converged else show.certificate(result.qr.certificate)
    run.finish(show.svd(result), reached=reached)
