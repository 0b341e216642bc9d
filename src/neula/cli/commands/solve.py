"""``neula solve``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from neula.cli import options as opt
from neula.cli import show
from neula.cli.run import running
from neula.cli.solutions import finish_solution, named

Structure = StrEnum("Structure", ["gen", "pos"])


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
