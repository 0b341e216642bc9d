"""``neula svd``."""

from __future__ import annotations

from typing import Annotated

import typer

from neula.cli import show
from neula.cli.options import (
    AccuracyOption,
    Decimal,
    DecimalOption,
    EngineName,
    EngineOption,
    HeaderOption,
    JsonOption,
    MatrixFile,
    MemoryOption,
    Missing,
    MissingOption,
    StreamOption,
    output_option,
)
from neula.cli.run import running


def svd(
    a: MatrixFile,
    rank: Annotated[int | None, typer.Option(help="How many singular values and vectors.")] = None,
    tol: Annotated[
        float | None, typer.Option(help="As many as make the relative error of the approximation this small.")
    ] = None,
    accuracy: AccuracyOption = None,
    engine: EngineOption = EngineName.auto,
    output: Annotated[str | None, output_option("U, s and Vh (.npz, .h5 or .mat)")] = None,
    decimal: DecimalOption = Decimal.point,
    header: HeaderOption = None,
    missing: MissingOption = Missing.error,
    stream: StreamOption = False,
    memory: MemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Approximate A by a product U diag(s) Vh of low rank."""
    with running("svd", as_json) as run:
        if (rank is None) == (tol is None):
            raise ValueError("give one of --rank and --tol: the rank, or the relative error to reach")
        run.check([a], (output, 3))
        matrix = run.rows_in_blocks(a, stream=stream, memory=memory)
        if matrix is None:
            matrix = run.read({"A": a}, decimal=decimal.value, header=header, missing=missing)["A"].values
        options = {"rank": rank, "tol": tol, "accuracy": accuracy, "engine": engine}
        result = run.compute("svd_lowrank", matrix, progress=run.progress, **options)
        run.write((output, {"U": result.U, "s": result.s, "Vh": result.Vh}))
    reached = None if result.qr.converged else show.certificate(result.qr.certificate)
    run.finish(show.svd(result), reached=reached)
