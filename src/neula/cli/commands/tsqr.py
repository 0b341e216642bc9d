"""``neula tsqr``."""

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
    FactorsOption,
    HeaderOption,
    JsonOption,
    MatrixFile,
    Missing,
    MissingOption,
    Mode,
    QFileOption,
    RFileOption,
)
from neula.cli.orthogonal import check_factors, write_factors
from neula.cli.run import running

Compute = StrEnum("Compute", ["auto", "fp16_cor", "fp16_nocor", "tf32_cor", "tf32_nocor", "fp32_notc"])
TsqrMode = StrEnum(
    "TsqrMode", ["reduced", "r", "fp16_cor", "fp16_nocor", "tf32_cor", "tf32_nocor", "fp32_notc"]
)


def tsqr(
    a: MatrixFile,
    mode: Annotated[
        TsqrMode,
        typer.Option(
            case_sensitive=False,
            help="Compute Q and R, or R alone; or a mode of the slides, as FP16_Cor, the same as --compute.",
        ),
    ] = TsqrMode.reduced,
    compute: Annotated[
        Compute,
        typer.Option(
            case_sensitive=False,
            help="auto: the fastest way to the accuracy of A; others: the tree of Ootomo and Yokota.",
        ),
    ] = Compute.auto,
    engine: EngineOption = EngineName.auto,
    output: FactorsOption = None,
    q_file: QFileOption = None,
    r_file: RFileOption = None,
    decimal: DecimalOption = Decimal.point,
    header: HeaderOption = None,
    missing: MissingOption = Missing.error,
    as_json: JsonOption = False,
) -> None:
    """Factorize A = QR for a tall and skinny A, of at most 256 columns."""
    with running("tsqr", as_json) as run:
        if mode.value not in list(Mode):
            compute, mode = Compute(mode.value), TsqrMode.reduced
        check_factors(run, a, Mode(mode.value), output, q_file, r_file)
        table = run.read({"A": a}, decimal=decimal.value, header=header, missing=missing)["A"]
        result = run.compute("tsqr", table.values, mode=mode, compute=compute, engine=engine)
        write_factors(run, result, table, output, q_file, r_file)
    reached = None if result.converged else show.certificate(result.certificate)
    run.finish(show.qr(result), reached=reached)
