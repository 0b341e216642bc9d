"""``neula cholesky``."""

from __future__ import annotations

from typing import Annotated

import typer

from neula.cli import options as opt
from neula.cli import show
from neula.cli.run import running


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
