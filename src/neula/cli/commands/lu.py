"""``neula lu``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from neula.cli import show
from neula.cli.options import (
    Decimal,
    DecimalOption,
    EngineName,
    EngineOption,
    HeaderOption,
    JsonOption,
    MatrixFile,
    output_option,
)
from neula.cli.run import running

Pivot = StrEnum("Pivot", ["partial", "none"])


def lu(
    a: MatrixFile,
    pivot: Annotated[
        Pivot, typer.Option(help="none is faster, and only for matrices that need no pivots.")
    ] = Pivot.partial,
    compute: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT", help="What operands of products are rounded to; by default the cheapest."
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="What L and U are kept in; by default that of --compute."),
    ] = None,
    engine: EngineOption = EngineName.auto,
    output: Annotated[str | None, output_option("L, U and the permutation (.npz, .h5 or .mat)")] = None,
    decimal: DecimalOption = Decimal.point,
    header: HeaderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Factorize A = LU with interchanges of rows, in low precision unless --compute says otherwise.

    The factors are there to be studied: neula solve solves systems, to an accuracy that it certifies.
    """
    import numpy as np
    import torch

    from neula.engines import select_engine

    with running("lu", as_json) as run:
        run.check([a], (output, 3))
        matrix = run.read({"A": a}, decimal=decimal.value, header=header)["A"].values
        if compute is None and storage is None:  # what the papers are about
            compute = select_engine(engine.value, torch.device("cpu")).format.name
        options = {"pivot": pivot, "compute": compute, "storage": storage, "engine": engine}
        factors = run.compute("lu_factor", matrix, progress=run.progress, **options)
        lower, upper, permutation = factors.L, factors.U, np.asarray(factors.permutation, dtype=np.int64)
        run.write((output, {"L": lower, "U": upper, "permutation": permutation}))
    rows = np.take_along_axis(matrix, permutation[..., np.newaxis], axis=-2)
    run.finish(show.lu(factors, rows, lower, upper), judged=False)
