"""``neula orth``."""

from __future__ import annotations

from typing import Annotated

from neula.cli.options import (
    AccuracyOption,
    Decimal,
    DecimalOption,
    EngineName,
    EngineOption,
    HeaderOption,
    JsonOption,
    MatrixFile,
    Missing,
    MissingOption,
    RcondOption,
    output_option,
)
from neula.cli.run import running


def orth(
    a: MatrixFile,
    rcond: RcondOption = None,
    accuracy: AccuracyOption = None,
    engine: EngineOption = EngineName.auto,
    output: Annotated[str | None, output_option("Q")] = None,
    decimal: DecimalOption = Decimal.point,
    header: HeaderOption = None,
    missing: MissingOption = Missing.error,
    as_json: JsonOption = False,
) -> None:
    """Orthonormal basis of the columns of A; with --rcond of its numerical range."""
    with running("orth", as_json) as run:
        run.check([a], (output, 1))
        matrix = run.read({"A": a}, decimal=decimal.value, header=header, missing=missing)["A"].values
        q = run.compute("orth", matrix, rcond=rcond, accuracy=accuracy, engine=engine, progress=run.progress)
        run.write((output, {"Q": q}))
    facts = {"converged": run.missed is None, "columns": q.shape[-1], "rcond": rcond}
    columns = f"{q.shape[-1]}, of {matrix.shape[-1]} in A" + ("" if rcond is None else f" (rcond {rcond:g})")
    run.finish((facts, {"columns": columns}), reached=run.missed)
