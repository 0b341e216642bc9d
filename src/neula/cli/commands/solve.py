"""``neula solve``."""

from __future__ import annotations

from enum import StrEnum
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
    HeaderOption,
    JsonOption,
    MatrixFile,
    RightHandSideFile,
    SolutionOption,
)
from neula.cli.run import running
from neula.cli.solutions import finish_solution, named

Structure = StrEnum("Structure", ["gen", "pos"])


def solve(
    a: MatrixFile,
    b: RightHandSideFile,
    assume_a: Annotated[
        Structure, typer.Option("--assume-a", help="pos: A is symmetric positive definite.")
    ] = Structure.gen,
    accuracy: AccuracyOption = None,
    certify: CertifyOption = Certify.backward,
    engine: EngineOption = EngineName.auto,
    output: SolutionOption = None,
    decimal: DecimalOption = Decimal.point,
    header: HeaderOption = None,
    as_json: JsonOption = False,
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
