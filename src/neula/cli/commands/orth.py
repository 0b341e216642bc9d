"""``neula orth``."""

from __future__ import annotations

from typing import Annotated

from neula.cli import options as opt
from neula.cli.run import running


def orth(
    a: opt.MatrixFile,
    rcond: opt.RcondOption = None,
    accuracy: opt.AccuracyOption = None,
    engine: opt.EngineOption = opt.EngineName.auto,
    output: Annotated[str | None, opt.output_option("Q")] = None,
    decimal: opt.DecimalOption = opt.Decimal.point,
    header: opt.HeaderOption = None,
    missing: opt.MissingOption = opt.Missing.error,
    as_json: opt.JsonOption = False,
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
