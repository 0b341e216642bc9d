"""``neula cholesky``."""

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
    output_option,
)
from neula.cli.run import running


def cholesky(
    a: MatrixFile,
    upper: Annotated[
        bool, typer.Option("--upper", help="U with A = U'U, from the upper triangle of A, in place of L.")
    ] = False,
    accuracy: AccuracyOption = None,
    engine: EngineOption = EngineName.auto,
    output: Annotated[str | None, output_option("L, or U")] = None,
    decimal: DecimalOption = Decimal.point,
    header: HeaderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Factorize a symmetric positive definite A = LL'; only its lower triangle is read."""
    with running("cholesky", as_json) as run:
        run.check([a], (output, 1))
        matrix = run.read({"A": a}, decimal=decimal.value, header=header)["A"].values
        result = run.compute(
            "cholesky", matrix, upper=upper, accuracy=accuracy, engine=engine, progress=run.progress
        )
        run.write((output, {"U" if upper else "L": result.factor}))
    error = f"residual {result.residual:.1e}, bound {result.bound:.1e}"
    run.finish(show.cholesky(result), reached=None if result.converged else error)
