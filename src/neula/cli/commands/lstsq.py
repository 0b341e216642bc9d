"""``neula lstsq``."""

from __future__ import annotations

from typing import Annotated

import typer

from neula.cli import show
from neula.cli.options import (
    AccuracyOption,
    Certify,
    CertifyOption,
    Decimal,
    DecimalOption,
    EngineName,
    EngineOption,
    JsonOption,
    MatrixFile,
    Missing,
    MissingOption,
    RcondOption,
    RightHandSideFile,
    SolutionOption,
    WeightsOption,
)
from neula.cli.run import running
from neula.cli.solutions import finish_solution, named, unread, with_intercept


def lstsq(
    a: MatrixFile,
    b: RightHandSideFile,
    accuracy: AccuracyOption = None,
    certify: CertifyOption = Certify.backward,
    damp: Annotated[float, typer.Option(help="Minimize ||Ax - b||^2 + damp^2 ||x||^2.")] = 0.0,
    intercept: Annotated[
        bool, typer.Option("--intercept", help="Add a column of ones to A, before the others.")
    ] = False,
    rcond: RcondOption = None,
    engine: EngineOption = EngineName.auto,
    output: SolutionOption = None,
    weights: WeightsOption = None,
    decimal: DecimalOption = Decimal.point,
    missing: MissingOption = Missing.error,
    as_json: JsonOption = False,
) -> None:
    """Solve the least-squares problem min ||Ax - b||; with m < n, the solution of minimum norm.

    Columns of tables go by their names: neula lstsq table.csv:x1,x2 table.csv:y --intercept

    An A in a .npy file that does not fit into memory is read block by block, two or three times.
    """
    with running("lstsq", as_json) as run:
        if intercept and damp:
            raise ValueError(
                "--damp would damp the intercept, too: leave out --intercept, and subtract the mean of each "
                "column from A and b"
            )
        run.check([a, b, weights], (output, 1))
        rows = None if intercept else run.rows_that_do_not_fit(a)
        files = {"A": a if rows is None else None, "b": b, "weights": weights}
        given = run.read(files, decimal=decimal.value, missing=missing)
        table = unread(rows) if rows is not None else with_intercept(given["A"]) if intercept else given["A"]
        result = run.compute(
            "lstsq",
            table.values,
            given["b"].values,
            weights=given["weights"].values if weights else None,
            damp=damp,
            rcond=rcond,
            accuracy=accuracy,
            certify=certify,
            engine=engine,
            progress=run.progress,
        )
        run.write((output, {"x": named(result.x, table, given["b"])}))
    m, n = table.values.shape[-2:]
    finish_solution(run, result, show.lstsq(result, n if damp else min(m, n)), table)
